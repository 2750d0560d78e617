"""Rollout one step ahead of the training, on engines that have GPUs of their own (one-step-off policy).

While the ranks train on the samples of step s, one thread collects those of step s + 1, with the weights that step s
started from. Everything else stays in order: engines get new weights only between two rollouts, prompts are drawn in
the order of the data, and a batch is trained on exactly once. Sources: AReaL (arXiv 2505.24298), verl's one-step-off
trainer.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rljob_trainer.errors import StopRequested
from rljob_trainer.step_rollout import StepRollout

POLL_SECONDS: Final = 0.5
END_SECONDS: Final = 30.0
"""For a rollout that is not needed any more: engines abort at once, rewards that are being computed are left."""

Collect = Callable[[int, Callable[[], None]], StepRollout]
"""(step, poll) -> samples of the step."""


@dataclass
class _Pending:
    step: int
    result: concurrent.futures.Future[StepRollout] = field(default_factory=concurrent.futures.Future)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class RolloutAhead:
    """At most one rollout in the background; as a context it leaves no thread behind.

    The engines, the rewards and the position in the data belong to that rollout from `start` until `settle` or `take`
    returns. Waits have no deadline here: those of the rollout and of its rewards end them, and name who was late.
    """

    def __init__(self, collect: Collect, *, poll: Callable[[], None], note: Callable[[str], None]) -> None:
        """
        Args:
            collect: called in the background thread.
            poll: called there about twice a second; may raise StopRequested.
            note: a line for people.
        """
        self._collect, self._poll, self._note = collect, poll, note
        self._pending: _Pending | None = None

    def start(self, step: int) -> None:
        """Begin to collect the samples of `step`; returns at once."""
        assert self._pending is None, "one rollout at a time: take the one before first"
        pending = self._pending = _Pending(step)
        pending.thread = threading.Thread(target=self._run, args=(pending,), name=f"rollout-{step}", daemon=True)
        pending.thread.start()

    def settle(self, poll: Callable[[], None]) -> None:
        """Wait until the engines are idle; what was collected is kept for `take`.

        Args:
            poll: called about twice a second while waiting; may raise.

        Raises:
            Whatever ended the rollout, as it was raised there.
        """
        if self._pending is not None:
            self._wait(self._pending, poll)

    def take(self, step: int, poll: Callable[[], None]) -> StepRollout:
        """The samples of `step`; collects them now where `start` has not been asked to (the first step of a run).

        Raises:
            Whatever ended the rollout, as it was raised there.
        """
        if self._pending is None:
            self.start(step)
        pending = self._pending
        assert pending is not None
        assert pending.step == step, f"step {step} cannot train on the samples of step {pending.step}"
        rollout = self._wait(pending, poll)
        self._pending = None
        return rollout

    def raise_if_failed(self) -> None:
        """Raises: whatever ended the rollout, if it has failed already; never waits."""
        if self._pending is not None and self._pending.result.done():
            self._pending.result.result()

    def __enter__(self) -> RolloutAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is running, and wait for it to end."""
        pending, self._pending = self._pending, None
        if pending is None or pending.thread is None:
            return
        pending.is_cancelled.set()
        pending.thread.join(END_SECONDS)
        if pending.thread.is_alive():
            self._note(
                f"the rollout of step {pending.step}, which is not needed any more, did not end within "
                f"{END_SECONDS:.0f} s; it ends with its engines"
            )

    def _run(self, pending: _Pending) -> None:
        def poll() -> None:
            if pending.is_cancelled.is_set():
                raise StopRequested(f"the rollout of step {pending.step} is not needed any more")
            self._poll()

        try:
            pending.result.set_result(self._collect(pending.step, poll))
        except BaseException as error:  # noqa: BLE001 - raised again, as it is, in the thread that waits for it
            pending.result.set_exception(error)

    @staticmethod
    def _wait(pending: _Pending, poll: Callable[[], None]) -> StepRollout:
        while not pending.result.done():
            poll()
            concurrent.futures.wait([pending.result], timeout=POLL_SECONDS)
        return pending.result.result()
