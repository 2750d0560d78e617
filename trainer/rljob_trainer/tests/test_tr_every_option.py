"""Nothing in `spec.algorithm` is accepted and then ignored: every value and every field changes what a step does."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from tr_local import LocalStep, make_sample

from rljob_api.rules import check_job
from rljob_api.supported import find_unsupported
from rljob_api.targets import Target
from rljob_api.v1alpha1.algorithm import (
    AdvantageEstimator,
    Algorithm,
    AlgorithmType,
    KLControllerType,
    KLEstimator,
    KLPlacement,
    LossAggregation,
    PolicyLoss,
    RejectionRule,
    RejectionScope,
    RejectionStatistic,
    RolloutCorrectionLevel,
)
from rljob_api.v1alpha1.spec import RLJob
from rljob_trainer.engines.contract import FinishReason
from rljob_trainer.experience import build_rows
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.update import compute_row_log_probs

NUM_SAMPLES = 4
MAX_RESPONSE_TOKENS = 5
REWARDS = [
    [1.0, 0.0, 0.25, 1.0],
    [0.5, 0.5, 0.5, 0.5],  # constant: DAPO drops it
    [0.0, 1.0, 0.75, 0.0],
    [2.0, 2.0, 2.0, 2.0],
    [0.0, 0.3, 1.0, 0.6],
]
REWARD = {"functions": [{"type": "GSM8K", "name": "a"}, {"type": "Regex", "name": "b", "pattern": "x", "weight": 0.5}]}


@pytest.fixture(scope="module")
def policy(tiny_model: str) -> PolicyModel:
    return PolicyModel(load_causal_lm(tiny_model))


@pytest.fixture(scope="module")
def world(policy: PolicyModel) -> list[list[Any]]:
    """Groups of scored responses; the engine's log-probabilities are off by a little, and by a lot on some tokens."""
    rng = np.random.default_rng(5)
    groups = []
    for prompt, rewards in enumerate(REWARDS):
        prompt_ids = rng.integers(3, 40, size=3).tolist()
        group = []
        for index, reward in enumerate(rewards):
            token_ids = rng.integers(3, 40, size=1 + (prompt + 2 * index) % MAX_RESPONSE_TOKENS).tolist()
            group.append(
                make_sample(
                    f"p{prompt}",
                    index,
                    reward=reward,
                    scores={"a": reward, "b": float((prompt + index) % 2)},
                    token_ids=token_ids,
                    prompt_ids=prompt_ids,
                    log_probs=np.zeros(len(token_ids), dtype=np.float32),
                    finish_reason=FinishReason.LENGTH if len(token_ids) == MAX_RESPONSE_TOKENS else FinishReason.STOP,
                )
            )
        groups.append(group)
    rows = build_rows([sample for group in groups for sample in group], LocalStep(policy).job.spec.algorithm)
    exact = compute_row_log_probs(
        policy, [rows], temperature=1.0, device=torch.device("cpu"), on_micro_batch=lambda: None
    )[0]
    for sample, log_probs in zip([sample for group in groups for sample in group], exact, strict=True):
        noise = 0.4 * rng.standard_normal(len(log_probs))
        sample.log_probs[:] = log_probs + noise.astype(np.float32)
    return groups


def fingerprint(policy: PolicyModel, world: list[list[Any]], algorithm: dict[str, Any]) -> str:
    """Everything a step leaves behind: weights, what was trained on, the next KL coefficient."""
    epochs = 2  # the ratio is away from 1 in the second pass
    step = LocalStep(
        policy,
        algorithm=algorithm,
        reward=REWARD,
        rollout={"engine": "Native", "samples_per_prompt": NUM_SAMPLES, "max_response_tokens": MAX_RESPONSE_TOKENS},
        training={"prompts_per_step": 4, "mini_batch_prompts": 2, "epochs_per_step": epochs, "learning_rate": 1e-2},
    )
    stream = iter(world)

    def draw(count: int) -> list[Any]:
        return [group[0].row for group in itertools.islice(stream, count)]

    def roll_out(rows: list[Any]) -> list[Any]:
        wanted = {row.uid for row in rows}
        return [sample for group in world for sample in group if sample.row.uid in wanted]

    greedy = {f"p{prompt}": 0.4 for prompt in range(len(world))}
    uses_greedy = step.job.spec.algorithm.advantage_estimator is AdvantageEstimator.REMAX
    metrics = step.run(draw, roll_out, greedy if uses_greedy else None)
    assert all(update.is_finite for update in metrics)
    digest = hashlib.sha256()
    for parameter in step.dispatcher.policy.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digest.update(repr([sample.row.uid for sample in step.batch.samples]).encode())
    digest.update(repr((step.kl_coefficient, [update.loss for update in metrics])).encode())
    return digest.hexdigest()


