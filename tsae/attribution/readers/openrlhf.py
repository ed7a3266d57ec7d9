"""OpenRLHF's arguments (``train_ppo_ray``) as JSON or in Weights & Biases: with dots since 0.10, and as before.

Rows are drawn in an order that its settings do not tell. Since 0.10.3 a step is normalised by its tokens, before that
every micro-batch by its own. Its PPO logs no rollouts; what a reward function logs can be attributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import PolicyLoss, RewardKL
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file, "openrlhf")
    words.refuse()
    size, run, given, loss = (words.take(section) for section in ("size", "run", "optimiser", "loss"))
    steps = steps or size["steps"] or None
    updates = words.updates(int(size["batch"]) * size["n"], int(size["mini"]))
    if given["schedule"] == "cosine_with_min_lr":
        given["shape"] = words.take("shape")
    both = words.get("actor.eps_clip_low_high", "eps_clip_low_high", default=(run["clip"], run["clip"]))
    loss["epsilon"], loss["epsilon_high"] = map(float, both)
    loss["kind"], loss["level"] = loss["kind"]
    loss["beta"] = run["beta"] if run["in_loss"] else 0.0
    charged = run["beta"] and not run["in_loss"]
    facts = {
        "num_generations": size["n"],
        "max_steps": steps,
        "advantages": run["advantages"],
        "advantage_epsilon": 1e-9,
        "order": "log" if updates == 1 else "unknown",
        **words.table["fixes"],
    }
    return RunSettings(
        Optimiser(warmup=ceil(run["rise"] * (steps or 0)), n_steps=steps, decay_all=False, **given),
        PolicyLoss(**loss),
        Batching(1, updates, size["epochs"], 1),
        str(file),
        "openrlhf",
        base=run["base"],
        autocast="bfloat16",
        dropout=run["dropout"] > 0,
        facts=facts,
        notes=("before 0.10.3 the token mean was that of micro-batches, whose members are not known",),
        reward_kl=RewardKL(run["beta"], loss["kl"], clamp=10.0, to_go=True) if charged else None,
    )
