"""`rljob render`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from rljob_api.targets import Target
from rljob_api.v1alpha1 import IPFamily
from rljob_operator.cli.checking import check_document, read_documents
from rljob_operator.cli.findings_output import print_findings
from rljob_operator.cli.options import catalogue_option, read_catalogue, read_job_text
from rljob_operator.cli.yaml_output import format_documents
from rljob_operator.render import OwnerRef, RenderOptions, render_cluster_objects

PLACEHOLDER_TOKEN: Final = "placeholder: the operator generates a token per cluster"


@click.command("render")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--cluster-generation", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--ip-family",
    type=click.Choice([str(IPFamily.IPV4), str(IPFamily.IPV6)]),
    default=str(IPFamily.IPV4),
    show_default=True,
    help="Family of the cluster's pod network, for jobs with network.ipFamily Auto.",
)
@click.option("--operator-namespace", default="rljob-system", show_default=True, help="For the NetworkPolicy.")
@catalogue_option
def command(
    file: str, cluster_generation: int, ip_family: str, operator_namespace: str, catalogue_file: Path | None
) -> None:
    """Print every object the operator would create for an RLJob, as YAML.

    The resolved spec, with every default filled in, is job.json in the ConfigMap. Token and UID are placeholders.
    Findings go to standard error; exits with 1 when the job has errors.
    """
    catalogue = read_catalogue(catalogue_file)
    console = Console(stderr=True, highlight=False)
    documents, findings = read_documents(read_job_text(file), file)
    print_findings(console, findings)
    failed = bool(findings)
    for document in documents:
        checked = check_document(
            document, file, target=Target.KUBERNETES, catalogue=catalogue, ip_family=IPFamily(ip_family)
        )
        print_findings(console, checked.findings)
        if checked.resolved is None:
            failed = True
            continue
        objects = render_cluster_objects(
            checked.resolved,
            owner=OwnerRef(checked.resolved.name, checked.resolved.uid),
            cluster_generation=cluster_generation,
            auth_token=PLACEHOLDER_TOKEN,
            options=RenderOptions(operator_namespace=operator_namespace),
        )
        click.echo(format_documents(objects), nl=False)
    sys.exit(1 if failed else 0)
