"""Which samples of a run moved what: from checkpoints and log to an `Attribution`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution, banzhaf
from tsae.attribution.config import AttributionConfig
from tsae.attribution.effects import Effects, simulate
from tsae.attribution.gradient_store import batches_of, build_gradients
from tsae.attribution.path import TrainingPath
from tsae.attribution.recipe import Recipe, read_recipe
from tsae.attribution.sample_kinds import sample_kinds
from tsae.attribution.shares import Shares, shares
from tsae.attribution.targets import FeatureMeans, LogLikelihood, NextToken, Targets, Together
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.advantages import group_advantages, group_names
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

_MOST_SAMPLES = 10**6
_FOR_PROBLEMS = 3
"""Simulated halves for each problem, below which a regression on problems says nothing."""


def attribute(
    series: CheckpointSeries,
    rollouts: Rollouts,
    to: str | Path,
    *,
    recipe: Recipe | str | Path,
    sae: TemporalSAE | None = None,
    run: str | None = None,
    first_token: int | None = None,
    targets: Targets | None = None,
    config: AttributionConfig | None = None,
    progress: bool = True,
) -> Attribution:
    """Attribute what a run changed to the samples that it was trained on.

    Args:
        series: the base, and the run's checkpoints; the more the better.
        rollouts: the run's log, with steps and rewards or advantages.
        to: folder for the samples' gradients and the results; an interrupted call goes on from it.
        recipe: the run's optimiser and loss, or the folder or file with the trainer's settings.
        sae: gives features as targets.
        run: its name, where the series has several.
        first_token: token id; the probability that a response begins with it becomes a target.
        targets: others, instead of all that are found here.
        config: how much is computed.
        progress: show bars.

    Returns:
        shares of samples, and effects of kinds of samples and of problems; also saved in the folder.

    Raises:
        TsaeError: where log, checkpoints and settings do not fit together.
    """
    config, to = config or AttributionConfig(), Path(to)
    recipe = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    path = TrainingPath.of(series, run, device=config.device)
    notes = ["The optimiser starts from zero: the log and the checkpoints begin with the training."]
    if path.steps[0] != 0:
        notes = [f"The state of the optimiser before step {path.steps[0] + 1} is not known; it starts from zero there."]
    rollouts, batches = _batches(rollouts, path, config, notes)
    checked = _advantages(rollouts, batches, notes)
    special = list(series.base.load_tokenizer().all_special_ids)
    wanted = targets or _targets(path, checked, sae, special, first_token, recipe.loss.temperature, config, notes)
    budget = int(config.budget_gb * 1e9)
    store = build_gradients(
        path, checked, batches, recipe.loss, to / "gradients", budget=budget, batch_tokens=config.batch_tokens,
        progress=progress,
    )  # fmt: skip
    steps = [step for i, step in enumerate(path.steps) if i % config.every == 0 or step == path.last]
    knots = TrainingPath(path.trained, {step: path.knots[step] for step in steps})
    split = shares(store, knots, recipe.optimiser, wanted, progress=progress)
    used = np.zeros(len(checked), dtype=bool)
    used[np.concatenate(list(batches.values()))] = True
    if "band" in config.groups and checked.frame.band.isna().all():
        notes.append("The log has no bands; `tsae rollouts bands` sets them.")
    kinds = {name: mask & used for name, mask in sample_kinds(checked, config.groups).items()}
    problem = checked.frame.problem_id.to_numpy()
    names = np.unique(problem[used])
    halves = _halves(len(names), config, notes)
    of_problem = halves[:, np.searchsorted(names, problem).clip(max=len(names) - 1)] & np.isin(problem, names)
    kept = [*(used & ~mask for mask in kinds.values()), *kinds.values(), *of_problem]
    effects = simulate(store, path, recipe.optimiser, wanted, np.array(kept), progress=progress)
    problems, fit = _of_problems(names, halves, effects, 2 * len(kinds), split, problem, config.seed)
    found = Attribution(
        _target_table(split, effects, path, wanted, config),
        _sample_table(split),
        _group_table(kinds, effects, split),
        problems,
        split.segments,
        {
            "recipe": str(recipe),
            "config": {**vars(config)},
            "rollouts": rollouts.fingerprint,
            "checkpoints": path.steps,
            "fit": fit,
            "path_error": float(split.segments.path_error.max()),
            "notes": notes + _warnings(split),
        },
    )
    found.save(to)
    return found


def _batches(
    rollouts: Rollouts, path: TrainingPath, config: AttributionConfig, notes: list[str]
) -> tuple[Rollouts, dict[int, np.ndarray]]:
    """The log's rows by the step that trained on them, as far as the checkpoints go."""
    batches = batches_of(rollouts)
    first, last = path.steps[0] + 1, path.last
    missing = [step for step in range(first, last + 1) if step not in batches]
    if missing:
        raise TsaeError(
            f"lacks step {missing[0]} and {len(missing) - 1} others of the steps {first} to {last} between the "
            f"checkpoints; it has {len(batches)} steps, {min(batches)} to {max(batches)}",
            where=rollouts.origin,
            fix="Log every step, or give checkpoints that enclose the logged steps.",
        )
    beyond = [step for step in batches if not first <= step <= last]
    if beyond:
        notes.append(
            f"{len(beyond)} logged steps lie outside the checkpoints (steps {first} to {last}) and are left out."
        )
    batches = {step: batches[step] for step in range(first, last + 1)}
    n = sum(map(len, batches.values()))
    if n > _MOST_SAMPLES:
        raise TsaeError(
            f"has {n:,} samples between the checkpoints; attribution takes at most {_MOST_SAMPLES:,}",
            where=rollouts.origin,
            fix="Give checkpoints that lie nearer to each other.",
        )
    return rollouts, batches


