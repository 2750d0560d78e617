"""Conformance of engine adapters. Another adapter joins by one more entry in `ADAPTERS`."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tr_tiny import save_tiny_model

from rljob_trainer.engines.contract import (
    EngineSettings,
    FinishReason,
    GenerateRequest,
    LogProbMode,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.engines.native import NativeEngine
from rljob_trainer.engines.sampling import choose_tokens, draw_sample_noise
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.packed_batch import pack_sequences
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.sync.buckets import build_bucket, combine_checksums, compute_tensor_checksum

ADAPTERS = {"native": NativeEngine}
STOP_IDS = (1, 2)
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14], [15, 16, 17]]


@pytest.fixture(params=list(ADAPTERS))
def make_engine(request, tiny_model):
    engines = []

    def make(**overrides):
        engine = ADAPTERS[request.param]()
        settings = {
            "model_source": tiny_model,
            "model_revision": None,
            "dtype": "Float32",
            "device": "cpu",
            "stop_token_ids": STOP_IDS,
            "num_threads": 1,
        }
        engine.start(EngineSettings(**(settings | overrides)))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()


def requests(prompts=PROMPTS, num_samples=4, seed=42, step=1):
    return [GenerateRequest(f"p{prompt[0]}", prompt, num_samples, seed, step) for prompt in prompts]


def generate(engine, items, **params):
    values = {"max_tokens": 12, "temperature": 1.0} | params
    groups = list(engine.generate(items, SamplingParams(**values)))
    assert sorted(group.uid for group in groups) == sorted(item.uid for item in items)
    return {group.uid: group.samples for group in groups}


def tokens(groups):
    return {uid: [sample.token_ids for sample in samples] for uid, samples in groups.items()}


def test_probe_works_before_start():
    for adapter in ADAPTERS.values():
        info = adapter().probe()
        assert info.name
        assert info.version
        assert info.log_prob_mode is LogProbMode.TEMPERED
        assert PauseMode.KEEP in info.pause_modes


def test_every_request_is_answered_with_all_its_samples(make_engine):
    engine = make_engine()
    items = [GenerateRequest("a", [3, 4], 1, 42, 1), GenerateRequest("b", [5], 7, 42, 1)]
    groups = generate(engine, items)
    assert [len(groups["a"]), len(groups["b"])] == [1, 7]
    for samples in groups.values():
        for sample in samples:
            assert sample.log_probs.shape == (len(sample.token_ids),)
            assert sample.log_probs.dtype == np.float32
            assert 1 <= len(sample.token_ids) <= 12
            assert sample.weight_version == 0
            ended = sample.token_ids[-1] in STOP_IDS
            assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert not set(sample.token_ids[:-1]) & set(STOP_IDS)
            assert ended or len(sample.token_ids) == 12


def test_every_stop_id_ends_a_response(make_engine):
    """With both ids some samples end on each; without them nothing stops before the limit."""
    ends = {
        sample.token_ids[-1]
        for samples in generate(make_engine(), requests(num_samples=64), max_tokens=40).values()
        for sample in samples
        if sample.finish_reason is FinishReason.STOP
    }
    assert ends == set(STOP_IDS)
    lengths = {
        len(sample.token_ids)
        for samples in generate(make_engine(stop_token_ids=(39_000,)), requests()).values()
        for sample in samples
    }
    assert lengths == {12}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_trainers(make_engine, tiny_model, temperature):
    """Step-0 self-check: left-padded decoding with a cache against the packed forward, 1e-5 in fp32."""
    groups = generate(make_engine(), requests(), temperature=temperature)
    prompts = {item.uid: item.prompt_ids for item in requests()}
    pairs = [(prompts[uid], sample) for uid, samples in groups.items() for sample in samples]
    policy = PolicyModel(load_causal_lm(tiny_model))
    with torch.no_grad():
        pack = pack_sequences(
            [prompt for prompt, _ in pairs], [sample.token_ids for _, sample in pairs], torch.device("cpu")
        )
        expected, _ = policy(pack, temperature=temperature)
    np.testing.assert_allclose(
        np.concatenate([sample.log_probs for _, sample in pairs]), expected.numpy(), rtol=1e-5, atol=2e-5
    )


def test_samples_do_not_depend_on_the_batch(make_engine):
    engine, narrow = make_engine(), make_engine(max_concurrent_samples=3)
    together = tokens(generate(engine, requests()))
    assert together == tokens(generate(engine, requests()))
    assert together == tokens(generate(engine, requests(PROMPTS[::-1])))
    assert together == tokens(generate(narrow, requests()))
    for item in requests():
        assert tokens(generate(engine, [item])) == {item.uid: together[item.uid]}
    few = tokens(generate(engine, requests(num_samples=2)))
    assert few == {uid: samples[:2] for uid, samples in together.items()}


def test_seed_step_and_sample_change_the_noise(make_engine):
    engine = make_engine()
    base = tokens(generate(engine, requests()))
    assert base != tokens(generate(engine, requests(seed=43)))
    assert base != tokens(generate(engine, requests(step=2)))
    assert any(len({tuple(ids) for ids in samples}) > 1 for samples in base.values())


def test_greedy_is_the_argmax_and_needs_no_seed(make_engine, tiny_model):
    engine = make_engine(stop_token_ids=(39_000,))
    groups = generate(engine, requests([[3, 4, 5]], num_samples=2), temperature=0.0, max_tokens=5)
    ids = [3, 4, 5]
    model = load_causal_lm(tiny_model, attention="eager")
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens(groups) == {"p3": [ids[3:], ids[3:]]}


def test_top_p_keeps_the_nucleus(make_engine):
    nucleus = tokens(generate(make_engine(), requests(num_samples=16), top_p=1e-9))
    greedy = tokens(generate(make_engine(), requests(num_samples=16), temperature=0.0))
    assert nucleus == greedy


def test_abort_returns_partial_responses(make_engine):
    engine = make_engine(stop_token_ids=(39_000,), max_concurrent_samples=4)
    groups = {}
    stream = engine.generate(requests(), SamplingParams(max_tokens=100, temperature=1.0))
    # The first group arrives; the abort comes while the others have not started.
    first = next(stream)
    groups[first.uid] = first.samples
    engine.abort_all()
    for group in stream:
        groups[group.uid] = group.samples
    assert set(groups) == {item.uid for item in requests()}
    reasons = {sample.finish_reason for samples in groups.values() for sample in samples}
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT}
    assert generate(engine, requests())  # and the engine works on


def test_pause_holds_and_resume_continues(make_engine):
    engine = make_engine(stop_token_ids=(39_000,))
    engine.pause(PauseMode.KEEP)
    assert engine.health().is_paused
    results = {}
    thread = threading.Thread(target=lambda: results.update(generate(engine, requests())))
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive()
    assert engine.health().num_tokens_generated == 0
    engine.resume()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert tokens(results) == tokens(generate(make_engine(stop_token_ids=(39_000,)), requests()))


def read_weights(source):
    return [(name, tensor.detach()) for name, tensor in load_causal_lm(source, attention="sdpa").named_parameters()]


def test_update_takes_over_weights_and_version(make_engine, tmp_path: Path):
    engine = make_engine()
    other = str(save_tiny_model(tmp_path, initializer_range=0.5))
    weights = read_weights(other)
    expected = combine_checksums(compute_tensor_checksum(name, tensor) for name, tensor in weights)
    assert engine.checksum() != expected
    engine.begin_update(1)
    engine.update([build_bucket(weights[:5])])
    engine.update([build_bucket(weights[5:9]), build_bucket(weights[9:])])
    assert engine.end_update() == 1
    assert engine.checksum() == expected
    assert engine.health().weight_version == 1
    updated = generate(engine, requests())
    assert tokens(updated) == tokens(generate(make_engine(model_source=other), requests()))
    assert {sample.weight_version for samples in updated.values() for sample in samples} == {1}


def test_update_refuses_what_does_not_fit(make_engine, tiny_model):
    engine = make_engine()
    weights = read_weights(tiny_model)
    with pytest.raises(EngineDied, match="without begin_update"):
        engine.update([build_bucket(weights)])
    engine.begin_update(1)
    with pytest.raises(EngineDied, match="does not have"):
        engine.update([build_bucket([("nonsense", torch.zeros(1))])])
    with pytest.raises(EngineDied, match="arrives as"):
        engine.update([build_bucket([(weights[0][0], weights[0][1].bfloat16())])])
    engine.update([build_bucket(weights[1:])])
    with pytest.raises(EngineDied, match="lacks 1 parameters"):
        engine.end_update()
    engine.update([build_bucket(weights[:1])])
    assert engine.end_update() == 1
    with pytest.raises(EngineDied, match="does not follow"):
        engine.begin_update(1)


def test_no_update_while_samples_run(make_engine):
    engine = make_engine(max_concurrent_samples=4)
    stream = engine.generate(requests(), SamplingParams(max_tokens=6, temperature=1.0))
    next(stream)
    with pytest.raises(EngineDied, match="while samples run"):
        engine.begin_update(1)
    assert len(list(stream)) == len(PROMPTS) - 1
    engine.begin_update(1)


def test_offload_is_idempotent_and_guards_generate(make_engine):
    engine = make_engine()
    before = tokens(generate(engine, requests()))
    for _ in range(2):
        engine.offload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
    assert set(engine.health().offloaded) == set(MemoryTag)
    with pytest.raises(EngineDied, match="offloaded"):
        generate(engine, requests())
    for _ in range(2):
        engine.onload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
    assert tokens(generate(engine, requests())) == before


def test_unknown_engine_arguments_are_refused(make_engine):
    with pytest.raises(ConfigurationError, match=r"spec\.rollout\.engineArgs.*mem_fraction"):
        make_engine(engine_args={"mem_fraction": 0.5})


def test_a_stopped_engine_says_so(make_engine):
    engine = make_engine()
    engine.stop()
    engine.stop()
    with pytest.raises(EngineDied, match="not started"):
        generate(engine, requests())


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
