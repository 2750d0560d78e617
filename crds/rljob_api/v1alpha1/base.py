"""The base of every API model."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """camelCase on the wire, snake_case in Python; unknown keys are errors; field docstrings become CRD descriptions."""

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


class StrEnum(str, Enum):
    """An enum whose PascalCase values are the strings of the API."""

    def __str__(self) -> str:
        return str(self.value)


Quantity = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$",
        max_length=32,
        examples=["500m", "16Gi"],
    ),
]
"""A Kubernetes resource quantity."""

PositiveInt32 = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
