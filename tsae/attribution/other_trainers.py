"""Settings of trainers other than TRL. What their words mean is in ``verl.toml`` and its like; here is what follows.

Each reader takes a file's settings and the number of steps by trainer_state.json, if that is known. It raises a
`TsaeError` for a word that is not known, and for what is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, cos, pi
from pathlib import Path
from typing import Any

from tsae.attribution import trl
from tsae.attribution.config_words import Words
from tsae.attribution.loss import Correction, PolicyLoss, RewardKL
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.errors import TsaeError

Reader = Callable[[Mapping[str, Any], Path, int | None], RunSettings]
_ACTOR = "actor_rollout_ref.actor."


def verl(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """verl's Hydra config (``.hydra/config.yaml``, or as Weights & Biases has it), 0.4 to 0.9.

    Every process takes an equal run of consecutive rows of a generation (train_batch_size × n), splits it into
    mini-batches in their order, and takes a step with each. All steps of a generation have one learning rate.
    ``rollout_data_dir`` has the rows in that order, for balance_batch moves them before. The trainer of 0.9
    (``use_v1``) sorts its log by problem.

    The workers to 0.7 average over a micro-batch's tokens, those since 0.8 over the mini-batch's.

    Steps are generations.
    """
    words, notes = Words(settings, file, "verl").refuse(), list[str]()
    legacy = words.get("trainer.use_legacy_worker_impl")
    engine = legacy == "disable" or (legacy is None and f"{_ACTOR}optim.zero_indexed_step" in words.values)
    size, run = words.take("size"), words.take("run")
    updates, processes = words.updates(size["batch"], size["mini"]), size["nodes"] * size["gpus"] // size["split"]
    fixed = size["micro"] and not (engine or size["dynamic"])
    parts = size["mini"] * size["n"] // (processes * size["micro"]) if fixed else 1
    total = next((n for n in (size["steps"], size["all_steps"]) if n > 0), steps)
    loss = _loss_of_verl(words, size["length"], engine=engine)
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
        "order": "unknown" if run["v1"] or (run["shuffle"] and engine) else "log",
    }
    reward_kl = None
    if run["kl"]:
        words.need("algorithm.kl_ctrl.type", "fixed", does="the weight of the KL penalty follows the divergence")
        reward_kl = RewardKL(**(penalty := words.take("reward_kl")), **_clamps(penalty["kl"]))
    return _settings(
        words,
        _optimiser_of_verl(words, total, updates * size["epochs"], engine=engine),
        loss,
        Batching(parts, parts * updates, size["epochs"], processes),
        autocast="float32" if run["computed"] in ("float32", "fp32") else "bfloat16",
        weights="bfloat16" if run["kept"] in ("bf16", "bfloat16") else "float32",
        facts=facts,
        notes=tuple(notes),
        reward_kl=reward_kl,
    )


def _settings(
    words: Words, optimiser: Optimiser, loss: PolicyLoss, batching: Batching, *, facts: Mapping[str, Any], **more: Any
) -> RunSettings:
    """A run's settings, with the model that it began with and the facts that its trainer's table holds."""
    facts, base = {**words.table["always"], **facts}, words.take("run", "base")["base"]
    return RunSettings(optimiser, loss, batching, str(words.file), words.trainer, base=base, facts=facts, **more)


def _clamps(kl: str, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}input_clamp": 20.0, f"{prefix}clamp": 10.0} if kl == "k3" else {}


def _loss_of_verl(words: Words, length: int, *, engine: bool) -> PolicyLoss:
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


def _optimiser_of_verl(words: Words, total: int | None, every: int, *, engine: bool) -> Optimiser:
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


def nemo_rl(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """NeMo-RL's GRPO config, 0.2 to 0.7.

    A generation is split into batches of train_global_batch_size rows in the order of the log; every one is a step,
    normalised by its own tokens. All steps of a generation have one learning rate. Logs hold advantages and the
    sampler's log-probabilities.

    Steps are generations.
    """
    words = Words(settings, file, "nemo_rl").refuse()
    size, run = words.take("size"), words.take("run")
    updates = words.updates(int(size["prompts"] * size["n"]), int(size["mini"]))
    points = _points_of_nemo(words.get("policy.scheduler"), file)
    max_steps = (size["last"] or steps or 0) * updates or None
    return _settings(
        words,
        Optimiser(points=points, schedule="constant", every=updates, **words.take("optimiser")),
        _loss_of_nemo(words, updates),
        Batching(1, updates, 1, 1),
        seed=run["seed"],
        autocast="float32" if run["precision"] == "float32" else "bfloat16",
        dropout=run["adapter"] and run["dropout"] > 0,
        facts={"num_generations": int(size["n"]), "max_steps": max_steps},
        notes=("groups of equal rewards were dropped (use_dynamic_sampling)",) * run["drops"],
    )


def _loss_of_nemo(words: Words, updates: int) -> PolicyLoss:
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


def _points_of_nemo(scheduler: Any, file: Path) -> tuple[tuple[float, float], ...]:
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


def open_instruct(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """open-instruct's GRPO arguments (``grpo_fast.py``), 0.1 to 0.3: JSON, YAML, or as Weights & Biases has them.

    A step is normalised by its own tokens, of all processes. Packing mixes rows, so the members of several
    mini-batches cannot be found. ``--save_traces`` logs what trained, with advantages and, later, the sampler's
    log-probabilities.

    Steps are generations.
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
    loss |= {"beta": loss["beta"] * run["with_ref"], "kl_input_clamp": 40.0, "correction": _rho(words)}
    loss |= {"surrogate": "cispo", "epsilon_high": 1 + loss["epsilon_high"]} if run["cispo"] else {}
    loss |= {"sync_ref": (run["alpha"], run["follows"])} if run["follows"] else {}
    facts = words.take("facts") | {"max_steps": total, "order": "log" if size["minis"] == 1 else "unknown"}
    return _settings(
        words,
        Optimiser(warmup=warmup, n_steps=total, max_grad_norm=norm, **words.take("optimiser")),
        PolicyLoss("step", ratio_to="sampler" if run["to_sampler"] else "old", **loss),
        Batching(1, size["minis"], size["epochs"], 1),
        seed=run["seed"],
        autocast="float32" if run["computed"] == "float32" else "bfloat16",
        facts=facts,
    )


