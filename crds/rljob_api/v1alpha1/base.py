"""The base of every API model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

__all__ = [
    "QUANTITY_PATTERN",
    "ApiModel",
    "NonNegativeInt32",
    "Path",
    "PositiveInt32",
    "Quantity",
    "Seconds",
    "ShortText",
    "StrEnum",
    "list_map",
]


class ApiModel(BaseModel):
    """camelCase on the wire, snake_case in Python; unknown keys are errors; docstrings become CRD descriptions."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        use_attribute_docstrings=True,
        use_enum_values=False,
        # NaN is not JSON: statistics that are undefined travel as null.
        ser_json_inf_nan="null",
    )


QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


def _spell_quantity(value: Any) -> Any:
    """`cpu: 4` is as good as `cpu: "4"`, as in a Pod; a boolean is an int to Python and must stay wrong."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_spell_quantity),
    Field(pattern=QUANTITY_PATTERN, max_length=32, examples=["500m", "16Gi"]),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""A Kubernetes resource quantity; a plain integer is accepted."""

PositiveInt32 = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]


def list_map(key: str) -> dict[str, Any]:
    """Schema of a list whose elements are named: server-side apply merges by this key, duplicates are refused."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
