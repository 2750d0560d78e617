"""Secret with the token of one cluster's Ray API and trainer server."""

from __future__ import annotations

import base64
from typing import Any

from rljob_api.contract import ResolvedJob
from rljob_operator.render.names import AUTH_TOKEN_KEY, build_labels, compute_auth_secret_name
from rljob_operator.render.types import OwnerRef


def build_auth_secret(
    resolved: ResolvedJob, owner: OwnerRef, cluster_generation: int, auth_token: str
) -> dict[str, Any]:
    """`data`, not `stringData`: server-side apply never sees the latter again and would own nothing.

    Raises:
        ValueError: empty token; Ray would then run without authentication.
    """
    if not auth_token:
        raise ValueError("auth_token is empty; generate one, for example secrets.token_urlsafe(32)")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": compute_auth_secret_name(resolved.name, cluster_generation),
            "namespace": resolved.namespace,
            "labels": build_labels(resolved.name, resolved.uid, cluster_generation),
            "ownerReferences": [owner.to_dict()],
        },
        "type": "Opaque",
        "data": {AUTH_TOKEN_KEY: base64.b64encode(auth_token.encode()).decode()},
    }
