"""Pure builders: resolved job in, Kubernetes objects as plain dicts out."""

from rljob_operator.render.names import (
    AUTH_TOKEN_KEY,
    RAY_CONTAINER,
    WORKER_GROUP,
    ObjectReference,
    compute_auth_secret_name,
    compute_config_map_name,
    compute_network_policy_name,
    list_cluster_object_references,
)
from rljob_operator.render.objects import collect_findings, render_cluster_objects
from rljob_operator.render.submission import render_submission
from rljob_operator.render.types import OwnerRef, RenderError, RenderOptions

__all__ = [
    "AUTH_TOKEN_KEY",
    "RAY_CONTAINER",
    "WORKER_GROUP",
    "ObjectReference",
    "OwnerRef",
    "RenderError",
    "RenderOptions",
    "collect_findings",
    "compute_auth_secret_name",
    "compute_config_map_name",
    "compute_network_policy_name",
    "list_cluster_object_references",
    "render_cluster_objects",
    "render_submission",
]
