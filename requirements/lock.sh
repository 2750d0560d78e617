#!/usr/bin/env bash
# Resolve every lock file from pyproject.toml: hashes always, index addresses never.
set -euo pipefail
uv=$(realpath "${1:-uv}")
cd "$(dirname "$0")/.."
compile() {  # compile OUTPUT ARGS...
  local output=$1
  shift
  "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate \
    --constraint requirements/constraints.in "$@" --output-file "requirements/$output"
}
compile dev.txt --extra operator --extra trainer --group dev pyproject.toml requirements/build.in
compile operator.txt --extra operator --constraint requirements/dev.txt pyproject.toml requirements/build.in
compile trainer.txt --extra trainer --constraint requirements/dev.txt pyproject.toml requirements/build.in