def _rho(words: Words) -> Correction | None:
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


def prime_rl(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """prime-rl's settings of a training, 0.5 to 0.8: the resolved TOML, or as Weights & Biases has them.

    Training is asynchronous: ratios are against what the sampler logged. One step a batch, normalised by its
    tokens. The regulariser is kl_tau (log π − log sampler)². Traces hold advantages and the sampler's
    log-probabilities.

    Steps are updates.
    """
    own = "trainer." if any(str(name).split(".")[0] == "trainer" for name in settings) else ""
    words = Words(settings, file, "prime_rl", own).refuse()
    run, given, betas = words.take("run"), words.take("optimiser"), words.take("betas")
    total = run["steps"] or steps
    if words.values.get(f"{own}optim.max_norm", "") in (None, "None"):
        given["max_grad_norm"] = None
    given["points"] = _points_of_prime(words, given["learning_rate"], total)
    loss = words.take("loss")
    bounds = "ipo" if loss["surrogate"] == "ipo" else "dppo"
    if bounds == "dppo" and f"{own}loss.ipo_mask_low" in words.values:
        loss["surrogate"], bounds = "ipo", "masked"
    loss |= {"beta": 2 * loss["beta"], **words.take(bounds)}
    return _settings(
        words,
        Optimiser(schedule="constant", betas=(betas["first"], betas["second"]), **given),
        PolicyLoss("step", kl="k2", kl_to="sampler", ratio_to="sampler", **loss),
        Batching(),
        autocast="bfloat16",
        weights=run["weights"],
        dropout=run["dropout"] > 0,
        facts={"max_steps": total, **words.take("facts")},
    )


def _points_of_prime(words: Words, rate: float, total: int | None) -> tuple[tuple[float, float], ...]:
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


def openrlhf(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """OpenRLHF's arguments (``train_ppo_ray``) as JSON or in Weights & Biases: with dots since 0.10, and as before.

    Rows are drawn in an order that its settings do not tell. Since 0.10.3 a step is normalised by its tokens,
    before that every micro-batch by its own. Its PPO logs no rollouts; what a reward function logs can be
    attributed.

    Steps are updates.
    """
    words = Words(settings, file, "openrlhf").refuse()
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
        "order": "log" if updates == 1 else "unknown",
    }
    return _settings(
        words,
        Optimiser(warmup=ceil(run["rise"] * (steps or 0)), n_steps=steps, decay_all=False, **given),
        PolicyLoss(**loss),
        Batching(1, updates, size["epochs"], 1),
        autocast="bfloat16",
        dropout=run["dropout"] > 0,
        facts=facts,
        notes=("before 0.10.3 the token mean was that of micro-batches, whose members are not known",),
        reward_kl=RewardKL(run["beta"], loss["kl"], clamp=10.0, to_go=True) if charged else None,
    )


def ms_swift(settings: Mapping[str, Any], file: Path, steps: int | None) -> RunSettings:
    """ms-swift's ``args.json`` of a GRPO run: TRL's words beside its own, 3.2 to 4.5.

    It says every word, so no default counts. Those of its own that change updates have TRL's names here, or are
    refused.

    Steps are updates.
    """
    words = Words(settings, file, "ms_swift").refuse()
    if words.get("rollout_importance_sampling_mode"):  # It weighs the KL term, too.
        words.need("beta")
    given = {name: settings[name] for name in words.table["trl"].split() if name in settings}
    given |= {ours: settings[name] for name, ours in words.table["ours"].items() if settings.get(name) is not None}
    given["vllm_importance_sampling_correction"] = "vllm_importance_sampling_mode" in given
    if given.get("importance_sampling_level") == "sequence_token":  # The gradient of sequence.
        given["importance_sampling_level"] = "sequence"
    given["vllm_importance_sampling_cap"], given["use_bias_correction_kl"] = None, False
    found = trl.of(given, file=file, beside=trl.Beside(n_steps=steps, base=words.take("run")["base"]), rescales=True)
    loss = replace(found.loss, kl_input_clamp=20.0, kl_clamp=10.0)
    if loss.kind == "dapo":  # A generation's token mean, which transformers then divides by a step's micro-batches.
        loss = replace(loss, dapo_factor=1 / found.batching.parts)
    if words.flag("kl_in_reward"):  # It is in the advantages, which are logged.
        loss = replace(loss, beta=0.0)
    facts = {**found.facts, "advantages": "logged"}
    return replace(found, loss=loss, trainer="ms_swift", version=words.get("swift_version"), facts=facts)


READERS: dict[str, Reader] = {
    "verl": verl, "nemo_rl": nemo_rl, "open_instruct": open_instruct, "prime_rl": prime_rl, "openrlhf": openrlhf,
    "ms_swift": ms_swift,
}  # fmt: skip
