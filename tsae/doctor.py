"""Doctor: what a training run has for an analysis, and what it lacks, in seconds and before anything is computed.

`tsae run` finds its checkpoints, base and log here, too. `examine` reads names, configurations, settings and as many
rows of the log as some seconds allow. It loads no weights.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from tsae.attribution.find_settings import bases_in_settings, find_settings, read_settings
from tsae.base.files import as_path
from tsae.base.untrusted import one_line
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries, folders_of_run, named_bases
from tsae.checkpoints.sites import Site, check_sites
from tsae.checkpoints.weight_files import (
    config_of,
    folder_of,
    has_tokenizer,
    is_adapter,
    is_gguf,
    is_hub_id,
    weights_of,
)
from tsae.config import RunConfig
from tsae.errors import TsaeError, refuse
from tsae.rollouts.band_source import bands_from, read_source
from tsae.rollouts.bands import band_counts, kind_of_bands
from tsae.rollouts.config import BandCutoffs, ImportConfig
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.log_files import NoLog, find_files
from tsae.rollouts.logs.outcome_rules import with_outcome
from tsae.rollouts.logs.tokens import shown_prompt
from tsae.rollouts.schema import BANDS

_SECONDS = 2.0
"""In which rows of the log are read."""
_SHOWN = 12
"""Steps of a run that are named one by one."""
_FEWEST = 8
"""Problems of a band, below which little can be said of it."""
_CORE, _GPU = 3e10, 2e14
"""How many operations a CPU core, and a GPU, make in a second of a forward pass, about."""
_READINGS = 4
"""Times that every trajectory is read: once, and by three nulls of noise in the weights."""

_LONGEST_NAME = 4096
"""Characters of a model's name."""
_BASE = "--base MODEL, a folder or Hugging Face id: the model that training started from"
State = Literal["ok", "note", "missing"]
"""`tsae run` refuses what is missing; of a note it says on the page what is then left out or less sure."""


class NoBase(TsaeError):
    """There is nothing to compare the checkpoints with."""

    def __init__(self, what: str, series: CheckpointSeries, path: Path) -> None:
        super().__init__(what, where=path, fix="Give the model that training started from (--base).")
        self.series = series


class Finding(NamedTuple):
    """One line of the examination."""

    subject: str
    state: State
    what: str
    fix: str = ""
    """What to add, where something is missing or could be better."""
    error: TsaeError | None = None
    """With which `tsae run` refuses what is missing."""

    def lines(self) -> list[str]:
        """As the terminal shows it."""
        heads = (f"{self.subject:<12} {self.state:<8} ", f"{'':<12} {'':<8} -> ")
        return [head + one_line(text) for head, text in zip(heads, (self.what, self.fix), strict=True) if text]


class _Log(NamedTuple):
    """What was read of the log."""

    entries: list[Entry]
    whole: bool
    importing: ImportConfig
    """With the reward that means success."""

    @property
    def problems(self) -> dict[str, list[bool]]:
        """Successes of every problem."""
        found: dict[str, list[bool]] = {}
        for entry in self.entries:
            if (right := _right(entry, self.importing)) is not None:
                found.setdefault(entry.problem_id or str(entry.prompt), []).append(right)
        return found


