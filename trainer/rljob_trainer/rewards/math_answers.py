"""The Math check: the final answer of a response against the gold answer, compared as mathematics.

Parsing and comparing are `math-verify`'s (Kydlíček et al., Hugging Face, 2025; on SymPy). Around it stand the rules
that libraries get wrong in training: braces are counted, not matched by a regular expression (ms-swift PR 10147); text
that cannot be parsed equals nothing (open-r1 gave 1.0 for an unparsable gold answer, cookbook #335); two plain numbers
are compared exactly, without SymPy.

Runs in a scoring process only: a tower of powers takes for ever and all memory, and neither an alarm signal nor a
memory limit inside the process stops it (SymPy's callers swallow MemoryError), so the parent kills the process.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from fractions import Fraction
from typing import Any, Final

from rljob_trainer.rewards.numbers import parse_number

MAX_ANSWER_CHARACTERS: Final = 2000
"""A longer final answer is no answer; the parser's time grows faster than its input."""
TAIL_CHARACTERS: Final = 4000
"""Without a box the answer is looked for in so much of the end."""

_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*")
_TEXT_MACRO: Final = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|mathbf|operatorname)\s*\{([^{}]*)\}")
_DECORATION: Final = re.compile(
    r"\\(?:left|right|displaystyle|[,;:! ])|\\(?=[$%#])|\$|\\\(|\\\)|\\\[|\\\]|\{,\}"
    r"|(?<!\w)\s+|\s+(?!\w)"  # a space between two words or numbers says something, any other nothing
)
_LAST_ANSWER_LINE: Final = re.compile(
    r"(?:final\s+answer|answer)\s*(?:\*\*)?\s*(?:is\s*:?|:|=)\s*(?:\*\*)?\s*([^\n]+)", re.IGNORECASE
)
_UNIT: Final = re.compile(
    r"(?<=[\d}.)])\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*[A-Za-z][A-Za-z ./]*\}(?:\^\{?[23]\}?)?|\^?\{?\\circ\}?|°"
    r"|\s[A-Za-z]{1,12}(?:\^[23])?)\s*$"
)
_PLAIN_WORDS: Final = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'()-]*|\([A-Za-z]\)")
_LEFT_SIDE: Final = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\s*=\s*(?=[^=]+$)")


def score_math(response: str, answer: Any, *, flexible: bool) -> tuple[float, str | None]:
    """(1.0 or 0.0, the answer that was found or None).

    The last `\\boxed{...}` (or `\\fbox`) counts; if the gold answer is a set of n elements, the last n boxes together
    do too. With `flexible` and no box at all: what follows the last "answer is" or "Answer:", else the last expression.

    Raises:
        ValueError: the gold answer cannot be compared with anything; such rows are data errors.
        MemoryError: memory ran out.
    """
    gold = normalise(answer)
    problem = describe_gold_problem(answer)
    if problem is not None:
        raise ValueError(problem)
    boxes = find_boxes(response)
    if boxes:
        found: str | None = boxes[-1]
        candidates = [boxes[-1]]
        num_elements = _count_set_elements(gold)
        if 1 < num_elements <= len(boxes):
            candidates.append("\\{" + ",".join(boxes[-num_elements:]) + "\\}")
    else:
        # A box that was never closed is a response cut off in its answer.
        found = find_unboxed(response) if flexible and _BOX.search(response) is None else None
        candidates = [] if found is None else [found]
    if found is None:
        return 0.0, None
    return float(any(are_equal(normalise(candidate), gold) for candidate in candidates)), _strip(normalise(found))


def warm_up() -> None:
    """Load SymPy and the parser's tables, which takes seconds once."""
    are_equal(r"\frac{1}{2}", r"\frac{2}{4}")


def describe_gold_problem(answer: Any) -> str | None:
    """Why a gold answer cannot be compared with anything, or None. Numbers and words need no parser."""
    gold = normalise(answer)
    if answer is None or not _strip(gold):
        return "the gold answer is empty"
    if len(gold) > MAX_ANSWER_CHARACTERS:
        return f"the gold answer is longer than {MAX_ANSWER_CHARACTERS} characters"
    if _read_number(gold) is not None or _PLAIN_WORDS.fullmatch(_strip_text(gold)) or _parse(gold) is not None:
        return None
    return f"the gold answer {gold!r:.120} is neither a number, nor words, nor LaTeX that can be parsed"


