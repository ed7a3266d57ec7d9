"""ms-swift: what its GRPO appends to ``completions.jsonl`` with ``--log_completions``, one line a logged step.

After the source of ms-swift 4.6 (``rlhf_trainers/grpo_trainer.py``, ``megatron/trainers``,
``ray/megatron/base_trainer.py``). A line is an object of columns: step (as text), prompt, completion, one column a
reward function, advantages, and then what else was gathered (solution, num_turns, entropy). With Megatron it has a
gen_step instead of the step; with Ray lines are single trajectories with gen_step and a reward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format, asked, each_of_a_batch, each_row, is_conversation, only_answer
from tsae.rollouts.logs.check_advantages import check_sum
from tsae.rollouts.logs.entry import Entry, Fields, Row, Unusable, total
from tsae.rollouts.logs.log_files import LogFile

_PLACEHOLDER = re.compile(r"\[(-\d+|\d{5,}) \* \d+\]")


def _fits(row: Row, config: ImportConfig) -> bool:
    if {"gen_step", "prompt", "completion"} <= row.keys():
        return True
    asked_for = row.keys() & {"prompt", "messages"}
    return bool(asked_for) and {"step", "completion"} <= row.keys() and isinstance(row["step"], list)


def _parse(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    before: tuple[object, Sequence[tuple[Any, Any]]] = (None, ())

    def split(line: Fields) -> Sequence[Fields | Unusable]:
        nonlocal before
        rows = each_of_a_batch(line)
        if not rows:
            return rows
        if "gen_step" not in rows[0]:
            step, batch = _step(rows[0]), [(_prompt(row), row.get("completion")) for row in rows]
            again = ""
            if batch == before[1]:
                again = "has what the line before has: several steps trained on one generation batch, or an evaluation"
            elif step == before[0] and _asked_for(batch) != _asked_for(before[1]):
                # With the same prompts it is a second attempt at the step, of which the ledger keeps the last.
                again = f"is a second line of step {step}, with other prompts, as an evaluation logs it"
            before = (step, batch)
            if again:
                return [row.unusable("repeated", again, "Keep the first of them with --skip repeated") for row in rows]
        if not config.rewards and len(names := _reward_columns(rows[0].row)) > 1:
            check_sum(_groups(rows, names), names, line.where)
        return rows

    return each_row(file, config, _entry, split)


def _entry(row: Fields) -> Entry:
    prompt, rewards = _prompt(row), row.config.rewards
    names = rewards or _reward_columns(row.row)
    if is_conversation(prompt):
        prompt = asked(prompt, row)
    elif image := _PLACEHOLDER.search(row.inside({"prompt": prompt}).text("prompt")):
        row.refuse(
            f"its prompt has an image in it ({image[0]}), which the log does not hold", "Give a log of text alone."
        )
    if not names:
        row.refuse(
            f"no column lies between completion and advantages, where the rewards are; there are {', '.join(row.row)}",
            "Give the log as its trainer wrote it, or name the rewards (--rewards).",
        )
    scores = {name: row.score(name) for name in names}
    step = _step(row)
    return Entry(
        row.where,
        prompt=prompt,
        prompt_is="rendered",
        response=only_answer(row.need("completion"), row),
        rewards=scores,
        reward=total(scores),
        answer=row.answer("solution", row.config.columns.answer),
        step=step,
        updates=step if "gen_step" in row or "messages" in row else step - 1,
        advantage=row.number("advantages"),
        summed=not rewards,
        # Ray writes a line a trajectory, so that a place in the batch is not known.
        key=None if "reward" in row and "gen_step" in row else f"{step}/{row.index}",
        assumed="have the sum of their rewards, with weight 1 each: the log has no advantages to tell by"
        if len(names) > 1 and "advantages" not in row and not rewards
        else None,
    )


def _asked_for(batch: Sequence[tuple[Any, Any]]) -> list[str]:
    """The prompts of a batch, sorted."""
    return sorted(str(prompt) for prompt, _ in batch)


def _prompt(row: Fields) -> Any:
    return row.row.get("prompt", row.row.get("messages"))


def _step(row: Fields) -> int:
    value = row.need("gen_step" if "gen_step" in row else "step")
    return row.inside({"step": value}).whole("step", needed=True) or 0


def _reward_columns(row: Row) -> tuple[str, ...]:
    """Names of the columns between completion and advantages."""
    names = list(row)
    end = names.index("advantages") if "advantages" in names else len(names)
    return tuple(names[names.index("completion") + 1 : end])


def _groups(rows: Sequence[Fields], names: Sequence[str]) -> dict[str, list[tuple[float | None, ...]]]:
    """(advantage, sum of the rewards, reward, …) of the trajectories, by prompt."""
    groups: dict[str, list[tuple[float | None, ...]]] = defaultdict(list)
    for row in rows:
        scores, advantage = {name: row.score(name) for name in names}, row.number("advantages")
        if (reward := total(scores)) is not None and advantage is not None:
            groups[str(_prompt(row))].append((advantage, reward, *scores.values()))
    return groups


FORMAT = Format(
    "ms-swift",
    "ms-swift completions",
    _parse,
    _fits,
    re.compile(r"(^|/)completions\.jsonl$"),
    suffixes=(".jsonl",),
    cut=False,
)
