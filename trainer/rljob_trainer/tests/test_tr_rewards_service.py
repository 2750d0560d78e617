"""Scoring workers: what user code can do to them, and that no sample is ever lost silently."""

import asyncio
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from rljob_api.v1alpha1.data import Reward
from rljob_trainer.data import PromptRow
from rljob_trainer.errors import ConfigurationError, RewardError
from rljob_trainer.rewards import Backend, FailureKind, RewardService, ScoreRequest, summarise_rewards
from rljob_trainer.rewards.outcome import BadReturnError, ScoreResult, read_score
from rljob_trainer.rewards.plans import make_answer_check, plan_functions
from rljob_trainer.rewards.python_function import LoadFunctionError, call_function, load_function
from rljob_trainer.rewards.regex import score_regex

SCORE_FILE = """
import os, signal, time

def score(prompt, response, answer, **fields):
    if response == "sleep":
        time.sleep(600)
    if response == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if response == "exit":
        os._exit(7)
    if response == "raise":
        return fields["ground_truth"]
    if response == "text":
        return "1"
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    return {"score": float(response == str(answer)), "length": len(response), "note": "x"}

def level_only(prompt, response, answer, *, level):
    return level

def two(prompt, response):
    return 0

async def later(prompt, response, answer):
    return 1.0
"""


class CpuHolder:
    """Keeps the CPUs of its actor."""

    def hold(self):
        """Answers once the actor has them."""


@pytest.fixture
def score_file(tmp_path):
    path = tmp_path / "score_fn.py"
    path.write_text(SCORE_FILE)
    return path


def make_reward(score_file, *, on_error="DropSample", timeout_seconds=2, **options):
    function = {"type": "Python", "path": str(score_file), "timeoutSeconds": timeout_seconds, **options}
    return Reward.model_validate({"functions": [function], "onError": on_error})


@pytest.fixture
def start():
    services = []

    def build(reward, backend=Backend.LOCAL):
        services.append(RewardService(reward, backend=backend))
        return services[-1]

    yield build
    for service in services:
        service.close()


def submit_all(service, responses, answer="4"):
    for number, response in enumerate(responses):
        service.submit(ScoreRequest(f"p0/{number}", "2+2?", response, answer, {"level": 3}))


def test_user_code_that_hangs_dies_or_raises_costs_only_its_own_sample(score_file, start):
    service = start(make_reward(score_file))
    submit_all(service, ["4", "sleep", "5", "ignore", "exit", "raise", "text", "none", "nan", "4", *["4"] * 8])
    results = service.collect(300)
    assert [result.sample_id for result in results] == [f"p0/{number}" for number in range(18)]
    kinds = [result.failure.kind if result.failure else None for result in results]
    assert kinds[:10] == [
        None,
        FailureKind.TIMEOUT,
        None,
        FailureKind.TIMEOUT,
        FailureKind.PROCESS_DIED,
        FailureKind.EXCEPTION,
        FailureKind.BAD_RETURN,
        None,
        None,
        None,
    ]
    assert [result.reward for result in results[:10]] == [1.0, None, 0.0, None, None, None, None, None, None, 1.0]
    assert all(result.reward == 1.0 for result in results[9:])
    assert "exit code 7" in results[4].failure.message
    assert "KeyError: 'ground_truth'" in results[5].failure.message
    assert "score_fn.py" in results[5].failure.traceback
    assert "type str" in results[6].failure.message
    summary = summarise_rewards(results)
    assert (summary.num_samples, summary.num_dropped, summary.num_nan) == (18, 7, 1)
    assert (summary.num_timeouts, summary.num_errors) == (2, 3)
    assert summary.reward_mean == pytest.approx(10 / 11)
    assert summary.function_means["python"] == pytest.approx(10 / 11)
    assert summary.function_means["python/length"] == 1.0


