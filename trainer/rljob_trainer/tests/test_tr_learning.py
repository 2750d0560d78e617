"""Each algorithm learns the quickstart's task from the same start; with the loss turned around it does not.

Minutes each: `make test-learning`, `make test-learning LEARNING=GRPO` for one of them.
"""

import os

import pytest
from tr_learning import GOAL, make_warm_start, train, write_wrong_sign
from tr_run import shared_ray

pytestmark = [pytest.mark.learning, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 40
ALGORITHMS = {
    "GRPO": {"type": "GRPO"},
    "RLOO": {"type": "RLOO"},
    "ReinforcePlusPlus": {"type": "ReinforcePlusPlus"},
    "GSPO": {"type": "GSPO"},
    "PPO": {"type": "PPO"},
    "DAPO": {"type": "DAPO", "overlongPenalty": {"bufferTokens": 2, "factor": 0.5}},
    "one-step-off": {"type": "GRPO"},
}


SECTIONS = {
    "PPO": {"critic": {"learningRate": 1e-3, "warmupSteps": 2, "epochsPerStep": 2}},
    # Samples of weights that are one step old, with the correction that is the default then.
    "one-step-off": {"rollout": {"placement": "Separate"}},
}


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """The warm-started policy and the data, made once."""
    return make_warm_start(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory):
    """One Ray for all runs."""
    with shared_ray(tmp_path_factory.mktemp("ray")) as (address, _):
        yield address


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_it_learns(name, assets, ray_address, tmp_path):
    rewards = train(
        assets,
        tmp_path / "run",
        dict(os.environ) | ray_address,
        num_steps=NUM_STEPS,
        algorithm=ALGORITHMS[name],
        **SECTIONS.get(name, {}),
    )
    assert rewards[0] < 0.5, "the start is the careless teacher's"
    assert rewards[-1] > GOAL


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_sign_of_the_loss_decides(is_wrong, assets, tmp_path):
    """A few steps from a policy that is sometimes right: sampled rewards rise with the right loss and fall with the
    wrong one, so that the tests above would fail with it."""
    environment = write_wrong_sign(tmp_path) if is_wrong else dict(os.environ)
    before, after = train(
        assets,
        tmp_path / "run",
        environment,
        num_steps=12,
        algorithm={"type": "GRPO"},
        evaluation={"everySteps": 12, "temperature": 1.0, "samplesPerPrompt": 4},
    )
    if is_wrong:
        assert after < before
        assert after < GOAL
    else:
        assert after > before + 0.1
