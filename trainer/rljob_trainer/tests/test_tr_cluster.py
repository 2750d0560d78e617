"""Interfaces, nodes and waits: who is blamed for what."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from rljob_api.contract import Layout
from rljob_trainer.distributed import network, process_group
from rljob_trainer.distributed.cluster import Cluster
from rljob_trainer.distributed.location import ActorLocation
from rljob_trainer.distributed.placement import NodeResources, choose_nodes, read_nodes
from rljob_trainer.distributed.process_group import check_collectives, join_process_group, start_store
from rljob_trainer.distributed.waiting import Actor, iterate_streams, wait_for_all
from rljob_trainer.errors import ConfigurationError, DataError, EngineDied, StopRequested, TransientError


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("fd00::17", False)]
)
def test_loopback(address, expected):
    assert network.is_loopback(address) is expected


def test_the_interface_towards_loopback_is_lo():
    assert network.find_interface("127.0.0.1") == "lo"


def test_the_interface_of_an_ipv6_peer(monkeypatch):
    monkeypatch.setattr(network, "find_local_address", lambda _: "fd00:0:0::17")
    monkeypatch.setattr(network, "list_interface_addresses", lambda: {"lo": ["::1"], "eth0": ["fe80::1", "fd00::17"]})
    assert network.find_interface("fd00::18") == "eth0"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_free_port_is_none_that_an_outgoing_connection_takes(host):
    ports = {network.find_free_port(host) for _ in range(20)}
    assert len(ports) > 10
    assert max(ports) < network.read_first_outgoing_port()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind((host, ports.pop()))


def test_where_the_kernel_takes_all_ports_one_of_them_is_free(monkeypatch, tmp_path):
    table = tmp_path / "range"
    table.write_text("1024\t65535\n")
    monkeypatch.setattr(network, "OUTGOING_RANGE", table)
    assert network.read_first_outgoing_port() == 1024
    assert network.find_free_port("127.0.0.1") >= 1024


def test_no_port_of_an_address_that_is_elsewhere():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        network.find_free_port("192.0.2.77")


def test_an_address_without_an_interface_lists_what_there_is(monkeypatch):
    monkeypatch.setattr(network, "find_local_address", lambda _: "10.0.0.1")
    monkeypatch.setattr(network, "list_interface_addresses", lambda: {"eth7": ["10.9.9.9"]})
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1.*eth7.*spec\.network\.interface"):
        network.find_interface("10.0.0.2")


def test_the_kernels_interfaces_include_loopback():
    assert "127.0.0.1" in network.list_interface_addresses()["lo"]


@pytest.mark.parametrize("name", ["^docker0", "=eth0"])
def test_nccl_patterns_are_refused_for_gloo(name):
    with pytest.raises(ConfigurationError, match="exact interface name"):
        network.choose_interface({"GLOO_SOCKET_IFNAME": name}, None, "127.0.0.1", spans_nodes=False)


def test_an_unknown_interface_is_refused():
    with pytest.raises(ConfigurationError, match="no such interface"):
        network.choose_interface({}, "eth99", "127.0.0.1", spans_nodes=False)


def test_loopback_is_refused_across_nodes():
    assert network.choose_interface({}, None, "127.0.0.1", spans_nodes=False) == "lo"
    with pytest.raises(ConfigurationError, match="cannot meet on loopback"):
        network.choose_interface({}, None, "127.0.0.1", spans_nodes=True)


def test_the_environment_wins_over_the_job():
    assert network.choose_interface({"GLOO_SOCKET_IFNAME": "lo"}, "eth99", "127.0.0.1", spans_nodes=False) == "lo"


def layout(nodes, ranks, gpus):
    return Layout(
        num_nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        world_size=nodes * ranks,
        tensor_parallel_size=1,
        num_engines=nodes * ranks,
    )


HEAD = NodeResources("h", "10.0.0.1", 0, 0)


def test_a_head_without_resources_is_left_out():
    workers = [NodeResources("a", "10.0.0.2", 8, 8), NodeResources("b", "10.0.0.3", 8, 8)]
    assert choose_nodes([HEAD, *workers], layout(2, 8, 8)) == workers


def test_a_node_with_seven_gpus_is_named_with_both_numbers():
    nodes = [HEAD, NodeResources("a", "10.0.0.2", 8, 8), NodeResources("b", "10.0.0.3", 8, 7)]
    message = choose_nodes(nodes, layout(2, 8, 8))
    assert isinstance(message, str)
    for part in ("2 nodes with 8 GPUs", "16 GPUs in all", "1 such nodes", "15 GPUs in all", "10.0.0.3: 8 CPUs, 7 GPUs"):
        assert part in message


def test_cpu_jobs_leave_gpu_nodes_alone_where_they_can():
    gpu, cpu = NodeResources("g", "10.0.0.2", 16, 8), NodeResources("c", "10.0.0.3", 2, 0)
    assert choose_nodes([gpu, cpu], layout(1, 2, 0)) == [cpu]
    assert choose_nodes([gpu], layout(1, 2, 0)) == [gpu]


def test_dead_nodes_do_not_count():
    entry = {"NodeID": "a", "NodeManagerAddress": "fd00::2", "Resources": {"CPU": 2.0}}
    assert read_nodes([entry | {"Alive": True}, entry | {"Alive": False}]) == [NodeResources("a", "fd00::2", 2, 0)]


def test_ranks_follow_addresses_and_gpu_numbers():
    def place(address, gpu):
        return ActorLocation(address, "node", (gpu,), "host", 1)

    places = [place("10.0.0.3", "0"), place("10.0.0.2", "10"), place("10.0.0.2", "9")]
    ordered = sorted(places, key=lambda location: location.sort_key)
    assert [(location.address, location.gpu_ids) for location in ordered] == [
        ("10.0.0.2", ("9",)),
        ("10.0.0.2", ("10",)),
        ("10.0.0.3", ("0",)),
    ]


COLLECTIVE_SECONDS = 5


class Worker:
    """Behaves and misbehaves on request."""

    def answer(self, value):
        return value

    def fail(self):
        raise DataError("spec.data.train[0]: nothing there")

    def crash(self):
        raise KeyError("bug")

    def die(self):
        print("last words", flush=True)
        os._exit(3)

    def die_later(self):
        time.sleep(2)
        os._exit(3)

    def hang(self):
        time.sleep(600)

    def count(self, values):
        for value in values:  # noqa: UP028 - Ray's wrapper cannot delegate to a list
            yield value


class Member(Worker):
    """Of a process group; apart, since torch takes seconds to import in each process."""

    def join(self, rank, rendezvous):
        join_process_group(
            rendezvous,
            rank=rank,
            world_size=2,
            store=None,
            use_gpu=False,
            timeout_seconds=60,
            collective_timeout_seconds=COLLECTIVE_SECONDS,
        )

    def reduce(self):
        dist.all_reduce(torch.ones(1))


@pytest.fixture(scope="module")
def workers(actor_ray):
    def make(label, is_engine=False, kind=Worker, handle=None):
        handle = handle or ray.remote(num_cpus=0)(kind).remote()
        return Actor(handle, label, "node", is_engine=is_engine, describe_log=lambda: "last lines: last words")

    return make


@pytest.fixture(scope="module")
def pair(workers):
    """Two that serve several tests: none of them leaves its worker dead or hanging."""
    handles = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    ray.get([handle.answer.remote(0) for handle in handles])
    return lambda *labels: [workers(label, handle=handle) for label, handle in zip(labels, handles, strict=False)]


@pytest.mark.ray
def test_answers_come_in_order(pair):
    first, second = pair("rank 0", "rank 1")
    references = {second.handle.answer.remote(2): second, first.handle.answer.remote(1): first}
    assert wait_for_all(references, timeout_seconds=60, what="test") == [2, 1]


@pytest.mark.ray
def test_a_typed_failure_of_an_actor_arrives_as_it_was(pair):
    (actor,) = pair("rank 0")
    with pytest.raises(DataError, match=r"^spec\.data\.train\[0\]: nothing there$"):
        wait_for_all({actor.handle.fail.remote(): actor}, timeout_seconds=60, what="test")


@pytest.mark.ray
def test_an_untyped_failure_keeps_its_traceback(pair):
    (actor,) = pair("rank 0")
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: .*KeyError"):
        wait_for_all({actor.handle.crash.remote(): actor}, timeout_seconds=60, what="test")


@pytest.mark.ray
def test_a_dead_rank_is_named_although_another_hangs(workers):
    """The others may sit in a collective for ever; membership is what is watched."""
    dying, hanging = workers("rank 1 (node fd00::2)"), workers("rank 0")
    references = {hanging.handle.hang.remote(): hanging, dying.handle.die.remote(): dying}
    with pytest.raises(TransientError, match=r"rank 1 \(node fd00::2\) is gone"):
        wait_for_all(references, timeout_seconds=300, what="test")


@pytest.mark.ray
def test_a_dead_rank_is_blamed_not_its_peer_whose_collective_broke(workers, pair):
    (peer,) = pair("rank 0")
    dying = workers("rank 1")
    ray.get(dying.handle.answer.remote(0))
    references = {peer.handle.crash.remote(): peer, dying.handle.die_later.remote(): dying}
    with pytest.raises(TransientError, match="rank 1 is gone"):
        wait_for_all(references, timeout_seconds=60, what="test")


@pytest.mark.ray
def test_a_rank_that_hangs_in_a_collective_is_blamed_not_the_one_that_waits_for_it(workers):
    store, rendezvous = start_store("127.0.0.1", 2, 60)
    waiting, silent = workers("rank 0", kind=Member), workers("rank 1 (node fd00::2)", kind=Member)
    # Both have started: they meet within the time that a collective has here.
    ray.get([actor.handle.answer.remote(0) for actor in (waiting, silent)], timeout=120)
    ray.get([actor.handle.join.remote(rank, rendezvous) for rank, actor in enumerate((waiting, silent))], timeout=120)
    references = {waiting.handle.reduce.remote(): waiting, silent.handle.hang.remote(): silent}
    with pytest.raises(
        TransientError, match=r"(?s)update: no answer from rank 1 \(node fd00::2\); rank 0: .*Timed out"
    ) as caught:
        wait_for_all(references, timeout_seconds=300, what="update")
    assert caught.value.exit_code == 75
    del store


def test_an_aborted_collective_is_told_at_the_end_of_the_work(one_rank, monkeypatch):
    check_collectives(torch.device("cpu"), 0)
    backend = SimpleNamespace(get_error=lambda: ErrorType.SUCCESS)
    monkeypatch.setattr(process_group, "_find_backend", lambda device: backend)
    check_collectives(torch.device("cpu"), 3)
    backend.get_error = lambda: ErrorType.TIMEOUT
    with pytest.raises(TransientError, match="rank 3: collective operation timeout"):
        check_collectives(torch.device("cpu"), 3)


@pytest.mark.ray
def test_a_rank_that_never_joins_is_named(workers):
    store, rendezvous = start_store("127.0.0.1", 2, 60)
    joining, absent = workers("rank 0", kind=Member), workers("rank 1 (node fd00::2)")
    references = {joining.handle.join.remote(0, rendezvous): joining, absent.handle.hang.remote(): absent}
    with pytest.raises(
        TransientError, match=r"no answer from rank 1 \(node fd00::2\); rank 0 of 2 could not meet"
    ) as caught:
        wait_for_all(references, timeout_seconds=120, what="loading the model")
    assert caught.value.exit_code == 75
    del store


@pytest.mark.ray
def test_a_dead_engine_of_another_node_is_blamed_while_the_first_node_hangs(workers):
    """Tensor parallel over nodes: node 0 waits in a collective for node 1 and says nothing."""
    head, follower = workers("engine 0", is_engine=True), workers("engine 0 node 1", is_engine=True)
    ray.get([actor.handle.answer.remote(0) for actor in (head, follower)])

    def make_cluster(watch):
        return Cluster([], [head], [(0, 1)], {}, [follower], {watch: follower}, placement=None, num_parameters=0)

    make_cluster(follower.handle.hang.remote()).check_followers()
    dying = workers("engine 0 node 1", is_engine=True)
    cluster = make_cluster(follower.handle.hang.remote())
    cluster.watches[dying.handle.die_later.remote()] = dying
    with pytest.raises(EngineDied, match=r"engine 0 node 1 is gone[\s\S]*last words"):
        cluster.call_engines("hang", timeout_seconds=300)


@pytest.mark.ray
def test_a_dead_engine_is_an_engine_failure_with_its_last_words(workers):
    engine = workers("engine 0", is_engine=True)
    with pytest.raises(EngineDied, match=r"(?s)engine 0 is gone.*last words") as caught:
        wait_for_all({engine.handle.die.remote(): engine}, timeout_seconds=60, what="test")
    assert caught.value.exit_code == 74


@pytest.mark.ray
@pytest.mark.parametrize(("is_engine", "error"), [(False, TransientError), (True, EngineDied)])
def test_a_deadline_names_who_is_late(workers, pair, is_engine, error):
    (prompt,) = pair("rank 0")
    late = workers("the late one", is_engine)
    ray.get(late.handle.answer.remote(0))  # it has started
    references = {prompt.handle.answer.remote(1): prompt, late.handle.hang.remote(): late}
    with pytest.raises(error, match="collecting: no answer within 1 s from the late one"):
        wait_for_all(references, timeout_seconds=1, what="collecting")


class Rank(Worker):
    def get_pid(self):
        return os.getpid()

    def count_progress(self):
        return 0

    def stream_until_broken(self):
        yield 1
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")

    def stream_until_dead(self):
        yield 1
        time.sleep(2)  # the peer of a dying rank notices before Ray does
        os._exit(3)


@pytest.mark.ray
def test_of_two_late_ranks_the_one_that_is_stopped_is_named(workers):
    """A rank that waits for it in a collective still answers beside that."""
    cls = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Rank)
    waiting, stopped = Actor(cls.remote(), "rank 0", "node"), Actor(cls.remote(), "rank 1", "node")
    pid, _ = ray.get([actor.handle.get_pid.remote() for actor in (stopped, waiting)], timeout=60)
    references = {actor.handle.hang.remote(): actor for actor in (waiting, stopped)}
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransientError, match=r"no answer within 2 s from rank 1; waiting as well: rank 0$"):
            wait_for_all(references, timeout_seconds=2, what="update")
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.ray
def test_a_stop_request_ends_a_wait(workers):
    actor = workers("rank 0")

    def poll():
        raise StopRequested("test")

    with pytest.raises(StopRequested):
        wait_for_all({actor.handle.hang.remote(): actor}, timeout_seconds=60, what="test", poll=poll)


@pytest.mark.ray
def test_streams_of_several_actors_are_read_to_their_ends(pair):
    first, second = pair("engine 0", "engine 1")
    streams = {
        actor.handle.count.options(num_returns="streaming").remote(values): actor
        for actor, values in ((first, [1, 2, 3]), (second, []))
    }
    found = [
        (actor.label, ray.get(reference))
        for actor, reference in iterate_streams(streams, timeout_seconds=60, what="test")
    ]
    assert found == [("engine 0", 1), ("engine 0", 2), ("engine 0", 3)]


@pytest.mark.ray
def test_a_dead_rank_is_blamed_not_its_peer_whose_stream_broke(workers):
    cls = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Rank)
    peer, dying = Actor(cls.remote(), "rank 0", "node"), Actor(cls.remote(), "rank 1", "node")
    ray.get([actor.handle.get_pid.remote() for actor in (peer, dying)], timeout=60)
    streams = {
        peer.handle.stream_until_broken.options(num_returns="streaming").remote(): peer,
        dying.handle.stream_until_dead.options(num_returns="streaming").remote(): dying,
    }
    with pytest.raises(TransientError, match="rank 1 is gone"):
        list(iterate_streams(streams, timeout_seconds=60, what="weight sync"))
    # Where nobody else is to blame it is the peer's own failure, raised and not handed on as an item.
    alone = {peer.handle.stream_until_broken.options(num_returns="streaming").remote(): peer}
    with pytest.raises(TransientError, match=r"(?s)weight sync: rank 0: .*Connection closed by peer"):
        list(iterate_streams(alone, timeout_seconds=60, what="weight sync"))


@pytest.mark.ray
def test_a_stream_of_a_dead_engine_is_an_engine_failure(workers):
    engine = workers("engine 0", is_engine=True)
    stream = engine.handle.count.options(num_returns="streaming").remote([1])
    ray.get(engine.handle.answer.remote(0))
    dead = engine.handle.die.remote()
    ray.wait([dead], timeout=60)
    late = engine.handle.count.options(num_returns="streaming").remote([1])
    streams = iterate_streams({stream: engine, late: engine}, timeout_seconds=60, what="test")
    with pytest.raises(EngineDied, match="engine 0 is gone"):
        list(streams)