def find_series(config: RunConfig, without: frozenset[Path] = frozenset()) -> tuple[CheckpointSeries, str]:
    """The checkpoints of a run, and a few words on which model is the base and what names it.

    Fetches and merges no weights.

    Args:
        config: of the run.
        without: folders of checkpoints that are left out, resolved.

    Raises:
        TsaeError: where there are no checkpoints, the base is missing, or nothing can be compared with it.
    """
    path = config.path

    def loaded(*sources: str | Path) -> CheckpointSeries:
        return CheckpointSeries.load(*sources, path, without=without)

    if config.base is not None:
        series = loaded(config.base)
        _check_base(series.base)
        return _comparable(series, path), f"the base is {config.base} (as asked)"
    found, refused = loaded(), list[str]()
    if found.base.step == 0 and len(found) > 1:
        try:
            _check_base(found.base)
        except TsaeError as error:
            what = f"names {found.base.path} as its base, which cannot be used: {error}"
            raise NoBase(what, found, path) from error
        return _comparable(found, path), f"the base is {found.base.path}"
    for name, by in _named(found, path):
        try:
            _check_base(Checkpoint("base", name if is_hub_id(name) else str(as_path(name).resolve())))
            series = loaded(name)
        except TsaeError as error:
            refused.append(f"{by} names {name} as the base, which cannot be used ({error.what.rstrip('.')})")
        else:
            return _comparable(series, path), f"the base is {name} (by {by})"
    others = "".join(f"; {one}" for one in refused[:2])
    origin = f"{found.base.id} stands in for the base, which is not there{others} (--base)"
    return _comparable(found, path, others), origin


def _check_base(checkpoint: Checkpoint) -> None:
    """Refuse a base that is not a whole model with a tokenizer. Fetches and merges no weights."""
    gone = not is_hub_id(checkpoint.path) and not Path(checkpoint.path).exists()
    refuse(checkpoint.path, (gone, "there is no such folder", None))
    folder = folder_of(checkpoint, needs="config")
    adapts, tokens = is_adapter(folder), is_gguf(folder) or has_tokenizer(folder)
    refuse(folder, (adapts, "is an adapter", None), (not tokens, "holds no tokenizer", None))
    weights_of(checkpoint)


def _named(series: CheckpointSeries, run: Path) -> Iterator[tuple[str, str]]:
    """Models that files of the run name as the one that training started from, and which file does; each once."""
    seen = set()
    settings = (pair for folder in folders_of_run(series.final(), run) for pair in bases_in_settings(folder))
    for name, file in (*named_bases(series, run), *settings):
        local = name.isprintable() and len(name) <= _LONGEST_NAME and as_path(name).resolve()
        # A resumed run names its own checkpoint.
        if name not in seen and local and not local.is_relative_to(run.resolve()):
            seen.add(name)
            yield name, os.path.relpath(file, run.resolve()) if file.is_relative_to(run.resolve()) else str(file)


def _comparable(series: CheckpointSeries, path: Path, told: str = "") -> CheckpointSeries:
    if len(series) < 2:
        why = told.removeprefix("; ") or "nothing says which model training started from"
        raise NoBase(f"holds one checkpoint, and {why}", series, path)
    return series


def find_run_log(config: RunConfig) -> Path:
    """Find the rollout log.

    Raises:
        TsaeError: where there is none, or the analysis would be written into its folder.
    """
    known = (config.path / "tsae" / "generations", config.path / "completions")
    log = config.log or next((folder for folder in known if folder.is_dir()), config.path)
    inside = config.to.resolve().is_relative_to(log.resolve())
    refuse(config.to, (inside, "lies inside the folder that is searched for the rollout log", "Give another --to."))
    if config.log is None:
        try:
            find_files(log)
        except NoLog as error:
            fix = (
                "Say where it is (--log); tsae.rl.TsaeCallback(trainer) writes one, and TRL with log_completions=True. "
            )
            fix += "Without any, sample rollouts (tsae rollouts sample), then tsae capture"
            raise NoLog(f"holds no rollout log ({error.what})", where=log, fix=fix) from error
    return log


def check(config: RunConfig, say: Callable[[str], None] = print) -> None:
    """Print what a run has, what it lacks and what the analysis will take, before any of it is computed.

    Raises:
        TsaeError: the first of what is missing.
    """
    refused = None
    for finding in examine(config):
        for line in finding.lines():
            say(line)
        refused = refused or finding.error
    if refused is not None:
        raise refused


