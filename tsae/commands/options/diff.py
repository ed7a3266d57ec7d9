"""Options of the commands that compare and show: diff, reinforcement, explain, report, serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from tsae.diff.config import DiffConfig, ExplainConfig
from tsae.rollouts.config import EndpointConfig


@dataclass(frozen=True)
class Diff:
    """Compare every checkpoint with the base, and successes with failures; print the findings."""

    features: Path
    """Folder that `tsae encode` wrote."""
    to: Path
    """Folder of the diff."""
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer names the tokens; without it tokens are shown by id."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, such as
    tsae.features.mathematics:math_classes."""
    families: bool = False
    """Group features by the FAMILIES of the annotator's module, and test the shifts of the groups."""
    store: Path | None = None
    """The store that was encoded: compares the best features with plain directions and a probe."""
    steps: Path | None = None
    """Features of more steps of the runs, by the same SAE, to follow features along steps; by default --features, where
    a run has two steps there."""
    compare: Path | None = None
    """Folder of another diff by the same SAE: prints which effects both found."""
    insertion: int = 0
    """Number of the clearest discoveries to test, for each checkpoint and for the base's outcome effects: does a
    feature fire when its top tokens are inserted elsewhere? Runs the models: give --series and --sae."""
    series: tuple[str, ...] = ()
    """Folder of checkpoints, or several checkpoints, the base first. With --sae also reads noise as large as each
    update (--noise-draws): what moves where nothing was learned. --insertion needs both."""
    device: str = "cpu"
    """Torch device for --series: cpu, cuda, cuda:1, …"""
    markdown: Path | None = None
    """File to write the clearest total shifts to, as a Markdown table."""
    stability: Path | None = None
    """The SAE's folder, if `tsae evaluate --seeds` ran after `tsae encode`; by default found beside the features."""
    sae: Path | None = None
    """The SAE's folder, for --series. With --tokenizer also shows which next tokens features promote."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)


@dataclass(frozen=True)
class Reinforcement:
    """Find the features that the base's rollouts reinforce, by band and kind of group, and compare with the runs."""

    features: Path
    """Folder that `tsae encode` wrote; its rollouts carry advantages."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote from them: compare predicted with realised shifts."""
    to: Path | None = None
    """Folder for reinforcement.parquet, groups.parquet and, with --diff, predicted.parquet."""
    policy: str | None = None
    """Policy whose rollouts count; by default the base."""
    series: tuple[str, ...] = ()
    """Folder of checkpoints, or several checkpoints, for the vanilla gradient: they read their own responses again. Not
    needed if the rollouts have a column logprob."""
    device: str = "cpu"
    """Torch device for --series: cpu, cuda, cuda:1, …"""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)


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
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[ExplainConfig] = field(default_factory=ExplainConfig)

    def __post_init__(self) -> None:
        if self.to is None:
            object.__setattr__(self, "to", self.diff.parent / "explanations")

    @property
    def diff(self) -> Path:
        """The folder of the diff."""
        return self.run / "diff" if (self.run / "diff").is_dir() else self.run


@dataclass(frozen=True)
class Report:
    """Write a diff as one self-contained HTML file that opens with no network.

    It shows the claims that `tsae claims` has saved beside the diff, too.
    """

    diff: Path
    """Folder that `tsae diff` wrote."""
    to: Path
    """The .html file to write."""
    features: Path | None = None
    """Folder that `tsae encode` wrote, for examples."""
    title: str | None = None
    """Title of the page."""
    causal: tuple[Path, ...] = ()
    """Folders that `tsae causal` wrote, with features of this diff: the report shows what was tested."""
    reinforcement: Path | None = None
    """Folder that `tsae reinforcement --diff` wrote: predicted beside realised shifts."""
    attribution: Path | None = None
    """Folder that `tsae attribute` wrote: the report says which samples did that. By default the folder attribution
    beside the diff, if there is one."""
    explanations: Path | None = None
    """Folder that `tsae explain` wrote: the report shows its labels. By default the folder explanations beside the
    diff, if there is one."""


@dataclass(frozen=True)
class Serve:
    """Show the report of a run in the browser, with examples of every active feature.

    For runs that are too large for one file: examples are looked up when a card is opened. The server listens on this
    machine alone. Reload the page for a diff that has changed, as while `tsae watch` runs. Ctrl-C ends it.
    """

    run: Positional[Path]
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote, or any folder with a diff and its features."""
    port: int = 8765
    """Port of 127.0.0.1; 0 for a free one."""
    title: str | None = None
    """Title of the page."""
