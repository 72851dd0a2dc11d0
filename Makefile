# `make run` answers a question about a picture; `make test` checks everything.
PYTHON ?= python3
VENV ?= .venv
IMAGE ?= examples/shapes.png
QUESTION ?= Describe the picture.
export IMAGE QUESTION
# One thread for each test worker: more would only fight for the same cores.
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help run test test-browser test-gpu test-gpus lint lab notebooks figures bench bench-gpu clean
.DEFAULT_GOAL := help

help:     ## list these targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

run: $(VENV)/installed  ## answer QUESTION about IMAGE with the shipped nano checkpoint
	$(BIN)/inkling-ref ask "$$QUESTION" --image "$$IMAGE" --draft

test: $(VENV)/installed-test  ## every test, with every shape annotation checked; then every notebook
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --jaxtyping-packages=inkling_ref,beartype.beartype
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -p no:python \
		--nbval-lax --nbval-current-env --nbval-cell-timeout=120 notebooks

test-browser: $(VENV)/installed-test  ## JupyterLab in a real browser (chromium): run notebooks, move their sliders
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser.py

test-gpu: $(VENV)/installed-test  ## on an NVIDIA GPU: every kernel and whole models on them, bfloat16 too
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("test-gpu: torch sees no GPU here, expected one")'
	$(BIN)/python -m pytest -n 12 tests/test_kernels_*.py

test-gpus: $(VENV)/installed-test  ## on 2, 4 or 8 NVIDIA GPUs: worlds of them on NCCL give what one gives
	@$(BIN)/python -c 'import torch; torch.cuda.device_count() > 1 or exit("test-gpus: expected two GPUs or more")'
	$(BIN)/python -m pytest tests/test_parallel_gpu.py

lint: $(VENV)/installed-test  ## ruff: rules and format; notebooks: normal form, sizes, outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_notebook_lint.py

lab: $(VENV)/installed-notebooks  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" notebooks/00_tour.ipynb

notebooks: $(VENV)/installed-notebooks  ## run the notebooks again, in place, and put them in normal form
	$(BIN)/python -m inkling_ref.notebook notebooks/*.ipynb

figures: export INKLING_FIGURES = $(CURDIR)/figures
figures: notebooks  ## draw figures/ again, and run the notebooks for their key figures
	for script in figures/make_*.py; do $(BIN)/python "$$script" || exit 1; done

bench: $(VENV)/installed-test  ## speed on this machine: load, first answer, decode, prefill
	$(BIN)/python -m inkling_ref.measure.speed

bench-gpu: $(VENV)/installed-test  ## on an NVIDIA GPU: every kernel beside reference, peers and limits
	$(BIN)/inkling-ref bench

clean:  ## remove the environment
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[$*]'
	@touch $@
