"""`--set path=value`: change fields of the document before it is checked."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any, Final

from rljob_api.load import LoadError, load_documents

_ROOTS: Final = ("apiVersion", "kind", "metadata", "spec", "status")
_SEGMENT: Final = re.compile(r"^([A-Za-z0-9_-]+)((?:\[[0-9]+\])*)$")


class OverrideError(ValueError):
    """An override that cannot be applied."""


def apply_overrides(document: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """A copy of `document` with every `path=value` applied in order.

    A path is `rollout.engine`, `spec.rollout.engine` or `reward.functions[0].weight`; a value is YAML (`1e-6`, `true`,
    `[a, b]`), and `null` removes the field. Whether the field exists is the parser's business.

    Raises:
        OverrideError: no `=`, a path that is no path or does not fit the document, or a value that is not YAML.
    """
    changed = copy.deepcopy(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise OverrideError(f"{override!r} is not path=value, for example rollout.engine=Native")
        _assign(changed, _parse_path(path), _parse_value(override, text), override)
    return changed


def _parse_path(path: str) -> list[str | int]:
    keys: list[str | int] = []
    for segment in path.split("."):
        match = _SEGMENT.match(segment)
        if match is None:
            raise OverrideError(f"{path!r} is not a field path, for example reward.functions[0].weight")
        keys.append(match.group(1))
        keys += [int(index) for index in re.findall(r"\[([0-9]+)\]", match.group(2))]
    return keys if keys[0] in _ROOTS else ["spec", *keys]


def _parse_value(override: str, text: str) -> Any:
    try:
        return load_documents(f"value: {text}")[0]["value"]
    except (LoadError, IndexError, KeyError) as error:
        raise OverrideError(f"{override!r}: the value is not YAML on one line ({error})") from error


def _assign(document: dict[str, Any], keys: list[str | int], value: Any, override: str) -> None:
    target: Any = document
    for key, following in itertools.pairwise(keys):
        target = _descend(target, key, following, override)
    last = keys[-1]
    if isinstance(last, int):
        items = _require_list(target, last, override, can_append=value is not None)
        if value is None:
            del items[last]
        elif last == len(items):
            items.append(value)
        else:
            items[last] = value
    elif not isinstance(target, dict):
        raise OverrideError(f"{override!r}: {last} is a field, but there is a {type(target).__name__} there")
    elif value is None:
        target.pop(last, None)
    else:
        target[last] = value


def _descend(target: Any, key: str | int, following: str | int, override: str) -> Any:
    if isinstance(key, int):
        items = _require_list(target, key, override, can_append=True)
        if key == len(items):
            items.append([] if isinstance(following, int) else {})
        return items[key]
    if not isinstance(target, dict):
        raise OverrideError(f"{override!r}: {key} is a field, but there is a {type(target).__name__} there")
    if target.get(key) is None:
        target[key] = [] if isinstance(following, int) else {}
    return target[key]


def _require_list(target: Any, index: int, override: str, *, can_append: bool) -> list[Any]:
    if not isinstance(target, list):
        raise OverrideError(f"{override!r}: [{index}] needs a list, but there is a {type(target).__name__} there")
    largest = len(target) if can_append else len(target) - 1
    if index > largest:
        raise OverrideError(f"{override!r}: the list has {len(target)} items, the largest index here is {largest}")
    return target
