"""The vLLM adapter without vLLM: its calls against signatures of three releases, memory by tag, arguments, processes.

What it does with a real engine is test_tr_engine_conformance.py.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tr_vllm_facts import load_facts, make_callable, make_signature

from rljob_trainer.engines import vllm as adapter_module
from rljob_trainer.engines.child_guard import read_start_time
from rljob_trainer.engines.child_output import ChildOutput
from rljob_trainer.engines.contract import (
    EngineSettings,
    FinishReason,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    SamplingParams,
)
from rljob_trainer.engines.vllm import VLLMEngine
from rljob_trainer.engines.vllm_arguments import TESTED_VERSIONS, build_arguments, build_environment
from rljob_trainer.engines.vllm_payload import build_payload
from rljob_trainer.engines.vllm_samples import derive_seed
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.policy import load_causal_lm
from rljob_trainer.sync.buckets import Bucket, build_bucket

FACTS = load_facts()
MODEL_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 3}
VERSIONS = pytest.mark.parametrize("version", list(FACTS))


def make_settings(**overrides: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_source": "model",
        "model_revision": None,
        "dtype": "Float32",
        "device": "cuda",
        "stop_token_ids": (1, 2),
        "max_sequence_tokens": 100,
    }
    return EngineSettings(**(values | overrides))


class FakeLLM:
    """Takes exactly the calls that the release's `AsyncLLM` takes, and keeps its rules about sleep."""

    def __init__(self, facts: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.errored = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asleep: set[str] = set()
        self.prefix_cache_is_dropped = True
        for name, parameters in facts["methods"].items():
            if name == "from_engine_args":
                continue
            answer = getattr(self, f"_{name}", None) or self._make_answer(name, name in facts["coroutines"])
            setattr(self, name, make_callable(parameters, answer))

    def _make_answer(self, name: str, is_coroutine: bool) -> Any:
        async def answer(**arguments: Any) -> None:
            self.calls.append((name, arguments))

        return answer if is_coroutine else lambda **arguments: self.calls.append((name, arguments))

    async def _generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        self.calls.append(("generate", {"prompt": prompt, "sampling_params": sampling_params}))
        tokens = [7, 1]
        log_probs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
        output = SimpleNamespace(token_ids=tokens, logprobs=log_probs, finish_reason="stop")
        yield SimpleNamespace(outputs=[output])

    async def _reset_prefix_cache(self, **_: Any) -> bool:
        return self.prefix_cache_is_dropped

    async def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert not self.asleep, "unmaps twice"
        self.calls.append(("sleep", {"level": level}))
        self.asleep = {"weights", "kv_cache"}

    async def _wake_up(self, tags: list[str] | None = None) -> None:
        assert tags, "None maps twice after a partial wake-up"
        for tag in tags:
            assert tag in self.asleep, f"{tag} is awake: maps twice"
            assert tag == "weights" or "weights" not in self.asleep, "buffers are restored with the first wake-up"
            self.asleep.discard(tag)
        self.calls.append(("wake_up", {"tags": tags}))

    async def _collective_rpc(
        self,
        method: str,
        timeout: float,  # noqa: ASYNC109 - the name is vLLM's
        args: tuple[Any, ...],
    ) -> list[Any]:
        assert timeout > 0
        self.calls.append((method, {"args": args}))
        return [None]


@pytest.fixture
def start(monkeypatch, tiny_model):
    """Starts the adapter on a fake vLLM of a version."""
    engines = []

    def start(version: str, **overrides: Any) -> tuple[VLLMEngine, FakeLLM]:
        facts = FACTS[version]
        made: list[FakeLLM] = []
        vllm = ModuleType("vllm")
        arguments_class = type("AsyncEngineArgs", (), {"__init__": lambda self, **values: vars(self).update(values)})
        arguments_class.__signature__ = make_signature(  # type: ignore[attr-defined]
            [[name, "KEYWORD_ONLY", True] for name in facts["engine_arguments"]]
        )
        vllm.AsyncEngineArgs = arguments_class  # type: ignore[attr-defined]
        sampling = make_callable(
            [[name, "KEYWORD_ONLY", True] for name in facts["sampling"]], lambda **values: SimpleNamespace(**values)
        )
        vllm.SamplingParams = sampling  # type: ignore[attr-defined]

        def from_engine_args(engine_args: Any) -> FakeLLM:
            made.append(FakeLLM(facts, vars(engine_args)))
            return made[0]

        llm = SimpleNamespace(
            from_engine_args=make_callable(facts["methods"]["from_engine_args"], from_engine_args),
        )
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        for name, content in (
            ("vllm.v1", {}),
            ("vllm.v1.engine", {}),
            ("vllm.v1.engine.async_llm", {"AsyncLLM": llm}),
            ("vllm.sampling_params", {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)}),
        ):
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(adapter_module, "read_version", lambda: version)
        monkeypatch.setattr(adapter_module, "build_environment", lambda settings: ({}, {}))
        engine = VLLMEngine()
        engine.start(make_settings(model_source=tiny_model, **overrides))
        engines.append(engine)
        return engine, made[0]

    yield start
    for engine in engines:
        engine.stop()


