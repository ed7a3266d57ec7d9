"""CheckpointSeries: an ordered set of checkpoints with exactly one base.

A series is a folder with a ``series.json``::

    {"name": "arithmetic",
     "checkpoints": [
       {"id": "base", "path": "base", "run": null, "step": 0, "trained_on": null},
       {"id": "easy-050", "path": "easy-050", "run": "easy", "step": 50, "trained_on": "easy"}]}

or is put together from sources, each of which is one of

- a trainer's folder of checkpoints (one run), such as TRL's ``checkpoint-N`` or verl's ``global_step_N``, or a folder
  of such folders (several runs); see `tsae.checkpoints.layouts`;
- one model: a folder, a PEFT adapter's folder, or a .gguf file;
- a Hugging Face id, with a revision and a subfolder if wanted: ``org/model@revision/subfolder``. ``org/model@step_*``
  and ``org/model@*`` are all branches and tags that fit and name a step, ``org/model@commits`` all commits that do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from tsae.base import display
from tsae.base.files import as_path, read_object, reading, write_json
from tsae.base.filters import several
from tsae.base.untrusted import parse_json, parse_yaml
from tsae.checkpoints import layouts
from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.weight_files import (
    ADAPTER_CONFIG,
    beside_the_model,
    config_of,
    is_adapter,
    is_gguf,
    is_hub_id,
    quantisation,
    unfinished,
    vocabulary_size,
)
from tsae.errors import TsaeError, refuse

_LONGEST_CARD = 1 << 20
"""Characters."""
_FIELDS = ("id", "path", "run", "step", "trained_on", "revision", "subfolder")


@dataclass(frozen=True)
class CheckpointSeries:
    """An ordered set of checkpoints with exactly one base, which comes first wherever it was given."""

    checkpoints: tuple[Checkpoint, ...]
    name: str = "series"
    notes: tuple[str, ...] = ()
    """What was assumed in making the series; the CLI prints it."""

    def __post_init__(self) -> None:
        ids = [checkpoint.id for checkpoint in self.checkpoints]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        bases = [checkpoint for checkpoint in self.checkpoints if checkpoint.is_base]
        if twice or len(bases) != 1:
            names = ", ".join(checkpoint.id for checkpoint in bases) or "none"
            what = f"found {len(bases)} base checkpoints ({names}), expected exactly one"
            what = f"checkpoint ids come twice: {', '.join(twice)}" if twice else what
            raise TsaeError(what, where=self.name, fix="Give unique ids, and exactly one checkpoint with run null.")
        known: dict[tuple[str | None, int], str] = {}
        for c in self.checkpoints:
            if c.noise is None and (other := known.setdefault((c.run, c.step), c.id)) != c.id:
                what = f"{other} and {c.id} are both step {c.step} of the run {c.run}"
                raise TsaeError(what, where=self.name, fix="Give each its step; runs, such as seeds, need other names.")
        # Stores and tables name their readers in this order, the base first.
        base = replace(bases[0], base=None)
        others = (replace(c, base=base) for c in self.checkpoints if not c.is_base)
        object.__setattr__(self, "checkpoints", (base, *others))

    def __repr__(self) -> str:
        steps = {run: ", ".join(str(c.step) for c in self if c.run == run) for run in self.runs}
        runs = "".join(f"; {run} at step {found}" for run, found in steps.items())
        return f"CheckpointSeries({self.name}: {self.base.id}{runs})"

    def _repr_html_(self) -> str:
        import pandas as pd

        kept = ["id", "run", "step", "trained_on", "path", "revision", "subfolder"]
        table = pd.DataFrame([asdict(c) for c in self])[kept].dropna(axis=1, how="all")
        return display.card(
            "CheckpointSeries",
            {"name": self.name, "checkpoints": len(self), "base": self.base.id, "notes": self.notes or None},
            ("checkpoints, the base first", table),
        )

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __getitem__(self, id: str) -> Checkpoint:
        for checkpoint in self.checkpoints:
            if checkpoint.id == id:
                return checkpoint
        ids = ", ".join(checkpoint.id for checkpoint in self.checkpoints)
        raise TsaeError(f"no checkpoint {id!r}; there are {ids}", where=self.name, fix="Use one of these ids.")

    @property
    def base(self) -> Checkpoint:
        return self.checkpoints[0]

    @property
    def runs(self) -> tuple[str, ...]:
        """Run names in order of appearance."""
        return tuple(dict.fromkeys(c.run for c in self.checkpoints if c.run is not None))

    def last(self, run: str) -> Checkpoint:
        """The last step of a run."""
        steps = [checkpoint for checkpoint in self.checkpoints if checkpoint.run == run]
        refuse(self.name, (not steps, f"no run {run!r}; there are {', '.join(self.runs)}", None))
        return max(steps, key=lambda checkpoint: checkpoint.step)

    def final(self) -> CheckpointSeries:
        """The base and the last step of every run."""
        return replace(self, checkpoints=(self.base, *(self.last(run) for run in self.runs)))

    def select(self, ids: str | Sequence[str]) -> CheckpointSeries:
        """The base and the named checkpoints, in the order of the series."""
        ids = several(ids)
        for id in ids:
            self[id]
        return replace(self, checkpoints=tuple(c for c in self.checkpoints if c.is_base or c.id in ids))

    def save(self, folder: str | Path) -> Path:
        """Write series.json into the folder; paths below the folder are written relative to it.

        Raises:
            TsaeError: where weights have noise, which no file holds.
        """
        folder = as_path(folder)
        records = []
        for checkpoint in self.checkpoints:
            what = f"{checkpoint.id} has noise in its weights, which series.json cannot name"
            refuse(folder, (checkpoint.noise is not None, what, None))
            record = {name: getattr(checkpoint, name) for name in _FIELDS}
            record = {k: v for k, v in record.items() if v is not None or k in ("run", "trained_on")}
            path = Path(checkpoint.path)
            if path.is_absolute() and path.is_relative_to(folder.resolve()):
                record["path"] = path.relative_to(folder.resolve()).as_posix()
            records.append(record)
        return write_json(folder / "series.json", {"name": self.name, "checkpoints": records})

    @classmethod
    def load(cls, *sources: str | Path, without: Collection[Path] = ()) -> CheckpointSeries:
        """Read a series from its folder, or put one together.

        Args:
            sources: a folder with series.json; or trainers' folders, single checkpoints, adapters and Hugging Face
                ids (``org/model@revision/subfolder``), see `tsae.checkpoints.series`. The first of several is the
                base. Otherwise the base is the model that adapters name, or ``checkpoint-0``, or the earliest
                checkpoint, and `notes` says so.
            without: folders of checkpoints that are left out, resolved, besides those that are not complete.

        Raises:
            TsaeError: where nothing is found, a path leaves its folder, an adapter is of another base, or there is
                not exactly one base.
        """
        for source in sources:
            with reading(str(source)[:200], "Check the path."):  # it may be too long for one
                file = as_path(source) / "series.json"
                there = file.is_file()
            if there and len(sources) == 1:
                return cls._from_json(file, without)
            what = "holds a series.json, which names its own base and checkpoints"
            refuse(source, (there, what, "Give that folder alone, or its checkpoints one by one."))
        checkpoints, notes = _find([os.fspath(source) for source in sources], without)
        return cls(tuple(checkpoints), as_path(sources[-1]).resolve().name, notes)._checked()

    def _checked(self) -> CheckpointSeries:
        """Itself, with notes on its weights, if every adapter on this machine is one of the base."""
        for checkpoint in self:
            if not checkpoint.is_base and is_adapter(Path(checkpoint.path)):
                base_of(checkpoint)
        folders = {c.id: Path(c.path) / (c.subfolder or "") for c in self}
        kinds, notes = {id: quantisation(folder) for id, folder in folders.items()}, list(self.notes)
        if named := [f"{id} ({kind})" for id, kind in kinds.items() if kind]:
            note = f"quantised weights: {', '.join(named)}. What is read is what the quantised model computes"
            if len(set(kinds.values())) > 1:
                note += "; others of the series are not quantised so, and differences to them hold the rounding too"
            notes.append(f"{note}.")
        sizes = {id: vocabulary_size(folder) for id, folder in folders.items()}
        n = sizes[self.base.id]
        if n and (other := [f"{id} ({size})" for id, size in sizes.items() if size not in (None, n)]):
            note = f"the embeddings of {', '.join(other)} are not as many as those of the base ({n})"
            notes.append(f"{note}: weights are compared for the tokens that both have.")
        for id, folder in folders.items():
            heads, files = beside_the_model(folder)
            if heads:
                notes.append(
                    f"{id}: {heads[0]} and {len(heads) - 1} more weights are not part of its text model: left out."
                )
            if files:
                notes.append(f"{id}: beside the weights that are read lie others, which are not: {', '.join(files)}.")
        return replace(self, notes=tuple(notes))

    @classmethod
    def _from_json(cls, file: Path, without: Collection[Path]) -> CheckpointSeries:
        checkpoints = []
        try:
            content: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
            for record in content["checkpoints"]:
                checkpoint = Checkpoint(**{k: v for k, v in record.items() if k in _FIELDS})
                local = (file.parent / checkpoint.path).resolve()
                local.is_dir()  # raises where no folder can have that name
                if not Path(checkpoint.path).is_absolute():
                    if not local.is_relative_to(file.parent.resolve()):
                        raise ValueError(f"the path {checkpoint.path!r} leaves the folder")
                    # A relative path that is not there may still be a Hugging Face id ("org/model").
                    if (file.parent / checkpoint.path.partition("/")[0]).exists() or not is_hub_id(checkpoint.path):
                        checkpoint = replace(checkpoint, path=str(local))
                if Path(checkpoint.path) not in without:
                    checkpoints.append(checkpoint)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TsaeError) as error:
            what = f"is not a series ({type(error).__name__}: {str(error)[:200]})"
            fix = (
                'Expected {"checkpoints": [{"id", "path", "run", "step", "trained_on"}, …]}, with paths below the file.'
            )
            raise TsaeError(what, where=file, fix=fix) from error
        return cls(checkpoints=tuple(checkpoints), name=str(content.get("name", file.parent.name)))._checked()


def folders_of_run(series: CheckpointSeries, run: Path) -> list[Path]:
    """Folders in which more of a run lies: those of its checkpoints, those around them, and the run's own."""
    run, paths = run.resolve(), [Path(c.path) for c in series if Path(c.path).is_dir()]
    inner = (place for path in paths for place in (path, path / "huggingface", path / "lora_adapters", *path.parents))
    return list(dict.fromkeys([*(place for place in inner if place.is_relative_to(run)), run]))


