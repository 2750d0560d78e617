#!/usr/bin/env bash
# Make the environment of a rollout engine once, with the whole trainer in it, and print its path.
#
#   requirements/engines/build.sh vllm-0.32-cpu
#
# Engines pin different versions of torch and of each other's dependencies, so each has an environment and a lock of its
# own: NAME.in is what is wanted, NAME.overrides what the engine's own metadata gets wrong, NAME.txt the lock
# (`make lock`). The environment is kept under ${RLJOB_CACHE:-~/.cache/rljob}/engines/NAME-<hash of the lock>, and is
# pointed to this checkout each time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
name=${1:-}
lock=$here/$name.txt
if [ ! -f "$lock" ]; then
  echo "usage: $0 NAME, one of: $(cd "$here" && printf '%s ' *.txt | sed 's/\.txt//g')" >&2
  exit 2
fi
uv=${UV:-$repository/.venv/bin/uv}
python=${PYTHON:-$repository/.venv/bin/python}
[ -x "$uv" ] || { echo "$0: no uv at $uv; run \`make venv\` first, or set UV" >&2; exit 2; }

cache=${RLJOB_CACHE:-$HOME/.cache/rljob}/engines
environment=$cache/$name-$(sha256sum "$lock" | cut -c1-12)
mkdir -p "$cache"
exec 9>"$environment.lock"
flock --timeout 1800 9 || { echo "$0: another build of $name has held $environment.lock for 30 minutes" >&2; exit 1; }
if [ ! -f "$environment/.complete" ]; then
  rm -rf "$environment"
  echo "$0: building $environment" >&2
  "$uv" venv --quiet --python "$python" "$environment" >&2
  # Each of an engine's processes would compile torch anew where Python may not write into its packages.
  "$uv" pip sync --quiet --compile-bytecode --python "$environment/bin/python" --require-hashes "$lock" >&2
  touch "$environment/.complete"
fi
case $name in
  sglang-*) cp "$here"/sglang-cpu/* "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" ;;
esac
if [ "$(cat "$environment/.checkout" 2>/dev/null)" != "$repository" ]; then
  "$uv" pip install --quiet --python "$environment/bin/python" --no-deps --no-build-isolation --editable "$repository" >&2
  echo "$repository" >"$environment/.checkout"
fi
echo "$environment"
