# Everything a machine needs is made on first use: `make run` trains, `make test` runs the whole suite.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin

.PHONY: run test fast check docs bench simulate mutants clean

run: $(VENV)/.run
	$(BIN)/python -m runner $(ARGS)

# Slow tests (killing, several processes, a real Slurm where it is installed) included, on two workers.
test: $(VENV)/.test
	$(BIN)/python -m pytest -m "" -n 2 $(ARGS)

# About a minute: no killing, no Slurm.
fast: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run launch/*.sh; else echo "shellcheck is not installed: shell scripts were not checked"; fi

# The documentation site, in build/site; any warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# Ratios against peers and limits; run it on an otherwise idle machine. ARGS="loader" runs one of them.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

# The runner's code on simulated machines: docs/simulation.md. ARGS="--scenario jobs --minutes 10"
simulate: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m simulation $(ARGS)

# Small random changes of the code, each of which a test should notice: docs/mutants.md. Hours; it resumes.
mutants: $(VENV)/.test
	PYTHONPATH=tests nice -n 19 $(BIN)/python -m mutants $(ARGS)

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.docs: $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
