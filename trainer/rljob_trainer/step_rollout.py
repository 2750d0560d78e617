"""The rollout of a step, and that of an evaluation: which prompts, in how many rounds, with which further samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from rljob_api.contract import ResolvedJob, TrainerPhase
from rljob_api.resolve import count_drawn_prompts
from rljob_api.v1alpha1.algorithm import AdvantageEstimator
from rljob_trainer.data import PromptRow
from rljob_trainer.dynamic_sampling import CollectedBatch, collect_batch
from rljob_trainer.engines.contract import SamplingParams
from rljob_trainer.errors import TrainerError
from rljob_trainer.inputs import Inputs
from rljob_trainer.rollout import RolloutPlan, RolloutRunner, ScoredSample

PhaseContext = Callable[[TrainerPhase], AbstractContextManager[None]]
"""Enters a phase of the step that the driver is in."""


@dataclass(frozen=True)
class StepRollout:
    """What a step trains on."""

    batch: CollectedBatch
    greedy: list[ScoredSample]
    """ReMax: a greedy sample of each prompt, not trained on."""
    sampler: dict[str, Any]
    """Position in the data after the prompts of this step."""
    epoch: float
    """Passes over the prompts, those of this step included."""
    seconds: float
    """From the first prompt drawn to the last reward."""


class RolloutCollector:
    """Draws prompts and has them generated and scored. Used by one thread at a time."""

    def __init__(
        self, job: ResolvedJob, inputs: Inputs, runner: RolloutRunner, *, on_samples: Callable[[int], None]
    ) -> None:
        """`on_samples` is told how many samples have just been generated."""
        self._spec, self._inputs, self._runner, self._on_samples = job.spec, inputs, runner, on_samples

    def collect(self, step: int, *, phase: PhaseContext, poll: Callable[[], None]) -> StepRollout:
        """Scored groups to train on, by DAPO in several rounds; with ReMax also a greedy sample of each prompt.

        Args:
            step: the step that will train on them.
            phase: entered while generating and while waiting for rewards.
            poll: called about twice a second; what it raises ends the rollout (StopRequested: with an abort).

        Raises:
            EngineDied, RewardError: as `RolloutRunner`.
        """
        started = time.monotonic()
        spec, sampler, greedy = self._spec, self._inputs.sampler, list[ScoredSample]()
        num_prompts = spec.training.prompts_per_step

        def draw(num_prompts: int) -> list[PromptRow]:
            return [self._inputs.train.rows[index] for index in sampler.take(num_prompts)]

        def roll_out(rows: list[PromptRow]) -> list[ScoredSample]:
            plan = self._plan(rows, spec.rollout.samples_per_prompt, spec.rollout.temperature, step)
            plans = [replace(plan, num_groups=min(num_prompts, len(rows)))]
            if spec.algorithm.advantage_estimator is AdvantageEstimator.REMAX:
                plans.append(self._plan(rows, 1, 0.0, step, label="greedy"))
            samples, *baselines = self._roll_out(plans, phase, TrainerPhase.ROLLOUT, poll)
            for baseline in baselines:
                greedy.extend(baseline)
            return samples

        batch = collect_batch(
            num_prompts,
            spec.algorithm.dynamic_sampling,
            draw=draw,
            roll_out=roll_out,
            num_drawn=count_drawn_prompts(spec),
        )
        return StepRollout(batch, greedy, sampler.state_dict(), sampler.epoch, time.monotonic() - started)

    def evaluate(self, step: int, *, phase: PhaseContext, poll: Callable[[], None]) -> list[ScoredSample]:
        """Scored samples of all validation sets."""
        evaluation = self._spec.evaluation
        rows = [row for validation in self._inputs.validation for row in validation.rows]
        plan = self._plan(rows, evaluation.samples_per_prompt, evaluation.temperature, step)
        (samples,) = self._roll_out([plan], phase, TrainerPhase.EVALUATE, poll)
        return samples

    def _plan(
        self, rows: Sequence[PromptRow], num_samples: int, temperature: float, step: int, label: str = ""
    ) -> RolloutPlan:
        rollout = self._spec.rollout
        return RolloutPlan(
            rows=rows,
            num_samples=num_samples,
            params=SamplingParams(rollout.max_response_tokens, temperature, rollout.top_p if temperature else 1.0),
            seed=self._spec.training.seed,
            step=step,
            timeout_seconds=rollout.timeout_seconds,
            label=label,
        )

    def _roll_out(
        self, plans: Sequence[RolloutPlan], phase: PhaseContext, name: TrainerPhase, poll: Callable[[], None]
    ) -> list[list[ScoredSample]]:
        """Scored samples of each plan; the rewards of one are computed while the next generates."""
        with phase(name):
            groups = [self._runner.generate(plan, on_samples=self._on_samples, poll=poll) for plan in plans]
        with phase(TrainerPhase.REWARD if name is TrainerPhase.ROLLOUT else name):
            return [
                self._runner.collect(plan, groups_of_plan, poll=poll)
                for plan, groups_of_plan in zip(plans, groups, strict=True)
            ]


def check_staleness(samples: Sequence[ScoredSample], step: int, max_staleness_steps: int) -> None:
    """The policy of step s has version s; samples of it may be older by so many steps, and no more.

    Raises:
        TrainerError: one is older, or of weights that the policy does not have yet.
    """
    oldest = step - max_staleness_steps
    for sample in samples:
        if not oldest <= sample.weight_version <= step:
            raise TrainerError(
                f"step {step}: sample {sample.index} of prompt {sample.row.uid} was generated with weight version "
                f"{sample.weight_version}; with spec.rollout.maxStalenessSteps: {max_staleness_steps} this step takes "
                + (f"versions {oldest} to {step}" if max_staleness_steps else f"version {step}")
            )
