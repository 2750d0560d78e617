"""`python -m rljob_trainer`: read job.json, train, leave one result line and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rljob_api.contract import (
    Progress,
    ResolvedJob,
    Result,
    StopRequest,
    TrainerPhase,
    TrainerState,
    Verdict,
    format_result_line,
)
from rljob_api.names import CONFIG_PATH, ENV_ATTEMPT, ENV_CONFIG
from rljob_api.reasons import ExitCode, FailureReason
from rljob_trainer.errors import StopRequested, TrainerError

REASON_COMPLETED: Final = "Completed"
REASON_STOPPED: Final = "Stopped"
MAX_MESSAGE_CHARACTERS: Final = 4000
"""Status messages of the operator are limited to 4096."""
UNKNOWN_UID: Final = "unknown"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    verdict: Verdict
    state: TrainerState


def judge(error: BaseException | None) -> Outcome:
    """The verdict about how the loop ended; anything untyped is an internal error."""
    if error is None:
        return _outcome(ExitCode.DONE, REASON_COMPLETED, "trained to the last step", TrainerState.SUCCEEDED)
    if isinstance(error, StopRequested):
        message = f"stopped on request ({error}) after the last finished step"
        return _outcome(ExitCode.STOPPED, REASON_STOPPED, message, TrainerState.STOPPED)
    if isinstance(error, TrainerError):
        return _outcome(error.exit_code, str(error.reason), error.message, TrainerState.FAILED)
    message = f"{type(error).__name__}: {error}"
    return _outcome(ExitCode.INTERNAL_ERROR, str(FailureReason.INTERNAL_ERROR), message, TrainerState.FAILED)


def _outcome(code: ExitCode, reason: str, message: str, state: TrainerState) -> Outcome:
    return Outcome(
        Verdict(exit_code=int(code), reason=reason, message=message[:MAX_MESSAGE_CHARACTERS] or reason), state
    )


def build_early_progress(environment: Mapping[str, str], verdict: Verdict) -> Progress:
    """Progress of a run whose job.json could not be used: its UID and attempt as far as they can be read."""
    document: Any = {}
    with contextlib.suppress(OSError, ValueError):  # that is the failure being reported
        document = json.loads(Path(environment.get(ENV_CONFIG, CONFIG_PATH)).read_text(encoding="utf-8"))
    document = document if isinstance(document, dict) else {}
    attempt = environment.get(ENV_ATTEMPT) or document.get("attempt")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Progress(
        job_uid=str(document.get("uid") or UNKNOWN_UID),
        attempt=int(attempt) if str(attempt).isdecimal() else 1,
        state=TrainerState.FAILED,
        phase=TrainerPhase.SETUP,
        heartbeat_time=now,
        start_time=now,
        verdict=verdict,
    )


def print_result(verdict: Verdict, progress: Progress) -> None:
    """The last line on stdout, whatever happened. Starts on a line of its own."""
    sys.stderr.flush()
    print("\n" + format_result_line(Result(verdict=verdict, progress=progress)), flush=True)


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Run the job; returns the exit code (`rljob_api.reasons.ExitCode`)."""
    from rljob_trainer.quiet import quiet_libraries

    quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Into a file or a pipe Python buffers blocks: the log would lag minutes behind, and a kill would lose its end.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        from rljob_trainer.config import load_job

        job = load_job(environment)
    except Exception as error:  # noqa: BLE001 - every end gets a result line
        outcome = judge(error)
        _explain(error, outcome)
        print_result(outcome.verdict, build_early_progress(environment, outcome.verdict))
        return outcome.verdict.exit_code
    return _run(job)


def _run(job: ResolvedJob) -> int:
    from rljob_trainer.loop import Trainer
    from rljob_trainer.reporting import RunReporter
    from rljob_trainer.stall_watch import StallWatch
    from rljob_trainer.stopping import StopSignal
    from rljob_trainer.telemetry import Console, ProgressServer, TelemetryState

    state = TelemetryState(job)

    def give_up() -> None:
        """A stop that is late: leave what the last checkpoint holds."""
        outcome = judge(StopRequested(f"{stop.source}; the deadline passed, the last checkpoint stands"))
        state.set_verdict(outcome.verdict, outcome.state)
        print_result(outcome.verdict, state.build_progress())
        os._exit(outcome.verdict.exit_code)

    stop = StopSignal(give_up)
    stop.install_signal_handlers()

    def on_stop(request: StopRequest) -> None:
        state.set_state(TrainerState.STOPPING)
        stop.request("POST /v1/stop", request.deadline_seconds)

    server = ProgressServer(job, state, on_stop)
    error: BaseException | None = None
    with Console() as console:
        reporter = RunReporter(job, state, console)
        try:
            port = server.start()
            console.note(f"progress, health and metrics on port {port}")
            trainer = Trainer(job, reporter, stop)
            stall_watch = StallWatch(
                job.spec.failure_policy.stall_timeout_seconds,
                get_heartbeat=lambda: state.take_snapshot().heartbeat_seconds,
                get_actors=lambda: trainer.actors,
                write=console.note,
            )
            with stall_watch:
                trainer.run()
        except SystemExit:
            # While Ray starts, its own SIGTERM handler is in place of ours.
            error = StopRequested("SIGTERM during the start")
        except Exception as caught:  # noqa: BLE001 - every end gets a result line
            error = caught
        outcome = judge(error)
        if error is not None:
            _explain(error, outcome)
        reporter.finish_run(outcome.verdict, outcome.state)
    _shut_down_ray()
    stop.finish()
    server.stop()
    print_result(outcome.verdict, state.build_progress())
    return outcome.verdict.exit_code


def _explain(error: BaseException, outcome: Outcome) -> None:
    """Typed failures say what is needed in their message; the others need their traceback."""
    if outcome.verdict.exit_code == ExitCode.INTERNAL_ERROR:
        traceback.print_exception(error)
    elif not isinstance(error, StopRequested):
        print(f"{outcome.verdict.reason}: {error}", file=sys.stderr, flush=True)


def _shut_down_ray() -> None:
    """Flushes the actors' logs to stdout, so that the result line comes after them."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # Threads of libraries must not hold up, or change, the exit code.
    os._exit(exit_code)
