# make demo | test | bench | sweep | lint. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/cuda/*.cuh)
SIMT := $(wildcard tests/simt/*.h tests/simt/*.cpp)
BUILD := requirements-test.txt pyproject.toml setup.py csrc/CMakeLists.txt $(CPP)

.PHONY: demo test bench sweep mutants lint format clean
demo: .venv/demo
	$(BIN)/python -m nanscan demo

# Each file runs in one process, as its fixtures want, and the slow ones first.
test: .venv/test
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

bench: .venv/bench
	$(BIN)/python benchmarks/run_all.py

# Plants a NaN behind each module of many models, in backward: is the nearest parameter named? Then trains 40
# healthy models: is nothing found? 20 minutes; those of timm only where it is installed.
sweep: .venv/test
	PYTHONPATH=tests $(BIN)/python tests/sweeps/backward.py
	$(BIN)/python tests/sweeps/healthy_models.py

# Plants faults in the CUDA kernels and shows what catches each; 40 minutes. Table: tests/simt/README.md
mutants: .venv/test
	$(BIN)/python tests/simt/mutants.py

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP) $(SIMT)

format: .venv/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(SIMT)

# The package, editable, with one extra. Only what changed in csrc/ is compiled again.
.venv/%: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint requirements-test.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info nanscan/_C.*.so
