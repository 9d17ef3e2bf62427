# make demo and make test each work as the first command in a fresh clone, with any Python and any
# PyTorch: make test PYTHON=python3.13 TORCH=2.15.0. make docs builds the documentation.
PYTHON ?= python3
TORCH ?= 2.13.0
WORKERS ?= 2
TESTS ?= tests

# Each Python and each PyTorch has an environment of its own; ".venv" is that of the defaults.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error $(PYTHON) does not run))
NAMED := $(if $(filter-out python3,$(PYTHON)),-python-$(VERSION))
VENV := .venv$(NAMED)$(if $(filter-out 2.13.0,$(TORCH)),-torch-$(TORCH))
BIN := $(VENV)/bin
BASE := $(VENV)/.base-$(VERSION)
STAMP := $(VENV)/.installed-$(VERSION)
DOCS := .venv-docs
OTHERS := $(filter-out %/python$(VERSION),$(wildcard $(VENV)/lib/python*))

.PHONY: setup demo test lint docs clean

setup: $(STAMP)

# The constraints say nothing of PyTorch and of what a PyTorch asks for in one version only (Triton,
# CUDA's libraries): those come with the wheel that the index has.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(if $(OTHERS),--clear) $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==$(TORCH) --editable .
	touch $(BASE)

$(STAMP): $(BASE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    torch==$(TORCH) --editable ".[dev]"
	touch $(STAMP)

# Trains on PyTorch and treadle alone; all else is for tests.
demo: $(BASE)
	$(BIN)/python -m treadle demo

test: $(STAMP)
	$(BIN)/python -c "import sys, torch; print('Python', sys.version.split()[0], 'PyTorch', torch.__version__)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	    $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python src

# The site needs neither PyTorch nor treadle: what is made from the code is in the repository, and tests compare both.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "Open build/docs/index.html"

$(DOCS)/.installed: docs/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install -qq --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