def examine(config: RunConfig) -> Iterator[Finding]:
    """Examine a run for `tsae run` with these options.

    Yields:
        a finding a subject, as soon as it is known: options, where one is wrong; base, checkpoints, log, success,
        tokens, bands, settings, attribution, device, disk, time.
    """
    yield from check_options(config)
    series, log = None, None
    try:
        series, origin = find_series(config)
    except NoBase as error:
        series = error.series
        yield Finding("base", "missing", error.what, _BASE, error)
        yield _checkpoints(series)
    except TsaeError as error:
        yield _missing("checkpoints", error)
    else:
        stands_in = series.base.step > 0
        yield Finding("base", "note" if stands_in else "ok", origin, _BASE * stands_in)
        yield _checkpoints(series)
        try:
            _readers(series, config)
            shape = _shape(series.base)
            if config.site is not None and (depth := shape.get("num_hidden_layers") or shape.get("n_layer")):
                check_sites([config.site], int(depth), series.base.path)
        except TsaeError as error:
            yield _missing("options", error)
    try:
        path = find_run_log(config)
        form, files, notes = find_log(path, config.importing)
        importing, success = with_outcome(form.read(files[0], config.importing), config.importing, path)
    except TsaeError as error:
        yield _missing("log", error)
    else:
        log = _read(form, files, importing)
        steps = sorted({entry.step for entry in log.entries if entry.step is not None})
        part = f"{len(log.entries):,} trajectories" + (" so far, of a longer log" if not log.whole else "")
        span = f", steps {steps[0]} to {steps[-1]}" if steps else ", no steps"
        yield Finding("log", "ok", "; ".join([f"{form.files.title} in {path}: {part}{span}", *notes]))
        yield from _of_log(log, success)
        yield from _from_elsewhere(log, config)
    if series is not None:
        yield from _attribution(series, log, config)
        yield from _machine(series, log, config)


def check_options(config: RunConfig) -> Iterator[Finding]:
    """Findings on options that are wrong whatever the run holds."""
    wrong = [name for name in config.diff.bands or () if name not in BANDS]
    files = {"--bands-from": config.bands_from, "--problems": config.problems}
    gone = [f"{option} {file}" for option, file in files.items() if file is not None and not file.is_file()]
    what, fix = f"no problem is in the band {''.join(wrong[:1])!r}", f"Bands are {', '.join(BANDS)} (--diff.bands)."
    try:
        refuse("options", (wrong, what, fix), (gone, f"no such file: {', '.join(gone)}", "Check the path."))
        if config.site is not None:
            Site.parse(config.site)
    except TsaeError as error:
        yield _missing("options", error)


def check_device(config: RunConfig) -> Finding:
    """Whether the device is there; torch is asked where it is not the CPU."""
    better = config.device == "cpu" and bool(glob("/dev/nvidia[0-9]*"))
    there = True
    if config.device != "cpu":
        import torch

        try:
            asked = torch.device(config.device)
            there = asked.type != "cuda" or (asked.index or 0) < torch.cuda.device_count()
        except RuntimeError:
            there = False
    if not there:
        what = f"{config.device} is asked for, and torch does not find it here"
        return _missing("device", TsaeError(what, where="--device", fix="--device cpu"))
    return Finding("device", "note" if better else "ok", config.device, "--device cuda: there is a GPU" * better)


def _readers(series: CheckpointSeries, config: RunConfig) -> CheckpointSeries:
    return series.select(config.checkpoints) if config.checkpoints else series.final()


