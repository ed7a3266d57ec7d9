"""A callback for TRL's GRPOTrainer that writes the run log, and follows and guards targets if you want it to.

    trainer = GRPOTrainer(…)
    TsaeCallback(trainer)
    trainer.train()

A callback of transformers never sees the batch. So methods of this one trainer are wrapped; they do what they did:

1. `_calculate_rewards` and `_generate_and_score_completions` give what was sampled, and what it earned. A column of row
   numbers joins the batch, since TRL shuffles and splits it afterwards.
2. `_prepare_inputs` gives the micro-batch that comes next. The buffer that it fills says which rows are in which.
3. `Accelerator.clip_grad_norm_` gives the norm of the gradient.
4. `training_step`, only with targets: the forward and the backward pass of a micro-batch, at which the recorder looks.
   After the last micro-batch of a step, before gradients are clipped, the guard is called.

Any class derived from GRPOTrainer will do, also one with an adapter: what is followed are the weights that need a
gradient.

TRL computes log-probabilities from the head's weight itself, in tiles, without the logits (`add_fused_lm_head`). No
module is called, so no hook of the recorder sees it. So TRL's own function is noted when it is called, with what came
back to its results. Each sample's gradient is then what the same function gives for that sample alone. Where the head
is tied to the embedding, both parts add up in one weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from tsae.attribution.guard import Guard, Recorder
from tsae.attribution.sample_gradients import BatchGradients, TrainedWeights
from tsae.attribution.targets import Targets
from tsae.errors import TsaeError, public, refuse
from tsae.rl.run_log import RunLog

_ROW = "tsae_row"
"""Name of the column of row numbers."""
_WRAPPED = ("_calculate_rewards", "_generate_and_score_completions", "_prepare_inputs")
_LOGPROBS = {
    "old_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "sampler_logprobs": "sampling_per_token_logps",
}
"""By column of the log, TRL's name."""


