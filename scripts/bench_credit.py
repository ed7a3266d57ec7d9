"""What reading credit from features costs: the share of a GRPO step, on the testbed's hard problems.

Trains with credit for a few steps and times, within every step, what the rule takes (a forward pass of the reference,
encoding, scores, shaping) and the whole step; both in one process, so that other work on the machine slows both.
Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def main(arguments: list[str] | None = None) -> int:
    """Print the median share and its quartiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="the folder reference of run_remedies.py")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after one that is not (default: 8)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rule, whole = measure(options.reference, options.steps, options.threads)
    share = rule / (whole - rule)
    low, middle, high = np.quantile(share, [0.25, 0.5, 0.75])
    print(f"step without credit {np.median(whole - rule):.2f} s, credit {np.median(rule):.2f} s")
    print(f"credit adds {middle:.1%} (quartiles {low:.1%} to {high:.1%}, {len(share)} steps)")
    print(json.dumps({"name": "credit", "ratio": round(1 + middle, 3), "quartiles": [round(low, 3), round(high, 3)]}))
    return 0


def measure(reference: Path, steps: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the rule and of the whole step, (steps,) each."""
    import torch
    from transformers import LlamaForCausalLM, TrainerCallback

    import tsae
    from tsae.rl.trl import FeatureCredit, FeatureGRPOTrainer
    from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers

    torch.set_num_threads(threads)
    base = tsae.testbed.series().base
    credit = FeatureCredit(base, reference / "sae", reference / "credit")
    rule: list[float] = []
    whole: list[float] = []

    def timed(rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        started = time.perf_counter()
        found = credit(rows, batch, group_size)
        rule.append(time.perf_counter() - started)
        return found

    class Clock(TrainerCallback):
        """Times whole steps, generation included."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            whole.append(time.perf_counter() - self.started)

    problems = tsae.testbed.generate_problems("hard", 8 * (steps + 1), 0, "train")
    trainer = FeatureGRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(base.path, dtype="float32"),
        processing_class=tsae.testbed.make_tokenizer(),
        reward_funcs=right_answers,
        train_dataset=data_set(problems),
        callbacks=[Clock()],
        credit=timed,
        args=grpo_on_cpu(reference / "trainer", prompts=8, samples=16, max_steps=steps + 1, learning_rate=1e-4),
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train()
    return np.array(rule[1:]), np.array(whole[1:])


if __name__ == "__main__":
    sys.exit(main())
