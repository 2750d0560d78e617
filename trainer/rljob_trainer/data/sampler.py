"""Which prompts a step takes: a new permutation per epoch, resumable at any step, epoch boundaries included."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rljob_trainer.errors import CheckpointError, ConfigurationError

_STATE_VERSION: Final = 1


class PromptSampler:
    """Draws `prompts_per_step` distinct row indices per step.

    An epoch has `num_rows // prompts_per_step` steps; the remaining rows of its permutation are not used in that epoch
    (another permutation leaves out other rows). The order depends on (seed, epoch) only, never on how often or where
    the run was resumed. A finished epoch is followed by the next one: a restored sampler is never "exhausted", which
    elsewhere made a resume at an epoch boundary train nothing and exit 0 (verl pull request 5725).
    """

    def __init__(self, num_rows: int, prompts_per_step: int, seed: int) -> None:
        """Raises ConfigurationError when there are fewer rows than one step needs."""
        if num_rows < prompts_per_step:
            raise ConfigurationError(
                f"spec.training.promptsPerStep: a step takes {prompts_per_step} prompts (promptsPerStep x "
                f"rollout.overSample), but only {num_rows} usable rows are in spec.data.train; use promptsPerStep <= "
                f"{num_rows} without overSample, or more data"
            )
        self._num_rows = num_rows
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._epoch = 0
        self._rows_taken = 0
        self._order = self._permute(0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts."""
        return self._num_rows // self._prompts_per_step

    @property
    def num_unused_rows_per_epoch(self) -> int:
        """Rows that one epoch leaves out."""
        return self._num_rows % self._prompts_per_step

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far: 1.0 after the last step of the first epoch."""
        return self._epoch + min(1.0, self._rows_taken / (self.steps_per_epoch * self._prompts_per_step))

    def describe(self) -> str:
        """The epoch arithmetic, for the log at the start."""
        left_out = self.num_unused_rows_per_epoch
        share = 100 * left_out / self._num_rows
        return (
            f"{self._num_rows} prompts, {self._prompts_per_step} per step: {self.steps_per_epoch} steps per epoch, "
            f"{left_out} prompts ({share:.1f} %) not used in each epoch"
        )

    def next_batch(self) -> list[int]:
        """Row indices of the next step."""
        return self.take(self._prompts_per_step)

    def take(self, num_rows: int) -> list[int]:
        """The next row indices, at most as many as a step has. Fewer rows left of an epoch are not used in it."""
        if not 1 <= num_rows <= self._prompts_per_step:
            raise ValueError(f"num_rows: {num_rows} is not between 1 and {self._prompts_per_step}")
        if self._rows_taken + num_rows > self._num_rows:
            self._epoch += 1
            self._rows_taken = 0
            self._order = self._permute(self._epoch)
        start = self._rows_taken
        self._rows_taken += num_rows
        return [int(index) for index in self._order[start : self._rows_taken]]

    def state_dict(self) -> dict[str, Any]:
        """Position, as plain numbers; small, since the permutation is recomputed."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "rows_taken": self._rows_taken,
            "num_rows": self._num_rows,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; `prompts_per_step` may differ from then.

        Raises:
            CheckpointError: the data set or the seed is another one, so the position means nothing.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(
                f"the data position in the checkpoint has version {state.get('version')!r}; this trainer reads "
                f"version {_STATE_VERSION}"
            )
        for key, now, field_path in (
            ("num_rows", self._num_rows, "spec.data.train"),
            ("seed", self._seed, "spec.data.shuffleSeed"),
        ):
            if state[key] != now:
                raise CheckpointError(
                    f"{field_path}: the checkpoint was taken with {key.replace('num_rows', 'usable rows')} = "
                    f"{state[key]}, now it is {now}; restore it, or start anew with checkpoint.resume: Never and "
                    "another storage path"
                )
        self._epoch = int(state["epoch"])
        self._rows_taken = int(state["rows_taken"])
        self._order = self._permute(self._epoch)

    def _permute(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
