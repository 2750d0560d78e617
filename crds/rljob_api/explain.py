"""Turn a pydantic error into a finding for people: field path, value, rule, and a value that works."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rljob_api.findings import Finding, FindingReason, make_error
from rljob_api.schema_paths import find_field, find_model, format_path, index_spec_fields, list_fields

_MAX_VALUE_CHARACTERS: Final = 80
_KIND_OF_TYPE: Final[dict[str, tuple[str, str]]] = {
    "int_type": ("an integer", "1"),
    "int_from_float": ("an integer", "1"),
    "float_type": ("a number", "1e-6"),
    "bool_type": ("a boolean", "true"),
    "list_type": ("a list", "[...]"),
    "dict_type": ("a mapping", "{...}"),
    "model_type": ("a mapping", "{...}"),
    "model_attributes_type": ("a mapping", "{...}"),
    "string_type": ("text", '"..."'),
}


def explain(error: ErrorDetails, document: Mapping[str, Any]) -> Finding:
    """One finding for one pydantic error; `document` is what was validated."""
    path = error["loc"]
    field = find_field(path)
    handler = _HANDLERS.get(error["type"])
    if handler is not None:
        return handler(error, field)
    if error["type"] in _KIND_OF_TYPE:
        return _explain_type(error, field)
    if error["type"] in ("enum", "literal_error"):
        return _explain_enum(error)
    return make_error(format_path(path), f"{show(error['input'])}: {error['msg']}{_suggest_value(field)}")


def show(value: Any) -> str:
    """A value as it would stand in YAML, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."


def suggest_names(name: str, known: list[str]) -> list[str]:
    """Known names close to a misspelt one, whatever its case and underscores."""
    folded = {candidate.lower(): candidate for candidate in known}
    key = name.replace("_", "").replace("-", "").lower()
    if key in folded:
        return [folded[key]]
    return [folded[match] for match in difflib.get_close_matches(key, folded, n=2, cutoff=0.7)]


def _explain_unknown(error: ErrorDetails, _field: FieldInfo | None) -> Finding:
    path = error["loc"]
    name = str(path[-1])
    model = find_model(path[:-1])
    known = list(list_fields(model)) if model else []
    close = suggest_names(name, known)
    elsewhere = [place for place in index_spec_fields().get(name, ()) if place != format_path(path)]
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif elsewhere:
        hint = f"{name} belongs to {' or '.join(elsewhere[:3])}"
    else:
        hint = f"known here: {', '.join(known)}"
    return make_error(format_path(path), f"unknown field; {hint}", FindingReason.UNKNOWN_FIELD)


def _explain_missing(error: ErrorDetails, field: FieldInfo | None) -> Finding:
    description = f" ({field.description.rstrip('.')})" if field and field.description else ""
    return make_error(
        format_path(error["loc"]), f"required{description}{_suggest_value(field)}", FindingReason.MISSING_FIELD
    )


def _explain_type(error: ErrorDetails, field: FieldInfo | None) -> Finding:
    value = error["input"]
    kind, example = _KIND_OF_TYPE[error["type"]]
    if error["type"] == "string_type" and isinstance(value, bool | int | float):
        hint = f'; quote it: "{json.dumps(value)}"'
    elif error["type"] == "bool_type":
        hint = "; use true or false"
    else:
        hint = _suggest_value(field) or f"; for example {example}"
    if value is None:
        hint += ", or leave the field out"
    return make_error(format_path(error["loc"]), f"{show(value)} is not {kind}{hint}", FindingReason.INVALID_TYPE)


def _explain_enum(error: ErrorDetails) -> Finding:
    value = error["input"]
    expected = str(error.get("ctx", {}).get("expected", ""))
    values = [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",") if part.strip()]
    close = suggest_names(value, values) if isinstance(value, str) else []
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return make_error(format_path(error["loc"]), f"{show(value)} is not known; {hint}use one of {', '.join(values)}")


def _explain_bound(error: ErrorDetails, field: FieldInfo | None) -> Finding:
    return make_error(
        format_path(error["loc"]), f"{show(error['input'])} is out of range; use {_describe_range(field, error)}"
    )


def _explain_pattern(error: ErrorDetails, field: FieldInfo | None) -> Finding:
    pattern = error.get("ctx", {}).get("pattern", "")
    message = f"{show(error['input'])} must match {pattern}{_suggest_value(field)}"
    return make_error(format_path(error["loc"]), message)


def _explain_length(error: ErrorDetails, field: FieldInfo | None) -> Finding:
    context = error.get("ctx", {})
    unit = "characters" if error["type"].startswith("string") else "entries"
    short = error["type"].endswith("short")
    limit = context.get("min_length") if short else context.get("max_length")
    size = len(error["input"]) if isinstance(error["input"], str | list | dict) else "?"
    rule = f"needs at least {limit} {unit}" if short else f"takes at most {limit} {unit}"
    hint = _suggest_value(field) if short else ""
    return make_error(format_path(error["loc"]), f"has {size} {unit}, {rule}{hint}")


_HANDLERS: Final[dict[str, Callable[[ErrorDetails, FieldInfo | None], Finding]]] = {
    "extra_forbidden": _explain_unknown,
    "missing": _explain_missing,
    "greater_than": _explain_bound,
    "greater_than_equal": _explain_bound,
    "less_than": _explain_bound,
    "less_than_equal": _explain_bound,
    "string_pattern_mismatch": _explain_pattern,
    "string_too_short": _explain_length,
    "string_too_long": _explain_length,
    "too_short": _explain_length,
    "too_long": _explain_length,
}


def _suggest_value(field: FieldInfo | None) -> str:
    """`; for example ...`, from the field's examples, else its default."""
    if field is None:
        return ""
    for info in (field, *_list_field_infos(field)):
        if info.examples:
            return f"; for example {' or '.join(show(example) for example in info.examples[:2])}"
    if isinstance(field.default, bool | int | float | str):
        return f"; for example {show(field.default)}"
    return ""


def _describe_range(field: FieldInfo | None, error: ErrorDetails) -> str:
    low = high = ""
    for constraint in _list_constraints(field):
        match constraint:
            case annotated_types.Ge(ge=bound):
                low = f"{bound} or more"
            case annotated_types.Gt(gt=bound):
                low = f"more than {bound}"
            case annotated_types.Le(le=bound):
                high = f"at most {bound}"
            case annotated_types.Lt(lt=bound):
                high = f"less than {bound}"
    text = " and ".join(part for part in (low, high) if part) or error["msg"]
    default = field.default if field else None
    number = isinstance(default, int | float) and not isinstance(default, bool)
    return f"{text}, for example {show(default)}" if number else text


def _list_constraints(field: FieldInfo | None) -> list[Any]:
    """Constraints of a field: its own metadata, and those inside `Annotated[...] | None`."""
    if field is None:
        return []
    return [constraint for info in (field, *_list_field_infos(field)) for constraint in info.metadata]


def _list_field_infos(field: FieldInfo) -> list[FieldInfo]:
    """`Field(...)` declarations inside a field's type, for example in `Quantity | None` or `list[Path]`."""
    found: list[FieldInfo] = []
    stack = [field.annotation]
    while stack:
        annotation = stack.pop()
        found += [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, FieldInfo)]
        stack += getattr(annotation, "__args__", ())
    return found