class TsaeCallback(TrainerCallback):
    """Writes a run log while GRPOTrainer trains. It registers itself with the trainer.

    Args:
        trainer: a GRPOTrainer before its training starts.
        folder: of the log; by default tsae in the trainer's output_dir.
        targets: what a `Recorder` follows, if anything: what every sample does to it, as the training runs.
        refresh: steps between two gradients of the targets.
        guard: makes a guard of the recorder; it is called in every step, before gradients are clipped.
        dtype: of what the recorder holds of a step's samples.

    Raises:
        TsaeError: for another trainer, or one that has such a callback already; and with targets for several processes,
            and float16, whose gradients are scaled.
    """

    def __init__(
        self,
        trainer: Any,
        folder: str | Path | None = None,
        *,
        targets: Targets | None = None,
        refresh: int = 5,
        guard: Callable[[Recorder], Guard] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        other = not all(hasattr(trainer, name) for name in _WRAPPED)
        what = f"the trainer is a {type(trainer).__name__}, expected TRL's GRPOTrainer"
        refuse("TsaeCallback", (other, what, "Write the log of another loop with tsae.rl.RunLog."))
        odd = "float16" * trainer.args.fp16 or f"{trainer.accelerator.num_processes} processes"
        twice = any(isinstance(other, TsaeCallback) for other in trainer.callback_handler.callbacks)
        alone = f"the trainer uses {odd}, and targets are followed with one process and bfloat16 or float32"
        refuse(
            "TsaeCallback",
            (twice, "the trainer has a TsaeCallback already", "Make one a trainer."),
            (targets is not None and odd != "1 processes", alone, "Give no targets, and attribute after the run."),
            (guard is not None and targets is None, "a guard watches a target, and none is given", "Give targets."),
        )
        self.trainer, self.targets, self.refresh, self.dtype = trainer, targets, refresh, dtype
        self.folder = Path(trainer.args.output_dir) / "tsae" if folder is None else folder
        self._make_guard = guard
        self.guard: Guard | None = None
        """From the beginning of the training on."""
        self.recorder: Recorder | None = None
        """Of the targets, from the beginning of the training on."""
        self._step: ExitStack | None = None
        self._rows: list[dict[str, Any]] = []
        """Of the present generation, in the order of the data set."""
        self._given: list[Any] = []
        """Arguments and result of the last call of `_calculate_rewards`."""
        self._used: list[tuple[int, int]] = []
        """(generation, number of the micro-batch) of the step that is going on."""
        self._facts: dict[str, Any] = {}
        """Of the step that is going on: grad_norm, learning_rate, weights."""
        for name in (*_WRAPPED, *["training_step"] * (targets is not None)):
            setattr(trainer, name, partial(getattr(self, name), getattr(trainer, name)))
        clip, add = trainer.accelerator.clip_grad_norm_, trainer.add_callback

        def clipped(*args: Any, **kwargs: Any) -> Any:
            self._facts["grad_norm"] = norm = clip(*args, **kwargs)
            return norm

        trainer.accelerator.clip_grad_norm_ = clipped
        add(self)
        # It is there: who adds it as other callbacks are added does no harm.
        trainer.add_callback = lambda other: None if other is self else add(other)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and self.targets is not None:
            what = f"the training resumes after step {state.global_step}, and targets are followed from the start"
            raise TsaeError(what, where="TsaeCallback", fix="Give no targets, or train from the start.")
        accelerator, self._used, self._facts = self.trainer.accelerator, [], {}
        settings = public(_settings(self.trainer, state.max_steps))
        with accelerator.main_process_first():
            self.log = RunLog(self.folder, settings, rank=accelerator.process_index, step=state.global_step)
        if self.targets is not None:
            model = accelerator.unwrap_model(self.trainer.model)
            self.recorder = Recorder(
                TrainedWeights(model, [name for name, p in model.named_parameters() if p.requires_grad]),
                self.trainer.optimizer,
                self.targets,
                refresh=self.refresh,
                n_steps=state.max_steps,
                dtype=self.dtype,
            )
            self.guard = self._make_guard(self.recorder) if self._make_guard else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._facts["learning_rate"] = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norm = self._facts.get("grad_norm")
        facts = self._facts if norm is None else self._facts | {"grad_norm": float(norm)}
        self.log.update(state.global_step, self._used, **facts)
        self._used, self._facts = [], {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()

    # --- around the trainer's methods, each of which comes first among the arguments

    def _calculate_rewards(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        self._given = [*args, found]
        return found

    def _generate_and_score_completions(self, call: Callable[..., Any], rows: list[dict[str, Any]]) -> Any:
        found = call(rows)
        if self.trainer.model.training:
            self._rows = self._read(found)
            found[_ROW] = torch.arange(len(rows), device=found["completion_ids"].device)
        return found

    def _prepare_inputs(self, call: Callable[..., Any], batch: Any) -> Any:
        before = self._rows
        found = call(batch)
        if self.trainer.model.training:
            if self._rows is not before:
                for number, part in enumerate(self.trainer._buffered_inputs):
                    for row in part[_ROW].tolist():
                        self._rows[row]["micro_batch"] = [number] * self.trainer.num_iterations
                self.log.add(self.trainer.state.global_step + 1, self._rows)
            numbers = found[_ROW].tolist()
            self._used.append((self.log.generation, self._rows[numbers[0]]["micro_batch"][0]))
            if self.recorder is not None and self._step is not None:
                lengths = found["completion_mask"].sum(1).tolist()
                self._step.enter_context(fused_head(self.recorder.batch, lengths))
                self._step.enter_context(self.recorder.samples([self._sample(number) for number in numbers]))
        return found

    def training_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as self._step:
            loss = call(*args, **kwargs)
        self._step = None
        if self.guard is not None and self.trainer.accelerator.sync_gradients:
            listed = self.guard()
            if len(listed) and self.guard.weight < 1:
                places = listed[["generation", "row"]].to_numpy().tolist()
                self._facts["weights"] = [[*place, self.guard.weight] for place in places]
        return loss

    def _sample(self, number: int) -> dict[str, Any]:
        """What stands beside a sample's numbers in the recorder's table."""
        row = self._rows[number]
        problem = row["data"].get("problem_id", row.get("prompt") or json.dumps(row.get("messages"), default=str))
        facts = {"problem_id": str(problem), "reward": row["reward"], "advantage": row["advantage"]}
        return facts | {"generation": self.log.generation, "row": number}

    def _read(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a generation for the log."""
        trainer, (asked, prompts, _, responses, rewards) = self.trainer, self._given
        own = slice((first := trainer.accelerator.process_index * len(asked)), first + len(asked))
        rewards = rewards[own]
        total = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
        totals = total.masked_fill(rewards.isnan().all(dim=1), torch.nan).tolist()
        tokenizer = trainer._tokenizer  # releases before 1.15 know one end token alone
        ends = {*getattr(trainer, "eos_token_ids", [tokenizer.eos_token_id]), tokenizer.pad_token_id}
        names = _reward_names(trainer)
        mask = batch["tool_mask"] * batch["completion_mask"] if "tool_mask" in batch else batch["completion_mask"]
        advantages, tokens = batch["advantages"], None
        if advantages.dim() > 1:
            tokens, advantages = advantages, (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        # (B, T) values, padded on the right, by the log's name.
        wide = {name: batch.get(key) for name, key in _LOGPROBS.items()} | {"token_advantages": tokens}
        if "tool_mask" in batch:
            wide["response_mask"] = batch["tool_mask"]
        given = {name: value.float().cpu().numpy() for name, value in wide.items() if value is not None}
        asked_ids, read = batch["prompt_ids"].cpu(), batch["prompt_mask"].bool().cpu()
        rows = []
        for i, (ids, advantage) in enumerate(zip(responses, advantages.tolist(), strict=True)):
            row = {
                "prompt" if isinstance(prompts[i], str) else "messages": prompts[i],
                "prompt_ids": asked_ids[i][read[i]].tolist(),
                "response_ids": list(ids),
                "rewards": dict(zip(names, rewards[i].tolist(), strict=True)),
                "reward": totals[i],
                "advantage": advantage,
                "truncated": not len(ids) or ids[-1] not in ends,
                "micro_batch": [],
                "data": {name: value for name, value in asked[i].items() if name not in ("prompt", "image", "images")},
            }
            rows.append(row | {name: value[i, : len(ids)] for name, value in given.items()})
        return rows


def _reward_names(trainer: Any) -> list[str]:
    """Names of the reward functions; a number tells functions of one name apart."""
    names: list[str] = trainer.reward_func_names
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _listed(value: Any) -> Any:
    """For JSON: the names of layers are a set, and enumerations their text."""
    return sorted(value) if isinstance(value, set) else str(value)


def _settings(trainer: Any, max_steps: int) -> dict[str, Any]:
    """What the run was, for JSON."""
    import trl

    model = trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {})
    adapter = next(iter(adapters.values()), None)
    base = model.config._name_or_path if adapter is None else adapter.base_model_name_or_path
    arguments = json.loads(trainer.args.to_json_string())
    trained = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters() if p.requires_grad}
    return {
        "trainer": "trl",
        "class": type(trainer).__name__,
        "versions": {library.__name__: library.__version__ for library in (trl, transformers, torch)},
        "base": base or None,
        "lora": None if adapter is None else json.loads(json.dumps(adapter.to_dict(), default=_listed)),
        "processes": trainer.accelerator.num_processes,
        "autocast": trainer.accelerator.mixed_precision,
        "vllm": bool(trainer.args.use_vllm),
        "seeds": {name: arguments.get(name) for name in ("seed", "data_seed")},
        "max_steps": max_steps,
        "rewards": _reward_names(trainer),
        "reward_weights": trainer.reward_weights.tolist(),
        "trained": trained,
        "arguments": {name: value for name, value in arguments.items() if not name.endswith("_token")},
    }


_FUNCTION = "_ChunkedLogProbFunction"
"""In trl.trainer.utils; releases without it call the head as a module."""


_Back = dict[int, torch.Tensor]
"""(N,) gradients that came back to a call of the function on N tokens, by place among its results."""


@contextmanager
def fused_head(batch: BatchGradients, lengths: Sequence[int]) -> Iterator[None]:
    """Around `batch.micro_batch`: adds what the head's weights have of the gradients.

    Args:
        batch: of the step.
        lengths: (B,) tokens of the responses, which are the tokens that are scored.
    """
    from trl.trainer import utils

    real: Any = getattr(utils, _FUNCTION, None)
    if real is None:
        yield
        return
    names = {id(parameter): name for name, parameter in batch.trained.parameters.items()}
    calls: list[tuple[tuple[Any, ...], _Back]] = []

    class Noted:
        @staticmethod
        def apply(*inputs: Any) -> Any:
            found = real.apply(*inputs)
            if torch.is_grad_enabled() and any(id(weight) in names for weight in inputs[1:3]):
                calls.append((inputs, {}))
                for place, one in enumerate(found):
                    if one is not None and one.requires_grad:
                        one.register_hook(partial(_note, calls[-1][1], place))
            return found

    setattr(utils, _FUNCTION, Noted)
    try:
        yield
    finally:
        setattr(utils, _FUNCTION, real)
    for inputs, back in calls:
        for place in (1, 2):  # Weight and bias.
            if (name := names.get(id(inputs[place]))) is not None:
                batch.add(name, _of_samples(real, inputs, back, place, lengths))


def _note(found: _Back, place: int, back: torch.Tensor | None) -> None:
    # Nothing comes back to what the loss does not use, such as an entropy that is only logged.
    if back is not None:
        found[place] = back.detach()


def _of_samples(real: Any, inputs: tuple[Any, ...], back: _Back, place: int, lengths: Sequence[int]) -> torch.Tensor:
    """(B, …) gradients of the input at this place."""
    hidden, weight, bias, targets, *options = inputs
    # All tokens of padded samples, or on GPUs only those that are scored.
    n, found = len(lengths), []
    rows = list(lengths) if len(hidden) == sum(lengths) else [len(hidden) // n] * n
    for part in map(slice, accumulate([0, *rows[:-1]]), accumulate(rows)):
        leaves: list[Any] = [each if each is None else each.detach().requires_grad_() for each in (weight, bias)]
        with torch.enable_grad():
            given = real.apply(hidden[part].detach(), *leaves, targets[part], *options)
        found.append(
            torch.autograd.grad([given[i] for i in back], leaves[place - 1], [b[part] for b in back.values()])[0]
        )
    return torch.stack(found)