def named_bases(series: CheckpointSeries, run: Path) -> Iterator[tuple[str, Path]]:
    """Models that configurations and then model cards name as the base, and which file names each."""
    folders = folders_of_run(series, run)
    for folder in folders:
        name = config_of(folder).get("_name_or_path")
        if name and isinstance(name, str):
            yield name, folder / "config.json"
    for folder in folders:  # prime-rl writes adapters into a folder of the model that they are merged into
        if (file := folder / ADAPTER_CONFIG).is_file():
            yield str(read_object(file, "Save the adapter again.").get("base_model_name_or_path") or ""), file
    for folder in folders:
        if name := base_on_card(folder):
            yield name, folder / "README.md"


def base_on_card(folder: Path) -> str | None:
    """The base that the head of a model card, a README.md, names; None where it names none or several."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    with card.open(encoding="utf-8", errors="replace") as stream:
        head = stream.read(_LONGEST_CARD).partition("\n---")[0]
    with suppress(YAMLError):
        content = parse_yaml(head.removeprefix("---"))
        found = content.get("base_model") if isinstance(content, dict) else None
        names = found if isinstance(found, list) else [found]
        return names[0] if len(names) == 1 and isinstance(names[0], str) else None
    return None


# A revision holds no slash, except for the pull requests of a repository.
_HUB = re.compile(r"(?P<path>[^/@]+/[^/@]+)(@(?P<revision>refs/pr/\d+|[^/]+))?(/(?P<subfolder>.+))?")


def _find(sources: Sequence[str], without: Collection[Path]) -> tuple[list[Checkpoint], tuple[str, ...]]:
    """The checkpoints that the sources name, one of which is the base; and what was assumed.

    The base is the first of several sources, if that is one whole model and not a step of the others' run; or a model
    alone, unless it is a step. Otherwise it is the model that adapters name, then the earliest checkpoint; then a note
    says so.
    """
    notes: list[str] = []
    parts = [_expand(source, notes, without) for source in sources]
    found = [checkpoint for part in parts for checkpoint in part]
    what = "no checkpoint is complete" if sources else "no checkpoints given"
    refuse(", ".join(sources) or "CheckpointSeries.load", (not found, what, "Give a folder of checkpoints."))
    # On the hub, only loading tells what is an adapter.
    adapters = [checkpoint for checkpoint in found if is_adapter(Path(checkpoint.path))]
    same_run = any(_place(c).run == _place(found[0]).run for c in found[1:])
    own_run = found[0].step > 0 and (same_run or len(found) == 1)
    if len(parts[0]) == 1 and found[0] not in adapters and (len(parts) > 1 or len(found) == 1) and not own_run:
        return [replace(found[0], id="base", run=None, step=0), *_with_ids(found[1:])], tuple(notes)
    found = _with_ids(found)
    if adapters:
        return [base_of(adapters[0]), *found], tuple(notes)
    first = min(found, key=lambda checkpoint: checkpoint.step)
    found.remove(first)
    if first.step > 0:
        notes.append(
            f"{first.id} (step {first.step}) stands in for the base: the folder does not hold one. "
            "To compare with the model that training started from, give it first, before the folder."
        )
    return [replace(first, run=None, trained_on=None), *found], tuple(notes)


def _expand(source: str, notes: list[str], without: Collection[Path]) -> list[Checkpoint]:
    """Checkpoints of one source, with run and step; ids come later."""
    path = as_path(source)
    folders = layouts.step_folders(path) if path.is_dir() else []
    is_model = any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if folders:
        complete, partial = _complete_and_not(folders, without)
        some = [f"{os.path.relpath(folder, path.resolve())} ({why})" for folder, why in partial.items()]
        left_out = "".join(f", {one}" for one in [*some[:3], *["…"] * (len(some) > 3)]).removeprefix(", ")
        above = [run for run in dict.fromkeys(folder.run for folder in folders) if layouts.has_weights(run)]
        if above and not complete:
            why = left_out or f"their weights are {folders[-1].shards or 'being written'}"
            where = ", ".join(map(str, above))
            notes.append(f"the series is the model in {where} itself, as none of its checkpoints can be read: {why}.")
            return [_unnamed(run) for run in above]
        layouts.refuse_shards(path, folders)
        fix = (
            "Wait, if one is being written. Else export one in Hugging Face's format, as safetensors (shards of "
            "Megatron: python -m verl.model_merger merge --backend megatron, or the trainer's own script)."
        )
        refuse(path, (not complete, f"no checkpoint is complete: {left_out or 'all are being written'}", fix))
        if left_out:
            notes.append(f"left out, as not complete: {left_out}.")
        if is_model:
            notes.append(f"the model in {path} itself is left out: its checkpoints are the series.")
        for run in dict.fromkeys(folder.run for folder in folders):
            if run.is_dir() and (others := layouts.named_otherwise(run)):
                shown = f"{', '.join(others[:3])}{', …' * (len(others) > 3)}"
                notes.append(f"left out, as the steps of {run.name} are counted by other folders: {shown}.")
        if shards := [folder for folder in folders if folder.shards]:
            steps = ", ".join(str(folder.step) for folder in shards)
            notes.append(f"left out, as their weights are {shards[0].shards}: steps {steps} of {shards[0].run.name}.")
        return [_unnamed(folder) for folder in complete]
    if is_model or is_gguf(path):
        return [_unnamed(path.resolve())]
    hub = _HUB.fullmatch(source)
    if not path.is_dir() and hub is not None and is_hub_id(hub["path"]):
        if not layouts.several_revisions(hub["revision"]):
            return [_unnamed(hub["path"], hub["revision"], hub["subfolder"])]
        names = layouts.revisions_of(hub["path"], hub["revision"])
        return [replace(_unnamed(hub["path"], name, hub["subfolder"]), step=step) for step, name in names]
    what = "no series.json and no checkpoints" if path.is_dir() else "no such folder"
    raise TsaeError(what, where=source, fix="Give the trainer's output_dir, one checkpoint, or write a series.json.")


def step_folders(path: Path) -> list[Path]:
    """Where the checkpoints of a trainer's folder lie, or of the runs in it; resolved, by run and step."""
    return [folder.model for folder in layouts.step_folders(path) if folder.shards is None]


