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
compile dev.txt --extra operator --extra trainer --extra tracking --group dev pyproject.toml requirements/build.in
compile operator.txt --extra operator --constraint requirements/dev.txt pyproject.toml requirements/build.in
compile trainer.txt --extra trainer --extra tracking --constraint requirements/dev.txt pyproject.toml requirements/build.in
compile benchmarks.txt --extra trainer --constraint requirements/dev.txt pyproject.toml requirements/benchmarks.in
# Engines: Linux with the C library their wheels ask for, and each on its own (requirements/engines/build.sh).
for input in requirements/engines/*.in; do
  name=$(basename "$input" .in)
  [ "$name" = test ] && continue
  overrides=()
  [ ! -f "requirements/engines/$name.overrides" ] || overrides=(--override "requirements/engines/$name.overrides")
  "$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_34 --generate-hashes \
    --no-emit-index-url --no-header --no-annotate "${overrides[@]}" \
    --extra trainer pyproject.toml requirements/build.in requirements/engines/test.in "$input" \
    --output-file "requirements/engines/$name.txt"
done