def _advantages(rollouts: Rollouts, batches: dict[int, np.ndarray], notes: list[str]) -> Rollouts:
    """Rollouts with the trainer's advantages, compared with recomputed ones."""
    rows = np.concatenate(list(batches.values()))
    logged = rollouts.frame.advantage.to_numpy(dtype=float)[rows]
    if not np.isfinite(logged).any():
        notes.append(
            "The log has no advantages; they are recomputed as (reward − mean) / standard deviation of the group."
        )
        return rollouts.with_advantages()
    reward = rollouts.frame.reward.to_numpy(dtype=float)[rows]
    if np.isfinite(reward).all() and np.isfinite(logged).all():
        group = group_names(rollouts.frame)[rows]
        kinds = {"grpo": group_advantages(reward, group), "dr_grpo": group_advantages(reward, group, "dr_grpo")}
        far = {name: float(np.abs(again - logged).max()) for name, again in kinds.items()}
        best = min(far, key=lambda name: far[name])
        notes.append(
            f"Logged advantages are those of {best}, recomputed from rewards."
            if far[best] < 0.01
            else f"Logged advantages differ from recomputed ones by up to {far[best]:.2g}; the logged ones count."
        )
    return rollouts


def _targets(
    path: TrainingPath,
    rollouts: Rollouts,
    sae: TemporalSAE | None,
    special: list[int],
    first_token: int | None,
    temperature: float,
    config: AttributionConfig,
    notes: list[str],
) -> Together:
    """First token, right against wrong, and features."""
    early = np.flatnonzero(rollouts.frame["step"].to_numpy() == path.steps[0] + 1)
    rng = np.random.default_rng(config.seed)
    fixed = rollouts.select(np.sort(rng.permutation(early)[: config.n_fixed]))
    notes.append(f"Targets are means over {len(fixed)} trajectories that the base sampled.")
    parts: list[Targets] = []
    if first_token is not None:
        prompts = {fixed.frame.problem_id[row]: fixed.tokens(row)[0] for row in range(len(fixed))}
        parts.append(NextToken(list(prompts.values()), ["first token"] * len(prompts), first_token, what="P"))
    right, wrong = ((fixed.frame.outcome == what).to_numpy() for what in ("success", "failure"))
    if len(set(fixed.frame.problem_id[right]) & set(fixed.frame.problem_id[wrong])):
        name = "log-likelihood, right − wrong"
        parts.append(LogLikelihood(fixed, {name: right}, {name: wrong}, temperature=temperature))
    else:
        notes.append("No problem of these trajectories has both right and wrong responses: no target of outcomes.")
    if sae is not None:
        chosen = list(config.features) or _moved_most(path, sae, fixed, special, config.n_features)
        parts.append(FeatureMeans(sae, chosen, fixed, special, batch_tokens=config.batch_tokens))
    if not parts:
        raise TsaeError("nothing is there to attribute", where="attribute", fix="Give an SAE, or first_token.")
    return Together(*parts)


