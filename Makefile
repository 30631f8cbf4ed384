# Every target creates .venv and installs the project there if that has not been done yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGE := $(VENV)/.package
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo quick test test-all coverage golden check format lint types clean

# The package, with what it needs to run.
$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofed needs Python 3.11 or newer (set PYTHON=...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# And the developers' tools.
$(READY): $(PACKAGE)
	$(PIP) -e '.[dev]'
	touch $@

install: $(READY)

demo: $(PACKAGE)
	$(BIN)/protofed demo

# For editing: five methods instead of all, and the small unit tests (tests/conftest.py says which).
quick: lint types
	$(BIN)/pytest --quick -n auto --dist worksteal

test: $(READY)
	$(BIN)/pytest -n auto --dist worksteal

test-all: $(READY)
	$(BIN)/pytest -n auto --dist worksteal -m 'slow or not slow'

# Lines and branches that the tests reach, without those that only a subprocess reaches.
coverage: $(READY)
	$(BIN)/pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered --cov-report=html
	@echo 'coverage: see htmlcov/index.html'

# Records tests/golden anew, at a commit whose numbers are right.
golden: $(READY)
	cd tests && PYTHONPATH=../src:. ../$(BIN)/python -m golden.record

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# Types are checked on one core meanwhile.
check: lint
	$(MAKE) --jobs=2 types test

# Writes what the documents take from the code.
.PHONY: docs site
docs: $(READY)
	$(BIN)/python tools/method_docs.py

# The documentation as a site, in site/. Warnings, such as of a link that leads nowhere, are errors. Search needs a
# server: python -m http.server -d site
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'site: open site/index.html'

clean:
	rm -rf $(VENV) build dist site htmlcov .coverage .mypy_cache .pytest_cache .ruff_cache
