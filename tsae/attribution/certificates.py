"""Is the replay the run? What the trainer logged of every step, compared with the replay, and what follows from it.

It also says what a log of texts lost. The trainer logged the mean length of a generation: where it counted more tokens
than the log has, end tokens are put back, and other special tokens inside of responses. Without one, the token after it
looks improbable to the policy that sampled it. So at the most improbable tokens every special token is tried, and the
one that raises the response's likelihood most is put back. The gradient norm that the trainer logged says whether that
was right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.forward_passes import Logs, Run, log_probabilities_of
from tsae.attribution.settings import RunSettings
from tsae.errors import refuse
from tsae.rollouts.table import Rollouts

FAR = 0.3
"""Distance from a checkpoint, as a part of the way, above which no effect is stated (docs/attribution.md)."""
_OFF = 0.1
"""Relative difference of gradient norms from which a replay has departed; half of three steps in a row have it."""
_OTHER_RUN = 0.3
"""The same at the first step, where weights are known: log and settings are of different runs."""
_FLAT = 1e-5
"""Gradient norm that counts as none: of a step whose rewards are all alike rounding is left."""
_FACTS = {"grad_norm": ("grad_norm",), "mean_length": ("completions/mean_length", "completion_length")}


def logged_facts(history: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """grad_norm and mean_length (tokens) by step, from what the trainer logged; NaN where it did not."""
    found: dict[int, dict[str, float]] = {step: {} for step in history}
    for step, line in history.items():
        for name, keys in _FACTS.items():
            value = next((line[key] for key in keys if isinstance(line.get(key), int | float)), None)
            found[step][name] = float("nan") if value is None else float(value)
    return pd.DataFrame.from_dict(found, orient="index", columns=list(_FACTS), dtype=float).sort_index()


def with_end_tokens(
    rollouts: Rollouts,
    rows_by_step: dict[int, np.ndarray],
    facts: pd.DataFrame,
    end: int | None,
    limit: int | None,
    notes: list[str],
) -> Rollouts:
    """Give responses the end token back that a log of texts lost, and say which were cut off.

    The trainer counted it in the mean length that it logged. Where it logged none, responses that end without one and
    before the limit had it, if no response of the log has one.

    Args:
        rollouts: of the log.
        rows_by_step: rows by the step at which they were logged.
        facts: of `logged_facts`.
        end: id of the end token.
        limit: most tokens of a response; None where the settings do not say.
        notes: says what was added.
    """
    if end is None or "parts" in rollouts.frame.columns:
        return rollouts
    ids = [rollouts.tokens(row)[1] for row in range(len(rollouts))]
    ended = np.array([len(one) > 0 and one[-1] == end for one in ids])
    reasons = rollouts.frame.finish_reason.to_numpy(dtype=object)
    cut = (reasons == "length") | ~ended & (rollouts.lengths("response_ids") >= (limit or np.inf))
    if (cut & (reasons != "length")).any():
        rollouts = rollouts.with_column("finish_reason", np.where(cut, "length", reasons))
    lacking = ~ended & ~cut
    used = np.zeros(len(rollouts), dtype=bool)
    used[np.concatenate(list(rows_by_step.values()))] = True
    compared = [step for step in rows_by_step if step in facts.index and np.isfinite(facts.mean_length[step])]
    if compared:
        counted = sum(float(facts.mean_length[s]) * len(rows_by_step[s]) for s in compared)
        some = np.concatenate([rows_by_step[step] for step in compared])
        missing = counted - float(rollouts.n_sampled[some].sum())
        if not missing > 0.5 * lacking[some].sum() > 0:
            return rollouts
    elif ended[used].any() or not lacking[used].any():
        return rollouts
    notes.append(f"The log's texts lack the end token; {int((lacking & used).sum()):,} responses have it back.")
    longer = [np.append(one, end) if lack else one for one, lack in zip(ids, lacking, strict=True)]
    changed = rollouts.with_column("response_ids", longer)
    return changed.with_column("response_length", changed.lengths("response_ids"))


@dataclass(frozen=True)
class Verdict:
    """How well the run is replayed."""

    path_error: float | None
    """Largest distance from a checkpoint, before any restart; None without checkpoints."""
    to: int
    """The last step that is replayed well."""
    within: float | None
    """Largest relative difference of gradient norms up to there; None where the trainer logged none."""
    departs: int | None
    """The first step that is not; None: all are."""
    cause: str
    gate: str
    """Why no effect is stated, and what would help; empty where effects are stated."""

    def record(self, last: int) -> dict[str, Any]:
        """For `Attribution.info`; steps is the last step that was replayed."""
        return {"steps": last, "to": self.to, "within": self.within, "departs": self.departs, "cause": self.cause}


def check_run(steps: pd.DataFrame, settings: RunSettings) -> None:
    """Refuse log, settings and checkpoints of different runs.

    Raises:
        TsaeError: where the gradient of the first step, at weights that are known, is another than the logged one; and
            where the replay is as far from the first checkpoint as it began, or farther.
    """
    first, distance = steps.iloc[0], steps[["step", "distance"]].dropna()[:1]
    logged, found = float(first.logged_grad_norm), float(first.grad_norm)
    off = abs(max(found, _FLAT) / max(logged, _FLAT) - 1)
    doubt = "a log with token ids leaves no doubt about its texts (tsae.rl.TsaeCallback)"
    refuse(
        settings.source,
        (
            np.isfinite(logged) and off > _OTHER_RUN and not settings.dropout,
            f"the gradient of step {int(first.step)} has the norm {found:.3g}, and the trainer logged {logged:.3g}",
            f"Give log, settings and base of one run; {doubt}.",
        ),
        (
            (distance.distance >= 1).any(),
            f"the replay is farther from the checkpoint of step {distance.step.max()} than its first weights are",
            "Give log, settings and checkpoints of one run.",
        ),
    )


def verdict(run: Run, steps: pd.DataFrame) -> Verdict:
    """Judge a replay by its table of steps (`tsae.attribution.path.Replayed.steps`)."""
    off = (steps.grad_norm.clip(lower=_FLAT) / steps.logged_grad_norm.clip(lower=_FLAT) - 1).abs()
    known = off.notna().to_numpy()
    departs, last = None, int(steps.step.iloc[-1])
    for i in np.flatnonzero(known):
        if off.iloc[i] > _OFF and np.nanmedian(off.iloc[i : i + 3]) > _OFF:
            departs = int(steps.step.iloc[i])
            break
    distance = steps[["step", "distance"]].dropna()
    error = float(distance.distance.max()) if len(distance) else None
    good = off[steps.step < (last + 1 if departs is None else departs)].dropna()
    to = last if departs is None else departs - 1
    cause = "" if departs is None and (error is None or error <= _OFF) else _cause(run, steps, departs)
    gate = ""
    if error is not None and error > FAR:
        at = int(distance.step[distance.distance.idxmax()])
        gate = f"The replay ends {error:.0%} of the way from the checkpoint of step {at}: {cause}."
    elif error is None and departs is not None and (steps.step <= to).mean() < 0.8:
        gate = f"The replay departs from the run at step {departs}, and no checkpoint says how far: {cause}."
    elif error is None and not known.any():
        gate = (
            "Nothing says whether the replay is the run: no checkpoint lies at a step that is replayed, and no "
            "gradient norm was logged. Save a checkpoint at the log's last step, or log the training with "
            "tsae.rl.TsaeCallback."
        )
    return Verdict(error, to, float(good.max()) if len(good) else None, departs, cause, gate)


def _cause(run: Run, steps: pd.DataFrame, departs: int | None) -> str:
    lengths = (steps.logged_mean_length - steps.mean_length).abs() * steps.n
    lost = lengths[(lengths > 0.5) & (steps.step <= (departs or steps.step.iloc[-1]))]
    if len(lost):
        step = int(steps.step[lost.index[0]])
        n = round(float(lost.iloc[0]))
        return (
            f"the trainer counted {n} token{'s' * (n > 1)} more at step {step} than the log has: a log of texts loses "
            "special tokens; token ids would not (tsae.rl.TsaeCallback)"
        )
    if run.settings.dropout:
        return "the training dropped activations at random, which cannot be repeated"
    if run.settings.autocast != "float32":
        return "bfloat16 rounds differently on another machine; checkpoints with optimizer.pt would restart the replay"
    return "settings or log are not quite those of this run, or samples are missing"


_MOST = 16
"""Tokens that are put back in a generation, at most; each takes some forward passes."""
_SUSPECTS = 6
"""Improbable tokens before which special tokens are tried."""


def restored(run: Run, generation: np.ndarray, counted: float) -> tuple[Run, int]:
    """Put lost tokens of a generation back; the model has the weights that sampled it.

    Args:
        run: has the rows.
        generation: rows of the rollouts.
        counted: tokens of the generation, by the trainer.

    Returns:
        the run with longer responses, and how many tokens were put back.
    """
    lost = round(counted - float(run.rollouts.n_sampled[generation].sum()))
    if not 0 < lost <= _MOST or not run.special or "parts" in run.rollouts.frame.columns:
        return run, 0
    logs, n = log_probabilities_of(run, generation, generation), 0
    for _ in range(lost):
        found = _best(run, logs)
        if found is None:
            break
        row, ids = found
        longer = [run.rollouts.tokens(i)[1] for i in range(len(run.rollouts))]
        longer[row] = ids
        changed = run.rollouts.with_column("response_ids", longer)
        run = replace(run, rollouts=changed.with_column("response_length", changed.lengths("response_ids")))
        logs |= log_probabilities_of(run, np.array([row]), generation)
        n += 1
    return run, n


def _best(run: Run, logs: Logs) -> tuple[int, np.ndarray] | None:
    """The row and the longer response that gain most log-probability; None where none gains."""
    suspects = sorted((float(log), row, place) for row, of in logs.items() for place, log in enumerate(of.tolist()))
    tried: list[tuple[int, np.ndarray]] = []
    for _, row, place in suspects[:_SUSPECTS]:
        ids = run.rollouts.tokens(row)[1]
        tried += [(row, np.insert(ids, at, s)) for at in {max(0, place - 1), place} for s in run.special]
    rows = np.array([row for row, _ in tried])
    some = run.rollouts.select(rows).with_column("response_ids", [ids for _, ids in tried])
    every = np.arange(len(tried))
    new = log_probabilities_of(replace(run, rollouts=some), every, every)
    gain = [float(new[i].sum() - logs[row].sum()) for i, (row, _) in enumerate(tried)]
    best = int(np.argmax(gain))
    return tried[best] if gain[best] > 0 else None
