# Two commands on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
MODEL ?= default
# The interpreter for .venv (default: 3.12, else the newest of 3.10 to 3.13 that runs).
PYTHON ?=
KEEP ?=
PORT ?=
# `make test SUITES="core cli"` runs these alone.
SUITES ?=
# `make matrix VERSIONS="0.18.1"` runs with this vLLM alone.
VERSIONS ?=

# Any Python starts the set-up script, which then looks for the right one.
ANY_PYTHON = $$(for p in "$(PYTHON)" python3 python3.12 python3.13 python3.11 python3.10 python; do \
	"$$p" -c "" 2>/dev/null && echo "$$p" && exit; done; echo python3)
LOCK = UV_PYTHON_DOWNLOADS=never "$$uv" pip compile --quiet --universal --python-version 3.10 --python $(BIN)/python \
	--generate-hashes --no-emit-index-url --custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help env demo ab test bench lint format conformance matrix lock wheel clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  Variables: MODEL=<name, hub name or path>  KEEP=1  PORT=<port>  SUITES="core cli"  PYTHON=<interpreter>'

env:  ## Make .venv from requirements.lock, if it is missing or out of date
	@$(ANY_PYTHON) packaging/environment.py --venv $(VENV) --python "$(PYTHON)"

demo: env  ## Serve MODEL with --kv-cache-manager kvplug and send two requests (KEEP=1 keeps the server)
	@$(BIN)/kvplug demo --model "$(MODEL)" $(if $(filter-out 0,$(KEEP)),--keep) $(if $(PORT),--port $(PORT))

ab: env  ## A small accuracy and a small throughput comparison of upstream and kvplug (docs/ab.md)
	@$(BIN)/kvplug ab eval --model "$(MODEL)" --limit 12; eval=$$?; \
	case $$eval in 0|1|3) ;; *) exit $$eval ;; esac; \
	$(BIN)/kvplug ab bench --model tiny-qwen2 --quick; bench=$$?; \
	if [ $$bench -ne 0 ]; then exit $$bench; else exit $$eval; fi

test: env  ## Run the test suites (SUITES=... for some)
	@$(BIN)/python -m tests.suites $(SUITES)

bench: env  ## Time the calls of kvplug's manager, kept in .benchmarks/ (docs/performance.md)
	@$(BIN)/python -m pytest tests/benchmarks/bench_*.py -q --benchmark-autosave --benchmark-columns=min,median,iqr,rounds

lint: env  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: env  ## Let ruff mend the format and what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

conformance: env  ## Run upstream's own tests of this component against kvplug
	@$(BIN)/python -m tests.conformance

matrix: env  ## Run kvplug with every vLLM version it supports (VERSIONS="0.18.1" for some; docs/versions.md)
	@$(BIN)/python -m tests.matrix $(if $(VERSIONS),--versions "$(VERSIONS)")

lock: env  ## Resolve packaging/*.in into the lock files again, keeping the versions that still fit
	@uv="$$($(ANY_PYTHON) packaging/environment.py --print-uv)" && \
	$(LOCK) --override packaging/overrides.in packaging/dependencies.in -o requirements.lock && \
	$(LOCK) packaging/uv-bootstrap.in -o packaging/uv-bootstrap.lock

wheel: env  ## Build the wheel into dist/
	@rm -rf build  # setuptools would pack files there that are no longer in the package
	@uv="$$($(ANY_PYTHON) packaging/environment.py --print-uv)" && \
	UV_PYTHON_DOWNLOADS=never "$$uv" build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir dist . && ls dist/*.whl

clean:  ## Remove what was built here (the models stay in the user's cache folder)
	@rm -rf $(VENV) .matrix .uv build dist *.egg-info packaging/vllm-cpu-metadata/*.egg-info packaging/vllm-cpu-metadata/build \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
