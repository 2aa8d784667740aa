# make serve   set up, fetch the default model, serve it over two stages on 127.0.0.1:30000
# make test    set up, then lint, types and tests
# make demo    see stages part whose host caches were sized in GB, and stay together when they agree
#
# Everything lives in .venv; the model in ~/.cache/lockstep. FLAGS="--pp-size 3" changes how `serve` serves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
FLAGS ?= --pp-size 2
BIN := .venv/bin

.PHONY: serve test lint pure demo clean

serve: .venv/serve.done
	@exec $(BIN)/python server.py $(FLAGS)

test: lint
	$(BIN)/python -m pytest

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests that need no process and no model: seconds.
pure: .venv/test.done
	$(BIN)/python -m pytest -m "not process and not model"

demo: .venv/demo.done
	$(BIN)/python examples/demo.py

.venv/bin/pip:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --upgrade "pip>=25"

.venv/serve.done: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --constraint constraints.txt --editable .
	@touch $@

.venv/test.done: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --constraint constraints.txt --editable ".[test]"
	@touch $@ .venv/serve.done

.venv/demo.done: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --constraint constraints.txt --editable ".[demo]"
	@touch $@ .venv/serve.done

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
