"""The Http reward against real servers on 127.0.0.1 and ::1."""

import json
import socket
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rljob_api.v1alpha1.data import Reward
from rljob_trainer.data import PromptRow
from rljob_trainer.errors import ConfigurationError, RewardError
from rljob_trainer.rewards import Backend, FailureKind, RewardService, ScoreRequest, summarise_rewards
from rljob_trainer.rewards.http_function import parse_retry_after, strip_credentials


class Server:
    """Records requests and answers as the test says."""

    def __init__(self, answer, family=socket.AF_INET):
        self.requests = []
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append((body, dict(self.headers)))
                    number = len(outer.requests)
                    outer.num_open += 1
                    outer.most_open = max(outer.most_open, outer.num_open)
                try:
                    status, headers, document = answer(number, body)
                finally:
                    with outer.lock:
                        outer.num_open -= 1
                if status is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                data = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Listener(ThreadingHTTPServer):
            address_family = family
            daemon_threads = True

        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        self.server = Listener((host, 0), Handler)
        shown = host if family == socket.AF_INET else f"[{host}]"
        self.url = f"http://{shown}:{self.server.server_address[1]}/score"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve():
    servers = []

    def start(answer, family=socket.AF_INET):
        servers.append(Server(answer, family))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def start():
    services = []

    def build(url, on_error="DropSample", more=(), **options):
        functions = [{"type": "Http", "url": url, "timeoutSeconds": 20, **options}, *more]
        reward = Reward.model_validate({"functions": functions, "onError": on_error})
        services.append(RewardService(reward, backend=Backend.LOCAL))
        return services[-1]

    yield build
    for service in services:
        service.close()


def submit(service, responses, answer="4"):
    for number, response in enumerate(responses):
        service.submit(ScoreRequest(f"p/{number}", "2+2?", response, answer, {"level": 3, "bad": float("nan")}))


def right(number, body):
    return 200, {}, {"score": float(body["response"] == body["answer"]), "length": len(body["response"])}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["127.0.0.1", "::1"])
def test_single_requests(serve, start, family):
    server = serve(right, family)
    service = start(server.url)
    submit(service, ["4", "5", "four"])
    results = service.collect(60)
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]
    assert summarise_rewards(results).function_means == {"http": pytest.approx(1 / 3), "http/length": 2.0}
    bodies = [body for body, _ in server.requests]
    assert {"prompt": "2+2?", "response": "4", "answer": "4", "fields": {"level": 3, "bad": None}} in bodies


def test_batches_keep_the_order_and_the_limit(serve, start):
    def answer(number, body):
        return 200, {}, {"scores": [float(sample["response"]) for sample in body["samples"]]}

    server = serve(answer)
    service = start(server.url, batchSamples=8, maxConcurrentRequests=2)
    submit(service, [str(number) for number in range(50)])
    assert [result.reward for result in service.collect(60)] == [float(number) for number in range(50)]
    sizes = [len(body["samples"]) for body, _ in server.requests]
    assert sum(sizes) == 50
    assert max(sizes) <= 8
    assert len(sizes) < 50


def test_no_more_requests_at_once_than_allowed(serve, start):
    def answer(number, body):
        time.sleep(0.05)
        return right(number, body)

    server = serve(answer)
    service = start(server.url, maxConcurrentRequests=3)
    submit(service, ["4"] * 20)
    assert [result.reward for result in service.collect(60)] == [1.0] * 20
    assert 1 < server.most_open <= 3


@pytest.mark.parametrize(
    "problem", [(503, {}, {}), (500, {}, b"oops"), (429, {"Retry-After": "0"}, {}), (None, {}, {})]
)
def test_what_may_go_away_is_repeated(serve, start, problem):
    server = serve(lambda number, body: problem if number <= 2 else right(number, body))
    service = start(server.url, on_error="FailJob")
    submit(service, ["4"])
    assert service.collect(60)[0].reward == 1.0
    assert len(server.requests) == 3


