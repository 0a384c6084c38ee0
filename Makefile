# Everything a machine needs is made on first use: `make run` trains, `make test` runs the whole suite.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin

.PHONY: run test fast check bench clean

run: $(VENV)/.run
	$(BIN)/python -m runner $(ARGS)

# Slow tests (killing, several processes, a real Slurm where it is installed) included, on two workers.
test: $(VENV)/.test
	$(BIN)/python -m pytest -m "" -n 2 $(ARGS)

# What `pytest -q` runs: seconds, no killing, no Slurm.
fast: $(VENV)/.test
	$(BIN)/python -m pytest -q $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ratios against peers and limits; run it on an otherwise idle machine. ARGS="loader" runs one of them.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
