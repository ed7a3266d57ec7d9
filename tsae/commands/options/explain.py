"""Options of `tsae explain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from tsae.diff.config import ExplainConfig
from tsae.rollouts.config import EndpointConfig


@dataclass(frozen=True)
class Explain:
    """Label features by what they respond to, and test every label on contexts that it was not made from.

    A model behind a server with chat completions names them: --server.url http://localhost:8000/v1 --server.model NAME.
    Without a server, rules of tokens and positions do. Labels that hold too seldom are not shown. Answers are kept, so
    that the same command resumes.
    """

    run: Positional[Path]
    """Folder that `tsae run` or `tsae demo` wrote, or one that `tsae diff` wrote."""
    to: Path | None = None
    """Folder for the labels and the server's answers; by default explanations, beside the diff, where `tsae report`
    finds it."""
    features: Path | None = None
    """Folder that `tsae encode` wrote; by default features, beside the diff."""
    server: EndpointConfig = field(default_factory=EndpointConfig)
    json: Path | None = None
    """File for the results as JSON; - for standard output. Text then goes to standard error."""
    config: OmitArgPrefixes[ExplainConfig] = field(default_factory=ExplainConfig)

    def __post_init__(self) -> None:
        if self.to is None:
            object.__setattr__(self, "to", self.diff.parent / "explanations")

    @property
    def diff(self) -> Path:
        """The folder of the diff."""
        return self.run / "diff" if (self.run / "diff").is_dir() else self.run
