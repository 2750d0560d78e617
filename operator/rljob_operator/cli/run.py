"""`rljob run`: the same YAML on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from rljob_api.catalogue import Catalogue
from rljob_api.contract import ResolvedJob
from rljob_api.findings import Finding, FindingReason, Severity, has_errors, make_error
from rljob_api.names import ENV_ATTEMPT, ENV_CONFIG, ENV_RESUME_FLOOR_STEP
from rljob_api.reasons import ExitCode
from rljob_api.resolve import resolve_job
from rljob_api.targets import Target
from rljob_api.v1alpha1 import IPFamily, RLJob
from rljob_operator.cli.checking import check_document, read_documents
from rljob_operator.cli.child import run_child
from rljob_operator.cli.findings_output import print_findings
from rljob_operator.cli.local_paths import LocalPath, check_local_paths, resolve_local_paths
from rljob_operator.cli.local_use import build_local_environment, find_unused_fields
from rljob_operator.cli.options import catalogue_option, read_catalogue, read_job_text, read_model_config
from rljob_operator.cli.overrides import OverrideError, apply_overrides
from rljob_operator.cli.run_directory import RunDirectoryError, derive_uid, lock_run_directory, write_job_file

_TRAINER_MODULES: Final = ("rljob_trainer", "ray", "torch", "transformers")


@click.command("run")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--set",
    "overrides",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a field, for example --set rollout.engine=Native (repeatable; null removes it).",
)
@click.option(
    "--run-directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Checkpoints, metrics and samples; default: checkpoint.storage.path, else runs/<name>.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="a free one, printed",
    help="Port of progress, health and metrics.",
)
@catalogue_option
def command(
    file: str, overrides: tuple[str, ...], run_directory: Path | None, port: int, catalogue_file: Path | None
) -> None:
    """Train an RLJob on this machine, with a Ray of its own.

    Relative paths of the job are taken from the current directory. Ctrl-C (or SIGTERM) has the trainer publish a
    checkpoint and exit with 143; the same command resumes from it. The exit code is the trainer's: 0 done, 64 bad
    configuration, 65 bad data, others in the reference of failure reasons.
    """
    console = Console(stderr=True, highlight=False)
    job, findings, exit_code = prepare(file, overrides, Path.cwd(), read_catalogue(catalogue_file))
    print_findings(console, findings)
    if job is None:
        sys.exit(exit_code)
    absolute = Path(
        os.path.abspath(run_directory or job.spec.checkpoint.storage.path or f"runs/{job.metadata['name']}")
    )
    resolved = resolve_job(
        job,
        uid=derive_uid(absolute),
        catalogue=read_catalogue(catalogue_file),
        target=Target.LOCAL,
        ip_family=IPFamily.AUTO,
        run_directory=str(absolute),
        server_port=port,
    )
    sys.exit(_train(resolved, console))


def prepare(
    file: str, overrides: tuple[str, ...], directory: Path, catalogue: Catalogue
) -> tuple[RLJob | None, list[Finding], int]:
    """The job ready to run here, or None; what to tell the user; the exit code of a refusal."""
    documents, findings = read_documents(read_job_text(file), file)
    if len(documents) > 1:
        names = ", ".join(str((document.get("metadata") or {}).get("name")) for document in documents)
        findings = [make_error("", f"{file} has {len(documents)} jobs ({names}); a local run takes one")]
    if findings:
        return None, findings, ExitCode.BAD_CONFIGURATION
    try:
        document = apply_overrides(documents[0], overrides)
    except OverrideError as error:
        raise click.BadParameter(str(error), param_hint="--set") from error
    job, findings, paths = _check(document, file, directory, catalogue)
    if job is None or has_errors(findings):
        return None, findings, ExitCode.BAD_CONFIGURATION
    missing_modules = [name for name in _TRAINER_MODULES if importlib.util.find_spec(name) is None]
    if missing_modules:
        message = f"{', '.join(missing_modules)} not installed; install the trainer: pip install 'rljob[trainer]'"
        return None, [*findings, make_error("", message, FindingReason.MISSING_FIELD)], ExitCode.BAD_CONFIGURATION
    problems = check_local_paths(paths)
    findings = [*problems, *findings, *find_unused_fields(job.spec)]
    if not problems:
        return job, findings, ExitCode.DONE
    is_data = all(".data" in problem.path for problem in problems)
    return None, findings, ExitCode.BAD_DATA if is_data else ExitCode.BAD_CONFIGURATION


def _check(
    document: dict[str, Any], file: str, directory: Path, catalogue: Catalogue
) -> tuple[RLJob | None, list[Finding], list[LocalPath]]:
    """Rules and support for a local run, with the model's config.json where it can be read."""
    checked = check_document(document, file, target=Target.LOCAL, catalogue=catalogue)
    if checked.job is None:
        return None, checked.findings, []
    job, paths = resolve_local_paths(checked.job, directory)
    for path in paths:
        if path.field == "spec.model.source" and (path.path / "config.json").is_file():
            checked = check_document(
                document,
                file,
                target=Target.LOCAL,
                catalogue=catalogue,
                model_config=read_model_config(path.path),
            )
    return job, [_refuse_unsupported(finding) for finding in checked.findings], paths


def _refuse_unsupported(finding: Finding) -> Finding:
    """Valid is not supported: a run refuses what `validate` only warns about."""
    if finding.reason != FindingReason.NOT_SUPPORTED_YET:
        return finding
    field = finding.path.removeprefix("spec.")
    message = f"{finding.message}; nothing is switched silently: say --set {field}=VALUE or edit the file"
    return Finding(Severity.ERROR, finding.reason, finding.path, message)


def _train(resolved: ResolvedJob, console: Console) -> int:
    try:
        lock = lock_run_directory(Path(resolved.paths.run_directory))
        path = write_job_file(resolved)
    except (RunDirectoryError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return ExitCode.BAD_CONFIGURATION
    environment = {
        name: value for name, value in os.environ.items() if name not in (ENV_ATTEMPT, ENV_RESUME_FLOOR_STEP)
    }
    environment |= build_local_environment(resolved.spec.cluster.env)
    environment[ENV_CONFIG] = str(path)
    try:
        return run_child(
            [sys.executable, "-m", "rljob_trainer"],
            environment,
            announce=lambda message: console.print(f"rljob: {message}", markup=False, soft_wrap=True),
            pass_fds=(lock,),
        )
    finally:
        os.close(lock)
