"""What turned samples into steps: optimiser and loss, read from the settings that the trainer left beside its log.

Settings are JSON or YAML in the words of TRL's GRPOConfig (`training_args.json`) or of verl (`.hydra/config.yaml`); a
pickle such as `training_args.bin` is never loaded. What the file does not say has the trainer's own default.
`trainer_state.json` holds the learning rates of the steps that were logged: they must agree with the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tsae.attribution.training.loss import PolicyLoss
from tsae.attribution.training.optimiser import Optimiser
from tsae.base.files import as_path, reading
from tsae.base.untrusted import parse_json, parse_yaml
from tsae.errors import TsaeError

_STATE = "trainer_state.json"
_CORRECT = "Correct the file, or remove it."
_FILES = ("training_args.json", "training_args.yaml", "config.yaml", ".hydra/config.yaml")
_ADAM = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_OTHER_STEPS: tuple[tuple[str, Any, str], ...] = (
    ("top_entropy_quantile", 1.0, "tokens with less entropy were left out of the loss"),
    ("entropy_coeff", 0, "the loss rewarded entropy"),
    ("lr_scheduler_kwargs", {}, "the learning rates had a schedule of their own"),
)
"""Settings that change the steps in ways that are not simulated: name, its value where it does not, what it does."""
_AGGREGATES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
"""verl's loss_agg_mode, in TRL's words."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a run."""

    optimiser: Optimiser
    loss: PolicyLoss
    source: str
    """File that said so."""

    def __str__(self) -> str:
        o, loss = self.optimiser, self.loss
        parts = [
            f"{o.name}, learning rate {o.learning_rate:g} ({o.schedule}"
            + (f", {o.warmup} steps of warm-up" if o.warmup else "")
            + ")",
            f"weight decay {o.weight_decay:g}" if o.weight_decay else "no weight decay",
            "no clipping of gradients" if o.max_grad_norm is None else f"gradients clipped at norm {o.max_grad_norm:g}",
            f"loss {loss.kind}",
            f"ratios clipped at {1 - (loss.epsilon or 0):g} and {1 + (loss.epsilon_high or loss.epsilon or 0):g}",
        ]
        return ", ".join(parts) + f" (by {self.source})"


def read_recipe(where: str | Path) -> Recipe:
    """Read the settings of a run.

    Args:
        where: a file with settings, or the run's folder.

    Raises:
        TsaeError: where there are no settings, they name what cannot be simulated, or the logged learning rates are
            others.
    """
    where = as_path(where)
    folder = where if where.is_dir() else where.parent
    file = where if where.is_file() else next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        what = f"holds no settings of the training ({', '.join(_FILES)})"
        raise TsaeError(what, where=where, fix="Give the file, or the optimiser and the loss themselves.")
    settings = _load(file)
    with reading(folder / _STATE, _CORRECT):
        state = _state(folder)
        lasts = _steps(state)
    with reading(file, _CORRECT):
        steps = lasts or _steps(settings)
        recipe = (_of_verl if "actor_rollout_ref" in settings else _of_trl)(settings, steps, file)
    with reading(folder / _STATE, _CORRECT):
        _check_rates(recipe.optimiser, state, folder)
    return recipe


def _steps(settings: Mapping[str, Any]) -> int | None:
    """Steps of the whole training; TRL writes -1 where epochs count."""
    found = int(settings.get("max_steps") or 0)
    return found if found > 0 else None


