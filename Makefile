# `make demo` and `make test` work from a fresh clone. They need python3 (3.11 or
# newer) and cargo; everything else goes into .venv and target. A second call does
# only what changed.

VENV := .venv
PYTHON := $(VENV)/bin/python
TOOLS := $(VENV)/installed
EXTENSION := python/k3rs/_k3rs.abi3.so
RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -name '*.rs')
PYTHON_SOURCES := benches examples python tests/python tools

# The interpreter that PyO3 builds for. Set here for all of cargo's calls, because
# a change of it makes them build again.
export PYO3_PYTHON := $(CURDIR)/$(PYTHON)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
# maturin calls pip too, and pip lists every package that is there already.
export PIP_QUIET := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test build lint format prerequisites
.PHONY: rust-format rust-lint rust-test rust-bench python-lint python-types python-test

help:
	@echo "make demo    generate text with the model that ships with the repository"
	@echo "make test    every test and every gate"
	@echo "make lint    formatting, lints and types only"
	@echo "make build   the extension, into $(VENV)"
	@echo "make format  format all sources"

demo: $(EXTENSION)
	$(PYTHON) -m k3rs generate --prompt "And it came to pass in those days" \
		--max-tokens 64 --temperature 0.7 --top-p 0.9 --seed 1

# The Python tests come last, so that their closing line ends the output.
test: lint rust-test rust-bench python-test

lint: rust-format rust-lint python-lint python-types

build: $(EXTENSION)

format: $(TOOLS)
	cargo fmt
	$(PYTHON) -m ruff check --fix $(PYTHON_SOURCES)
	$(PYTHON) -m ruff format $(PYTHON_SOURCES)

rust-format: | prerequisites
	cargo fmt --check

rust-lint: $(TOOLS)
	cargo clippy --quiet --all-targets -- -D warnings
	cargo clippy --quiet --all-targets --features python -- -D warnings

# Without the feature `python`: an extension module leaves Python's symbols to the
# interpreter that loads it, so a test program with it would not link.
rust-test: | prerequisites
	cargo test --quiet

rust-bench: | prerequisites
	cargo bench --quiet --bench '*' -- --test

python-lint: $(TOOLS)
	$(PYTHON) -m ruff check $(PYTHON_SOURCES)
	$(PYTHON) -m ruff format --check $(PYTHON_SOURCES)

# The hand-written stub is compared with the compiled module.
python-types: $(EXTENSION)
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest --mypy-config-file pyproject.toml k3rs._k3rs

python-test: $(EXTENSION)
	$(PYTHON) -m pytest

$(EXTENSION): $(TOOLS) $(RUST_SOURCES)
	$(PYTHON) -m maturin develop --release --quiet
	@touch $@

$(TOOLS): pyproject.toml | prerequisites
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --upgrade "pip>=25.1"
	$(PYTHON) -m pip install --group dev
	@touch $@

prerequisites:
	@command -v cargo >/dev/null \
	  || { echo "error: cargo is missing; install Rust 1.89 or newer" >&2; exit 1; }
	@cargo --version | { read -r _ version _; printf '%s\n' 1.89 "$$version" | sort -V -C; } \
	  || { echo "error: $$(cargo --version) is too old; install Rust 1.89 or newer" >&2; exit 1; }
	@command -v python3 >/dev/null \
	  || { echo "error: python3 is missing; install Python 3.11 or newer" >&2; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$(python3 --version) is too old; install Python 3.11 or newer" >&2; exit 1; }
	@python3 -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: python3 has no venv module; install it (package python3-venv)" >&2; exit 1; }
