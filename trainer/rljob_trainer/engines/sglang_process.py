"""The processes of one SGLang engine: start, calls with deadlines, death, end.

`Engine` lives on a thread of its own that also runs its event loop: every other thread may then call it, and SGLang
finds no main thread to install its signal handlers in. Those answer the crash of a scheduler by killing the process
that embeds the engine (`kill_process_tree(os.getpid())`); here the crash is an `EngineDied` with the engine's last
words. The thread must live as long as the engine: Linux sends the parent-death signal of a child when the *thread*
that started it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from rljob_trainer.engines.child_guard import end_processes, list_descendants, read_start_time
from rljob_trainer.engines.child_output import ChildOutput
from rljob_trainer.errors import ConfigurationError, EngineDied, TrainerError

POLL_SECONDS: Final = 0.2
STOP_SECONDS: Final = 30.0
LAST_WORDS_SECONDS: Final = 1.0
END_SECONDS: Final = 2.0
SIG_IGN: Final = 1


def without_detokenizer(engine_class: type) -> type:
    """`Engine` that starts no detokenizer.

    With `skip_tokenizer_init` the schedulers send token ids straight to the caller (0.5.16 and 0.5.23,
    `scheduler_components/ipc_channels.py`), and a process that imports all of SGLang would wait for nothing.
    """

    def launch_none(cls: type, *arguments: Any, **keywords: Any) -> tuple[list[Any], list[str]]:
        return [], []

    return type("TokenEngine", (engine_class,), {"_launch_detokenizer_subprocesses": classmethod(launch_none)})


class EngineProcesses:
    """One running `sglang.srt.entrypoints.engine.Engine`."""

    def __init__(self, build: Callable[[], Any], *, timeout_seconds: float) -> None:
        """Start it.

        Args:
            build: returns the engine; called on its thread.
            timeout_seconds: deadline of the start.

        Raises:
            EngineDied: a scheduler failed, or the deadline passed.
            ConfigurationError: the arguments were refused.
        """
        _ignore_sigquit()
        self._build = build
        self._output = ChildOutput()
        others = set(list_descendants(os.getpid()))
        self._started: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="sglang-engine", daemon=True)
        self._thread.start()
        try:
            self.engine: Any = self._wait_for_start(timeout_seconds)
        except TrainerError:
            # A start that failed half-way leaves schedulers that hold memory and wait for their peers.
            end_processes(sorted(set(list_descendants(os.getpid())) - others))
            raise
        self._family = sorted(set(list_descendants(os.getpid())) - others)
        pids = set(self.engine.get_all_child_pids())
        self._watched = [(pid, started) for pid, started in self._family if pid in pids]
        atexit.unregister(self.engine.shutdown)  # it kills all children of this process, whoever's they are

    def _wait_for_start(self, timeout_seconds: float) -> Any:
        try:
            return self._started.result(timeout=timeout_seconds)
        except concurrent.futures.TimeoutError as error:
            if self._started.done():
                raise
            raise EngineDied(
                f"SGLang engine: not ready within {timeout_seconds:.0f} s\n{self._last_lines()}"
            ) from error

    def _run(self) -> None:
        try:
            with self._output.capture():
                engine = self._build()
        except (TypeError, ValueError, AssertionError) as error:
            self._started.set_exception(ConfigurationError(f"SGLang engine: refused its arguments: {error}"))
            return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            is_typed = isinstance(error, TrainerError)
            wrapped = (
                error if is_typed else EngineDied(f"SGLang engine: did not start: {error!r}\n{self._last_lines()}")
            )
            self._started.set_exception(wrapped)
            return
        self._loop: asyncio.AbstractEventLoop = engine.loop
        asyncio.set_event_loop(self._loop)
        self._started.set_result(engine)
        self._loop.run_forever()

    def submit(self, call: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, call: Coroutine[Any, Any, Any], *, what: str, timeout_seconds: float) -> Any:
        """Its result.

        Raises:
            EngineDied: a process of the engine is gone, the call failed, or the deadline passed.
        """
        return self.wait(self.submit(call), what=what, timeout_seconds=timeout_seconds)

    def wait(self, future: concurrent.futures.Future[Any], *, what: str, timeout_seconds: float) -> Any:
        """As `call`, for a submitted coroutine."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except concurrent.futures.TimeoutError as error:
                if future.done():
                    raise EngineDied(f"SGLang engine: {what} failed: {error!r}\n{self._last_lines()}") from error
                self.check_alive()
                if time.monotonic() > deadline:
                    future.cancel()
                    raise EngineDied(
                        f"SGLang engine: {what}: no answer within {timeout_seconds:.0f} s\n{self._last_lines()}"
                    ) from error
            except TrainerError:
                raise
            except Exception as error:
                self.check_alive()
                raise EngineDied(f"SGLang engine: {what} failed: {error!r}\n{self._last_lines()}") from error

    def check_alive(self) -> None:
        """Raises:
        EngineDied: a scheduler or another process of the engine ended.
        """
        dead = [pid for pid, started in self._watched if read_start_time(pid) != started]
        if dead:
            time.sleep(LAST_WORDS_SECONDS)  # what it printed may still be in the pipe
            raise EngineDied(f"SGLang engine: process {', '.join(map(str, dead))} ended\n{self._last_lines()}")

    def stop(self) -> None:
        """Kill this engine's processes, and only those. Returns when they are gone.

        `Engine.shutdown` would kill every child of this process, whoever started it.
        """
        watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        family = {*self._family, *(grandchild for pid, _ in self._family for grandchild in list_descendants(pid))}
        end_processes(sorted(family))
        self.submit(self._end_tasks())
        self._thread.join(timeout=STOP_SECONDS)
        close_sockets(self.engine, self.engine.tokenizer_manager)

    async def _end_tasks(self) -> None:
        """Cancel what waits for answers that never come, let it end, and end the loop."""
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        self._loop.stop()

    def _last_lines(self) -> str:
        lines = self._output.last_lines()
        return f"last lines of its log:\n{lines}" if lines else "its log is empty"


def close_sockets(*owners: Any) -> None:
    """Close the ZeroMQ contexts behind the attributes of SGLang's objects, and drop what was not delivered.

    Collecting a context waits for ever until dead schedulers have read what was sent to them.
    """
    import zmq

    values = [value for owner in owners if owner is not None for value in vars(owner).values()]
    contexts = {id(value.context): value.context for value in values if isinstance(value, zmq.Socket)}
    for context in contexts.values():
        context.destroy(linger=0)


def _ignore_sigquit() -> None:
    """SGLang's schedulers report a crash by SIGQUIT to their parent, whose default action is to dump core.

    `signal.signal` works in the main thread only; an actor method runs in another.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGQUIT), SIG_IGN)
