"""Write (or check) everything that is generated from the types."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rljob_api.crdgen.api_page import render_api_page
from rljob_api.crdgen.crd import MAX_CRD_BYTES, render_crd
from rljob_api.crdgen.pages import render_reasons_page, render_supported_page

OUTPUTS: Final[dict[str, Callable[[], str]]] = {
    "crds/rljob.io_rljobs.yaml": render_crd,
    "charts/rljob/files/crds/rljob.io_rljobs.yaml": render_crd,
    "docs/reference/api.md": render_api_page,
    "docs/reference/reasons.md": render_reasons_page,
    "docs/reference/supported.md": render_supported_page,
}
"""Path in the repository -> what makes its text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written, or up to date with --check. 1: --check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m rljob_api.crdgen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[3], help="the repository")
    options = parser.parse_args(arguments)
    if not (options.root / "crds" / "rljob_api").is_dir():
        parser.error(f"--root: {options.root} is not a checkout of the repository (no crds/rljob_api)")
    num_stale = 0
    for name, render in OUTPUTS.items():
        path, text = options.root / name, render()
        if name.endswith(".yaml") and len(text.encode()) > MAX_CRD_BYTES:
            parser.error(f"{name}: {len(text.encode())} bytes, at most {MAX_CRD_BYTES} can be applied by kubectl")
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current == text:
            continue
        if options.check:
            num_stale += 1
            difference = difflib.unified_diff(
                current.splitlines(), text.splitlines(), name, "generated", lineterm="", n=1
            )
            print(*list(difference)[:40], sep="\n", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name} ({len(text.encode())} bytes)")
    if num_stale:
        print(f"{num_stale} generated files are not up to date: run `make generate`", file=sys.stderr)
    return 1 if num_stale else 0


if __name__ == "__main__":
    sys.exit(main())
