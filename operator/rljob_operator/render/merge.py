"""Strategic merge of a user's pod template patch: mappings merge, lists of named items merge by their key.

`null` deletes a key, `$patch: delete` in an item deletes the item, every other list and scalar is replaced: the rules
of Kubernetes' strategic merge patch for pods. Nothing of the patch is lost silently.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from rljob_api.findings import Finding
from rljob_operator.render.types import make_error

MERGE_KEYS: Final[dict[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists that merge item by item, and the key that identifies an item (k8s.io/api core/v1, patchMergeKey)."""
_DIRECTIVE: Final = "$patch"


def merge_mapping(base: dict[str, Any], patch: dict[str, Any], path: str) -> tuple[dict[str, Any], list[Finding]]:
    """`patch` over `base`; neither is changed. `path` is the field path of the patch, for findings."""
    merged = copy.deepcopy(base)
    findings: list[Finding] = []
    for key, value in patch.items():
        key_path = f"{path}.{key}"
        if key == _DIRECTIVE:
            findings.append(
                make_error(
                    "InvalidValue",
                    key_path,
                    f"{value!r} is not supported here; delete a key with null, a list item with `$patch: delete`",
                )
            )
        elif value is None:
            merged.pop(key, None)
        elif (expected := _expected_type(key, merged.get(key))) and not isinstance(value, expected):
            kind = "list" if expected is list else "mapping"
            findings.append(make_error("InvalidType", key_path, f"{value!r} is not a {kind}"))
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key], nested = merge_mapping(merged[key], value, key_path)
            findings += nested
        elif isinstance(value, list) and key in MERGE_KEYS:
            merged[key], nested = _merge_list(merged.get(key) or [], value, MERGE_KEYS[key], key_path)
            findings += nested
        else:
            merged[key] = copy.deepcopy(value)
    return merged, findings


def _expected_type(key: str, current: Any) -> type | None:
    """A mapping stays a mapping and a list a list; None: anything goes."""
    if isinstance(current, dict):
        return dict
    return list if key in MERGE_KEYS or isinstance(current, list) else None


def _merge_list(
    base: list[dict[str, Any]], patch: list[Any], merge_key: str, path: str
) -> tuple[list[dict[str, Any]], list[Finding]]:
    merged = {item.get(merge_key): item for item in base}
    findings: list[Finding] = []
    seen: set[Any] = set()
    for index, item in enumerate(patch):
        item_path = f"{path}[{index}]"
        if not isinstance(item, dict) or merge_key not in item:
            findings.append(make_error("MissingField", f"{item_path}.{merge_key}", f"items need {merge_key}"))
            continue
        identity = item[merge_key]
        if identity in seen:
            findings.append(
                make_error(
                    "DuplicateItem",
                    f"{item_path}.{merge_key}",
                    f"{identity!r} is given twice in one list; keep one item per {merge_key}",
                )
            )
            continue
        seen.add(identity)
        if item.get(_DIRECTIVE) == "delete":
            merged.pop(identity, None)
        elif identity in merged:
            merged[identity], nested = merge_mapping(merged[identity], _one_env_source(path, item), item_path)
            findings += nested
        else:
            # Merged over nothing, so that nulls and directives inside a new item are handled alike.
            merged[identity], nested = merge_mapping({}, item, item_path)
            findings += nested
    return list(merged.values()), findings


def _one_env_source(path: str, item: dict[str, Any]) -> dict[str, Any]:
    """An env item has a value or a reference: giving one removes the other, or the pod would be invalid."""
    if not path.endswith(".env"):
        return item
    if "value" in item:
        return {"valueFrom": None, **item}
    if "valueFrom" in item:
        return {"value": None, **item}
    return item
