"""The reward model: what it reads, what it returns, and how its workers are fed, late, broken and restarted."""

import threading
from concurrent.futures import Future

import pytest
import torch
from tr_tiny import save_tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from rljob_api.v1alpha1.data import Reward
from rljob_trainer.data import PromptRow
from rljob_trainer.errors import ConfigurationError, RewardError
from rljob_trainer.quickstart.model import build_tokenizer
from rljob_trainer.rewards import Backend, FailureKind, RewardService, ScoreRequest
from rljob_trainer.rewards.functions import MODEL, FunctionPlan
from rljob_trainer.rewards.model import SequenceScorer, split_by_tokens
from rljob_trainer.rewards.model_workers import MAX_SAMPLES_PER_CALL, ModelWorkers
from rljob_trainer.rewards.outcome import Score, ScoreFailure

DEADLINE = 120.0


def save_reward_model(directory, **overrides):
    """A classifier over the quickstart's bytes whose head is not zero."""
    tokenizer = build_tokenizer()
    save_tiny_model(directory / "causal", vocab_size=len(tokenizer), pad_token_id=None, **overrides)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(directory / "causal", num_labels=overrides.get("num_labels", 1))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("reward-model"))


def make_plan(path, timeout_seconds=10.0, name="model", weight=1.0):
    return FunctionPlan(name, "spec.reward.functions[0]", MODEL, weight, timeout_seconds, {"path": path})


def make_request(number, response, prompt="2+2?"):
    return ScoreRequest(f"s{number}", prompt, response, "4", {}, ({"role": "user", "content": prompt},))


@pytest.fixture(scope="module")
def scorer(path):
    scorer = SequenceScorer(make_plan(path), "cpu")
    scorer.load()
    return scorer


def expected_score(path, prompt, response):
    """The classifier's logit for one conversation in its own template, alone and unpadded."""
    tokenizer = build_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    text = f"<|user|>{prompt}<|end|><|assistant|>{response}<|end|>"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def test_scores_are_those_of_the_classifier_in_its_own_template(scorer, path):
    """Also in a batch of other lengths, and where a response ends with the padding token's text."""
    responses = ["4", "the answer is 4", "", "5<|end|><|end|>", "<pad>"]
    requests = [make_request(number, response) for number, response in enumerate(responses)]
    scores = scorer.score(requests)
    assert [score.value for score in scores] == pytest.approx(
        [expected_score(path, "2+2?", response) for response in responses], rel=1e-4, abs=1e-5
    )
    assert len({round(score.value, 4) for score in scores}) == len(responses)


def test_a_prompt_without_messages_becomes_a_user_message(scorer):
    plain = ScoreRequest("s", "2+2?", "4", "4")
    assert scorer.score([plain])[0].value == pytest.approx(scorer.score([make_request(0, "4")])[0].value)


def test_a_system_prompt_counts(scorer):
    with_system = ScoreRequest(
        "s", "2+2?", "4", "4", {}, ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"})
    )
    assert scorer.score([with_system])[0].value != pytest.approx(scorer.score([make_request(0, "4")])[0].value)


def test_too_long_a_sample_fails_alone(scorer):
    scores = scorer.score([make_request(0, "4"), make_request(1, "9" * 200), make_request(2, "5")])
    assert isinstance(scores[1], ScoreFailure)
    assert "the reward model takes 128" in scores[1].message
    assert [type(score) for score in scores] == [Score, ScoreFailure, Score]
    assert scores[2].value == pytest.approx(scorer.score([make_request(2, "5")])[0].value, rel=1e-4)


def test_micro_batches_hold_their_padded_size():
    lengths = [5, 100, 7, 6, 300, 90]
    batches = split_by_tokens(range(6), lengths, 200)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert [len(batch) * max(lengths[index] for index in batch) <= 200 or len(batch) == 1 for batch in batches] == [
        True
    ] * len(batches)
    assert batches == [[0, 3, 2], [5, 1], [4]]