def needs_parser(answer: Any) -> bool:
    """False where `describe_gold_problem` answers at once, without SymPy."""
    gold = normalise(answer)
    return not (answer is None or _read_number(gold) is not None or _PLAIN_WORDS.fullmatch(_strip_text(gold)))


def find_boxes(text: str) -> list[str]:
    """Contents of all closed boxes, outermost ones, in order. `\\boxed 5` counts; an unclosed box does not."""
    boxes: list[str] = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        start = match.end()
        if start < len(text) and text[start] == "{":
            end = _find_closing_brace(text, start)
            if end is None:
                position = start
                continue
            content, position = text[start + 1 : end], end + 1
        else:
            plain = re.match(r"[-+]?\w+", text[start:])
            content, position = (plain[0] if plain else ""), start + (plain.end() if plain else 0)
        inner = find_boxes(content)
        boxes.append(inner[-1] if inner else content)
    return boxes


def find_unboxed(response: str) -> str | None:
    """The answer of a response without a box."""
    tail = response[-TAIL_CHARACTERS:]
    lines = _LAST_ANSWER_LINE.findall(tail)
    if lines:
        line = lines[-1].strip().rstrip(".*").strip()
        in_math = re.fullmatch(r"\$+([^$]+)\$+.*|\\\((.+?)\\\).*|\\\[(.+?)\\\].*", line)
        return next((group for group in in_math.groups() if group), line) if in_math else line
    expressions = re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)|([-+\u2212]?\d[\d,]*(?:\.\d+)?(?:/\d+)?)", tail)
    return next((group for group in expressions[-1] if group), None) if expressions else None


def normalise(answer: Any) -> str:
    """Text of an answer: full-width digits and Unicode minus become ASCII, a box around it and `x =` before it go."""
    text = repr(answer) if isinstance(answer, float) else str(answer)
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").strip()
    boxes = find_boxes(text) if "\\boxed" in text or "\\fbox" in text else []
    if boxes:
        text = boxes[-1].strip()
    text = text.strip("$").strip()
    if text.endswith(".") and not text.endswith("\\."):
        text = text[:-1].rstrip()
    return text


def are_equal(found: str, gold: str) -> bool:
    """Whether two normalised answers are the same: as text, as exact numbers, or as mathematics (`math-verify`, floats
    to six decimals: 0.333 is not 1/3).

    Raises:
        MemoryError: memory ran out, which says nothing about the answer.
    """
    if not found or len(found) > MAX_ANSWER_CHARACTERS:
        return False
    if _strip(found) == _strip(gold) and _strip(gold):
        return True
    numbers = _read_number(found), _read_number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    parsed_found, parsed_gold = _parse(found), _parse(gold)
    if parsed_found is None or parsed_gold is None:
        return False
    from math_verify import verify

    try:
        # No time limit in here: it would be a signal, which works in the main thread only and not in native code.
        return bool(verify([parsed_gold], [parsed_found], timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - objects that cannot be compared, a matrix and a set for example, are not equal
        return False


def _find_closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces do not count."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _strip_text(text: str) -> str:
    return _TEXT_MACRO.sub(r"\1", text).strip()


def _strip(text: str) -> str:
    """What two spellings of the same characters have in common."""
    text = _TEXT_MACRO.sub(r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _DECORATION.sub("", text).rstrip(".")
    # `YES` is `yes`, but X is another variable than x.
    return text.lower() if len(text) > 1 and _PLAIN_WORDS.fullmatch(text) else text


def _read_number(text: str) -> Fraction | None:
    """A plain number, its unit, currency sign or `x =` taken off."""
    text = _LEFT_SIDE.sub("", text.replace("{,}", ",").replace("\\!", "").replace("\\$", "$").replace("\\ ", " "))
    value = parse_number(text)
    if value is None:
        without_unit = _UNIT.sub("", text)
        value = parse_number(_strip_text(without_unit)) if without_unit != text else None
    return value


def _count_set_elements(gold: str) -> int:
    """Elements of a gold answer that is a set, else 0."""
    parsed = _parse(gold) if "," in gold else None
    return len(parsed.args) if parsed is not None and type(parsed).__name__ == "FiniteSet" else 0


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    """The SymPy object of an answer, or None."""
    from math_verify import LatexExtractionConfig, parse

    # It says on every start that its own time limit is off; ours is the process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    text = _UNIT.sub("", text)
    try:
        # math-verify takes `a/b` and `1.5` inside a box for LaTeX as well.
        parsed = parse(
            f"\\boxed{{{text}}}",
            extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser's ways to say that this is no mathematics
        return None
    return parsed[0] if parsed else None
