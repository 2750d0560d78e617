"""What is particular to SGLang, with the real engine on CPUs; the shared behaviour is in the conformance suite."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tr_tiny import save_tiny_model

from rljob_trainer.distributed.network import find_free_port
from rljob_trainer.engines.child_guard import list_descendants
from rljob_trainer.engines.contract import EngineSettings, GenerateRequest, MemoryTag, SamplingParams
from rljob_trainer.errors import ConfigurationError, EngineDied
from rljob_trainer.models.policy import load_causal_lm

pytest.importorskip("sglang", reason="SGLang is not installed here (requirements/engines/build.sh sglang-0.5.23)")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

NODE = Path(__file__).with_name("tr_sglang_node.py")
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


def test_a_crash_inside_the_scheduler_is_told_with_its_last_words(model):
    """SGLang answers such a crash by SIGQUIT to this process, and would kill it."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    engine = start_engine(model)
    try:
        with pytest.raises(EngineDied, match="KeyError"):
            engine._call("resume_memory_occupation", ResumeMemoryOccupationReqInput(tags=["weights"]))
    finally:
        engine.stop()


def test_offload_and_onload_never_reach_the_scheduler_twice(model, monkeypatch):
    """The same calls as on GPUs; without a memory saver SGLang only keeps its books, whose errors are fatal."""
    engine = start_engine(model)
    monkeypatch.setattr(engine, "_has_memory_saver", lambda processes: True)
    try:
        engine.offload([MemoryTag.KV_CACHE])
        engine.offload([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
        assert set(engine.health().offloaded) == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
        with pytest.raises(EngineDied, match=r"offloaded; call onload first"):
            list(engine.generate(REQUESTS, SamplingParams(4, 1.0)))
        engine.onload([MemoryTag.WEIGHTS])
        engine.onload([MemoryTag.WEIGHTS])
        engine.onload([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
        assert engine.health().offloaded == ()
        assert len(next(engine.generate(REQUESTS, SamplingParams(4, 1.0))).samples) == 4
    finally:
        engine.stop()


def test_two_nodes_meet_over_ipv6_and_agree_with_the_model(model):
    """TP 2 over two nodes of one host, inside an outer gloo group; both ranks take an update from one bucket."""
    outer, inner = find_free_port("::1"), find_free_port("::1")
    nodes = [
        subprocess.Popen(
            [sys.executable, str(NODE), str(rank), str(outer), f"[::1]:{inner}", model],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=560) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], [output[1][-3000:] for output in outputs]
    report = json.loads(outputs[0][0].splitlines()[-1])
    assert report["version"] == 1
    policy = load_causal_lm(model)
    for key, scale, version in (("before", 1.0, 0), ("after", 1.5, 1)):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(scale)
        for index, group in enumerate(report[key]):
            for token_ids, log_probs, found_version in group:
                assert found_version == version
                assert log_probs == pytest.approx(compute_log_probs(policy, [3 + index, 4, 5], token_ids), abs=2e-3)


def compute_log_probs(policy, prompt_ids, token_ids):
    with torch.no_grad():
        logits_TV = policy(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1).tolist()


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
    environment = os.environ | {"PYTHONPATH": str(NODE.parent)}
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
