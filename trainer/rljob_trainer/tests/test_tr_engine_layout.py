"""Which ranks' GPUs make up which engine: pure functions, with fake devices."""

import pytest

from rljob_api.contract import Layout
from rljob_api.v1alpha1.rollout import Engine
from rljob_trainer.distributed.engine_layout import (
    check_engine_layout,
    choose_engine_bundles,
    plan_engines,
    plan_separate_engines,
    specialise_settings,
)
from rljob_trainer.distributed.location import ActorLocation
from rljob_trainer.distributed.placement import NodeResources, choose_nodes, plan_bundles
from rljob_trainer.distributed.weight_sources import WeightSource, plan_weight_sources
from rljob_trainer.engines.contract import EngineSettings
from rljob_trainer.errors import ConfigurationError

SETTINGS = EngineSettings("model", None, "BFloat16", "cuda", (2,), tensor_parallel_size=16)


def make_places(nodes, gpus_per_node, address="10.94.16.{}"):
    """Ranks in order: node by node, GPU by GPU."""
    return [
        ActorLocation(address.format(4 + node), f"node-{node}", (str(gpu),), f"worker-{node}", 100 + gpu)
        for node in range(nodes)
        for gpu in range(gpus_per_node)
    ]


def make_layout(nodes, ranks, size, gpus=None):
    """With more GPUs than ranks, the others are for engines."""
    gpus = ranks if gpus is None else gpus
    return Layout(
        num_nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        world_size=nodes * ranks,
        engine_gpus_per_node=max(0, gpus - ranks),
        tensor_parallel_size=size,
        num_engines=max(1, nodes * (max(0, gpus - ranks) or ranks) // size),
    )


@pytest.mark.parametrize(
    ("address", "rendezvous"),
    [("10.94.16.{}", "10.94.16.4:20001"), ("fd00:10:244::{}", "[fd00:10:244::4]:20001")],
)
def test_sixteen_gpus_on_two_nodes_make_one_engine(address, rendezvous):
    """The two-node script of verl's SGLang page: 2 x 8 GPUs, TP 16."""
    layout = make_layout(2, 8, 16)
    check_engine_layout(Engine.SGLANG, layout)
    assert choose_engine_bundles(layout) == [0, 8]
    slots = plan_engines(make_places(2, 8, address), 16)
    settings = [specialise_settings(SETTINGS, slot, slots[0], 20001) for slot in slots]
    table = [
        (slot.replica, slot.node_id, setting.visible_devices, setting.node_rank, setting.rendezvous)
        for slot, setting in zip(slots, settings, strict=True)
    ]
    gpus = tuple(map(str, range(8)))
    assert table == [(0, "node-0", gpus, 0, rendezvous), (0, "node-1", gpus, 1, rendezvous)]
    assert [setting.num_nodes for setting in settings] == [2, 2]
    assert [setting.host for setting in settings] == [address.format(4), address.format(5)]
    assert [slot.ranks for slot in slots] == [tuple(range(8)), tuple(range(8, 16))]


def test_engines_inside_a_node_see_only_their_ranks_devices():
    layout = make_layout(2, 4, 2)
    check_engine_layout(Engine.SGLANG, layout)
    slots = plan_engines(make_places(2, 4), 2)
    assert choose_engine_bundles(layout) == [0, 2, 4, 6]
    assert [(slot.replica, slot.node_id, slot.gpu_ids, slot.ranks) for slot in slots] == [
        (0, "node-0", ("0", "1"), (0, 1)),
        (1, "node-0", ("2", "3"), (2, 3)),
        (2, "node-1", ("0", "1"), (4, 5)),
        (3, "node-1", ("2", "3"), (6, 7)),
    ]
    assert all(specialise_settings(SETTINGS, slot, slot, 1).rendezvous is None for slot in slots)


def test_replicas_over_several_nodes_next_to_each_other():
    slots = plan_engines(make_places(4, 2), 4)
    assert [(slot.replica, slot.node_rank, slot.node_id) for slot in slots] == [
        (0, 0, "node-0"),
        (0, 1, "node-1"),
        (1, 0, "node-2"),
        (1, 1, "node-3"),
    ]


def test_one_rank_per_engine_without_gpus():
    places = [ActorLocation("127.0.0.1", "node", (), "host", pid) for pid in (7, 8)]
    slots = plan_engines(places, 1)
    assert [(slot.ranks, slot.gpu_ids, slot.num_nodes) for slot in slots] == [((0,), (), 1), ((1,), (), 1)]
    assert specialise_settings(SETTINGS, slots[0], slots[0], 1).visible_devices is None


def test_gpus_named_by_uuid_are_kept():
    places = [ActorLocation("10.0.0.1", "node", (gpu,), "host", 1) for gpu in ("GPU-aa", "GPU-bb")]
    assert plan_engines(places, 2)[0].gpu_ids == ("GPU-aa", "GPU-bb")


@pytest.mark.parametrize(
    ("nodes", "ranks", "size", "valid"),
    [
        (1, 4, 3, "1, 2, 4"),
        (2, 4, 6, "1, 2, 4, 8"),
        (3, 2, 4, "1, 2, 6"),
        (2, 8, 32, "1, 2, 4, 8, 16"),
        (2, 3, 2, "1, 3, 6"),
    ],
)
def test_a_size_that_cuts_nodes_unevenly_is_refused_with_those_that_work(nodes, ranks, size, valid):
    with pytest.raises(ConfigurationError, match=rf"spec\.rollout\.tensorParallelSize: {size} .*use one of {valid}$"):
        check_engine_layout(Engine.SGLANG, make_layout(nodes, ranks, size))


def test_native_does_not_split():
    with pytest.raises(ConfigurationError, match=r"spec\.rollout\.tensorParallelSize: Native .* got 2; use 1"):
        check_engine_layout(Engine.NATIVE, make_layout(1, 2, 2))
    check_engine_layout(Engine.NATIVE, make_layout(1, 2, 1))


def test_vllm_stays_inside_a_node():
    check_engine_layout(Engine.VLLM, make_layout(2, 4, 4))
    with pytest.raises(ConfigurationError, match="use at most 4"):
        check_engine_layout(Engine.VLLM, make_layout(2, 4, 8))


def test_places_that_do_not_fit_the_plan_are_refused():
    places = [*make_places(1, 3), *make_places(2, 1)[1:]]
    with pytest.raises(ConfigurationError, match=r"3 on 10\.94\.16\.4, 1 on 10\.94\.16\.5"):
        plan_engines(places, 4)
    shared = [ActorLocation("10.0.0.1", "node", ("0",), "host", pid) for pid in (1, 2)]
    with pytest.raises(ConfigurationError, match="GPUs 0, 0 for 2 ranks"):
        plan_engines(shared, 2)


def make_engine_places(*gpus_of_nodes):
    """Engine actors, node by node; GPUs of each as one string."""
    return [
        ActorLocation(f"10.94.16.{4 + node}", f"node-{node}", tuple(gpus.split(",")), f"worker-{node}", 200 + index)
        for node, actors in enumerate(gpus_of_nodes)
        for index, gpus in enumerate(actors)
    ]


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "size", "bundles", "gpus_each"),
    [
        (1, 6, 8, 1, [6, 7], 1),
        (1, 6, 8, 2, [6], 2),
        (2, 4, 8, 2, [8, 9, 10, 11], 2),
        (2, 6, 8, 4, [12, 13], 2),  # one engine over both nodes
        (1, 1, 2, 1, [1], 1),
    ],
)
def test_bundles_of_separate_engines_follow_those_of_the_ranks(nodes, ranks, gpus, size, bundles, gpus_each):
    layout = make_layout(nodes, ranks, size, gpus)
    check_engine_layout(Engine.SGLANG, layout)
    machines = [NodeResources(f"node-{node}", f"10.94.16.{4 + node}", 64, gpus) for node in range(nodes)]
    planned = plan_bundles(machines, layout)
    assert choose_engine_bundles(layout) == bundles
    assert [bundle.resources["GPU"] for bundle in planned] == [1.0] * nodes * ranks + [gpus_each] * len(bundles)
    for machine in machines:
        on_node = [bundle.resources for bundle in planned if bundle.node == machine]
        assert sum(resources["GPU"] for resources in on_node) == gpus
        assert choose_nodes(machines, layout) == machines
    scarce = [NodeResources("node-0", "10.94.16.4", ranks, gpus)] * nodes
    assert isinstance(choose_nodes(scarce, layout), str), "the CPUs of the engines count as well"


