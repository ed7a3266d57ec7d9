"""Which rows of the log each optimiser step of a run used, in which micro-batches.

TRL samples a generation, shuffles it, cuts it into micro-batches, and uses each once an iteration. Its log has the rows
as they were before the shuffle. Where a step uses a part of a generation, the shuffle must be known:

1. from the log, where it says the micro-batch of every row (`tsae.rl.TsaeCallback`);
2. from torch's generator on the CPU, which shuffles. It starts from the seed, and `rng_state.pth` beside a checkpoint
   holds its state. TRL 1.16 draws from it: at the start of an epoch a number for the loader; where the CPU samples, for
   every token an exponential variable for each row and word of the vocabulary (`torch.multinomial`); and then the
   permutation. A GPU and vLLM sample with other generators. The next saved state shows which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tsae.attribution.settings import RunSettings
from tsae.base.files import reading
from tsae.base.inert_pickle import cpu_rng_state
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_COUNT_STEPS = ("trl", "ms_swift")
"""Trainers whose logs count steps of the optimiser; those of others count generations."""
_RNG, _RNG_OF_MANY = "rng_state.pth", "rng_state_0.pth"
_MOST_DRAWS = 2e10
"""Exponential variables that are drawn to find out whether the CPU sampled: about a minute's."""


@dataclass(frozen=True)
class Update:
    """One step of the optimiser."""

    step: int
    """Its number, from 1."""
    generation: int
    """Index into `Plan.generations`."""
    first: bool
    """Whether it is the first that uses the generation: old and reference log-probabilities are computed before it."""
    parts: tuple[np.ndarray, ...]
    """Rows of the rollouts by micro-batch, in the order of the training."""


@dataclass(frozen=True)
class Plan:
    """The updates of a run."""

    updates: list[Update]
    generations: list[np.ndarray]
    """Rows of the rollouts that were sampled together."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Generation:
    step: int
    """The first that uses it."""
    rows: np.ndarray
    passes: list[list[np.ndarray]]
    """Its rows by iteration and micro-batch."""


def plan_updates(
    rollouts: Rollouts,
    settings: RunSettings,
    *,
    checkpoints: Mapping[int, Path],
    vocabulary: int | None,
    steps: tuple[int, int] | None = None,
) -> Plan:
    """Find the rows of every optimiser step.

    Args:
        rollouts: of the run alone.
        settings: of the run.
        checkpoints: folders by step; `rng_state.pth` and `trainer_state.json` are read there.
        vocabulary: size of the model's output; None: the CPU did not sample.
        steps: the first and the last that are wanted; by default 1 and the last that the log covers.

    Raises:
        TsaeError: where the log lacks a step, or the order of its rows matters and is not known.
    """
    batching = settings.batching
    if batching.parts % batching.accumulation:
        raise TsaeError(
            f"say that a step uses {batching.accumulation} micro-batches and a generation has {batching.parts}: steps "
            "mix generations, of which the log holds one alone",
            where=settings.source,
            fix="Train with steps_per_generation equal to gradient_accumulation_steps, or a multiple of it.",
        )
    logged = _by_column(rollouts, settings)
    generations = _by_step(rollouts, settings) if logged is None else logged
    a_step = batching.accumulation * _processes(settings)
    updates, notes = _updates(generations, a_step), list[str]()
    last = updates[-1].step if updates else 1
    begin, end = steps or (1, min(last, last_step(settings) or last))
    _check_all_there({update.step for update in updates}, begin, end, rollouts, settings)
    if logged is None and _order_matters(settings):
        generations, notes = _ordered(generations, (begin, end), rollouts, settings, checkpoints, vocabulary)
        updates = _updates(generations, a_step)
    updates = [update for update in updates if begin <= update.step <= end]
    used = sorted({update.generation for update in updates})
    updates = [replace(update, generation=used.index(update.generation)) for update in updates]
    return Plan(updates, [generations[i].rows for i in used], notes)


def batches_of(rollouts: Rollouts) -> dict[int, np.ndarray]:
    """Rows by the step of the log that trained on them.

    Raises:
        TsaeError: where the log has no steps, or steps that are not whole numbers.
    """
    if "step" not in rollouts.frame.columns:
        what = "the log has no steps"
        raise TsaeError(what, where=rollouts.origin, fix="Import a log that says the step of its rows.")
    step = rollouts.frame["step"].to_numpy(dtype=float, na_value=np.nan)
    if (broken := ~np.isfinite(step) | (step % 1 != 0)).any():
        what = f"{int(broken.sum())} of {len(step)} rows have no whole number as their step"
        raise TsaeError(what, where=rollouts.origin, fix="Number the steps of the optimiser 1, 2, 3, … in every row.")
    return {int(number): np.flatnonzero(step == number) for number in np.unique(step)}


def read_history(checkpoints: Mapping[int, Path]) -> dict[int, dict[str, Any]]:
    """What transformers' trainer logged, by step: `log_history` of the newest `trainer_state.json`."""
    files = [checkpoints[step] / "trainer_state.json" for step in sorted(checkpoints, reverse=True)]
    file = next((file for file in files if file.is_file()), None)
    found: dict[int, dict[str, Any]] = {}
    if file is not None:
        with reading(file, "Remove it, or give the file that the trainer wrote."):
            for entry in parse_json(file.read_text(encoding="utf-8"))["log_history"]:
                found.setdefault(int(entry["step"]), {}).update(entry)
    return found