def _shape(checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration of the text model."""
    found = config_of(folder_of(checkpoint, needs="config"))
    text = found.get("text_config")
    return text if isinstance(text, dict) else found


def _missing(subject: str, error: TsaeError) -> Finding:
    where = f" ({error.where})" if error.where else ""
    return Finding(subject, "missing", f"{error.what}{where}", error.fix or "", error)


def _checkpoints(series: CheckpointSeries) -> Finding:
    told = []
    for run in series.runs:
        steps = [c.step for c in series if c.run == run]
        few = f"steps {', '.join(map(str, steps))}"
        told.append(f"{run}: {few if len(steps) <= _SHOWN else f'{len(steps)} steps, {steps[0]} to {steps[-1]}'}")
    told = told or [series.base.path]
    told += [note.rstrip(".") for note in series.notes if "stands in" not in note]  # the finding on the base says that
    return Finding("checkpoints", "ok", "; ".join(told))


def _read(form: Any, files: Any, importing: ImportConfig) -> _Log:
    entries: list[Entry] = []
    until = time.monotonic() + _SECONDS
    for file in files:
        for entry in form.read(file, importing):
            if isinstance(entry, Entry):
                entries.append(replace(entry, response=None) if entry.response_ids is not None else entry)
            if time.monotonic() > until:
                return _Log(entries, False, importing)
    return _Log(entries, True, importing)


def _right(entry: Entry, importing: ImportConfig) -> bool | None:
    if entry.correct is not None:
        return entry.correct
    name = importing.outcome or entry.decides
    reward = entry.rewards.get(name) if name else entry.reward
    return None if reward is None or np.isnan(reward) else reward > importing.success_above


def _of_log(log: _Log, success: str) -> Iterator[Finding]:
    outcomes = Counter(_right(entry, log.importing) for entry in log.entries)
    known = outcomes[True] + outcomes[False]
    if not known:
        fix = "--outcome REWARD (which reward says what is right), or --verifier exact, last_number or math"
        yield Finding("success", "note", f"no trajectory has a known outcome: {success}", fix)
    else:
        yield Finding("success", "ok", f"{success}; {outcomes[True] / known:.0%} of {known:,} are right")
    with_ids = sum(entry.response_ids is not None for entry in log.entries)
    if with_ids == len(log.entries):
        yield Finding("tokens", "ok", "the log has token ids")
    else:
        what = "the log has texts: they are tokenised again, and may lose special tokens"
        yield Finding("tokens", "note", what, "`tsae rollouts formats` says what to switch on in the trainer")
    problems = log.problems
    if not problems:
        return
    rates = np.array([np.mean(found) for found in problems.values()])
    bands = pd.Series(BandCutoffs().band(rates))
    counts = Counter(bands)
    few = [band for band in ("easy", "medium", "hard") if counts[band] < _FEWEST]
    once = sum(len(found) == 1 for found in problems.values())
    what = f"about, by the log's own pass rates: {band_counts(bands)} problems; {once:,} were answered once"
    fix = "--bands-from FILE: the base's own rollouts on these problems (tsae rollouts sample)"
    if len({entry.level for entry in log.entries} - {None}) > 1:
        fix += "; or --bands-column level: the log has levels of the data set"
    thin = f"; too few for much: {', '.join(few)}" if few else ""
    yield Finding("bands", "note" if few else "ok", what + thin, fix * bool(few))


def _from_elsewhere(log: _Log, config: RunConfig) -> Iterator[Finding]:
    """Bands by another model's pass rates, or by the data set's levels, where they are asked for."""
    try:
        known = read_source(config.source)
        asked = {(e.problem_id or str(e.prompt), e.level): shown_prompt(e.prompt or "") for e in log.entries}
        rows = [(id, prompt, level) for (id, level), prompt in asked.items()]
        problems = pd.DataFrame(rows, columns=["id", "prompt", "level"])
        for bands, told in bands_from(config.source, known, problems.id, problems, config.log or config.path):
            yield Finding(kind_of_bands(bands.info), "ok", told)
    except TsaeError as error:
        yield _missing(config.source.kinds[0] if config.source.kinds else "bands", error)


def _attribution(series: CheckpointSeries, log: _Log | None, config: RunConfig) -> Iterator[Finding]:
    try:
        settings = find_settings(series) if len(series) > 1 else read_settings(config.path)
    except TsaeError as error:
        fix = "put what the trainer left beside the checkpoints: training_args.bin, wandb/, .hydra/, or its recipe"
        yield Finding("settings", "note", error.what, fix)
        yield Finding("attribution", "note", "not without settings: the page then lacks which samples did that")
        return
    trainer = f"{settings.trainer} {settings.version or ''}".strip()
    notes = "".join(f"; {note.rstrip('.')}" for note in settings.notes)
    yield Finding("settings", "ok", f"{trainer}, by {Path(settings.source).name}: {settings}{notes}")
    if log is None:
        return
    steps = any(entry.step is not None for entry in log.entries)
    rewards = any(entry.reward is not None or entry.advantage is not None for entry in log.entries)
    lacks = [what for what, there in (("steps", steps), ("rewards or advantages", rewards)) if not there]
    if lacks:
        what = f"the log lacks {' and '.join(lacks)}"
        yield Finding("attribution", "note", what, "tsae.rl.TsaeCallback(trainer) logs both")
    elif settings.dropout:
        yield Finding("attribution", "note", "the training dropped activations, which a replay cannot repeat")
    elif series.base.step:
        what = f"after step {series.base.step} only, since the base is missing"
        yield Finding("attribution", "note", what, _BASE)
    elif _tokens(log) > config.tokens:
        n = f"{'about' if log.whole else 'more than'} {_tokens(log):,} tokens"
        what = f"not of the whole log: it has {n}, and --tokens {config.tokens:,} are read"
        yield Finding("attribution", "note", what, "raise --tokens, or `tsae attribute --steps` a stretch")
    else:
        yield Finding("attribution", "ok", "base, log and settings are there; the replay says whether they agree")


def _machine(series: CheckpointSeries, log: _Log | None, config: RunConfig) -> Iterator[Finding]:
    yield check_device(config)
    cuda = config.device.startswith("cuda")
    try:
        readers = list(_readers(series, config))
        sizes = [(checkpoint, *weights_of(checkpoint)) for checkpoint in readers]
    except TsaeError as error:
        yield _missing("weights", error)
        return
    first = [f"{c.id}'s weights ({_gb(size)}) are {how} first, and kept" for c, size, how in sizes if how]
    shape = _shape(series.base)
    d_model = int(shape.get("hidden_size") or shape.get("n_embd") or 0)
    half = "16" in str(shape.get("dtype") or shape.get("torch_dtype"))
    in_log = _tokens(log) if log is not None and log.entries and log.whole else config.tokens
    tokens = len(readers) * min(config.tokens, in_log)
    need = tokens * d_model * (2 if half else 4)
    disk = config.to.resolve()
    free = shutil.disk_usage(next(place for place in (disk, *disk.parents) if place.is_dir())).free
    what = "; ".join([f"about {_gb(need)} for activations of {tokens:,} tokens; {_gb(free)} are free", *first])
    fix = "--tokens N reads less, --to FOLDER writes elsewhere"
    # What an interrupted run has written already needs no more room, and of a longer log less may be read.
    short, sure = need > free, log is not None and log.whole and not (config.to / "activations").is_dir()
    if short and sure:
        yield _missing("disk", TsaeError(what, where=config.to, fix=fix))
    else:
        yield Finding("disk", "note" if short else "ok", what, fix * short)
    # Half of the blocks are read; a parameter takes two operations a token.
    work = tokens * _READINGS * sizes[0][1] / (2 if half else 4)
    what = f"about {_minutes(work / (_GPU if cuda else _CORE * (os.cpu_count() or 1)))} to read them"
    yield Finding("time", "ok", f"{what}, and as long again for the rest, very roughly")


def _tokens(log: _Log) -> int:
    """How many tokens the entries have that were read, about."""

    def n(entry: Entry) -> float:
        asked = len(entry.prompt_ids) if entry.prompt_ids is not None else len(str(entry.prompt or "")) / 3
        given = len(entry.response_ids) if entry.response_ids is not None else len(entry.response or "") / 3
        return asked + given

    return int(sum(map(n, log.entries)))


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.0f} MB"


def _minutes(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
