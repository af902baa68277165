# make demo | test | chaos | lint | bench | bench-corpus: each sets itself up. Needs Python 3.11 to 3.14, git and make, and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
READY := .venv/.installed
CONFIG ?= configs/quickstart.yaml
# Tests wait for servers and for each other: a third worker gives two cores that time, where there are 4 GB for each.
WORKERS ?= $(shell awk '/^MemTotal/ && $$2 > 15000000 {enough = 1} END {print enough ? 3 : 2}' /proc/meminfo 2>/dev/null || echo 2)

.PHONY: help demo test test-long chaos test-oldest lint pin-images bench bench-train bench-scaling bench-recipe bench-corpus bench-eval bench-gpu gpu-proof upgrade lock docs clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

demo: $(READY) ## install, start the servers, run the quickstart pipeline
	@echo "1. start the servers: Prefect, MLflow and a page that shows runs"
	@echo "2. run $(CONFIG): what is built already is reused; what a run would build: $(BIN)/stemma check $(CONFIG)"
	@[ "$(CONFIG)" != configs/quickstart.yaml ] || echo "   from docstrings to a report; each stage shows its time left once it has a pace"
	@"$(BIN)/stemma" up
	@"$(BIN)/stemma" run $(CONFIG)
	@echo; echo "look around:  $(BIN)/stemma status $(CONFIG)"
	@echo "stop servers: $(BIN)/stemma down"

test: $(READY) ## all tests but the long proofs
	@"$(BIN)/python" -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long" --durations 25 $(TESTS) || \
	{ code=$$?; if [ $$code -eq 1 ]; then \
	  echo; echo "make test has failed. What failed is run again, alone: what passes then is broken by what runs beside it."; \
	  "$(BIN)/python" -m pytest -n 0 --last-failed --last-failed-no-failures none -m "not long" $(TESTS) || true; fi; \
	  exit $$code; }

test-long: $(READY) ## the long proofs too
	@"$(BIN)/python" -m pytest $(TESTS)

chaos: $(READY) ## 500 faults over every learning stage, in 6 hours on 2 quiet cores; call it again to go on; .chaos/drill.md
	@"$(BIN)/stemma" drill benchmarks/drill.yaml --faults $(or $(FAULTS),500) --mtbf 20s --seed $(or $(SEED),0) --folder .chaos

test-oldest: $(READY) ## training tests with the oldest torch that is supported, in .venv-oldest
	@infra/test-oldest.sh

lint: $(READY) ## style, types, one-way imports, plain English
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"
	@"$(BIN)/lint-imports"
	@"$(BIN)/python" -m tools.english

pin-images: ## print the images of the compose file by digest, as lines for .env; needs docker and the registries
	@infra/pin-images.sh

bench: $(READY) ## every benchmark; figures go to benchmarks/log by hand
	@for script in benchmarks/*/bench_*.py; do "$(BIN)/python" "$$script"; done

bench-corpus: $(READY) ## those of the corpus, on the text in ../shared/data
	@for script in benchmarks/corpus/bench_*.py; do "$(BIN)/python" "$$script"; done

bench-train: $(READY) ## tokens a second of pretraining against its peers, about 8 minutes on 2 quiet cores
	@"$(BIN)/python" benchmarks/training/bench_train.py

bench-gpu: $(READY) ## steps of pretraining and their kernels on one GPU, about 10 minutes on an H200
	@"$(BIN)/python" benchmarks/training/bench_gpu.py
	@"$(BIN)/python" benchmarks/training/bench_kernels.py

gpu-proof: $(READY) ## what users get on one GPU, in at most 9 minutes: tests, every learning stage, both loops; call it again to go on
	@"$(BIN)/python" -m benchmarks.gpu_proof

bench-scaling: $(READY) ## two ranks against one, pinned to cores, and what of their sending hides; about 10 minutes on 2 quiet cores
	@"$(BIN)/python" benchmarks/training/bench_scaling.py
	@"$(BIN)/python" benchmarks/training/bench_overlap.py

bench-eval: $(READY) ## multiple choice and answers against lm-eval's own backend, on the questions in ../shared/data
	@"$(BIN)/python" benchmarks/evaluation/bench_eval.py
	@"$(BIN)/python" benchmarks/evaluation/bench_generation.py

bench-recipe: $(READY) ## bits per byte after ten minutes of pretraining on 2 quiet cores, on the text of ../shared/recipe
	@"$(BIN)/python" benchmarks/training/bench_recipe.py

upgrade: $(READY) ## the newest versions against the lock's, in .venv-candidate: bits, losses, speed, memory, tests (TESTS=…)
	@infra/install.sh candidate
	@"$(BIN)/python" -m benchmarks.compare_environments "$(BIN)/python" .venv-candidate/bin/python --workers $(WORKERS) --tests $(or $(TESTS),tests)
	@echo; echo "to take them over: cp .venv-candidate/requirements.lock . && make test"

lock: $(READY) ## pin the newest versions that pyproject.toml allows, with hashes
	@infra/install.sh lock

docs: $(READY) .venv-docs/.installed ## the documentation as a site in docs/_build/html, with warnings as errors
	@"$(BIN)/python" -m cli.reference docs/reference/generated
	@.venv-docs/bin/python -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees -c docs . docs/_build/html
	@echo "built docs/_build/html/index.html; to look at it: python3 -m http.server --bind 127.0.0.1 -d docs/_build/html"

clean: ## remove the environment; the store stays
	rm -rf .venv

$(READY): requirements.lock pyproject.toml infra/install.sh
	@infra/install.sh
	@touch $(READY)

# Apart from .venv: the quickstart learns from the docstrings of the packages that are installed there.
.venv-docs/.installed: docs/requirements.lock | $(READY)
	@"$(BIN)/uv" venv --quiet --allow-existing --python "$(BIN)/python" .venv-docs
	@"$(BIN)/uv" pip install --quiet --python .venv-docs/bin/python --no-deps --require-hashes -r docs/requirements.lock || \
	{ "$(BIN)/uv" venv --quiet --clear --seed --python "$(BIN)/python" .venv-docs && \
	  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r docs/requirements.lock; }
	@touch $@
