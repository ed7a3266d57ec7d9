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


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, what is not replayed, and a loss that the file does not say.
    """
    own = "trainer." if any(str(name).split(".")[0] == "trainer" for name in settings) else ""
    words = Words(settings, file, "prime_rl", own)
    words.refuse()
    run, given, betas = words.take("run"), words.take("optimiser"), words.take("betas")
    total = run["steps"] or steps
    if words.values.get(f"{own}optim.max_norm", "") in (None, "None"):
        given["max_grad_norm"] = None
    given["points"] = _points(words, given["learning_rate"], total)
    loss = words.take("loss")
    bounds = "ipo" if loss["surrogate"] == "ipo" else "dppo"
    if bounds == "dppo" and f"{own}loss.ipo_mask_low" in words.values:
        loss["surrogate"], bounds = "ipo", "masked"
    loss |= {"beta": 2 * loss["beta"], **words.take(bounds)}
    facts = {"max_steps": total, "advantages": "logged", "order": "log", **words.take("facts"), **words.table["fixes"]}
    return RunSettings(
        Optimiser(schedule="constant", betas=(betas["first"], betas["second"]), **given),
        PolicyLoss("step", kl="k2", kl_to="sampler", ratio_to="sampler", **loss),
        Batching(),
        str(file),
        "prime_rl",
        base=run["base"],
        autocast="bfloat16",
        weights=run["weights"],
        dropout=run["dropout"] > 0,
        facts=facts,
    )


def _points(words: Words, rate: float, total: int | None) -> tuple[tuple[float, float], ...]:
    """Factors of the learning rate."""
    kind = words.take("schedule")["kind"]
    if kind == "constant":
        return ((0, 1.0),)
    if total is None:
        what = f"{words.own}scheduler.type={kind} needs the number of steps of the whole training"
        raise TsaeError(what, where=words.file, fix="Give max_steps.")
    has = words.take("falling")
    warmup, least = has["warmup"], has["least"] / rate
    points = [(0, least or 1e-8)] * bool(warmup) + [(warmup, 1.0)]
    if kind == "cosine":
        n = total - warmup
        points += [(warmup + i, least + (1 - least) * (1 + cos(pi * i / n)) / 2) for i in range(1, n + 1)]
    elif has["falls"] > 1:
        points += [(total - has["falls"], 1.0), (total - 1, least or 1e-8)]
    return tuple(points)
