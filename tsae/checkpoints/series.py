"""Checkpoint: one set of weights and where it came from. CheckpointSeries: an ordered set with exactly one base.

A series is a folder with a ``series.json``::

    {"name": "arithmetic",
     "checkpoints": [
       {"id": "base", "path": "base", "run": null, "step": 0, "trained_on": null},
       {"id": "easy-050", "path": "easy-050", "run": "easy", "step": 50, "trained_on": "easy"}]}

or is put together from what trainers leave, from paths and from Hugging Face ids (`tsae.checkpoints.finding`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.base.filters import several
from tsae.base.views import views
from tsae.checkpoints.files import is_hub_id
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tsae.checkpoints.noise import Noise

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights."""

    id: str
    """Unique in its series; names folders, so letters, digits and . _ @ + - only."""
    path: str
    """A local Hugging Face directory, the directory of a PEFT adapter, a .gguf file, or a Hugging Face id."""
    run: str | None = None
    """The training run it comes from; None for the base."""
    step: int = 0
    """Optimizer steps of that run."""
    trained_on: str | None = None
    """What the run was trained on: a band, a mixture; None for the base."""
    revision: str | None = None
    """Branch, tag or commit, where path is a Hugging Face id."""
    subfolder: str | None = None
    """Folder inside path."""
    noise: Noise | None = field(default=None, repr=False)
    """Added to the weights that lie at the path; see `tsae.checkpoints.noise`. It is in no file of a series."""
    base: Checkpoint | None = field(default=None, compare=False, repr=False)
    """The base of the series that it is in, which an adapter is put on; the series sets it."""

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
        """The Hugging Face causal LM in evaluation mode without gradients; see `tsae.checkpoints.loading`.

        For several checkpoints one after another, a `ModelLoader` loads the base of adapters only once.
        """
        from tsae.checkpoints.loading import ModelLoader

        return ModelLoader(device=device, dtype=dtype, attention=attention).load(self)

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
        base = replace(ordered[0], base=None)
        object.__setattr__(self, "checkpoints", (base, *(replace(c, base=base) for c in ordered[1:])))

    def _repr_html_(self) -> str:
        import pandas as pd

        kept = ["id", "run", "step", "trained_on", "path", "revision", "subfolder"]
        table = pd.DataFrame([asdict(c) for c in self])[kept].dropna(axis=1, how="all")
        return views().card(
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
        folder = Path(folder)
        noisy = [checkpoint.id for checkpoint in self.checkpoints if checkpoint.noise is not None]
        if noisy:
            raise TsaeError(f"{noisy[0]} has noise in its weights, which series.json cannot name", where=folder)
        records = []
        for checkpoint in self.checkpoints:
            record = asdict(replace(checkpoint, base=None))
            record = {k: v for k, v in record.items() if v is not None or k in ("run", "trained_on")}
            path = Path(checkpoint.path)
            if path.is_absolute() and path.is_relative_to(folder.resolve()):
                record["path"] = path.relative_to(folder.resolve()).as_posix()
            records.append(record)
        target = folder / "series.json"
        target.write_text(json.dumps({"name": self.name, "checkpoints": records}, indent=2) + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, *sources: str | Path) -> CheckpointSeries:
        """Read a series from its folder, or put one together.

        Args:
            sources: a folder with series.json; or trainers' folders, single checkpoints, adapters and Hugging Face
                ids (``org/model@revision/subfolder``), see `tsae.checkpoints.finding`. The first of several is the
                base. Without it, the base is the model that adapters name, or ``checkpoint-0``, or the earliest
                checkpoint, and then `notes` says so.

        Raises:
            TsaeError: where nothing is found, a path leaves its folder, an adapter is of another base, or there is
                not exactly one base.
        """
        from tsae.checkpoints.finding import find

        if not sources:
            raise TsaeError("no checkpoints given", where="CheckpointSeries.load", fix="Give a folder of checkpoints.")
        for source in sources:
            if (Path(source) / "series.json").is_file():
                if len(sources) > 1:
                    raise TsaeError(
                        "holds a series.json, which names its own base and checkpoints",
                        where=source,
                        fix="Give that folder alone, or its checkpoints one by one.",
                    )
                return cls._from_json(Path(source) / "series.json")
        found = find([str(source) for source in sources])
        name = Path(sources[-1]).expanduser().resolve().name
        return cls(checkpoints=tuple(found.checkpoints), name=name, notes=found.notes)._checked()

    def _checked(self) -> CheckpointSeries:
        """Itself, where every adapter on this machine is one of the base."""
        from tsae.checkpoints.adapters import base_of
        from tsae.checkpoints.files import is_adapter, is_gguf

        for checkpoint in self:
            folder = Path(checkpoint.path)
            if not checkpoint.is_base and folder.is_dir() and not is_gguf(folder) and is_adapter(folder):
                base_of(checkpoint)
        return self

    @classmethod
    def _from_json(cls, file: Path) -> CheckpointSeries:
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            records = content["checkpoints"]
            checkpoints = []
            fields = set(Checkpoint.__dataclass_fields__) - {"base", "noise"}
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
                    if (file.parent / checkpoint.path.partition("/")[0]).exists() or not is_hub_id(checkpoint.path):
                        checkpoint = replace(checkpoint, path=str(local))
                checkpoints.append(checkpoint)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise TsaeError(
                f"not a series ({type(error).__name__}: {error})",
                where=file,
                fix='Expected {"checkpoints": [{"id", "path", "run", "step", "trained_on"}, …]}.',
            ) from error
        return cls(checkpoints=tuple(checkpoints), name=str(content.get("name", file.parent.name)))._checked()