KL_LOSS: dict[str, Any] = {"kl": {"placement": "Loss", "coefficient": 0.5}}
KL_REWARD: dict[str, Any] = {"kl": {"placement": "Reward", "coefficient": 0.5}}
ADAPTIVE: dict[str, Any] = {"kl": KL_REWARD["kl"] | {"controller": {"type": "Adaptive"}}}
TOKEN: dict[str, Any] = {"rolloutCorrection": {"level": "Token"}}


def loss(name: str, **options: Any) -> dict[str, Any]:
    return {"policyLoss": name} | ({"lossOptions": options} if options else {})


def reject(**rule: Any) -> dict[str, Any]:
    return {"rolloutCorrection": {"rejection": [{"statistic": "K1", "upper": 1.2} | rule]}}


# Field -> (an algorithm that reads it, the same with another value of it).
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "type": ({}, {"type": "RLOO"}),
    "advantageEstimator": ({}, {"advantageEstimator": "RLOO"}),
    "policyLoss": ({}, {"policyLoss": "CISPO"}),
    "lossAggregation": ({}, {"lossAggregation": "TokenSum"}),
    "normalizeByStd": ({}, {"normalizeByStd": False}),
    "kl.placement": ({}, KL_LOSS),
    "kl.coefficient": (KL_LOSS, {"kl": {"placement": "Loss", "coefficient": 0.1}}),
    "kl.estimator": (KL_LOSS, {"kl": {"placement": "Loss", "coefficient": 0.5, "estimator": "K2"}}),
    "kl.controller.type": (KL_REWARD, ADAPTIVE),
    "kl.controller.target": (
        {"kl": ADAPTIVE["kl"] | {"controller": {"type": "Adaptive", "target": 1000}}},
        {"kl": ADAPTIVE["kl"] | {"controller": {"type": "Adaptive", "target": 1e-9}}},
    ),
    "kl.controller.horizonSamples": (
        ADAPTIVE,
        {"kl": ADAPTIVE["kl"] | {"controller": {"type": "Adaptive", "horizonSamples": 50}}},
    ),
    "clip.low": ({}, {"clip": {"low": 0.001}}),
    "clip.high": ({}, {"clip": {"high": 0.001}}),
    "clip.dual": ({"clip": {"low": 50, "high": 50}}, {"clip": {"low": 50, "high": 50, "dual": 1.001}}),
    "lossOptions.sapoTauPositive": (loss("SAPO"), loss("SAPO", sapoTauPositive=3)),
    "lossOptions.sapoTauNegative": (loss("SAPO"), loss("SAPO", sapoTauNegative=3)),
    "lossOptions.droBeta": (loss("DRO"), loss("DRO", droBeta=5)),
    "lossOptions.dppoRatioCap": (loss("DPPOTV"), loss("DPPOTV", dppoRatioCap=1)),
    "lossOptions.clipCovFraction": (
        loss("ClipCov", clipCovLow=0.01, clipCovHigh=50),
        loss("ClipCov", clipCovLow=0.01, clipCovHigh=50, clipCovFraction=0.5),
    ),
    "lossOptions.clipCovLow": (
        loss("ClipCov", clipCovFraction=1, clipCovLow=0.01),
        loss("ClipCov", clipCovFraction=1, clipCovLow=0.5),
    ),
    "lossOptions.clipCovHigh": (
        loss("ClipCov", clipCovFraction=1, clipCovLow=-9, clipCovHigh=1),
        loss("ClipCov", clipCovFraction=1, clipCovLow=-9, clipCovHigh=0),
    ),
    "lossOptions.klCovFraction": (loss("KLCov"), loss("KLCov", klCovFraction=0.9)),
    "lossOptions.klCovCoefficient": (
        loss("KLCov", klCovFraction=0.5),
        loss("KLCov", klCovFraction=0.5, klCovCoefficient=5),
    ),
    "gamma": ({"type": "ReinforcePlusPlus"}, {"type": "ReinforcePlusPlus", "gamma": 0.5}),
    "gaeLambda": ({"type": "PPO"}, {"type": "PPO", "gaeLambda": 0.5}),
    "entropyCoefficient": ({}, {"entropyCoefficient": 0.1}),
    "dynamicSampling.enabled": ({}, {"dynamicSampling": {"enabled": True}}),
    "dynamicSampling.maxRefills": (
        {"dynamicSampling": {"enabled": True, "maxRefills": 0}},
        {"dynamicSampling": {"enabled": True, "maxRefills": 1}},
    ),
    "overlongPenalty.bufferTokens": ({}, {"overlongPenalty": {"bufferTokens": 2}}),
    "overlongPenalty.factor": (
        {"overlongPenalty": {"bufferTokens": 2}},
        {"overlongPenalty": {"bufferTokens": 2, "factor": 3}},
    ),
    "maskTruncated": ({}, {"maskTruncated": True}),
    "rolloutCorrection.level": ({}, TOKEN),
    "rolloutCorrection.truncation": (TOKEN, {"rolloutCorrection": {"level": "Token", "truncation": 1.01}}),
    "rolloutCorrection.floor": (TOKEN, {"rolloutCorrection": {"level": "Token", "floor": 0.9}}),
    "rolloutCorrection.normalize": (TOKEN, {"rolloutCorrection": {"level": "Token", "normalize": True}}),
    "rolloutCorrection.bypassOldLogProbs": ({}, {"rolloutCorrection": {"bypassOldLogProbs": True}}),
    "rolloutCorrection.rejection.statistic": (reject(upper=0.04, statistic="K2"), reject(upper=0.04, statistic="K3")),
    "rolloutCorrection.rejection.scope": (reject(), reject(scope="SequenceSum")),
    "rolloutCorrection.rejection.upper": ({}, reject()),
    "rolloutCorrection.rejection.lower": (reject(), reject(lower=0.9)),
}


