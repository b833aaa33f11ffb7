# Everything runs in an environment of its own, made on first use: Python 3.11+ and make are all you need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: ready demo test test-gpu test-third-party matrix lint docs bench clean

demo: $(READY)
	$(BIN)/echelon run --procs 2 --log-dir runs/demo/log examples/digits.py --dir runs/demo --epochs 30 --fresh

test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Parity for models and data sets of other libraries; timm's tests run where timm can be imported.
test-third-party: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[third-party]'
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/third_party

# What makes sense on a GPU, with the torch that sees it: nothing is installed. WORDS="parity shard" chooses files.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
test-gpu:
	$(GPU_PYTHON) tests/gpu/suite.py $(WORDS)

ready: $(READY)

matrix: $(READY)
	$(BIN)/python tests/support/matrix.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from docs/, into build/site; it fails on a link to nowhere and on a page without a place.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(READY)
	$(BIN)/python benchmarks/data_parallel/data_parallel.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Echelon needs Python 3.11 or later; this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build runs log .mypy_cache .ruff_cache .pytest_cache
	find echelon -name '*.nb[ic]' -delete
