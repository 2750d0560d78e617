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
