"""TRL's own trainer, fed the responses of a run in place of sampling.

Its loss, optimiser and clipping act on them. A sample that is left out has no token that counts, or no advantage.
`tsae.attribution.path.train_on` is compared with it. `train_with_trl` reads the log of a run on the testbed;
`KeepingTrainer` keeps the batches of any run, and `FedTrainer` trains on them again.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

import tsae
from tsae.attribution.order import Update
from tsae.attribution.path import Replayed
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.testbed import LEVELS
from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers
from tsae.testbed.tokenizer import PAD, TOKEN_IDS

_LEVELS = list(LEVELS)


class KeepingTrainer(GRPOTrainer):
    """TRL's trainer. `kept` has its batches, the log-probabilities of their tokens, and the seconds of sampling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, Any] = {"batches": [], "logs": [], "sampling": 0.0}

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        began = time.monotonic()
        batch = super()._generate_and_score_completions(inputs)
        self.kept["sampling"] += time.monotonic() - began
        # A tensor a sample: TRL shuffles the batch with all that is in it.
        return {**batch, "level": torch.tensor([_LEVELS.index(row["level"]) for row in inputs])}

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.kept["batches"].append(super()._prepare_inputs(inputs))
        return self.kept["batches"][-1]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.kept["logs"].append(found[0].detach())
        return found


class FedTrainer(GRPOTrainer):
    """TRL's trainer on batches that another one kept, without the samples of a level."""

    def __init__(self, *args: Any, kept: dict[str, Any], without: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept, self.without = kept, _LEVELS.index(without)

    def _prepare_inputs(self, inputs: Any) -> Any:
        batch, old = (self.kept[name][self.state.global_step] for name in ("batches", "logs"))
        advantages = batch["advantages"] * (batch["level"] != self.without)
        return {**batch, "advantages": advantages, "old_per_token_logps": old}


def train_with_trl(path: Replayed, settings: Path, kept: np.ndarray) -> torch.Tensor:
    """(P,) final weights of TRL's training on some of the samples.

    Args:
        path: of the run, which took one step a generation; gives the log-probabilities that the samples had.
        settings: file with the run's training_args.
        kept: (n_trajectories,) bool.
    """
    run = path.run
    run.trained.put(run.begin.weights)
    model = copy.deepcopy(run.trained.model).requires_grad_(True)

    class Fed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return _batch(path, run.plan.updates[self.state.global_step], kept)

    given = json.loads(settings.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        Fed(
            model=model,
            processing_class=tsae.testbed.series().base.load_tokenizer(),
            args=grpo_on_cpu(folder, prompts=1, samples=2, logging_strategy="no", **given),
            reward_funcs=right_answers,
            train_dataset=data_set(tsae.testbed.generate_problems("easy", 64, 0, "train")),
        ).train()
    return TrainedWeights(model, list(run.trained.parameters)).vector()


def _batch(path: Replayed, update: Update, kept: np.ndarray) -> dict[str, torch.Tensor]:
    """A generation as TRL would have it: prompts padded on the left, responses on the right."""
    run, rows = path.run, np.concatenate(update.parts).tolist()
    texts = [run.rollouts.tokens(row) for row in rows]
    before, after = (max(len(text[side]) for text in texts) for side in (0, 1))
    found = {name: torch.zeros(len(rows), before, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    found |= {name: torch.zeros(len(rows), after, dtype=torch.long) for name in ("completion_ids", "completion_mask")}
    found["prompt_ids"] += TOKEN_IDS[PAD]
    found["completion_ids"] += TOKEN_IDS[PAD]
    old = torch.zeros(len(rows), after)
    for i, (row, (prompt, response)) in enumerate(zip(rows, texts, strict=True)):
        found["prompt_ids"][i, before - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        found["prompt_mask"][i, before - len(prompt) :] = 1
        found["completion_ids"][i, : len(response)] = torch.from_numpy(response.astype(np.int64))
        found["completion_mask"][i, : len(response)] = int(kept[row])
        if row in path.logs:  # of those without an advantage nothing is needed
            old[i, : len(response)] = path.logs[row]
    advantage = torch.tensor(run.rollouts.frame.advantage.to_numpy(dtype=np.float32)[rows])
    n_tokens = torch.tensor(int(run.rollouts.n_sampled[rows].sum()))
    return found | {"advantages": advantage, "old_per_token_logps": old, "num_items_in_batch": n_tokens}
