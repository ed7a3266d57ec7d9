"""Import a trainer's log: read it row by row, tokenise what needs it, and write one Parquet file of rollouts.

1. A parser (`logs.trainers`) makes entries of the rows.
2. `Tokens` (`logs.tokenising`) gives them token ids.
3. Outcome, reward, problem and policy are decided (`logs.bookkeeping`), and batches of rows are written to a spool.
4. The ledger finds repeats and conflicts.
5. What the log says twice is compared (`logs.checks`).
6. The spools become the file.

Memory holds one batch of trajectories and a few dozen bytes for each, however long the log is. 1 to 3 are done part by
part (`logs.on_disk.parts`), in worker processes if the log is long (`logs.running`). Parts are put together in the
order of the log, so the file does not depend on who read them; finished parts are not read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tsae.base.files import as_path
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import vocabulary_facts
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.bookkeeping.contents import Contents
from tsae.rollouts.logs.bookkeeping.summary import Summary
from tsae.rollouts.logs.checks.second_look import refuse_disagreement
from tsae.rollouts.logs.detect import find_log
from tsae.rollouts.logs.entries.log_format import Format
from tsae.rollouts.logs.on_disk.log_files import run_folder
from tsae.rollouts.logs.on_disk.parts import Part, parts_of, total_bytes
from tsae.rollouts.logs.running.bar import Bar
from tsae.rollouts.logs.running.journal import Job, Journal, begin, finish, settings
from tsae.rollouts.logs.running.spool import Spool, Spools
from tsae.rollouts.logs.running.workers import MOST, default_workers, read_in_workers, setup
from tsae.rollouts.logs.tokenising.padding import find_pads
from tsae.rollouts.logs.tokenising.template_settings import find_settings
from tsae.rollouts.logs.tokenising.tokens import Tokens, tokenizer_alone

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
        (`tsae.rollouts.responses.token_parts`); if the log has log-probabilities of the response's tokens,
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
