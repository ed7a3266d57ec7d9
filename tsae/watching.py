"""`tsae watch`: follow a training that goes on. New checkpoints and log steps are added to the folder of `tsae run`.

1. Look: which checkpoints are complete, and how much of every file of the log. What is being written waits.
2. If that is something new, the stages of `tsae run` (`tsae.stages`) are carried out for exactly this state, in the
   hidden folder .next, which begins as a copy by hard links. So only what is new is computed. The SAE is kept.
3. When all of it is there, its parts take the places of the old ones. Until then the old analysis stays whole.

What comes out depends on the state and the SAE alone, not on the updates before. So an update that was killed is
resumed for the state that it had begun with, and a watch ends with what one analysis of the finished training gives.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tsae.activations.capture import changed_checkpoints, rewritten_checkpoints
from tsae.activations.manifest import read_manifest
from tsae.base.files import new_folder, read_object, write_json
from tsae.base.mirror import removed
from tsae.base.output_lock import output_lock
from tsae.checkpoints.series import CheckpointSeries, step_folders
from tsae.checkpoints.weight_files import unfinished
from tsae.config import RunConfig, WatchConfig
from tsae.diff.feature_diff import FeatureDiff
from tsae.doctor import NoBase, check_device, check_options, find_run_log, find_series
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.report.story.facts import stand_in
from tsae.report.text import visible
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs.log_files import NoLog, StableFiles, find_files, name_in
from tsae.rollouts.logs.readers import grows
from tsae.run import State, analyze_state
from tsae.sae.model import TemporalSAE
from tsae.stages import RunRecord, read_run

_NEXT, _OLD, _READY = ".next", ".old", "ready.json"
_NOT_SHOWN = ("attribution", "causal")
"""Stages that a watch leaves out: what lies there is of a shorter training."""
_OF_SAE = ("site", "sae", "d_sae", "k", "training_tokens", "seed")
"""Settings that decided which SAE is kept."""
_FALL = 0.05
"""A fall of a reader's FVE below that of the training that is worth a warning."""
_NAMED = 3
"""Checkpoints that one line names; of more, the first and the last."""


@dataclass(frozen=True)
class Update:
    """What one update of a watched training did."""

    diff: FeatureDiff
    """Of the training as it was; its features lie in the folder."""
    checkpoints: tuple[str, ...]
    """Ids of the checkpoints that are new."""
    trajectories: int
    """Of the log, and those of them that are new."""
    new_trajectories: int
    step: int | None
    """The last that the log has; None where it has no steps."""
    fve: dict[str, float | None]
    """Fraction of variance that the SAE explains of each reader."""
    warning: str
    """Where it explains less of a reader than when it was trained; else empty."""
    seconds: float
    page: Path
    """The page that was written anew."""

    def __str__(self) -> str:
        ids = self.checkpoints
        many = f"{len(ids)} checkpoints, {ids[0]} to {ids[-1]}" if len(ids) > _NAMED else ", ".join(ids)
        new = f"new: {many}; " if ids else ""
        last = "" if self.step is None else f" up to step {self.step:,}"
        told = f"; {stand_in(self.diff)}" if stand_in(self.diff) else ""
        explained = ", ".join(f"{id} {'unknown' if fve is None else f'{fve:.3f}'}" for id, fve in self.fve.items())
        return (
            f"{new}{self.new_trajectories:,} new of {self.trajectories:,} trajectories{last}; FVE {explained}{told}; "
            f"{self.seconds:.0f} s; reload {self.page}"
        )