def test_fail_job_names_function_sample_and_exception(score_file, start):
    service = start(make_reward(score_file, on_error="FailJob"))
    submit_all(service, ["4", "raise", "4"])
    with pytest.raises(RewardError) as caught:
        service.collect(120)
    assert "spec.reward.functions[0] (python): sample p0/1: KeyError: 'ground_truth'" in str(caught.value)
    assert "Traceback" in str(caught.value)
    submit_all(service, ["4"])
    assert service.collect(120)[0].reward == 1.0  # the failed batch leaves nothing behind


def test_more_failures_than_half_fail_the_step_even_under_drop_sample(score_file, start):
    service = start(make_reward(score_file))
    submit_all(service, ["raise", "raise", "4", "4"])
    assert len(service.collect(120)) == 4
    submit_all(service, ["raise", "raise", "raise", "4"])
    with pytest.raises(RewardError, match=r"3 of 4 samples of this step could not be scored, more than 50%"):
        service.collect(120)


def test_deadline_names_the_sample_that_is_missing(score_file, start):
    service = start(make_reward(score_file, timeout_seconds=100))
    submit_all(service, ["4"])
    service.collect(120)  # the scoring process is up
    submit_all(service, ["4", "4", "4", "sleep"])
    results = service.collect(15)
    assert [result.reward for result in results] == [1.0, 1.0, 1.0, None]
    assert results[3].sample_id == "p0/3"
    assert results[3].failure.kind is FailureKind.DEADLINE
    assert "not scored within 15 s" in results[3].failure.message


def test_a_sample_cannot_be_submitted_twice(score_file, start):
    service = start(make_reward(score_file))
    submit_all(service, ["4"])
    with pytest.raises(ValueError, match="submitted twice"):
        submit_all(service, ["4"])
    assert len(service.collect(120)) == 1
    assert service.collect(1) == []


def test_works_from_threads_and_asyncio(score_file, start):
    service = start(make_reward(score_file))
    threads = [
        threading.Thread(target=lambda n=number: service.submit(ScoreRequest(f"t{n}", "", "4", "4")))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def collect():
        service.submit(ScoreRequest("sleeper", "", "sleep", "4"))
        ticks = 0
        collecting = asyncio.create_task(asyncio.to_thread(service.collect, 120))
        while not collecting.done():
            await asyncio.sleep(0.05)
            ticks += 1
        return await collecting, ticks

    results, ticks = asyncio.run(collect())
    assert ticks > 3  # the event loop kept turning while user code slept
    rewards = {result.sample_id: result.reward for result in results}
    assert rewards == {**{f"t{number}": 1.0 for number in range(8)}, "sleeper": None}


def wait_until_dead(actor):
    """`ray.kill` returns before."""
    import ray

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=120)
        except ray.exceptions.ActorDiedError:
            return
    raise TimeoutError("the actor still answers")


@pytest.mark.ray
def test_ray_workers_score_without_cpus_and_survive_their_own_death(score_file, start, make_job, monkeypatch):
    import ray

    from rljob_trainer.distributed.ray_connection import connect_ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect_ray(make_job(run_directory=str(score_file.parent)))
    try:
        # All CPUs are taken, as ranks and engines do.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        num_cpus = ray.cluster_resources()["CPU"]
        holder = ray.remote(num_cpus=num_cpus)(CpuHolder).remote()
        ray.get(holder.hold.remote(), timeout=120)
        reward = make_reward(score_file).model_copy(update={"num_workers": 2})
        service = start(reward, Backend.RAY)
        submit_all(service, ["4", "5", "sleep", "raise", "4", "4"])
        results = service.collect(300)
        assert [result.reward for result in results] == [1.0, 0.0, None, None, 1.0, 1.0]
        for actor in service._workers._actors:
            ray.kill(actor, no_restart=False)
        submit_all(service, ["4", "5"])
        assert [result.reward for result in service.collect(300)] == [1.0, 0.0]
        for actor in service._workers._actors:
            ray.kill(actor, no_restart=True)
            wait_until_dead(actor)
        submit_all(service, ["4"])
        with pytest.raises(RewardError, match=r"sample p0/0: its scoring worker was lost"):
            service.collect(300)
    finally:
        ray.shutdown()
    service.close()
    assert not ray.is_initialized()  # closing late starts no Ray


