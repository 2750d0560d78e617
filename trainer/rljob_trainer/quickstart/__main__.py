"""`python -m rljob_trainer.quickstart DIR [--seed N]`: writes the model and the data of `examples/quickstart.yaml`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rljob_trainer.quickstart.model import save_model
from rljob_trainer.quickstart.task import demonstrate, draw_problems, split_problems


def write_assets(directory: Path, seed: int) -> None:
    """`model/`, `train.jsonl`, `validation.jsonl` and `warmstart.jsonl`; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    training, validation = split_problems(draw_problems(seed))
    for name, problems in (("train", training), ("validation", validation)):
        _write_jsonl(
            directory / f"{name}.jsonl", ({"prompt": item.question, "answer": item.answer} for item in problems)
        )
    # The teacher never demonstrates a held-out problem.
    _write_jsonl(
        directory / "warmstart.jsonl",
        ({"prompt": item.question, "response": item.response} for item in demonstrate(training, seed)),
    )
    save_model(directory / "model", seed)


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m rljob_trainer.quickstart", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, demonstrations and weights (default 0)")
    options = parser.parse_args(arguments)
    write_assets(options.directory, options.seed)
    print(f"Wrote model, train.jsonl, validation.jsonl and warmstart.jsonl to {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