def watch(
    config: RunConfig,
    watching: WatchConfig | None = None,
    *,
    progress: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[Update]:
    """Follow a training that goes on, and give an `Update` whenever something new was analysed.

    Args:
        config: which training, and the choices that you make yourself: those of `tsae.analyze_run`, whose folder may
            exist. Samples are not attributed, and features not tested causally.
        watching: defaults of `WatchConfig`.
        progress: show the bars of the stages.
        say: called with one line for each update, warning, and new reason to wait.

    Raises:
        TsaeError: as `tsae.analyze_run`; and where the folder `to` holds an analysis of other settings, versions or
            another base, or the log no longer holds what was read before. The analysis that is there stays.
    """
    if config.sample is not None:
        fix = "Leave it out, and give `tsae run --sample` another folder in the end."
        raise TsaeError("fresh rollouts are not sampled while a training runs", where="--sample", fix=fix)
    for finding in (*check_options(config), check_device(config)):
        if finding.error is not None:
            raise finding.error
    return _Watch(replace(config, attribute=False, causal=False), watching or WatchConfig(), progress, say).updates()


class _Wait(Exception):
    """Why there is nothing to analyse yet."""


class _Watch:
    def __init__(self, config: RunConfig, watching: WatchConfig, progress: bool, say: Callable[[str], None]) -> None:
        self.config, self.watching, self.progress, self.say = config, watching, progress, say
        self.to, self.next = config.to, config.to / _NEXT
        self.settling = StableFiles(watching.quiet)
        self.before: dict[str, Any] | None = None
        self.told, self.reached = "", -1

    def updates(self) -> Generator[Update]:
        if not self.config.path.is_dir():
            raise TsaeError("no such folder", where=self.config.path, fix="Give the folder that the trainer writes to.")
        asked = False
        while True:
            with output_lock(self.to):
                _exchange(self.to)
                self.before = self._finished()
                state = self._begun()
                resumed = state is not None
                try:
                    state = state or self._look()
                except FileNotFoundError:  # removed while it was looked at
                    self.settling.waits = True
                except (_Wait, NoLog) as error:
                    why = "there is no rollout log yet" if isinstance(error, NoLog) else str(error)
                    if why != self.told:
                        self._tell(f"waiting: {why}")
                    self.told = why
                update = None if state is None else self._update(state)
            if update is not None:
                self._tell(str(update))
                if update.warning:
                    self._tell(f"warning: {update.warning}")
                yield update
                assert state is not None
                self.reached = max(c.step for c in state.series)
            done = self.watching.until is not None and self.reached >= self.watching.until
            if update is not None and resumed and not done:
                continue  # What has come since may be a lot.
            if done or self.watching.once:
                if done or asked or not self.settling.waits:
                    if update is None and not self.told:
                        self._tell("nothing new")
                    return
                asked = True
                time.sleep(self.watching.quiet)
            else:
                time.sleep(self.watching.every)

    def _tell(self, line: str) -> None:
        self.say(visible(line))

    def _look(self) -> State | None:
        """The state of the training, if it differs from the one that was analysed.

        Raises:
            _Wait: where nothing can be analysed yet.
            NoLog: where there is no rollout log yet.
        """
        self.settling.waits = False
        folders, before = self._checkpoints(), self.before
        partial = unfinished(folders)
        partial |= {folder: "it is being written" for folder in folders if not self.settling.rests(folder)}
        self.settling.waits |= bool(partial)
        known = {} if before is None else dict(before["log"])
        log = find_run_log(self.config)
        sizes = {}
        for file in find_files(log):
            found, size = self.settling.bytes_of(file), file.stat().st_size
            held = known.get(name_in(log, file), 0)
            sizes[file] = held if found < held and (held == size or (grows(file) and held < size)) else found
            if held and not sizes[file]:
                raise _Wait(f"{file.name} is being written anew")
        self.settling.forget([*folders, *sizes])
        sizes = {file: size for file, size in sizes.items() if size}
        if len(partial) == len(folders) or not sizes:
            none = "no checkpoint is complete" if len(partial) == len(folders) else "no part of the log is complete"
            raise _Wait(none + "".join(f"; {folder.name}: {why}" for folder, why in list(partial.items())[:1]))
        _, of_log, _ = find_log(log, self.config.importing, sizes)
        sizes = {file.path: sizes[file.path] for file in of_log}
        try:
            state = self._state(log, frozenset(partial), sizes)
        except NoBase as error:
            why = f"{error.what}; the next checkpoint can be compared with it, or give its model (--base)"
            raise _Wait(why) from error
        facts = state.facts(self.config)
        same = before is not None and all(sorted(before[n]) == sorted(facts[n]) for n in ("series", "log"))
        same = same and (self.to / "report.html").is_file()
        anew = rewritten_checkpoints(self.to / "activations", state.series) if same else []
        if anew:
            self._tell(f"{', '.join(anew)}: written anew since the last analysis, and read again")
        if same and not anew and not (self.watching.retrain and "sae" in (before or {})):
            self.reached = max(c.step for c in state.series)
            return None
        self.told = ""
        return state

    def _checkpoints(self) -> list[Path]:
        """Folders of the training's checkpoints, complete or not."""
        if (self.config.path / "series.json").is_file():
            series = CheckpointSeries.load(self.config.path)
            return [Path(c.path) for c in series if not c.is_base and Path(c.path).is_dir()]
        return step_folders(self.config.path)

    def _begun(self) -> State | None:
        """The state of an update that was interrupted, if it can be completed; else nothing is left of it."""
        with suppress(TsaeError, FileNotFoundError, KeyError, TypeError, ValueError):
            found = read_run(self.next, "run.json") or {}
            paths, folders = {Path(path) for _, path in found["series"]}, self._checkpoints()
            log = find_run_log(self.config)
            sizes = {(log / name if log.is_dir() else log): int(size) for name, size in found["log"]}
            held = {file: file.stat().st_size for file in sizes}
            there = all(n == sizes[file] or (grows(file) and n > sizes[file]) for file, n in held.items())
            there &= self.before is None or dict(self.before["log"]).keys() <= dict(found["log"]).keys()
            state = self._state(log, frozenset(folders) - paths, sizes)
            if there and not self._gone(state) and found | state.facts(self.config) == found:
                return state
        removed(self.next)
        return None

    def _state(self, log: Path, without: frozenset[Path], sizes: dict[Path, int]) -> State:
        state = State(*find_series(self.config, without), log, sizes, self.to)
        if self.before is None or self.watching.retrain or self.config.sae is not None:
            return state
        trained = self.before.get("found", {}).get("fve_at_training")
        if trained is None:  # `tsae run` trained it, and compared what it trained it on.
            trained = {r["id"]: r["fve"] for r in FeatureDiff.load(self.to / "diff").info["readers"]}
        return state._replace(kept=TemporalSAE.load(self.to / "sae").fingerprint, trained=trained)

    def _finished(self) -> dict[str, Any] | None:
        """What run.json of the analysis that is there says; None where there is none.

        Raises:
            TsaeError: where the folder holds something else.
        """
        before = read_run(self.to, "run.json")
        if before is None and self.to.is_dir() and any(not path.name.startswith(".") for path in self.to.iterdir()):
            raise TsaeError("holds something else than an analysis", where=self.to, fix="Give another one with --to.")
        return before

    def _update(self, state: State) -> Update | None:
        began, before = time.monotonic(), self.before
        if before is not None:
            self._refuse_others(before, state)
            _begin(self.to)
        try:
            config = replace(self.config, to=self.next)
            diff = analyze_state(config, state, progress=self.progress, say=lambda line: None)
        except (TsaeError, OSError) as error:
            gone = self._gone(state)
            if not gone:
                raise
            self._tell(f"looking again: {gone} was removed or changed while it was read ({str(error).splitlines()[0]})")
            return None
        fve = {reader["id"]: reader["fve"] for reader in diff.info["readers"]}
        trained = state.trained or fve
        RunRecord(self.next, "run.json", state.facts(config), "an analysis").add_found(fve_at_training=trained)
        stages = read_object(self.next / "stages.json", "Remove it.")
        write_json(self.next / "stages.json", {**stages, "report": str(self.to / "report.html")})
        held, log = (folder / "rollouts" / "log.parquet" for folder in (self.to, self.next))
        n_held = pq.read_metadata(held).num_rows if held.is_file() else 0
        ids = {id for id, _ in before["series"]} if before is not None else set()
        steps = pq.read_table(log, columns=["step"])["step"]
        write_json(self.next / _READY, {})
        _exchange(self.to)
        return Update(
            diff=FeatureDiff.load(self.to / "diff", features=FeatureTable.load(self.to / "features")),
            checkpoints=tuple(c.id for c in state.series if c.id not in ids and not c.is_base),
            trajectories=len(steps),
            new_trajectories=len(steps) - n_held,
            step=max(steps.drop_null().to_pylist(), default=None),
            fve=fve,
            warning=_warning(fve, trained),
            seconds=time.monotonic() - began,
            page=(self.to / "report.html").resolve(),
        )

    def _gone(self, state: State) -> str:
        """What of a state is no longer there or no longer as it was; empty where all of it is."""
        ids = {Path(c.path): c.id for c in state.series if (c.step or not c.is_base) and Path(c.path).is_absolute()}
        lost = [id for path, id in ids.items() if path in unfinished([path])]
        begun = self.next / "activations"
        if not lost and (begun / "manifest.json").is_file():
            lost = [id for id, *_ in changed_checkpoints(read_manifest(begun), state.series)]
        return ", ".join([*lost, *(file.name for file in state.sizes if not file.is_file())])

    def _refuse_others(self, before: dict[str, Any], state: State) -> None:
        """Refuse another training, other versions, another base, and options of another SAE than the kept one."""
        facts = state.facts(self.config)
        differing = RunRecord.refusal(before, facts, "run")
        if state.kept is not None:
            differing += [name for name in _OF_SAE if before["run"].get(name) != facts["run"][name]]
        if differing:
            what = f"holds an analysis of another training, SAE or versions (differing: {', '.join(differing)})"
            fix = "Give the options with which it started, another SAE (--retrain), or another folder (--to)."
            raise TsaeError(what, where=self.to, fix=fix)
        base, manifest = state.series.base, read_manifest(self.to / "activations")
        held = manifest["readers"][0]
        if held["step"] and not Path(dict(before["series"]).get(held["id"], "")).is_dir():
            self._tell(f"{held['id']}, which stood in for the base, was removed: {base.id} takes its place")
            return
        for _, found, captured in changed_checkpoints(manifest, state.series, [base.id]):
            what = f"is another base than before: its weights and config have the hash {found}, and those that were "
            fix = "Give the same base (--base), or begin in another folder with --to."
            raise TsaeError(f"{what}compared with have {captured}", where=base.path, fix=fix)


def _warning(fve: dict[str, float | None], trained: dict[str, float | None]) -> str:
    """Where the SAE explains less than when it was trained."""
    least = min((value for value in trained.values() if value is not None), default=0.0)
    fallen = {id: value for id, value in fve.items() if value is None or value < least - _FALL}
    if not fallen:
        return ""
    shown = ", ".join(f"{'nothing' if value is None else f'{value:.3f}'} of {id}" for id, value in fallen.items())
    return f"the SAE explains {shown}, and explained {least:.3f} or more when it was trained; --retrain trains another"


def _begin(to: Path) -> None:
    """Let the next analysis begin with what the one before holds: the same files under a second name."""

    def others(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) == to and (name[0] == "." or name in _NOT_SHOWN)]

    if not (to / _NEXT).is_dir():
        with new_folder(to / _NEXT) as copy:
            shutil.copytree(to, copy, ignore=others, copy_function=_link, dirs_exist_ok=True)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # a file system without hard links
        shutil.copy2(old, new)


def _exchange(to: Path) -> None:
    """Replace the analysis by the finished update. Completes an exchange that a kill interrupted."""
    new, old = to / _NEXT, to / _OLD
    if (new / _READY).is_file():
        old.mkdir(exist_ok=True)
        for name in [*(path.name for path in new.iterdir() if path.name != _READY), *_NOT_SHOWN]:
            if (to / name).is_dir():  # out of the way, until the new one is in its place
                removed(old / name)
                os.replace(to / name, old / name)
            if name not in _NOT_SHOWN:
                os.replace(new / name, to / name)
        (new / _READY).unlink()
        removed(new)
    removed(old)
