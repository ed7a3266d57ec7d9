"""Trainers that log texts, and no token ids: verl, AReaL, ROLL, rLLM, ms-swift.

verl: the files in ``trainer.rollout_data_dir`` (or ``validation_data_dir``), one JSONL file a step.

After the source of verl 0.8 (``RayPPOTrainer``, main, 2026). ``{dir}/{global_steps}.jsonl`` has input, output, gts,
score, step, and whatever the reward function returned beside the score (``acc``, ``pred``, …); older versions have no
gts, newer ones a request_id. With mlflow as its logger, verl saves some validation samples (input, output, score) as
``artifacts/val_step{global_steps}.json``.

AReaL: the trajectories that ``rollout.dump_to_file`` appends to ``rollout/{version}/{task_id}.jsonl``.

After the source of AReaL 1.0 (``infra/workflow_executor.py``). A line has task_id, sample_idx, seqlen, prompt_len,
head_version, tail_version, reward, prompt and completion. Evaluations go to ``eval-rollout``, which is not read.

ROLL: what its RLVR pipeline writes to ``rollout_dump_dir``, ``rollout_dump_data.step_{N}.jsonl``.

After the source of alibaba/ROLL (``pipeline/rlvr/utils.py``, main, 2026). A file is one line, an object of columns:
global_step, id, prompt, messages (JSON), ground_truth, domain, tag, responses, scores, sampling_params and, by domain,
others.

rLLM: the episodes that its logger writes, ``episodes/train_step_{N}_epoch_{E}/episode_hash…_id….json``.

After the source of rllm-org/rllm (``utils/episode_logger.py``, main, 2026). A file is one episode with training_step,
epoch, episode_id, task, task_hash, is_correct, termination_reason, metrics and trajectories, each with name, uid,
reward and steps; a step has chat_completions, which are the messages of its model call and the answer, and
model_response.

ms-swift: what its GRPO appends to ``completions.jsonl`` with ``--log_completions``, one line a logged step.

After the source of ms-swift 4.6 (``rlhf_trainers/grpo_trainer.py``, ``megatron/trainers``,
``ray/megatron/base_trainer.py``). A line is an object of columns: step (as text), prompt, completion, one column a
reward function, advantages, and then what else was gathered (solution, num_turns, entropy). With Megatron it has a
gen_step instead of the step; with Ray lines are single trajectories with gen_step and a reward.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import (
    Format,
    asked,
    by_row,
    each_of_a_batch,
    each_row,
    is_conversation,
    messages_of,
    only_answer,
)
from tsae.rollouts.logs.check_advantages import check_sum
from tsae.rollouts.logs.entry import Entry, Fields, Row, Unusable, is_finite, is_score, read_number, total
from tsae.rollouts.logs.log_files import HELD_OUT, LogFile
from tsae.rollouts.rewards import outcome_reward

_OWN_VERL = {"input", "output", "gts", "step", "uid", "request_id", "num_turns"}


def _verl_entry(row: Fields) -> Entry:
    turns = read_number(row.get("num_turns"))
    if isinstance(turns, (int, float)) and turns > 2:
        row.leave_out(
            "multi-turn",
            f"the output holds {turns:g} turns, and nothing says which tokens were sampled",
            "Give a log with token ids and masks, which no setting of verl writes",
        )
    rewards, trained_on = _verl_rewards(row), _verl_trained_on(row)
    reward = _verl_total(row, rewards)
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
        decides=_verl_decides(rewards),
        answer=row.answer("gts"),
        step=step,
        # Steps are counted from 1, and step 0 is a validation.
        updates=None if step is None else max(0, step - 1) if trained_on else step,
        assumed=" and ".join(assumed) or None,
        apart=str(rewards.get("overlong_reward", "")),
        key=None if row.get("request_id") is None else f"{step}/{row.row['request_id']}",
    )


def _verl_validates(path: Path) -> bool:
    """Whether a file is a validation's, by its name or that of its folder, which the run's config gives it."""
    return path.name.startswith("val_step") or HELD_OUT.search(path.resolve().parent.name) is not None


def _verl_trained_on(row: Fields) -> bool:
    """Whether it is not a validation dump, by the folder's name; if that says nothing, by a column reward."""
    validates, folder = _verl_validates(row.file.path), row.file.path.resolve().parent.name
    if "reward" in row:
        return not validates and re.search(r"rollout|train", folder) is not None
    return not validates or re.search(r".[_-](test|dev)$", folder) is not None  # A run may be called a test.


