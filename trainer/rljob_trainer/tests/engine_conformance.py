"""What every rollout engine must do, whatever is behind its adapter.

A subclass of `EngineConformance` names the engine (test_tr_engine_conformance.py). One engine of a tiny Qwen2 in
float32 serves all tests of a class, since real engines take half a minute to start; the last tests kill and stop it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_traits import MAX_SEQUENCE_TOKENS, STOP_IDS, Traits
from tr_tiny import save_architecture, save_tiny_model

from rljob_api.v1alpha1.model import DType
from rljob_trainer.engines.child_guard import list_descendants, read_start_time
from rljob_trainer.engines.contract import (
    EngineAdapter,
    EngineSettings,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
    LogProbMode,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.packed_batch import pack_sequences
from rljob_trainer.models.policy import TORCH_DTYPES, PolicyModel, load_causal_lm
from rljob_trainer.sync.buckets import build_bucket, combine_checksums, compute_tensor_checksum

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14], [15, 16, 17]]
WAIT_SECONDS = 240.0

Groups = dict[str, list[GeneratedSample]]


def make_requests(
    prompts: list[list[int]] | None = None, num_samples: int = 4, seed: int = 42, step: int = 1
) -> list[GenerateRequest]:
    return [GenerateRequest(f"p{prompt[0]}", prompt, num_samples, seed, step) for prompt in prompts or PROMPTS]


def generate(engine: EngineAdapter, requests: list[GenerateRequest], **params: Any) -> Groups:
    values: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0} | params
    groups = list(engine.generate(requests, SamplingParams(**values)))
    assert sorted(group.uid for group in groups) == sorted(request.uid for request in requests)
    return {group.uid: group.samples for group in groups}


def get_tokens(groups: Groups) -> dict[str, list[list[int]]]:
    return {uid: [sample.token_ids for sample in samples] for uid, samples in groups.items()}


class Background:
    """`generate` in a thread, as an actor runs it while others call in."""

    def __init__(self, engine: EngineAdapter, requests: list[GenerateRequest], **params: Any) -> None:
        self._engine = engine
        self.groups: Groups = {}
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.groups = generate(engine, requests, **params)
            except BaseException as error:  # noqa: BLE001 - checked by the test
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait_for_tokens(self, seen: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self.is_running and self._engine.health().num_tokens_generated == seen:
            assert time.monotonic() < deadline, f"no token within {WAIT_SECONDS:.0f} s"
            time.sleep(0.005)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Groups:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "generate does not end"
        if self.error is not None:
            raise self.error
        return self.groups


def pause_in_the_middle(engine: EngineAdapter) -> Background:
    """A paused rollout with some tokens done and samples left; tries again when a fast engine was done already."""
    for step in range(100, 110):
        before = engine.health().num_tokens_generated
        background = Background(engine, make_requests(num_samples=12, step=step), max_tokens=100)
        background.wait_for_tokens(before)
        engine.pause(PauseMode.KEEP)
        time.sleep(0.2)  # samples that ended before the pause are on their way
        if background.is_running and engine.health().num_running:
            return background
        engine.resume()
        background.join()
    raise AssertionError("ten rollouts were over before they could be paused")


def read_weights(source: str, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    model = load_causal_lm(source, attention="sdpa", dtype=dtype)
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def hand_over(engine: EngineAdapter, weights: list[tuple[str, torch.Tensor]], version: int) -> int:
    """In three buckets whose borders cut through fused layers."""
    engine.begin_update(version)
    for part in (weights[:3], weights[3:10], weights[10:]):
        engine.update([build_bucket(part)])
    return engine.end_update()


def compute_expected_log_probs(source: str, groups: Groups, temperature: float, dtype: torch.dtype) -> np.ndarray:
    """The trainer's, over the sampled tokens in the order of `flatten_log_probs`."""
    prompts = {request.uid: request.prompt_ids for request in make_requests()}
    pairs = [(prompts[uid], sample.token_ids) for uid, samples in groups.items() for sample in samples]
    policy = PolicyModel(load_causal_lm(source, dtype=dtype))
    with torch.no_grad():
        pack = pack_sequences([prompt for prompt, _ in pairs], [ids for _, ids in pairs], torch.device("cpu"))
        expected, _ = policy(pack, temperature=temperature)
    return expected.numpy()


def flatten_log_probs(groups: Groups) -> np.ndarray:
    return np.concatenate([sample.log_probs for samples in groups.values() for sample in samples])


