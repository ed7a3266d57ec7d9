"""NeMo-RL's GRPO config, 0.2 to 0.7.

A generation is split into batches of train_global_batch_size rows in the order of the log; every one is a step,
normalised by its own tokens. All steps of a generation have one learning rate. Logs hold advantages and the sampler's
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file, "nemo_rl")
    words.refuse()
    size, run = words.take("size"), words.take("run")
    updates = words.updates(int(size["prompts"] * size["n"]), int(size["mini"]))
    points = _points(words.get("policy.scheduler"), file)
    facts = {
        "num_generations": int(size["n"]),
        "max_steps": (size["last"] or steps or 0) * updates or None,
        "advantages": "logged",
        "order": "log",
        **words.table["fixes"],
    }
    return RunSettings(
        Optimiser(points=points, schedule="constant", every=updates, **words.take("optimiser")),
        _loss(words, updates),
        Batching(1, updates, 1, 1),
        str(file),
        "nemo_rl",
        base=run["base"],
        seed=run["seed"],
        autocast="float32" if run["precision"] == "float32" else "bfloat16",
        dropout=run["adapter"] and run["dropout"] > 0,
        facts=facts,
        notes=("groups of equal rewards were dropped (use_dynamic_sampling)",) * run["drops"],
    )


def _loss(words: Words, updates: int) -> PolicyLoss:
    given, has = words.take("loss"), words.take("ratios")
    if not has["by_token"]:
        words.need("grpo.overlong_filtering")  # The mean of responses leaves them out, too.
    if given["beta"]:
        words.need("loss_fn.use_kl_in_reward")
    if updates > 1:
        words.need("loss_fn.force_on_policy_ratio")
    given["level"] = "sequence" if has["by_sequence"] else "token"
    if has["weighed"]:
        mode: Any = f"{given['level']}_{has['cut']}"
        given["correction"] = Correction(mode, **words.take("bounds"))
    given |= {"epsilon": None if has["free"] else has["low"], "epsilon_high": has["high"]}
    if has["cispo"]:
        given |= {"surrogate": "cispo", "epsilon_high": 1 + has["high"], "cispo_low": 1 - has["low"]}
    if has["to_sampler"] or "loss_fn.positive_example_nll_weight" in words.values:  # Since 0.7.
        given |= {"kl_corrected": True, "kl_corrected_to": "sampler" if has["to_sampler"] else "now"}
    return PolicyLoss("step" if has["by_token"] else "grpo", **given)


def _points(scheduler: Any, file: Path) -> tuple[tuple[float, float], ...]:
    """Factors of the learning rate by torch's schedulers, of which the last lasts."""
    phases = [dict(one) for one in (scheduler if isinstance(scheduler, list) else [scheduler or {}])]
    starts = [0, *next((one.pop("milestones") for one in phases if "milestones" in one), [])]
    points: list[tuple[float, float]] = []
    for start, phase in zip(starts, [one for one in phases if one], strict=False):
        name, given = str(phase.get("name")).rsplit(".", 1)[-1], dict(phase.get("kwargs") or {})
        last = int(given.get("T_max") or given.get("total_iters") or 5)
        if name == "LinearLR":
            first, end = float(given.get("start_factor", 1 / 3)), float(given.get("end_factor", 1.0))
            points += [(start, first), (start + last, end)]
        elif name == "ConstantLR" and float(given.get("factor", 1 / 3)) == 1:
            points.append((start, 1.0))
        elif name == "CosineAnnealingLR" and not float(given.get("eta_min", 0)):
            points += [(start + done, (1 + cos(pi * done / last)) / 2) for done in range(last + 1)]
        else:
            what = f"policy.scheduler: {name} {given} is not known"
            raise TsaeError(what, where=file, fix="Known are LinearLR, CosineAnnealingLR to 0 and a constant factor 1.")
    return tuple(sorted(points)) or ((0, 1.0),)
