"""Import a trainer's log: read it row by row, tokenise what needs it, and write one Parquet file of rollouts.

1. A parser (`tsae.rollouts.trainers`) makes entries of the rows.
2. `Tokens` (`logs.tokens`) gives them token ids.
3. Outcome, reward, problem and policy are decided (`logs.outcome_rules`, `logs.policies`); rows go to a spool.
4. The ledger finds repeats and conflicts.
5. What the log says twice is compared (`logs.consistency_checks`).
6. The spools become the file.

Memory holds one batch of trajectories and a few dozen bytes for each, however long the log is. 1 to 3 are done part by
part (`logs.on_disk.parts`), in worker processes if the log is long (`logs.running`). Parts are put together in the
order of the log, so the file does not depend on who read them; finished parts are not read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tsae.base.files import as_path
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import vocabulary_facts
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.consistency_checks import SecondLook, refuse_disagreement
from tsae.rollouts.logs.dedup_index import Ledger, Summary
from tsae.rollouts.logs.entry import Counts, Entry, Unusable, hash64
from tsae.rollouts.logs.on_disk.log_files import LogFile, run_folder
from tsae.rollouts.logs.on_disk.parts import Part, parts_of, total_bytes
from tsae.rollouts.logs.outcome_rules import Verdicts
from tsae.rollouts.logs.padding import find_pads, strip
from tsae.rollouts.logs.policies import Policies
from tsae.rollouts.logs.running.bar import Bar
from tsae.rollouts.logs.running.journal import Job, Journal, begin, finish, settings
from tsae.rollouts.logs.running.spool import Spool, Spools
from tsae.rollouts.logs.running.workers import MOST, default_workers, read_in_workers, setup
from tsae.rollouts.logs.templates import find_settings
from tsae.rollouts.logs.tokens import Tokens, tokenizer_alone
from tsae.rollouts.schema import LARGEST_REWARD, outcome_name
from tsae.rollouts.token_parts import COLUMN, told

_LEVELS_UP = 4  # From output_dir/completions, or prime-rl's rollouts/step_N/train/effective, to the checkpoints.
_SPOOL = "rows.parquet"


def import_log(
    path: str | Path,
    to: str | Path,
    checkpoint: Checkpoint | CheckpointSeries | str | Path | None = None,
    config: ImportConfig | None = None,
    *,
    only: Mapping[Path, int] | None = None,
    kept: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Summary:
    """Read a trainer's log and write it as rollouts.

    Call it again to resume an import that was stopped: finished parts stay in a hidden folder beside `to` until it
    ends.

    Args:
        path: the log: a file, or the folder into which the trainer writes its files.
        to: Parquet file to write, whole or not at all.
        checkpoint: its tokenizer, chat template and context length are used. From a series the base is used, and
            policies get the ids of its checkpoints. By default the checkpoints that lie beside the log.
        config: defaults of `ImportConfig`.
        only: files of the log that count, and how many bytes of each: JSON lines are read up to there. By default all.
        kept: folder in which what was read of every part of the log stays, so that an import of the log when it has
            grown reads the new parts only. It takes about as much room as the log.
        workers: processes that read; by default one a core and at most four, and one for logs of less than 32 MiB. The
            file does not depend on it.
        progress: show a bar.

    Returns:
        what was read. The file has the columns of `SCHEMA`, step, round_trip (whether the log has the response's token
        ids and they decode to its text; null if it has only token ids), ``reward/NAME`` for every reward of the log
        and ``extra/NAME`` for every column of `keep_columns`; if a response has thinking or several turns, ``parts``
        (`tsae.rollouts.token_parts`); if the log has log-probabilities of the response's tokens,
        ``sampler_logprobs``, and of NeMo-RL ``old_logprobs`` (`tsae.rollouts.schema.TRAINING`).

    Raises:
        TsaeError: naming file and line, for logs of no or several formats, for rows with wrong values, and with
            `ImportConfig.strict` for a log that does not agree with itself.
    """
    path, to, config = as_path(path), as_path(to), config or ImportConfig()
    if workers is not None and not 1 <= workers <= MOST:
        raise TsaeError(f"workers={workers} is not 1 to {MOST}", where="import_log", fix="Give one a core, or none.")
    form, files, notes = find_log(path, config, only)
    series = _series(checkpoint, path)
    trainers = find_settings(path) if json.loads(config.template_arguments) == {} else None
    if trainers is not None:
        config = replace(config, template_arguments=json.dumps(trainers.template_arguments))
        told_so = f"the chat template is given {config.template_arguments}, as {trainers.file} says"
        series = replace(series, notes=(*series.notes, told_so))
    tokens = Tokens(series.base, config)
    tokens.pads = find_pads(form, files, config, tokens)
    run, spools = Contents(form, files, series, tokens, config, notes=notes), Spools()
    keeping = None if kept is None else as_path(kept)
    with Journal(to, settings(form, series, tokens, config), config.skip, run.policies.agrees, keeping) as journal:
        with closing(_read(run, series, journal, workers, progress=progress)) as read:
            for folder, state in read:
                run.add(folder, state)
                spools.add(folder / _SPOOL, state["spool"])
        summary = run.summary(path)
        if config.strict:
            refuse_disagreement(summary.second_look, path)
        log = {**summary.as_dict(), "rewards": spools.rewards}
        info = {**vocabulary_facts(tokens.tokenizer), "log": log}
        spools.write(to, run.kept, info, run.renamed)
    return summary


def read_part(
    part: Part,
    folder: Path,
    form: Format,
    series: CheckpointSeries,
    tokens: Tokens,
    config: ImportConfig,
    say: Callable[[int, int], None],
) -> None:
    """Read a part of a log, and write its rows and what was found in it.

    Args:
        part: of the log.
        folder: for what is written; it appears when it is complete.
        form: the log's.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        say: gets the bytes and the trajectories that were read so far.

    Raises:
        TsaeError: naming file and line, for rows with wrong values.
    """
    begun = begin(folder)
    run, spool = Contents(form, (), series, tokens, config, begun), Spool(begun / _SPOOL)
    for record, n_bytes in run.records(part):
        spool.add(record)
        say(n_bytes, len(run.ledger))
    finish(begun, {**run.state(), "spool": spool.close()})


def _read(
    run: Contents, series: CheckpointSeries, journal: Journal, workers: int | None, *, progress: bool
) -> Generator[tuple[Path, dict[str, Any]]]:
    """(folder, state) of every part of a log, in order; reads those that are not there yet."""
    files = run.policies.files
    total = total_bytes(files)
    n = default_workers(total) if workers is None else workers
    with Bar(total, shown=progress) as bar:
        jobs = (journal.job(part) for part in parts_of(files, cut=run.form.cut))
        common = setup(run.form, series, run.config, run.tokens.pads)
        done = read_in_workers(jobs, n, common, bar.say) if n > 1 else _read_here(jobs, run, series, bar)
        with closing(done):
            for number, job in enumerate(done):
                state = journal.take(job)
                bar.end(number, job.part.bytes, state["ledger"]["n"], found=job.done)
                yield job.folder, state
        if journal.found:
            bar.write(journal.told())


def _read_here(jobs: Iterator[Job], run: Contents, series: CheckpointSeries, bar: Bar) -> Generator[Job]:
    for number, job in enumerate(jobs):
        if not job.done:
            say = partial(bar.say, number)
            read_part(job.part, job.folder, run.form, series, run.tokens, run.config, say)
        yield job


def _series(checkpoint: Checkpoint | CheckpointSeries | str | Path | None, path: Path) -> CheckpointSeries:
    if isinstance(checkpoint, CheckpointSeries):
        return checkpoint
    if isinstance(checkpoint, Checkpoint):
        return CheckpointSeries((replace(checkpoint, run=None),), name=checkpoint.id)
    if checkpoint is not None:
        return tokenizer_alone(as_path(checkpoint)) or CheckpointSeries.load(checkpoint)
    folder = run_folder(path if path.is_dir() else path.parent)
    for above in (folder, *list(folder.parents)[:_LEVELS_UP]):
        if (above / "series.json").is_file() or any(above.glob("checkpoint-*")):
            found = CheckpointSeries.load(above)
            return replace(found, notes=(*found.notes, f"tokenizer and checkpoints are those of {above}"))
    # slime's --dump-details keeps the tokenizer beside the rollouts.
    if alone := tokenizer_alone(folder / "tokenizer"):
        return alone
    what = "no checkpoint lies beside the log, and its tokenizer is needed"
    raise TsaeError(what, where=path, fix="Give the checkpoint that was trained, or its series (--checkpoint).")


_STOPPED = "responses stop without an end token, and the log does not say that they were cut off"
_LEDGER, _LOOK = "ledger", "look.npy"
_ASSUMED, _HAS, _EXTRA, _RESPONSES = "assumed", "has", "extra columns", "responses"
_PADDED = "padded"
_RETOKENISED, _WITHOUT_END = "retokenised", "without end token"


class Contents:
    """What a log holds, or a part of it.

    Args:
        form: of the log.
        files: all of the log's; none for a part, whose files belong to their runs already.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        folder: for the ledger of a part, and for numbers of its trajectories.
        notes: about the files.
    """

    def __init__(
        self,
        form: Format,
        files: Sequence[LogFile],
        series: CheckpointSeries,
        tokens: Tokens,
        config: ImportConfig,
        folder: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.form, self.tokens, self.config = form, tokens, config
        self.counts = Counts()
        self.ledger = Ledger(None if folder is None else folder / _LEDGER, self.counts)
        self.folder, self.notes = folder, [*series.notes, *notes]
        self.policies = Policies(series, files, config.run, self.counts, synchronous=form.synchronous)
        self.verdicts = Verdicts(config, self.counts, a_file_a_step=form.a_file_a_step)
        self.look = SecondLook(tokens, self.policies.checkpoints)
        self.kept = np.zeros(0, dtype=bool)
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
                    self.counts["skipped"][unusable.kind] += 1
            before += file.seen.bytes
            if empty:
                self.empty.append(number)

    def state(self) -> dict[str, Any]:
        """What was found in a part of the log, for JSON; numbers of every trajectory go into its folder."""
        assert self.folder is not None
        return {
            "counts": self.counts,
            "ledger": self.ledger.close(),
            "policies": self.policies.state(),
            "asked": [(run, step, id) for (run, step), id in self.policies.asked.items()],
            "verdicts": self.verdicts.state(),
            "empty": self.empty,
            "look": self.look.state(self.folder / _LOOK),
        }

    def add(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Add what was found in a further part, which lies in a folder."""
        self.counts.add(state["counts"])
        self.ledger.add(folder / _LEDGER, state["ledger"])
        self.policies.add(state["policies"])
        self.verdicts.add(state["verdicts"])
        self.empty += state["empty"]
        self.look.add(folder / _LOOK, state["look"])

    def summary(self, path: Path) -> Summary:
        """Check the whole log, and describe it."""
        names, counts = self.verdicts.names, self.counts
        if not len(self.ledger):
            left = ", ".join(f"{n} {kind}" for kind, n in counts["skipped"].items())
            what = "holds no trajectories" + (f" but those left out: {left}" if left else "")
            raise TsaeError(what, where=path, fix="Give a log with at least one row.")
        if self.config.outcome is not None and self.config.outcome not in names:
            what = f"no row has a reward {self.config.outcome!r}; there are {', '.join(names) or 'none'}"
            raise TsaeError(what, where=path, fix="Name one of these as --outcome.")
        absent = [name for name in self.config.keep_columns if name not in counts[_EXTRA]]
        if absent:
            what = f"no row has a column {absent[0]!r} to keep"
            raise TsaeError(what, where=path, fix="Name columns that are there (--keep-columns).")
        trips = counts["same text"]
        if not trips["yes"] and trips["no"]:
            what = f"not one of its {trips['no']} responses decodes to the logged text"
            raise TsaeError(what, where=path, fix=f"Check that {self.tokens.path} is the checkpoint that was trained.")
        files = self.policies.files
        self.kept = self.ledger.kept(files, self.config, copies=self.form.name == "trl")
        self.ledger.rename(self.policies.renamed)
        odd = [*self._padded(), *self.ledger.groups.notes(odd=True, ids=counts[_HAS]["problem id"] > 0)]
        notes = [*self.notes, *self.policies.notes, *odd, *self._assumed()]
        found = self.ledger.summary(self.form.title, len(files), self.kept, notes)
        place = partial(self.ledger.place, files)
        return replace(
            found, odd=tuple(odd), second_look=self.look.checks(*self.ledger.round_trips(), self.kept, place)
        )

    def renamed(self, table: pa.Table, rows: np.ndarray) -> dict[str, list[str]]:
        """Columns of rows of the table, by their numbers, with the names that policies and problems get in the end."""
        found, policies, several = dict[str, list[str]](), self.policies.renamed, self.ledger.groups.several.index
        if policies:
            found["policy"] = [policies.get(name, name) for name in table["policy"].to_pylist()]
        if len(several) and not self.config.merge_prompts:
            asked = zip(table["problem_id"].to_pylist(), self._prompts[rows].tolist(), strict=True)
            found["problem_id"] = [f"{id}/{prompt >> 32:08x}" if hash64(id) in several else id for id, prompt in asked]
        return found

    @cached_property
    def _prompts(self) -> np.ndarray:
        return self.ledger.prompts()

    def _assumed(self) -> Iterator[str]:
        n, counts = len(self.ledger), self.counts
        if self.empty:
            names = [self.policies.files[number].path.name for number in self.empty]
            shown = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
            yield f"{len(names):,} file{'s hold' if len(names) > 1 else ' holds'} no trajectories: {shown}"
        yield from self.policies.assumed()
        yield from self._steps_between()
        yield from self.ledger.groups.notes(odd=False)
        for what, times in counts[_ASSUMED].items():
            yield f"{times:,} {what}"
        lacking = [name for name in _told(Entry("")) if not counts[_HAS][name]]
        if lacking:
            yield f"the log has no {' and no '.join(lacking)}"
        for name, times in counts[_HAS].items():
            if 0 < times < n:
                article = "an" if name[0] in "aeiou" else "a"
                yield f"{times:,} of {n:,} trajectories have {article} {name}; the others do not"
        if retokenised := counts[_RESPONSES][_RETOKENISED]:
            yield (
                f"{retokenised:,} responses were tokenised from text: equal text, not surely the tokens that were "
                "sampled (round_trip is false)"
            )
        if without_end := counts[_RESPONSES][_WITHOUT_END]:
            yield (
                f"{without_end:,} responses have no end token: the log does not say which ended by themselves "
                "(--max-response-tokens, if you know the run's limit)"
            )
        yield from self.verdicts.notes(n, counts["outcome"]["unknown"])

    def _steps_between(self) -> Iterator[str]:
        """What follows if the log lacks the steps between those that it has."""
        steps = sorted({step for _, step in self.ledger.sources if step is not None})
        gaps = np.diff(steps)
        # A run log has every generation, and the updates in between.
        if len(steps) < 2 or gaps.min() < 2 or self.form.name == "tsae":
            return
        bases = {checkpoint.id for checkpoint in self.policies.checkpoints if checkpoint.is_base}
        lacks = bases and bases.isdisjoint(name for name, _ in self.ledger.sources)
        yield (
            f"the log has {len(steps):,} of the steps {steps[0]:,} to {steps[-1]:,}, about every {np.median(gaps):g}th"
            ": pass rates, bands, behaviours by step and claims rest on these alone"
            + ", the base sampled none of them (its bands need --bands-from or --sample)"
            * bool(lacks)
            + ", and `tsae attribute` refuses it, since it replays every step. TRL and ms-swift log every step with "
            "logging_steps=1"
        )

    def _padded(self) -> Iterator[str]:
        padded, tokens = self.counts[_PADDED], self.tokens
        if padded["ids"]:
            found = sorted({id for ids in tokens.pads.values() for id in ids if id >= 0})
            pads = "".join(f"{id} {tokens.written(id)!r}, " for id in found)
            yield (
                f"{padded['prompts']:,} prompts and {padded['responses']:,} responses have padding: {padded['ids']:,} "
                f"ids at their edges ({pads}mask values below 0) were left out (--pad-ids, if other tokens pad it)"
            )

    def _record(self, entry: Entry, file: LogFile, file_number: int) -> dict[str, Any]:
        _check_steps(entry, file)
        n, m = strip(entry, self.tokens)
        self.counts[_PADDED].update({"prompts": n > 0, "responses": m > 0, "ids": n + m})
        prompt, response = self.tokens.prompt(entry), self.tokens.response(entry)
        self.tokens.check_length(prompt, response, entry.where)
        right = self.verdicts.right(entry, response.text)
        found = self.tokens.spans.of(prompt.ids, response.ids, entry.sampled)
        reward = self.verdicts.reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            what = f"its rewards add up to {reward:g}, expected {LARGEST_REWARD:g} at most"
            raise TsaeError(what, where=entry.where, fix="Correct or drop that row, or scale rewards down.")
        asked = prompt.ids.tobytes() if entry.prompt is None else json.dumps(entry.prompt, sort_keys=True, default=str)
        by_prompt = self.config.columns.by_prompt
        # An id made of the question and its answer is equal in all logs of one kind.
        own = f"{hash64(asked, *[entry.answer] * (not by_prompt)):016x}"
        problem, policy = own if by_prompt else entry.problem_id or own, self.policies.policy(entry, file)
        assumed = [] if entry.assumed is None else [f"responses {entry.assumed}"]
        assumed += [*prompt.assumed, *told(found, entry.sampled)]
        retokenised, outcome = not response.logged, outcome_name(right)
        if retokenised:
            self.counts[_RESPONSES][_RETOKENISED] += 1
            if not entry.response_rendered and self.tokens.lost_markers:
                assumed.append(
                    f"responses are text without special tokens, {self.tokens.lost_markers} among them: which of their "
                    "tokens are thinking is not known"
                )
        if response.finish_reason == "unknown":
            if retokenised:
                self.counts[_RESPONSES][_WITHOUT_END] += 1
            else:
                assumed.append(_STOPPED)
        self.counts[_ASSUMED].update(assumed)
        self.counts[_HAS].update(name for name, there in _told(entry).items() if there)
        self.counts[_EXTRA].update(entry.extra.keys())
        self.ledger.enter(
            entry,
            file_number,
            problem,
            policy,
            prompt=hash64(asked),
            tokens=(prompt.ids.tobytes(), response.ids.tobytes(), entry.apart),
            finish_reason=response.finish_reason,
            reward=reward,
            outcome=outcome,
            same_text=response.same_text,
            retokenised=retokenised,
        )
        # The trainer's own reward and outcome, whichever rewards or verifier are asked for here.
        trained_on = entry.reward if entry.reward is not None or self.verdicts.verify is not None else reward
        logged = self.verdicts.logged(entry)
        group = problem if entry.group or self.config.merge_prompts else f"{problem}/{hash64(asked):x}"
        self.look.see(entry, file, prompt, response, problem=group, policy=policy, reward=trained_on, right=logged)
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
            "outcome": outcome,
            "advantage": entry.advantage,
            "finish_reason": response.finish_reason,
            "step": entry.step,
            "round_trip": response.round_trip,
        }
        given = entry.logprobs  # All 0 where the trainer has a place for them alone.
        if given is not None and given.any() and not retokenised and len(given) == len(response.ids):
            record["sampler_logprobs"] = given.astype(np.float32)
        record |= entry.training | {f"reward/{name}": value for name, value in entry.rewards.items()}
        return record | {f"extra/{name}": value for name, value in entry.extra.items()}


def _check_steps(entry: Entry, file: LogFile) -> None:
    """Take the step from the file's name if the row has none, and refuse what does not fit."""
    where = entry.where
    if file.step is not None and entry.step is not None and entry.step != file.step:
        raise TsaeError(
            f"is of step {entry.step} in a file of step {file.step}", where=where, fix="Give the log as written."
        )
    entry.step = file.step if entry.step is None else entry.step
    for name, counted in (("step", entry.step), ("the number of the policy's updates", entry.updates)):
        if counted is not None and not 0 <= counted < 1 << 63:
            shown = str(counted)[:24]
            raise TsaeError(f"{name} is {shown}, expected 0 to 2⁶³ − 1", where=where, fix="Correct or drop that row.")
    if entry.unscored:
        raise Unusable("unscored", "has no reward", where=where)


def _told(entry: Entry) -> dict[str, bool]:
    """What a log may say of a trajectory, and whether it does."""
    return {
        "reference answer": entry.answer != "",
        "advantage": entry.advantage is not None,
        "problem id": entry.problem_id is not None,
        "number of the policy's updates": entry.updates is not None or entry.policy is not None,
    }
