"""`python -m rljob_trainer` with a witness of what runs beside what: `python tr_witness.py EVENTS_FILE [ACTION]`.

Every update but the last is held up until a sample of the *next* step has arrived: a run whose rollout does not run
beside its training fails here, whatever the machine's speed. Events go to the file as they happen, one JSON list per
line. ACTION `stop` asks for a stop during the update of step 2, as SIGTERM; `kill-engine` kills the engine when the
first sample of step 3 has arrived, that is during the update of step 2.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rljob_trainer import loop
from rljob_trainer.__main__ import main
from rljob_trainer.reporting import RunReporter
from rljob_trainer.step_updates import Updater
from rljob_trainer.stopping import StopSignal

WAIT_SECONDS = 120.0
ACTION_STEP = 2


class Witness:
    """Wraps the pieces of the loop that it watches."""

    def __init__(self, path: Path, action: str) -> None:
        self.path, self.action = path, action
        self.lock = threading.Lock()
        self.sample_of_step: dict[int, threading.Event] = {}
        self.is_stopping = threading.Event()
        self.engine_pid = 0

    def write(self, *event: Any) -> None:
        with self.lock, self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def get_event(self, step: int) -> threading.Event:
        with self.lock:
            return self.sample_of_step.setdefault(step, threading.Event())

    def install(self) -> None:
        witness = self
        count_samples, run_updates, check = RunReporter.count_samples, Updater.run, loop.check_staleness
        start_cluster, request_stop = loop.start_cluster, StopSignal.request

        def start(*arguments: Any, **keywords: Any) -> Any:
            cluster = start_cluster(*arguments, **keywords)
            found = re.search(r"pid (\d+)", cluster.engines[0].label)
            assert found is not None
            witness.engine_pid = int(found.group(1))
            return cluster

        def count(reporter: RunReporter, num_samples: int) -> None:
            count_samples(reporter, num_samples)
            name = threading.current_thread().name
            if not name.startswith("rollout-"):
                return  # an evaluation
            step = int(name.removeprefix("rollout-"))
            event = witness.get_event(step)
            if event.is_set():
                return
            witness.write("first sample", step)
            if witness.action == "kill-engine" and step == ACTION_STEP + 1:
                os.kill(witness.engine_pid, signal.SIGKILL)
            event.set()

        def run(updater: Updater, rows: Any, step: int, state: Any) -> Any:
            witness.write("update begins", step)
            if step < updater._total_steps:
                assert witness.get_event(step + 1).wait(WAIT_SECONDS), f"no sample of step {step + 1} beside the update"
            if witness.action == "stop" and step == ACTION_STEP:
                os.kill(os.getpid(), signal.SIGTERM)
                assert witness.is_stopping.wait(WAIT_SECONDS), "SIGTERM was not taken for a stop"
            result = run_updates(updater, rows, step, state)
            witness.write("update ended", step)
            return result

        def check_versions(samples: Any, step: int, max_staleness_steps: int) -> None:
            witness.write("versions", step, sorted({sample.weight_version for sample in samples}))
            check(samples, step, max_staleness_steps)

        def request(signal: StopSignal, *arguments: Any, **keywords: Any) -> None:
            request_stop(signal, *arguments, **keywords)
            witness.is_stopping.set()

        RunReporter.count_samples, Updater.run, StopSignal.request = count, run, request  # type: ignore[method-assign]
        loop.check_staleness, loop.start_cluster = check_versions, start


if __name__ == "__main__":
    Witness(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "").install()
    code = main()
    sys.stdout.flush()
    os._exit(code)
