#!/usr/bin/env bash
# Tests of one rollout engine in its environment: the conformance suite, and a whole run of the quickstart.
#
#   requirements/engines/test.sh native|vllm|vllm-0.32-cpu|sglang-0.5.23|... [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=${1:?"usage: $0 ENGINE [pytest arguments]"}
shift
own=()
case $engine in
  native) environment=.venv suite=Native ;;
  vllm) environment=$(requirements/engines/build.sh vllm-0.32-cpu) suite=VLLM ;;
  vllm-*) environment=$(requirements/engines/build.sh "$engine") suite=VLLM ;;
  sglang-*) environment=$(requirements/engines/build.sh "$engine") suite=SGLang own=(trainer/rljob_trainer/tests/test_tr_sglang{,_tp}.py) ;;
  *) echo "$0: unknown engine $engine; use native, vllm, or a lock of requirements/engines" >&2; exit 2 ;;
esac
echo "=== $engine in $environment"
# RLJOB_TEST_ENGINE turns a missing engine from a skipped test into a failed one.
RLJOB_TEST_ENGINE=$suite "$environment/bin/python" -m pytest -q -p no:cacheprovider --durations=5 -k "Test$suite or test_tr_sglang" \
  trainer/rljob_trainer/tests/test_tr_engine_conformance.py trainer/rljob_trainer/tests/test_tr_engine_quickstart.py "${own[@]}" "$@"
