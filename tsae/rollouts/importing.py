"""Rollouts from a trainer's log: read row by row, tokenised where need be, and written as one Parquet file.

However long the log is, memory holds one batch of trajectories and a few dozen bytes for each: 1. a trainer's reader
(`tsae.rollouts.logs`) makes entries of the rows; 2. `Tokens` gives them token ids; 3. outcome, reward, problem and
policy are settled here, and batches are spooled to disk; 4. the ledger finds repeats and conflicts; 5. what the log
says twice is compared (`tsae.rollouts.logs.second_look`); 6. the spools become the file.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.loading import tokenizer_fingerprint
from tsae.checkpoints.series import Checkpoint, CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.detect import Format, find_log
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.files import LogFile, run_folder
from tsae.rollouts.logs.ledger import Ledger, Outcome, Summary, hash64
from tsae.rollouts.logs.outcome import Outcomes
from tsae.rollouts.logs.policies import Policies
from tsae.rollouts.logs.second_look import SecondLook, refuse_disagreement
from tsae.rollouts.logs.spool import Spool
from tsae.rollouts.logs.tokens import Prompt, Tokens, tokenizer_alone
from tsae.rollouts.table import Rollouts, outcome_name

_LEVELS_UP = 4  # From output_dir/completions, or prime-rl's rollouts/step_N/train/effective, to the checkpoints.


def import_log(
    path: str | Path,
    to: str | Path,
    checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
    config: ImportConfig | None = None,
    *,
    progress: bool = True,
) -> Summary:
    """Read a trainer's log and write it as rollouts.

    Args:
        path: the log: a .jsonl or .parquet file, or the folder that the trainer fills with them.
        to: Parquet file to write, whole or not at all.
        checkpoint: its tokenizer, chat template and context length are used; of a series the base's, and policies
            get the ids of its checkpoints. By default the checkpoints that lie beside the log.
        config: defaults of `ImportConfig`.
        progress: show a bar.

    Returns:
        what was read. The file has the columns of `SCHEMA`, step, round_trip (whether the log has the response's token
        ids and they decode to its text; null where it has token ids alone), ``reward/NAME`` for every reward of the log
        and ``extra/NAME`` for every column of `keep_columns`.

    Raises:
        TsaeError: naming file and line, for logs of no or several formats, for rows that are not what they should be,
            and with `ImportConfig.strict` for a log that does not agree with itself.
    """
    from tqdm.auto import tqdm

    path, to, config = Path(path), Path(to), config or ImportConfig()
    form, files = find_log(path, config)
    series = _series(checkpoint, path)
    tokens = Tokens(series.base, config)
    run = _Import(form, files, series, tokens, config)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as folder:
        spool = Spool(Path(folder))
        for record in tqdm(run.records(), desc="import", unit="trajectory", disable=not progress):
            spool.add(record)
        summary = run.summary(path)
        if config.strict:
            refuse_disagreement(summary.second_look, path)
        info = {
            "tokenizer": tokenizer_fingerprint(tokens.tokenizer),
            "log": {**summary.as_dict(), "rewards": spool.rewards},
        }
        spool.write(to, run.kept, info, run.policies.renamed)
    return summary


def read_log(
    path: str | Path,
    checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
    config: ImportConfig | None = None,
) -> Rollouts:
    """Like `import_log`, into memory; ``info["log"]`` says what was assumed and left out."""
    with tempfile.TemporaryDirectory() as folder:
        import_log(path, Path(folder) / "rollouts.parquet", checkpoint, config, progress=False)
        return Rollouts.read(Path(folder) / "rollouts.parquet", origin=str(path))


class _Import:
    """One pass over a log."""

    def __init__(
        self, form: Format, files: list[LogFile], series: CheckpointSeries, tokens: Tokens, config: ImportConfig
    ) -> None:
        self.form, self.tokens, self.config = form, tokens, config
        self.ledger, self.notes = Ledger(), list(series.notes)
        self.policies = Policies(series, files, config.run, synchronous=form.synchronous)
        self.outcomes = Outcomes(config, a_file_a_step=form.a_file_a_step)
        self.look = SecondLook(tokens, self.policies.checkpoints)
        self.extra_names: dict[str, None] = {}
        self.kept = np.zeros(0, dtype=bool)
        self.retokenised = self.without_end = 0
        self.assumed: Counter[str] = Counter()
        """What was taken for granted, and for how many trajectories."""

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows of the table, in the order of the log."""
        for number, file in enumerate(self.policies.files):
            for found in self.form.read(file, self.config):
                try:
                    if isinstance(found, Unusable):
                        raise found
                    yield self._record(found, file, number)
                except Unusable as unusable:
                    if unusable.kind not in self.config.skip:
                        raise
                    self.ledger.skipped[unusable.kind] += 1

    def summary(self, path: Path) -> Summary:
        """Check the whole, and say what it was."""
        if not len(self.ledger):
            left = ", ".join(f"{n} {kind}" for kind, n in self.ledger.skipped.items())
            raise TsaeError(
                "holds no trajectories" + (f" but those left out: {left}" if left else ""),
                where=path,
                fix="Give a log with at least one row.",
            )
        if self.config.outcome is not None and self.config.outcome not in self.outcomes.names:
            raise TsaeError(
                f"no row has a reward {self.config.outcome!r}; there are {', '.join(self.outcomes.names) or 'none'}",
                where=path,
                fix="Name one of these as --outcome.",
            )
        absent = [name for name in self.config.keep_columns if name not in self.extra_names]
        if absent:
            raise TsaeError(
                f"no row has a column {absent[0]!r} to keep",
                where=path,
                fix="Name columns that are there (--keep-columns).",
            )
        trips, retokenised = (np.asarray(v) for v in (self.ledger.same_text, self.ledger.retokenised))
        if not (trips == 1).any() and (trips == 0).any():
            raise TsaeError(
                f"not one of its {int((trips == 0).sum())} responses decodes to the logged text",
                where=path,
                fix=f"Check that {self.tokens.path} is the checkpoint that was trained.",
            )
        self.kept = self.ledger.kept(self.policies.files, self.config, copies=self.form.name == "trl")
        self.ledger.rename(self.policies.renamed)
        notes = [*self.notes, *self.policies.notes, *self._assumed()]
        found = self.ledger.summary(self.form.title, len(self.policies.files), self.kept, notes)
        place = partial(self.ledger.place, self.policies.files)
        return replace(found, second_look=self.look.checks(trips, retokenised == 0, self.kept, place))

    def _assumed(self) -> Iterator[str]:
        yield from self.policies.assumed()
        for what, n in self.assumed.items():
            yield f"{n:,} {what}"
        if self.retokenised:
            yield (
                f"{self.retokenised:,} responses were tokenised from text: equal text, not surely the tokens that were "
                "sampled (round_trip is false)"
            )
        if self.without_end:
            yield (
                f"{self.without_end:,} responses have no end token: the log does not say which ended by themselves "
                "(--max-response-tokens, if you know the run's limit)"
            )
        yield from self.outcomes.notes(len(self.ledger), self.ledger.outcome.count(Outcome["unknown"]))

    def _record(self, entry: Entry, file: LogFile, file_number: int) -> dict[str, Any]:
        where = entry.where
        if file.step is not None and entry.step is not None and entry.step != file.step:
            raise TsaeError(
                f"is of step {entry.step} in a file of step {file.step}", where=where, fix="Give the log as written."
            )
        entry.step = file.step if entry.step is None else entry.step
        if entry.unscored:
            raise Unusable("unscored", "has no reward", where=where)
        prompt, response = self.tokens.prompt(entry), self.tokens.response(entry)
        self.tokens.check_length(prompt, response, where)
        right = self.outcomes.right(entry, response.text)
        reward = self.outcomes.reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        problem, policy = entry.problem_id or _problem(entry, prompt), self.policies.policy(entry, file)
        self.assumed.update(
            prompt.assumed if entry.assumed is None else (f"responses {entry.assumed}", *prompt.assumed)
        )
        self.retokenised += not response.logged
        self.without_end += entry.response_ids is None and response.finish_reason == "unknown"
        self.outcomes.names.update(entry.rewards.keys())
        self.ledger.enter(
            entry,
            file_number,
            problem,
            policy,
            tokens=(prompt.ids.tobytes(), response.ids.tobytes(), entry.apart),
            finish_reason=response.finish_reason,
            reward=reward,
            outcome=outcome_name(right),
            same_text=response.same_text,
            retokenised=not response.logged,
        )
        self.look.see(
            entry,
            file,
            prompt,
            response,
            problem=problem,
            policy=policy,
            # What the trainer had, whichever rewards or verifier are asked for here.
            reward=entry.reward if entry.reward is not None or self.outcomes.verify is not None else reward,
            right=self.outcomes.logged(entry),
        )
        record = {
            "problem_id": problem,
            "policy": policy,
            "prompt": prompt.text,
            "response": response.text,
            "answer": entry.answer,
            "level": entry.level,
            "prompt_ids": prompt.ids,
            "response_ids": response.ids,
            "reward": reward,
            "outcome": outcome_name(right),
            "advantage": entry.advantage,
            "finish_reason": response.finish_reason,
            "step": entry.step,
            "round_trip": response.round_trip,
        }
        record |= {f"reward/{name}": value for name, value in entry.rewards.items()}
        self.extra_names.update(dict.fromkeys(entry.extra))
        return record | {f"extra/{name}": value for name, value in entry.extra.items()}


