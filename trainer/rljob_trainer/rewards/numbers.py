"""Reads numbers out of text, exactly: answers are compared as rationals, never as strings or floats.

What counts as one number: an optional sign (`-`, `+`, U+2212), digits with optional thousands groups (comma,
no-break space, narrow or thin space; an ordinary space separates numbers), decimals, an exponent, or a fraction `a/b`.
A number that runs on into something that changes its value (`1,23`, `12.345,67`, `1.2.3`, `3/4/5`) is malformed and is
read as no number at all rather than as its first part.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final

_MAX_EXPONENT: Final = 400
"""Beyond this `1e999999999` would be expanded digit by digit."""
_MAX_DIGITS: Final = 4000
"""Python refuses longer integers from text."""

_SIGN = r"[-+\u2212]"
_GROUP = r"[,\u00a0\u202f\u2009]"
_DIGITS = rf"(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+\u2212]?\d+)?"
NUMBER: Final = rf"(?P<number>{_UNSIGNED}(?:/\d+)?)(?![\d/]|[.,/]\d|{_GROUP}\d)"
"""Regular expression of one unsigned number with nothing malformed behind it."""
SIGNED_NUMBER: Final = rf"(?P<sign>{_SIGN})?[$€£]?{NUMBER}"
"""The same with an optional sign and currency sign before it."""

_WHOLE = re.compile(rf"\s*[$€£]?{SIGNED_NUMBER}\s*")
_SEPARATORS = re.compile(_GROUP)


def to_fraction(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `SIGNED_NUMBER`; None for a zero denominator or an absurd size."""
    text = _SEPARATORS.sub("", match["number"]).replace("\u2212", "-")
    if len(text) > _MAX_DIGITS:
        return None
    mantissa, _, denominator = text.partition("/")
    mantissa, _, exponent = mantissa.lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    if denominator:
        if int(denominator) == 0:
            return None
        value /= int(denominator)
    return -value if match["sign"] in ("-", "\u2212") else value


def parse_number(value: Any) -> Fraction | None:
    """A gold answer that is one number, as a rational; None for anything else (null, booleans, NaN, words)."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return Fraction(value)
    # repr of a float is the shortest decimal that reads back to it: 0.1 is meant as 1/10.
    match = _WHOLE.fullmatch(repr(value) if isinstance(value, float) else str(value))
    return None if match is None else to_fraction(match)
