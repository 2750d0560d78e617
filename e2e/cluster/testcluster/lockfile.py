"""The part of a hashed requirements lock that one package needs, as pure functions on text and metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?==")


def lock_blocks(text: str) -> dict[str, str]:
    """Canonical package name → its lines in the lock (pin, marker and hashes)."""
    blocks: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        pinned = _PINNED.match(line)
        if pinned:
            current = canonicalize_name(pinned.group(1))
            blocks[current] = blocks.get(current, "") + line + "\n"
        elif current and line.startswith((" ", "\t")):
            blocks[current] += line + "\n"
        else:
            current = ""
    return blocks


def closure(root: str, requires: Callable[[str], Iterable[str] | None]) -> set[str]:
    """Canonical names of everything that the requirement ``root`` (such as ``ray[default]``) pulls in, itself included.

    ``requires`` returns the requirement strings of a distribution (as ``importlib.metadata.requires`` does).
    """
    seen: set[tuple[str, str]] = set()
    open_requirements = [Requirement(root)]
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in requires(name) or ():
                child = Requirement(text)
                if child.marker is None or child.marker.evaluate({"extra": extra}):
                    open_requirements.append(child)
    return {name for name, _ in seen}


def lock_subset(lock: str, root: str, requires: Callable[[str], Iterable[str] | None]) -> str:
    """The lock's blocks for the closure of ``root``, in the lock's order.

    Raises:
        ValueError: the lock lacks a package of the closure; names it.
    """
    blocks = lock_blocks(lock)
    wanted = closure(root, requires)
    missing = sorted(wanted - blocks.keys())
    if missing:
        raise ValueError(f"the lock lacks {', '.join(missing)}, needed by {root}; run `make lock`")
    return "".join(text for name, text in blocks.items() if name in wanted)