def list_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = prefix + to_camel(name)
        nested = [
            part
            for candidate in (field.annotation, *get_args(field.annotation))
            for part in (candidate, *get_args(candidate))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if nested:
            yield from list_fields(nested[0], f"{path}.")
        else:
            yield path


def test_the_table_names_every_field() -> None:
    assert set(list_fields(Algorithm)) == set(FIELDS)
    assert set(list_fields(RejectionRule)) == {"statistic", "scope", "upper", "lower"}


@pytest.mark.parametrize("field", list(FIELDS))
def test_every_field_changes_the_step(policy: PolicyModel, world: list[list[Any]], field: str) -> None:
    without, changed = FIELDS[field]
    assert fingerprint(policy, world, without) != fingerprint(policy, world, changed)


VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "advantageEstimator": {value: {"advantageEstimator": value} for value in AdvantageEstimator},
    # No clip range binds and no divergence bound does by default in one step: narrow them, so that losses differ.
    "policyLoss": {
        value: {
            "policyLoss": value,
            "clip": {"low": 0.01, "high": 0.01},
            "lossOptions": {"clipCovLow": -9.0, "clipCovFraction": 0.5, "klCovFraction": 0.5},
        }
        for value in PolicyLoss
    },
    "lossAggregation": {value: {"lossAggregation": value} for value in LossAggregation},
    "kl.placement": {
        value: {"kl": {"placement": value, "coefficient": 0.5 if value is not KLPlacement.NONE else 0.001}}
        for value in KLPlacement
    },
    "kl.estimator": {value: {"kl": KL_LOSS["kl"] | {"estimator": value}} for value in KLEstimator},
    "kl.controller.type": {
        value: {"kl": KL_REWARD["kl"] | {"controller": {"type": value}}} for value in KLControllerType
    },
    "rolloutCorrection.level": {value: {"rolloutCorrection": {"level": value}} for value in RolloutCorrectionLevel},
    "rejection.statistic": {
        value: reject(statistic=value, upper=1.05 if value == "K1" else 0.04) for value in RejectionStatistic
    },
    "rejection.scope": {value: reject(statistic="K2", scope=value, upper=0.1) for value in RejectionScope},
}


@pytest.mark.parametrize("field", list(VALUES))
def test_every_value_does_something_of_its_own(policy: PolicyModel, world: list[list[Any]], field: str) -> None:
    found: dict[str, str] = {}
    for value, algorithm in VALUES[field].items():
        found.setdefault(fingerprint(policy, world, algorithm), value)
    assert list(found.values()) == list(VALUES[field]), "values missing here do the same as an earlier one"


@pytest.mark.parametrize("kind", list(AlgorithmType))
def test_every_preset_trains(policy: PolicyModel, world: list[list[Any]], kind: AlgorithmType) -> None:
    assert fingerprint(policy, world, {"type": kind}) != fingerprint(
        policy, world, {"type": kind, "maskTruncated": True}
    )


@pytest.mark.parametrize("field", list(FIELDS))
def test_what_changes_the_step_is_valid_and_supported(field: str) -> None:
    document: dict[str, Any] = {
        "model": {"source": "m"},
        "data": {"train": ["t"]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "rollout": {"engine": "Native", "samplesPerPrompt": NUM_SAMPLES, "maxResponseTokens": MAX_RESPONSE_TOKENS},
        "training": {"totalSteps": 1, "promptsPerStep": 4, "miniBatchPrompts": 2},
        "cluster": {"gpusPerNode": 0, "ranksPerNode": 2},
    }
    for algorithm in FIELDS[field]:
        job = RLJob.model_validate({"metadata": {"name": "x"}, "spec": document | {"algorithm": algorithm}})
        assert [finding.format() for finding in find_unsupported(job.spec)] == []
        findings = [finding.format() for finding in check_job(job, target=Target.LOCAL)]
        assert [text for text in findings if "spec.algorithm" in text and "no effect" in text] == []
