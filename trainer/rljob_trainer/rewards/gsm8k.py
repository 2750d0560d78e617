"""The GSM8K check: the number after the last `####` against the gold answer, compared as numbers.

Format of Cobbe et al. 2021 (arXiv 2110.14168): a solution ends with `#### <number>`. Differs from verl's
`reward_score/gsm8k.py`, which compares strings in the last 300 characters: there `#### 42.`, `####42`, `#### $42` and
`#### 42.0` score 0 for the gold answer 42, and an empty gold answer equals an empty number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final

from rljob_trainer.rewards.numbers import NUMBER, SIGNED_NUMBER, parse_number, to_fraction

_MARKER: Final = "####"
# Spaces, currency signs and Markdown emphasis may stand between the marker and the number; a line break may not.
_MARKED_NUMBER = re.compile(rf"{_MARKER}[^\S\r\n]*[*_`$€£~\\({{\[]*[^\S\r\n]*{SIGNED_NUMBER}")
# In running text a sign belongs to the number only where no word or digit ends before it: `10-3` ends with 3.
_FREE_NUMBER = re.compile(rf"(?<![\d.])(?<!\d[,/])(?:(?<![\w)])(?P<sign>[-+\u2212]))?[$€£]?{NUMBER}")


def extract_answer(response: str, *, flexible: bool) -> Fraction | None:
    """The answer of a response, or None.

    The last marker that is followed by a number counts, so a dangling `####` at the end does no harm. With `flexible`
    and no marker at all, the last number of the response.
    """
    value = None
    for match in _MARKED_NUMBER.finditer(response):
        value = to_fraction(match)
    if value is None and flexible and _MARKER not in response:
        for match in _FREE_NUMBER.finditer(response):
            value = to_fraction(match)
    return value


def extract_gold(answer: Any) -> Fraction | None:
    """The number of a gold answer: the raw column (`… <<48/2=24>>24 … #### 1,450,000`), its text, or a number.

    Calculator annotations are never taken for the answer: text with a marker is read behind the last marker only.
    """
    if isinstance(answer, str) and _MARKER in answer:
        return parse_number(answer.rsplit(_MARKER, 1)[1])
    return parse_number(answer)


def score_gsm8k(response: str, answer: Any, *, flexible: bool) -> float:
    """1.0 if the response's answer equals the gold answer as a number, else 0.0."""
    return judge_gsm8k(response, answer, flexible=flexible)[0]


def judge_gsm8k(response: str, answer: Any, *, flexible: bool) -> tuple[float, str | None]:
    """(`score_gsm8k`, the number that was found or None).

    Raises:
        ValueError: the gold answer holds no number; such rows are data errors and never reach training.
    """
    gold = extract_gold(answer)
    if gold is None:
        raise ValueError(f"the gold answer {answer!r:.200} holds no number")
    found = extract_answer(response, flexible=flexible)
    return float(found == gold), None if found is None else str(found)
