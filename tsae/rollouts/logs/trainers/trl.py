"""TRL: what ``GRPOTrainer`` writes with ``log_completions=True``, one Parquet file a logged step.

After the sources of TRL 1.0 to 1.16. ``output_dir/completions/completions_{step:05d}.parquet`` holds, in this
order: step, prompt, completion, one float column a reward function, the columns that reward functions passed to
``log_extra``, and advantage. A file holds the last generation batch of its step only.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.logs.checks.look_advantages import check_sum
from tsae.rollouts.logs.entries.conversations import is_conversation
from tsae.rollouts.logs.entries.entry import Entry, Unusable, total
from tsae.rollouts.logs.entries.fields import Fields
from tsae.rollouts.logs.entries.log_format import Format, each_row, has
from tsae.rollouts.logs.on_disk.log_files import LogFile, first_row

_COMPLETION_IDS = "completion_ids"


def _parse(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    rewards = config.rewards or _reward_columns(file, config.columns)
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def entry(row: Fields) -> Entry:
        missing = [name for name in rewards if name not in row]
        if missing:
            raise row.error(
                f"has no reward column {missing[0]}; its columns are {', '.join(row.row)}",
                "Name reward columns that are there (--rewards).",
            )
        scores = {name: row.score(name) for name in rewards}
        found = _entry(row, scores)
        if found.reward is not None and found.advantage is not None:
            groups[json.dumps(found.prompt, sort_keys=True, default=str)].append((found.reward, found.advantage))
        return found

    yield from each_row(file, config, entry)
    if len(rewards) > 1 and not config.rewards:
        check_sum(groups, rewards, file.path)


def _entry(row: Fields, scores: dict[str, float | None]) -> Entry:
    names, prompt = row.config.columns, row.need("prompt")
    step, ids = row.whole("step", needed=True), row.optional_ids(names.response_ids)
    reward = total(scores)
    return Entry(
        row.where,
        prompt=prompt if is_conversation(prompt) else row.text("prompt"),
        prompt_is="perhaps stripped",
        prompt_ids=row.optional_ids(names.prompt_ids),
        response=_completion(row),
        response_ids=row.optional_ids(_COMPLETION_IDS) if ids is None else ids,
        rewards=scores,
        reward=reward,
        unscored=reward is None,
        answer=row.answer(names.answer),
        level=row.label(names.level),
        problem_id=None if names.by_prompt else row.label(names.problem_id),
        step=step,
        # It is logged after the optimiser step that it was generated for.
        updates=None if step is None else step - 1,
        advantage=row.number("advantage"),
        cut_without_end=True,
        summed=not row.config.rewards,
        assumed=None if len(scores) < 2 else f"have the sum of {', '.join(scores)} as their reward",
    )


def _reward_columns(file: LogFile, known: ColumnNames) -> tuple[str, ...]:
    """The columns of numbers after completion, up to the first that holds something else or has a known name."""
    others = {"advantage", known.answer, known.level, known.problem_id, known.prompt_ids, known.response_ids}
    columns = _number_columns(file)
    names = list(columns)
    if "completion" not in names:
        return ()
    after = names[names.index("completion") + 1 :]
    found = tuple(takewhile(lambda name: name not in others and columns[name], after))
    if not found:
        raise TsaeError(
            f"no float column, as a reward is, follows completion; the columns are {', '.join(names)}",
            where=file.path,
            fix="Name the reward columns (--rewards).",
        )
    return found


def _number_columns(file: LogFile) -> dict[str, bool]:
    """Whether the columns of a file, in their order, hold floats or nothing; of JSON lines the first decides."""
    if file.path.suffix != ".parquet":
        row = first_row(file.path) or {}
        return {n: v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for n, v in row.items()}
    try:
        schema = pq.read_schema(file.path)
    except (pa.ArrowException, OSError) as error:
        raise TsaeError("not a Parquet file", where=file.path, fix="Copy the file again.") from error
    return {f.name: pa.types.is_floating(f.type) or pa.types.is_null(f.type) for f in schema}


def _completion(row: Fields) -> str:
    value = row.need("completion")
    if isinstance(value, str):
        return value
    if not is_conversation(value):
        raise row.error("completion is neither a text nor messages", "Correct that row.")
    messages = [{name: part for name, part in message.items() if part is not None} for message in value]
    if len(messages) != 1 or messages[0].keys() - {"role", "content"}:
        found = ", ".join(dict.fromkeys(name for message in messages for name in message))
        raise row.unusable(
            "multi-turn",
            f"the completion is {len(messages)} messages with {found}, which text alone does not give back as tokens",
        )
    return row.inside({"completion": messages[0].get("content")}).text("completion")


FORMAT = Format(
    "trl",
    "TRL completions",
    _parse,
    has("step", "prompt", "completion", "advantage"),
    re.compile(r"(^|/)completions_(?P<step>\d{5,})\.parquet$"),
    a_file_a_step=True,
    cut=False,
)
