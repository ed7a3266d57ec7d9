"""Import a trainer's log: read it row by row, tokenise what needs it, and write one Parquet file of rollouts.

1. A trainer's adapter (`tsae.rollouts.trainers`) makes entries of the rows.
2. `Tokens` (`logs.tokens`) gives them token ids.
3. Outcome, reward, problem and policy are decided (`logs.outcome_rules`, `logs.policies`), and the rows of each part of
   the log go to a Parquet file of its own (`logs.import_parts`), in several processes if the log is long.
4. Repeats and conflicts are found (`logs.repeats`), and what the log says twice is compared
   (`logs.consistency_checks`).
5. The parts become the file, in the order of the log. So it does not depend on who read them.

Memory holds one batch of trajectories, and for each trajectory about a hundred bytes. Finished parts stay in a hidden
folder until the import ends: given again, it reads only the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tsae.base.artefact import version_of
from tsae.base.files import as_path
from tsae.base.output_lock import output_lock
from tsae.base.progress import progress_bar
from tsae.base.untrusted import one_line
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import tokenizer_fingerprint, vocabulary_facts
from tsae.errors import TsaeError, refuse
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.log_detection import FORMATS, find_log
from tsae.rollouts.logs import import_parts
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.consistency_checks import Check, ConsistencyChecks
from tsae.rollouts.logs.entry import Entry, Findings, Unusable, hash64, some_of
from tsae.rollouts.logs.import_parts import Part
from tsae.rollouts.logs.log_files import LogFile, run_folder
from tsae.rollouts.logs.outcome_rules import OutcomeRules
from tsae.rollouts.logs.policies import Policies
from tsae.rollouts.logs.repeats import COLUMNS, Groups, drop_repeats, goes_back
from tsae.rollouts.logs.templates import find_settings
from tsae.rollouts.logs.tokens import Tokens, find_pads, strip, tokenizer_alone
from tsae.rollouts.parquet import read_pieces, write_table
from tsae.rollouts.problems import undated
from tsae.rollouts.rewards import BY_NAME
from tsae.rollouts.schema import LARGEST_REWARD, outcome_name
from tsae.rollouts.token_parts import COLUMN, told

_LEVELS_UP = 4  # From output_dir/completions, or prime-rl's rollouts/step_N/train/effective, to the checkpoints.
_PARALLEL_FROM, _MOST = 1 << 25, 4
"""Bytes of a log from which several processes read it, and how many: each takes seconds to start."""
_WORKER = "from tsae.rollouts.importing import read_share; read_share()"
_STOPPED = "responses stop without an end token, and the log does not say that they were cut off"
_RETOKENISED = (
    "responses were tokenised from text, perhaps into other tokens than those that were sampled (round_trip is false)"
)
_WITHOUT_END = (
    "responses have no end token: the log does not say which ended by themselves (--max-response-tokens, if you know "
    "the run's limit)"
)
_ASSUMED, _HAS, _EXTRA, _PADDED = "assumed", "has", "extra columns", "padded"
_CHECKED = ("same_text", "retokenised", "group", "asked", "gold", "batch", "trained_on", "compared")
_CELLS = {
    "trajectories": ("trajectories", 14),
    "problems": ("problems", 10),
    "success_rate": ("success", 9),
    "groups": ("groups", 8),
    "no_variance": ("no variance", 13),
    "retokenised": ("retokenised", 13),
    "not_round_tripping": ("not round-tripping", 20),
}
"""By column of `Summary.table`, its head in print and its width, in the order in which they are printed."""
_GROWN = ("problem_id", "prompt_ids", "response_ids", "reward", "step")


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
    if workers is not None and not 1 <= workers <= 256:
        raise TsaeError(f"workers={workers} is not 1 to 256", where="import_log", fix="Give one a core, or none.")
    form, files, notes = find_log(path, config, only)
    of_log = to.is_file() and any(to.samefile(file.path) for file in files)
    refuse(
        to,
        (to.is_dir(), "is a folder, and a file is to be written", "Give another path."),
        (of_log, "is a file of the log, which would be replaced", "Give another path."),
    )
    series = _series(checkpoint, path)
    trainers = find_settings(path) if json.loads(config.template_arguments) == {} else None
    if trainers is not None:
        config = replace(config, template_arguments=json.dumps(trainers[0]))
        told_so = f"the chat template is given {config.template_arguments}, as {trainers[1]} says"
        series = replace(series, notes=(*series.notes, told_so))
    tokens = Tokens(series.base, config)
    tokens.pads = find_pads(form, files, config, tokens)
    log = LogImporter(form, files, series, tokens, config, notes)
    keeping = None if kept is None else as_path(kept)
    with output_lock(to), import_parts.PartFiles(to, _settings(log, series), keeping) as folder:
        parts = [(part, folder.of(part)) for part in import_parts.parts_of(log.policies.files, cut=form.files.cut)]
        found = _read_all(parts, log, series, workers, progress=progress)
        paths = [path for _, path in parts]
        summary = log.summary(path, paths, found)
        if config.strict and (wrong := [str(check) for check in summary.second_look if check.disagrees]):
            what = f"does not agree with itself: {'. '.join(wrong)}"
            raise TsaeError(what, where=path, fix="Correct what is named, or import it without --strict.")
        schema = import_parts.table_schema(log.findings)
        rewards = [name.removeprefix("reward/") for name in log.findings.counts["reward columns"]]
        info = {**vocabulary_facts(tokens.tokenizer), "log": {**summary.as_dict(), "rewards": rewards}}
        write_table(to, schema, (log.renamed(*rows) for rows in import_parts.table_rows(paths, schema, log.kept)), info)
    return summary


def _settings(log: LogImporter, series: CheckpointSeries) -> str:
    """What the parts of a log depend on beside their files."""
    read, tokenizer = asdict(log.config), log.tokens.tokenizer
    for name in ("skip", "noisy_rewards", "strict"):  # They only decide what is an error.
        del read[name]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = {
        "form": log.form.name,
        "config": read,
        "pads": log.tokens.pads,
        "series": len(series) > 1,  # Which checkpoint sampled is compared part by part.
        "tokenizer": tokenizer_fingerprint(tokenizer) if backend is None else hash64(backend.to_str()),
        "template": tokenizer.chat_template,
        "model": [log.tokens.context, sorted(log.tokens.ends)],
        "versions": [version_of(name) for name in ("tsae", "transformers", "tokenizers")],
        # A user's function may have changed: no part that it judged is used again.
        "verifier": None if log.config.verifier in (None, *BY_NAME) else uuid.uuid4().hex,
    }
    return json.dumps(settings, sort_keys=True)


def _read_all(
    parts: Sequence[tuple[Part, Path]],
    log: LogImporter,
    series: CheckpointSeries,
    workers: int | None,
    *,
    progress: bool,
) -> list[Findings]:
    """What was found in every part; reads those that are not there yet, and adds all of it up in `log`."""

    def usable(found: Findings | None) -> bool:
        return (
            found is not None
            and log.policies.agrees(found)
            and set(log.config.skip) >= found.counts["skipped"].keys()  # now an error
        )

    done = {path: found for _, path in parts if usable(found := import_parts.found_part(path))}
    todo = [(part, path) for part, path in parts if path not in done]
    total = sum(part.bytes for part, _ in parts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = workers or (min(cores, _MOST) if total >= _PARALLEL_FROM else 1)
    every, n_rows = [], 0
    with progress_bar("import", "B", total, shown=progress) as bar, ExitStack() as stack:
        if done:
            bar.write(f"{len(done):,} of {len(parts):,} parts had been read before", file=sys.stderr)
        wait_for = None
        if n > 1 and len(todo) > 1:
            wait_for = stack.enter_context(_workers(todo, min(n, len(todo)), log, series))
        for part, path in parts:
            if path not in done:
                if wait_for is not None:
                    wait_for(path)
                if wait_for is None or not path.is_file():

                    def say(here: int, before: int = n_rows) -> None:
                        bar.set_postfix_str(f"{before + here:,} trajectories")

                    read_part(part, path, log.form, series, log.tokens, log.config, say)
            found = done.get(path) or import_parts.found_part(path)
            if found is None:
                raise TsaeError("is not there any more", where=path, fix="Import again.")
            log.findings.add(vars(found))
            log.rules.check()
            every.append(found)
            n_rows += sum(found.counts["outcome"].values())
            bar.update(part.bytes)
            bar.set_postfix_str(f"{n_rows:,} trajectories", refresh=False)
    return every


def read_part(
    part: Part,
    path: Path,
    form: Format,
    series: CheckpointSeries,
    tokens: Tokens,
    config: ImportConfig,
    say: Callable[[int], None] = lambda n: None,
) -> None:
    """Read a part of a log, and write its rows and what was found in it.

    Args:
        part: of the log.
        path: of its file, which appears when it is complete.
        form: the log's.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        say: gets the trajectories that were read so far, now and then.

    Raises:
        TsaeError: naming file and line, for rows with wrong values.
    """
    log = LogImporter(form, (), series, tokens, config)
    import_parts.write_part(path, log.records(part, say), log.findings)


@contextmanager
def _workers(
    todo: Sequence[tuple[Part, Path]], n: int, log: LogImporter, series: CheckpointSeries
) -> Iterator[Callable[[Path], None]]:
    """Processes that read parts, each every n-th one. They load tsae, and nothing else of the program.

    Yields:
        a function that waits until a part is read, or its worker has stopped at an error: the part is then read here,
        and raises it. It raises a `TsaeError` where the worker was ended from outside.
    """
    left_out = ("noise", "base")  # of the weights, which are not read
    setup = {
        "form": log.form.name,
        "config": asdict(log.config),
        "checkpoints": [{k: v for k, v in asdict(c).items() if k not in left_out} for c in series],
        "pads": log.tokens.pads,
    }
    # A worker finds modules as this process does: a verifier may lie anywhere.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    processes, of = list[subprocess.Popen[str]](), dict[Path, subprocess.Popen[str]]()

    def wait_for(path: Path) -> None:
        while not path.is_file() and of[path].poll() is None:
            time.sleep(0.02)
        if not path.is_file() and of[path].returncode:
            what = f"a process that read the log was ended from outside (exit status {of[path].returncode})"
            fix = "If memory ran out, give --workers 1; finished parts are not read again."
            raise TsaeError(what, where="--workers", fix=fix)

    try:
        for mine in (todo[i::n] for i in range(n)):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # of a verifier
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to this process, which ends its workers.
            )
            processes.append(process)
            for _, path in mine:
                path.unlink(missing_ok=True)  # damaged, or of a part that is an error now
                of[path] = process
            assert process.stdin is not None
            process.stdin.write(json.dumps({**setup, "parts": [(p.as_dict(), str(path)) for p, path in mine]}) + "\n")
            process.stdin.flush()
        yield wait_for
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def read_share() -> None:
    """Be a worker: read the parts that standard input names; end at once if the process that wrote them is gone."""
    setup = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    form = next(form for form in FORMATS if form.name == setup["form"])
    config = ImportConfig(**setup["config"])
    series = CheckpointSeries(tuple(Checkpoint(**found) for found in setup["checkpoints"]))
    tokens = Tokens(series.base, config, setup["pads"])
    try:
        for part, path in setup["parts"]:
            read_part(Part.from_dict(part), Path(path), form, series, tokens, config)
    except TsaeError:
        os._exit(0)  # The parent reads this part itself, and raises the error.
    os._exit(0)


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


class LogImporter:
    """What a log holds, or a part of it: rows of the table, what was assumed, and what is reported about the whole.

    Args:
        form: of the log.
        files: all of the log's; none for a part, whose files belong to their runs already.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        notes: about the files.
    """

    def __init__(
        self,
        form: Format,
        files: Sequence[LogFile],
        series: CheckpointSeries,
        tokens: Tokens,
        config: ImportConfig,
        notes: Sequence[str] = (),
    ) -> None:
        self.form, self.tokens, self.config, self.findings = form, tokens, config, Findings()
        self.counts, self.notes = self.findings.counts, [*series.notes, *notes]
        self.policies = Policies(series, files, config.run, self.findings, synchronous=form.files.synchronous)
        self.rules = OutcomeRules(config, self.findings, a_file_a_step=form.files.a_file_a_step)
        self.checks = ConsistencyChecks(tokens, self.policies.checkpoints, self.findings)

    def records(self, part: Part, say: Callable[[int], None]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(row of the table, its numbers in the index) of every trajectory, in the order of the log."""
        n = 0
        for number, file in enumerate(part.files, part.first):
            empty = file.start == 0
            for found in self.form.read(file, self.config):
                empty = False
                if isinstance(found, Entry) and (found.step, found.updates) == (0, -1):  # Its steps are counted from 1.
                    self.counts[_ASSUMED][
                        "trajectories of step 0, an evaluation before the training, are left out"
                    ] += 1
                    continue
                try:
                    if isinstance(found, Unusable):
                        raise found
                    yield self._record(found, file, number)
                except Unusable as unusable:
                    if unusable.kind not in self.config.skip:
                        raise
                    self.counts["skipped"][unusable.kind] += 1
                n += 1
                if n % 256 == 0:
                    say(n)
            if empty:
                self.counts["empty files"][file.path.name] += 1
        self.checks.answers.close()

    def summary(self, path: Path, paths: Sequence[Path], found: Sequence[Findings]) -> Summary:
        """Check the whole log, by the files of its parts and what was found in each, and describe it."""
        counts, files = self.counts, self.policies.files
        n = sum(counts["outcome"].values())
        for what, fix in self._faults(n):
            raise TsaeError(what, where=path, fix=fix)
        index = import_parts.read_index(paths, [*COLUMNS, "policy", "step", "outcome", "same_text", "retokenised"])
        index.insert(0, "source", index.groupby(["policy", "step"], sort=False, observed=True, dropna=False).ngroup())

        def place(row: int) -> str:
            return files[index["file"].iloc[row]].place(index["number"].iloc[row])

        self.kept = drop_repeats(index, files, self.config, place, copies=self.form.name == "trl")
        self.groups = Groups(index[self.kept], self.config)
        self.kept[self.groups.dropped] = False
        if repeated := int((~self.kept).sum()):
            counts["skipped"]["repeated"] += repeated
        self._prompts = index.prompt.to_numpy()
        odd = [*self._odd_tokens(), *self.groups.notes(odd=True, ids=counts[_HAS]["problem id"] > 0)]
        notes = [*self.notes, *self.policies.notes, *odd, *goes_back(index[self.kept], files), *self._assumed(n, index)]
        table, total = _by_source(index[self.kept], self.groups, self.policies.renamed)
        compared = import_parts.read_index(paths, _CHECKED)
        checks = self.checks.checks(compared, import_parts.reward_parts(paths, found), self.kept, place)
        return Summary(
            self.form.files.title, len(files), table, total, dict(counts["skipped"]), tuple(notes), tuple(odd), checks
        )

    def _faults(self, n: int) -> Iterator[tuple[str, str]]:
        """(what is wrong with a log of n trajectories, what to do)."""
        counts, names = self.counts, self.rules.names
        if not n:
            left = ", ".join(f"{n} {kind}" for kind, n in counts["skipped"].items())
            yield (
                f"holds no trajectories{f' but those left out: {left}' * bool(left)}",
                "Give a log with at least one row.",
            )
        if self.config.outcome is not None and self.config.outcome not in names:
            what = f"no row has a reward {self.config.outcome!r}; there are {', '.join(names) or 'none'}"
            yield what, "Name one of these as --outcome."
        for absent in (name for name in self.config.keep_columns if name not in counts[_EXTRA]):
            yield f"no row has a column {absent!r} to keep", "Name columns that are there (--keep-columns)."
        trips = counts["same text"]
        if not trips["yes"] and trips["no"]:
            what = f"not one of its {trips['no']} responses decodes to the logged text"
            yield what, f"Check that {self.tokens.path} is the checkpoint that was trained."
        if n and counts["prompt text"]["mostly lost"] == n:
            what = f"of all its {n} prompts the tokenizer of {self.tokens.path} does not know most characters"
            yield what, "Check that this is the checkpoint that was trained."

    def renamed(self, table: pa.Table, rows: np.ndarray) -> pa.Table:
        """Rows of the table, by their numbers, with the names that policies and problems get in the end."""
        found, policies, several = dict[str, list[str]](), self.policies.renamed, self.groups.several.index
        if policies:
            found["policy"] = [policies.get(name, name) for name in table["policy"].to_pylist()]
        if len(several) and not self.config.merge_prompts:
            asked = zip(table["problem_id"].to_pylist(), self._prompts[rows].tolist(), strict=True)
            found["problem_id"] = [f"{id}/{prompt >> 32:08x}" if hash64(id) in several else id for id, prompt in asked]
        for name, values in found.items():
            table = table.set_column(table.column_names.index(name), table.schema.field(name), [pa.array(values)])
        return table

    def _assumed(self, n: int, index: pd.DataFrame) -> Iterator[str]:
        counts = self.counts
        if names := list(counts["empty files"].elements()):
            yield f"{len(names):,} file{'s hold' if len(names) > 1 else ' holds'} no trajectories: {some_of(names, 3)}"
        yield from self.policies.assumed()
        yield from self._steps_between(index)
        yield from self.groups.notes(odd=False)
        for what, times in counts[_ASSUMED].items():
            yield f"{times:,} {what}"
        lacking = [name for name in _told(Entry("")) if not counts[_HAS][name]]
        if lacking:
            yield f"the log has no {' and no '.join(lacking)}"
        for name, times in counts[_HAS].items():
            if 0 < times < n:
                article = "an" if name[0] in "aeiou" else "a"
                yield f"{times:,} of {n:,} trajectories have {article} {name}; the others do not"
        yield from self.rules.notes(n, counts["outcome"]["unknown"])

    def _steps_between(self, index: pd.DataFrame) -> Iterator[str]:
        """What follows if the log lacks the steps between those that it has."""
        steps = np.unique(index.step.dropna().astype(int)).tolist()
        gaps = np.diff(steps)
        # A run log has every generation, and the updates in between.
        if len(steps) < 2 or gaps.min() < 2 or self.form.name == "tsae":
            return
        bases = {checkpoint.id for checkpoint in self.policies.checkpoints if checkpoint.is_base}
        sampled = {self.policies.renamed.get(name, name) for name in index.policy.cat.categories}
        lacks = bases and bases.isdisjoint(sampled)
        yield (
            f"the log has {len(steps):,} of the steps {steps[0]:,} to {steps[-1]:,}, about every {np.median(gaps):g}th"
            ": pass rates, bands, behaviours by step and claims rest on these alone"
            + ", the base sampled none of them (its bands need --bands-from or --sample)"
            * bool(lacks)
            + ", and `tsae attribute` refuses it, since it replays every step. TRL and ms-swift log every step with "
            "logging_steps=1"
        )

    def _odd_tokens(self) -> Iterator[str]:
        """What is to be reported of padding and of lost characters."""
        padded, tokens = self.counts[_PADDED], self.tokens
        if padded["ids"]:
            found = sorted({id for ids in tokens.pads.values() for id in ids if id >= 0})
            pads = "".join(f"{id} {tokens.written(id)!r}, " for id in found)
            yield (
                f"{padded['prompts']:,} prompts and {padded['responses']:,} responses have padding: {padded['ids']:,} "
                f"ids at their edges ({pads}mask values below 0) were left out (--pad-ids, if other tokens pad it)"
            )
        if lost := self.counts["prompt text"]["lost"] + self.counts["prompt text"]["mostly lost"]:
            what = f"{lost:,} trajectories have prompts with characters that the checkpoint's tokenizer does not know"
            yield f"{what}: their ids are of another text"

    def _record(self, entry: Entry, file: LogFile, file_number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        _check_steps(entry, file)
        n, m = strip(entry, self.tokens)
        self.counts[_PADDED].update({"prompts": n > 0, "responses": m > 0, "ids": n + m})
        prompt, response = self.tokens.prompt(entry), self.tokens.response(entry)
        self.tokens.check_length(entry, prompt, response)
        right = self.rules.right(entry, response.text)
        found = self.tokens.spans.of(prompt.ids, response.ids, entry.sampled)
        reward = self.rules.reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            what = f"its rewards add up to {reward:g}, expected {LARGEST_REWARD:g} at most"
            entry.refuse(what, "Correct or drop that row, or scale rewards down.")
        asked = prompt.ids.tobytes() if entry.prompt is None else json.dumps(entry.prompt, sort_keys=True, default=str)
        rendered = prompt.text if entry.prompt is None else entry.prompt
        if dated := isinstance(rendered, str) and (text := undated(rendered)) != rendered:
            asked = text
        by_prompt = self.config.columns.by_prompt
        # Such an id is a hash of question and answer, so that two logs give the same problem the same id.
        own = f"{hash64(asked, *[entry.answer] * (not by_prompt)):016x}"
        problem, policy = own if by_prompt else entry.problem_id or own, self.policies.policy(entry, file)
        assumed = [] if entry.assumed is None else [f"responses {entry.assumed}"]
        assumed += [*prompt.assumed, *told(found, entry.sampled)]
        assumed += ["prompts have the date of the day: equal questions of two days count as one problem"] * dated
        if entry.logprobs is not None and not len(entry.logprobs) and len(response.ids):
            assumed.append("responses have log-probabilities that are not a number for every token, and are left out")
            entry.logprobs = None
        retokenised, outcome = not response.logged, outcome_name(right)
        if retokenised:
            assumed.append(_RETOKENISED)
            if not entry.response_rendered and self.tokens.lost_markers:
                assumed.append(
                    f"responses are text without special tokens, {self.tokens.lost_markers} among them: which of their "
                    "tokens are thinking is not known"
                )
        if response.finish_reason == "unknown":
            assumed.append(_WITHOUT_END if retokenised else _STOPPED)
        self.counts[_ASSUMED].update(assumed)
        self.counts["prompt text"]["mostly lost" if prompt.lost > 0.5 else "lost" if prompt.lost else "kept"] += 1
        self.counts[_HAS].update(name for name, there in _told(entry).items() if there)
        self.counts[_EXTRA].update(entry.extra.keys())
        self.counts["outcome"][outcome] += 1
        self.counts["same text"][{None: "no text", True: "yes", False: "no"}[response.same_text]] += 1
        ids = (prompt.ids.tobytes(), response.ids.tobytes(), entry.apart)
        numbers = {
            "file": file_number,
            "number": entry.number,
            "problem": hash64(problem),
            "prompt": hash64(asked),
            "key": 0 if entry.key is None else hash64(policy, entry.key),
            "trajectory": hash64(policy, str(entry.step), problem, entry.answer, response.finish_reason, *ids),
            "content": hash64(problem, str(entry.advantage), *ids),
            "same_text": 2 if response.same_text is None else int(response.same_text),
            "retokenised": retokenised,
        }
        # The trainer's own reward and outcome, whichever rewards or verifier are asked for here.
        trained_on = entry.reward if entry.reward is not None or self.rules.verify is not None else reward
        logged = self.rules.logged(entry)
        group = problem if entry.group or self.config.merge_prompts else f"{problem}/{hash64(asked):x}"
        numbers |= self.checks.see(
            entry, file, prompt, response, problem=group, policy=policy, reward=trained_on, right=logged
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
        return record | {f"extra/{name}": value for name, value in entry.extra.items()}, numbers


def _check_steps(entry: Entry, file: LogFile) -> None:
    """Take the step from the file's name if the row has none, and refuse what does not fit."""
    if file.step is not None and entry.step not in (None, file.step):
        entry.refuse(f"is of step {entry.step} in a file of step {file.step}")
    entry.step = file.step if entry.step is None else entry.step
    for name, counted in (("step", entry.step), ("the number of the policy's updates", entry.updates)):
        if counted is not None and not 0 <= counted < 1 << 63:
            entry.refuse(f"{name} is {str(counted)[:24]}, expected 0 to 2⁶³ − 1")
    if entry.unscored:
        entry.leave_out("unscored", "has no reward")


def _told(entry: Entry) -> dict[str, bool]:
    """What a log may say of a trajectory, and whether it does."""
    return {
        "reference answer": entry.answer != "",
        "advantage": entry.advantage is not None,
        "problem id": entry.problem_id is not None,
        "number of the policy's updates": entry.updates is not None or entry.policy is not None,
    }


def _by_source(
    index: pd.DataFrame, groups: Groups, renamed: Mapping[str, str]
) -> tuple[pd.DataFrame, dict[str, float]]:
    """What was read, by policy and step, and in total; see `Summary`."""
    index = index.assign(problem=groups.problem(index), known=index.outcome != "unknown")
    index["success"], index["not_round_tripping"] = index.outcome == "success", index.same_text == 0
    by_group = index.groupby(["source", "problem"]).reward.agg(["size", "count", "min", "max"])
    # A group is of one policy and step, so that groups add up.
    alike = (by_group["size"] > 1) & (by_group["count"] == by_group["size"]) & (by_group["min"] == by_group["max"])
    by_source = index.groupby("source")
    first = by_source[["policy", "step"]].first()
    counted = by_source[["known", "success", "retokenised", "not_round_tripping"]].sum()
    n_groups = by_group.groupby("source").size()
    table = pd.DataFrame(
        {
            "policy": [renamed.get(name, name) for name in first.policy],
            "step": first.step.astype("Int64"),
            "trajectories": by_source.size(),
            "problems": n_groups,
            "groups": n_groups,
            "no_variance": alike.groupby("source").sum(),
            "success_rate": (counted.success / counted.known).where(counted.known > 0),
            "retokenised": counted.retokenised,
            "not_round_tripping": counted.not_round_tripping,
        }
    ).reset_index(drop=True)
    total = {name: table[name].sum().item() for name in _CELLS} | {"problems": int(index.problem.nunique())}
    total["success_rate"] = counted.success.sum() / counted.known.sum() if counted.known.any() else float("nan")
    return table, total


@dataclass(frozen=True)
class Summary:
    """What an import read."""

    format: str
    n_files: int
    table: pd.DataFrame
    """One row for each policy and step: policy, step, trajectories, problems, groups (a problem in that step),
    no_variance (groups of two or more with equal rewards), success_rate (of known outcomes), retokenised (responses
    whose ids were made from text), not_round_tripping (responses whose ids do not decode to the logged text)."""
    total: dict[str, float]
    """The same over the whole log."""
    skipped: dict[str, int]
    """Trajectories left out, by kind."""
    notes: tuple[str, ...]
    """What was assumed."""
    odd: tuple[str, ...] = ()
    """Those of the notes that are about padding, problem ids and copies: what most logs do not have."""
    second_look: tuple[Check, ...] = ()
    """Comparisons of what the log says twice."""

    def as_dict(self) -> dict[str, object]:
        """What goes into the table's info."""
        return {
            "format": self.format,
            "files": self.n_files,
            "skipped": self.skipped,
            "notes": list(self.notes),
            "second_look": {check.name: check.as_dict() for check in self.second_look},
        }

    def __str__(self) -> str:
        steps = self.table.step.dropna()
        span = f", {steps.nunique()} steps from {steps.min()} to {steps.max()}" if steps.nunique() > 1 else ""
        lines = [f"{self.format}: {self.n_files} file{'s' * (self.n_files != 1)}{span}"]
        width = max(8, *(len(policy) for policy in self.table.policy))
        lines.append(f"  {'policy':<{width}}{'step':>8}" + "".join(f"{head:>{cell}}" for head, cell in _CELLS.values()))
        # Names come from the log, and must not control the terminal.
        rows = [
            (one_line(row.policy), "–" if pd.isna(row.step) else str(row.step), row._asdict())
            for row in self.table.itertuples()
        ]
        if len(rows) > 24:
            rows = [*rows[:12], ("…", "", {}), *rows[-12:]]
        for policy, step, counts in (*rows, ("all", "", self.total)):
            lines.append(f"  {policy:<{width}}{step:>8}{_cells(counts)}".rstrip())
        for kind, n in sorted(self.skipped.items()):
            lines.append(f"left out: {n:,} {kind}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"second look at {check}" for check in self.second_look)])


def _cells(counts: dict[str, float]) -> str:
    shown = {name: f"{counts[name]:,}" for name in _CELLS.keys() & counts.keys()}
    if shown:
        rate = counts["success_rate"]
        shown["success_rate"] = "–" if np.isnan(rate) else f"{rate:.3f}"
    return "".join(f"{shown[name]:>{width}}" for name, (_, width) in _CELLS.items() if shown)


def check_grown(before: Path, now: Path, log: Path) -> None:
    """Check that a log still holds every trajectory that it held before: the same tokens, reward and step.

    Memory holds 16 bytes a trajectory.

    Args:
        before: Parquet file of the earlier import; there may be none.
        now: that of the log as it is.
        log: named in the message.

    Raises:
        TsaeError: where a trajectory is missing or has changed; the message names its step.
    """
    if not before.is_file():
        return
    held, there = _steps_by_hash(before), _steps_by_hash(now)
    missing = held.index.value_counts().sub(there.index.value_counts(), fill_value=0)
    missing = missing[missing > 0]
    if missing.empty:
        return
    which = sorted(held[held.index.isin(missing.index)].dropna().astype(int).unique())
    what = f"no longer holds {int(missing.sum()):,} of the {len(held):,} trajectories that were read before"
    what += f" (of step {some_of(map(str, which), 3)})" * bool(which) + ": it has not only grown"
    fix = "If the training began again, or resumed from an earlier checkpoint, analyse it in another folder (--to)."
    raise TsaeError(what, where=log, fix=fix)


def _steps_by_hash(file: Path) -> pd.Series:
    """The step of every trajectory, NaN where the log has no steps, by its hash."""
    hashes, steps = [np.empty(0, np.uint64)], [np.empty(0)]
    for table in read_pieces(file, _GROWN):
        columns = [table[name].to_pylist() for name in ("problem_id", "reward", "step")]
        ids = ((list.values.to_numpy() for list in table[name]) for name in ("prompt_ids", "response_ids"))
        found = (
            hash64(problem, repr(reward), repr(step), prompt.tobytes(), response.tobytes())
            for problem, reward, step, prompt, response in zip(*columns, *ids, strict=True)
        )
        hashes.append(np.fromiter(found, np.uint64, len(table)))
        steps.append(table["step"].cast(pa.float64()).to_numpy())
    return pd.Series(np.concatenate(steps), index=np.concatenate(hashes))
