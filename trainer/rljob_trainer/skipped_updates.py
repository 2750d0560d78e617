"""Updates that were skipped because they were not finite: a few in a row are survived, more end the run."""

from __future__ import annotations

from collections.abc import Callable

from rljob_trainer.errors import NumericalError


def count_skipped(
    num_in_a_row: int, is_finite: bool, *, limit: int, facts: str, cure: str, note: Callable[[str], None]
) -> int:
    """Skipped updates in a row of one model after another update; each is named by `note`.

    Args:
        num_in_a_row: before this update.
        is_finite: of this update.
        limit: `training.maxNanSteps`.
        facts: what was not finite, for people.
        cure: the field to lower, and its value.

    Raises:
        NumericalError: `limit` in a row.
    """
    if is_finite:
        return 0
    num_in_a_row += 1
    note(f"update skipped: {facts} ({num_in_a_row} in a row, limit {limit})")
    if num_in_a_row >= limit:
        raise NumericalError(
            f"{limit} consecutive updates had NaN or Inf ({facts}); weights are those before them; lower {cure}"
        )
    return num_in_a_row
