"""The image catalogue: which image holds which engine, in which version, with which Ray.

One schema for the chart's values (`imageCatalogue`), the operator's `--catalogue` file and the CLI's default.
"""

from __future__ import annotations

from typing import Annotated, Final

import yaml
from pydantic import Field, ValidationError, model_validator

from rljob_api import __version__
from rljob_api.v1alpha1.base import ApiModel
from rljob_api.v1alpha1.rollout import Engine

RAY_VERSION: Final = "2.60.0"


class CatalogueError(ValueError):
    """The catalogue is malformed, or has no image for what a job asks."""


class CatalogueEntry(ApiModel):
    """One image and what is installed in it."""

    engine: Engine
    """Rollout engine of the image."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Image of head and workers."""
    engine_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+)?([a-z0-9.]+)?$", max_length=32)] | None = (
        None
    )
    """Version of the engine; absent for Native, which is part of the trainer."""
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=16)] = RAY_VERSION
    """Version of Ray."""
    python_version: Annotated[str, Field(pattern=r"^3\.[0-9]+$", max_length=8)] = "3.11"
    """Version of Python."""
    cuda_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$", max_length=8)] | None = None
    """Version of the CUDA runtime; absent in CPU images."""

    @model_validator(mode="after")
    def _require_engine_version(self) -> CatalogueEntry:
        if self.engine is not Engine.NATIVE and self.engine_version is None:
            raise ValueError(f"engineVersion is required for {self.engine}: environment and arguments depend on it")
        return self


class Catalogue(ApiModel):
    """All images, in order of preference."""

    entries: Annotated[list[CatalogueEntry], Field(min_length=1, max_length=64)]
    """Entries; the first one of an engine is its default."""

    def find(self, engine: Engine, engine_version: str | None = None) -> CatalogueEntry:
        """The default entry of an engine, or the one with exactly this version.

        Raises:
            CatalogueError: no such entry; the message lists what there is.
        """
        of_engine = [entry for entry in self.entries if entry.engine is engine]
        for entry in of_engine:
            if engine_version is None or entry.engine_version == engine_version:
                return entry
        if not of_engine:
            known = ", ".join(dict.fromkeys(str(entry.engine) for entry in self.entries))
            raise CatalogueError(f"the image catalogue has no image with {engine}; it has images with {known}")
        versions = ", ".join(str(entry.engine_version) for entry in of_engine)
        raise CatalogueError(
            f"the image catalogue has no image with {engine} {engine_version}; it has {versions}. "
            "Use one of them, or set spec.cluster.image to an image with that version"
        )


DEFAULT_CATALOGUE: Final = Catalogue(
    entries=[
        CatalogueEntry(
            engine=Engine.SGLANG,
            image=f"ghcr.io/rljob/trainer-sglang:{__version__}",
            engine_version="0.5.16",
            cuda_version="12.9",
        ),
        CatalogueEntry(
            engine=Engine.VLLM,
            image=f"ghcr.io/rljob/trainer-vllm:{__version__}",
            engine_version="0.24.0",
            cuda_version="12.9",
        ),
        CatalogueEntry(engine=Engine.NATIVE, image=f"ghcr.io/rljob/trainer-native:{__version__}"),
    ]
)


def load_catalogue(text: str) -> Catalogue:
    """Parse a catalogue from YAML or JSON: `{entries: [...]}` or the list of entries alone.

    Raises:
        CatalogueError: not YAML, or an entry is wrong; names the field.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CatalogueError(f"the image catalogue is not YAML: {error}") from error
    try:
        return Catalogue.model_validate({"entries": document} if isinstance(document, list) else document)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'catalogue'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise CatalogueError(f"the image catalogue is wrong: {problems}") from error
