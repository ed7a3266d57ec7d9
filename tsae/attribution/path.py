"""The forward replay: the run's own updates, taken again from its first weights, with what certifies them.

Where a checkpoint lies, its distance is measured: ‖replayed − saved‖ / ‖saved − weights that the stretch began with‖.
A checkpoint with the optimiser's state restarts the replay there, if it is not exact anyway; without it the replay
continues as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from tsae.attribution.certificates import restored
from tsae.attribution.forward_passes import (
    Known,
    Logs,
    Rows,
    Run,
    gradient_of,
    known_at,
    needs_old,
    rows_of,
    used,
    with_reward_kl,
)
from tsae.attribution.states import State, States, Stepped, Stepper
from tsae.base.progress import progress_bar
from tsae.errors import TsaeError

_EXACT = 0.01
"""Distance from a checkpoint below which nothing is gained by a restart."""


@dataclass(frozen=True)
class Control:
    """A saved checkpoint."""

    weights: torch.Tensor
    """(P,)."""
    state: State | None
    """With the optimiser's running means; None where they are not there."""


Controls = Mapping[int, Callable[[], Control]]
"""How to load the checkpoints, by step."""


@dataclass
class Replayed:
    """What a replay leaves for shares and effects."""

    run: Run
    states: States
    stepper: Stepper
    end: torch.Tensor
    """(P,) weights after the last step."""
    steps: pd.DataFrame
    """One row a step: see `tsae.attribution.attribution.Attribution.steps`."""
    clips: dict[int, float]
    logs: Logs
    """Log-probabilities of rows at the beginning of the first step that used them."""
    ref: Logs
    advantage: Logs = field(default_factory=dict)
    """Of tokens, where those of a response differ."""
    starts: dict[int, int] = field(default_factory=dict)
    """Steps at which states are kept, with the number of steps of which their running means know."""
    lost: int = 0
    """Special tokens that were put back (`tsae.attribution.certificates`)."""
    restarts: list[int] = field(default_factory=list)
    """Steps whose checkpoint restarted the replay."""


def replay(
    run: Run,
    states: States,
    controls: Controls,
    facts: pd.DataFrame,
    *,
    reference: torch.Tensor | None = None,
    progress: bool = True,
) -> Replayed:
    """Take the run's updates again.

    Args:
        run: what is replayed.
        states: where weights go.
        controls: checkpoints that were saved.
        facts: what the trainer logged, by step: grad_norm, mean_length; NaN where it did not.
        reference: (P,) weights that the KL term is against; by default the run's first.
        progress: show a bar.

    Raises:
        TsaeError: where a gradient is not finite.
    """
    settings = run.settings
    stepper = Stepper(run.trained, settings.optimiser, rounded=settings.weights == "bfloat16")
    if settings.needs_ref and reference is None:
        reference = run.begin.weights
    sync, known = settings.loss.sync_ref, Known()
    state, begin = run.begin.copy(), run.begin.weights
    found = Replayed(run, states, stepper, state.weights, pd.DataFrame(), {}, {}, {})
    lines = []
    for update in progress_bar("replay", "step", over=run.plan.updates, shown=progress):
        run.trained.put(state.weights)
        if update.first and update.step in facts.index and np.isfinite(length := facts.mean_length[update.step]):
            generation = run.plan.generations[update.generation]
            run, n = restored(run, generation, length * len(generation))
            found.run, found.lost = run, found.lost + n
        if states.every > 1 and ((state.step - run.begin.step) % states.every == 0 or state.step in found.restarts):
            states.keep(state)
            found.starts[state.step] = state.taken
        if update.first or state.step == run.begin.step:
            known = known_at(run, update, reference)
            found.run = run = with_reward_kl(run, known, run.plan.generations[update.generation])
            found.advantage |= known.advantage
        before, step = state.weights.clone(), rows_of(run, update)
        gradient, logs = gradient_of(run, step, known)
        for row, log in logs.items():
            found.logs.setdefault(row, known.old.get(row, log))
        found.ref |= known.ref
        if not gradient.isfinite().all():
            fix = (
                "Look for advantages or log-probabilities of this step that are not finite, or replay the steps "
                "before it (--steps)."
            )
            raise TsaeError(f"the gradient of step {update.step} is not finite", where=run.rollouts.origin, fix=fix)
        scale, clip, norm = stepper.take(state, gradient)
        found.clips[update.step] = clip
        if states.every == 1:
            states.put(update.step, Stepped(before, scale))
        if reference is not None and sync and state.step % sync[1] == 0:
            reference = torch.lerp(reference, state.weights, sync[0])
        distance = float("nan")
        if update.step in controls:
            control = controls[update.step]()
            way = control.weights - begin
            if way.any():  # else nothing was learned until there
                distance = float((state.weights - control.weights).norm() / way.norm())
            if control.state is not None and update.step < run.last and not distance <= _EXACT:
                found.restarts.append(update.step)
                state, begin = control.state.copy(), control.weights
        lines.append(
            {
                "step": update.step,
                "n": len(step.rows),
                "used": len(used(run, step)),
                "grad_norm": norm,
                "mean_length": float(run.rollouts.n_sampled[run.plan.generations[update.generation]].mean()),
                "distance": distance,
                "clipped": clip < 1,
            }
        )
    found.end = state.weights
    table = pd.DataFrame(lines).merge(facts.add_prefix("logged_"), how="left", left_on="step", right_index=True)
    found.steps = table
    return found