def read_buckets(source: str) -> list[Bucket]:
    weights = [(name, tensor.detach()) for name, tensor in load_causal_lm(source).named_parameters()]
    return [build_bucket(weights[:4]), build_bucket(weights[4:])]


def hand_over(engine: VLLMEngine, source: str, version: int) -> int:
    engine.begin_update(version)
    for bucket in read_buckets(source):
        engine.update([bucket])
    return engine.end_update()


def names_of(llm: FakeLLM) -> list[str]:
    return [name for name, _ in llm.calls]


def test_facts_cover_the_versions_that_messages_name():
    minors = [tuple(int(part) for part in version.split(".")[:2]) for version in FACTS]
    assert (min(minors), max(minors)) == TESTED_VERSIONS


@VERSIONS
def test_calls_fit_the_signatures_of_every_release(start, version, tiny_model):
    engine, llm = start(version)
    groups = list(engine.generate([GenerateRequest("a", [3, 4], 3, 42, 1)], SamplingParams(9, 0.5, 0.9)))
    (group,) = groups
    assert [sample.token_ids for sample in group.samples] == [[7, 1]] * 3
    np.testing.assert_array_equal(group.samples[0].log_probs, np.array([-7.0, -1.0], dtype=np.float32))
    assert group.samples[0].finish_reason is FinishReason.STOP
    sent = [arguments["sampling_params"] for name, arguments in llm.calls if name == "generate"]
    assert [item.n for item in sent] == [1, 1, 1]
    assert len({item.seed for item in sent}) == 3
    assert sent[0].stop_token_ids == [1, 2]
    assert (sent[0].max_tokens, sent[0].temperature, sent[0].top_p) == (9, 0.5, 0.9)
    engine.pause(PauseMode.KEEP)
    engine.resume()
    assert hand_over(engine, tiny_model, 5) == 5
    assert names_of(llm)[-4:] == ["rljob_begin_update", "rljob_update", "rljob_update", "rljob_end_update"]
    engine.stop()
    assert names_of(llm)[-1] == "shutdown"


@VERSIONS
def test_memory_by_tag_follows_vllms_rules(start, version, tiny_model):
    engine, llm = start(version)
    for _ in range(2):
        engine.offload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    assert llm.calls == [("sleep", {"level": 2})]
    engine.onload([MemoryTag.WEIGHTS])
    with pytest.raises(EngineDied, match="while memory is offloaded"):
        list(engine.generate([GenerateRequest("a", [3], 1, 42, 1)], SamplingParams(9, 1.0)))
    engine.onload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    engine.onload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    assert llm.calls[1:] == [("wake_up", {"tags": ["weights"]}), ("wake_up", {"tags": ["kv_cache"]})]
    with pytest.raises(EngineDied, match="weights were discarded"):
        list(engine.generate([GenerateRequest("a", [3], 1, 42, 1)], SamplingParams(9, 1.0)))
    hand_over(engine, tiny_model, 1)
    assert list(engine.generate([GenerateRequest("a", [3], 1, 42, 1)], SamplingParams(9, 1.0)))


