"""Flatten GSM8K's example_model_solutions.jsonl into one trajectory a line, for `tsae rollouts import`.

The file (https://github.com/openai/grade-school-math, MIT) holds, for every test problem, the solutions of four
models (6B and 175B, finetuning and verification) with whether each is correct.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tyro

from tsae.base.files import write_text
from tsae.errors import TsaeError

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@dataclass(frozen=True)
class Flatten:
    """Flatten GSM8K model solutions into one trajectory a line."""

    solutions: Path
    """example_model_solutions.jsonl."""
    to: Path
    """JSON lines to write: problem_id, prompt, response, correct, policy, answer."""
    problems: int = 300
    """The first this many problems."""


def trajectories(solutions: Path, problems: int | None = None) -> Iterator[dict[str, Any]]:
    """Every model's solution of every problem, or of the first ones.

    Raises:
        TsaeError: where the file is missing.
    """
    if not solutions.is_file():
        raise TsaeError("no such file", where=solutions, fix="Give GSM8K's example_model_solutions.jsonl.")
    with solutions.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, problems)):
            record = json.loads(line)
            for model in MODELS:
                yield {
                    "problem_id": f"gsm8k-test-{number:04d}",
                    "prompt": record["question"],
                    "response": record[model]["solution"],
                    "correct": record[model]["is_correct"],
                    "policy": model,
                    "answer": record["ground_truth"].rpartition("A:")[2].strip(),
                }


def main() -> None:
    options = tyro.cli(Flatten)
    rows = list(trajectories(options.solutions, options.problems))
    write_text(options.to, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"wrote {options.to}: {len(rows)} trajectories")


if __name__ == "__main__":
    main()
