#!/usr/bin/env bash
# Print the path of a Python this project runs on: 3.12 first (the tested one), then 3.13; on PATH, then what pyenv, uv or conda keep.
# Prints nothing else; when there is none it says on standard error what to do and ends with 1.
set -u
: "${HOME:=/}"

fits() {  # path wanted-minor
  [ -x "$1" ] && "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, $2))" 2>/dev/null
}

for minor in 12 13; do
  for candidate in \
    "$(command -v python3.$minor 2>/dev/null)" "$(command -v python3 2>/dev/null)" "$(command -v python 2>/dev/null)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor*/bin/python \
    "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-3.$minor*/bin/python3 \
    "$HOME"/miniconda3/envs/*/bin/python "$HOME"/miniforge3/envs/*/bin/python /opt/python/3.$minor*/bin/python
  do
    if [ -n "$candidate" ] && fits "$candidate" "$minor"; then
      echo "$candidate"
      exit 0
    fi
  done
done

cat >&2 <<'MESSAGE'
No Python 3.12 or 3.13 was found (looked on PATH and in pyenv, uv and conda). Megatron-Core 0.19 needs at least 3.12.
Install one, then run make again. One of these will do:
    Ubuntu 24.04, Debian 13:   sudo apt install python3.12-venv   (Debian 13: python3.13-venv)
    pyenv:                     pyenv install 3.12
    uv:                        uv python install 3.12
    conda:                     conda create -n py312 python=3.12
MESSAGE
exit 1