def steps_back(path: Replayed) -> Callable[[int], tuple[Stepped, Rows, Known]]:
    """A function that gives a step's weights, rows and log-probabilities, for steps in falling order."""
    run, states = path.run, path.states
    there: set[int] = set()

    def get(step: int) -> tuple[Stepped, Rows, Known]:
        if states.every > 1 and step not in there:
            for old in there:
                states.drop(old)
            there.clear()
            there.update(_again(path, max(start for start in path.starts if start < step), step))
        found = states.get(step, run.trained.device)
        update = run.update(step)
        run.trained.put(found.before)
        return found, rows_of(run, update), known_of(path, np.concatenate(update.parts))

    return get


def _again(path: Replayed, low: int, high: int) -> range:
    """Take the steps after `low` up to `high` again, and keep what the sweep needs of them."""
    state = path.states.kept(low, path.starts[low], path.run.trained.device)
    for step in range(low + 1, high + 1):
        update = path.run.update(step)
        before = state.weights.clone()
        path.run.trained.put(state.weights)
        rows = rows_of(path.run, update)
        gradient, _ = gradient_of(path.run, rows, known_of(path, rows.rows))
        scale, _, _ = path.stepper.take(state, gradient)
        path.states.put(step, Stepped(before, scale))
    return range(low + 1, high + 1)


def known_of(path: Replayed, rows: np.ndarray, *, elsewhere: bool = False) -> Known:
    """Log-probabilities of rows as the replay found them. Elsewhere than on its path, all ratios are against them."""
    some = rows.tolist()
    old = {row: path.logs[row] for row in some if row in path.logs} if elsewhere or needs_old(path.run) else {}
    ref, advantage = ({row: of[row] for row in some if row in of} for of in (path.ref, path.advantage))
    return Known(old, ref, advantage)


def train_on(path: Replayed, kept: np.ndarray, *, progress: bool) -> torch.Tensor:
    """Really train again on some of the samples.

    The loss weighs and clips the logged responses by ratios to the probabilities that they had in the run. Leaving a
    sample out takes its summand away and changes no other.

    Args:
        path: of the run.
        kept: (n_trajectories,) bool.
        progress: show a bar.

    Returns:
        (P,) final weights. With all samples, those of the run.
    """
    run, state = path.run, path.run.begin.copy()
    for update in progress_bar("training anew", "step", over=run.plan.updates, shown=progress):
        run.trained.put(state.weights)
        step = rows_of(run, update)
        known = known_of(path, step.rows, elsewhere=True)
        path.stepper.take(state, gradient_of(run, step, known, kept)[0])
    return state.weights
