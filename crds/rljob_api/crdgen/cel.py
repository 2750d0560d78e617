"""The rules that the API server checks itself, at `kubectl apply`: the part of `rljob_api.rules` that CEL can say.

Messages follow the same form: field, value, rule, and a value that works. Paths are relative to the object of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rljob_api.names import MAX_NAME_LENGTH, NAME_PATTERN, RESERVED_VOLUME_PREFIX
from rljob_api.presets import GROUP_ESTIMATORS, PRESETS
from rljob_api.v1alpha1.algorithm import AdvantageEstimator


@dataclass(frozen=True)
class CELRule:
    """One entry of `x-kubernetes-validations`."""

    rule: str
    message: str
    """Static text; also what is shown when `message_expression` fails."""
    field_path: str = ""
    """Field to blame, for example `.rollout.tensorParallelSize`; the object of the rule when empty."""
    message_expression: str = ""

    def to_schema(self) -> dict[str, Any]:
        """The entry as it stands in the CRD."""
        entry = {"rule": self.rule, "message": self.message}
        if self.field_path:
            entry["fieldPath"] = self.field_path
        if self.message_expression:
            entry["messageExpression"] = self.message_expression
        return entry


def _list(values: Any) -> str:
    return "[" + ", ".join(f"'{value}'" for value in sorted(str(value) for value in values)) + "]"


def _uses_estimator(estimators: frozenset[AdvantageEstimator]) -> str:
    """CEL: the estimator, after the preset, is one of these."""
    types = [kind for kind, preset in PRESETS.items() if preset.estimator in estimators]
    field = "self.algorithm.advantageEstimator"
    return f"(has({field}) ? {field} in {_list(estimators)} : self.algorithm.type in {_list(types)})"


def _format(template: str, *numbers: str) -> str:
    """CEL: a text with numbers. `+` would not do: the server assumes the worst size for each string(...)."""
    return f"'{template}'.format([{', '.join(numbers)}])"


_RANKS: Final = "(has(self.cluster.ranksPerNode) ? self.cluster.ranksPerNode : self.cluster.gpusPerNode)"
_WORLD: Final = f"(self.cluster.nodes * {_RANKS})"
_ENGINE_SLOTS: Final = (
    f"(self.rollout.placement == 'Separate' && self.cluster.gpusPerNode > {_RANKS} ? "
    f"self.cluster.gpusPerNode - {_RANKS} : {_RANKS})"
)
"""Per pod: engines have GPUs of their own, or those of the ranks."""
_ALL_ENGINE_SLOTS: Final = f"(self.cluster.nodes * {_ENGINE_SLOTS})"
_SEQUENCES: Final = "(self.training.promptsPerStep * self.rollout.samplesPerPrompt)"
_LONGEST: Final = "(self.data.maxPromptTokens + self.rollout.maxResponseTokens)"

ROOT_RULES: Final = [
    CELRule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name must have at most {MAX_NAME_LENGTH} characters, for example gsm8k-grpo",
        message_expression=_format(
            f"metadata.name has %d characters, at most {MAX_NAME_LENGTH} leave room for the names of the pods; for "
            "example gsm8k-grpo",
            "self.metadata.name.size()",
        ),
    ),
    CELRule(
        f"self.metadata.name.matches('{NAME_PATTERN}')",
        "metadata.name must start with a lower-case letter and hold only lower-case letters, digits and dashes "
        "(DNS-1035); for example qwen2-5-grpo",
    ),
]

SPEC_RULES: Final = [
    CELRule(
        "has(self.training.totalSteps) != has(self.training.totalEpochs)",
        "exactly one of training.totalSteps and training.totalEpochs is required; for example totalSteps: 100",
        ".training",
    ),
    CELRule(
        f"{_ALL_ENGINE_SLOTS} % self.rollout.tensorParallelSize == 0",
        "tensorParallelSize must divide cluster.nodes x cluster.ranksPerNode, with placement Separate cluster.nodes x "
        "(gpusPerNode - ranksPerNode); 1 always does",
        ".rollout.tensorParallelSize",
        _format(
            "%d must divide the %d %s of the job (nodes %d x %s %d); 1 always does",
            "self.rollout.tensorParallelSize",
            _ALL_ENGINE_SLOTS,
            "self.rollout.placement == 'Separate' ? 'engine GPUs' : 'ranks'",
            "self.cluster.nodes",
            "self.rollout.placement == 'Separate' ? '(gpusPerNode - ranksPerNode)' : 'ranksPerNode'",
            _ENGINE_SLOTS,
        ),
    ),
    CELRule(
        f"{_RANKS} == 0 || {_ALL_ENGINE_SLOTS} % self.rollout.tensorParallelSize != 0 || "
        f"{_ENGINE_SLOTS} % self.rollout.tensorParallelSize == 0 || "
        f"self.rollout.tensorParallelSize % {_ENGINE_SLOTS} == 0",
        "tensorParallelSize must divide ranksPerNode (placement Separate: gpusPerNode - ranksPerNode) or be a multiple "
        "of it, or engines would be cut across pods; 1 always fits",
        ".rollout.tensorParallelSize",
    ),
    CELRule(
        "self.rollout.placement != 'Separate' || self.cluster.gpusPerNode == 0 || "
        "(has(self.cluster.ranksPerNode) && self.cluster.ranksPerNode < self.cluster.gpusPerNode)",
        "ranksPerNode is required with rollout.placement Separate and must be less than gpusPerNode, the other GPUs "
        "are the engines'; for example ranksPerNode: 6 of gpusPerNode: 8",
        ".cluster.ranksPerNode",
    ),
    CELRule(
        f"!{_uses_estimator(GROUP_ESTIMATORS)} || self.rollout.samplesPerPrompt >= 2",
        "samplesPerPrompt must be 2 or more for an estimator that compares the samples of a prompt; for example 8",
        ".rollout.samplesPerPrompt",
    ),
    CELRule(
        f"!has(self.critic) || {_uses_estimator(frozenset({AdvantageEstimator.GAE}))}",
        "only GAE uses a critic; remove critic, or set algorithm.type: PPO",
        ".critic",
    ),
    CELRule(
        "!has(self.reference) || self.algorithm.kl.placement != 'None'",
        "no KL term uses the reference policy; remove reference, or set algorithm.kl.placement to Loss or Reward",
        ".reference",
    ),
    CELRule(
        "self.rollout.engine == 'Native' || self.cluster.gpusPerNode > 0",
        "SGLang and VLLM need GPUs; use engine: Native, or for example cluster.gpusPerNode: 8",
        ".rollout.engine",
    ),
    CELRule(
        f"{_WORLD} == 0 || {_SEQUENCES} % {_WORLD} == 0",
        "promptsPerStep x rollout.samplesPerPrompt must divide by cluster.nodes x cluster.ranksPerNode; for example a "
        "multiple of the ranks",
        ".training.promptsPerStep",
        _format(
            "%d prompts x %d samples = %d sequences do not divide by %d ranks; for example %d",
            "self.training.promptsPerStep",
            "self.rollout.samplesPerPrompt",
            _SEQUENCES,
            _WORLD,
            f"(self.training.promptsPerStep / {_WORLD} + 1) * {_WORLD}",
        ),
    ),
    CELRule(
        "!has(self.training.microBatchTokens) || "
        f"self.training.microBatchTokens * self.training.sequenceParallelSize >= {_LONGEST}",
        "microBatchTokens must hold the longest sequence: data.maxPromptTokens + rollout.maxResponseTokens",
        ".training.microBatchTokens",
        _format(
            "%d cannot hold the longest sequence of %d tokens (data.maxPromptTokens + rollout.maxResponseTokens); use "
            "that or more",
            "self.training.microBatchTokens",
            _LONGEST,
        ),
    ),
    CELRule(
        "has(self.checkpoint.storage.claimName) != has(self.checkpoint.storage.hostPath)",
        "exactly one of claimName and hostPath is required; for example claimName: checkpoints",
        ".checkpoint.storage",
    ),
]

RULES_OF_MODEL: Final[dict[str, list[CELRule]]] = {
    "RLJobSpec": SPEC_RULES,
    "Training": [
        CELRule(
            "!has(self.miniBatchPrompts) || self.miniBatchPrompts > self.promptsPerStep || "
            "self.promptsPerStep % self.miniBatchPrompts == 0",
            "miniBatchPrompts must divide promptsPerStep; promptsPerStep itself does",
            ".miniBatchPrompts",
            _format(
                "%d must divide promptsPerStep (%d), which itself works", "self.miniBatchPrompts", "self.promptsPerStep"
            ),
        ),
        CELRule(
            "!has(self.miniBatchPrompts) || self.miniBatchPrompts <= self.promptsPerStep",
            "miniBatchPrompts must not exceed promptsPerStep",
            ".miniBatchPrompts",
            _format(
                "%d is more than promptsPerStep; use %d or a divisor of it",
                "self.miniBatchPrompts",
                "self.promptsPerStep",
            ),
        ),
        CELRule(
            "!(has(self.microBatchTokens) && has(self.microBatchSequences))",
            "microBatchTokens and microBatchSequences exclude each other; keep microBatchTokens",
            ".microBatchSequences",
        ),
    ],
    "Rollout": [
        CELRule(
            "self.placement == 'Separate' || !has(self.maxStalenessSteps) || self.maxStalenessSteps == 0",
            "maxStalenessSteps needs engines with GPUs of their own; use 0, or placement: Separate",
            ".maxStalenessSteps",
        ),
    ],
    "Cluster": [
        CELRule(
            "self.gpusPerNode > 0 || has(self.ranksPerNode)",
            "ranksPerNode is required when gpusPerNode is 0; for example 2",
            ".ranksPerNode",
        ),
        CELRule(
            "self.gpusPerNode == 0 || !has(self.ranksPerNode) || self.ranksPerNode <= self.gpusPerNode",
            "ranksPerNode must not exceed gpusPerNode, each rank needs its own GPU; leave it out",
            ".ranksPerNode",
        ),
    ],
    "Volume": [
        CELRule(
            "[has(self.claimName), has(self.hostPath), has(self.configMapName), has(self.secretName), "
            "has(self.emptyDir)].filter(given, given).size() == 1",
            "exactly one of claimName, hostPath, configMapName, secretName and emptyDir is required; for example "
            "claimName: datasets",
        ),
        CELRule(
            f"!self.name.startsWith('{RESERVED_VOLUME_PREFIX}')",
            f"names that begin with {RESERVED_VOLUME_PREFIX} belong to the operator; for example data",
            ".name",
        ),
    ],
    "EmptyDir": [
        CELRule(
            "!has(self.medium) || self.medium != 'Memory' || has(self.sizeLimit)",
            "sizeLimit is required for medium Memory; for example 8Gi",
            ".sizeLimit",
        ),
    ],
    "EnvVar": [
        CELRule(
            "!(has(self.value) && has(self.valueFrom))", "value and valueFrom exclude each other; keep one", ".value"
        ),
        CELRule(
            "!self.name.startsWith('RLJOB_') && !self.name.startsWith('RAY_AUTH_') && self.name != 'LD_PRELOAD'",
            "this variable belongs to the operator; remove it",
            ".name",
        ),
        CELRule(
            "!(self.name in ['GLOO_SOCKET_IFNAME', 'TP_SOCKET_IFNAME']) || !has(self.value) || "
            "!self.value.matches('[\\\\^=]')",
            "exact interface names only, ^ and = are NCCL's grammar; for example eth0",
            ".value",
        ),
    ],
    "RewardFunction": [
        CELRule(
            "has(self.path) == (self.type in ['Python', 'Model'])",
            "path is required for types Python and Model, and only there; for example /code/reward.py",
            ".path",
        ),
        CELRule(
            "has(self.pattern) == (self.type == 'Regex')",
            "pattern is required for type Regex, and only there; for example answer is ([0-9]+)",
            ".pattern",
        ),
        CELRule(
            "has(self.url) == (self.type == 'Http')",
            "url is required for type Http, and only there; for example http://reward.default.svc:8000/score",
            ".url",
        ),
        CELRule(
            "!has(self.function) || self.type == 'Python'", "only type Python reads function; remove it", ".function"
        ),
        CELRule(
            "!self.flexible || self.type in ['GSM8K', 'Math']",
            "only types GSM8K and Math read flexible; remove it",
            ".flexible",
        ),
        CELRule(
            "!has(self.authorizationEnv) || self.type == 'Http'",
            "only type Http reads authorizationEnv; remove it",
            ".authorizationEnv",
        ),
        CELRule(
            "!has(self.memory) || self.type in ['Math', 'Regex', 'Python']",
            "only types Math, Regex and Python read memory; remove it",
            ".memory",
        ),
    ],
    "CheckpointStorage": [
        CELRule(
            "!has(self.path) || !(self.path.startsWith('/') || self.path.split('/').exists(part, part == '..'))",
            "path must be a directory inside the volume, without a leading / and without ..; for example team-a/runs",
            ".path",
        ),
    ],
    "KL": [
        CELRule(
            "self.placement != 'Loss' || self.controller.type == 'Fixed'",
            "Adaptive works with placement: Reward only; use Fixed",
            ".controller.type",
        ),
    ],
}
"""Rules by the class name of the model they belong to."""
