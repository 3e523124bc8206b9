# make demo   train a tiny GPT-OSS on this machine, from nothing to a picture
# make test   run the tests
# make setup  only make the environment (.venv); every other target does it when needed
# make check  ruff, pyright, import-linter

SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
# The newest environment is the one whose requirements, project file and recipe it was made from.
INPUTS := requirements/cpu.txt pyproject.toml tools/find_python.sh Makefile

.PHONY: help setup demo test test-quick check clean

help:
	@sed -n 's/^# \(make .*\)/  \1/p' Makefile

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@tools/make_venv.sh $(VENV)
	@touch $(STAMP)

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo.sh

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
