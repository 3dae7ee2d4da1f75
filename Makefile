# Each target installs what it needs into .venv. It requires Python 3.11 or newer with `venv`, and
# uses the first one it finds; `make PYTHON=/path/to/python test` selects another.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; \
	done)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
# Each file runs in one worker, since the blocks of a document build on each other.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile
# Most of the time is compilation, so XLA optimizes little, except in tests of cost.
QUICKLY = JAX_DISABLE_MOST_OPTIMIZATIONS=true $(PYTEST)
PACKAGE := tests --ignore=tests/project --ignore=tests/oracles
# What tests of steps find in the plain forms, without `optax_lossscale/_xla`. In one process: to
# start two takes as long as the tests.
PLAIN = OLS_TESTS_WITHOUT_XLA=1 $(QUICKLY) -n 0 -m "not exhaustive" -k "derivative or not slow" \
  tests/guard tests/loss_scale/test_scaling.py
# It sees every Python that pyenv has installed.
NOX = PYENV_VERSION="$${PYENV_VERSION:-$$(pyenv versions --bare 2>/dev/null | paste -sd: -)}" \
  $(RUN) -m nox

.PHONY: help demo bench aot quick test test-pages test-all oracles docs fidelity matrix release trial tagged check lint pins clean
.DELETE_ON_ERROR:

# The table of BUILD.md, up to the first semicolon of each line.
help:
	@sed -n 's/^| `\(make [a-z-]*\)` | \([^;|]*\).*/\1: \2/p' BUILD.md

# Says what it will install before it starts. `make -q` finds out whether anything is missing.
demo:
	@$(MAKE) -s -q $(VENV)/examples.installed || \
	  echo "Installs 0.9 GB into $(VENV), then trains a word model"
	@$(MAKE) -s $(VENV)/examples.installed
	$(RUN) examples/word_model.py --output output/word_model.png

# `make bench BENCH="--size small --rounds 3"` is quick; `make bench BENCH=--help` lists all options.
bench: $(VENV)/bench.installed
	$(RUN) -m benchmarks.run --output output/benchmarks $(BENCH)

# Compiles for GPUs and TPUs, which need not be present, counts what the programs do, and tests the
# counts.
aot:
	$(MAKE) VENV=.venv-aot .venv-aot/aot.installed
	.venv-aot/bin/python -m pytest -m "" tests/project/test_compiled.py
	.venv-aot/bin/python -m benchmarks.aot --output output/aot $(AOT)

# For the inner loop: covers all but a few branches of the package.
quick: $(VENV)/test.installed
	$(QUICKLY) $(PACKAGE)

# The package: its tests, its doctests and README's blocks, then its plain forms.
test: $(VENV)/test.installed
	$(QUICKLY) -m "not exhaustive" $(PACKAGE) optax_lossscale README.md
	$(PLAIN)

# What is around it: the pages, the examples, the benchmarks and the packaging.
test-pages: $(VENV)/test.installed
	$(QUICKLY) -m "not exhaustive" tests/project BUILD.md docs

# Both, with the exhaustive tests (every optimizer of Optax, instead of a selection) and all
# optimizations of XLA.
test-all: $(VENV)/test.installed
	$(PYTEST) -m ""

# Compares the library with torch, and trains in FlowJAX, OTT and Optimistix, which are too large for
# the test group.
oracles: $(VENV)/oracles.installed
	$(PYTEST) -m "" tests/oracles

# Builds the site in output/docs, with warnings as errors, then tests its links, pictures and reference.
docs: $(VENV)/docs.installed
	$(RUN) -m sphinx -W --keep-going -n -E -b html docs output/docs
	$(RUN) -m pytest -m "" tests/project/test_docs_site.py

# Trains in every format, with and without loss scaling, and rewrites the marked parts of six pages.
fidelity: $(VENV)/test.installed
	$(RUN) -m benchmarks.fidelity --pages docs --results benchmarks/results $(FIDELITY)

# Tests the oldest and the newest supported versions, on every Python that it finds, including all
# versions that pyenv has installed.
matrix: $(VENV)/matrix.installed
	$(NOX) $(MATRIX)

# Builds the sdist and the wheel in dist/, from a clean checkout at the version's tag, in an
# environment with nothing else.
release: tagged $(VENV)/matrix.installed
	rm -rf dist
	$(NOX) --session build

# Trains with the wheel in dist/, in an empty environment on every Python that it finds.
trial: $(VENV)/matrix.installed
	$(NOX) --session trial $(TRIAL)

# Checks that the commit has the tag of its version, and that there are no uncommitted changes.
tagged:
	git tag --points-at HEAD | grep -Fx "v$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' optax_lossscale/__init__.py)"
	git status --porcelain | (! grep .)

# The tests of `make test` and `make test-pages`, with coverage of the package.
check: lint
	$(QUICKLY) -m "not exhaustive" --cov
	$(PLAIN)

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

# Regenerates constraints.txt with the newest versions, for each Python, that all groups allow.
pins: $(VENV)/pins.installed
	$(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --fork-strategy requires-python --no-annotate --custom-compile-command "make pins" \
	  --all-extras $(addprefix --group ,aot bench check docs matrix oracles pins) \
	  --output-file constraints.txt pyproject.toml

clean:
	rm -rf $(VENV) .venv-aot .nox build dist output .pytest_cache .ruff_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