def test_scoring_process_dies_with_its_worker(score_file, tmp_path):
    """A worker that is killed outright must not leave an endless reward function behind."""
    (tmp_path / "endless.py").write_text(
        "import os, pathlib\n"
        "def score(prompt, response, answer):\n"
        "    pathlib.Path(prompt).write_text(str(os.getpid()))\n"
        "    while True: pass\n"
    )
    program = (
        "from rljob_trainer.rewards.functions import FunctionPlan\n"
        "from rljob_trainer.rewards.outcome import ScoreRequest\n"
        "from rljob_trainer.rewards.scorer import Scorer\n"
        f"options = {{'path': {str(tmp_path / 'endless.py')!r}, 'function': 'score'}}\n"
        "plan = FunctionPlan('python', 'f', 'Python', 1.0, 600.0, options)\n"
        f"Scorer([plan]).score(ScoreRequest('a', {str(tmp_path / 'pid')!r}, '', ''))\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        pid_file = tmp_path / "pid"
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the function runs")
        child = int(pid_file.read_text())
    finally:
        worker.kill()
        worker.wait(60)
    wait_until(lambda: not is_running(child), "the scoring process is gone")


def wait_until(condition, what, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s: {what}"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_dry_run_finds_a_broken_function_whatever_on_error_says(score_file, start):
    rows = [PromptRow("train/0/0", [1], "2+2?", "raise", {})]
    with pytest.raises(RewardError, match=r"dry run train/0/0.*KeyError"):
        start(make_reward(score_file)).dry_run(rows)
    good = [PromptRow(f"train/0/{n}", [1], "2+2?", "4", {}) for n in range(10)]
    results = start(make_reward(score_file)).dry_run(good)
    assert [result.reward for result in results] == [1.0, 0.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "nothing"}, r"no function 'nothing'; it has \['later', 'level_only', 'score', 'two'\]"),
        ({"function": "two"}, r"cannot be called as two\(prompt, response, answer"),
        ({"function": "later"}, "asynchronous"),
        ({"function": "level_only"}, "level"),
        ({"path": "/nowhere/f.py"}, "/nowhere/f.py does not exist"),
    ],
)
def test_unusable_functions_are_named_by_the_dry_run(score_file, start, options, message):
    rows = [PromptRow("train/0/0", [1], "2+2?", "4", {})]
    with pytest.raises(RewardError, match=message):
        start(make_reward(score_file, **options)).dry_run(rows)


def test_functions_get_the_columns_they_name(score_file):
    function = load_function(str(score_file), "level_only")
    assert call_function(function, "", "", "", {"level": 3, "other": 4}) == 3
    (score_file.parent / "bad.py").write_text("def score(:")
    with pytest.raises(LoadFunctionError, match="cannot be imported: SyntaxError"):
        load_function(str(score_file.parent / "bad.py"), "score")


def test_reward_is_the_weighted_sum(score_file, start):
    reward = Reward.model_validate(
        {
            "functions": [
                {"type": "GSM8K", "weight": 2.0, "flexible": True},
                {"type": "Regex", "pattern": "^[0-9]+$", "weight": 0.5, "name": "format"},
            ]
        }
    )
    service = start(reward)
    submit_all(service, ["4", "it is 4", "5", ""])
    results = service.collect(120)
    assert [result.reward for result in results] == [2.5, 2.0, 0.0, 0.0]
    assert results[0].scores == {"gsm8k": 1.0, "format": 1.0}


def test_regex_that_backtracks_for_ever_is_killed(start):
    reward = Reward.model_validate(
        {
            "functions": [{"type": "Regex", "pattern": "(a+)+$", "timeoutSeconds": 1}],
            "onError": "DropSample",
        }
    )
    service = start(reward)
    submit_all(service, ["aa", "a" * 40 + "!", "aa"], answer="aa")
    results = service.collect(120)
    assert [result.failure.kind if result.failure else None for result in results] == [None, FailureKind.TIMEOUT, None]


