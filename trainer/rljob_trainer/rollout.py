"""Rollout and evaluation: prompts to scored samples, rewards computed while other prompts still generate."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.data import PromptRow
from rljob_trainer.distributed.cluster import CONTROL_GROUP, Cluster
from rljob_trainer.distributed.waiting import get_value, iterate_streams
from rljob_trainer.engines.contract import FinishReason, GeneratedGroup, GenerateRequest, SamplingParams
from rljob_trainer.errors import EngineDied, StopRequested
from rljob_trainer.rewards import RewardService, ScoreRequest, ScoreResult

FETCH_SECONDS: Final = 60.0


@dataclass(frozen=True)
class ScoredSample:
    """One response with its reward."""

    row: PromptRow
    index: int
    """Sample of the prompt, 0, 1, ..."""
    token_ids: list[int]
    log_probs: NDArray[np.float32]
    """(len(token_ids),) from the engine, under the sampling temperature."""
    finish_reason: FinishReason
    weight_version: int
    text: str
    """Response without special tokens."""
    result: ScoreResult

    @property
    def reward(self) -> float:
        """NaN where the sample is left out."""
        return float("nan") if self.result.reward is None else self.result.reward


@dataclass(frozen=True)
class RolloutPlan:
    """What to generate."""

    rows: Sequence[PromptRow]
    num_samples: int
    params: SamplingParams
    seed: int
    step: int
    timeout_seconds: float
    label: str = ""
    """Tells plans over the same prompts apart (ReMax's greedy responses)."""
    num_groups: int | None = None
    """Of `rows`: the first groups to be complete are kept, the others aborted. Default: all."""


class RolloutRunner:
    """Spreads prompts over the engines and streams finished groups to the reward workers."""

    def __init__(self, cluster: Cluster, rewards: RewardService, tokenizer: Any) -> None:
        self._cluster = cluster
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._num_submitted = 0
        self._results: dict[str, ScoreResult] = {}
        """Collected, but not yet asked for: of another plan that was generated at the same time."""

    def generate(
        self, plan: RolloutPlan, *, on_samples: Callable[[int], None], poll: Callable[[], None]
    ) -> dict[str, GeneratedGroup]:
        """Groups by prompt uid; rewards are being computed when it returns. The engines are idle then.

        Raises:
            EngineDied: an engine is gone or late. StopRequested: from `poll`; running samples are aborted.
        """
        engines = self._cluster.engines
        requests = [
            GenerateRequest(row.uid, row.prompt_ids, plan.num_samples, plan.seed, plan.step) for row in plan.rows
        ]
        rows = {row.uid: row for row in plan.rows}
        streams = {
            engine.handle.generate.options(num_returns="streaming").remote(share, plan.params): engine
            for engine, share in zip(engines, share_requests(requests, len(engines)), strict=True)
            if share
        }
        num_wanted = len(requests) if plan.num_groups is None else plan.num_groups
        groups: dict[str, GeneratedGroup] = {}

        def poll_all() -> None:
            poll()
            self._cluster.check_followers()

        try:
            for engine, reference in iterate_streams(
                streams, timeout_seconds=plan.timeout_seconds, what="rollout", poll=poll_all
            ):
                group: GeneratedGroup = get_value(reference, engine, FETCH_SECONDS)
                if len(groups) == num_wanted:
                    continue  # of the tail that was aborted
                groups[group.uid] = group
                self._submit(plan, rows[group.uid], group)
                on_samples(len(group.samples))
                if len(groups) == num_wanted < len(requests):
                    # Not waited for: the streams end with it, within the deadline of the rollout.
                    self._abort_all()
        except StopRequested:
            self._abort_all()
            raise
        if len(groups) < num_wanted:
            missing = [row.uid for row in plan.rows if row.uid not in groups]
            raise EngineDied(
                f"rollout: engines returned no samples for {len(missing)} prompts, for example {missing[0]}"
            )
        return groups

    def _abort_all(self) -> None:
        for engine in self._cluster.engines:
            engine.handle.abort_all.options(concurrency_group=CONTROL_GROUP).remote()

    def collect(
        self, plan: RolloutPlan, groups: dict[str, GeneratedGroup], *, poll: Callable[[], None]
    ) -> list[ScoredSample]:
        """Wait for the rewards of everything generated; samples in the order of the plan, whatever order they came in.

        Raises:
            RewardError: a reward function failed (`onError: FailJob`) or did not answer.
        """
        if self._num_submitted:
            self._wait_for_rewards(poll)
        samples: list[ScoredSample] = []
        for row in plan.rows:
            group = groups.get(row.uid)
            if group is None:
                continue  # aborted: another prompt was faster
            for index, (sample, text) in enumerate(zip(group.samples, self._decode(group), strict=True)):
                samples.append(
                    ScoredSample(
                        row=row,
                        index=index,
                        token_ids=sample.token_ids,
                        log_probs=sample.log_probs,
                        finish_reason=sample.finish_reason,
                        weight_version=sample.weight_version,
                        text=text,
                        result=self._results.pop(_sample_id(plan, row.uid, index)),
                    )
                )
        return samples

    def _wait_for_rewards(self, poll: Callable[[], None]) -> None:
        deadline = self._rewards.compute_deadline_seconds(self._num_submitted)
        self._num_submitted = 0
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="collect-rewards")
        try:
            collecting = executor.submit(self._rewards.collect, deadline)
            while True:
                poll()
                try:
                    self._results.update({result.sample_id: result for result in collecting.result(timeout=0.5)})
                    return
                except concurrent.futures.TimeoutError:
                    # On Python 3.11 this is also TimeoutError: one that the collection raised must not be retried.
                    if collecting.done():
                        raise
        finally:
            # A stop must not wait for slow rewards: the time is needed to save the steps that are done.
            executor.shutdown(wait=False)

    def _submit(self, plan: RolloutPlan, row: PromptRow, group: GeneratedGroup) -> None:
        for index, text in enumerate(self._decode(group)):
            self._num_submitted += 1
            self._rewards.submit(
                ScoreRequest(
                    _sample_id(plan, row.uid, index), row.prompt_text, text, row.answer, row.fields, row.messages
                )
            )

    def _decode(self, group: GeneratedGroup) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            [sample.token_ids for sample in group.samples], skip_special_tokens=True
        )
        return texts


def share_requests(requests: Sequence[GenerateRequest], num_engines: int) -> list[list[GenerateRequest]]:
    """One list per engine: whole groups, so that a prompt's prefix is computed once, the longest first.

    Each goes to the engine with the fewest samples, then the fewest prompt tokens, so far. What starts last decides
    when a rollout ends; a long one must not be it.
    """
    shares: list[list[GenerateRequest]] = [[] for _ in range(num_engines)]
    loads = [(0, 0)] * num_engines
    for request in sorted(requests, key=lambda request: -len(request.prompt_ids)):
        engine = min(range(num_engines), key=lambda index: (*loads[index], index))
        shares[engine].append(request)
        num_samples, num_tokens = loads[engine]
        loads[engine] = (num_samples + request.num_samples, num_tokens + len(request.prompt_ids))
    return shares


def _sample_id(plan: RolloutPlan, uid: str, index: int) -> str:
    return f"{uid}#{plan.label}{index}"
