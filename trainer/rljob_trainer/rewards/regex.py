"""The Regex check: what the last match of a pattern captured, against the gold answer."""

from __future__ import annotations

import re
from typing import Any

from rljob_trainer.rewards.numbers import parse_number


def score_regex(response: str, answer: Any, pattern: str) -> float:
    """1.0 if the first group (or the whole match) of the last match equals the answer, else 0.0."""
    return judge_regex(response, answer, pattern)[0]


def judge_regex(response: str, answer: Any, pattern: str) -> tuple[float, str | None]:
    """(`score_regex`, what was found or None).

    Two numbers are compared as numbers (`1,000` equals `1000.0`); anything else as text without surrounding space.
    Pattern and response may take exponential time together, so this runs under a hard time limit only.
    """
    last = None
    for last in re.finditer(pattern, response):  # noqa: B007 - the last one is used below
        pass
    found = None if last is None else last[1] if last.re.groups else last[0]
    if found is None:
        return 0.0, None
    number, gold = parse_number(found), parse_number(answer)
    if number is not None and gold is not None:
        return float(number == gold), str(number)
    return float(found.strip() == str(answer).strip()), found.strip()
