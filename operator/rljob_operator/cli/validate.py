"""`rljob validate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from rljob_api.targets import Target
from rljob_operator.cli.checking import CheckedJob, check_document, read_documents
from rljob_operator.cli.findings_output import print_checked, to_json
from rljob_operator.cli.options import catalogue_option, read_catalogue, read_job_text, read_model_config


@click.command("validate")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--target",
    type=click.Choice([str(target) for target in Target]),
    default=str(Target.KUBERNETES),
    show_default=True,
    help="Where the job is to run: a cluster with the operator, or `rljob run`.",
)
@click.option(
    "--model-config",
    type=click.Path(exists=True, path_type=Path),
    help="config.json of the model (or its directory): checks heads and context length too.",
)
@catalogue_option
def command(
    files: tuple[str, ...], output: str, target: str, model_config: Path | None, catalogue_file: Path | None
) -> None:
    """Check RLJobs and say what is wrong and what would work.

    FILE may hold several documents; `-` reads standard input. Exits with 1 when a job has errors. Warnings (also
    NotSupportedYet: valid, but this version cannot run it) do not count as errors.
    """
    catalogue = read_catalogue(catalogue_file)
    config = read_model_config(model_config)
    results: list[CheckedJob] = []
    for source in files:
        documents, findings = read_documents(read_job_text(source), source)
        if findings:
            results.append(CheckedJob(source, None, None, None, findings))
        results += [
            check_document(document, source, target=Target(target), catalogue=catalogue, model_config=config)
            for document in documents
        ]
    if output == "json":
        click.echo(json.dumps({"jobs": [to_json(result) for result in results]}, indent=2))
    else:
        console = Console(highlight=False)
        for result in results:
            print_checked(console, result)
    sys.exit(0 if all(result.is_valid for result in results) else 1)
