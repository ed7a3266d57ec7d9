"""Rollouts from a trainer's log: read row by row, tokenised where need be, and written as one Parquet file.

However long the log is, memory holds one batch of trajectories and a few dozen bytes for each: 1. a trainer's reader
(`tsae.rollouts.logs`) makes entries of the rows; 2. `Tokens` gives them token ids; 3. outcome, reward, problem and
policy are settled here, and batches are spooled to disk; 4. the ledger finds repeats and conflicts; 5. the spools
become the file.

Policies. Step N of most trainers logs responses that were sampled *before* update N, that is by the weights of N − 1
updates. With a series of checkpoints, a policy gets the id of the checkpoint that has exactly these weights (the base,
for step 1). Others are called after their updates, RUN-0000M. But where the log has nothing that checkpoint N itself
sampled, the newest weights that step N logged pass for it, so that a run's last checkpoint has trajectories. An id is
one policy's, whatever steps were kept.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.loading import tokenizer_fingerprint
from tsae.checkpoints.series import Checkpoint, CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.checking import BY_NAME, Verifier, find_verifier
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.detect import Format, find_log
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.files import LogFile, run_folder
from tsae.rollouts.logs.ledger import Ledger, Outcome, Summary, hash64
from tsae.rollouts.logs.spool import Spool
from tsae.rollouts.logs.tokens import Prompt, Response, Tokens, tokenizer_alone
from tsae.rollouts.outcomes import outcome_reward
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
        TsaeError: naming file and line, for logs of no or several formats, and for rows that are not what they
            should be.
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
        info = {
            "tokenizer": tokenizer_fingerprint(tokens.tokenizer),
            "log": {**summary.as_dict(), "rewards": spool.rewards},
        }
        spool.write(to, run.kept, info, run.renamed)
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
        self.verify: Verifier | None = find_verifier(config.verifier) if config.verifier else None
        self.ledger, self.notes = Ledger(), list(series.notes)
        self.files = self._in_runs_of(series, files)
        # A single checkpoint stands for any step of any run: its id says nothing of who sampled.
        self.checkpoints = list(series) if len(series) > 1 else []
        self.reward_names: Counter[str] = Counter()
        self.decisive: str | None = None
        """The reward that said what is right so far."""
        self.extra_names: dict[str, None] = {}
        self.kept = np.zeros(0, dtype=bool)
        self.retokenised = self.without_end = self.compared = self.agreed = 0
        self.assumed: Counter[str] = Counter()
        """What was taken for granted, and for how many trajectories."""
        self.exact: set[str] = set()
        """Checkpoints that sampled part of the log themselves."""
        self.stands_in: dict[str, tuple[int, str]] = {}
        """By checkpoint: updates and name of the newest policy whose responses were logged when it was made."""
        self.rules: set[str] = set()

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows of the table, in the order of the log."""
        for number, file in enumerate(self.files):
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
        if self.config.outcome is not None and self.config.outcome not in self.reward_names:
            raise TsaeError(
                f"no row has a reward {self.config.outcome!r}; there are {', '.join(self.reward_names) or 'none'}",
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
        trips = np.asarray(self.ledger.same_text)
        if not (trips == 1).any() and (trips == 0).any():
            raise TsaeError(
                f"not one of its {int((trips == 0).sum())} responses decodes to the logged text",
                where=path,
                fix=f"Check that {self.tokens.path} is the checkpoint that was trained.",
            )
        self.kept = self.ledger.kept(self.files, self.config, copies=self.form.name == "trl")
        self.ledger.rename(self.renamed)
        return self.ledger.summary(self.form.title, len(self.files), self.kept, [*self.notes, *self._assumed()])

    @property
    def renamed(self) -> dict[str, str]:
        """Policies that pass for the checkpoint made one update later, or more."""
        return {name: id for id, (_, name) in self.stands_in.items() if id not in self.exact}

    def _assumed(self) -> Iterator[str]:
        if self.renamed:
            first, *others = self.renamed.values()
            yield (
                f"{first}{f' and {len(others)} more' if others else ''}: the checkpoint that the logged step made; its "
                f"responses were sampled by weights {'' if self.form.synchronous else 'at least '}one update older"
            )
        for what, n in self.assumed.items():
            yield f"{n:,} {what}"
        for name, n in self.reward_names.items() if self.form.a_file_a_step else ():
            if n < len(self.ledger):
                yield (
                    f"{name}: {n:,} of {len(self.ledger):,} trajectories have this reward; the rewards of the others "
                    "lack it"
                )
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
        if self.verify is not None:
            agreement = f", and the log agrees in {self.agreed:,} of {self.compared:,}" if self.compared else ""
            yield f"success: {self.config.verifier} finds the answer in the response{agreement}"
        elif self.rules:
            yield f"success: {'; or '.join(sorted(self.rules))}"
        unknown = self.ledger.outcome.count(Outcome["unknown"])
        if unknown:
            yield f"{unknown:,} trajectories have no reward that says whether they are right: their outcome is unknown"

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
        right = self._right(entry, response)
        reward = self._reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        problem, policy = entry.problem_id or _problem(entry, prompt), self._policy(entry, file)
        self.assumed.update(
            prompt.assumed if entry.assumed is None else (f"responses {entry.assumed}", *prompt.assumed)
        )
        self.retokenised += not response.logged
        self.without_end += entry.response_ids is None and response.finish_reason == "unknown"
        self.reward_names.update(entry.rewards.keys())
        self._enter(entry, file_number, problem, policy, prompt, response, reward, right)
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

    def _enter(
        self,
        entry: Entry,
        file: int,
        problem: str,
        policy: str,
        prompt: Prompt,
        response: Response,
        reward: float | None,
        right: bool | None,
    ) -> None:
        ledger = self.ledger
        source = ledger.sources.setdefault((policy, entry.step), len(ledger.sources))
        ledger.source.append(source)
        ledger.file.append(file)
        ledger.number.append(entry.number)
        ledger.problem.append(hash64(problem))
        ledger.key.append(0 if entry.key is None else hash64(policy, entry.key))
        tokens = (prompt.ids.tobytes(), response.ids.tobytes(), entry.apart)
        ledger.trajectory.append(hash64(str(source), problem, entry.answer, response.finish_reason, *tokens))
        ledger.content.append(hash64(problem, str(entry.advantage), *tokens))
        ledger.reward.append(float("nan") if reward is None else reward)
        ledger.outcome.append(Outcome[outcome_name(right)])
        ledger.same_text.append(2 if response.same_text is None else int(response.same_text))
        ledger.retokenised.append(not response.logged)

    def _right(self, entry: Entry, response: Response) -> bool | None:
        """Success or failure: by the verifier where there is one, else by the log."""
        if self.verify is None:
            return self._logged(entry)
        if self.config.verifier in BY_NAME and not entry.answer:
            raise TsaeError(
                f"has no reference answer to check with {self.config.verifier}",
                where=entry.where,
                fix="Name the column of the answer (--column answer=NAME).",
            )
        try:
            right = bool(self.verify(response.text, entry.answer))
        except TsaeError as error:
            raise TsaeError(error.what, where=entry.where, fix=error.fix) from error
        except Exception as error:  # of the user's own function
            raise TsaeError(
                f"the verifier {self.config.verifier} fails on it ({type(error).__name__}: {error})",
                where=entry.where,
                fix="Correct the function: it gets (response, answer) as texts.",
            ) from error
        told = self.config.outcome or entry.decides or len(self.config.rewards or entry.rewards) == 1
        if entry.correct is not None or told:
            logged = self._logged(entry)
            self.compared += logged is not None
            self.agreed += logged is right
        return right

    def _logged(self, entry: Entry) -> bool | None:
        """Success or failure by the log's word, or by the reward that stands for it."""
        limit, names = self.config.success_above, tuple(self.config.rewards or entry.rewards)
        if self.config.outcome is None and entry.correct is not None:
            self.rules.add("the log says so")
            return entry.correct
        if name := self.config.outcome or entry.decides:
            value, told_by = entry.rewards.get(name), name
        elif len(names) <= 1:
            value, told_by = self._reward(entry), "".join(names)
        else:
            name = outcome_reward(names, where=entry.where)
            value, told_by = entry.rewards.get(name), f"{name}, of {', '.join(names)} the one named for it,"
        # The files of a run have the same columns; where one lacks a column, another must not pass for it.
        decisive = name or told_by
        if self.form.a_file_a_step and self.verify is None and decisive and self.decisive not in (None, decisive):
            raise TsaeError(
                f"{decisive} says here what is right, {self.decisive} in the rows before",
                where=entry.where,
                fix="Name the reward that counts (--outcome), or check the answers anew (--verifier).",
            )
        self.decisive = decisive or self.decisive
        if value is None:
            return None
        self.rules.add(f"{told_by} is above {limit:g}")
        return value > limit

    def _reward(self, entry: Entry) -> float | None:
        if not self.config.rewards:
            return entry.reward
        missing = [name for name in self.config.rewards if name not in entry.rewards]
        if missing:
            raise TsaeError(
                f"has no reward {missing[0]!r}; it has {', '.join(entry.rewards) or 'none'}",
                where=entry.where,
                fix="Name rewards that are there (--rewards).",
            )
        values = [entry.rewards[name] for name in self.config.rewards]
        return sum(value for value in values if value is not None) if any(v is not None for v in values) else None

    def _policy(self, entry: Entry, file: LogFile) -> str:
        if entry.policy is not None:
            return entry.policy
        if entry.step is None:
            if self.config.run is None:
                self.assumed['trajectories have no policy in the log: it is called "unknown" (--run names it)'] += 1
            return self.config.run or "unknown"
        exact = self._checkpoint(file.run, entry.updates)
        if exact is not None:
            self.exact.add(exact)
            return exact
        # Of weights that the log does not number, only the step is known for which they sampled.
        name = f"{file.run}-" + (f"step{entry.step:05d}" if entry.updates is None else f"{entry.updates:05d}")
        later, updates = self._checkpoint(file.run, entry.step), -1 if entry.updates is None else entry.updates
        if later is not None:
            self.stands_in[later] = max(self.stands_in.get(later, (updates, name)), (updates, name))
        return name

    def _checkpoint(self, run: str, step: int | None) -> str | None:
        """Id of the checkpoint that a run had after so many updates, where it was kept."""
        for checkpoint in self.checkpoints:
            mine = checkpoint.run == run or (
                checkpoint.is_base and (step == 0 or checkpoint.id == f"{run}-{checkpoint.step:05d}")
            )
            if step == checkpoint.step and mine:
                return checkpoint.id
        return None

    def _in_runs_of(self, series: CheckpointSeries, files: list[LogFile]) -> list[LogFile]:
        """The files, under the run's name of the series where both hold a single run."""
        runs = {file.run for file in files}
        if self.config.run is None and len(runs) == len(series.runs) == 1 and runs != set(series.runs):
            self.notes.append(f"taken for the log of run {series.runs[0]}, the only one of the checkpoints")
            return [replace(file, run=series.runs[0]) for file in files]
        return files


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
