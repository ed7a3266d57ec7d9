"""verl's Hydra config (``.hydra/config.yaml``, or as Weights & Biases has it), 0.4 to 0.9.

Every process takes an equal run of consecutive rows of a generation (train_batch_size × n), splits it into mini-batches
in their order, and takes a step with each. All steps of a generation have one learning rate. ``rollout_data_dir`` has
the rows in that order, for balance_batch moves them before. The trainer of 0.9 (``use_v1``) sorts its log by problem.

The workers to 0.7 average over a micro-batch's tokens, those since 0.8 over the mini-batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsae.attribution.readers.words import Words
from tsae.attribution.training.loss import Correction, PolicyLoss, RewardKL
from tsae.attribution.training.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

_ACTOR = "actor_rollout_ref.actor."


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are generations.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words, notes = Words(settings, file, "verl"), list[str]()
    words.refuse()
    legacy = words.get("trainer.use_legacy_worker_impl")
    engine = legacy == "disable" or (legacy is None and f"{_ACTOR}optim.zero_indexed_step" in words.values)
    size, run = words.take("size"), words.take("run")
    updates, processes = words.updates(size["batch"], size["mini"]), size["nodes"] * size["gpus"] // size["split"]
    fixed = size["micro"] and not (engine or size["dynamic"])
    parts = size["mini"] * size["n"] // (processes * size["micro"]) if fixed else 1
    total = next((n for n in (size["steps"], size["all_steps"]) if n > 0), steps)
    loss = _loss(words, size["length"], engine=engine)
    if loss.kind == "bnpo" and size["dynamic"]:
        loss = replace(loss, kind="step")
        notes.append("micro-batches had no fixed size (use_dynamic_bsz): the token mean is taken over mini-batches")
    if run["dropped"]:
        notes.append("groups of equal rewards were dropped before the updates (filter_groups)")
    facts = {
        "num_generations": size["n"],
        "max_completion_length": size["length"],
        "max_steps": total and total * updates * size["epochs"],
        "advantages": run["advantages"] if run["std"] or run["advantages"] != "grpo" else "dr_grpo",
        "advantage_epsilon": 1e-6,
        "order": "unknown" if run["v1"] or (run["shuffle"] and engine) else "log",
        **words.table["fixes"],
    }
    reward_kl = None
    if run["kl"]:
        words.need("algorithm.kl_ctrl.type", "fixed", does="the weight of the KL penalty follows the divergence")
        reward_kl = RewardKL(**(penalty := words.take("reward_kl")), **_clamps(penalty["kl"]))
    return RunSettings(
        _optimiser(words, total, updates * size["epochs"], engine=engine),
        loss,
        Batching(parts, parts * updates, size["epochs"], processes),
        str(file),
        "verl",
        base=run["base"],
        autocast="float32" if run["computed"] in ("float32", "fp32") else "bfloat16",
        weights="bfloat16" if run["kept"] in ("bf16", "bfloat16") else "float32",
        facts=facts,
        notes=tuple(notes),
        reward_kl=reward_kl,
    )


def _clamps(kl: str, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}input_clamp": 20.0, f"{prefix}clamp": 10.0} if kl == "k3" else {}


def _loss(words: Words, length: int, *, engine: bool) -> PolicyLoss:
    given, has = words.take("loss"), words.take("ratios")
    mode, kind, level, limit = str(has["mode"] or "vanilla"), has["kind"], has["level"], None
    if mode in ("gspo", "sapo"):
        if has["kl"]:  # The KL term alone is averaged by loss_agg_mode.
            words.need(f"{_ACTOR}loss_agg_mode", "seq-mean-token-mean")
        kind = "grpo"
    if kind == "dr_grpo":
        limit = int(words.number(f"{_ACTOR}loss_scale_factor", default=None if engine else length))
        if not engine:  # By the length alone.
            words.need(f"{_ACTOR}use_dynamic_bsz")
            kind = "sum_norm"
    if has["old"] > 0:
        level, has["cap"] = "token_truncate", has["old"]
    if has["bypass"] or mode == "bypass_mode":  # The ratio itself corrects for the sampler.
        words.need("algorithm.rollout_correction.loss_type", "ppo_clip")
        level, given["ratio_to"] = None, "sampler"
    if mode not in ("vanilla", "bypass_mode"):
        del given["dual_clip"]
    given |= {"epsilon": None if mode == "gpg" else has["low"], "epsilon_high": has["high"]}
    if mode == "cispo":
        given |= {"epsilon_high": 1 + has["high"], "cispo_low": 1 - has["low"]}
    given |= {"level": "sequence" if mode == "gspo" else "token", "sapo_temperatures": (has["up"], has["down"])}
    given |= {"beta": given["beta"] * has["kl"], **_clamps(given["kl"], "kl_")}
    given["correction"] = Correction(level, None, has["cap"]) if level else None
    return PolicyLoss("step" if kind == "bnpo" and engine else kind, limit, **given)


def _optimiser(words: Words, total: int | None, every: int, *, engine: bool) -> Optimiser:
    has = words.take("schedule")
    warmup = has["steps"]
    if warmup < int(engine):
        if has["part"] and total is None:
            what = f"lr_warmup_steps_ratio={has['part']} needs the number of steps of the whole training"
            raise TsaeError(what, where=words.file, fix="Give trainer.total_training_steps.")
        warmup = int(has["part"] * (total or 0))
    return Optimiser(
        schedule=has["name"],
        warmup=warmup,
        n_steps=total,
        max_grad_norm=has["clip_of_engine" if engine else "clip"] or None,
        every=every,
        shape=words.take("shape") if has["name"] != "constant" else {},
        **words.take("optimiser"),
    )
