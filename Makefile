# Everything runs in an environment of its own, made on first use: Python 3.11+ and make are all you need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/pip install --no-compile --quiet --disable-pip-version-check

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: ready demo test soak simulate test-gpu test-third-party test-lowest fuzz matrix lint docs pictures bench lock audit sbom clean

demo: $(READY)
	$(BIN)/echelon run --procs 2 --log-dir runs/demo/log examples/digits.py --dir runs/demo --epochs 30 --fresh

test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Simulated lives of parameter servers, from a seed on: SOAK="--seconds 3600 --first 100000".
SOAK ?= --seconds 600 --first 1000
soak: RUN = soak.py $(SOAK)
soak: simulate

# One program of tests/simulation: RUN="server_life.py 7", RUN="checkpoint_life.py 7", RUN=mutants.py.
simulate: $(READY)
	PYTHONPATH=tests/simulation:tests/parameter_server:. $(BIN)/python tests/simulation/$(RUN)

# Parity for models and data sets of other libraries; timm's tests run where timm can be imported.
test-third-party: $(READY)
	$(PIP) --no-deps --require-hashes -r locks/third-party.txt
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/third_party

# Damaged and hostile input for every parser, for an hour or MINUTES. The suite gives each parser its first 150.
MINUTES ?= 60
fuzz: $(READY)
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzzing.py --minutes $(MINUTES) $(WORDS)

# What makes sense on a GPU, with the torch that sees it: nothing is installed. WORDS="parity shard" chooses files.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
test-gpu:
	$(GPU_PYTHON) tests/gpu/suite.py $(WORDS)

ready: $(READY)

matrix: $(READY)
	$(BIN)/python tests/support/matrix.py

# Every library of the environment, its version and its hash, chosen anew; CI and the image install exactly these.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-package torch
lock: $(BIN)/uv
	$(LOCK) --upgrade -c constraints.txt --custom-compile-command "make lock" -o locks/core.txt pyproject.toml
	$(LOCK) --upgrade -c constraints.txt -c locks/core.txt --custom-compile-command "make lock" -o locks/dev.txt --extra dev pyproject.toml
	$(LOCK) --upgrade -c constraints.txt -c locks/dev.txt --custom-compile-command "make lock" -o locks/third-party.txt --extra third-party pyproject.toml

# The suite on the oldest versions that pyproject.toml admits, in an environment of its own. torch brings setuptools and
# its GPU libraries, which pyproject.toml's metadata leaves out of the locks.
OLD := $(VENV)-lowest
test-lowest: $(BIN)/uv
	mkdir -p build
	$(BIN)/uv pip compile --quiet --resolution lowest-direct $(addprefix --extra ,images ray tensorboard text) -o build/lowest.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --extra dev -c build/lowest.txt --no-emit-package setuptools -o build/lowest-dev.txt pyproject.toml
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(OLD)
	$(BIN)/uv pip install --quiet --no-config --python $(OLD)/bin/python -r build/lowest-dev.txt
	$(BIN)/uv pip install --quiet --python $(OLD)/bin/python --no-deps -e .
	$(OLD)/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -W ignore::DeprecationWarning $(WORDS)

# Known vulnerabilities of the locked versions. It asks PyPI, and fails where PyPI does not answer for one of them.
audit: $(BIN)/uv
	$(BIN)/uv tool run pip-audit --strict --require-hashes --disable-pip -r locks/dev.txt -r locks/third-party.txt

# What an installation contains, as CycloneDX JSON.
sbom: $(BIN)/uv
	mkdir -p build
	$(BIN)/uv tool run --from cyclonedx-bom cyclonedx-py environment --pyproject pyproject.toml -o build/sbom.json $(VENV)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from docs/, into build/site; it fails on a link to nowhere and on a page without a place.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The pictures of docs/: from the code, from benchmarks/measured, and of pages of real runs (needs Chromium).
pictures: $(READY)
	$(BIN)/python docs/site/pictures.py
	$(BIN)/python docs/site/charts.py
	$(BIN)/python docs/site/screenshots.py

bench: $(READY)
	$(BIN)/python benchmarks/data_parallel/data_parallel.py

$(READY): pyproject.toml constraints.txt locks/dev.txt
	$(PYTHON) -c 'import sys; sys.exit("Echelon needs Python 3.11 or later; this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes -r locks/dev.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(READY)

$(BIN)/uv: $(READY)
	$(PIP) uv

clean:
	rm -rf $(VENV) $(OLD) build runs log .mypy_cache .ruff_cache .pytest_cache
	find echelon -name '*.nb[ic]' -delete
