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

.PHONY: help run test lint lab figures bench clean
.DEFAULT_GOAL := help

help:     ## list these targets
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

run: $(VENV)/installed  ## answer QUESTION about IMAGE with the shipped nano checkpoint
	$(BIN)/inkling-ref ask "$$QUESTION" --image "$$IMAGE"

test: $(VENV)/installed-test  ## every test, with every shape annotation checked
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --jaxtyping-packages=inkling_ref,beartype.beartype

lint: $(VENV)/installed-test  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lab: $(VENV)/installed-notebooks  ## open JupyterLab here
	$(BIN)/jupyter lab

figures: $(VENV)/installed-notebooks  ## draw figures/ again
	for script in figures/make_*.py; do $(BIN)/python "$$script" || exit 1; done

bench: $(VENV)/installed-test  ## speed on this machine: load, first answer, decode, prefill
	$(BIN)/python -m inkling_ref.measure.speed

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
