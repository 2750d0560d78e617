"""What every Python thread of this process is doing. Standard library only: it runs in ranks and engines too."""

from __future__ import annotations

import sys
import threading
import traceback


def format_stacks() -> str:
    """The stack of each thread but the calling one, innermost call last.

    Without thread ids or addresses, so that processes that do the same give the same text.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, 'of native code')}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(sorted(parts)) or "no Python code runs"
