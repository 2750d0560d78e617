"""Arithmetic on Kubernetes resource quantities."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from rljob_api.v1alpha1.base import QUANTITY_PATTERN

_FACTORS: Final[dict[str, Fraction]] = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}
GIBIBYTE: Final = 1024**3


def parse_quantity(text: str) -> Fraction:
    """The exact value of a quantity, for example bytes of `16Gi` or cores of `500m`.

    Raises:
        ValueError: not a quantity.
    """
    if re.match(QUANTITY_PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a quantity; quantities look like 16Gi or 500m")
    number = text.rstrip("mkKMGTPEi")
    return Fraction(number) * _FACTORS[text[len(number) :]]


def format_bytes(num_bytes: Fraction | int) -> str:
    """The shortest exact binary quantity that is no more than `num_bytes`; whole bytes below 1 Ki."""
    whole = int(num_bytes)
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        factor = int(_FACTORS[suffix])
        if whole >= factor and whole % factor == 0:
            return f"{whole // factor}{suffix}"
    return str(whole)