def test_separate_engines_are_built_from_what_ray_gave_them():
    places = make_engine_places(["6", "3"], ["10", "9"])
    slots = plan_separate_engines(places, 1)
    assert [(index, slot.replica, slot.node_id, slot.gpu_ids, slot.ranks) for index, slot in slots] == [
        (1, 0, "node-0", ("3",), ()),
        (0, 1, "node-0", ("6",), ()),
        (3, 2, "node-1", ("9",), ()),
        (2, 3, "node-1", ("10",), ()),
    ]


def test_a_separate_engine_over_two_nodes():
    slots = plan_separate_engines(make_engine_places(["6,7"], ["4,5"]), 4)
    assert [(index, slot.replica, slot.node_rank, slot.num_nodes, slot.gpu_ids) for index, slot in slots] == [
        (0, 0, 0, 2, ("6", "7")),
        (1, 0, 1, 2, ("4", "5")),
    ]
    setting = specialise_settings(SETTINGS, slots[1][1], slots[0][1], 20001)
    assert (setting.visible_devices, setting.rendezvous) == (("4", "5"), "10.94.16.4:20001")


@pytest.mark.parametrize(
    ("places", "size"),
    [
        (make_engine_places(["6", "7"]), 2),  # both halves on one node
        (make_engine_places(["6,7"], ["5"]), 2),
        (make_engine_places(["6,7"]), 1),
    ],
)
def test_gpus_that_do_not_make_up_engines_are_refused(places, size):
    with pytest.raises(ConfigurationError, match=r"spec\.rollout\.tensorParallelSize: .*GPU"):
        plan_separate_engines(places, size)


