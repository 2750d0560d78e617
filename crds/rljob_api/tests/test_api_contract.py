"""The result line and the closed lists of reasons and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rljob_api.contract import Progress, Result, StopRequest, TrainerPhase, TrainerState, Verdict, find_result
from rljob_api.contract import format_result_line as format_line
from rljob_api.crdgen.pages import render_reasons_page
from rljob_api.names import compute_ray_cluster_name, compute_step_directory_name, compute_submission_id
from rljob_api.reasons import DEFAULT_ACTIONS, DESCRIPTIONS, REASON_OF_EXIT_CODE, ExitCode, FailureReason
from rljob_api.v1alpha1 import ProgressStatus


def make_result(step: int = 3, message: str = "done") -> Result:
    progress = Progress(
        job_uid="uid",
        attempt=1,
        state=TrainerState.SUCCEEDED,
        phase=TrainerPhase.DONE,
        heartbeat_time="2026-01-01T00:00:00Z",
        start_time="2026-01-01T00:00:00Z",
        progress=ProgressStatus(step=step, kl_mean=float("nan")),
    )
    return Result(verdict=Verdict(exit_code=0, reason="Completed", message=message), progress=progress)


def test_a_result_line_is_strict_json_on_one_line_and_is_found_again() -> None:
    result = make_result(message='two\nlines and {"rljobResult": 1}')
    line = format_line(result)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert find_result(line) == result


@pytest.mark.parametrize(
    ("log", "want_step"),
    [
        ("{a}", 1),
        ("noise\n\x1b[36m(driver pid=7)\x1b[0m {a}\ntrailing", 1),
        ("{a}\n{b}", 2),
        ("{a}\n{cut}", 1),
        ("{a} more text on the line", 1),
        ('{a}\n{"rljobResult": {"schemaVersion": 99}}', 1),
        ('{a}\n{"rljobResult": null}', 1),
    ],
)
def test_results_are_found_in_the_logs_ray_makes(log: str, want_step: int) -> None:
    first, second = format_line(make_result(1)), format_line(make_result(2))
    text = log.replace("{a}", first).replace("{b}", second).replace("{cut}", second[: len(second) // 2])
    found = find_result(text)
    assert found is not None
    assert found.progress.progress.step == want_step


@pytest.mark.parametrize("log", ["", "no result", '{"rljobResult":', "rljobResult"])
def test_no_result(log: str) -> None:
    assert find_result(log) is None


def test_stop_requests_are_bounded() -> None:
    assert StopRequest().deadline_seconds == 300
    with pytest.raises(ValueError, match="less than or equal"):
        StopRequest(deadline_seconds=86_401)


def test_every_reason_has_an_action_and_a_page_section() -> None:
    assert set(DEFAULT_ACTIONS) == set(DESCRIPTIONS) == set(FailureReason)
    page = render_reasons_page()
    anchors = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert {str(reason) for reason in FailureReason} <= anchors
    for link in re.findall(r"\(#(\w+)\)", page):
        assert link in {anchor.lower() for anchor in anchors}


def test_every_exit_code_but_done_and_stopped_has_a_reason() -> None:
    assert set(REASON_OF_EXIT_CODE) == set(ExitCode) - {ExitCode.DONE, ExitCode.STOPPED}
    assert len(set(REASON_OF_EXIT_CODE.values())) == len(REASON_OF_EXIT_CODE)


def test_fields_named_in_the_reasons_page_exist() -> None:
    from rljob_api.schema_paths import find_field

    for path in set(re.findall(r"`(spec\.[A-Za-z.]+)", render_reasons_page())):
        assert find_field(path.split(".")) is not None, path


def test_names() -> None:
    assert compute_ray_cluster_name("gsm8k", 3) == "gsm8k-3"
    assert compute_submission_id("uid", 2) == "uid-2"
    assert compute_step_directory_name(40) == "step-40"


def test_the_package_imports_neither_torch_nor_kubernetes() -> None:
    import subprocess
    import sys

    code = (
        "import sys, rljob_api.rules, rljob_api.resolve, rljob_api.supported, rljob_api.crdgen.__main__; "
        "print(sorted({'torch', 'kopf', 'kubernetes', 'ray'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert completed.stdout.strip() == "[]"