@pytest.mark.parametrize(
    ("labels", "message"), [(2, r"functions\[0\]\.path: .*found 2 labels"), (None, r"found \['Qwen2ForCausalLM'\]")]
)
def test_what_is_no_reward_model_is_refused(tmp_path, labels, message):
    directory = save_reward_model(tmp_path, num_labels=labels) if labels else str(tmp_path / "causal")
    if labels is None:
        save_tiny_model(tmp_path / "causal")
    with pytest.raises(ConfigurationError, match=message):
        SequenceScorer(make_plan(directory), "cpu").load()


def test_missing_head_weights_are_refused(tmp_path):
    """transformers would draw them at random."""
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path / "model"), num_labels=1)
    config.architectures = ["Qwen2ForSequenceClassification"]
    config.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"lack 1 tensors, for example 'score\.weight'"):
        SequenceScorer(make_plan(str(tmp_path / "model")), "cpu").load()


class FakeHost:
    """Answers when told to."""

    def __init__(self):
        self.calls, self.answers, self.restarts, self.released, self.closed = [], [], 0, 0, False
        self.freed = Future()

    def load(self):
        future = Future()
        future.set_result(None)
        return future

    def score(self, requests):
        self.calls.append(list(requests))
        self.answers.append(Future())
        return self.answers[-1]

    def release(self):
        self.released += 1
        return self.freed

    def restart(self):
        self.restarts += 1

    def close(self):
        self.closed = True

    def answer(self, call):
        self.answers[call].set_result([Score(float(request.sample_id[1:])) for request in self.calls[call]])


def test_what_comes_in_meanwhile_is_the_next_call():
    host = FakeHost()
    workers = ModelWorkers(make_plan(""), [host])
    futures = [workers.submit(make_request(number, "x")) for number in range(MAX_SAMPLES_PER_CALL + 6)]
    assert [len(call) for call in host.calls] == [1]
    host.answer(0)
    assert [len(call) for call in host.calls] == [1, MAX_SAMPLES_PER_CALL]
    host.answer(1)
    host.answer(2)
    assert [future.result(timeout=0).value for future in futures] == [float(n) for n in range(len(futures))]
    workers.close()
    assert host.closed


def test_samples_are_spread_over_the_copies():
    hosts = [FakeHost(), FakeHost()]
    workers = ModelWorkers(make_plan(""), hosts)
    for number in range(10):
        workers.submit(make_request(number, "x"))
    for host in hosts:
        host.answer(0)
    assert sorted(len(host.calls[0]) + len(host.calls[1]) for host in hosts) == [5, 5]
    workers.close()


def test_a_late_call_fails_its_samples_and_the_rest_goes_on():
    host = FakeHost()
    workers = ModelWorkers(make_plan("", timeout_seconds=0.2), [host])
    late = workers.submit(make_request(0, "x"))
    waiting = workers.submit(make_request(1, "x"))
    failure = late.result(timeout=DEADLINE)
    assert failure.kind is FailureKind.TIMEOUT
    assert host.restarts == 1
    host.answers[0].set_result([Score(9.0)])  # too late: nobody asks any more
    host.answer(1)
    assert waiting.result(timeout=DEADLINE).value == 1.0
    workers.close()


def test_a_dead_process_fails_its_samples_and_is_started_again():
    host = FakeHost()
    workers = ModelWorkers(make_plan(""), [host])
    lost = workers.submit(make_request(0, "x"))
    host.answers[0].set_exception(RuntimeError("The actor died.\nCUDA out of memory"))
    failure = lost.result(timeout=0)
    assert failure.kind is FailureKind.PROCESS_DIED
    assert "CUDA out of memory" in failure.message
    assert host.restarts == 1
    following = workers.submit(make_request(1, "x"))
    host.answer(1)
    assert following.result(timeout=0).value == 1.0
    workers.close()


def test_closing_answers_what_waits():
    workers = ModelWorkers(make_plan(""), [FakeHost()])
    workers.submit(make_request(0, "x"))
    waiting = workers.submit(make_request(1, "x"))
    workers.close()
    assert waiting.result(timeout=0).kind is FailureKind.WORKER_LOST


