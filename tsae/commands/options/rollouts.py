"""Options of `tsae rollouts`: sample, import, bands, difficulty, behaviours."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from tsae.commands.options.formats import Formats
from tsae.commands.options.spread import Spread
from tsae.rollouts.config import BandCutoffs, DifficultyConfig, ImportConfig, SamplingConfig, ServerConfig


@dataclass(frozen=True)
class Sample:
    """Sample rollouts of problems from checkpoints, check their answers, and set advantages. Resumes an unfinished
    sampling.

    An inference server can sample instead, from one checkpoint at a time: --checkpoints ID --server.url
    http://localhost:8000/v1

    The work can be divided into independent parts: --parts 8 --workers 2 runs them here, --executor slurm or ray on a
    cluster. Or start each part yourself, with --part 2/8.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json or checkpoint-N folders). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
    problems: Path
    """JSON lines of id, prompt, answer and, optionally, level."""
    to: Path
    """Parquet file of rollouts to write."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    checkpoints: tuple[str, ...] = ()
    """Ids to sample from; by default the base and the last step of every run."""
    server: ServerConfig = field(default_factory=ServerConfig)
    part: str | None = None
    """Sample only a part of the batches, such as 2/7. When all parts are done, the same command without this puts them
    together."""
    sampling: OmitArgPrefixes[SamplingConfig] = field(default_factory=SamplingConfig)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)


@dataclass(frozen=True)
class Import:
    """Read a trainer's rollout log, tokenise it if it has text only, and print what was read and assumed.

    Logs of TRL and Unsloth (log_completions), verl (rollout_data_dir), open-instruct (save_traces),
    NeMo-RL (train_data_step*), prime-rl (traces, token exports), open-r1 (generations), ms-swift (log_completions),
    slime (save-debug-rollout-data), AReaL (dump_to_file), ROLL (rollout_dump_dir), verifiers (results),
    rLLM (episodes), SkyRL (dumped_evals), OpenRLHF (batch inference), Inspect (.eval), lm-eval (log_samples) and
    Atropos (groups) are known by their names and columns, also in tables of wandb, mlflow and trackio; of any other
    table (JSON lines, Parquet, JSON, CSV, Arrow) the columns are named below (--column). Files may be compressed by
    gzip or zstd. Run a stopped import of a long log again to resume it.
    """

    log: Positional[Path]
    """The log file, or the folder with the log's files, which are all read."""
    to: Path
    """Parquet file of rollouts to write."""
    checkpoint: Path | None = None
    """Folder, .gguf file or series: tokenizer, chat template, ids of policies. By default the one beside the log."""
    workers: int | None = None
    """Processes that read; by default one a core and at most four, and one for logs of less than 32 MiB."""
    config: OmitArgPrefixes[ImportConfig] = field(default_factory=ImportConfig)


@dataclass(frozen=True)
class Bands:
    """Sort problems into easy, medium and hard by a policy's pass rate."""

    rollouts: Path
    """Parquet file of rollouts."""
    to: Path
    """Parquet file to write."""
    reference: str | None = None
    """Policy whose pass rate counts; by default all policies together."""
    measured_on: Path | None = None
    """Separate rollouts of the same problems to measure on. By default a response's band is measured on the other half
    of its problem's responses, so that bad luck does not make a problem hard."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the problems that is easy, and the share that is hard, such as 0.3 0.3."""


@dataclass(frozen=True)
class Difficulty:
    """Measure how difficulty moved: pass rates and bands of every checkpoint, pass@k, and what groups can teach."""

    rollouts: Path
    """Parquet file with rollouts of several checkpoints."""
    series: tuple[str, ...] = ()
    """Folder of the checkpoints, which names runs and steps; without it all policies form one run, in their order."""
    reference: str | None = None
    """Policy that defines shares and bands, and the others are compared with; by default the base, or the first."""
    to: Path | None = None
    """Folder for the tables and the page difficulty.html."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the reference's problems that is easy, and the share that is hard."""
    config: OmitArgPrefixes[DifficultyConfig] = field(default_factory=DifficultyConfig)


@dataclass(frozen=True)
class Behaviours:
    """Measure what responses do: loops, repeated answers, skipped computation, formats; by band, with paired
    changes."""

    rollouts: Path
    """Parquet file with the texts of the responses."""
    to: Path | None = None
    """Parquet file to write with a column for every behaviour."""
    reference: str | None = None
    """Policy to compare the others with; its successes define a problem's usual length. By default the first."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    required_steps: str | None = None
    """module:function of your own (prompt, answer) -> operations that a solution needs, or None."""


@dataclass(frozen=True)
class RolloutsCommand:
    """Sample rollouts, import logs, list the known formats, and measure difficulty and behaviour."""

    # Not OmitArgPrefixes: it would take the prefixes of nested options, too.
    command: Annotated[
        Annotated[Sample, subcommand("sample", prefix_name=False)]
        | Annotated[Import, subcommand("import", prefix_name=False)]
        | Annotated[Formats, subcommand("formats", prefix_name=False)]
        | Annotated[Bands, subcommand("bands", prefix_name=False)]
        | Annotated[Difficulty, subcommand("difficulty", prefix_name=False)]
        | Annotated[Behaviours, subcommand("behaviours", prefix_name=False)],
        arg(name=""),
    ]
