"""Which columns of an unknown log hold what: suggested by their names, and tried on its first rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product
from shlex import quote

from tsae.errors import TsaeError
from tsae.rollouts.answers.success_reward import outcome_reward
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Row
from tsae.rollouts.logs.on_disk.log_files import LogFile
from tsae.rollouts.logs.trainers import plain

TRIED = 256
"""Rows."""
# Usual names, the most telling first. Of prompt, response, reward and correct, a word of a longer name counts too.
_NAMES = {
    "prompt": "prompt question problem query instruction input messages task",
    "response": "response completion model_output model_answer output generated generation generations "
    "prediction predict pred",
    "reward": "reward score rewards total_reward return acc accuracy",
    "correct": "is_correct correct correctness passed success solved right acc accuracy",
    "answer": "ground_truth answer gold target reference reference_answer label solution gts gt expected",
    "problem_id": "example_id question_id prompt_id task_id problem prompt_hash unique_id uid qid id index idx",
    "step": "global_step training_step train_step step iteration",
    "policy": "checkpoint ckpt policy_id model model_name model_id",
    "advantage": "advantages adv",
    "finish_reason": "finish stop_reason",
    "level": "difficulty",
    "prompt_ids": "prompt_ids prompt_token_ids prompt_tokens",
    "response_ids": "response_ids completion_ids response_token_ids completion_token_ids output_ids response_tokens",
    "response_mask": "completion_mask loss_mask",
}
_PERHAPS = {"response": ("answer", "text")}
"""Names that as often hold something else, such as a reference answer, or prompt and response."""
_BY_WORD = ("prompt", "response", "reward", "correct")
_ABOUT = re.compile("hash|ids?|idx|index|len|length|tokens?|count|num|n|mean|std|mask|logprobs?|time|name")
"""Words of names for something about a prompt or reward."""


def suggest(file: LogFile, config: ImportConfig) -> tuple[list[str], int]:
    """Options that name a log's columns, and the number of rows on which they were tried; 0 if no columns were found.

    Args:
        file: of the log.
        config: of the import; the columns that it names, and that are there, stay.
    """
    rows = [row for _, row in islice(file.rows(), TRIED)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    told = {field: name for field in _NAMES if (name := getattr(config.columns, field)) in names}
    found = {field: name for field, name in told.items() if field in _BY_WORD}
    tried = (
        {**found, **dict(zip(fields, pair, strict=True))}
        for fields in (("prompt", "response"), ("prompt_ids", "response_ids"))
        for pair in product(*(_candidates(field, names, found) for field in fields))
    )
    text, entries = next(((text, read) for text in tried if (read := _entries(file, config, text))), ({}, []))
    if not entries:
        return [f"--column {field}=NAME" for field in ("prompt", "response") if field not in told], 0
    found = text | {field: name for field, name in told.items() if name not in text.values()}
    for field in _NAMES:
        # One model's name for all steps would make one policy of them.
        known = field in found or (field == "policy" and "step" in found)
        for name in () if known else _candidates(field, names, found):
            read = _entries(file, config, {**found, field: name})
            if read and _tells(field, name, rows, read):
                found[field] = name
                break
    others = {name for field, name in found.items() if field != "reward"}
    # Beside a total its parts would count twice.
    total = "_".join(_words(found.get("reward", ""))) in _NAMES["reward"].split()
    several = [name for name in names if name not in others and "reward" in _words(name) and not total]
    rewards = several if len(several) > 1 and _scores(file, config, found, several) else []
    options = [
        "--column " + quote(f"{field}={found[field]}")
        for field in _NAMES
        if field in found and found[field] != getattr(config.columns, field) and not (rewards and field == "reward")
    ]
    options += ["--rewards " + " ".join(map(quote, rewards))] * bool(rewards)
    return options + ["--skip empty"] * any(entry.response == "" for entry in entries), len(rows)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _candidates(field: str, names: Sequence[str], found: dict[str, str]) -> list[str]:
    """Columns that may hold a field, the likeliest first; the one that is known, if there is one."""
    if field in found:
        return [found[field]]
    usual = _NAMES[field].split()
    free = [name for name in names if name not in found.values()]
    exact = [name for like in usual for name in free if "_".join(_words(name)) == like]
    if field not in _BY_WORD:
        return exact
    itself = [name for name in free if not any(map(_ABOUT.fullmatch, _words(name)))]
    words = (name for like in usual for name in itself if like in _words(name))
    perhaps = [name for like in _PERHAPS.get(field, ()) for name in itself if like in _words(name)]
    return list(dict.fromkeys([*exact, *words, *sorted(perhaps, key=lambda name: len(_words(name)))]))


def _entries(file: LogFile, config: ImportConfig, found: dict[str, str], rewards: tuple[str, ...] = ()) -> list[Entry]:
    """What the first rows say with these columns; nothing if they cannot be read so."""
    if len(set(found.values())) < len(found):
        return []
    named = replace(config, format="plain", columns=replace(config.columns, **found), rewards=rewards or config.rewards)
    try:
        return [entry for entry in islice(plain.FORMAT.read(file, named), TRIED) if isinstance(entry, Entry)]
    except TsaeError:
        return []


def _tells(field: str, name: str, rows: Sequence[Row], entries: Sequence[Entry]) -> bool:
    """Whether what a column holds is what the field means, beside being readable."""
    if field == "problem_id":  # The number of a row is no problem's.
        pairs = {(entry.problem_id, str(entry.prompt)) for entry in entries}
        one_each = len(pairs) == len({id for id, _ in pairs}) == len({prompt for _, prompt in pairs})
        return one_each and (len(pairs) < len(entries) or "id" not in (name, *_words(name)[:1]))
    if field == "finish_reason":
        return any(entry.finish_reason is not None for entry in entries)
    if field == "reward":  # A flag is not a reward.
        return not all(isinstance(row.get(name), bool) for row in rows)
    return field != "correct" or any(entry.correct is not None for entry in entries)


def _scores(file: LogFile, config: ImportConfig, found: dict[str, str], names: Sequence[str]) -> bool:
    """Whether these columns are rewards, and the outcome is known beside their sum."""
    entries = _entries(file, config, {field: name for field, name in found.items() if field != "reward"}, tuple(names))
    try:
        return bool(entries) and ("correct" in found or bool(outcome_reward(names)))
    except TsaeError:
        return False
