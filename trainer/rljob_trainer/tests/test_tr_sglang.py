"""What is particular to SGLang, with the real engine on CPUs; the shared behaviour is in the conformance suite."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_conformance import hand_over, read_weights
from tr_tiny import save_tiny_model

from rljob_trainer.engines.child_guard import list_descendants
from rljob_trainer.engines.contract import EngineSettings, GenerateRequest, MemoryTag, SamplingParams
from rljob_trainer.errors import ConfigurationError, EngineDied

pytest.importorskip("sglang", reason="SGLang is not installed here (requirements/engines/build.sh sglang-0.5.23)")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

REQUESTS = [GenerateRequest("p", [3, 4, 5], 4, 42, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096))


def start_engine(model, **overrides):
    from rljob_trainer.engines.sglang import SGLangEngine

    settings = {
        "model_source": model,
        "model_revision": None,
        "dtype": "Float32",
        "device": "cpu",
        "stop_token_ids": (1, 2),
        "max_concurrent_samples": 8,
        "max_sequence_tokens": 4096,
        "num_threads": 1,
    }
    engine = SGLangEngine()
    engine.start(EngineSettings(**(settings | overrides)))
    return engine


def test_an_unknown_argument_is_refused_before_a_process_starts(model):
    before = list_descendants(os.getpid())
    with pytest.raises(ConfigurationError, match=r"engineArgs\.cuda_grph: the installed SGLang has no such argument"):
        start_engine(model, engine_args={"cuda_grph": 1})
    assert list_descendants(os.getpid()) == before


@pytest.fixture(scope="module")
def engine(model):
    """For several tests, the last of which ends its scheduler."""
    engine = start_engine(model)
    yield engine
    engine.stop()


def test_there_is_no_process_that_nobody_needs(engine):
    """Token ids go from the scheduler to the caller; SGLang would start a detokenizer, which takes as long to start."""
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid, _ in engine._require_started()._family]
    assert sum(b"scheduler" in name for name in names) == 1
    assert not any(b"detokenizer" in name for name in names)


def test_offload_and_onload_never_reach_the_scheduler_twice(engine, model, monkeypatch):
    """The same calls as on GPUs; without a memory saver SGLang only keeps its books, whose errors are fatal."""
    monkeypatch.setattr(engine, "_has_memory_saver", lambda processes: True)
    engine.offload([MemoryTag.KV_CACHE])
    engine.offload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
    assert set(engine.health().offloaded) == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
    with pytest.raises(EngineDied, match=r"offloaded; call onload first"):
        list(engine.generate(REQUESTS, SamplingParams(4, 1.0)))
    with pytest.raises(EngineDied, match="weight update while weights are offloaded"):
        engine.begin_update(1)
    engine.onload([MemoryTag.WEIGHTS])
    engine.onload([MemoryTag.WEIGHTS])
    engine.onload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    assert engine.health().offloaded == ()
    assert len(next(engine.generate(REQUESTS, SamplingParams(4, 1.0))).samples) == 4
    weights = read_weights(model)
    for version in (1, 2, 3):  # the order of a step
        engine.offload(list(MemoryTag))
        engine.offload(list(MemoryTag))
        engine.onload([MemoryTag.WEIGHTS])
        assert hand_over(engine, weights, version) == version
        engine.onload([MemoryTag.KV_CACHE])
        group = next(engine.generate(REQUESTS, SamplingParams(4, 1.0)))
        assert [sample.weight_version for sample in group.samples] == [version] * 4


def test_a_crash_inside_the_scheduler_is_told_with_its_last_words(engine):
    """SGLang answers such a crash by SIGQUIT to this process, and would kill it."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    with pytest.raises(EngineDied, match="KeyError"):
        engine._call("resume_memory_occupation", ResumeMemoryOccupationReqInput(tags=["weights"]))


def test_an_actor_that_is_killed_takes_its_engine_along(model):
    """No orphan process, which on a GPU would keep its memory."""
    script = (
        "import sys, time\n"
        "from test_tr_sglang import start_engine\n"
        "if __name__ == '__main__':\n"
        f"    engine = start_engine({model!r})\n"
        "    print(*engine._processes.engine.get_all_child_pids(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    path = Path(model) / "orphan.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        family: list[tuple[int, int]] = []
        line = process.stdout.readline()
        assert line.strip(), "the engine did not start"
        family = list_descendants(process.pid)
        assert family
    finally:
        process.kill()
        process.wait(timeout=30)
    from rljob_trainer.engines.child_guard import read_start_time

    deadline = time.monotonic() + 60
    while any(read_start_time(pid) == started for pid, started in family):
        assert time.monotonic() < deadline, "processes of the engine outlive the process that embeds it"
        time.sleep(0.2)
