SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
UV := $(BIN)/uv
LOCK := requirements/dev.txt
# Where it is set each of the many processes of a run would compile the sources and tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*?## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9_-]+:.*?## / {printf "  \033[36m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"RLJob needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(VENV)/.installed: $(LOCK) pyproject.toml | $(UV)
	$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes $(LOCK)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: venv
venv: $(VENV)/.installed ## Make the locked development environment in .venv

.PHONY: lock
lock: $(UV) ## Re-resolve requirements/*.txt from pyproject.toml (hashes, no index address)
	cd requirements && ./lock.sh ../$(UV)

##@ Checks
TOOLCHAIN := $(BIN)/python e2e/cluster/toolchain.py
SCRIPTS := requirements/lock.sh requirements/engines/build.sh requirements/engines/test.sh .ci/run .ci/verify
# CI=true turns a missing program from a skipped test into a failed one.
ENVTEST_ASSETS = $$($(TOOLCHAIN) envtest | tail -1)

.PHONY: lint
lint: venv ## Ruff, mypy, import rules, shell scripts, Dockerfile, YAML
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=charts/tools $(BIN)/mypy --strict charts/tools
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict .

.PHONY: format
format: venv ## Format and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

.PHONY: generate
generate: venv ## Regenerate the CRD, the reference docs, the dashboard, the chart's schema and README
	$(BIN)/python -m rljob_api.crdgen
	$(BIN)/python -m rljob_trainer.telemetry.docs
	$(BIN)/python charts/tools/dashboard.py
	$(BIN)/python charts/tools/values_docs.py

.PHONY: golden
golden: venv ## Accept the current renders of chart and operator as the golden ones
	RLJOB_UPDATE_GOLDEN=1 $(BIN)/pytest -q charts/tests operator/rljob_operator/tests -k golden

.PHONY: verify
verify: venv ## Fail when a generated file is stale (regenerates in a copy and compares)
	.ci/verify

##@ Tests
.PHONY: tools
tools: venv ## Fetch or build what the tests need: kubectl, helm, Prometheus, etcd, kube-apiserver
	@for what in tools prometheus envtest crds; do \
	  $(TOOLCHAIN) $$what || [ "$$CI" != true ] || exit 1; \
	done

# Many tests wait for servers: three processes keep two cores busy.
PYTEST_WORKERS ?= 3

.PHONY: test
test: tools ## Unit tests, and integration tests on a real API server (PYTEST_WORKERS processes)
	KUBEBUILDER_ASSETS="$(ENVTEST_ASSETS)" \
	  $(BIN)/pytest -q -m "not runs and not learning and not engines and not e2e" --numprocesses $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: test-runs
test-runs: tools ## Whole training runs: stopped, resumed, killed, ahead of the training, watched by a Prometheus
	KUBEBUILDER_ASSETS="$(ENVTEST_ASSETS)" \
	  $(BIN)/pytest -q -m runs --numprocesses 2 --dist loadfile --durations=0

ENGINES ?= native vllm

.PHONY: test-engines
test-engines: venv ## Conformance of real engines, each in its own environment (ENGINES="native vllm sglang-0.5.23 sglang-0.5.16")
	@for engine in $(ENGINES); do requirements/engines/test.sh $$engine || exit 1; done

.PHONY: test-unit
test-unit: venv ## Only tests that need no program beside Python
	$(BIN)/pytest -q -m "not integration and not ray and not slow and not runs and not learning and not engines and not e2e"

.PHONY: test-numerics
test-numerics: venv ## Golden vectors, worked values and invariances of the algorithms (RLJOB_SHARED_DIR)
	cd trainer/rljob_trainer/tests && ../../../$(BIN)/pytest -q test_tr_numerics.py test_tr_numerics_more.py \
	  test_tr_algorithms.py test_tr_invariance.py test_tr_evaluation.py test_tr_rewards_gsm8k.py test_tr_rewards_math.py

# One algorithm (GRPO), or every one.
LEARNING ?=

.PHONY: test-learning
test-learning: venv ## Each algorithm trains the quickstart to reward 0.8: minutes each (LEARNING=GRPO for one)
	$(BIN)/pytest -q -m learning trainer $(if $(LEARNING),-k "$(LEARNING)") --durations=0

.PHONY: demo
demo: venv ## Train the quickstart on this machine: about five minutes on two cores
	$(BIN)/python -m rljob_trainer.quickstart runs/quickstart-assets
	$(BIN)/rljob run examples/quickstart.yaml

E2E_ARGS ?=

.PHONY: e2e
e2e: venv ## All end-to-end cases: real Kubernetes with KubeRay (root, Linux, Go), or the cluster of your KUBECONFIG
	$(TOOLCHAIN) tools
	[ -n "$$KUBECONFIG" ] || $(TOOLCHAIN) cluster
	$(BIN)/python e2e/run.py $(E2E_ARGS)

.PHONY: e2e-smoke
e2e-smoke: ## Only the end-to-end cases that CI runs
	$(MAKE) --no-print-directory e2e E2E_ARGS=--smoke

.PHONY: e2e-down
e2e-down: venv ## Remove clusters that an interrupted or --keep run left behind
	$(BIN)/python e2e/cluster/cluster.py down --ip-family IPv4
	$(BIN)/python e2e/cluster/cluster.py down --ip-family IPv6

##@ Images
CONTAINER_TOOL ?= $(or $(shell command -v docker),$(shell command -v buildah))
IMAGE_REGISTRY ?= ghcr.io/rljob
IMAGE_TAG ?= $(shell $(BIN)/python -c 'from rljob_api import __version__; print(__version__)')
BASE ?= python:3.11-slim-bookworm

.PHONY: images
images: venv ## Build the operator and trainer images (CONTAINER_TOOL, BASE, IMAGE_REGISTRY, IMAGE_TAG)
	$(CONTAINER_TOOL) build --build-arg BASE=$(BASE) --target operator --tag $(IMAGE_REGISTRY)/operator:$(IMAGE_TAG) .
	$(CONTAINER_TOOL) build --build-arg BASE=$(BASE) --target trainer --tag $(IMAGE_REGISTRY)/trainer-native:$(IMAGE_TAG) .

.PHONY: clean
clean: ## Remove caches and run directories (keeps .venv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist runs
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
