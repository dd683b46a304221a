# Everything sets itself up: `make dev` on a fresh machine needs Python >= 3.11 (or uv) and nothing else.

SHELL := /bin/sh
BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?=
# Two processes; the tests of one file in tests/system stay together (they start real processes and share the cores).
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help dev test check bench bench-peers bench-scale servers format clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

dev: .venv/.run  ## everything on this machine: lab, node and web (ARGS="--port 9000")
	@exec $(BIN)/scriptdispatch dev $(ARGS)

test: .venv/.dev  ## the whole suite; what a missing server skipped is listed at the end (PYTEST_ARGS="-k lane")
	@$(PYTEST) $(PYTEST_ARGS)

check: .venv/.dev  ## format, lint, types, fast tests (no servers, few processes): some 40 s
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict
	@$(PYTEST) -q --timeout 30 -m "not slow and not system" -k "not mongo and not redis and not pulsar" tests/unit tests/contract $(PYTEST_ARGS)

bench: .venv/.dev  ## tasks per second, CPU per task, latency, memory (ARGS="--tasks 5000")
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: .venv/.dev .venv/peers/.ready  ## the product against Celery, dramatiq and taskiq, 10 minutes (ARGS=--quick)
	@$(BIN)/python -m tests.servers fetch
	@$(BIN)/python benchmarks/peers/run.py --peers .venv/peers $(ARGS)

bench-scale: .venv/.dev  ## a task beside a million scheduled ones, a decision among 100,000 lanes, 5 minutes
	@$(BIN)/python -m tests.servers fetch
	@$(BIN)/python benchmarks/peers/scale.py $(ARGS)

servers: .venv/.dev  ## Redis, MongoDB and Pulsar on this machine, with the settings to use with `serve`
	@$(BIN)/python -m tests.servers fetch
	@exec $(BIN)/python -m tests.servers

format: .venv/.dev  ## put the code into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove the environment and the caches; data stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build

# The stamps: the environment is as pyproject.toml wants it, for running (.run) and for working on it (.dev).
.venv/.run: pyproject.toml .ci/venv
	@.ci/venv .
	@touch $@

.venv/.dev: pyproject.toml .ci/venv
	@.ci/venv '.[dev]'
	@touch $@ .venv/.run

.venv/peers/.ready: benchmarks/peers/requirements.txt benchmarks/peers/environment .venv/.dev
	@benchmarks/peers/environment .venv/peers
	@touch $@