def _verl_rewards(row: Fields) -> dict[str, float | None]:
    rewards = {"score": row.logged_score("score")}
    for name, value in row.row.items():
        if name == "acc":
            # numpy's booleans are logged as text.
            rewards[name] = row.score(name)
        elif name not in _OWN_VERL | rewards.keys() and is_score(name, value):
            found = read_number(value)
            rewards[name] = row.number(name) if isinstance(found, int) or is_finite(found) else None
    return rewards


def _verl_decides(rewards: dict[str, float | None]) -> str:
    """The name of the reward that says whether an answer is right. A score may include a part for format."""
    known = [name for name, value in rewards.items() if value is not None]
    with suppress(TsaeError):
        return "acc" if "acc" in known else outcome_reward(known)
    return "score"


def _verl_total(row: Fields, rewards: dict[str, float | None]) -> float | None:
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


VERL = Format("verl", by_row(_verl_entry), validates=_verl_validates)


def _areal_entry(row: Fields) -> Entry:
    tail = row.count("tail_version")
    head = row.whole("head_version") if "head_version" in row else tail
    seqlen, prompt_len = row.whole("seqlen"), row.whole("prompt_len")
    return Entry(
        row.where,
        prompt=row.text("prompt"),
        prompt_is="rendered",
        response=row.text("completion"),
        response_rendered=True,
        response_length=None if seqlen is None or prompt_len is None else seqlen - prompt_len,
        rewards={"reward": row.score("reward")},
        step=tail,
        updates=tail,
        # The number of a task is one process's, and several write into one folder.
        key=json.dumps(dict(row.row), sort_keys=True),
        assumed=None if head == tail else "were sampled while weights were updated: named after the newest",
    )


AREAL = Format("areal", by_row(_areal_entry))


def _roll_entry(row: Fields) -> Entry:
    step = row.count("global_step")
    level, problem = row.row.get("difficulty", row.get(row.config.columns.level)), row.label("id")
    return Entry(
        row.where,
        prompt=messages_of(row.get("messages")) or row.text("prompt"),
        prompt_is="verbatim",
        response=row.text("responses"),
        rewards={"scores": row.score("scores")},
        answer=row.answer("ground_truth"),
        level=row.inside({"level": level}).label("level"),
        # Ids are those of one data set, and a domain may have several.
        problem_id=None if problem is None else f"{row.row.get('domain', '')}/{row.row.get('tag', '')}/{problem}",
        step=step,
        updates=step,
    )


ROLL = Format(
    "roll",
    by_row(_roll_entry, each_of_a_batch),
    lambda row, config: {"global_step", "scores"} <= row.keys() and isinstance(row.get("responses"), list),
)


_CUT_OFF_RLLM = "max_response_length_exceeded"
_FAILED_RLLM = ("error", "timeout")


def _rllm_split(episode: Fields) -> Iterator[Fields]:
    """The trajectories of an episode, each with the episode's columns."""
    if episode.get("termination_reason") in _FAILED_RLLM:
        episode.leave_out("errored", f"the episode ended with {episode.row['termination_reason']}")
    trajectories = episode.need("trajectories")
    if not trajectories:
        episode.leave_out("errored", "the episode has no trajectory")
    for index, trajectory in enumerate(trajectories):
        row = {**episode.row, "trajectory": trajectory, "alone": len(trajectories) == 1}
        yield replace(episode.inside(row), index=index)


def _rllm_entry(row: Fields) -> Entry:
    trajectory = row.inside(row.row["trajectory"])
    steps = trajectory.get("steps") or []
    if len(steps) != 1:
        what = f"a trajectory of {len(steps)} steps, which text does not give back as tokens"
        row.leave_out("multi-turn" if steps else "empty", what)
    messages = steps[0].get("chat_completions")
    if not is_conversation(messages) or len(messages) < 2:
        row.leave_out("empty", "its step has no chat_completions: no prompt and no answer")
    step = row.count("training_step")
    reward = trajectory.score("reward")
    task, task_id = row.get("task"), row.label("task_hash")
    return Entry(
        row.where,
        prompt=asked(messages[:-1], row),
        response=_rllm_answer(messages, steps[0].get("model_response"), row),
        rewards={"reward": reward},
        unscored=reward is None and row.get("is_correct") is None,
        correct=row.truth("is_correct") if row.row["alone"] else None,
        answer=row.inside(task).answer(row.config.columns.answer, "ground_truth") if isinstance(task, dict) else "",
        problem_id=f"{task_id}/{trajectory.row.get('name', '')}" if task_id else None,
        step=step,
        updates=step - 1,
        finish_reason="length" if row.get("termination_reason") == _CUT_OFF_RLLM else None,
        key=json.dumps([step, row.get("epoch"), row.get("episode_id"), row.index]),
    )


