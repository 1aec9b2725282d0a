# Everything starts from a fresh clone with Python >= 3.10 and git; nothing outside .venv is touched.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One thread a process: the demo and the tests run many processes on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint docs pytest test-lowest test-arm64 fuzz bundles clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      a coordinator and ten devices on this machine: Lattice, FedAvg and training alone compared"
	@echo "make test      ruff, mypy --strict, import contracts, the docs' links, pytest"
	@echo "make lint      ruff, mypy --strict and import contracts only"
	@echo "make docs      the docs as a site in build/site; a broken link fails"
	@echo "make test-lowest  some tests with the lowest versions of dependencies that pyproject.toml allows (Python 3.10 to 3.12)"
	@echo "make test-arm64  the base install on Debian arm64 under qemu-user (as root; about half an hour the first time)"
	@echo "make fuzz      a million mutated payloads through every codec and the container, then two minutes each guided by"
	@echo "               coverage (MUTATIONS=n SECONDS_GUIDED=s for others)"
	@echo "make bundles   rebuild the packaged bundles (needs torch: uses the test environment)"
	@echo "make clean     remove .venv and caches"

demo: $(VENV)/.demo
	$(BIN)/maskfleet demo $(ARGS)

# pytest runs even when lint fails, so that one fault does not hide the other.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory --keep-going lint docs pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Not with --quiet: mkdocs then counts no warnings.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

pytest: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses logical --dist loadfile $(ARGS)

# pip takes the newest versions; uv can take the lowest. What they need in turn is the newest.
LOWEST = build/lowest/bin
LOWEST_TESTS = codecs_sets codecs_fuse codecs_values lattice client cli logs store trainers bench \
	compaction_personal artifacts compaction_suite api_rounds api_devices api_manage metrics dashboard
test-lowest:
	$(PYTHON) -m venv build/lowest
	$(LOWEST)/python -m pip install --quiet uv torch==2.13.0
	$(LOWEST)/uv pip compile --quiet --resolution lowest-direct --python $(LOWEST)/python --extra server --extra bench \
		--extra meters --extra fast pyproject.toml --output-file build/lowest/versions.txt
	$(LOWEST)/python -m pip install --quiet -r build/lowest/versions.txt 'pytest>=8.2' 'hypothesis>=6.100'
	$(LOWEST)/python -m pip install --quiet --no-deps -e .
	$(LOWEST)/python -m pytest $(LOWEST_TESTS:%=tests/test_%.py) $(ARGS)

# Not part of `make test`: it needs root and qemu-user-static, debootstrap, proot of the system's packages.
test-arm64: $(VENV)/.demo
	nice -n 10 tests/arm64/run.sh $(abspath $(BIN))/python $(ARGS)

MUTATIONS ?= 1000000
SECONDS_GUIDED ?= 120
GUIDED = $(shell $(BIN)/python -c 'import atheris' 2>/dev/null && echo --atheris $(SECONDS_GUIDED))
FUZZ = $(BIN)/python fuzz/fuzz_codecs.py
# Coupled payloads take three times as long: a tenth as many. Guided by coverage where atheris has a wheel.
fuzz: $(VENV)/.test
	$(FUZZ) container --mutations $(MUTATIONS) $(GUIDED)
	$(FUZZ) coupling --mutations $$(( $(MUTATIONS) / 10 )) $(GUIDED)
	$(FUZZ) codecs --mutations $(MUTATIONS) $(GUIDED)

bundles: $(VENV)/.test
	for name in digits digits-wide har; do $(BIN)/python -m edge_bench.pretrain $$name benchmarks/edge_bench/bundles/$$name || exit 1; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing maskfleet into $(VENV) (about a minute)"
	$(PIP) -e '.[server,bench]'
	@touch $@

# torch by its exact pin and first: a range would bring a GPU build of several GB.
$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing torch and the development tools into $(VENV) (about two minutes)"
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
