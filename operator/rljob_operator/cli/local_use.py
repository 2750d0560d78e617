"""What of a job's cluster settings a local run uses, and what it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.findings import Finding, FindingReason, make_warning
from rljob_api.v1alpha1 import EnvVar, RLJobSpec

_UNUSED: Final = {
    "cluster": (
        "image",
        "image_pull_secrets",
        "service_account_name",
        "volumes",
        "env_from",
        "head_resources",
        "worker_resources",
        "shared_memory",
        "pod_template",
        "head_pod_template",
        "worker_pod_template",
    ),
    "network": ("ip_family", "interface"),
    "failure_policy": ("max_retries", "rules"),
}
_UNUSED_ROOTS: Final = ("suspend", "active_deadline_seconds", "ttl_seconds_after_finished", "trainer")


def find_unused_fields(spec: RLJobSpec) -> list[Finding]:
    """One warning that lists every field that is set and means nothing without a cluster."""
    unused = [
        f"spec.{_alias(spec, section)}.{_alias(getattr(spec, section), name)}"
        for section, names in _UNUSED.items()
        for name in names
        if _is_changed(getattr(spec, section), name)
    ]
    unused += [f"spec.{_alias(spec, name)}" for name in _UNUSED_ROOTS if _is_changed(spec, name)]
    storage = spec.checkpoint.storage
    unused += [
        f"spec.checkpoint.storage.{_alias(storage, name)}"
        for name in ("claim_name", "host_path")
        if _is_changed(storage, name)
    ]
    findings = []
    if unused:
        findings.append(
            make_warning("spec", f"without a cluster nothing reads {', '.join(unused)}", FindingReason.NO_EFFECT)
        )
    findings += [
        make_warning(
            f"spec.cluster.env[{index}].valueFrom",
            f"{variable.name} comes from the cluster; export {variable.name}=... before the run if it is needed",
            FindingReason.NO_EFFECT,
        )
        for index, variable in enumerate(spec.cluster.env)
        if variable.value_from is not None and variable.name not in os.environ
    ]
    return findings


def build_local_environment(env: list[EnvVar]) -> Mapping[str, str]:
    """Plain values of `cluster.env`."""
    return {variable.name: variable.value or "" for variable in env if variable.value_from is None}


def _alias(model: Any, name: str) -> str:
    return str(type(model).model_fields[name].alias)


def _is_changed(model: Any, name: str) -> bool:
    field = type(model).model_fields[name]
    return bool(getattr(model, name) != field.get_default(call_default_factory=True))
