#!/usr/bin/env bash
# The demo: warm start a tiny GPT-OSS, then reinforcement learning with a calculator tool, on this machine's CPU.
# Every argument goes to both commands, for example: tools/demo.sh --run.seed=3
set -euo pipefail
cd "$(dirname "$0")/.."
id=$(date +%Y%m%d-%H%M%S)
configs=(configs/tiny.toml configs/demo.toml)

gptoss sft "${configs[@]}" --run.name=demo-sft --run.id="$id" "$@"
gptoss train "${configs[@]}" --run.name=demo --run.id="$id" --init "runs/demo-sft-$id" "$@"