@pytest.mark.parametrize(("size", "valid"), [(3, "1, 2, 4"), (8, "1, 2, 4")])
def test_sizes_of_separate_engines_are_cut_from_their_gpus(size, valid):
    with pytest.raises(
        ConfigurationError, match=rf"{size} does not cut 2 nodes of 2 engine GPUs .*use one of {valid}$"
    ):
        check_engine_layout(Engine.SGLANG, make_layout(2, 6, size, gpus=8))


def test_colocated_ranks_give_their_own_copies():
    ranks = make_places(2, 4)
    plan = plan_weight_sources(ranks, plan_engines(ranks, 2))
    assert plan.by_engine == [[WeightSource(first), WeightSource(first + 1)] for first in (0, 2, 4, 6)]
    assert plan.engine_gpus == [()] * 8


def test_on_cpus_the_first_rank_of_a_node_gives_one_copy_for_all():
    ranks = [ActorLocation(f"10.0.0.{node}", f"node-{node}", (), "host", pid) for node in (1, 2) for pid in (7, 8)]
    plan = plan_weight_sources(ranks, plan_engines(ranks, 1))
    assert plan.by_engine == [[WeightSource(0)], [WeightSource(0)], [WeightSource(2)], [WeightSource(2)]]
    assert plan.engine_gpus == [()] * 4


def test_ranks_share_the_writing_to_the_engines_of_their_node():
    """Two ranks and three engines per node; then one rank and an engine over two GPUs of each of two nodes."""
    engines = [slot for _, slot in plan_separate_engines(make_engine_places(["5", "6", "7"], ["5", "6", "7"]), 1)]
    plan = plan_weight_sources(make_places(2, 2), engines)
    assert plan.by_engine == [
        [WeightSource(0, 1)],
        [WeightSource(1, 1)],
        [WeightSource(0, 2)],
        [WeightSource(2, 1)],
        [WeightSource(3, 1)],
        [WeightSource(2, 2)],
    ]
    assert plan.engine_gpus == [("5", "7"), ("6",), ("5", "7"), ("6",)]
    engines = [slot for _, slot in plan_separate_engines(make_engine_places(["6,7"], ["4,5"]), 4)]
    plan = plan_weight_sources(make_places(2, 1), engines)
    assert plan.by_engine == [[WeightSource(0, 1), WeightSource(0, 2), WeightSource(1, 1), WeightSource(1, 2)]]
    assert plan.engine_gpus == [("6", "7"), ("4", "5")]
