"""Rollouts from a trainer's log: read row by row, tokenised where need be, and written as one Parquet file.

However long the log is, memory holds one batch of trajectories: 1. a trainer's reader (`tsae.rollouts.logs`) makes
entries of the rows; 2. `Tokens` gives them token ids; 3. outcome, reward, problem and policy are settled here, and
batches are spooled to disk; 4. the ledger finds repeats and conflicts; 5. the spools become the file.

1 to 3 are done part by part (`tsae.rollouts.logs.parts`), in worker processes where the log is long. What is found in
a part is written beside its rows, and put together in the order of the log: who read which part changes nothing, and
parts that are there are not read again.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.loading import tokenizer_fingerprint
from tsae.checkpoints.series import Checkpoint, CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.bar import Bar
from tsae.rollouts.logs.detect import Format, find_log
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.files import LogFile, run_folder
from tsae.rollouts.logs.journal import Job, Journal, begin, finish, settings
from tsae.rollouts.logs.ledger import Ledger, hash64
from tsae.rollouts.logs.outcome import Outcomes
from tsae.rollouts.logs.parts import Part, parts_of, total_bytes
from tsae.rollouts.logs.policies import Policies
from tsae.rollouts.logs.settings import find_settings
from tsae.rollouts.logs.spool import Spool, Spools
from tsae.rollouts.logs.summary import Summary
from tsae.rollouts.logs.tokens import Prompt, Tokens, tokenizer_alone
from tsae.rollouts.logs.workers import default_workers, read_in_workers, setup
from tsae.rollouts.parts import COLUMN
from tsae.rollouts.spans import told
from tsae.rollouts.table import Rollouts, outcome_name

_LEDGER = "ledger"
_LEVELS_UP = 4  # From output_dir/completions, or prime-rl's rollouts/step_N/train/effective, to the checkpoints.


def import_log(
    path: str | Path,
    to: str | Path,
    checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
    config: ImportConfig | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> Summary:
    """Read a trainer's log and write it as rollouts.

    An import of a long log that was stopped goes on where it was when it is called again: finished parts lie in a
    hidden folder beside `to` until it ends.

    Args:
        path: the log: a .jsonl or .parquet file, or the folder that the trainer fills with them.
        to: Parquet file to write, whole or not at all.
        checkpoint: its tokenizer, chat template and context length are used; of a series the base's, and policies
            get the ids of its checkpoints. By default the checkpoints that lie beside the log.
        config: defaults of `ImportConfig`.
        workers: processes that read; by default one a core and at most four, and one for logs of less than 32 MiB. The
            file does not depend on it.
        progress: show a bar.

    Returns:
        what was read. The file has the columns of `SCHEMA`, step, round_trip (whether the log has the response's token
        ids and they decode to its text; null where it has token ids alone), ``reward/NAME`` for every reward of the log
        and ``extra/NAME`` for every column of `keep_columns`; where a response has thinking or several turns, ``parts``
        (`tsae.rollouts.parts`).

    Raises:
        TsaeError: naming file and line, for logs of no or several formats, and for rows that are not what they
            should be.
    """
    path, to, config = Path(path), Path(to), config or ImportConfig()
    if workers is not None and workers < 1:
        raise TsaeError(f"workers={workers} is less than 1", where="import_log", fix="Give 1 or more.")
    form, files, notes = find_log(path, config)
    series = _series(checkpoint, path)
    trainers = find_settings(path) if json.loads(config.template_arguments) == {} else None
    if trainers is not None:
        config = replace(config, template_arguments=json.dumps(trainers.template_arguments))
        told_so = f"the chat template is given {config.template_arguments}, as {trainers.file} says"
        series = replace(series, notes=(*series.notes, told_so))
    tokens = Tokens(series.base, config)
    run, spools = _Import(form, files, series, tokens, config, notes=notes), Spools()
    with Journal(to, settings(form, series, tokens, config), config.skip) as journal:
        with closing(_read(run, series, journal, workers, progress=progress)) as read:
            for folder, state in read:
                run.add(folder, state)
                spools.add(folder, state["spool"])
        summary = run.summary(path)
        info = {
            "tokenizer": tokenizer_fingerprint(tokens.tokenizer),
            "log": {**summary.as_dict(), "rewards": spools.rewards},
        }
        spools.write(to, run.kept, info, run.policies.renamed)
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


def read_part(
    part: Part,
    folder: Path,
    form: Format,
    series: CheckpointSeries,
    tokens: Tokens,
    config: ImportConfig,
    say: Callable[[int, int], None],
) -> None:
    """Read a part of a log, and write its rows and what is to be known of them.

    Args:
        part: of the log.
        folder: for the rows, the ledger and all else; it is made when it is complete.
        form: the log's.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        say: gets the bytes and the trajectories that were read so far.

    Raises:
        TsaeError: naming file and line, for rows that are not what they should be.
    """
    begun = begin(folder)
    run, spool = _Import(form, (), series, tokens, config, begun / _LEDGER), Spool(begun)
    for record, n_bytes in run.records(part):
        spool.add(record)
        say(n_bytes, len(run.ledger))
    finish(begun, {**run.state(), "spool": spool.close()})


def _read(
    run: _Import, series: CheckpointSeries, journal: Journal, workers: int | None, *, progress: bool
) -> Generator[tuple[Path, dict[str, Any]]]:
    """(folder, what is to be known) of every part of a log, read where it was not."""
    files = run.policies.files
    total = total_bytes(files)
    n = default_workers(total) if workers is None else workers
    with Bar(total, shown=progress) as bar:
        jobs = (journal.job(part) for part in parts_of(files, cut=run.form.cut))
        common = setup(run.form, series, run.config)
        done = read_in_workers(jobs, n, common, bar.say) if n > 1 else _read_here(jobs, run, series, bar)
        with closing(done):
            for number, job in enumerate(done):
                state = journal.take(job)
                bar.end(number, job.part.bytes, state["ledger"]["n"], found=job.done)
                yield job.folder, state
        if journal.found:
            bar.write(journal.told())


def _read_here(jobs: Iterator[Job], run: _Import, series: CheckpointSeries, bar: Bar) -> Generator[Job]:
    for number, job in enumerate(jobs):
        if not job.done:
            say = partial(bar.say, number)
            read_part(job.part, job.folder, run.form, series, run.tokens, run.config, say)
        yield job


class _Import:
    """One pass over a log, or over a part of it.

    Args:
        form: of the log.
        files: all of the log's; of a part none are given, as they belong to their runs already.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        ledger: file that a part's ledger is written to.
        notes: what is to be said of the files.
    """

    def __init__(
        self,
        form: Format,
        files: Sequence[LogFile],
        series: CheckpointSeries,
        tokens: Tokens,
        config: ImportConfig,
        ledger: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.form, self.tokens, self.config = form, tokens, config
        self.ledger, self.notes = Ledger(ledger), [*series.notes, *notes]
        self.policies = Policies(series, files, config.run, synchronous=form.synchronous)
        self.outcomes = Outcomes(config, a_file_a_step=form.a_file_a_step)
        self.extra_names: dict[str, None] = {}
        self.kept = np.zeros(0, dtype=bool)
        self.retokenised = self.without_end = 0
        self.has: Counter[str] = Counter()
        """Trajectories that the log says a thing of."""
        self.assumed: Counter[str] = Counter()
        """What was taken for granted, and for how many trajectories."""
        self.empty: list[int] = []
        """Numbers of files that hold nothing."""

    def records(self, part: Part) -> Iterator[tuple[dict[str, Any], int]]:
        """The rows of the table, in the order of the log, each with the bytes of the part that were read so far."""
        before = 0
        for number, file in enumerate(part.files, part.first):
            empty = file.start == 0
            for found in self.form.read(file, self.config):
                empty = False
                try:
                    if isinstance(found, Unusable):
                        raise found
                    yield self._record(found, file, number), before + file.seen.bytes
                except Unusable as unusable:
                    if unusable.kind not in self.config.skip:
                        raise
                    self.ledger.skipped[unusable.kind] += 1
            before += file.seen.bytes
            if empty:
                self.empty.append(number)

    def state(self) -> dict[str, Any]:
        """What was found in a part of the log, as JSON has it."""
        return {
            "ledger": self.ledger.close(),
            "policies": self.policies.state(),
            "outcomes": self.outcomes.state(),
            "extra_names": list(self.extra_names),
            "retokenised": self.retokenised,
            "without_end": self.without_end,
            "has": self.has,
            "assumed": self.assumed,
            "empty": self.empty,
        }

    def add(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take in what was found in a further part, whose ledger lies in a folder."""
        self.ledger.add(folder / _LEDGER, state["ledger"])
        self.policies.add(state["policies"])
        self.outcomes.add(state["outcomes"])
        self.extra_names.update(dict.fromkeys(state["extra_names"]))
        self.retokenised += state["retokenised"]
        self.without_end += state["without_end"]
        self.has.update(state["has"])
        self.assumed.update(state["assumed"])
        self.empty += state["empty"]

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
        trips = self.ledger.same_text
        if not trips[True] and trips[False]:
            raise TsaeError(
                f"not one of its {trips[False]} responses decodes to the logged text",
                where=path,
                fix=f"Check that {self.tokens.path} is the checkpoint that was trained.",
            )
        self.kept = self.ledger.kept(self.policies.files, self.config, copies=self.form.name == "trl")
        self.ledger.rename(self.policies.renamed)
        notes = [*self.notes, *self.policies.notes, *self._assumed()]
        return self.ledger.summary(self.form.title, len(self.policies.files), self.kept, notes)

    def _assumed(self) -> Iterator[str]:
        if self.empty:
            names = [self.policies.files[number].path.name for number in self.empty]
            shown = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
            yield f"{len(names):,} file{'s hold' if len(names) > 1 else ' holds'} no trajectories: {shown}"
        yield from self.policies.assumed()
        for what, n in self.assumed.items():
            yield f"{n:,} {what}"
        lacking = [name for name in _told() if not self.has[name]]
        if lacking:
            yield f"the log has no {' and no '.join(lacking)}"
        for name, n in self.has.items():
            if n < len(self.ledger):
                article = "an" if name[0] in "aeiou" else "a"
                yield f"{n:,} of {len(self.ledger):,} trajectories have {article} {name}; the others do not"
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
        yield from self.outcomes.notes(len(self.ledger), self.ledger.outcomes["unknown"])

    def _record(self, entry: Entry, file: LogFile, file_number: int) -> dict[str, Any]:
        where = entry.where
        if file.step is not None and entry.step is not None and entry.step != file.step:
            raise TsaeError(
                f"is of step {entry.step} in a file of step {file.step}", where=where, fix="Give the log as written."
            )
        entry.step = file.step if entry.step is None else entry.step
        for name, counted in (("step", entry.step), ("the number of the policy's updates", entry.updates)):
            if counted is not None and counted < 0:
                raise TsaeError(f"{name} is {counted}", where=where, fix="Correct or drop that row.")
        if entry.unscored:
            raise Unusable("unscored", "has no reward", where=where)
        prompt, response = self.tokens.prompt(entry), self.tokens.response(entry)
        self.tokens.check_length(prompt, response, where)
        right = self.outcomes.right(entry, response.text)
        found = self.tokens.spans.of(prompt.ids, response.ids, entry.sampled)
        reward = self.outcomes.reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        problem, policy = entry.problem_id or _problem(entry, prompt), self.policies.policy(entry, file)
        self.assumed.update(
            prompt.assumed if entry.assumed is None else (f"responses {entry.assumed}", *prompt.assumed)
        )
        self.assumed.update(told(found, entry.sampled))
        if not response.logged and not entry.response_rendered and self.tokens.lost_markers:
            self.assumed[
                f"responses are text without special tokens, {self.tokens.lost_markers} among them: which of their "
                "tokens are thinking is not known"
            ] += 1
        self.retokenised += not response.logged
        self.without_end += entry.response_ids is None and response.finish_reason == "unknown"
        self.outcomes.names.update(entry.rewards.keys())
        self.has.update(name for name, told in _told(entry).items() if told)
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
        record = {
            "problem_id": problem,
            "policy": policy,
            "prompt": prompt.text,
            "response": response.text,
            "answer": entry.answer,
            "level": entry.level,
            "prompt_ids": prompt.ids,
            "response_ids": response.ids,
            COLUMN: found.parts,
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


def _told(entry: Entry | None = None) -> dict[str, bool]:
    """What a log may say of a trajectory, and whether it does."""
    entry = entry or Entry("")
    return {
        "reference answer": entry.answer != "",
        "advantage": entry.advantage is not None,
        "problem id": entry.problem_id is not None,
        "number of the policy's updates": entry.updates is not None or entry.policy is not None,
    }


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
