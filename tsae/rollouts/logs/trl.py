"""TRL: what ``GRPOTrainer`` writes with ``log_completions=True``, one Parquet file a logged step.

Read off the sources of TRL 1.0 to 1.16. ``output_dir/completions/completions_{step:05d}.parquet`` holds, in this
order: step, prompt, completion, one float column a reward function, the columns that reward functions passed to
``log_extra``, and advantage. A file holds the last generation batch of its step only.

- Where several steps train on one batch (num_iterations, steps_per_generation), it is logged at each. An evaluation
  logs into the same file, over the training batch: log without one.
- Until 1.14 or so, prompt is what the model read, decoded without special tokens: of a conversation, the text of its
  template, which is put back. Later it is what the data set has: a text, tokenised as it is, or the messages of a
  conversation, which go through the chat template; the run's chat_template_kwargs and tools are not in the log.
- completion is decoded without special tokens: whether a response ended by itself is lost, except where
  ``log_extra("completion_ids", completion_ids)`` kept the token ids.
- A null reward means that the function did not score that completion.
- Rewards and extras are not told apart by name. Leading float columns are taken as rewards; where there are several,
  the logged advantages have to follow from their sum, or the user has to name them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    each_row,
    get,
    is_conversation,
    label,
    number,
    score,
    text,
    token_ids,
    whole,
)
from tsae.rollouts.logs.files import LogFile, first_row
from tsae.rollouts.logs.look_advantages import check_sum

FILE = re.compile(r"(^|/)completions_(?P<step>\d{5,})\.parquet$")
_COMPLETION_IDS = "completion_ids"


def fits(row: Row, config: ImportConfig) -> bool:
    return {"step", "prompt", "completion", "advantage"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    names = config.columns
    rewards = config.rewards or _reward_columns(file, names)
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def of(row: Row, where: str) -> Iterator[Entry]:
        step = whole(get(row, "step", where), "step", where)
        prompt = get(row, "prompt", where)
        conversation = is_conversation(prompt)
        if not conversation:
            text(prompt, "prompt", where)
        missing = [name for name in rewards if name not in row]
        if missing:
            raise TsaeError(
                f"has no reward column {missing[0]}; its columns are {', '.join(row)}",
                where=where,
                fix="Name reward columns that are there (--rewards).",
            )
        scores = {name: score(row[name], name, where) for name in rewards}
        scored = [value for value in scores.values() if value is not None]
        advantage = number(row.get("advantage"), "advantage", where)
        if scored and advantage is not None:
            groups[json.dumps(prompt, sort_keys=True, default=str)].append((sum(scored), advantage))
        ids = {
            name: None if row.get(name) is None else token_ids(row[name], name, where)
            for name in (names.prompt_ids, names.response_ids, _COMPLETION_IDS)
        }
        response_ids = ids[names.response_ids] if ids[names.response_ids] is not None else ids[_COMPLETION_IDS]
        yield Entry(
            where,
            prompt=prompt,
            prompt_is="perhaps stripped",
            prompt_ids=ids[names.prompt_ids],
            response=_completion(get(row, "completion", where), where),
            response_ids=response_ids,
            rewards=scores,
            reward=sum(scored) if scored else None,
            unscored=not scored,
            answer=answer_text(row.get(names.answer)),
            level=label(row.get(names.level), names.level, where),
            problem_id=label(row.get(names.problem_id), names.problem_id, where),
            step=step,
            # It is logged after the optimiser step that it was generated for.
            updates=None if step is None else step - 1,
            advantage=advantage,
            cut_without_end=True,
            summed=not config.rewards,
            assumed=None if len(rewards) < 2 else f"have the sum of {', '.join(rewards)} as their reward",
        )

    yield from each_row(file, config, of)
    if len(rewards) > 1 and not config.rewards:
        check_sum(groups, rewards, file.path)


def _reward_columns(file: LogFile, known: ColumnNames) -> tuple[str, ...]:
    """The columns of numbers behind completion, up to the first that holds something else, or is known for it."""
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
    """Whether the columns of a file, in their order, hold floats or nothing; of JSON lines the first tells."""
    if file.path.suffix != ".parquet":
        row = first_row(file.path) or {}
        return {n: v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for n, v in row.items()}
    try:
        schema = pq.read_schema(file.path)
    except (pa.ArrowException, OSError) as error:
        raise TsaeError("not a Parquet file", where=file.path, fix="Copy the file again.") from error
    return {f.name: pa.types.is_floating(f.type) or pa.types.is_null(f.type) for f in schema}


def _completion(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not is_conversation(value):
        raise TsaeError("completion is neither a text nor messages", where=where, fix="Correct that row.")
    messages = [{name: part for name, part in message.items() if part is not None} for message in value]
    if len(messages) != 1 or messages[0].keys() - {"role", "content"}:
        found = ", ".join(dict.fromkeys(name for message in messages for name in message))
        raise Unusable(
            "multi-turn",
            f"the completion is {len(messages)} messages with {found}, which text alone does not give back as tokens",
            where=where,
        )
    return text(messages[0].get("content"), "completion", where)
