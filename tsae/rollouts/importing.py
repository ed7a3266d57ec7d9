"""Rollouts from a plain log: JSON lines or Parquet with one trajectory a row, columns named by the user.

Where the log has only text, prompt and response are tokenised with a checkpoint's tokenizer and chat template;
trajectories whose decoded tokens differ from the log's text are counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError
from tsae.rollouts.checking import find_verifier
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.sampling import encode_prompt, tokenize
from tsae.rollouts.table import Rollouts, outcome_name

if TYPE_CHECKING:
    from tsae.checkpoints.series import Checkpoint


class Imported(NamedTuple):
    """What an import gave."""

    rollouts: Rollouts
    not_round_tripping: int
    """Trajectories whose response tokens decode to another text than the log's."""


def import_text(path: str | Path, checkpoint: Checkpoint, config: ImportConfig | None = None) -> Imported:
    """Read a log of texts and tokenise it for a checkpoint.

    Args:
        path: .jsonl or .parquet, one trajectory a row.
        checkpoint: its tokenizer (and chat template) is used.
        config: column names.

    Raises:
        TsaeError: for missing columns, lines that are not JSON, empty responses, or an unknown verifier.
    """
    from tsae.checkpoints.loading import tokenizer_fingerprint

    path, config = Path(path), config or ImportConfig()
    verify = find_verifier(config.verifier) if config.verifier else None
    tokenizer = checkpoint.load_tokenizer()
    records, lossy = [], 0
    prompts: dict[str, list[int]] = {}
    for where, row in _rows(path):
        missing = [name for name in (config.prompt, config.response) if not isinstance(row.get(name), str)]
        if missing:
            raise TsaeError(
                f"has no text in {' and '.join(missing)}; its columns are {', '.join(row)}",
                where=where,
                fix="Name the columns that hold the prompt and the response (--prompt, --response).",
            )
        prompt, response = row[config.prompt], row[config.response]
        reward, answer = _reward(row, config.reward, where), str(row.get(config.answer, ""))
        right = _truth(row, config.correct, where)
        if right is None and verify is not None:
            right = verify(response, answer)
        if right is None and reward is not None:
            right = reward > 0
        if prompt not in prompts:
            prompts[prompt] = encode_prompt(tokenizer, prompt, config.prompt_format, where)
        response_ids = tokenize(tokenizer, response, add_special_tokens=False, where=where)
        if not response_ids:
            raise TsaeError("the response is empty", where=where, fix="Drop that row.")
        lossy += tokenizer.decode(response_ids) != response
        id, policy, level = (row.get(name) for name in (config.problem_id, config.policy, config.level))
        records.append(
            {
                "problem_id": prompt if id is None else str(id),
                "policy": config.default_policy if policy is None else str(policy),
                "prompt": prompt,
                "response": response,
                "answer": answer,
                "level": None if level is None else str(level),
                "prompt_ids": prompts[prompt],
                "response_ids": response_ids,
                "reward": reward if reward is not None else None if right is None else float(right),
                "outcome": outcome_name(right),
                "finish_reason": "unknown",
            }
        )
    if not records:
        raise TsaeError("holds no trajectories", where=path, fix="Give a log with at least one row.")
    return Imported(Rollouts.from_records(records, {"tokenizer": tokenizer_fingerprint(tokenizer)}), lossy)


def _reward(row: dict[str, Any], name: str, where: str) -> float | None:
    reward = row.get(name)
    if reward is None:
        return None
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise TsaeError(f"{name} is {reward!r}, expected a finite number", where=where, fix="Correct or drop that row.")
    return float(reward)


def _truth(row: dict[str, Any], name: str, where: str) -> bool | None:
    value = row.get(name)
    if value is None:
        return None
    text = value.lower() if isinstance(value, str) else value
    # True == 1 == 1.0, so that the flags of other languages and of pandas are understood.
    for right, spellings in ((True, (1, "true")), (False, (0, "false"))):
        if text in spellings:
            return right
    raise TsaeError(f"{name} is {value!r}, expected true or false", where=where, fix="Correct or drop that row.")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row, read piece by piece."""
    if not path.is_file():
        raise TsaeError("no such log", where=path, fix="Give a .jsonl or .parquet file.")
    if path.suffix == ".parquet":
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise TsaeError(f"not a Parquet file ({str(error).splitlines()[0]})", where=path) from error
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}: row {number}", row
                number += 1
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise TsaeError(
                    f"not a line of JSON in UTF-8 ({error})", where=where, fix="Correct that line."
                ) from error
            if not isinstance(row, dict):
                raise TsaeError(
                    f"a JSON {type(row).__name__}, expected an object", where=where, fix="Correct that line."
                )
            yield where, row
