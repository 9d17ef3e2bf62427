# make demo and make test each work as the first command in a fresh clone, and so does
# make test-torch VERSION=2.15.0, which runs the suite with another PyTorch.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
VERSION ?= 2.15.0
TESTS ?= tests
OTHER := .venv-torch-$(VERSION)

.PHONY: setup demo test test-torch lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m treadle demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -c "import torch; print('PyTorch', torch.__version__)"
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

# The constraints of the other packages hold; Triton comes with the PyTorch that it belongs to.
$(OTHER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|triton)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(VERSION)
	echo "torch==$(VERSION)" >> $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --editable ".[dev]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/pyright src

clean:
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .ruff_cache .hypothesis
