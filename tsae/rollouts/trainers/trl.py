"""TRL: what ``GRPOTrainer`` writes with ``log_completions=True``, one table a logged step.

After the sources of TRL 0.15 to 1.16. ``output_dir/completions/completions_{step:05d}.parquet`` holds, in this
order: step, prompt, completion, one float column a reward function, the columns that reward functions passed to
``log_extra``, and advantage. A file holds the last generation batch of its step only.

Before 0.28 there is no such file. The same table goes only to trackio or to Weights & Biases
(``wandb/*run-*/files/media/table/completions_*.table.json``; as an artifact, ``completions.table.json``), and its step
is a text. 0.17 and 0.18 have no advantages. 0.15 and 0.16 have one column reward, and log before the optimiser step,
once for every batch of generations.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.files import reading
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.logs.adapters import Format, each_row, is_conversation, only_answer
from tsae.rollouts.logs.check_advantages import check_sum
from tsae.rollouts.logs.entry import Entry, Fields, Row, Unusable, hash64, is_score, some_of, total
from tsae.rollouts.logs.log_files import LogFile, first_row, run_folder
from tsae.rollouts.logs.readers import OTHER_TABLES, kind_of

_COMPLETION_IDS = "completion_ids"
_SAME = ("prompt", "completion", "advantage")
"""Columns by which a batch is known that is logged again at a later step."""


def _parse(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    first: Row = first_row(file.path) or {}
    run = None
    if trackio := "run_name" in first:
        first, run = _first_of_trackio(file, config)
    rewards = config.rewards or _reward_columns(file, first, config.columns)
    once = trackio or kind_of(file.path) in OTHER_TABLES
    # A table of 0.15 or 0.16.
    early = once and [*first] == ["step", "prompt", "completion", "reward"]
    seen, before, first_step = Counter[str](), list[Any](), None
    # By step and prompt: a table of a service may hold several steps.
    groups: dict[int | None, dict[str, list[tuple[float | None, ...]]]] = defaultdict(lambda: defaultdict(list))

    def split(row: Fields) -> Iterable[Fields | Unusable]:
        nonlocal seen, before, first_step
        if not trackio or row.row["run_name"] != run:
            return [] if trackio else [row]
        rows, seen = [replace(row, row=found) for found in _table(row.row)], Counter()
        again, before = before, [[str(found.row.get(name)) for name in _SAME] for found in rows]
        if before and again == before:
            # Logged again at a later step that trained on the same generation batch: equal rows count once.
            rows = [replace(found, row={**found.row, "step": first_step}) for found in rows]
        elif again and rows and rows[0].row["step"] == first_step and {r[0] for r in again} != {r[0] for r in before}:
            before = again
            what = f"is of a second table of step {first_step}, with other prompts, as an evaluation logs it"
            return [row.unusable("repeated", what, "Keep the first of them with --skip repeated") for row in rows]
        elif rows:
            first_step = rows[0].row["step"]
        return rows

    def entry(row: Fields) -> Entry:
        missing = [name for name in rewards if name not in row]
        if missing:
            fix = "Name reward columns that are there (--rewards)."
            row.refuse(f"has no reward column {missing[0]}; its columns are {', '.join(row.row)}", fix)
        scores = {name: row.score(name) for name in rewards}
        found = _entry(row, scores, early=early)
        if once:
            # Until 0.24, prompts are logged with their special tokens, and the tokenizer adds none.
            found.prompt_is = "perhaps rendered" if "advantage" in row else "rendered"
            # What several tables have counts once. Only early tables have other rows of a step.
            same = f"{found.step}/" + early * f"{hash64(str(found.prompt), str(found.response), str(scores))}"
            found.key = f"{same}/{seen[same]}"
            seen[same] += 1
        if found.reward is not None and found.advantage is not None:
            prompt = json.dumps(found.prompt, sort_keys=True, default=str)
            groups[found.step][prompt].append((found.advantage, found.reward, *scores.values()))
        return found

    yield from each_row(file, config, entry, split)
    for step in groups.values() if len(rewards) > 1 and not config.rewards else ():
        check_sum(step, rewards, file.path)


def _entry(row: Fields, scores: dict[str, float | None], *, early: bool) -> Entry:
    names, prompt = row.config.columns, row.need("prompt")
    step, ids = row.count("step"), row.optional_ids(names.response_ids)
    reward = total(scores)
    return Entry(
        row.where,
        prompt=prompt if is_conversation(prompt) else row.text("prompt"),
        prompt_is="perhaps stripped",
        prompt_ids=row.optional_ids(names.prompt_ids),
        response=only_answer(row.need("completion"), row),
        response_ids=row.optional_ids(_COMPLETION_IDS) if ids is None else ids,
        rewards=scores,
        reward=reward,
        unscored=reward is None,
        answer=row.answer(names.answer),
        level=row.label(names.level),
        problem_id=None if names.by_prompt else row.label(names.problem_id),
        step=step,
        # It is logged after the optimiser step that it was generated for.
        updates=step - (not early),
        advantage=row.number("advantage"),
        cut_without_end=True,
        summed=not row.config.rewards,
        assumed=None if len(scores) < 2 else f"have the sum of {', '.join(scores)} as their reward",
    )


def _first_of_trackio(file: LogFile, config: ImportConfig) -> tuple[Row, str | None]:
    """(first row of a table, run that counts)."""
    firsts: dict[Any, Row] = {}
    with reading(file.path, "Copy it again, or leave it out.", "holds a table that trackio does not write"):
        for _, row in file.rows():
            if found := _table(row):
                firsts.setdefault(row["run_name"], found[0])
    if len(firsts) > 1 and config.run not in firsts:
        shown = ", ".join(map(str, firsts))
        raise TsaeError(f"holds several runs: {shown}", where=file.path, fix="Say which with --run.")
    run = config.run if config.run in firsts else next(iter(firsts), None)
    return firsts.get(run, {}), run


def _table(row: Row) -> list[Row]:
    """The rows of the table of completions that trackio logged, if it did."""
    table = row.get("completions")
    rows = table.get("_value") if isinstance(table, Mapping) and table.get("_type") == "trackio.table" else ()
    # NaN is a text there.
    return [
        {name: math.nan if value == "NaN" and name not in _SAME[:2] else value for name, value in found.items()}
        for found in rows or ()
        if isinstance(found, Mapping)
    ]


def evaluated(files: Sequence[LogFile]) -> Iterator[str]:
    """A note where the run evaluated at steps of which it has files: TRL then puts its responses into these.

    The longest history beside the log, which is the newest checkpoint's, says when it did.
    """
    steps = set[Any]()
    for folder in {run_folder(file.path.parent) for file in files}:
        states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_size)
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # An import does not need it.
            history = parse_json(states[-1].read_text(encoding="utf-8"))["log_history"]
            steps |= {entry["step"] for entry in history if any(name.startswith("eval_") for name in entry)}
    if held := sorted(steps & {file.step for file in files}):
        yield (
            f"the run evaluated at {len(held):,} logged steps ({some_of(map(str, held), 3)}): TRL writes the responses "
            "of an evaluation into the same files, over the training's, and nothing tells them apart"
        )


def _reward_columns(file: LogFile, first: Row, known: ColumnNames) -> tuple[str, ...]:
    """The columns of numbers after completion, up to the first that holds something else or has a known name."""
    others = {"advantage", known.answer, known.level, known.problem_id, known.prompt_ids, known.response_ids}
    columns = _number_columns(file, first)
    names = list(columns)
    if "completion" not in names:
        return ()
    after = names[names.index("completion") + 1 :]
    found = tuple(takewhile(lambda name: name not in others and columns[name], after))
    if not found:
        what = f"no float column, as a reward is, follows completion; the columns are {', '.join(names)}"
        raise TsaeError(what, where=file.path, fix="Name the reward columns (--rewards).")
    return found


def _number_columns(file: LogFile, first: Row) -> dict[str, bool]:
    """Whether the columns of a file, in their order, hold floats or nothing; the first row decides, but for Parquet."""
    if file.path.suffix == ".parquet" and file.path.stat().st_size:
        schema = pq.read_schema(file.path)
        if "prompt" in schema.names:
            texts = {name for name, value in first.items() if isinstance(value, str) and is_score(name, value)}
            return {f.name: pa.types.is_floating(f.type) or pa.types.is_null(f.type) or f.name in texts for f in schema}
    return {n: v is None or (is_score(n, v) and not isinstance(v, bool)) for n, v in first.items()}


def _fits(row: Row, config: ImportConfig) -> bool:
    # Of trackio, the first row may have no table.
    if {"run_name", "completions"} <= row.keys():
        return True
    return {"step", "prompt", "completion"} <= row.keys() and ("advantage" in row or isinstance(row["step"], str))


FORMAT = Format("trl", _parse, _fits, notes=evaluated)
