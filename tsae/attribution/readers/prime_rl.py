"""prime-rl's settings of a training, 0.5 to 0.8: the resolved TOML, or as Weights & Biases has them.

Training is asynchronous: ratios are against what the sampler logged. One step a batch, normalised by its tokens. The
regulariser is kl_tau (log π − log sampler)². Traces hold advantages and the sampler's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_LOSS = "type dppo_mask_low dppo_mask_high ipo_mask_low ipo_mask_high ipo_threshold adv_tau kl_tau teacher_tau"
_NUMBERS = {"float32": "float32", "bfloat16": "bfloat16"}


def is_mine(settings: Mapping[str, Any]) -> bool:
    """Whether settings are prime-rl's."""
    names = {str(name).split(".")[0] for name in settings}
    return {"trainer", "orchestrator"} <= names or {"weight_broadcast", "optim", "loss"} <= names


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, what is not replayed, and a loss that the file does not say.
    """
    words = Words(settings, file)
    own = "trainer." if any(name.startswith("trainer.") for name in words.values) else ""
    words.only(f"{own}loss.", _LOSS)
    words.usual("loss.adv_tau=1|1.0 loss.teacher_tau optim.type=adamw model.fp8 model.quantization", own)
    words.usual("orchestrator.algo.type=grpo|max_rl|rae|hierarchical_grpo")
    total = words.whole(f"{own}max_steps", "max_steps", default=0) or steps
    given = words.take(
        "learning_rate=lr:1e-6 weight_decay=weight_decay:0.01 max_grad_norm=max_norm:1.0", f"{own}optim."
    )
    if words.values.get(f"{own}optim.max_norm", "") in (None, "None"):
        given["max_grad_norm"] = None
    given["betas"] = tuple(words.take("first=betas1:0.9 second=betas2:0.999", f"{own}optim.").values())
    given["points"] = _points(words, f"{own}scheduler.", given["learning_rate"], total)
    facts = {"max_steps": total, "advantages": "logged", "order": "log"}
    facts |= words.take("num_generations=group_size|rollouts_per_example:1", "orchestrator.")
    facts["sampler_fix"] = "traces.jsonl since 0.7 and token exports hold log-probabilities: import those"
    rest: dict[str, Any] = {"base": words.get(f"{own}model.name", "model.name"), "autocast": "bfloat16", "facts": facts}
    rest["weights"] = words.choice(_NUMBERS, f"{own}model.optimization_dtype", default="float32")
    rest["dropout"] = words.number(f"{own}model.lora.dropout", default=0.0) > 0
    loss = _loss(words, f"{own}loss.")
    return RunSettings(Optimiser(schedule="constant", **given), loss, Batching(), str(file), "prime_rl", **rest)


def _loss(words: Words, loss: str) -> PolicyLoss:
    surrogate: Any = words.choice({"default": "dppo", "ipo": "ipo"}, f"{loss}type", default="default")
    bounds = "epsilon=dppo_mask_low epsilon_high=dppo_mask_high"
    if surrogate == "ipo":
        bounds = "epsilon=ipo_threshold:0.1 epsilon_high=ipo_threshold:0.1"
    elif f"{loss}ipo_mask_low" in words.values:  # The default loss of 0.5.
        surrogate, bounds = "ipo", "epsilon=ipo_mask_low epsilon_high=ipo_mask_high"
    has = words.take("tau=kl_tau:0.001", loss)
    has |= words.take("heat=train.sampling.temperature|sampling.temperature:1.0", "orchestrator.")
    given: dict[str, Any] = {"beta": 2 * has["tau"], "kl": "k2", "kl_to": "sampler", "ratio_to": "sampler"}
    return PolicyLoss("step", temperature=has["heat"], surrogate=surrogate, **words.take(bounds, loss), **given)


def _points(words: Words, part: str, rate: float, total: int | None) -> tuple[tuple[float, float], ...]:
    """Factors of the learning rate."""
    kind = words.choice({name: name for name in ("constant", "linear", "cosine")}, f"{part}type", default="constant")
    if kind == "constant":
        return ((0, 1.0),)
    if total is None:
        what = f"{part}type={kind} needs the number of steps of the whole training"
        raise TsaeError(what, where=words.file, fix="Give max_steps.")
    has = words.take("warmup=warmup_steps:10 least=min_lr:0.0 falls=decay_steps:10", part)
    warmup, least = has["warmup"], has["least"] / rate
    points = [(0, least or 1e-8)] * bool(warmup) + [(warmup, 1.0)]
    if kind == "cosine":
        n = total - warmup
        points += [(warmup + i, least + (1 - least) * (1 + cos(pi * i / n)) / 2) for i in range(1, n + 1)]
    elif has["falls"] > 1:
        points += [(total - has["falls"], 1.0), (total - 1, least or 1e-8)]
    return tuple(points)
