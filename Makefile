# make demo   train a tiny GPT-OSS on this machine, from nothing to a picture (ARGS="--run.seed=3" goes to its commands)
# make test   run the tests (ARGS="-k packing" goes to pytest)
# make setup  only make the environment (.venv); every other target does it when needed
# make check  ruff, pyright, import-linter

SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
# The newest environment is the one whose requirements, project file and recipe it was made from.
INPUTS := requirements/cpu.txt pyproject.toml tools/find_python.sh tools/make_venv.sh Makefile

.PHONY: help setup demo test test-quick check clean

help:
	@sed -n 's/^# \(make .*\)/  \1/p' Makefile

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@tools/make_venv.sh $(VENV)
	@touch $(STAMP)

demo: $(STAMP)
	@tools/demo.sh $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

# Everything that starts no engine: under two minutes.
test-quick: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

clean:
	rm -rf $(VENV)
