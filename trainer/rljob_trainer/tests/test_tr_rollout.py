"""Which engine gets which prompts, and over-sampling: the first groups are kept, the tail is aborted."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer import rollout
from rljob_trainer.data import PromptRow
from rljob_trainer.engines.contract import (
    FinishReason,
    GeneratedGroup,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
)
from rljob_trainer.errors import EngineDied, StopRequested
from rljob_trainer.rewards import ScoreResult
from rljob_trainer.rollout import RolloutPlan, RolloutRunner, share_requests

NUM_SAMPLES = 2


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    num_engines=st.integers(1, 5),
)
def test_whole_groups_are_shared_evenly_the_longest_first(lengths, num_engines):
    requests = [GenerateRequest(f"p{index}", [3] * length, 4, 0, 1) for index, length in enumerate(lengths)]
    shares = share_requests(requests, num_engines)
    assert sorted(request.uid for share in shares for request in share) == sorted(request.uid for request in requests)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for share in shares:
        share_lengths = [len(request.prompt_ids) for request in share]
        assert share_lengths == sorted(share_lengths, reverse=True)


def test_prompt_tokens_are_balanced_too():
    requests = [GenerateRequest(f"p{length}", [3] * length, 1, 0, 1) for length in (10, 9, 2, 1)]
    shares = share_requests(requests, 2)
    assert [[len(request.prompt_ids) for request in share] for share in shares] == [[10, 1], [9, 2]]


class FakeEngine:
    """Ends group `p<n>` after all smaller ones, those in `slow` only when aborted."""

    def __init__(self, slow: set[str]) -> None:
        self.slow = slow
        self.aborted = threading.Event()
        self.handle = SimpleNamespace(generate=FakeMethod(self._generate), abort_all=FakeMethod(self.aborted.set))

    def _generate(self, requests: list[GenerateRequest], params: SamplingParams) -> Iterator[GeneratedGroup]:
        for request in sorted(requests, key=lambda request: (request.uid in self.slow, request.uid)):
            if request.uid in self.slow:
                assert self.aborted.wait(30), "the tail is not aborted"
            yield make_group(request, is_aborted=request.uid in self.slow)


class FakeMethod:
    def __init__(self, function: Any) -> None:
        self._function = function

    def options(self, **_: Any) -> FakeMethod:
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class FakeRewards:
    """Scores a response with its number of tokens."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def submit(self, request: Any) -> None:
        self.submitted.append(request)

    def compute_deadline_seconds(self, num_samples: int) -> float:
        return 30.0 + num_samples

    def collect(self, timeout_seconds: float) -> list[ScoreResult]:
        results = [ScoreResult(request.sample_id, float(len(request.response)), {}) for request in self.submitted]
        self.submitted.clear()
        return results


class FakeTokenizer:
    def batch_decode(self, batch: list[list[int]], **_: Any) -> list[str]:
        return ["x" * len(ids) for ids in batch]


def make_group(request: GenerateRequest, *, is_aborted: bool) -> GeneratedGroup:
    reason = FinishReason.ABORT if is_aborted else FinishReason.STOP
    tokens = [3] * int(request.uid[1:])
    sample = GeneratedSample(tokens, np.zeros(len(tokens), dtype=np.float32), reason, 1)
    return GeneratedGroup(request.uid, [sample] * request.num_samples)


def iterate_in_threads(streams: dict[Any, Any], *, poll: Any, **_: Any) -> Iterator[tuple[Any, Any]]:
    """As `waiting.iterate_streams`, over plain iterators."""
    items: queue.Queue[Any] = queue.Queue()

    def pump(stream: Any, actor: Any) -> None:
        for item in stream:
            items.put((actor, item))
        items.put(None)

    for stream, actor in streams.items():
        threading.Thread(target=pump, args=(stream, actor), daemon=True).start()
    num_open = len(streams)
    while num_open:
        item = items.get(timeout=30)
        if item is None:
            num_open -= 1
            continue
        yield item
        poll()


@pytest.fixture
def make_runner(monkeypatch):
    monkeypatch.setattr(rollout, "iterate_streams", iterate_in_threads)
    monkeypatch.setattr(rollout, "get_value", lambda value, actor, timeout_seconds: value)

    def make(engines: list[FakeEngine]) -> tuple[RolloutRunner, FakeRewards]:
        rewards = FakeRewards()
        cluster: Any = SimpleNamespace(engines=engines, check_followers=lambda: None)
        return RolloutRunner(cluster, rewards, FakeTokenizer()), rewards  # type: ignore[arg-type]

    return make


def make_plan(num_rows: int, num_groups: int | None = None) -> RolloutPlan:
    rows = [PromptRow(f"p{index}", [3], "prompt", "", {}) for index in range(1, num_rows + 1)]
    return RolloutPlan(rows, NUM_SAMPLES, SamplingParams(9, 1.0), 0, 1, 30.0, num_groups=num_groups)


