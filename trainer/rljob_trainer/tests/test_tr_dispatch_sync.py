"""Which rank's buckets reach which engine, in what order."""

from types import SimpleNamespace

import pytest

from rljob_trainer import dispatch
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.distributed.waiting import Actor
from rljob_trainer.distributed.weight_sources import WeightSource
from rljob_trainer.errors import EngineDied


class Remote:
    """A handle that notes every call."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def __getattr__(self, method):
        return SimpleNamespace(
            remote=lambda *arguments: self._note(method, arguments), options=lambda **_: self.method(method)
        )

    def method(self, method):
        return SimpleNamespace(remote=lambda *arguments: self._note(method, arguments))

    def _note(self, method, arguments):
        self._calls.append((self._name, method, arguments))
        return f"{self._name}.{method}.{len(self._calls)}"


COLOCATED = [[WeightSource(first), WeightSource(first + 1)] for first in (0, 2, 4, 6)]
ON_CPUS = [[WeightSource(0)], [WeightSource(0)], [WeightSource(4)], [WeightSource(4)]]


class FakeCluster:
    """Two nodes with four ranks each, two engines per node."""

    def __init__(self, calls, sources, version=7, turns=False):
        self.calls, self.version, self.turns = calls, version, turns
        self.ranks = [Actor(Remote(f"rank {rank}", calls), f"rank {rank}", f"node {rank // 4}") for rank in range(8)]
        self.engines = [Actor(Remote(f"engine {i}", calls), f"engine {i}", f"node {i // 2}", True) for i in range(4)]
        self.weight_sources = sources

    def call_ranks(self, method, **_):
        self.calls.append(("ranks", method, ()))
        return [self.turns] * 8 if method == "plans_turns" else [2**30] * 8

    def call_engines(self, method, *arguments, **_):
        self.calls.append(("engines", method, arguments))
        return [self.version] * 4


@pytest.fixture
def make(monkeypatch):
    """A dispatcher over the fake cluster; `arrivals` are (rank, bucket) in the order they come."""

    def build(arrivals, sources=COLOCATED, **options):
        calls = []
        cluster = FakeCluster(calls, sources, **options)

        def iterate(streams, **_):
            assert list(streams.values()) == cluster.ranks, "every rank takes part in the gathers"
            yield from ((cluster.ranks[rank], bucket) for rank, bucket in arrivals)

        monkeypatch.setattr(dispatch, "iterate_streams", iterate)
        monkeypatch.setattr(
            dispatch, "wait_for_all", lambda references, **_: calls.append(("wait", sorted(references), ()))
        )
        training = SimpleNamespace(collective_timeout_seconds=60, sequence_parallel_size=1)
        job = SimpleNamespace(spec=SimpleNamespace(training=training))
        return Dispatcher(job, cluster, lambda: None), calls

    return build


def updates(calls):
    return [(name, arguments) for name, method, arguments in calls if method == "update"]


def test_each_engine_takes_one_bucket_of_each_of_its_ranks(make):
    # The ranks of an engine are not equally fast, and its second rank may be first.
    arrivals = [(1, "1a"), (1, "1b"), (0, "0a"), (2, "2a"), (3, "3a"), (3, "3b"), (0, "0b"), (2, "2b")]
    arrivals += [(rank, f"{rank}{part}") for part in "ab" for rank in (7, 6, 5, 4)]
    dispatcher, calls = make(arrivals)
    dispatcher.sync_weights(7)
    by_engine = {}
    for name, arguments in updates(calls):
        by_engine.setdefault(name, []).append(arguments)
    assert by_engine == {
        f"engine {index}": [(f"{2 * index}a", f"{2 * index + 1}a"), (f"{2 * index}b", f"{2 * index + 1}b")]
        for index in range(4)
    }
    assert [arguments for name, method, arguments in calls if method == "stream_weights"] == [((0,), None)] * 8


def test_an_engine_has_taken_a_bucket_before_it_gets_the_next(make):
    arrivals = [(rank, f"{rank}{part}") for part in "abc" for rank in range(8)]
    dispatcher, calls = make(arrivals)
    dispatcher.sync_weights(7)
    open_updates = set()
    for name, method, _ in calls:
        if method == "update":
            assert name not in open_updates
            open_updates.add(name)
        elif name == "wait":
            open_updates -= {reference.split(".")[0] for reference in method}
    assert not open_updates, "the last bucket is waited for as well"


def test_on_cpus_the_first_rank_of_a_node_feeds_all_its_engines(make):
    arrivals = [(0, "0a"), (4, "4a"), (4, "4b"), (0, "0b")]
    dispatcher, calls = make(arrivals, ON_CPUS)
    dispatcher.sync_weights(7, bucket_bytes=99)
    assert updates(calls) == [
        ("engine 0", ("0a",)),
        ("engine 1", ("0a",)),
        ("engine 2", ("4a",)),
        ("engine 3", ("4a",)),
        ("engine 2", ("4b",)),
        ("engine 3", ("4b",)),
        ("engine 0", ("0b",)),
        ("engine 1", ("0b",)),
    ]
    publishing = {name: arguments for name, method, arguments in calls if method == "stream_weights"}
    assert publishing == {f"rank {rank}": ((0,) if rank in (0, 4) else (), 99) for rank in range(8)}


def test_separate_engines_take_the_copies_on_their_own_cards(make):
    """Node 0: an engine of two GPUs, both written by rank 0, as devices 1 and 2; node 1: engines of ranks 4 and 5."""
    sources = [[WeightSource(0, 1), WeightSource(0, 2)], [WeightSource(4, 1)], [WeightSource(5, 1)]]
    arrivals = [
        (5, "5a"),
        (0, "0a on 1"),
        (5, "5b"),
        (0, "0a on 2"),
        (4, "4a"),
        (0, "0b on 1"),
        (4, "4b"),
        (0, "0b on 2"),
    ]
    dispatcher, calls = make(arrivals, sources)
    dispatcher.sync_weights(7)
    assert updates(calls) == [
        ("engine 2", ("5a",)),
        ("engine 2", ("5b",)),
        ("engine 0", ("0a on 1", "0a on 2")),
        ("engine 1", ("4a",)),
        ("engine 1", ("4b",)),
        ("engine 0", ("0b on 1", "0b on 2")),
    ]
    publishing = {name: arguments[0] for name, method, arguments in calls if method == "stream_weights"}
    assert publishing == {f"rank {rank}": {0: (1, 2), 4: (1,), 5: (1,)}.get(rank, ()) for rank in range(8)}


def test_a_copy_that_never_comes_is_an_error(make):
    dispatcher, _ = make([(0, "0a on 1")], [[WeightSource(0, 1), WeightSource(0, 2)]])
    with pytest.raises(EngineDied, match="different numbers of buckets"):
        dispatcher.sync_weights(7)


def test_ranks_that_stream_different_numbers_of_buckets_are_an_error(make):
    arrivals = [(rank, f"{rank}a") for rank in range(8)] + [(1, "1b")]
    dispatcher, _ = make(arrivals)
    with pytest.raises(EngineDied, match="different numbers of buckets"):
        dispatcher.sync_weights(7)


def test_another_version_is_an_error(make):
    dispatcher, _ = make([], version=6)
    with pytest.raises(EngineDied, match="expected 7"):
        dispatcher.sync_weights(7)


def test_where_they_take_turns_memory_goes_back_before_the_engine_takes_it(make):
    dispatcher, calls = make([], turns=True)
    dispatcher.make_room()
    dispatcher.sync_weights(7)
    order = [method for _, method, _ in calls if isinstance(method, str)]
    assert order[:4] == ["plans_turns", "offload", "get_free_bytes", "release_cached_memory"]
    assert order.index("begin_update") < order.index("stream_weights") < order.index("end_update")


def test_side_by_side_nothing_is_offloaded_and_gathers_start_at_once(make):
    dispatcher, calls = make([])
    dispatcher.make_room()
    dispatcher.sync_weights(7)
    order = [method for _, method, _ in calls if isinstance(method, str)]
    assert "offload" not in order
    assert "release_cached_memory" not in order
    assert order.index("stream_weights") < order.index("begin_update")
