"""Fixtures of the trainer's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests; there is no package here


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny random model with tokenizer."""
    from tr_tiny import save_tiny_model

    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def make_job(tmp_path):
    """Builds resolved jobs of two CPU ranks with a Native engine."""
    from tr_job import build_job

    return build_job


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    from rljob_trainer.distributed.process_group import join_process_group, start_store

    store, rendezvous = start_store("127.0.0.1", 1, 60)
    join_process_group(
        rendezvous, rank=0, world_size=1, store=store, use_gpu=False, timeout_seconds=60, collective_timeout_seconds=60
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def actor_ray(request):
    """A Ray of this process, for actors whose classes stand in the test file."""
    import ray

    # Ray's workers cannot import it: there is no package here.
    ray.cloudpickle.register_pickle_by_value(request.module)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Model, prompts and a reward function for whole runs."""
    from tr_run import make_assets

    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A Ray that the runs of a file share: their environment, and the process that all its actors descend from."""
    from tr_run import shared_ray

    with shared_ray(tmp_path_factory.mktemp("ray")) as started:
        yield started
