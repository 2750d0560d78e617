"""Switches whose name and sense depend on the engine's version; the operator renders them, the trainer applies them.

SGLang's memory-imbalance check fails co-located engines (the trainer's memory differs between ranks):

* before 0.5.7 it is switched off by `SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=True`
* from 0.5.7 by `SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0`. Releases 0.5.7 to 0.5.16 copy an `SGL_DISABLE_...` value
  un-negated over the new variable, so that the old spelling switches the check back on; it has to be absent.
"""

from __future__ import annotations

import re
from typing import Final

NEW_SWITCH_VERSION: Final = (0, 5, 7)
_NEW_SWITCH: Final = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
_OLD_SWITCH: Final = "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"
MEMORY_CHECK_SPELLINGS: Final = (
    _NEW_SWITCH,
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK",
    _OLD_SWITCH,
    "SGL_ENABLE_TP_MEMORY_INBALANCE_CHECK",
)
_VERSION: Final = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?(?![0-9])")


def parse_engine_version(version: str) -> tuple[int, int, int]:
    """Release number of an engine version; suffixes (`rc1`, `.post2`, `+cu128`) do not move it.

    Raises:
        ValueError: no leading `major.minor`.
    """
    match = _VERSION.match(version)
    if match is None:
        raise ValueError(f"engine version {version!r} does not start with major.minor, for example 0.5.16")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def choose_memory_check_switch(sglang_version: str) -> dict[str, str]:
    """The one variable that switches the check off; every other spelling has to be absent.

    Raises:
        ValueError: not a version.
    """
    if parse_engine_version(sglang_version) >= NEW_SWITCH_VERSION:
        return {_NEW_SWITCH: "0"}
    return {_OLD_SWITCH: "True"}
