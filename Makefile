# Everything a machine needs is made on first use: `make run` trains, `make test` shows each promise once.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SHARD ?=
WHEELS ?=
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -q -n 2
# pip's own messages, without the lines that tell a newcomer nothing.
SHOW = | sed -u -n -E '/^(Collecting|Processing|Downloading|Building|Installing)/ s/^(.{,100}).*/  \1/p'
SHELL = bash
.SHELLFLAGS = -o pipefail -c

.PHONY: run test fast test-all check docs bench gpu gpu-wheels simulate mutants clean

run: $(VENV)/.run
	$(BIN)/python -m runner $(ARGS)

# Unmarked tests. Three processes, since some tests wait; a file stays in one process, and so what its tests share.
fast: $(VENV)/.test
	@echo "make fast: every fast test; a minute and a half on two quiet cores"
	$(PYTEST) -n 3 --dist loadfile -m "not promise and not slow" $(ARGS)

# The fast tests, and each promise once for real: processes are killed, a Slurm is started where it is installed.
test: $(VENV)/.test
	@echo "make test: the fast tests, and each promise once for real; 5 minutes on two quiet cores"
	$(PYTEST) --dist loadgroup -m "promise or not slow" $(ARGS)

# Everything; SHARD=2/4 is the second quarter of it.
test-all: $(VENV)/.trainers
	@echo "make test-all: $(if $(SHARD),shard $(SHARD) of everything; 8 minutes,everything; half an hour) on two quiet cores"
	$(PYTEST) --dist loadgroup -m "" $(if $(SHARD),--shard $(SHARD)) $(ARGS)

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

# What only a GPU can show, in six minutes: docs/project/benchmarks.md. ARGS="speed saving" runs some of its parts. By default with
# the packages of $(VENV); with WHEELS=build/wheels, from `make gpu-wheels`, with those of $(PYTHON), its torch among them.
gpu: $(if $(WHEELS),build/site,$(VENV)/.test)
	$(if $(WHEELS),PYTHONPATH=$(CURDIR)/build/site $(PYTHON),$(BIN)/python) -m benchmarks gpu $(ARGS)

build/site: $(WHEELS)
	$(PYTHON) -m pip install --quiet --upgrade --no-index --no-deps --target $@ $(WHEELS)/*.whl
	@touch $@

# For a machine with CPython 3.12 and no network. Pip takes the name of a platform as it is.
LINUX = manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64
gpu-wheels:
	$(PYTHON) -m pip wheel -c constraints.txt --no-deps -w build/wheels $$(grep ^antlr4 benchmarks/gpu/wheels.txt) $(SHOW)
	$(PYTHON) -m pip download -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(addprefix --platform ,$(LINUX)) --find-links build/wheels -d build/wheels -r benchmarks/gpu/wheels.txt $(SHOW)

# The runner's code on simulated machines: docs/project/simulation.md. ARGS="--scenario jobs --minutes 10"
simulate: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m simulation $(ARGS)

# Small random changes of the code, each of which a test should notice: docs/project/mutants.md. Hours; it resumes.
mutants: $(VENV)/.test
	PYTHONPATH=tests nice -n 19 $(BIN)/python -m mutants $(ARGS)

$(VENV)/.run: pyproject.toml exactdata/pyproject.toml constraints.txt
	@echo "creating $(VENV) with $$($(PYTHON) --version); torch and the rest take 1 to 3 minutes and 1.1 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ./exactdata -e . $(SHOW)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "installing what the tests need into $(VENV): about a minute"
	$(BIN)/python -m pip install -c constraints.txt -e ./exactdata -e ".[test]" $(SHOW)
	@touch $@

# torchtitan without its requirements, of which one is an older version of what other tests use.
$(VENV)/.trainers: $(VENV)/.test
	@echo "installing the trainers that docs/trainers.md is about into $(VENV): a minute"
	$(BIN)/python -m pip install -c constraints.txt -e ./exactdata -e ".[trainers]" $(SHOW)
	$(BIN)/python -m pip install -c constraints.txt --no-deps torchtitan $(SHOW)
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	@echo "installing what the site needs into $(VENV): half a minute"
	$(BIN)/python -m pip install -c constraints.txt -e ./exactdata -e ".[docs]" $(SHOW)
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "installing the peers that are measured into $(VENV)"
	$(BIN)/python -m pip install -c constraints.txt -e ./exactdata -e ".[bench]" $(SHOW)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info exactdata/build exactdata/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