def test_the_kv_cache_alone_keeps_the_weights(start):
    engine, llm = start("0.24.0")
    engine.offload([MemoryTag.KV_CACHE])
    assert llm.calls == [("sleep", {"level": 1}), ("wake_up", {"tags": ["weights"]})]
    with pytest.raises(EngineDied, match="onload it before"):
        engine.offload([MemoryTag.WEIGHTS])
    engine.onload([MemoryTag.KV_CACHE])
    assert list(engine.generate([GenerateRequest("a", [3], 1, 42, 1)], SamplingParams(9, 1.0)))
    with pytest.raises(EngineDied, match="offload both"):
        engine.offload([MemoryTag.WEIGHTS])


def test_the_kv_cache_never_comes_back_before_the_weights(start):
    engine, _ = start("0.24.0")
    engine.offload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    with pytest.raises(EngineDied, match="onload weights first"):
        engine.onload([MemoryTag.KV_CACHE])
    with pytest.raises(EngineDied, match="while the weights are offloaded"):
        engine.begin_update(1)


def test_each_tensor_parallel_rank_gets_its_own_bucket(start, tiny_model):
    engine, llm = start("0.33.0", tensor_parallel_size=2)
    assert llm.arguments["distributed_executor_backend"] == "mp"
    engine.begin_update(1)
    for bucket in read_buckets(tiny_model):
        engine.update([bucket, bucket])
    payloads = [arguments["args"][0] for name, arguments in llm.calls if name == "rljob_update"]
    assert [len(per_rank) for per_rank in payloads] == [2, 2]
    assert all(isinstance(payload, bytes) for per_rank in payloads for payload in per_rank)
    with pytest.raises(EngineDied, match="3 buckets for 2 ranks"):
        engine.update(read_buckets(tiny_model)[:1] * 3)
    with pytest.raises(ConfigurationError, match="tensorParallelSize: 1"):
        engine.checksum()


def test_prefixes_of_old_weights_that_stay_are_an_error(start, tiny_model):
    engine, llm = start("0.33.0")
    llm.prefix_cache_is_dropped = False
    with pytest.raises(EngineDied, match="cached under the old weights"):
        hand_over(engine, tiny_model, 1)
    assert engine._ledger is not None
    assert engine._ledger.version == 0


def test_a_dead_engine_is_typed_everywhere(start):
    engine, llm = start("0.33.0")
    llm.errored = True
    with pytest.raises(EngineDied, match="vLLM engine: health failed"):
        engine.health()

    async def die(**_: Any) -> None:
        raise RuntimeError("EngineCore encountered an issue")

    llm.resume_generation = make_callable([], die)
    with pytest.raises(EngineDied, match=r"resume failed: RuntimeError: EngineCore.*\n.*engine"):
        engine.resume()


@VERSIONS
@pytest.mark.parametrize(("device", "backend"), [("cuda", "uni"), ("cpu", "mp")])
def test_arguments_exist_in_every_release(version, device, backend):
    known = FACTS[version]["engine_arguments"]
    arguments = build_arguments(make_settings(device=device), MODEL_CONFIG, known, version)
    assert set(arguments) <= set(known)
    assert arguments["distributed_executor_backend"] == backend
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert ("enable_sleep_mode" in arguments) is (device == "cuda")
    if device == "cuda":
        assert arguments["enable_sleep_mode"] is True
        apart = build_arguments(make_settings(device=device, may_sleep=False), MODEL_CONFIG, known, version)
        assert apart["enable_sleep_mode"] is False, "nobody takes turns with an engine that has its GPUs to itself"
    assert ("gpu_memory_utilization" in arguments) is (device == "cuda")
    if device == "cpu":
        # 65 samples x 1 block of 128 tokens x 2 x 3 layers x 2 heads x 32 x 4 bytes
        assert arguments["kv_cache_memory_bytes"] == 65 * 128 * 2 * 3 * 2 * 32 * 4


def test_the_jobs_engine_arguments_are_passed_or_refused():
    known = FACTS["0.33.0"]["engine_arguments"]

    def build(**engine_args: Any) -> dict[str, Any]:
        return build_arguments(make_settings(engine_args=engine_args), MODEL_CONFIG, known, "0.33.0")

    assert build(enforce_eager=True, disable_log_stats=False)["enforce_eager"] is True
    with pytest.raises(ConfigurationError, match=r"engineArgs\.enforce_eagre.*did you mean enforce_eager"):
        build(enforce_eagre=True)
    with pytest.raises(ConfigurationError, match=r"engineArgs\.max_num_seqs: 3: the trainer sets it to 512"):
        build(max_num_seqs=3)


