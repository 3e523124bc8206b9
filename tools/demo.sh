#!/usr/bin/env bash
# The demo: warm start a tiny GPT-OSS, then reinforcement learning with a calculator tool, on this machine's CPU.
# Every argument goes to both commands, for example: tools/demo.sh --run.seed=3 configs/deterministic.toml. Only --run.id, --run.dir and
# --run.name are taken out, because both commands must agree on them; a relative --run.dir starts from the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
if ! command -v gptoss >/dev/null; then
  echo "gptoss is neither in .venv/bin nor on PATH. Run make setup first, or make demo, which does it." >&2
  exit 1
fi

id=$(date +%Y%m%d-%H%M%S) dir=runs name=demo
rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --run.id | --run.dir | --run.name)
      if [ $# -lt 2 ]; then echo "$1 has no value. Example: $1=mine" >&2; exit 2; fi
      set -- "$1=$2" "${@:3}"
      continue ;;
    --run.id=?*) id=${1#*=} ;;
    --run.dir=?*) dir=${1#*=} ;;
    --run.name=?*) name=${1#*=} ;;
    --run.id= | --run.dir= | --run.name=) ;;  # empty: the default
    *) rest+=("$1") ;;
  esac
  shift
done

common=(configs/tiny.toml configs/demo.toml --run.dir="$dir" --run.id="$id")
gptoss sft "${common[@]}" --run.name="$name-sft" "${rest[@]}"
gptoss train "${common[@]}" --run.name="$name" --init "$dir/$name-sft-$id" "${rest[@]}"
