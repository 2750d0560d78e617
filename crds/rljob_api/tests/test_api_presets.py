"""What an algorithm type stands for, and what an override changes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.presets import DEFAULTS_OF_LOSS, GROUP_ESTIMATORS, PRESETS, resolve_algorithm
from rljob_api.v1alpha1 import Algorithm, AlgorithmType


@pytest.mark.parametrize(
    ("kind", "estimator", "loss", "aggregation", "std", "clip", "dynamic"),
    [
        ("GRPO", "GRPO", "PPOClip", "TokenMean", True, (0.2, 0.2), False),
        ("DrGRPO", "GRPO", "PPOClip", "SequenceMeanTokenSumNorm", False, (0.2, 0.2), False),
        ("DAPO", "GRPO", "PPOClip", "TokenMean", True, (0.2, 0.28), True),
        ("GSPO", "GRPO", "GSPO", "SequenceMeanTokenMean", True, (3e-4, 4e-4), False),
        ("CISPO", "GRPO", "CISPO", "TokenMean", True, (0.2, 0.2), False),
        ("PPO", "GAE", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("RLOO", "RLOO", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("ReinforcePlusPlus", "ReinforcePlusPlus", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("ReinforcePlusPlusBaseline", "ReinforcePlusPlusBaseline", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("ReMax", "ReMax", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("OPO", "OPO", "PPOClip", "TokenMean", False, (0.2, 0.2), False),
        ("GPG", "GPG", "GPG", "TokenMean", False, (0.2, 0.2), False),
    ],
)
def test_presets(
    kind: str, estimator: str, loss: str, aggregation: str, std: bool, clip: tuple[float, float], dynamic: bool
) -> None:
    resolved = resolve_algorithm(Algorithm(type=AlgorithmType(kind)))
    assert resolved.advantage_estimator == estimator
    assert resolved.policy_loss == loss
    assert resolved.loss_aggregation == aggregation
    assert resolved.normalize_by_std is std
    assert (resolved.clip.low, resolved.clip.high) == clip
    assert resolved.dynamic_sampling is not None
    assert resolved.dynamic_sampling.enabled is dynamic


def test_every_type_has_a_preset_with_a_source() -> None:
    assert set(PRESETS) == set(AlgorithmType)
    assert all(preset.source.startswith("arXiv ") for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("document", "want"),
    [
        ({"type": "DrGRPO", "normalizeByStd": True}, {"normalizeByStd": True}),
        ({"type": "DAPO", "clip": {"high": 0.3}}, {"clip": {"low": 0.2, "high": 0.3, "dual": 3.0}}),
        ({"type": "GRPO", "clip": {"low": 0.0}}, {"clip": {"low": 0.0, "high": 0.2, "dual": 3.0}}),
        (
            {"type": "DAPO", "dynamicSampling": {"enabled": False}},
            {"dynamicSampling": {"enabled": False, "maxRefills": 3}},
        ),
        ({"type": "GSPO", "lossAggregation": "TokenMean"}, {"lossAggregation": "TokenMean"}),
        # A loss brings its own clip range and aggregation; PPO's clip range would never bind for GSPO.
        ({"type": "GRPO", "policyLoss": "GSPO"}, {"clip": {"low": 3e-4, "high": 4e-4, "dual": 3.0}}),
        ({"type": "GRPO", "policyLoss": "GSPO"}, {"lossAggregation": "SequenceMeanTokenMean"}),
        ({"type": "DAPO", "policyLoss": "CISPO"}, {"clip": {"low": 0.2, "high": 0.2, "dual": 3.0}}),
        ({"type": "GSPO", "policyLoss": "PPOClip"}, {"clip": {"low": 0.2, "high": 0.2, "dual": 3.0}}),
        ({"type": "GSPO", "policyLoss": "PPOClip"}, {"lossAggregation": "TokenMean"}),
        ({"type": "PPO", "advantageEstimator": "GRPO"}, {"normalizeByStd": True, "policyLoss": "PPOClip"}),
        ({"type": "GRPO", "advantageEstimator": "RLOO"}, {"normalizeByStd": False}),
    ],
)
def test_what_the_user_sets_wins(document: dict[str, Any], want: dict[str, Any]) -> None:
    resolved = resolve_algorithm(Algorithm.model_validate(document)).model_dump(mode="json")
    assert {key: resolved[key] for key in want} == want


@pytest.mark.parametrize("kind", list(AlgorithmType))
def test_resolving_twice_changes_nothing_and_leaves_nothing_open(kind: AlgorithmType) -> None:
    original = Algorithm(type=kind)
    once = resolve_algorithm(original)
    assert resolve_algorithm(once) == once
    open_fields = {name for name, value in once if value is None}
    assert open_fields == {"overlong_penalty"}
    assert original == Algorithm(type=kind), "the input must not change"


def test_only_losses_with_own_defaults_are_listed() -> None:
    assert {loss.value for loss in DEFAULTS_OF_LOSS} == {
        "GSPO",
        "SAPO",
        "GMPO",
        "DPPOTV",
        "DPPOKL",
        "ClipCov",
    }
    assert {estimator.value for estimator in GROUP_ESTIMATORS}.isdisjoint({"GAE", "ReinforcePlusPlus", "ReMax"})
