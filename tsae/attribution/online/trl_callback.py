"""A callback for TRL's GRPOTrainer that records attribution, and guards a target if you want it to.

    trainer = GRPOTrainer(…)
    callback = AttributionCallback(trainer, targets, folder="recording")
    trainer.add_callback(callback)
    trainer.train()
    callback.recorder.frame

A callback of transformers never sees the batch. So four methods of this one trainer are wrapped; they do what they did:

1. `_calculate_rewards` and `_generate_and_score_completions` tell problems and rewards. A column of row numbers joins
   the batch, since TRL shuffles and splits it afterwards.
2. `training_step` is the forward and the backward pass of a micro-batch. `_prepare_inputs`, which it calls first, gives
   the micro-batch; only then does the recorder begin to look.
3. After the last micro-batch of a step, before gradients are clipped, the guard is called.

Any class derived from GRPOTrainer will do, also one with an adapter: what is followed are the weights that need a
gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.attribution.online.fused_head import fused_head
from tsae.attribution.online.guard import Guard
from tsae.attribution.online.recorder import Recorder
from tsae.attribution.online.recording import RecordingFolder
from tsae.attribution.targets import Targets
from tsae.errors import TsaeError, public

_ROW = "tsae_row"
"""Name of the column of row numbers."""


class AttributionCallback(TrainerCallback):
    """Records what every sample does to targets while GRPOTrainer trains.

    Args:
        trainer: a GRPOTrainer that has not begun.
        targets: what is followed.
        refresh: steps between two gradients of the targets.
        folder: where samples, settings and weights go, for attribution after the run; None keeps the numbers only.
        every: steps between the weights that are kept there.
        guard: makes a guard of the recorder; it is called in every step, before gradients are clipped.
        dtype: of what a step holds of its samples.

    Raises:
        TsaeError: for several processes, and float16, whose gradients are scaled.
    """

    def __init__(
        self,
        trainer: Any,
        targets: Targets,
        *,
        refresh: int = 5,
        folder: str | Path | None = None,
        every: int = 10,
        guard: Callable[[Recorder], Guard] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if trainer.accelerator.num_processes > 1 or trainer.args.fp16:
            what = "float16" if trainer.args.fp16 else f"{trainer.accelerator.num_processes} processes"
            raise TsaeError(
                f"the trainer uses {what}, expected one process and bfloat16 or float32",
                where="AttributionCallback",
                fix="Change the trainer's settings, or attribute after the run.",
            )
        if folder is not None and trainer.args.mask_truncated_completions:
            raise TsaeError(
                "mask_truncated_completions takes the tokens of truncated responses away from the recording",
                where="AttributionCallback",
                fix="Turn it off, or give no folder.",
            )
        self.trainer, self.targets, self.refresh, self.dtype = trainer, targets, refresh, dtype
        self.folder, self.every, self._make_guard = folder, every, guard
        self.guard: Guard | None = None
        """From the beginning of the training on."""
        self._recorder: Recorder | None = None
        self._step: ExitStack | None = None
        self._rows: list[dict[str, Any]] = []
        self._rewards: list[float] = []
        for name in ("_calculate_rewards", "_generate_and_score_completions", "_prepare_inputs", "training_step"):
            setattr(trainer, name, self._around(name, getattr(trainer, name)))

    @property
    def recorder(self) -> Recorder:
        """Of the training.

        Raises:
            TsaeError: before it begins.
        """
        if self._recorder is None:
            raise TsaeError(
                "there is no recorder before the training begins",
                where="AttributionCallback",
                fix="Call trainer.add_callback with this callback, then trainer.train().",
            )
        return self._recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            raise TsaeError(
                f"the training goes on after step {state.global_step}, expected one from the start",
                where="AttributionCallback",
                fix="Take the callback out, or train from the start.",
            )
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        trained = TrainedWeights(model, [name for name, p in model.named_parameters() if p.requires_grad])
        folder = None
        if self.folder is not None:
            given = json.loads(args.to_json_string())
            settings = public({k: v for k, v in given.items() if not k.endswith("_token")})
            folder = RecordingFolder(self.folder, settings | {"max_steps": state.max_steps}, every=self.every)
        self._recorder = Recorder(
            trained,
            self.trainer.optimizer,
            self.targets,
            refresh=self.refresh,
            n_steps=state.max_steps,
            folder=folder,
            dtype=self.dtype,
        )
        self.guard = self._make_guard(self._recorder) if self._make_guard else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.close()

    # --- the trainer's methods

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def rewards(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            weights = self.trainer.reward_weights.to(found.device)
            self._rewards = (found * weights).nansum(dim=1).tolist()
            return found

        def generate(rows: list[dict[str, Any]]) -> Any:
            found = call(rows)
            if self.trainer.model.training:
                told = zip(rows, self._rewards, strict=True)
                self._rows = [{"problem_id": _problem(row), "reward": reward} for row, reward in told]
                found[_ROW] = torch.arange(len(rows), device=found["completion_ids"].device)
            return found

        def prepare(batch: Any) -> Any:
            found = call(batch)
            if self._step is not None:
                facts = self._facts(found)
                lengths = [len(fact["response_ids"]) for fact in facts]
                self._step.enter_context(fused_head(self.recorder.batch, lengths))
                self._step.enter_context(self.recorder.samples(facts))
            return found

        def step(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as self._step:
                loss = call(*args, **kwargs)
            self._step = None
            if self.guard is not None and self.trainer.accelerator.sync_gradients:
                self.guard()
            return loss

        return {
            "_calculate_rewards": rewards,
            "_generate_and_score_completions": generate,
            "_prepare_inputs": prepare,
            "training_step": step,
        }[name]

    def _facts(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Of the samples of a micro-batch: problem_id, reward, advantage, prompt_ids, response_ids."""
        advantages = batch["advantages"]
        if advantages.dim() > 1 or "tool_mask" in batch:
            raise TsaeError(
                "advantages differ between tokens of a sample" if advantages.dim() > 1 else "tools write tokens",
                where="AttributionCallback",
                fix="Record a run with one advantage a sample, and without tools.",
            )
        prompts, responses = (
            [ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
            for part in ("prompt", "completion")
        )
        return [
            self._rows[row] | {"advantage": advantage, "prompt_ids": prompt, "response_ids": response}
            for row, advantage, prompt, response in zip(
                batch[_ROW].tolist(), advantages.tolist(), prompts, responses, strict=True
            )
        ]


def _problem(row: dict[str, Any]) -> str:
    """The data set's own problem_id, or the prompt."""
    return str(row["problem_id"]) if "problem_id" in row else json.dumps(row["prompt"], ensure_ascii=False)
