# make demo | test | bench | lint. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/cuda/*.cuh)
BUILD := requirements-test.txt pyproject.toml setup.py csrc/CMakeLists.txt $(CPP)

.PHONY: demo test bench lint format clean
demo: .venv/demo
	$(BIN)/python -m nanscan demo

test: .venv/test
	$(BIN)/python -m pytest

bench: .venv/bench
	$(BIN)/python benchmarks/run_all.py

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: .venv/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The package, editable, with one extra. Only what changed in csrc/ is compiled again.
.venv/%: $(BUILD)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint requirements-test.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info nanscan/_C.*.so