def run(runner: RolloutRunner, plan: RolloutPlan, poll: Any = lambda: None) -> tuple[list[str], int]:
    counted: list[int] = []
    groups = runner.generate(plan, on_samples=counted.append, poll=poll)
    samples = runner.collect(plan, groups, poll=lambda: None)
    assert all(sample.reward == len(sample.token_ids) for sample in samples)
    assert len(samples) == NUM_SAMPLES * len(groups)
    return list(dict.fromkeys(sample.row.uid for sample in samples)), sum(counted)


def test_all_groups_in_the_order_of_the_plan(make_runner):
    engines = [FakeEngine(set()), FakeEngine(set())]
    uids, num_counted = run(make_runner(engines)[0], make_plan(5))
    assert uids == ["p1", "p2", "p3", "p4", "p5"]
    assert num_counted == 5 * NUM_SAMPLES
    assert not any(engine.aborted.is_set() for engine in engines)


@pytest.mark.parametrize("slow", [{"p1", "p4"}, {"p2", "p5"}])
def test_the_slowest_groups_are_aborted_and_not_scored(make_runner, slow):
    engines = [FakeEngine(slow), FakeEngine(slow)]
    runner, rewards = make_runner(engines)
    plan = make_plan(6, num_groups=4)
    groups = runner.generate(plan, on_samples=lambda _: None, poll=lambda: None)
    assert all(engine.aborted.is_set() for engine in engines)
    assert set(groups) == {f"p{index}" for index in range(1, 7)} - slow
    assert {request.sample_id.partition("#")[0] for request in rewards.submitted} == set(groups)
    samples = runner.collect(plan, groups, poll=lambda: None)
    assert FinishReason.ABORT not in {sample.finish_reason for sample in samples}
    # The next rollout waits for nothing of this one.
    assert run(runner, make_plan(3))[0] == ["p1", "p2", "p3"]


def test_groups_beyond_the_wanted_number_are_left_out_even_when_they_are_complete(make_runner):
    uids, num_counted = run(make_runner([FakeEngine(set())])[0], make_plan(6, num_groups=4))
    assert uids == ["p1", "p2", "p3", "p4"]
    assert num_counted == 4 * NUM_SAMPLES


def test_a_stop_aborts_everything(make_runner):
    engines = [FakeEngine({"p2"})]

    def poll() -> None:
        raise StopRequested("stop")

    with pytest.raises(StopRequested):
        make_runner(engines)[0].generate(make_plan(2), on_samples=lambda _: None, poll=poll)
    assert engines[0].aborted.is_set()


def test_a_stop_does_not_wait_for_slow_rewards(make_runner):
    """The time until the stop's deadline is for saving the steps that are done."""
    runner, rewards = make_runner([FakeEngine(set())])
    plan = make_plan(2)
    groups = runner.generate(plan, on_samples=lambda _: None, poll=lambda: None)
    is_over, is_collecting = threading.Event(), threading.Event()

    def collect(timeout_seconds: float) -> list[ScoreResult]:
        is_collecting.set()
        assert is_over.wait(60), "the stop waits for the rewards"
        return []

    rewards.collect = collect

    def poll() -> None:
        if is_collecting.wait(60):
            raise StopRequested("stop")

    with pytest.raises(StopRequested):
        runner.collect(plan, groups, poll=poll)
    assert not is_over.is_set()
    is_over.set()


def test_lost_groups_are_the_engines_fault(make_runner, monkeypatch):
    engine = FakeEngine(set())
    engine.handle.generate = FakeMethod(lambda requests, params: iter([]))
    with pytest.raises(EngineDied, match="no samples for 2 prompts, for example p1"):
        make_runner([engine])[0].generate(make_plan(2), on_samples=lambda _: None, poll=lambda: None)


def test_two_plans_over_the_same_prompts_are_scored_together_and_kept_apart(make_runner):
    """ReMax: sampled and greedy responses of one step; rewards of the first are computed while the second generates."""
    runner, rewards = make_runner([FakeEngine(set())])
    sampled = make_plan(3)
    greedy = dataclasses.replace(sampled, num_samples=1, params=SamplingParams(9, 0.0), label="greedy")
    groups = [runner.generate(plan, on_samples=lambda _: None, poll=lambda: None) for plan in (sampled, greedy)]
    ids = [request.sample_id for request in rewards.submitted]
    assert len(ids) == len(set(ids)) == 3 * NUM_SAMPLES + 3
    first, second = (
        runner.collect(plan, part, poll=lambda: None) for plan, part in zip((sampled, greedy), groups, strict=True)
    )
    assert [len(first), len(second)] == [3 * NUM_SAMPLES, 3]
    assert {sample.result.sample_id for sample in second} == {f"p{index}#greedy0" for index in (1, 2, 3)}
    assert [sample.reward for sample in second] == [1.0, 2.0, 3.0]
