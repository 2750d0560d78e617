"""SGLang with two tensor parallel ranks: in one node, over two nodes that meet at an IPv6 address, and without IPv4."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("engine_conformance")

from engine_conformance import (  # noqa: E402
    compute_expected_log_probs,
    flatten_log_probs,
    generate,
    hand_over,
    make_requests,
    pause_in_the_middle,
    read_weights,
)
from engine_traits import make_settings  # noqa: E402
from tr_ipv6_only import ADDRESS, INTERFACE, enter_ipv6_only  # noqa: E402
from tr_tiny import save_tiny_model  # noqa: E402

from rljob_trainer.engines.child_guard import list_descendants, read_start_time  # noqa: E402
from rljob_trainer.errors import EngineDied  # noqa: E402
from rljob_trainer.models.packed_batch import pack_sequences  # noqa: E402
from rljob_trainer.models.policy import PolicyModel, load_causal_lm  # noqa: E402
from rljob_trainer.sync.buckets import combine_checksums, compute_tensor_checksum  # noqa: E402

pytest.importorskip("sglang", reason="SGLang is not installed here (requirements/engines/build.sh sglang-0.5.23)")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

NODE = Path(__file__).with_name("tr_sglang_node.py")
TWO_NODES_SECONDS = 700.0


def save_model(directory: Path, **overrides: Any) -> str:
    """Four heads of 32 and two key-value heads, one for each rank."""
    options = {
        "hidden_size": 128,
        "intermediate_size": 256,  # on CPUs SGLang pads each rank's share to a multiple of 64
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return str(save_tiny_model(directory, **(options | overrides)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_two_ranks_in_one_node_hold_generate_and_die_as_one(model: str, tmp_path: Path) -> None:
    """One start for all of it: what both ranks hold before and after an update, and the death of the second."""
    from rljob_trainer.engines.sglang import SGLangEngine

    other = save_model(tmp_path / "other", initializer_range=0.4)
    others = list_descendants(os.getpid())  # of earlier tests
    engine = SGLangEngine()
    engine.start(make_settings(model, tensor_parallel_size=2, host="::1"))
    family = set(list_descendants(os.getpid())).difference(others)
    try:
        for version, source in enumerate((model, other)):
            weights = read_weights(source)
            if version:
                assert hand_over(engine, weights, version) == version
            groups = generate(engine, make_requests())
            expected = compute_expected_log_probs(source, groups, 1.0, torch.float32)
            np.testing.assert_allclose(flatten_log_probs(groups), expected, rtol=1e-4, atol=1e-4)
            assert {sample.weight_version for samples in groups.values() for sample in samples} == {version}
            assert engine.checksum() == combine_checksums(compute_tensor_checksum(*weight) for weight in weights)
        second = engine._require_started().engine.get_all_child_pids()[1]
        background = pause_in_the_middle(engine)
        os.kill(second, signal.SIGKILL)
        # The first may have ended too by now: its next collective fails.
        with pytest.raises(EngineDied, match=rf"process [\d, ]*\b{second}\b[\d, ]* ended"):
            background.join()
    finally:
        engine.stop()
    assert not [pid for pid, started in family if read_start_time(pid) == started]


def run_two_nodes(command: list[str], directory: Path) -> list[dict[str, Any]]:
    """The nodes' reports."""
    # What this machine sets for its own interfaces is not what the nodes shall find out.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TWO_NODES_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    return [json.loads((directory / f"node-{rank}.json").read_text()) for rank in (0, 1)]


def check_two_nodes(reports: list[dict[str, Any]], model: str) -> None:
    """Both weight versions agree with the model, and the death of node 1's scheduler is told on both nodes."""
    first, second = reports
    assert first["version"] == 1
    policy = PolicyModel(load_causal_lm(model))
    for key, scale, version in (("before", 1.0, 0), ("after", 1.5, 1)):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(scale)
        for index, group in enumerate(first[key]):
            for token_ids, log_probs, found_version in group:
                assert found_version == version
                assert log_probs == pytest.approx(compute_log_probs(policy, [3 + index, 4, 5], token_ids), abs=2e-3)
    for report in (first, second):
        assert "SGLang engine" in report["death"]
        assert report["num_left"] == 0


def compute_log_probs(policy: PolicyModel, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    with torch.no_grad():
        log_probs, _ = policy(pack_sequences([prompt_ids], [token_ids], torch.device("cpu")), temperature=1.0)
    return [float(value) for value in log_probs]


def test_two_nodes_meet_over_ipv6_agree_with_the_model_and_notice_a_death(model: str, tmp_path: Path) -> None:
    """TP 2 over two nodes of one host, inside an outer gloo group; both ranks take an update from one bucket."""
    reports = run_two_nodes([sys.executable, str(NODE), "::1", model, str(tmp_path)], tmp_path)
    check_two_nodes(reports, model)
    assert {report["interface"] for report in reports} == {"lo"}


def test_two_nodes_meet_where_there_is_no_ipv4_at_all(model: str, tmp_path: Path) -> None:
    """The same in a namespace with one interface, IPv6 addresses only, and no 127.0.0.1."""
    command = enter_ipv6_only([sys.executable, str(NODE), ADDRESS, model, str(tmp_path)])
    reports = run_two_nodes(command, tmp_path)
    check_two_nodes(reports, model)
    assert {report["interface"] for report in reports} == {INTERFACE}
    assert {report["num_ipv4_sockets"] for report in reports} == {0}
