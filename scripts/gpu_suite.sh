#!/usr/bin/env bash
# What a GPU can tell: the tests that need one, then the benches. Writes docs/measured-gpu.md.
#
#     scripts/gpu_suite.sh                    # one GPU or several; about 20 minutes on an H100
#     scripts/gpu_suite.sh --parts train      # only the training step
#
# Needs tsae with the packages of `make`, and a build of torch for the GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=PASSIVE
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_suite: torch sees no GPU on this machine" >&2
    exit 2
fi
"$python" -m pytest -m gpu tests/app/test_gpu.py
"$python" scripts/bench_gpu.py --to docs/measured-gpu.md "$@"
