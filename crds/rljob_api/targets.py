"""Where a job runs: decides which rules apply and which defaults are filled."""

from __future__ import annotations

from rljob_api.v1alpha1.base import StrEnum


class Target(StrEnum):
    """A cluster with the operator, or `rljob run` on one machine."""

    KUBERNETES = "Kubernetes"
    LOCAL = "Local"
