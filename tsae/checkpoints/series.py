"""Checkpoint: one set of weights and where it came from. CheckpointSeries: an ordered set with exactly one base.

A series is a folder with a ``series.json``::

    {"name": "arithmetic",
     "checkpoints": [
       {"id": "base", "path": "base", "run": null, "step": 0, "trained_on": null},
       {"id": "easy-050", "path": "easy-050", "run": "easy", "step": 50, "trained_on": "easy"}]}

or what a Hugging Face or TRL trainer leaves: a folder of ``checkpoint-N`` folders (one run), or a folder of such
folders (several runs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights."""

    id: str
    """Unique in its series; names folders, so letters, digits and . _ @ + - only."""
    path: str
    """A local Hugging Face directory, a .gguf file, or a Hugging Face id."""
    run: str | None = None
    """The training run it comes from; None for the base."""
    step: int = 0
    """Optimizer steps of that run."""
    trained_on: str | None = None
    """What the run was trained on: a band, a mixture; None for the base."""
    revision: str | None = None
    """Branch, tag or commit, where path is a Hugging Face id."""
    subfolder: str | None = None
    """Folder inside the Hugging Face repository."""

    def __post_init__(self) -> None:
        if not _SAFE_ID.fullmatch(self.id):
            raise TsaeError(
                f"checkpoint id {self.id!r} cannot name a folder",
                where=self.path,
                fix="Use letters, digits and . _ @ + -, starting with a letter or digit.",
            )
        if not isinstance(self.step, int):
            raise TypeError(f"step {self.step!r} is not a whole number")

    @property
    def is_base(self) -> bool:
        return self.run is None

    def load_model(self, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa") -> PreTrainedModel:
        """The Hugging Face causal LM in evaluation mode without gradients; see `tsae.checkpoints.loading`."""
        from tsae.checkpoints.loading import load_model

        return load_model(self, device=device, dtype=dtype, attention=attention)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, checked to encode text to something."""
        from tsae.checkpoints.loading import load_tokenizer

        return load_tokenizer(self)

    def tokens_with(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text contains a text; special tokens aside.

        Raises:
            TsaeError: where there is none.
        """
        from tsae.checkpoints.loading import token_strings

        tokenizer = self.load_tokenizer()
        special = set(tokenizer.all_special_ids)
        found = tuple(i for i, s in enumerate(token_strings(tokenizer)) if text and text in s and i not in special)
        if not found:
            raise TsaeError(
                f"its tokenizer has no token whose text contains {text!r}",
                where=self.path,
                fix="Give another text (--step-text).",
            )
        return found


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
        if twice:
            raise TsaeError(f"checkpoint ids come twice: {', '.join(twice)}", where=self.name, fix="Make ids unique.")
        bases = [checkpoint.id for checkpoint in self.checkpoints if checkpoint.is_base]
        if len(bases) != 1:
            raise TsaeError(
                f"found {len(bases)} base checkpoints ({', '.join(bases) or 'none'}), expected exactly one",
                where=self.name,
                fix="Give exactly one checkpoint with run null.",
            )
        # Stores and tables name their readers in this order, the base first.
        ordered = sorted(self.checkpoints, key=lambda checkpoint: not checkpoint.is_base)
        object.__setattr__(self, "checkpoints", tuple(ordered))

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __getitem__(self, id: str) -> Checkpoint:
        for checkpoint in self.checkpoints:
            if checkpoint.id == id:
                return checkpoint
        raise TsaeError(
            f"no checkpoint {id!r}; there are {', '.join(c.id for c in self.checkpoints)}",
            where=self.name,
            fix="Use one of these ids.",
        )

    @property
    def base(self) -> Checkpoint:
        return next(checkpoint for checkpoint in self.checkpoints if checkpoint.is_base)

    @property
    def runs(self) -> tuple[str, ...]:
        """Run names in order of appearance."""
        return tuple(dict.fromkeys(c.run for c in self.checkpoints if c.run is not None))

    def last(self, run: str) -> Checkpoint:
        """The last step of a run."""
        steps = [checkpoint for checkpoint in self.checkpoints if checkpoint.run == run]
        if not steps:
            raise TsaeError(f"no run {run!r}; there are {', '.join(self.runs)}", where=self.name)
        return max(steps, key=lambda checkpoint: checkpoint.step)

    def final(self) -> CheckpointSeries:
        """The base and the last step of every run."""
        return replace(self, checkpoints=(self.base, *(self.last(run) for run in self.runs)))

    def select(self, ids: Sequence[str]) -> CheckpointSeries:
        """The base and the named checkpoints, in the order of the series."""
        for id in ids:
            self[id]
        return replace(self, checkpoints=tuple(c for c in self.checkpoints if c.is_base or c.id in ids))

    def save(self, folder: str | Path) -> Path:
        """Write series.json into the folder; paths below the folder are written relative to it."""
        folder = Path(folder)
        records = []
        for checkpoint in self.checkpoints:
            record = {k: v for k, v in asdict(checkpoint).items() if v is not None or k in ("run", "trained_on")}
            path = Path(checkpoint.path)
            if path.is_absolute() and path.is_relative_to(folder.resolve()):
                record["path"] = path.relative_to(folder.resolve()).as_posix()
            records.append(record)
        target = folder / "series.json"
        target.write_text(json.dumps({"name": self.name, "checkpoints": records}, indent=2) + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, folder: str | Path, *, base: str | Path | None = None) -> CheckpointSeries:
        """Read a series from its folder.

        Args:
            folder: holds series.json, ``checkpoint-N`` folders, or one folder of ``checkpoint-N`` folders a run.
                A single checkpoint directory is a series of its base alone.
            base: path or Hugging Face id of the base, where the folder does not say. Without it, and without
                ``checkpoint-0``, the earliest checkpoint is the base and `notes` says so.

        Raises:
            TsaeError: where nothing is found, a path leaves the folder, or there is not exactly one base.
        """
        folder = Path(folder)
        if (folder / "series.json").is_file():
            return cls._from_json(folder / "series.json")
        if (folder / "config.json").is_file() or folder.suffix == ".gguf":
            return cls(checkpoints=(Checkpoint(id="base", path=str(folder)),), name=folder.name)
        if not folder.is_dir():
            raise TsaeError("no such folder", where=folder, fix="Give a folder of checkpoints.")
        return cls._from_trainer(folder, None if base is None else str(base))

    @classmethod
    def _from_json(cls, file: Path) -> CheckpointSeries:
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            records = content["checkpoints"]
            checkpoints = []
            fields = set(Checkpoint.__dataclass_fields__)
            for record in records:
                checkpoint = Checkpoint(**{k: v for k, v in record.items() if k in fields})
                local = (file.parent / checkpoint.path).resolve()
                if not Path(checkpoint.path).is_absolute():
                    if not local.is_relative_to(file.parent.resolve()):
                        raise TsaeError(
                            f"the path {checkpoint.path!r} leaves the folder",
                            where=file,
                            fix="Keep checkpoints below series.json, or give an absolute path.",
                        )
                    # A relative path that is not there may still be a Hugging Face id ("org/model").
                    if local.exists() or checkpoint.path.count("/") != 1:
                        checkpoint = replace(checkpoint, path=str(local))
                checkpoints.append(checkpoint)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise TsaeError(
                f"not a series ({type(error).__name__}: {error})",
                where=file,
                fix='Expected {"checkpoints": [{"id", "path", "run", "step", "trained_on"}, …]}.',
            ) from error
        return cls(checkpoints=tuple(checkpoints), name=str(content.get("name", file.parent.name)))

    @classmethod
    def _from_trainer(cls, folder: Path, base: str | None) -> CheckpointSeries:
        runs = {folder.name: folder} if _trainer_steps(folder) else {}
        runs |= {sub.name: sub for sub in sorted(folder.iterdir()) if sub.is_dir() and _trainer_steps(sub)}
        if not runs:
            raise TsaeError(
                "no series.json and no checkpoint-N folders",
                where=folder,
                fix="Give the trainer's output_dir, or write a series.json.",
            )
        found = [
            Checkpoint(id=f"{run}-{step:05d}", path=str(path.resolve()), run=run, step=step, trained_on=run)
            for run, sub in runs.items()
            for step, path in _trainer_steps(sub)
        ]
        notes: tuple[str, ...] = ()
        if base is not None:
            first = Checkpoint(id="base", path=base)
        else:
            first = min(found, key=lambda checkpoint: checkpoint.step)
            found.remove(first)
            if first.step > 0:
                notes = (
                    f"{first.id} (step {first.step}) stands in for the base: the folder does not hold one. "
                    "Name the model that training started from to compare with it.",
                )
            first = replace(first, run=None, trained_on=None)
        return cls(checkpoints=(first, *found), name=folder.name, notes=notes)


def _trainer_steps(folder: Path) -> list[tuple[int, Path]]:
    matches = ((_TRAINER_FOLDER.fullmatch(sub.name), sub) for sub in folder.iterdir() if sub.is_dir())
    return sorted((int(match[1]), sub) for match, sub in matches if match)
