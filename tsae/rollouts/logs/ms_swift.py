"""ms-swift: what its GRPO appends to ``completions.jsonl`` with ``--log_completions``, one line a logged step.

Read off ms-swift 4.6's ``rlhf_trainers/grpo_trainer.py``, ``megatron/trainers`` and ``ray/megatron/base_trainer.py``.
A line is an object of columns: step (as text), prompt, completion, one column a reward function, advantages, and after
these what else was gathered (solution, num_turns, entropy). With Megatron it has a gen_step instead of the step; with
Ray lines are single trajectories with gen_step and a reward.

- prompt is decoded from the token ids that the template gave, with its special tokens. completion is the engine's
  text: whether a response ended by itself is not in the log.
- step is logged after the optimiser step, gen_step before it. A line holds the last generation batch only.
- Where several steps train on one batch, it is logged at each. An evaluation logs a line of its own under the step
  before it, and is left out too. A run that went on from an older checkpoint appends its steps a second time.
- Until 3.3 messages stood there instead of the prompt, and the step was logged before the update; until 3.7 there were
  no advantages.
- Several rewards are added up by weights that the log does not hold; 1 is ms-swift's default, and the logged
  advantages have to follow from that sum.
- Of several turns, completion is the last, and prompt has those before it.
- An image stands in the prompt as ``[id * count]``, which does not give it back.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.columns import each_of_a_batch, one_by_one, place_in
from tsae.rollouts.logs.conversations import asked, only_answer
from tsae.rollouts.logs.entry import Entry, Row, Unusable, answer_text, get, is_conversation, number, score, text
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.look_advantages import check_sum

FILE = re.compile(r"(^|/)completions\.jsonl$")
_PLACEHOLDER = re.compile(r"\[(-\d+|\d{5,}) \* \d+\]")


def fits(row: Row, config: ImportConfig) -> bool:
    if {"gen_step", "prompt", "completion"} <= row.keys():
        return True
    asked_for = row.keys() & {"prompt", "messages"}
    return bool(asked_for) and {"step", "completion"} <= row.keys() and isinstance(row["step"], list)


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    before: tuple[object, Sequence[object]] = (None, ())

    def of(rows: list[Row], where: str) -> Iterator[Entry | Unusable]:
        nonlocal before
        batch = [(_prompt(row), row.get("completion")) for row in rows]
        step = _step(rows[0], where) if rows else None
        again = None
        if rows and "gen_step" not in rows[0]:
            if batch == before[1]:
                again = "has what the line before has: several steps trained on one generation batch, or an evaluation"
            elif step == before[0]:
                again = f"is a second line of step {step}, as an evaluation logs it"
            before = (step, batch)
        if again is not None:
            fix = "Keep the first of them with --skip repeated"
            yield from (Unusable("repeated", again, where=place_in(where, i), fix=fix) for i in range(len(rows)))
            return
        names = config.rewards or _reward_columns(rows)
        if len(names) > 1 and not config.rewards:
            check_sum(_groups(rows, names, where), names, where)
        yield from one_by_one(rows, where, lambda row, index, place: _entry(row, names, index, config, place))

    return each_of_a_batch(file, config, of)


def _entry(row: Row, names: Sequence[str], index: int, config: ImportConfig, where: str) -> Entry:
    prompt = _prompt(row)
    prompt = asked(prompt, where) if is_conversation(prompt) else text(prompt, "prompt", where)
    if isinstance(prompt, str) and (image := _PLACEHOLDER.search(prompt)):
        raise TsaeError(
            f"its prompt has an image in it ({image[0]}), which the log does not hold",
            where=where,
            fix="Give a log of text alone.",
        )
    scores = {name: score(row.get(name), name, where) for name in names}
    scored = [value for value in scores.values() if value is not None]
    step = _step(row, where)
    return Entry(
        where,
        prompt=prompt,
        prompt_is="rendered",
        response=only_answer(get(row, "completion", where), where),
        rewards=scores,
        reward=sum(scored) if scored else None,
        unscored=bool(names) and not scored,
        answer=answer_text(row.get("solution", row.get(config.columns.answer))),
        step=step,
        updates=step if "gen_step" in row or "messages" in row else step - 1,
        advantage=number(row.get("advantages"), "advantages", where),
        summed=not config.rewards,
        # Ray writes a line a trajectory, so that a place in the batch is not known.
        key=None if "reward" in row and "gen_step" in row else f"{step}/{index}",
        assumed="have the sum of their rewards, with weight 1 each: the log has no advantages to tell by"
        if len(names) > 1 and "advantages" not in row and not config.rewards
        else None,
    )


def _prompt(row: Row) -> Any:
    return row.get("prompt", row.get("messages"))


def _step(row: Row, where: str) -> int:
    value = get(row, "gen_step" if "gen_step" in row else "step", where)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TsaeError(f"step is {value!r}, expected a whole number", where=where, fix="Correct that line.") from None


def _reward_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Names of the columns between completion and advantages."""
    if not rows:
        return ()
    names = list(rows[0])
    end = names.index("advantages") if "advantages" in names else len(names)
    return tuple(names[names.index("completion") + 1 : end])


def _groups(rows: Sequence[Row], names: Sequence[str], where: str) -> dict[str, list[tuple[float, float]]]:
    """(sum of the rewards, advantage) of the trajectories, by prompt."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        scored = [value for name in names if (value := score(row.get(name), name, where)) is not None]
        if scored and row.get("advantages") is not None:
            groups[str(_prompt(row))].append((sum(scored), row["advantages"]))
    return groups