@pytest.mark.parametrize(
    ("response", "answer", "pattern", "expected"),
    [
        ("x = 3, x = 4", "4", r"x = (\d+)", 1),
        ("x = 3, x = 4", "3", r"x = (\d+)", 0),
        ("total 1,000.0", 1000, r"[\d,.]+$", 1),
        ("<answer> Paris </answer>", "Paris", "<answer>(.*?)</answer>", 1),
        ("<answer>paris</answer>", "Paris", "<answer>(.*?)</answer>", 0),
        ("", "Paris", "(.*)z", 0),
        ("b", "", "(a)?b", 0),
    ],
)
def test_regex(response, answer, pattern, expected):
    assert score_regex(response, answer, pattern) == expected


@pytest.mark.parametrize(
    "returned",
    [
        1,
        1.0,
        True,
        np.float32(1),
        np.bool_(True),
        torch.tensor(1.0),
        np.array([1.0]),
        Decimal(1),
        Fraction(1),
        {"score": 1, "acc": 0},
    ],
)
def test_accepted_return_values(returned):
    assert read_score(returned).value == 1.0


def test_other_keys_are_metrics_and_may_differ_from_row_to_row():
    assert read_score({"score": 1, "acc": 0, "note": "x", "list": [1], "undefined": None}).metrics == {"acc": 0.0}
    results = [ScoreResult("a", 1.0, {"f": 1.0}, {"f/acc": 1.0}), ScoreResult("b", 0.0, {"f": 0.0}, {"f/len": 3.0})]
    assert summarise_rewards(results).function_means == {"f": 0.5, "f/acc": 1.0, "f/len": 3.0}


@pytest.mark.parametrize(
    "returned", ["1", [1.0], 1j, np.array([1.0, 2.0]), torch.zeros(2), {"acc": 1}, {"score": "1"}, object()]
)
def test_refused_return_values(returned):
    with pytest.raises(BadReturnError, match="returned"):
        read_score(returned)


@pytest.mark.parametrize("returned", [None, {"score": None}])
def test_none_declines(returned):
    assert (read_score(returned).value, read_score(returned).is_nan) == (None, False)


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), -np.inf, torch.tensor(float("nan"))])
def test_not_a_number_is_left_out_and_counted(returned):
    assert (read_score(returned).value, read_score(returned).is_nan) == (None, True)


def test_undefined_rewards_do_not_poison_the_mean():
    values = [0.5, None, None, 0.8, 0.6, 0.7]
    summary = summarise_rewards(ScoreResult(str(n), value, is_nan=value is None) for n, value in enumerate(values))
    assert summary.reward_mean == pytest.approx(0.65)
    assert summary.num_nan == 2
    assert summarise_rewards([]).reward_mean is None


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"type": "GSM8K"}, {"type": "Http"}], r"functions\[1\].url is missing"),
        ([{"type": "Regex"}], r"functions\[0\].pattern is missing"),
        ([{"type": "Regex", "pattern": "("}], r"'\(' is no regular expression"),
        ([{"type": "Python"}], r"functions\[0\].path is missing"),
        ([{"type": "GSM8K"}, {"type": "GSM8K"}], r"functions\[1\].name: 'gsm8k' is used twice"),
    ],
)
def test_unusable_specs_are_refused(functions, message):
    with pytest.raises(ConfigurationError, match=message):
        plan_functions(Reward.model_validate({"functions": functions}).functions)


def test_only_gsm8k_and_math_restrict_gold_answers():
    with make_answer_check(Reward.model_validate({"functions": [{"type": "GSM8K"}]})) as check:
        assert check is not None
        assert check("#### 5") is None
        assert "no number" in check("five")
    with make_answer_check(Reward.model_validate({"functions": [{"type": "Regex", "pattern": "x"}]})) as check:
        assert check is None