def _load(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        found = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise TsaeError(f"is no {file.suffix[1:].upper()} ({str(error).splitlines()[0]})", where=file) from error
    if not isinstance(found, dict):
        raise TsaeError(f"holds a {type(found).__name__}, expected settings by name", where=file)
    return found


def _state(folder: Path) -> dict[str, Any]:
    """The newest trainer_state.json of the folder or its checkpoints."""
    files = [*folder.glob(_STATE), *folder.glob(f"checkpoint-*/{_STATE}")]
    states = [_load(file) for file in files]
    return max(states, key=lambda state: state.get("global_step", 0), default={})


def _of_trl(settings: Mapping[str, Any], steps: int | None, file: Path) -> Recipe:
    kind = str(settings.get("optim", "adamw_torch"))
    if kind not in _ADAM | {"sgd"}:
        raise _unknown("optimiser", kind, sorted(_ADAM | {"sgd"}), file)
    schedule = str(settings.get("lr_scheduler_type", "linear"))
    if schedule not in _SCHEDULES:
        raise _unknown("schedule", schedule, list(_SCHEDULES), file)
    warmup = int(settings.get("warmup_steps") or 0)
    if not warmup and settings.get("warmup_ratio"):
        warmup = -int(-float(settings["warmup_ratio"]) * (steps or 0) // 1)  # rounded up
    loss_type = str(settings.get("loss_type", "dapo"))
    norm = settings.get("max_grad_norm", 1.0)
    if settings.get("beta"):
        what = f"beta={settings['beta']}: the run had a KL penalty, whose gradient is not attributed to samples"
        raise TsaeError(what, where=file, fix="Attribute a run without one.")
    for name, usual, does in _OTHER_STEPS:
        value = settings.get(name)
        if value not in (None, usual, str(usual)):
            raise TsaeError(
                f"{name}={value}: {does}, which is not simulated", where=file, fix="Attribute a run without it."
            )
    if int(settings.get("num_iterations") or 1) > 1:
        what = f"num_iterations={settings['num_iterations']}: a batch is used more than once"
        raise TsaeError(what, where=file, fix="Attribute a run that uses each batch once.")
    try:
        optimiser = Optimiser(
            "sgd" if kind == "sgd" else "adamw",
            float(settings.get("learning_rate", 1e-6)),
            _SCHEDULES[schedule],  # type: ignore[arg-type]
            warmup,
            steps,
            (float(settings.get("adam_beta1", 0.9)), float(settings.get("adam_beta2", 0.999))),
            float(settings.get("adam_epsilon", 1e-8)),
            float(settings.get("weight_decay", 0.0)),
            max_grad_norm=float(norm) if norm else None,
        )
        length = int(settings.get("max_completion_length", 256)) if loss_type == "dr_grpo" else None
        high = settings.get("epsilon_high")
        loss = PolicyLoss(
            loss_type,  # type: ignore[arg-type]
            length,
            float(settings.get("temperature", 1.0)),
            float(settings.get("epsilon", 0.2)),
            None if high is None else float(high),
        )
    except TsaeError:
        raise
    except (TypeError, ValueError) as error:
        raise TsaeError(f"a setting is no number ({error})", where=file) from error
    return Recipe(optimiser, loss, str(file))


def _of_verl(settings: Mapping[str, Any], steps: int | None, file: Path) -> Recipe:
    part = settings["actor_rollout_ref"]
    actor, rollout = part.get("actor", {}), part.get("rollout", {})
    optim, mode = actor.get("optim", {}), str(actor.get("loss_agg_mode", "token-mean"))
    if mode not in _AGGREGATES:
        raise _unknown("loss_agg_mode", mode, list(_AGGREGATES), file)
    steps = steps or optim.get("total_training_steps")
    rest = {
        "learning_rate": optim.get("lr", 1e-6),
        "lr_scheduler_type": optim.get("lr_scheduler_type", optim.get("warmup_style", "constant")),
        "warmup_steps": max(0, int(optim.get("lr_warmup_steps") or 0)),
        "warmup_ratio": optim.get("lr_warmup_steps_ratio"),
        "weight_decay": optim.get("weight_decay", 0.01),
        "max_grad_norm": actor.get("grad_clip", 1.0),
        "beta": actor.get("kl_loss_coef", 0.001) if actor.get("use_kl_loss") else 0.0,
        "num_iterations": actor.get("ppo_epochs", 1),
        "loss_type": _AGGREGATES[mode],
        "max_completion_length": rollout.get("response_length"),
        "temperature": rollout.get("temperature", 1.0),
        "entropy_coeff": actor.get("entropy_coeff"),
        "epsilon": actor.get("clip_ratio_low", actor.get("clip_ratio", 0.2)),
        "epsilon_high": actor.get("clip_ratio_high"),
    }
    betas = optim.get("betas")
    return _of_trl(rest | ({"adam_beta1": betas[0], "adam_beta2": betas[1]} if betas else {}), steps, file)


def _unknown(what: str, name: str, known: list[str], file: Path) -> TsaeError:
    return TsaeError(f"the {what} {name!r} cannot be simulated", where=file, fix=f"Known are {', '.join(known)}.")


def _check_rates(optimiser: Optimiser, state: Mapping[str, Any], folder: Path) -> None:
    """Compare the logged learning rates with those of the settings."""
    for line in state.get("log_history", []):
        if "learning_rate" in line and "step" in line:
            logged, step = float(line["learning_rate"]), int(line["step"])
            # transformers logs the rate after the step's schedule has moved on, or before: releases differ.
            near = [optimiser.rate(s) for s in (step, step + 1) if s >= 1]
            if not any(abs(logged - rate) <= 1e-3 * max(abs(rate), 1e-12) for rate in near):
                raise TsaeError(
                    f"the learning rate of step {step} was {logged:g} by trainer_state.json, "
                    f"{near[0]:g} by the settings",
                    where=folder,
                    fix="Give the settings of this run.",
                )
