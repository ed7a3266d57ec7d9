#!/usr/bin/env bash
# What a GPU can tell, within the minutes that there are: its tests, then the benches in the order of their worth.
#
#     scripts/gpu_suite.sh --wheels                         # once, with network: puts 14 wheels into .wheels/
#     scripts/gpu_suite.sh --minutes 8 --out runs/gpu       # on the machine with the GPU; needs no network
#     scripts/gpu_suite.sh --minutes 8 --tiny --device cpu  # a rehearsal without a GPU
#
# Needs Python 3.11 or later with torch, transformers, pandas, pyarrow, h5py, scipy, einops, safetensors, jinja2, pyyaml,
# lazy_loader, filelock, fsspec, tqdm and pytest. What else is needed comes as wheels in .wheels/, a folder that git
# ignores: copy it along. Those of pydantic-core and xxhash are for Python 3.12, and any other leaves them out. $PYTHON is
# the interpreter; by default that of .venv, or python3.
#
# Writes into --out (by default $OUT, or runs/gpu) as results come: the page measured-gpu.md for docs/, its numbers in
# rows.jsonl, and log.txt. A test or bench that fails or takes too long is reported on the page, and the next one runs.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3

if [ "${1:-}" = --wheels ]; then
    pinned="$(mktemp)"
    trap 'rm -f "$pinned"' EXIT
    for name in tyro docstring-parser typeguard typing-extensions pydantic pydantic-core annotated-types typing-inspection \
        xxhash threadpoolctl plotly narwhals accelerate psutil; do
        sed -n "/^$name==/,/[^\\\\]\$/p" requirements.lock # a version with the hashes of its files
    done > "$pinned"
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --require-hashes \
        --dest .wheels --requirement "$pinned"
    exit
fi

# Compiled modules cannot be imported from a wheel: it is unpacked first.
unpacked="$(mktemp -d)"
version="$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
for wheel in "$PWD"/.wheels/*-none-any.whl "$PWD"/.wheels/*-{"$version",abi3}-*.whl; do
    [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$unpacked"
done
PYTHONPATH="$PWD:$unpacked${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$python" scripts/gpu_suite.py "$@"