def complete_checkpoints(run: Path) -> list[Path]:
    """Folders of the checkpoints in a run's folder that can be read."""
    return _complete_and_not(layouts.step_folders(run) if run.is_dir() else [], ())[0]


def _complete_and_not(
    folders: Sequence[layouts.StepFolder], without: Collection[Path]
) -> tuple[list[Path], dict[Path, str]]:
    models = [folder.model for folder in folders if folder.shards is None and folder.model not in without]
    partial = unfinished(models, state=False)
    return [model for model in models if model not in partial], partial


def _unnamed(path: str | Path, revision: str | None = None, subfolder: str | None = None) -> Checkpoint:
    found = Checkpoint("unnamed", str(path), run="unnamed", revision=revision, subfolder=subfolder)
    return replace(found, step=_place(found).step or 0)


def _with_ids(found: list[Checkpoint]) -> list[Checkpoint]:
    """Name runs after their folders, and checkpoints after run and step."""
    places = [_place(checkpoint).run for checkpoint in found]
    # The last part of every place, with as many parts before it as tell the places apart.
    depth = dict.fromkeys(places, 1)
    while True:
        names = {place: _safe("-".join(place[-n:])) for place, n in depth.items()}
        taken = ["base", *names.values()]
        unclear = [place for place, name in names.items() if taken.count(name) > 1 and depth[place] < len(place)]
        if not unclear:
            break
        depth.update({place: depth[place] + 1 for place in unclear})
    named = []
    for checkpoint, place in zip(found, places, strict=True):
        run = names[place]
        id = run if _place(checkpoint).step is None else f"{run}-{checkpoint.step:05d}"
        named.append(replace(checkpoint, id=id, run=run, trained_on=run))
    return named


class _Place(NamedTuple):
    run: tuple[str, ...]
    """Where the run of a checkpoint lies, from the outside in."""
    step: int | None
    """As its folder's name, or that of a revision, has it."""


def _place(checkpoint: Checkpoint) -> _Place:
    path = Path(checkpoint.path).with_suffix("") if is_gguf(checkpoint.path) else Path(checkpoint.path)
    path = path / (checkpoint.revision or "").replace("/", "-") / (checkpoint.subfolder or "")
    found = layouts.step_of(path)
    step, run = found or (None, path)
    if checkpoint.revision and run.name not in path.parts:  # the name before a revision's step is not a run's
        run = run.parent
    if found is None and checkpoint.revision and checkpoint.step:  # which the revision alone does not say
        step, run = checkpoint.step, Path(checkpoint.path) / (checkpoint.subfolder or "")
    return _Place(run.parts[1:] if run.is_absolute() else run.parts, step)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+-]", "-", name).lstrip("._@+-") or "run"
