"""Options of `tsae push`. Imports nothing heavy: the command line builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PushConfig:
    """What goes to the Hub, and what its cards say."""

    licence: str | None = None
    """The Hub's name of a licence, such as apache-2.0, mit or cc-by-4.0; "other" or "unknown" are names too."""
    base_model: str | None = None
    """The Hub's name of the model whose activations were read; by default the base of the run, if it came from the
    Hub."""
    dataset: bool = False
    """Also push features and diff of a run, as the data set NAME-features. They hold prompts and responses."""
    space: bool = False
    """Also push the page of a run, as the static Space NAME-report. It holds prompts and responses."""
    evaluation: Path | None = None
    """File that `tsae evaluate --json` wrote, for the SAE's metrics; by default that of the run."""
    private: bool = False
    """Make new repositories private."""
