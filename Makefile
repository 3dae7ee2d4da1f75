# Each target sets up what it needs in .venv, from a Python 3.11 or newer with its standard `venv`.
# `make PYTHON=/path/to/python test` chooses another one than the first that is found.

PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; \
	done)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
# A whole file goes to one worker: the blocks of a document build on each other.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile

.PHONY: demo bench test oracles docs fidelity matrix mutants check lint pins clean
.DELETE_ON_ERROR:

demo: $(VENV)/examples.installed
	$(RUN) examples/digits.py --output output/digits.png

# `make bench BENCH="--size small --rounds 3"` is quick; `--help` in there lists all options.
bench: $(VENV)/bench.installed
	$(RUN) -m benchmarks.run --output output/benchmarks $(BENCH)

test: $(VENV)/test.installed
	$(PYTEST)

# Holds the library against live libraries that are too large for the test group: torch.
oracles: $(VENV)/oracles.installed
	$(PYTEST) tests/oracles

# The site, in output/docs, with warnings as errors; then its links, its pictures and its reference.
docs: $(VENV)/docs.installed
	$(RUN) -m sphinx -W --keep-going -n -E -b html docs output/docs
	$(RUN) -m pytest tests/test_docs_site.py

# Trains in float32, float16 and float16 with loss scaling, and writes docs/training.md anew.
fidelity: $(VENV)/test.installed
	$(RUN) -m benchmarks.fidelity --output output/fidelity --write docs/training.md $(FIDELITY)

# The oldest and the newest versions that are supported, on every Python that is found.
matrix: $(VENV)/check.installed
	$(RUN) tools/matrix.py $(MATRIX)

# Breaks the package in every small way and shows that some test fails each time; an hour or two.
mutants: $(VENV)/test.installed
	$(RUN) tools/mutants.py $(MUTANTS)

check: lint
	$(PYTEST) --cov

lint: $(VENV)/check.installed
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)

$(VENV)/%.installed: pyproject.toml $(VENV)/pip.installed
	@echo "Installing the group '$*' into $(VENV)"
	@$(PIP) install --quiet --constraint constraints.txt --group $* --editable .
	@touch $@

$(VENV)/pip.installed: constraints.txt
	@if [ -z "$(PYTHON)" ] || \
	  ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "Python 3.11 or newer is needed, found: '$(PYTHON)'. Name one: make PYTHON=python3.12" >&2; \
	  exit 1; \
	fi
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip
	@touch $@

# Writes constraints.txt anew, with the newest versions that all groups together allow.
pins:
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --editable . $$($(RUN) -c 'import tomllib; \
	  groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	  print(*(f"--group {name}" for name in groups))')
	{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude-editable | grep -v '^setuptools='; } \
	  > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) .matrix build dist output .pytest_cache .ruff_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
