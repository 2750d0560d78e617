"""Options shared by the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rljob_api.catalogue import DEFAULT_CATALOGUE, Catalogue, CatalogueError, load_catalogue

_F = TypeVar("_F", bound=Callable[..., Any])


def catalogue_option(function: _F) -> _F:
    """`--catalogue FILE`."""
    return click.option(
        "--catalogue",
        "catalogue_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Image catalogue (YAML, as in the chart's values) instead of the built-in one.",
    )(function)


def read_catalogue(path: Path | None) -> Catalogue:
    """The catalogue of `--catalogue`, or the built-in one."""
    if path is None:
        return DEFAULT_CATALOGUE
    try:
        return load_catalogue(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CatalogueError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--catalogue") from error


def read_job_text(source: str) -> str:
    """Text of a file, or of standard input for `-`."""
    try:
        with click.open_file(source, encoding="utf-8") as stream:
            return str(stream.read())
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{source}: {error}", param_hint="FILE") from error


def read_model_config(path: Path | None) -> dict[str, Any] | None:
    """config.json of a model; a directory is taken for the one it is in."""
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="--model-config") from error
    if not isinstance(document, dict):
        raise click.BadParameter(f"{file}: not a JSON object", param_hint="--model-config")
    return document
