# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
# A CUDA build; TORCH=2.13.0 and BNUQ_CUDA=0|1 are for other set-ups.
TORCH ?= 2.14.1
STAGE ?= all
# Steps of a stage by name, a regular expression; empty for all.
ONLY ?=
# Test files at a time. A worker keeps torch to one thread: two teams of two on two cores wait for each other.
# By name: those with the most tests first would leave the slowest file to the end, and to one worker.
WORKERS ?= 2
OUT ?= demo-output
# Where `make gpu` keeps its result folder, and finds it again.
RESULTS ?= benchmarks/results

BIN := $(VENV)/bin
READY := $(VENV)/ready-torch-$(TORCH)
BUILT := $(VENV)/built
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
# A machine with a GPU may have torch in its own python and no network for a .venv.
GPU_PYTHON ?= $(if $(wildcard $(BUILT)),$(BIN)/python,$(PYTHON))

.PHONY: demo test lint bench gpu clean test-matrix

demo: $(BUILT)
	$(BIN)/python -m bnuq_ext demo --output $(OUT)
	BNUQ_BENCH=short $(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=$(OUT)/speed.json
	$(BIN)/python benchmarks/report.py $(OUT)/speed.json

test: $(BUILT)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -p no:benchmark -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

bench: $(BUILT)
	mkdir -p build/bench
	BNUQ_BENCH=full $(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=build/bench/raw.json
	$(BIN)/python benchmarks/report.py build/bench/raw.json

gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --stage $(STAGE) --only "$(ONLY)" --out "$(RESULTS)"

test-matrix:
	PYTHON=$(PYTHON) bash .ci/matrix

clean:
	rm -rf build dist *.egg-info bnuq_ext/*.so tests/hostrun/build demo-output bbb-output reproduce-output .torch-matrix .gpu-build $(BUILT)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "setuptools>=77" wheel "torch==$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check $$($(BIN)/python .ci/requirements.py)
	rm -f $(VENV)/ready-torch-* $(BUILT)
	touch $@

$(BUILT): $(READY) $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