def test_a_server_that_starts_late_is_waited_for(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = start(f"http://127.0.0.1:{port}/score")
    submit(service, ["4"])
    time.sleep(0.3)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            data = b'{"score": 1}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert service.collect(60)[0].reward == 1.0
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_other_statuses_are_final_and_name_the_address(serve, start, status):
    server = serve(lambda number, body: (status, {"Location": "http://elsewhere/"}, {"detail": "no such thing"}))
    service = start(server.url.replace("/score", "/score?key=sesame"))
    submit(service, ["4"])
    with pytest.raises(RewardError) as caught:  # one of one failed
        service.collect(60)
    assert f"HTTP {status}" in str(caught.value)
    assert server.url in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert "spec.reward.functions[0] (http): sample p/0" in str(caught.value)
    assert len(server.requests) == 1


def test_the_deadline_ends_repetitions(serve, start):
    server = serve(lambda number, body: (503, {}, {"detail": "busy"}))
    service = start(server.url, timeoutSeconds=2)
    ok = serve(right)
    submit(service, ["4"])
    with pytest.raises(RewardError, match=r"HTTP 503.*timeoutSeconds = 2"):
        service.collect(60)
    assert len(server.requests) > 1
    assert ok.requests == []


def test_a_wait_longer_than_the_deadline_is_not_begun(serve, start):
    server = serve(lambda number, body: (429, {"Retry-After": "3600"}, {}))
    service = start(server.url)
    submit(service, ["4"])
    with pytest.raises(RewardError, match="asks to wait 3600 s"):
        service.collect(60)
    assert len(server.requests) == 1


def test_no_answer_is_a_time_limit_of_that_sample_only(serve, start):
    def answer(number, body):
        if body["response"] == "slow":
            time.sleep(30)
        return right(number, body)

    service = start(serve(answer).url, timeoutSeconds=1)
    submit(service, ["4", "slow", "4"])
    results = service.collect(60)
    assert [result.reward for result in results] == [1.0, None, 1.0]
    assert results[1].failure.kind is FailureKind.TIMEOUT
    assert summarise_rewards(results).num_timeouts == 1


@pytest.mark.parametrize(
    ("document", "batch", "message"),
    [
        ({"points": 1}, 1, "without 'score'"),
        (1.0, 1, "it must be"),
        ({"score": "1"}, 1, "type str"),
        (b"<html>", 1, "no JSON"),
        ({"scores": [1, 2]}, 4, "2 scores for 1 samples"),
        ({"score": 1}, 4, 'needs {"scores"'),
    ],
)
def test_answers_of_another_form_are_failures_never_zero(serve, start, document, batch, message):
    server = serve(lambda number, body: (200, {}, document))
    service = start(server.url, batchSamples=batch)
    submit(service, ["4"])
    with pytest.raises(RewardError) as caught:
        service.collect(60)
    assert message in str(caught.value)
    assert server.url in str(caught.value)
    assert len(server.requests) == 1


def test_null_declines_and_nan_is_counted(serve, start):
    def answer(number, body):
        return 200, {}, b'{"score": NaN}' if body["response"] == "nan" else {"score": None}

    service = start(serve(answer).url)
    submit(service, ["nan", "null"])
    results = service.collect(60)
    assert [result.reward for result in results] == [None, None]
    assert [result.is_nan for result in results] == [True, False]
    assert all(result.failure is None for result in results)


def test_authorization_comes_from_the_environment(serve, start, monkeypatch):
    monkeypatch.setenv("SCORER_AUTH", "Bearer sesame")
    server = serve(right)
    service = start(server.url, authorizationEnv="SCORER_AUTH")
    submit(service, ["4"])
    service.collect(60)
    assert server.requests[0][1]["Authorization"] == "Bearer sesame"
    monkeypatch.delenv("SCORER_AUTH")
    with pytest.raises(
        ConfigurationError, match=r"functions\[0\]\.authorizationEnv: the environment has no SCORER_AUTH"
    ):
        start(server.url, authorizationEnv="SCORER_AUTH")


def test_sum_with_functions_that_run_in_workers(serve, start):
    """In the order of the specification, whoever answers first."""
    more = [{"type": "GSM8K", "flexible": True, "weight": 2.0}, {"type": "Regex", "pattern": "^[0-9]+$", "weight": 0.5}]
    service = start(serve(right).url, more=more, weight=10.0)
    submit(service, ["4", "it is 4", "x"])
    results = service.collect(120)
    assert [result.reward for result in results] == [12.5, 2.0, 0.0]
    assert list(results[0].scores) == ["http", "gsm8k", "regex"]
    assert results[1].prediction == "4"


def test_dry_run_meets_a_server_that_is_not_there(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = start(f"http://127.0.0.1:{port}/score", timeoutSeconds=1)
    with pytest.raises(RewardError, match=rf"dry run train/0/0.*127\.0\.0\.1:{port}/score"):
        service.dry_run([PromptRow("train/0/0", [1], "2+2?", "4", {})])


def test_a_failed_batch_is_not_asked_about_any_further(serve, start):
    def answer(number, body):
        if body["response"] == "wrong":
            return 400, {}, {}
        time.sleep(0.2)
        return right(number, body)

    server = serve(answer)
    service = start(server.url, on_error="FailJob", maxConcurrentRequests=1)
    submit(service, ["wrong", *["4"] * 50])
    with pytest.raises(RewardError, match=r"sample p/0: .*HTTP 400"):
        service.collect(60)
    service.submit(ScoreRequest("next", "", "4", "4"))
    assert service.collect(60)[0].reward == 1.0
    assert len(server.requests) < 20


def test_closing_gives_up_what_is_open(serve, start):
    release = threading.Event()

    def answer(number, body):
        release.wait(30)
        return right(number, body)

    service = start(serve(answer).url)
    submit(service, ["4"])
    service.close()
    release.set()
    service.close()  # twice does no harm


def test_helpers():
    assert strip_credentials("https://me:pass@h:1/x?key=1#y") == "https://h:1/x"
    assert strip_credentials("http://[fd00::1]:8000/score") == "http://[fd00::1]:8000/score"
    assert parse_retry_after("7") == 7.0
    assert parse_retry_after(None) is None
    assert parse_retry_after("soon") is None
    assert 50 < parse_retry_after(formatdate(time.time() + 60, usegmt=True)) <= 61