def test_what_this_trainer_does_not_know_is_refused():
    with pytest.raises(ConfigurationError, match=r"engineVersion: vLLM 0\.1\.0 lacks .*worker_extension_cls.*0\.24 to"):
        build_arguments(make_settings(), MODEL_CONFIG, ["model", "revision"], "0.1.0")
    settings = make_settings(num_nodes=2, tensor_parallel_size=16)
    with pytest.raises(ConfigurationError, match=r"tensorParallelSize: 16 spans 2 nodes.*use 8, or engine: SGLang"):
        build_arguments(settings, MODEL_CONFIG, FACTS["0.24.0"]["engine_arguments"], "0.24.0")


def test_the_environment_names_devices_threads_and_family():
    forced, defaults = build_environment(make_settings(visible_devices=("4", "5"), host="fd00::7"))
    assert forced["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert forced["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert defaults["VLLM_HOST_IP"] == "fd00::7"
    assert defaults["VLLM_LOOPBACK_IP"] == "::1"
    forced, defaults = build_environment(make_settings(device="cpu", num_threads=3))
    assert forced["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in forced
    assert "VLLM_LOOPBACK_IP" not in defaults


def test_seeds_belong_to_the_sample():
    base = GenerateRequest("a", [3], 4, 42, 1)
    seeds = {derive_seed(base, index) for index in range(4)}
    others = [
        GenerateRequest("b", [3], 4, 42, 1),
        GenerateRequest("a", [3], 4, 43, 1),
        GenerateRequest("a", [3], 4, 42, 2),
    ]
    seeds |= {derive_seed(request, 0) for request in others}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_host_buckets_travel_as_a_file_without_a_name():
    weights = [("a", torch.arange(6, dtype=torch.bfloat16).view(2, 3)), ("b", torch.ones(5)), ("none", torch.ones(0))]
    descriptors: list[int] = []
    payload = pickle.loads(pickle.dumps(build_payload(build_bucket(weights), descriptors)))
    bucket = payload.open(0)
    for descriptor in descriptors:
        os.close(descriptor)  # the mapping stays
    received = dict(bucket.tensors())
    assert set(received) == {"a", "b", "none"}
    for name, tensor in weights:
        assert torch.equal(received[name], tensor)


PARENT = """
import subprocess, sys, time
from rljob_trainer.engines.child_guard import ChildGuard, list_descendants
import os
child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '600'])"])
while len(list_descendants(os.getpid())) < 2:
    time.sleep(0.05)
processes = list_descendants(os.getpid())
guard = ChildGuard(processes)
if sys.argv[1] == "release":
    guard.release()
print(*(f"{pid}:{started}" for pid, started in processes), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["killed", "release"])
def test_a_killed_parent_leaves_no_engine_behind(ending):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ending], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [tuple(map(int, item.split(":"))) for item in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)

    def list_alive() -> list[int]:
        return [pid for pid, started in children if read_start_time(pid) == started]

    deadline = time.monotonic() + 60
    while ending == "killed" and list_alive():
        assert time.monotonic() < deadline, "children of the killed process live on"
        time.sleep(0.05)
    if ending == "release":
        assert len(list_alive()) == 2, "a released guard ends nothing"
        for pid in list_alive():
            os.kill(pid, signal.SIGKILL)


def test_last_words_of_children_are_kept_and_passed_on(capfd):
    output = ChildOutput()
    with output.capture():
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os; [os.write(2, b'line %d\\n' % i) for i in range(50)]; os.write(1, b'end')",
            ]
        )
    print("ours", flush=True)
    assert child.wait(60) == 0
    output.drain(60)
    lines = output.last_lines().splitlines()
    assert lines[-2:] == ["line 49", "end"]
    assert lines[0] == "line 10"
    out, err = capfd.readouterr()
    assert "line 0\n" in err
    assert out == "ours\n"
