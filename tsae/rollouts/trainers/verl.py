"""verl: the files in ``trainer.rollout_data_dir`` (or ``validation_data_dir``), one JSONL file a step.

After the source of verl 0.8 (``RayPPOTrainer``, main, 2026). ``{dir}/{global_steps}.jsonl`` has input, output, gts,
score, step, and whatever the reward function returned beside the score (``acc``, ``pred``, …); older versions have no
gts, newer ones a request_id. With mlflow as its logger, verl saves some validation samples (input, output, score) as
``artifacts/val_step{global_steps}.json``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tsae.rollouts.logs.adapters import Format, by_row, has
from tsae.rollouts.logs.entry import Entry, Fields, is_finite, is_score, read_number

_OWN = {"input", "output", "gts", "step", "uid", "request_id", "num_turns"}


def _entry(row: Fields) -> Entry:
    turns = read_number(row.get("num_turns"))
    if isinstance(turns, (int, float)) and turns > 2:
        raise row.unusable(
            "multi-turn",
            f"the output holds {turns:g} turns, and nothing says which tokens were sampled",
            "Give a log with token ids and masks, which no setting of verl writes",
        )
    rewards, trained_on = _rewards(row), _trained_on(row)
    reward = _total(row, rewards)
    assumed = [] if trained_on else ["are a validation's, sampled after the step's update"]
    if reward != rewards["score"]:
        parts = "the column reward" if "reward" in row else "the sum of score and overlong_reward"
        assumed.append(f"have {parts} as their reward")
    step = row.whole("step")
    step = row.file.step if step is None else step
    return Entry(
        row.where,
        prompt=row.text("input"),
        prompt_is="stripped",
        response=row.text("output"),
        rewards=rewards,
        reward=reward,
        decides="acc" if rewards.get("acc") is not None else "score",
        answer=row.answer("gts"),
        step=step,
        # Steps are counted from 1, and step 0 is a validation.
        updates=None if step is None else max(0, step - 1) if trained_on else step,
        assumed=" and ".join(assumed) or None,
        apart=str(rewards.get("overlong_reward", "")),
        key=None if row.get("request_id") is None else f"{step}/{row.row['request_id']}",
    )


def _validates(path: Path) -> bool:
    """Whether a file is a validation's, by its name or that of its folder, which the run's config gives it."""
    folder = path.resolve().parent.name
    return (
        path.name.startswith("val_step") or re.search(r"(^|[_-])(val|validation|eval|test)([_-]|$)", folder) is not None
    )


def _trained_on(row: Fields) -> bool:
    """Whether it is not a validation dump, by the folder's name; if that says nothing, by a column reward."""
    path = row.file.path
    if _validates(path):
        return False
    return "reward" not in row or re.search(r"rollout|train", path.resolve().parent.name) is not None


def _rewards(row: Fields) -> dict[str, float | None]:
    rewards = {"score": row.logged_score("score")}
    for name, value in row.row.items():
        if name == "acc":
            # numpy's booleans are logged as text.
            rewards[name] = row.score(name)
        elif name not in _OWN | rewards.keys() and is_score(name, value):
            found = read_number(value)
            rewards[name] = row.number(name) if isinstance(found, int) or is_finite(found) else None
    return rewards


def _total(row: Fields, rewards: dict[str, float | None]) -> float | None:
    """The total that the trainer used."""
    if rewards.get("reward") is not None:
        return rewards["reward"]
    found, penalty = rewards["score"], rewards.get("overlong_reward")
    if found is None or not penalty:
        return found
    acc: Any = read_number(row.get("acc"))
    # If the function returned one number only, acc is that number, and score the sum with the penalty.
    alone = isinstance(acc, (int, float)) and not isinstance(acc, bool)
    return found if alone and abs(acc + penalty - found) < 1e-6 else found + penalty


FORMAT = Format(
    "verl",
    "verl rollout data",
    by_row(_entry),
    has("input", "output", "score"),
    re.compile(r"(^|/)(val_step(?=\d+\.json$)|(?=\d+\.jsonl$))(?P<step>\d+)\.jsonl?$"),
    a_file_a_step=True,
    validates=_validates,
)
