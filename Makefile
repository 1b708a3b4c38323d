# Everything a developer or a curious user calls; `make` alone lists it. The environment is made on first use.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint format bench generate panels pictures schema tools clean runtime dev

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: runtime ## Train a two-rank FSDP2 job, watched: make demo [STEPS=200] [RANKS=2]
	@exec $(BIN)/python demo/run.py $(if $(STEPS),--steps $(STEPS)) $(if $(RANKS),--ranks $(RANKS))

test: dev ## Run the quick tests
	@$(BIN)/python -m pytest -m "not slow and not gpu"

slow: dev ## Run the slow tests: whole jobs, servers, interrupted demos
	@$(BIN)/python -m pytest -m "slow and not gpu"

lint: dev ## Check style, formatting and types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m mypy demo/*.py scripts/*.py deploy/slurm/*.py

format: dev ## Rewrite the sources in the one format
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: dev ## Measure what watching costs: make bench [SHORT=1]
	@set -e; for program in tests/bench/*.py; do \
	    echo "== $$program"; $(BIN)/python "$$program" $(if $(SHORT),--short); \
	done

generate: dev ## Write rules, alerts, runbooks and dashboards from their catalogue
	@$(BIN)/python grafana/generate.py
	@$(BIN)/python tests/deploys.py

panels: dev ## Write what each dashboard panel returned over a real Prometheus: grafana/dashboards/PANELS.md
	@TORCHMEM_PANELS=grafana/dashboards/PANELS.md $(BIN)/python -m pytest -q tests/integration/grafana/test_dashboards_live.py

pictures: dev ## Draw the dashboards and the page into docs/pictures
	@PYTHONPATH=grafana $(BIN)/python tests/pictures.py
	@$(BIN)/python tests/page_pictures.py

schema: ## Make the schema that dashboards are held against from Grafana's own types
	@grafana/schema/make.sh

tools: ## Unpack the real servers that the tests talk to into .tools
	@scripts/tools.sh
	@scripts/npm.sh grafana/pictures tests/crds

clean: ## Remove everything that make has made here
	rm -rf .venv .tools .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist grafana/pictures/dist ./*.egg-info
	find . \( -name __pycache__ -o -name node_modules \) -type d -prune -exec rm -rf {} +

runtime dev:
	@$(PYTHON) scripts/environment.py $@
