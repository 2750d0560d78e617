"""Weight hand-over from real ranks to real SGLang engines on GPUs, through the product's own cluster and dispatcher:
checksums equal on both sides, one CUDA-IPC handle per tensor parallel rank."""

from __future__ import annotations

import os

import numpy as np
import pytest
import ray
import torch
from tr_gpu import ENGINE_ARGS, needs_gpus
from tr_job import build_job
from tr_tiny import ARCHITECTURES, make_rows, save_architecture

from rljob_trainer.config import build_loss_settings
from rljob_trainer.dispatch import Dispatcher
from rljob_trainer.distributed.cluster import start_cluster
from rljob_trainer.distributed.waiting import get_value
from rljob_trainer.engines.contract import GenerateRequest, SamplingParams
from rljob_trainer.rows import TrainRow
from rljob_trainer.sync.device_memory import share_device_memory

CALL_SECONDS = 300.0
SMALL_BUCKET_BYTES = 30_000
NUM_BYTES = 10_000_000
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]]
LAYOUTS = [
    pytest.param(1, 1, 1, id="one rank", marks=needs_gpus(1, "sglang")),
    pytest.param(2, 2, 2, id="two ranks, one engine of two", marks=needs_gpus(2, "sglang")),
    pytest.param(2, 2, 1, id="two ranks, two engines", marks=needs_gpus(2, "sglang")),
    pytest.param(2, 1, 1, id="one rank, an engine on the other GPU", marks=needs_gpus(2, "sglang")),
    pytest.param(4, 2, 2, id="two ranks, an engine on two other GPUs", marks=needs_gpus(4, "sglang")),
    pytest.param(4, 1, 1, id="one rank, three engines on other GPUs", marks=needs_gpus(4, "sglang")),
]
"""GPUs, ranks, tensor parallel size; GPUs without a rank are for separate engines."""


@pytest.fixture
def local_ray():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=True, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def generate(engine):
    """(request, samples) of every prompt."""
    requests = [GenerateRequest(f"p{prompt[0]}", prompt, 4, 42, 1) for prompt in PROMPTS]
    call = engine.handle.generate.options(num_returns="streaming")
    groups = [
        get_value(reference, engine, CALL_SECONDS) for reference in call.remote(requests, SamplingParams(16, 1.0))
    ]
    by_uid = {group.uid: group.samples for group in groups}
    return [(request, by_uid[request.uid]) for request in requests]


def measure_difference(dispatcher, engine):
    """|log-probability of the engine - of the ranks| of every token that the engine samples now."""
    rows = [
        TrainRow(
            prompt_ids=request.prompt_ids,
            response_ids=sample.token_ids,
            advantages=np.zeros(len(sample.token_ids), dtype=np.float32),
            rollout_log_probs=sample.log_probs,
        )
        for request, samples in generate(engine)
        for sample in samples
    ]
    expected = np.concatenate(dispatcher.compute_log_probs(rows, reference=False))
    found = np.concatenate([row.rollout_log_probs for row in rows])
    return np.abs(found - expected)


@pytest.mark.parametrize(("num_gpus", "num_ranks", "tensor_parallel_size"), LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_sides_hold_the_same_bytes(architecture, num_gpus, num_ranks, tensor_parallel_size, local_ray, tmp_path):
    source = save_architecture(tmp_path / "model", architecture)
    job = build_job(
        run_directory=str(tmp_path / "run"),
        model=str(source),
        dtype="BFloat16",
        compile="Never",
        data={"max_prompt_tokens": 32},
        rollout={
            "engine": "SGLang",
            "placement": "Colocated" if num_gpus == num_ranks else "Separate",
            "memory_fraction": 0.5,
            "tensor_parallel_size": tensor_parallel_size,
            "max_concurrent_samples": 64,
            "engine_args": ENGINE_ARGS,
        },
        cluster={"gpus_per_node": num_gpus, "ranks_per_node": num_ranks},
    )
    cluster = start_cluster(job, build_loss_settings(job), (1, 2), lambda: None)
    try:
        assert len(cluster.engines) == (num_gpus - num_ranks or num_ranks) // tensor_parallel_size
        dispatcher = Dispatcher(job, cluster, lambda: None)
        started = cluster.call_engines("checksum", timeout_seconds=CALL_SECONDS)
        dispatcher.sync_weights(1)
        assert cluster.call_engines("checksum", timeout_seconds=CALL_SECONDS) == started, "the files' weights"
        metrics = dispatcher.update(make_rows(24), learning_rate=2e-3)
        assert metrics.gradient_norm > 0
        for version, bucket_bytes in ((2, None), (3, SMALL_BUCKET_BYTES)):
            dispatcher.sync_weights(version, bucket_bytes=bucket_bytes)
            engines = cluster.call_engines("checksum", timeout_seconds=CALL_SECONDS)
            ranks = cluster.call_ranks("compute_checksum", timeout_seconds=CALL_SECONDS)
            assert len({*engines, *ranks}) == 1, f"version {version}: engines {engines}, ranks {ranks}"
            assert engines[0] != started[0]
        for engine in cluster.engines:
            difference = measure_difference(dispatcher, engine)
            assert difference.mean() <= 2e-3
            assert difference.max() <= 2**-4
            health = get_value(engine.handle.health.remote(), engine, CALL_SECONDS)
            assert health.weight_version == 3
    finally:
        cluster.stop()


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=needs_gpus(1)), pytest.param(2, marks=needs_gpus(2))])
def test_a_handle_is_read_elsewhere_and_its_memory_returns_to_the_owner(num_ranks, local_ray):
    @ray.remote(num_cpus=0)
    class Reader:
        def __init__(self, visible):
            os.environ["CUDA_VISIBLE_DEVICES"] = visible  # as an engine actor, which Ray gives no GPU

        def sum(self, memory):
            values = memory.open(0)
            total = int(values.sum(dtype=torch.int64))
            del values
            torch.cuda.ipc_collect()
            return total

    @ray.remote(num_gpus=1, num_cpus=0)
    class Owner:
        def share(self, value):
            bytes_ = torch.full((NUM_BYTES,), value, dtype=torch.uint8, device="cuda")
            return share_device_memory(bytes_), os.environ["CUDA_VISIBLE_DEVICES"]

        def count_allocated(self):
            torch.cuda.ipc_collect()
            return torch.cuda.memory_allocated()

    owners = [Owner.remote() for _ in range(num_ranks)]
    for index, owner in enumerate(owners):
        before = ray.get(owner.count_allocated.remote(), timeout=CALL_SECONDS)
        memory, visible = ray.get(owner.share.remote(index + 1), timeout=CALL_SECONDS)
        held = ray.get(owner.count_allocated.remote(), timeout=CALL_SECONDS)
        assert held >= before + NUM_BYTES, "the sender dropped its tensor; the handle still stands for the memory"
        reader = Reader.remote(visible)
        assert ray.get(reader.sum.remote(memory), timeout=CALL_SECONDS) == (index + 1) * NUM_BYTES
        assert ray.get(owner.count_allocated.remote(), timeout=CALL_SECONDS) == before
