"""TRL's own trainer, fed the responses of a run in place of sampling.

Its loss, optimiser and clipping act on them. A sample that is left out has no advantage. Notebook 7 compares a replay
with it: `KeepingTrainer` keeps the batches of a run, and `FedTrainer` trains on them again.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from trl import GRPOTrainer

from tsae.testbed import LEVELS

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