def _moved_most(path: TrainingPath, sae: TemporalSAE, fixed: Rollouts, special: list[int], n: int) -> list[int]:
    """Features by the change of their means, in standard deviations over trajectories of the base."""
    every = FeatureMeans(sae, range(sae.config.d_sae), fixed, special)
    path.put(path.steps[0])
    before = every.each(path.trained, fixed, soft=False)
    path.put(path.last)
    moved, deviation = every.each(path.trained, fixed, soft=False).mean(0) - before.mean(0), before.std(0)
    size = np.where((before > 0).mean(0) >= 0.05, np.abs(moved) / np.where(deviation > 0, deviation, 1.0), 0.0)
    return [int(feature) for feature in np.argsort(-size, kind="stable")[:n]]


def _halves(n: int, config: AttributionConfig, notes: list[str]) -> np.ndarray:
    """(subsets, n) random halves of the problems."""
    if config.subsets and config.subsets < _FOR_PROBLEMS * n:
        notes.append(
            f"{config.subsets} halves are too few for the effects of {n} problems, which need {_FOR_PROBLEMS * n}; "
            "they are left out."
        )
    if config.subsets < _FOR_PROBLEMS * n or n < 2:
        return np.zeros((0, n), dtype=bool)
    rng = np.random.default_rng(config.seed)
    return np.array([rng.permutation(n) < n // 2 for _ in range(config.subsets)])


def _of_problems(
    names: np.ndarray, halves: np.ndarray, effects: Effects, begin: int, split: Shares, problem: np.ndarray, seed: int
) -> tuple[pd.DataFrame, dict[str, float]]:
    """The problems' table, and the regression's R² by target."""
    if not len(halves):
        nothing = {name: pd.Series(dtype=float) for name in ("n", "share", "effect", "low", "high")}
        return pd.DataFrame({"problem_id": pd.Series(dtype=str), "target": pd.Series(dtype=str), **nothing}), {}
    effect, low, high, r2 = banzhaf(halves, effects.changes[begin:], seed=seed)
    tables = []
    for i, name in enumerate(names):
        mine = problem[split.rows] == name
        columns = {"share": split.shares[mine].sum(0), "effect": effect[i], "low": low[i], "high": high[i]}
        tables.append(pd.DataFrame({"problem_id": name, "n": int(mine.sum()), "target": effects.targets, **columns}))
    return pd.concat(tables, ignore_index=True), dict(zip(effects.targets, r2.tolist(), strict=True))


def _target_table(
    split: Shares, effects: Effects, path: TrainingPath, targets: Targets, config: AttributionConfig
) -> pd.DataFrame:
    path.put(path.steps[0])
    before = targets.values(path.trained)
    remainder = split.remainder / np.where(split.realised == 0, np.nan, split.realised)
    return pd.DataFrame(
        {
            "target": split.targets,
            "before": before,
            "after": before + split.realised,
            "realised": split.realised,
            "simulated": effects.whole,
            "decay": split.decay,
            "remainder": remainder,
            "flagged": ~(np.abs(remainder) <= config.flag_remainder),
        }
    )


def _sample_table(split: Shares) -> pd.DataFrame:
    n, names = len(split.rows), split.targets
    return pd.DataFrame(
        {
            "trajectory": np.repeat(split.rows, len(names)),
            "step": np.repeat(split.steps, len(names)),
            "target": np.tile(names, n),
            "share": split.shares.ravel(),
            "product_base": split.plain["base"].ravel(),
            "product_path": split.plain["path"].ravel(),
        }
    )


def _group_table(kinds: dict[str, np.ndarray], effects: Effects, split: Shares) -> pd.DataFrame:
    tables = []
    for i, (name, mask) in enumerate(kinds.items()):
        without, alone = effects.changes[i], effects.changes[len(kinds) + i]
        columns = {
            "share": split.shares[mask[split.rows]].sum(0),
            "without": without,
            "effect": effects.whole - without,
            "alone": alone,
        }
        tables.append(pd.DataFrame({"group": name, "n": int(mask.sum()), "target": effects.targets, **columns}))
    names = ["group", "n", "target", "share", "without", "effect", "alone"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)


def _warnings(split: Shares) -> list[str]:
    error = float(split.segments.path_error.max())
    if error < 0.05:
        return []
    return [
        f"The simulated optimiser misses the checkpoints by up to {error:.0%} of the distance between them: settings "
        "or log are not quite those of this run."
    ]
