"""Kubernetes quantities as integers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}
_QUANTITY: Final = re.compile(r"^([0-9]+(?:\.[0-9]+)?)([A-Za-z]{0,2})$")


def parse_quantity(text: str) -> Decimal:
    """Value of a quantity (`500m` is 0.5, `1Ki` is 1024).

    Raises:
        ValueError: not a quantity of the API's grammar.
    """
    match = _QUANTITY.match(text)
    if match is None or match.group(2) not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity; examples: 500m, 2, 16Gi")
    return Decimal(match.group(1)) * _SUFFIXES[match.group(2)]


def parse_bytes(text: str) -> int:
    """Whole bytes of a memory quantity, rounded down."""
    return int(parse_quantity(text))


def parse_whole_cpus(text: str) -> int:
    """Whole CPUs Ray may schedule on: rounded down, at least 1 (Ray counts in integers, `500m` must still start)."""
    return max(1, int(parse_quantity(text)))