def assert_close_in_bfloat16(log_probs: np.ndarray, expected: np.ndarray) -> None:
    """2e-3 on average. A single logit of size 2 to 4 may be rounded the other way by 2**-6 at temperature 1/2."""
    difference = np.abs(log_probs - expected)
    assert difference.mean() <= 2e-3
    assert difference.max() <= 2**-5


class EngineConformance:
    """The suite; `traits` is the engine."""

    traits: Traits

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return str(save_tiny_model(tmp_path_factory.mktemp("conformance") / "model", **cls.traits.model_options))

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model: str) -> Iterator[EngineAdapter]:
        engine = cls.traits.make()
        engine.start(cls.traits.make_settings(model))
        yield engine
        engine.stop()

    @pytest.fixture
    def start(self) -> Iterator[Callable[[EngineSettings], EngineAdapter]]:
        """Engines of other settings than the shared one."""
        engines: list[EngineAdapter] = []

        def start(settings: EngineSettings) -> EngineAdapter:
            engine = self.traits.make()
            engines.append(engine)
            engine.start(settings)
            return engine

        yield start
        for engine in engines:
            engine.stop()

    def test_probe_works_before_start(self) -> None:
        info = self.traits.make().probe()
        assert info.name
        assert info.version[0].isdigit()
        assert info.log_prob_mode in (LogProbMode.TEMPERED, LogProbMode.TEMPERED_NUCLEUS)
        assert PauseMode.KEEP in info.pause_modes

    def test_unknown_engine_arguments_are_refused(self, model: str) -> None:
        with pytest.raises(ConfigurationError, match=r"spec\.rollout\.engineArgs.*mem_fraction"):
            self.traits.make().start(self.traits.make_settings(model, engine_args={"mem_fraction": 0.5}))

    def test_every_request_is_answered_with_all_its_samples(self, engine: EngineAdapter) -> None:
        requests = [GenerateRequest("a", [3, 4], 1, 42, 1), GenerateRequest("b", [5], 7, 42, 1)]
        groups = generate(engine, requests)
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
        assert engine.health().num_running == 0

    def test_every_stop_id_ends_a_response(self, engine: EngineAdapter) -> None:
        groups = generate(engine, make_requests(num_samples=32), max_tokens=60)
        samples = [sample for samples in groups.values() for sample in samples]
        ends = {sample.token_ids[-1] for sample in samples if sample.finish_reason is FinishReason.STOP}
        assert ends == set(STOP_IDS)
        assert not any(token in STOP_IDS for sample in samples for token in sample.token_ids[:-1])

    @pytest.mark.parametrize("max_tokens", [1, 6])
    def test_the_longest_sequence_is_not_cut(self, engine: EngineAdapter, max_tokens: int) -> None:
        """Prompt and response together are all of `max_sequence_tokens`, which is all the positions of the model."""
        prompt = [3 + index % 30 for index in range(MAX_SEQUENCE_TOKENS - max_tokens)]
        groups = generate(engine, [GenerateRequest("long", prompt, 16, 42, 1)], max_tokens=max_tokens)
        lengths = [len(sample.token_ids) for sample in groups["long"] if sample.token_ids[-1] not in STOP_IDS]
        assert lengths
        assert set(lengths) == {max_tokens}

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_log_probs_are_the_trainers(self, engine: EngineAdapter, model: str, temperature: float) -> None:
        groups = generate(engine, make_requests(), temperature=temperature)
        expected = compute_expected_log_probs(model, groups, temperature, self.traits.torch_dtype)
        tolerance = self.traits.tolerance
        np.testing.assert_allclose(flatten_log_probs(groups), expected, rtol=tolerance, atol=tolerance)

    def repeat(
        self, engine: EngineAdapter, requests: list[GenerateRequest] | None = None
    ) -> dict[str, list[list[int]]]:
        """Tokens that the same call gives again."""
        temperature = 1.0 if self.traits.no_seeds is None else 0.0
        return get_tokens(generate(engine, requests or make_requests(), temperature=temperature))

    def test_samples_do_not_depend_on_the_batch(self, engine: EngineAdapter) -> None:
        if self.traits.no_seeds is not None:
            pytest.skip(self.traits.no_seeds)
        together = get_tokens(generate(engine, make_requests()))
        assert together == get_tokens(generate(engine, make_requests()))
        assert together == get_tokens(generate(engine, make_requests(PROMPTS[::-1])))
        for request in make_requests():
            assert get_tokens(generate(engine, [request])) == {request.uid: together[request.uid]}
        few = get_tokens(generate(engine, make_requests(num_samples=2)))
        assert few == {uid: samples[:2] for uid, samples in together.items()}

    def test_seed_step_and_sample_change_the_noise(self, engine: EngineAdapter) -> None:
        base = get_tokens(generate(engine, make_requests()))
        if self.traits.no_seeds is None:
            again = get_tokens(generate(engine, make_requests()))
            assert base == again
        assert base != get_tokens(generate(engine, make_requests(seed=43)))
        assert base != get_tokens(generate(engine, make_requests(step=2)))
        assert any(len({tuple(ids) for ids in samples}) > 1 for samples in base.values())

    def test_greedy_is_the_argmax_and_needs_no_seed(self, engine: EngineAdapter, model: str) -> None:
        groups = generate(engine, make_requests([[3, 4, 5]], num_samples=2), temperature=0.0, max_tokens=5)
        reference = load_causal_lm(model, attention="eager", dtype=self.traits.torch_dtype)
        ids = [3, 4, 5]
        while len(ids) < 8 and not (len(ids) > 3 and ids[-1] in STOP_IDS):
            with torch.no_grad():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert get_tokens(groups) == {"p3": [ids[3:], ids[3:]]}
        expected = compute_expected_log_probs(model, groups, 1.0, self.traits.torch_dtype)
        tolerance = self.traits.tolerance
        np.testing.assert_allclose(flatten_log_probs(groups), expected, rtol=tolerance, atol=tolerance)

    def test_top_p_keeps_the_nucleus(self, engine: EngineAdapter) -> None:
        nucleus = get_tokens(generate(engine, make_requests(num_samples=16), top_p=1e-6))
        assert nucleus == get_tokens(generate(engine, make_requests(num_samples=16), temperature=0.0))

    def test_pause_holds_and_resume_continues(self, engine: EngineAdapter) -> None:
        expected = self.repeat(engine)
        before = engine.health().num_tokens_generated
        engine.pause(PauseMode.KEEP)
        assert engine.health().is_paused
        background = Background(engine, make_requests(), temperature=1.0 if self.traits.no_seeds is None else 0.0)
        time.sleep(0.5)
        assert background.is_running
        assert engine.health().num_tokens_generated == before
        engine.resume()
        engine.resume()
        assert not engine.health().is_paused
        assert get_tokens(background.join()) == expected

    def test_a_pause_in_the_middle_freezes_the_counter(self, engine: EngineAdapter) -> None:
        background = pause_in_the_middle(engine)
        seen = engine.health().num_tokens_generated
        time.sleep(0.3)
        assert engine.health().num_tokens_generated == seen
        engine.resume()
        samples = [sample for samples in background.join().values() for sample in samples]
        assert {sample.finish_reason for sample in samples} <= {FinishReason.STOP, FinishReason.LENGTH}
        assert engine.health().num_tokens_generated > seen

    def test_abort_returns_partial_responses(self, engine: EngineAdapter) -> None:
        background = pause_in_the_middle(engine)
        engine.abort_all()
        groups = background.join()
        assert set(groups) == {request.uid for request in make_requests()}
        samples = [sample for samples in groups.values() for sample in samples]
        assert len(samples) == 12 * len(PROMPTS)
        aborted = [sample for sample in samples if sample.finish_reason is FinishReason.ABORT]
        assert any(sample.token_ids for sample in aborted), "no partial response"
        for sample in aborted:
            assert len(sample.log_probs) == len(sample.token_ids) < 100
            assert not set(sample.token_ids) & set(STOP_IDS)
        engine.abort_all()  # nothing runs: nothing happens
        after = generate(engine, make_requests())
        assert FinishReason.ABORT not in {sample.finish_reason for group in after.values() for sample in group}

    def test_no_update_while_samples_run(self, engine: EngineAdapter) -> None:
        background = pause_in_the_middle(engine)
        with pytest.raises(EngineDied, match="while samples run"):
            engine.begin_update(1)
        engine.resume()
        background.join()

    def test_offload_is_idempotent_and_guards_generate(self, engine: EngineAdapter, model: str) -> None:
        before = self.repeat(engine)
        for _ in range(2):
            engine.offload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
        assert set(engine.health().offloaded) == set(MemoryTag)
        with pytest.raises(EngineDied, match="offloaded"):
            generate(engine, make_requests())
        engine.onload([MemoryTag.WEIGHTS])
        for _ in range(2):
            engine.onload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
        assert engine.health().offloaded == ()
        if self.traits.forgets_offloaded_weights:
            hand_over(engine, read_weights(model, self.traits.torch_dtype), engine.health().weight_version + 1)
        assert self.repeat(engine) == before

    def test_update_refuses_what_does_not_fit(self, engine: EngineAdapter, model: str) -> None:
        weights = read_weights(model, self.traits.torch_dtype)
        with pytest.raises(EngineDied, match="without begin_update"):
            engine.update([build_bucket(weights)])
        version = engine.health().weight_version + 1
        engine.begin_update(version)
        with pytest.raises(EngineDied, match="does not have"):
            engine.update([build_bucket([("nonsense", torch.zeros(1))])])
        with pytest.raises(EngineDied, match="arrives as"):
            engine.update([build_bucket([(weights[0][0], weights[0][1].half())])])
        engine.update([build_bucket(weights[1:])])
        with pytest.raises(EngineDied, match="lacks 1 parameters"):
            engine.end_update()
        engine.update([build_bucket(weights[:1])])
        assert engine.end_update() == version
        with pytest.raises(EngineDied, match="does not follow"):
            engine.begin_update(version)

    def test_update_takes_over_weights_and_version(self, engine: EngineAdapter, model: str, tmp_path: Path) -> None:
        other = str(save_tiny_model(tmp_path, initializer_range=0.5))
        before = self.repeat(engine)
        version = engine.health().weight_version + 3
        assert hand_over(engine, read_weights(other, self.traits.torch_dtype), version) == version
        assert engine.health().weight_version == version
        groups = generate(engine, make_requests())
        assert self.repeat(engine) != before
        assert {sample.weight_version for samples in groups.values() for sample in samples} == {version}
        expected = compute_expected_log_probs(other, groups, 1.0, self.traits.torch_dtype)
        tolerance = 5 * self.traits.tolerance  # larger logits
        np.testing.assert_allclose(flatten_log_probs(groups), expected, rtol=tolerance, atol=tolerance)
        # And back: nothing of the other weights is left, in the cache of prefixes neither.
        assert hand_over(engine, read_weights(model, self.traits.torch_dtype), version + 1) == version + 1
        assert self.repeat(engine) == before

    def test_death_of_a_process_is_typed(self, engine: EngineAdapter) -> None:
        if not self.traits.has_processes:
            pytest.skip(f"{self.traits.name} has no process of its own: its actor's death is tested with whole runs")
        background = pause_in_the_middle(engine)
        processes = list_descendants(os.getpid())
        assert processes
        for pid, _ in processes:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="engine"):
            background.join()
        with pytest.raises(EngineDied):
            engine.health()
        with pytest.raises(EngineDied):
            generate(engine, make_requests())
        engine.stop()
        assert not [pid for pid, started in processes if read_start_time(pid) == started]

    def test_a_stopped_engine_says_so(self, engine: EngineAdapter) -> None:
        engine.stop()
        engine.stop()
        with pytest.raises(EngineDied, match="not started"):
            generate(engine, make_requests())

    def test_hand_over_of_each_architecture(
        self, architecture: str, start: Callable[[EngineSettings], EngineAdapter], tmp_path: Path
    ) -> None:
        """bfloat16, by flattened buckets: checksums equal on both sides, log-probabilities within 2e-3 of the
        trainer's before and after, at temperatures 1 and 0.5."""
        dtype = TORCH_DTYPES[DType.BFLOAT16]
        sources = [
            str(save_architecture(tmp_path / str(seed), architecture, seed=seed, dtype=dtype)) for seed in (0, 1)
        ]
        engine = start(self.traits.make_settings(sources[0], dtype="BFloat16"))
        for version, source in enumerate(sources):
            if version:
                assert hand_over(engine, read_weights(source, dtype), version) == version
            for temperature in (1.0, 0.5):
                groups = generate(engine, make_requests(), temperature=temperature)
                expected = compute_expected_log_probs(source, groups, temperature, dtype)
                assert_close_in_bfloat16(flatten_log_probs(groups), expected)
            if self.traits.no_checksum is None:
                weights = read_weights(source, dtype)
                assert engine.checksum() == combine_checksums(
                    compute_tensor_checksum(name, tensor) for name, tensor in weights
                )