def _rllm_answer(messages: list[Any], sampled: Any, row: Fields) -> str:
    """The answer as the model gave it; in the conversation it may have other space around it."""
    content = only_answer(messages[-1:], row)
    if not isinstance(sampled, str) or not sampled:
        return content
    if sampled.strip() != content.strip():
        row.leave_out("multi-turn", "model_response is not the answer in chat_completions")
    return sampled


RLLM = Format("rllm", by_row(_rllm_entry, _rllm_split))


_PLACEHOLDER_SWIFT = re.compile(r"\[(-\d+|\d{5,}) \* \d+\]")


def _swift_fits(row: Row, config: ImportConfig) -> bool:
    if {"gen_step", "prompt", "completion"} <= row.keys():
        return True
    asked_for = row.keys() & {"prompt", "messages"}
    return bool(asked_for) and {"step", "completion"} <= row.keys() and isinstance(row["step"], list)


def _swift_parse(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    before: tuple[object, Sequence[tuple[Any, Any]]] = (None, ())

    def split(line: Fields) -> Sequence[Fields | Unusable]:
        nonlocal before
        rows = each_of_a_batch(line)
        if not rows:
            return rows
        if "gen_step" not in rows[0]:
            step, batch = _swift_step(rows[0]), [(_swift_prompt(row), row.get("completion")) for row in rows]
            again = ""
            if batch == before[1]:
                again = "has what the line before has: several steps trained on one generation batch, or an evaluation"
            elif step == before[0] and _swift_asked_for(batch) != _swift_asked_for(before[1]):
                # With the same prompts it is a second attempt at the step, and the last one counts.
                again = f"is a second line of step {step}, with other prompts, as an evaluation logs it"
            before = (step, batch)
            if again:
                return [row.unusable("repeated", again, "Keep the first of them with --skip repeated") for row in rows]
        if not config.rewards and len(names := _swift_reward_columns(rows[0].row)) > 1:
            check_sum(_swift_groups(rows, names), names, line.where)
        return rows

    return each_row(file, config, _swift_entry, split)


def _swift_entry(row: Fields) -> Entry:
    prompt, rewards = _swift_prompt(row), row.config.rewards
    names = rewards or _swift_reward_columns(row.row)
    if is_conversation(prompt):
        prompt = asked(prompt, row)
    elif image := _PLACEHOLDER_SWIFT.search(row.inside({"prompt": prompt}).text("prompt")):
        row.refuse(
            f"its prompt has an image in it ({image[0]}), which the log does not hold", "Give a log of text alone."
        )
    if not names:
        row.refuse(
            f"no column lies between completion and advantages, where the rewards are; there are {', '.join(row.row)}",
            "Give the log as its trainer wrote it, or name the rewards (--rewards).",
        )
    scores = {name: row.score(name) for name in names}
    step = _swift_step(row)
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


def _swift_asked_for(batch: Sequence[tuple[Any, Any]]) -> list[str]:
    """The prompts of a batch, sorted."""
    return sorted(str(prompt) for prompt, _ in batch)


def _swift_prompt(row: Fields) -> Any:
    return row.row.get("prompt", row.row.get("messages"))


def _swift_step(row: Fields) -> int:
    value = row.need("gen_step" if "gen_step" in row else "step")
    return row.inside({"step": value}).count("step")


def _swift_reward_columns(row: Row) -> tuple[str, ...]:
    """Names of the columns between completion and advantages."""
    names = list(row)
    end = names.index("advantages") if "advantages" in names else len(names)
    return tuple(names[names.index("completion") + 1 : end])


def _swift_groups(rows: Sequence[Fields], names: Sequence[str]) -> dict[str, list[tuple[float | None, ...]]]:
    """(advantage, sum of the rewards, reward, …) of the trajectories, by prompt."""
    groups: dict[str, list[tuple[float | None, ...]]] = defaultdict(list)
    for row in rows:
        scores, advantage = {name: row.score(name) for name in names}, row.number("advantages")
        if (reward := total(scores)) is not None and advantage is not None:
            groups[str(_swift_prompt(row))].append((advantage, reward, *scores.values()))
    return groups


SWIFT = Format("ms-swift", _swift_parse, _swift_fits)
