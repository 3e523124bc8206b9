#!/usr/bin/env bash
# Rewrite requirements/cpu.txt from the environment in .venv, keeping the file's opening comment.
set -euo pipefail
cd "$(dirname "$0")/.."
file=requirements/cpu.txt
header=$(grep '^#' "$file")
{
  printf '%s\n' "$header"
  .venv/bin/python -m pip freeze --exclude-editable | grep -v -i -E '^(pip|megatron-gptoss)([=@ ]|$)'
} > "$file.tmp"
mv "$file.tmp" "$file"
