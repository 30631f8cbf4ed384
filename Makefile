# Every target creates .venv and installs the project there if that has not been done yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo quick test test-all coverage golden check format lint types clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofed needs Python 3.11 or newer (set PYTHON=...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(READY)

demo: $(READY)
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

check: lint types test

# Writes what the documents take from the methods' classes.
.PHONY: docs
docs: $(READY)
	$(BIN)/python tools/method_docs.py

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .mypy_cache .pytest_cache .ruff_cache