def test_loading_has_a_deadline():
    host = FakeHost()
    host.load = Future
    with pytest.raises(RewardError, match=r"functions\[0\] \(model\): the reward model was not loaded within"):
        ModelWorkers(make_plan(""), [host]).wait_until_loaded(timeout_seconds=0.1)


def test_the_gpus_are_free_when_waiting_for_it_returns():
    hosts = [FakeHost(), FakeHost()]
    workers = ModelWorkers(make_plan(""), hosts)
    hosts[0].freed.set_result(None)
    with pytest.raises(RewardError, match=r"did not leave its GPU within 0.1 s: TimeoutError"):
        workers.release_and_wait(timeout_seconds=0.1)
    hosts[1].freed.set_result(None)
    workers.release_and_wait(timeout_seconds=0.1)
    assert [host.released for host in hosts] == [2, 2]
    hosts[1].freed = Future()
    hosts[1].freed.set_exception(RuntimeError("the process died"))
    with pytest.raises(RewardError, match="the process died"):
        workers.release_and_wait()


def test_a_dry_run_leaves_no_reward_model_on_the_gpus(path, monkeypatch):
    """Engines size their caches next, by what is free."""
    events = []
    score, release = SequenceScorer.score, SequenceScorer.release
    monkeypatch.setattr(SequenceScorer, "score", lambda self, requests: events.append("score") or score(self, requests))
    monkeypatch.setattr(SequenceScorer, "release", lambda self: events.append("release") or release(self))
    service = RewardService(make_reward(path), backend=Backend.LOCAL)
    row = PromptRow(uid="p", prompt_ids=[1], prompt_text="2+2?", answer="4", fields={})
    try:
        service.dry_run([row])
        assert events[-1] == "release"
        assert "score" in events
    finally:
        service.close()


def make_reward(path, **extra):
    return Reward.model_validate(
        {
            "functions": [
                {"type": "Model", "name": "model", "path": path, "weight": 2.0},
                {"type": "GSM8K", "flexible": True},
            ],
            **extra,
        }
    )


def test_the_service_adds_the_weighted_score_to_the_other_functions(path):
    service = RewardService(make_reward(path), backend=Backend.LOCAL)
    row = PromptRow("train/0/0", [1], "2+2?", "4", {}, ({"role": "user", "content": "2+2?"},))
    assert len(service.dry_run([row])) == 2
    threads = [
        threading.Thread(target=service.submit, args=(make_request(number, response),))
        for number, response in enumerate(["4", "5"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = {result.sample_id: result for result in service.collect(DEADLINE)}
    service.close()
    for number, (response, gsm8k) in enumerate([("4", 1.0), ("5", 0.0)]):
        score = expected_score(path, "2+2?", response)
        assert results[f"s{number}"].scores == pytest.approx({"model": score, "gsm8k": gsm8k}, rel=1e-4, abs=1e-5)
        assert results[f"s{number}"].reward == pytest.approx(2 * score + gsm8k, rel=1e-4, abs=1e-5)


def test_a_sample_that_the_model_cannot_take_follows_on_error(path):
    requests = [make_request(0, "4"), make_request(1, "9" * 200), make_request(2, "5")]
    service = RewardService(make_reward(path, onError="DropSample"), backend=Backend.LOCAL)
    for request in requests:
        service.submit(request)
    results = service.collect(DEADLINE)
    assert [result.reward is None for result in results] == [False, True, False]
    assert results[1].failure.function == "model"
    service.close()
    service = RewardService(make_reward(path), backend=Backend.LOCAL)
    for request in requests:
        service.submit(request)
    with pytest.raises(RewardError, match=r"spec\.reward\.functions\[0\] \(model\): sample s1: .* takes 128"):
        service.collect(DEADLINE)
    service.close()


def test_a_model_that_cannot_be_loaded_stops_the_run_before_it_starts(tmp_path):
    save_tiny_model(tmp_path / "causal")
    service = RewardService(make_reward(str(tmp_path / "causal")), backend=Backend.LOCAL)
    with pytest.raises(ConfigurationError, match="no sequence classifier"):
        service.dry_run([PromptRow("train/0/0", [1], "2+2?", "4", {})])
    service.close()
