"""What is particular to the Native engine; what all engines must do is `engine_conformance`."""

import pytest
import torch
from engine_conformance import PROMPTS, build_bucket, generate, get_tokens, make_requests
from engine_traits import STOP_IDS, make_settings

from rljob_api.v1alpha1.rollout import Engine
from rljob_trainer.engines.actor import EngineActor
from rljob_trainer.engines.contract import FinishReason, LogProbMode, MemoryTag, SamplingParams
from rljob_trainer.engines.native import NativeEngine
from rljob_trainer.engines.sampling import choose_tokens, draw_sample_noise
from rljob_trainer.models.policy import load_causal_lm

NEVER = (39_000,)


@pytest.fixture
def start(tiny_model):
    engines = []

    def start(**overrides):
        engine = NativeEngine()
        engine.start(make_settings(tiny_model, **overrides))
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def test_room_may_be_made_before_anything_was_generated_or_handed_over(tiny_model):
    """A warm start or a load comes first; the hand-over after it brings weights and cache back by itself."""
    actor = EngineActor(Engine.NATIVE)
    actor.start(make_settings(tiny_model))
    weights = [(name, tensor.detach() * 2) for name, tensor in load_causal_lm(tiny_model).named_parameters()]
    try:
        actor.offload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
        assert set(actor.health().offloaded) == set(MemoryTag)
        actor.begin_update(5)
        actor.update(build_bucket(weights))
        assert actor.end_update() == 5
        assert actor.health().offloaded == ()
        assert len(generate(actor, make_requests())) == len(PROMPTS)
    finally:
        actor.stop()


def test_log_probs_are_taken_before_top_p():
    assert NativeEngine().probe().log_prob_mode is LogProbMode.TEMPERED


def test_batches_of_a_smaller_engine_sample_the_same(start):
    wide, narrow = start(), start(max_concurrent_samples=3)
    assert get_tokens(generate(wide, make_requests())) == get_tokens(generate(narrow, make_requests()))


def test_nothing_stops_without_a_stop_id(start):
    groups = generate(start(stop_token_ids=NEVER), make_requests())
    assert {len(sample.token_ids) for samples in groups.values() for sample in samples} == {12}
    assert any(token in STOP_IDS for samples in groups.values() for sample in samples for token in sample.token_ids)


def test_batches_that_have_not_started_are_answered_after_an_abort(start):
    engine = start(stop_token_ids=NEVER, max_concurrent_samples=4)
    stream = engine.generate(make_requests(), SamplingParams(max_tokens=100, temperature=1.0))
    # The first batch is done; the abort comes while the others have not started.
    groups = {(first := next(stream)).uid: first.samples}
    engine.abort_all()
    groups |= {group.uid: group.samples for group in stream}
    assert len(groups) == len(PROMPTS)
    reasons = {sample.finish_reason for samples in groups.values() for sample in samples}
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT}
    assert generate(engine, make_requests())  # and the engine works on


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]])).expand(20_000, 4)
    noise = torch.from_numpy(draw_sample_noise(1, 2, "uid", 3, 20_000))
    chosen, log_probs = choose_tokens(logits, noise, temperature=1.0, top_p=1.0)
    shares = torch.bincount(chosen, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.015, rtol=0)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.5, 0.0, 0.3, 0.2])[chosen])
    nucleus, nucleus_log_probs = choose_tokens(logits, noise, temperature=1.0, top_p=0.7)
    assert set(nucleus.tolist()) == {0, 2}
    # Log-probabilities stay those of the full distribution: what the trainer recomputes.
    torch.testing.assert_close(nucleus_log_probs.exp(), torch.tensor([0.5, 0.0, 0.3, 0.2])[nucleus])


def test_noise_extremes_never_choose_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    chosen, _ = choose_tokens(logits, torch.tensor([0.0, 1.0 - 2**-53]), temperature=1.0, top_p=1.0)
    assert chosen.tolist() == [1, 2]
