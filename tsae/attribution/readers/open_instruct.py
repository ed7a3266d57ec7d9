"""open-instruct's GRPO arguments (``grpo_fast.py``), 0.1 to 0.3: JSON, YAML, or as Weights & Biases has them.

A step is normalised by its own tokens, of all processes. Packing mixes rows, so the members of several mini-batches
cannot be found. ``--save_traces`` logs what trained, with advantages and, later, the sampler's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, what is not replayed, and a missing word whose default has changed.
    """
    words = Words(settings, file, "open_instruct")
    words.values = {name.rsplit(".", 1)[-1]: value for name, value in words.values.items()}  # without their groups
    words.refuse()
    size, run = words.take("size"), words.take("run")
    generations = size["last"] or steps or int(size["episodes"] // (size["prompts"] * size["n"]))
    total = generations * size["epochs"] * size["minis"] or None
    warmup = int(words.number("warm_up_steps", default=0)) or int(words.number("warmup_ratio") * (total or 0))
    unclipped = words.values.get("max_grad_norm", "") in (None, "None")
    norm = None if unclipped else words.number("max_grad_norm") or None
    loss = words.take("loss")
    loss["kl"], loss["kl_corrected"] = loss["kl"]
    loss |= {"beta": loss["beta"] * run["with_ref"], "kl_input_clamp": 40.0, "correction": _correction(words)}
    loss |= {"surrogate": "cispo", "epsilon_high": 1 + loss["epsilon_high"]} if run["cispo"] else {}
    loss |= {"sync_ref": (run["alpha"], run["follows"])} if run["follows"] else {}
    facts = words.take("facts") | words.table["fixes"]
    facts |= {"max_steps": total, "advantages": "logged", "order": "log" if size["minis"] == 1 else "unknown"}
    return RunSettings(
        Optimiser(warmup=warmup, n_steps=total, max_grad_norm=norm, **words.take("optimiser")),
        PolicyLoss("step", ratio_to="sampler" if run["to_sampler"] else "old", **loss),
        Batching(1, size["minis"], size["epochs"], 1),
        str(file),
        "open_instruct",
        base=run["base"],
        seed=run["seed"],
        autocast="float32" if run["computed"] == "float32" else "bfloat16",
        facts=facts,
    )


def _correction(words: Words) -> Correction | None:
    """Truncated importance sampling: bounds of ρ since 0.3, before that a cap."""
    if not any("rho_" in name for name in words.values):
        cap = words.number("truncated_importance_sampling_ratio_cap")
        return Correction("token_truncate", None, cap) if cap > 0 else None
    words.need("rho_mask_sequence_level")
    words.need("rho_mask_tv_divergence")
    has = words.take("rho")
    if not has["on"]:
        return None
    if not (has["least"] or has["most"]):
        return Correction("token_truncate", has["low"] or None, has["high"] or None)
    if has["low"] > has["least"] or (has["high"] and not 0 < has["most"] <= has["high"]):  # Clamped and dropped.
        words.need("rho_clamp_lower_bound")
        words.need("rho_clamp_upper_bound")
    return Correction("token_mask", has["least"] or None, has["most"] or None)
