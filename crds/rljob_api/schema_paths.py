"""The field tree of RLJob: which keys exist where, and what they mean."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_api.v1alpha1.base import ApiModel
from rljob_api.v1alpha1.spec import RLJob


def list_fields(model: type[ApiModel]) -> dict[str, FieldInfo]:
    """Fields of a model by their name in the API."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def find_models(annotation: Any) -> Iterator[type[ApiModel]]:
    """API models inside a type (through Optional, list and Annotated)."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    elif origin in (Annotated,):
        yield from find_models(get_args(annotation)[0])
    elif origin in (list, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from find_models(argument)


def find_model(path: Sequence[int | str]) -> type[ApiModel] | None:
    """The model that a path leads to, or None (a free-form map, or no such path)."""
    model: type[ApiModel] = RLJob
    for part in path:
        if isinstance(part, int):
            continue
        field = list_fields(model).get(part)
        inner = next(find_models(field.annotation), None) if field else None
        if inner is None:
            return None
        model = inner
    return model


def find_field(path: Sequence[int | str]) -> FieldInfo | None:
    """The field at a path (of a list's element: the list's field), or None."""
    names = [part for part in path if isinstance(part, str)]
    if not names:
        return None
    model = find_model(names[:-1])
    return list_fields(model).get(names[-1]) if model else None


@functools.cache
def index_spec_fields() -> dict[str, tuple[str, ...]]:
    """Every field name below `spec`, with the paths at which it stands: finds misplaced keys."""
    index: dict[str, list[str]] = {}

    def walk(model: type[ApiModel], prefix: str) -> None:
        for name, field in list_fields(model).items():
            path = f"{prefix}.{name}"
            index.setdefault(name, []).append(path)
            for inner in find_models(field.annotation):
                walk(inner, path)

    walk(next(find_models(RLJob.model_fields["spec"].annotation)), "spec")
    return {name: tuple(paths) for name, paths in index.items()}


def format_path(path: Sequence[int | str]) -> str:
    """`spec.cluster.env[0].value`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
