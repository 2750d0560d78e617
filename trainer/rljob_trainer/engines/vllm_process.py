"""The processes of one vLLM engine: start, calls with deadlines, death with last words, end without orphans."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from rljob_trainer.engines.child_guard import ChildGuard, end_processes, list_descendants
from rljob_trainer.engines.child_output import ChildOutput
from rljob_trainer.errors import EngineDied, TrainerError

STOP_SECONDS: Final = 20.0
LAST_WORDS_SECONDS: Final = 2.0

T = TypeVar("T")


class VLLMProcess:
    """`vllm.v1.engine.async_llm.AsyncLLM` on an event loop of its own thread, and the processes behind it."""

    def __init__(self, name: str, build: Callable[[], Any], *, timeout_seconds: float) -> None:
        """Start it.

        Args:
            name: what messages call the engine.
            build: returns the `AsyncLLM`; called on the event loop.
            timeout_seconds: deadline of the start; vLLM's own is `VLLM_ENGINE_READY_TIMEOUT_S`.

        Raises:
            EngineDied: the engine's processes failed to start. Whatever `build` raises by itself.
        """
        self._name = name
        self._output = ChildOutput()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        self._engine: Any = None
        self._guard: ChildGuard | None = None
        before = set(list_descendants_of_us())

        async def start() -> Any:
            return build()

        try:
            with self._output.capture():
                self._engine = self.call(start(), timeout_seconds, "start")
        except BaseException:
            end_processes([child for child in list_descendants_of_us() if child not in before])
            self.stop()
            raise
        self.processes = [child for child in list_descendants_of_us() if child not in before]
        self._guard = ChildGuard(self.processes)

    @property
    def engine(self) -> Any:
        """The `AsyncLLM`; use it inside coroutines given to `call` or `submit` only."""
        return self._engine

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run on the event loop; for what may take long."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float, what: str) -> T:
        """Run on the event loop and wait.

        Raises:
            EngineDied: the deadline passed, or the engine is gone.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout=timeout_seconds)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise self.translate(error, what) from error
            future.cancel()
            raise EngineDied(
                f"{self._name}: no answer to {what} within {timeout_seconds:.0f} s{self.describe_output()}"
            ) from error
        except Exception as error:
            raise self.translate(error, what) from error

    def run(self, make: Callable[[Any], Awaitable[T]], timeout_seconds: float, what: str) -> T:
        """Call a method of the engine: `make` gets the `AsyncLLM`."""

        async def run() -> T:
            return await make(self._engine)

        return self.call(run(), timeout_seconds, what)

    def translate(self, error: BaseException, what: str) -> BaseException:
        """`EngineDied` with the engine's last lines for what its processes did; bad arguments stay what they are."""
        if isinstance(error, TrainerError):
            return error
        if self._engine is None and isinstance(error, (TypeError, ValueError)):
            return error
        self._output.drain(LAST_WORDS_SECONDS)
        return EngineDied(f"{self._name}: {what} failed: {type(error).__name__}: {error}{self.describe_output()}")

    def describe_output(self) -> str:
        """For the end of an error message."""
        lines = self._output.last_lines()
        return f"\nlast lines of the engine:\n{lines}" if lines else "\nthe engine printed nothing"

    @property
    def is_dead(self) -> bool:
        """Whether the engine's processes are gone."""
        return self._engine is None or bool(self._engine.errored)

    def stop(self) -> None:
        """End all processes; idempotent."""
        if self._engine is not None:
            engine, self._engine = self._engine, None

            async def shut_down() -> None:
                engine.shutdown()

            with contextlib.suppress(concurrent.futures.TimeoutError):  # what is left is ended below
                self.submit(shut_down()).result(timeout=STOP_SECONDS)
            end_processes(self.processes)
        if self._guard is not None:
            self._guard.release()
            self._guard = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)


def list_descendants_of_us() -> list[tuple[int, int]]:
    """Processes below this one."""
    return list_descendants(os.getpid())
