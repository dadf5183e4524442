# Needs Python >= 3.11 with venv and pip, a C compiler and make. Everything is installed into $(VENV), nothing else is touched.
#
#   make demo     the whole pipeline on what ships with the package; ARGS="train.lr=1e-4" adds overrides to every program
#   make test     check, then every test
#   make check    lint, format, types, every recipe composes, imports point one way
#   make clean    remove what was built; keeps $(VENV) and runs/

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
RUN := $(VENV)/bin/python

# DeepSpeed compiles a small operator on first use and looks for ninja on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export WANDB_MODE ?= offline
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export DS_ACCELERATOR ?= cpu
endif

.PHONY: setup demo test check clean

setup: $(VENV)/.installed

# torch goes first and alone: pip then takes a CPU build where an index offers one. pip is the witness of a whole environment.
$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install torch==2.13.0
	$(RUN) -m pip install -e '.[dev]'
	touch $@

demo: setup
	$(RUN) -m data_prep.prompts recipe=quickstart $(ARGS)
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node 2 -m data_prep.hidden_states recipe=quickstart $(ARGS)
	$(RUN) -m mtptrain.train recipe=quickstart $(ARGS)
	$(RUN) -m eval.acceptance recipe=quickstart $(ARGS)
	$(RUN) -m mtptrain.export recipe=quickstart $(ARGS)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_recipes.py tests/test_layout.py

test: check
	$(RUN) -m pytest

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find data_prep eval mtptrain tests -name __pycache__ -type d -prune -exec rm -rf {} +
