"""`rljob version`."""

from __future__ import annotations

import json
import platform
from typing import Any, Final

import click

import rljob_api
from rljob_api.catalogue import DEFAULT_CATALOGUE, RAY_VERSION
from rljob_api.v1alpha1 import API_VERSION

KUBERAY_VERSION: Final = "1.6.2"
"""The release the tests run against; later ones are expected to work."""
KUBERNETES_VERSION: Final = "1.36"


def collect_versions() -> dict[str, Any]:
    """Versions of this program and of what it is built for."""
    return {
        "rljob": rljob_api.__version__,
        "api": API_VERSION,
        "python": platform.python_version(),
        "supported": {
            "kuberay": f">={KUBERAY_VERSION}",
            "kubernetes": f">={KUBERNETES_VERSION}",
            "ray": RAY_VERSION,
            "engines": {
                str(entry.engine): entry.engine_version or f"built in ({rljob_api.__version__})"
                for entry in DEFAULT_CATALOGUE.entries
            },
        },
    }


@click.command("version")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(output: str) -> None:
    """Print the versions of RLJob and of what it supports."""
    versions = collect_versions()
    if output == "json":
        click.echo(json.dumps(versions, indent=2))
        return
    supported = versions["supported"]
    engines = ", ".join(f"{engine} {version}" for engine, version in supported["engines"].items())
    click.echo(f"rljob {versions['rljob']} ({versions['api']}, Python {versions['python']})")
    click.echo(f"KubeRay {supported['kuberay']}, Kubernetes {supported['kubernetes']}, Ray {supported['ray']}")
    click.echo(f"Engines: {engines}")
