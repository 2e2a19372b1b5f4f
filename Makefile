# Everything runs in .venv, made on first use and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo forms test test-slow soak resolve newest triton-versions gpu-targets check docs format bench clean

help:
	@echo "make demo    what sympow is for: costs of a token, two models trained and compared, a report (CPU, three minutes)"
	@echo "make forms   show the three forms of the operator agreeing, and time them"
	@echo "make test    run the tests"
	@echo "make test-slow  run the tests that take longer: README's commands, several processes, compiled kernels"
	@echo "make soak    kill a training run 100 times, damage its checkpoints, compare it with one left alone (CPU, minutes)"
	@echo "make resolve resolve constraints.txt against the package index, for each platform (minutes)"
	@echo "make newest  test with the newest version of every dependency; TORCH=2.13.0 chooses another torch (minutes)"
	@echo "make triton-versions  compile every kernel for Hopper with each supported Triton (tens of minutes)"
	@echo "make gpu-targets  compile every kernel for GPUs from sm_80 to gfx942, down to machine code (tens of minutes)"
	@echo "make check   lint, formatting and types"
	@echo "make docs    build the documentation site into build/site; warnings are errors"
	@echo "make format  apply the formatter and safe lint fixes"
	@echo "make bench   time and memory of the chunked form against length (CPU, minutes)"
	@echo "make clean   remove $(VENV), .cache/ and build/"
	@echo "The command sympow is installed as $(BIN)/sympow."

# --no-compile: Python compiles a module when it is first imported, and most modules of the dependencies never are.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(ARGS)

forms: $(INSTALLED)
	$(BIN)/python examples/three_forms.py $(ARGS)

# One thread each: workers with their own thread pools would fight over the cores. Bytecode is written in any case:
# tests start hundreds of processes, each of which would compile the package again.
TESTING := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Three workers keep two cores busy, since some tests wait for a process that they started. tests/conftest.py says which
# files are a group.
test: $(INSTALLED)
	$(TESTING) $(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" --durations 10 $(ARGS)

# A file's tests run in one worker, which then makes their fixtures once; tests/conftest.py puts the longest files first.
# Five workers for two cores: most of these tests wait for processes.
test-slow: $(INSTALLED)
	$(TESTING) $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder -m slow --durations 20 $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python tests/soak.py $(ARGS)

resolve: $(INSTALLED)
	$(BIN)/python -m pytest -m index tests/test_constraints.py

# The tests that touch other libraries, without constraints.txt. The newest torch brings gigabytes of CUDA on Linux.
NEWEST := build/newest
newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade \
		--upgrade-strategy eager $(if $(TORCH),torch==$(TORCH)) -e '.[dev]'
	$(NEWEST)/bin/python -m pip freeze --exclude-editable
	$(TESTING) $(NEWEST)/bin/python -m pytest -n 3 --dist loadgroup -m "not slow" \
		tests/hf tests/convert tests/serving tests/data tests/test_cli.py $(ARGS)

triton-versions: $(INSTALLED)
	$(BIN)/python tests/kernels/releases.py

gpu-targets: $(INSTALLED)
	TRITON_INTERPRET=0 $(BIN)/python tests/kernels/targets.py --machine-code $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python docs/assemble.py
	$(BIN)/zensical build --clean --strict $(ARGS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/length_scaling.py --out build/length_scaling_cpu.json

clean:
	rm -rf $(VENV) .cache build
