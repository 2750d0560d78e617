"""The order of what the loop asks for before the first step, and what a stopped run catches up on."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_api.names import METRICS_FILE
from rljob_trainer import loop
from rljob_trainer.data import SupervisedRow
from rljob_trainer.errors import NumericalError, StopRequested
from rljob_trainer.loop import Trainer
from rljob_trainer.resume import ResumePoint
from rljob_trainer.run_state import RunState
from rljob_trainer.telemetry.writers import EVALUATION_KEY

TOTAL_STEPS = 4
WARM_START = {"warm_start": {"supervised": {"data": ["warm.jsonl"], "steps": 3, "rows_per_step": 2}}}
WITH_REFERENCE = {"algorithm": {"type": "PPO", "kl": {"placement": "Reward", "coefficient": 0.1}}}


class Dispatcher:
    """Notes every call; its updates are finite or not, as told."""

    def __init__(self, calls, is_finite=()):
        self.calls, self.is_finite = calls, list(is_finite)

    def __getattr__(self, name):
        return lambda *_, **__: self.calls.append(name)

    def update(self, rows, *, learning_rate, is_supervised):
        assert is_supervised
        self.calls.append("update")
        is_finite = self.is_finite.pop(0) if self.is_finite else True
        loss = 0.5 if is_finite else float("nan")
        return SimpleNamespace(is_finite=is_finite, loss=loss, gradient_norm=loss)


class Reporter:
    """Takes everything, and writes evaluations where a resumed run looks for them."""

    def __init__(self, calls, metrics):
        self.notes = []
        self.calls = calls
        self.metrics = metrics

    def __getattr__(self, _):
        return lambda *_, **__: None

    def note(self, text):
        self.notes.append(text)

    def phase(self, _):
        return nullcontext()

    def report_evaluation(self, step, *_):
        self.calls.append(f"evaluated {step}")
        with self.metrics.open("a") as file:
            file.write(json.dumps({"step": step, EVALUATION_KEY: 0.5}) + "\n")


class Loop(Trainer):
    """A trainer whose engines, ranks and storage are notes in `calls`; `saved` is what a resumed run reads."""

    def __init__(self, make_job, directory, *, stop_in_evaluation=None, stop_in_step=None, is_finite=(), **sections):
        spec = {
            "evaluation": {"every_steps": 2},
            "checkpoint": {"every_steps": 0, "export_every_steps": 2, "export_at_end": False},
        }
        spec |= sections.pop("spec", {})
        job = make_job(run_directory=str(directory), spec=spec, **sections)
        self.calls = []
        reporter = Reporter(self.calls, directory / METRICS_FILE)
        super().__init__(job, reporter, SimpleNamespace(raise_if_requested=lambda: None, is_requested=False))
        self.saved = None
        self._dispatcher = Dispatcher(self.calls, is_finite)
        self._total_steps = TOTAL_STEPS
        self._sampler = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        self._inputs = SimpleNamespace(
            validation=["a set"], demonstrations=[SupervisedRow([1], [2, 3]), SupervisedRow([4], [5])]
        )
        self._cluster = SimpleNamespace(num_parameters=1)
        self._ahead = SimpleNamespace(raise_if_failed=lambda: None)
        self._saver = SimpleNamespace(
            collect=lambda: None, wait=lambda: None, start=lambda step, state: setattr(self, "saved", state)
        )
        self._collector = SimpleNamespace(evaluate=self._sample_validation)
        self._stop_in_evaluation, self._stop_in_step = stop_in_evaluation, stop_in_step

    def _sample_validation(self, step, **_):
        if step == self._stop_in_evaluation:
            raise StopRequested("SIGTERM")
        return []

    def _train_step(self, step):
        if step == self._stop_in_step:
            raise StopRequested("SIGTERM")
        self.calls.append(f"trained {step}")
        self._state.step = step

    def _export(self):
        self.calls.append(f"exported {self._state.step}")

    def train(self, resume=None):
        try:
            self._train(resume)
        except StopRequested:
            self._save()
            raise
        return self.calls


@pytest.fixture(autouse=True)
def no_samples(monkeypatch):
    monkeypatch.setattr(loop, "evaluate_sets", lambda *_, **__: {})
    monkeypatch.setattr(loop, "summarise", lambda _: None)


def resume_from(state, monkeypatch, *, is_own=True):
    checkpoint = SimpleNamespace(path=Path("step-n"), step=state["step"])
    monkeypatch.setattr(loop.files, "read_trainer_state", lambda _: state)
    return ResumePoint(checkpoint, is_own=is_own)


def list_results(calls):
    return [call for call in calls if call.split()[0] in ("trained", "evaluated", "exported")]


@pytest.mark.parametrize("spec", [{}, WARM_START], ids=["plain", "warm start"])
@pytest.mark.parametrize("algorithm", [{}, WITH_REFERENCE], ids=["GRPO", "PPO"])
def test_engines_leave_the_gpus_before_anything_of_the_trainer_grows(make_job, tmp_path, spec, algorithm):
    calls = Loop(make_job, tmp_path, spec=spec, **algorithm).train()
    assert calls[0] == "make_room"
    assert calls.count("update") == (3 if spec else 0)
    # Moments are there when the engines come back: a save before the first update allocates nothing beside them.
    sync = calls.index("sync_weights")
    assert calls[sync - 1] == "allocate_moments"
    assert set(calls[1 : sync - 1]) == {
        *(["update", "reset_optimizer"] if spec else []),
        *(["setup_reference", "setup_critic"] if algorithm else []),
    }


@pytest.mark.parametrize("is_own", [True, False], ids=["resumed", "resumeFromPath"])
def test_engines_leave_the_gpus_before_a_checkpoint_is_loaded(make_job, tmp_path, monkeypatch, is_own):
    resume = resume_from(asdict(RunState(step=1, is_warm_started=True)), monkeypatch, is_own=is_own)
    calls = Loop(make_job, tmp_path, spec=WARM_START, **WITH_REFERENCE).train(resume)
    assert calls[:6] == ["make_room", "setup_reference", "setup_critic", "load", "allocate_moments", "sync_weights"]
    assert "update" not in calls


UNINTERRUPTED = [
    "evaluated 0",
    "trained 1",
    "trained 2",
    "evaluated 2",
    "exported 2",
    "trained 3",
    "trained 4",
    "evaluated 4",
    "exported 4",
]


@pytest.mark.parametrize("stopped_at", [0, 2, 4])
def test_a_resumed_run_repeats_the_evaluation_that_a_stop_cut_short(make_job, tmp_path, monkeypatch, stopped_at):
    first = Loop(make_job, tmp_path, stop_in_evaluation=stopped_at)
    with pytest.raises(StopRequested):
        first.train()
    assert first.saved is not None
    assert first.saved["step"] == stopped_at
    # A stop before the next step is done saves nothing new; what was made up is not made up again.
    second = Loop(make_job, tmp_path, stop_in_step=stopped_at + 1)
    with pytest.raises(StopRequested) if stopped_at < TOTAL_STEPS else nullcontext():
        second.train(resume_from(first.saved, monkeypatch))
    assert second.saved is None
    third = Loop(make_job, tmp_path).train(resume_from(first.saved, monkeypatch))
    exported = [] if stopped_at == 0 else [f"exported {stopped_at}"]  # `_export` looks whether it is there
    assert [
        *list_results(first.calls),
        *list_results(second.calls),
        *list_results(third)[len(exported) :],
    ] == UNINTERRUPTED


def test_a_resumed_run_does_not_repeat_an_evaluation_that_was_finished(make_job, tmp_path, monkeypatch):
    whole = Loop(make_job, tmp_path)
    assert list_results(whole.train()) == UNINTERRUPTED
    assert whole.saved["step"] == TOTAL_STEPS
    for state, expected in (
        (whole.saved, []),
        (
            asdict(RunState(step=1, is_warm_started=True)),
            ["trained 2", "evaluated 2", "trained 3", "trained 4", "evaluated 4"],
        ),
    ):
        again = Loop(make_job, tmp_path, spec={"checkpoint": {"every_steps": 0, "export_at_end": False}})
        assert list_results(again.train(resume_from(state, monkeypatch))) == expected


def test_a_warm_start_without_finite_updates_ends_the_run(make_job, tmp_path):
    training = {"training": {"max_nan_steps": 2, "total_steps": TOTAL_STEPS}}
    broken = Loop(make_job, tmp_path, spec=WARM_START, is_finite=[True, False, False], **training)
    with pytest.raises(NumericalError, match=r"2 consecutive updates.*spec\.warmStart\.supervised\.learningRate"):
        broken.train()
    assert "1 in a row, limit 2" in broken._reporter.notes[0]
    assert "reset_optimizer" not in broken.calls
    single = Loop(make_job, tmp_path, spec=WARM_START, is_finite=[False, True, False], **training)
    assert "reset_optimizer" in single.train()


def test_a_warm_start_shorter_than_the_limit_cannot_pass_without_an_update(make_job, tmp_path):
    training = {"training": {"max_nan_steps": 10, "total_steps": TOTAL_STEPS}}
    with pytest.raises(NumericalError, match="3 consecutive updates"):
        Loop(make_job, tmp_path, spec=WARM_START, is_finite=[False] * 3, **training).train()
