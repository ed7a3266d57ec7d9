"""What a checkpoint is: where its weights lie, and which step of which run they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tsae.base.files import as_path
from tsae.checkpoints.noise import Noise
from tsae.errors import TsaeError

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")


@dataclass(frozen=True)
class CheckpointRecord:
    """The fields of a `tsae.Checkpoint`, which adds loading."""

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
    """Added to the weights after loading; see `tsae.checkpoints.noise`. No file of a series holds it."""
    base: CheckpointRecord | None = field(default=None, compare=False, repr=False)
    """The base of its series, which an adapter is put on. The series sets it."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or self.path.startswith(("~", "file:/")):
            object.__setattr__(self, "path", str(as_path(self.path)))
        if not _SAFE_ID.fullmatch(self.id):
            raise TsaeError(
                f"checkpoint id {self.id!r} cannot name a folder",
                where=self.path,
                fix="Use letters, digits and . _ @ + -, starting with a letter or digit.",
            )
        if not isinstance(self.step, int) or abs(self.step) >= 1 << 63:
            raise TypeError(f"step {str(self.step)[:60]!r} is not a whole number of 64 bits")
        for name in ("run", "trained_on", "revision", "subfolder"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} {str(getattr(self, name))[:60]!r} is no text")

    @property
    def is_base(self) -> bool:
        return self.run is None
