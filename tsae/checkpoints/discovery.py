"""Find checkpoints: trainers' folders, single models, and Hugging Face repositories.

A source is one of

- a trainer's folder of ``checkpoint-N`` folders (one run), or a folder of such folders (several runs);
- one model: a folder, a PEFT adapter's folder, or a .gguf file;
- a Hugging Face id, with a revision and a subfolder if wanted: ``org/model@revision/subfolder``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tsae.base.files import as_path
from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.weight_files import is_adapter, is_gguf, is_hub_id
from tsae.errors import TsaeError

_TRAINER_FOLDER = re.compile(r"checkpoint-(\d{1,18})")
_STEP = re.compile(r"(?:checkpoint|global_step|step)[-_]?(\d{1,18})")
# A revision holds no slash, except for the pull requests of a repository.
_HUB = re.compile(r"(?P<path>[^/@]+/[^/@]+)(@(?P<revision>refs/pr/\d+|[^/]+))?(/(?P<subfolder>.+))?")


class Found(NamedTuple):
    """The checkpoints of some sources, the base among them."""

    checkpoints: list[Checkpoint]
    notes: tuple[str, ...]
    """What was assumed."""


def find(sources: Sequence[str], without: Collection[Path] = ()) -> Found:
    """Find the checkpoints that the sources name, and decide which of them is the base.

    The base is the first of several sources, if that is one whole model. Otherwise it is the model that adapters name,
    then the earliest checkpoint; then a note says so.

    Args:
        sources: folders and Hugging Face ids.
        without: checkpoint-N folders that are left out, resolved.

    Raises:
        TsaeError: where a source is nothing of the kind.
    """
    notes: list[str] = []
    parts = [_expand(source, notes, without) for source in sources]
    found = [checkpoint for part in parts for checkpoint in part]
    if not found:
        raise TsaeError("no checkpoint is complete", where=", ".join(sources), fix="Wait until one has been written.")
    # On the hub, only loading tells what is an adapter.
    adapters = [checkpoint for checkpoint in found if is_adapter(Path(checkpoint.path))]
    if len(parts[0]) == 1 and found[0] not in adapters and (len(parts) > 1 or len(found) == 1):
        return Found([replace(found[0], id="base", run=None, step=0), *_with_ids(found[1:])], tuple(notes))
    found = _with_ids(found)
    if adapters:
        return Found([base_of(adapters[0]), *found], tuple(notes))
    first = min(found, key=lambda checkpoint: checkpoint.step)
    found.remove(first)
    if first.step > 0:
        notes.append(
            f"{first.id} (step {first.step}) stands in for the base: the folder does not hold one. "
            "To compare with the model that training started from, give it first, before the folder."
        )
    return Found([replace(first, run=None, trained_on=None), *found], tuple(notes))


def _expand(source: str, notes: list[str], without: Collection[Path]) -> list[Checkpoint]:
    """Checkpoints of one source, with run and step; ids come later."""
    path = as_path(source)
    if is_gguf(path):
        return [_unnamed(path.resolve())]
    if path.is_dir():
        folders = step_folders(path)
        is_model = (path / "config.json").is_file() or (path / "adapter_config.json").is_file()
        if folders:
            if is_model:
                notes.append(f"the model in {path} itself is left out: its checkpoint-N folders are the series.")
            return [_unnamed(folder) for folder in folders if folder not in without]
        if is_model:
            return [_unnamed(path.resolve())]
        what = "no series.json and no checkpoint-N folders"
        raise TsaeError(what, where=path, fix="Give the trainer's output_dir, one checkpoint, or write a series.json.")
    hub = _HUB.fullmatch(source)
    if hub is not None and is_hub_id(hub["path"]):
        return [_unnamed(hub["path"], hub["revision"], hub["subfolder"])]
    raise TsaeError("no such folder", where=source, fix="Give a folder of checkpoints.")


def step_folders(path: Path) -> list[Path]:
    """The checkpoint-N folders of a trainer's folder, or of the runs in it; resolved, by run and N."""
    runs = [sub for sub in (path, *sorted(path.iterdir())) if sub.is_dir()]
    return [step.resolve() for run in runs for step in _steps(run)]


def _steps(run: Path) -> list[Path]:
    """The checkpoint-N folders of a run, by N."""
    matches = ((_TRAINER_FOLDER.fullmatch(sub.name), sub) for sub in run.iterdir() if sub.is_dir())
    return [sub for _, sub in sorted((int(match[1]), sub) for match, sub in matches if match)]


def _unnamed(path: str | Path, revision: str | None = None, subfolder: str | None = None) -> Checkpoint:
    found = Checkpoint("unnamed", str(path), run="unnamed", revision=revision, subfolder=subfolder)
    match = _STEP.fullmatch(_last_part(found))
    return replace(found, step=int(match[1])) if match else found


def _with_ids(found: list[Checkpoint]) -> list[Checkpoint]:
    """Name runs after their folders, and checkpoints after run and step."""
    names = _names([_place(checkpoint) for checkpoint in found])
    named = []
    for checkpoint in found:
        run = names[_place(checkpoint)]
        id = f"{run}-{checkpoint.step:05d}" if _is_step(checkpoint) else run
        named.append(replace(checkpoint, id=id, run=run, trained_on=run))
    return named


def _names(places: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The last part of every place, with as many parts before it as tell the places apart."""
    depth = dict.fromkeys(places, 1)
    while True:
        names = {place: _safe("-".join(place[-n:])) for place, n in depth.items()}
        taken = ["base", *names.values()]
        unclear = [place for place, name in names.items() if taken.count(name) > 1 and depth[place] < len(place)]
        if not unclear:
            return names
        depth.update({place: depth[place] + 1 for place in unclear})


def _place(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Where the run of a checkpoint lies, from the outside in."""
    if is_hub_id(checkpoint.path):
        below = [part for part in (checkpoint.revision, *(checkpoint.subfolder or "").split("/")) if part]
        return (*checkpoint.path.split("/"), *(below[:-1] if _is_step(checkpoint) else below))
    path = Path(checkpoint.path).with_suffix("") if is_gguf(checkpoint.path) else Path(checkpoint.path)
    return (path.parent if _is_step(checkpoint) else path).parts[1:]


def _is_step(checkpoint: Checkpoint) -> bool:
    return _STEP.fullmatch(_last_part(checkpoint)) is not None


def _last_part(checkpoint: Checkpoint) -> str:
    return (checkpoint.subfolder or checkpoint.revision or checkpoint.path).rpartition("/")[2]


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+-]", "-", name).lstrip("._@+-") or "run"