def _by_column(rollouts: Rollouts, settings: RunSettings) -> list[_Generation] | None:
    """Generations where the log says which micro-batches the rows were in; None where it does not."""
    frame, columns, n_parts = rollouts.frame, ["generation", "micro_batch"], settings.batching.parts
    if not {*columns} <= {*frame.columns} or frame[columns].isna().any(axis=None):
        return None
    found = []
    for rows in frame.groupby("generation").indices.values():
        used = [list(numbers) for numbers in frame["micro_batch"].iloc[rows]]
        if (largest := max((number for numbers in used for number in numbers), default=0)) >= n_parts:
            what = f"say that a generation has {n_parts} micro-batches, and the log has one of number {largest}, from 0"
            raise TsaeError(what, where=settings.source, fix="Give the settings of the run that wrote this log.")
        passes = [
            [rows[[numbers[i : i + 1] == [part] for numbers in used]] for part in range(n_parts)]
            for i in range(max(map(len, used)))
        ]
        found.append(_Generation(int(frame["step"].iloc[rows[0]]), rows, passes))
    return found


def _by_step(rollouts: Rollouts, settings: RunSettings) -> list[_Generation]:
    """Generations by the steps of the log, their rows in its order."""
    batching, found = settings.batching, dict[int, _Generation]()
    each = int(batching.updates)
    for step, rows in batches_of(rollouts).items():
        first = 1 + (step - 1) // each * each if settings.trainer in _COUNT_STEPS else 1 + (step - 1) * each
        if first in found:
            raise TsaeError(
                f"has two generations in the steps {first} to {first + each - 1}, which use one by the settings: the "
                "training was resumed between them, or the settings are of another run",
                where=rollouts.origin,
                fix=f"Give the settings of this run; save checkpoints at multiples of {each} steps.",
            )
        found[first] = _Generation(first, rows, [_split(rows, settings)] * batching.iterations)
    return list(found.values())


def _processes(settings: RunSettings) -> int:
    """Processes whose rows a log has one after the other."""
    return 1 if settings.trainer in _COUNT_STEPS else settings.batching.processes or 1


def _split(rows: np.ndarray, settings: RunSettings) -> list[np.ndarray]:
    """Micro-batches of all processes in the order of the steps; of each process the rows follow each other."""
    n, accumulation, n_parts = _processes(settings), settings.batching.accumulation, settings.batching.parts
    pieces = np.array_split(rows, n * n_parts)
    starts = range(0, n_parts, accumulation)
    return [pieces[p * n_parts + i] for low in starts for p in range(n) for i in range(low, low + accumulation)]


def _updates(generations: list[_Generation], accumulation: int) -> list[Update]:
    found: list[Update] = []
    for number, generation in enumerate(generations):
        step = generation.step
        for parts in generation.passes:
            for low in range(0, len(parts), accumulation):
                if any(map(len, own := parts[low : low + accumulation])):
                    found.append(Update(step, number, step == generation.step, tuple(own)))
                    step += 1
    return found