def _problem(entry: Entry, prompt: Prompt) -> str:
    """An id from what is asked and what is right: equal in all logs of one kind."""
    asked = prompt.ids.tobytes() if entry.prompt is None else json.dumps(entry.prompt, sort_keys=True, default=str)
    return f"{hash64(asked, entry.answer):016x}"


def _series(checkpoint: Checkpoint | CheckpointSeries | str | Path | None, path: Path) -> CheckpointSeries:
    if isinstance(checkpoint, CheckpointSeries):
        return checkpoint
    if isinstance(checkpoint, Checkpoint):
        return CheckpointSeries((replace(checkpoint, run=None),), name=checkpoint.id)
    if checkpoint is not None:
        return tokenizer_alone(Path(checkpoint)) or CheckpointSeries.load(checkpoint)
    folder = run_folder(path if path.is_dir() else path.parent)
    for above in (folder, *list(folder.parents)[:_LEVELS_UP]):
        if (above / "series.json").is_file() or any(above.glob("checkpoint-*")):
            found = CheckpointSeries.load(above)
            note = f"tokenizer and checkpoints are those of {above}"
            return replace(found, notes=(*found.notes, note))
    raise TsaeError(
        "no checkpoint lies beside the log, and its tokenizer is needed",
        where=path,
        fix="Give the checkpoint that was trained, or its series (--checkpoint).",
    )