def _check_all_there(have: set[int], begin: int, end: int, rollouts: Rollouts, settings: RunSettings) -> None:
    missing = [step for step in range(begin, end + 1) if step not in have]
    if missing:
        every, start = counted(settings, "logging_steps") or 1, min(have, default=0)
        every = every if 2 * len(missing) > end - begin else 1  # a few steps are lacking for another reason
        why = f"; it starts at step {start}" * (begin < start) if every == 1 else f"; one step in {every} was logged"
        what = f"lacks {len(missing)} of the steps {begin} to {end}, the first of them step {missing[0]}{why}"
        fix = "Log every step: logging_steps=1 in TRL, with log_completions=True."
        raise TsaeError(what, where=rollouts.origin, fix=fix)


def _order_matters(settings: RunSettings) -> bool:
    """Whether it does not come to the same in which micro-batch of a generation a row was."""
    batching, loss = settings.batching, settings.loss
    several = batching.parts > 1
    by_part = (several and loss.top_entropy_quantile < 1) or (
        loss.kind == "bnpo" and (several or (batching.processes or 1) > 1)
    )
    return batching.accumulation != batching.parts or by_part


def _ordered(
    generations: list[_Generation],
    wanted: tuple[int, int],
    rollouts: Rollouts,
    settings: RunSettings,
    checkpoints: Mapping[int, Path],
    vocabulary: int | None,
) -> tuple[list[_Generation], list[str]]:
    """The generations, each with its rows in the order in which the training used them; and notes."""
    batching, facts = settings.batching, settings.facts
    sizes = sorted({len(generation.rows) for generation in generations})
    if len(sizes) > 1 or sizes[0] % (batching.parts * _processes(settings)):
        _need_order(settings, f"and some rows are not in the log: its generations have {sizes[0]} to {sizes[-1]}")
    if settings.trainer != "trl":
        if facts.get("order") != "log":
            _need_order(settings, "and the log does not say which samples each was made of")
        return generations, []
    a_part = counted(settings, "per_device_train_batch_size")
    processes = batching.processes or (sizes[0] // (a_part * batching.parts) if a_part else 1)
    if processes > 1 or any((folder / _RNG_OF_MANY).is_file() for folder in checkpoints.values()):
        _need_order(settings, "and each of several processes shuffled its own")
    return _shuffled(generations, wanted, _Draws(rollouts, generations, settings, checkpoints, vocabulary))


def _need_order(settings: RunSettings, why: str) -> NoReturn:
    """Refuse a log whose order matters and is not known."""
    n = settings.batching.updates
    what = f"{n:g} steps use each generation" if n > 1 else "the loss depends on which samples a micro-batch has"
    usual = "Log the order: tsae.rl.TsaeCallback(trainer), one line. On one process, checkpoints with rng_state.pth "
    usual += f"(save_only_model=False) at multiples of {n:g} steps do as well."
    fix = settings.facts.get("order_fix") or usual
    raise TsaeError(f"say that {what}, {why}", where=settings.source, fix=fix)


class _Draws:
    """What TRL draws from torch's generator on the CPU, generation by generation; they count from 0."""

    def __init__(
        self,
        rollouts: Rollouts,
        generations: list[_Generation],
        settings: RunSettings,
        checkpoints: Mapping[int, Path],
        vocabulary: int | None,
    ) -> None:
        self.settings, self.each, self.n_rows = settings, int(settings.batching.updates), len(generations[0].rows)
        self.states = {
            step // self.each: _state(folder / _RNG)
            for step, folder in checkpoints.items()
            if step % self.each == 0 and (folder / _RNG).is_file()
        }
        """Saved states, by the generations before them."""
        history = read_history(checkpoints)
        self.tokens: dict[int, int] = {}
        """Tokens of the longest response of a generation."""
        self.epochs, seen = set[int](), set[str]()
        """Generations that are the first of an epoch."""
        last = max((step for step, entry in history.items() if entry.get("epoch")), default=None)
        an_epoch = None if last is None else round(last / history[last]["epoch"])
        for generation in generations:
            number = (generation.step - 1) // self.each
            longest = history.get(generation.step, {}).get("completions/max_length")
            self.tokens[number] = int(longest or rollouts.lengths("response_ids")[generation.rows].max())
            problems = set(rollouts.frame["problem_id"].iloc[generation.rows])
            if (generation.step - 1) % an_epoch == 0 if an_epoch else not number or seen & problems:
                self.epochs.add(number)
                seen = set()
            seen |= problems
        draws = self.n_rows * (vocabulary or 0) * sum(self.tokens.values())
        on_cpu = [vocabulary] if vocabulary and (draws <= _MOST_DRAWS or settings.facts.get("use_cpu")) else []
        self.samplers = [*on_cpu, None] if settings.facts.get("use_cpu") else [None, *on_cpu]
        """Possible sizes of the vocabulary from which the CPU samples; None: it does not. The likelier first."""

    def walk(self, state: np.ndarray, numbers: range, words: int | None) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The permutations of some generations, and the state after them."""
        generator = torch.Generator()
        generator.set_state(torch.from_numpy(state))
        found = {}
        for number in numbers:
            if number in self.epochs:
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            for _ in range(self.tokens[number] if words else 0):
                torch.empty(self.n_rows, words or 0).exponential_(generator=generator)
            found[number] = torch.randperm(self.n_rows, generator=generator).numpy()
        return found, generator.get_state().numpy()


def _state(file: Path) -> np.ndarray:
    found = cpu_rng_state(file)
    with reading(file, "Remove the file, or give the trainer's own."):
        torch.Generator().set_state(torch.from_numpy(found))
    return found


def _shuffled(
    generations: list[_Generation], wanted: tuple[int, int], draws: _Draws
) -> tuple[list[_Generation], list[str]]:
    """The generations of the wanted steps in the order that the generator gave them; others as they are."""
    each, settings, states = draws.each, draws.settings, dict(draws.states)
    begin, end = (wanted[0] - 1) // each, -(-wanted[1] // each)
    if settings.seed is not None:
        states.setdefault(0, torch.Generator().manual_seed(settings.seed).get_state().numpy())
    start = max((number for number in states if number <= begin), default=None)
    if settings.facts.get("use_vllm") and not draws.states:
        _need_order(settings, f"and vLLM, which may seed the generator anew, leaves no {_RNG}")
    if start is None or not {*range(start, end)} <= draws.tokens.keys():
        _need_order(settings, f"and no seed and no state of the generator is known before step {wanted[0]}")
    permutations: dict[int, np.ndarray] = {}
    confirmed, samplers = 0, draws.samplers
    for low, high in pairwise(sorted({start, end, *(number for number in states if start < number < end)})):
        for words in samplers:
            found, state = draws.walk(states[low], range(low, high), words)
            if high not in states or np.array_equal(state, states[high]):
                break
        else:
            _need_order(settings, f"and the {_RNG} of step {high * each} does not follow from what was drawn before")
        permutations |= found
        if high in states:
            confirmed, samplers = high * each, [words]
    by = "the CPU, which sampled too" if samplers[0] else "the CPU; sampling was elsewhere"
    notes = [f"The order of the rows is that of torch's generator on {by}."]
    if confirmed < wanted[1]:
        notes.append(
            f"No {_RNG} confirms the order after step {confirmed}; gradient norms do, where they are as logged."
        )
    ordered = []
    for generation in generations:
        permutation = permutations.get((generation.step - 1) // each, np.arange(draws.n_rows))
        rows = np.split(generation.rows[permutation], settings.batching.parts)
        ordered.append(replace(generation, passes=[rows] * settings.batching.iterations))
    return ordered, notes


def counted(settings: RunSettings, name: str) -> int | None:
    """A fact of the settings that counts something; None where the settings lack it, or have -1."""
    value = settings.facts.get(name)
    return int(value) if isinstance(value, int | float) and value > 0 else None


def last_step(settings: RunSettings) -> int | None:
    """The last step of the optimiser by the settings (max_steps), if they say it."""
    last = counted(settings, "max_steps")
    return last and last * (1 if settings.trainer in _COUNT_STEPS else int(settings.batching.updates))
