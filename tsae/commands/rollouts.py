"""Commands on rollouts: sample, import, bands, difficulty, behaviours."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

import tsae
from tsae.checkpoints.loading import ModelLoader
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.rollouts.config import BandCutoffs, BandQuantiles, DifficultyConfig, ImportConfig, SamplingConfig
from tsae.rollouts.logs.known import formats_text


@dataclass(frozen=True)
class Sample:
    """Sample rollouts of problems from checkpoints, check their answers, and set advantages."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, .gguf files, Hugging Face ids (org/model@revision/subfolder)."""
    problems: Path
    """JSON lines of id, prompt, answer and, optionally, level."""
    to: Path
    """Parquet file of rollouts to write."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    checkpoints: tuple[str, ...] = ()
    """Ids to sample from; by default the base and the last step of every run."""
    sampling: OmitArgPrefixes[SamplingConfig] = field(default_factory=SamplingConfig)

    def run(self) -> None:
        from tsae.rollouts.checking import find_verifier
        from tsae.rollouts.problems import read_problems

        series = load_series(*self.series)
        chosen = [series[id] for id in self.checkpoints] if self.checkpoints else list(series.final())
        problems, verify = read_problems(self.problems), find_verifier(self.verifier)
        loader = ModelLoader(device=self.sampling.device)
        parts = [tsae.sample(c, problems, self.sampling, verify=verify, loader=loader) for c in chosen]
        rollouts = tsae.Rollouts.concat(parts).with_advantages()
        say_wrote(rollouts.write(self.to), rollouts)


@dataclass(frozen=True)
class Import:
    """Read a trainer's rollout log, tokenise it where it has text alone, and say what was read and assumed.

    Logs of TRL and Unsloth (log_completions), verl (rollout_data_dir), open-instruct (save_traces),
    NeMo-RL (train_data_step*), prime-rl (traces, token exports), open-r1 (generations), ms-swift (log_completions),
    slime (save-debug-rollout-data), AReaL (dump_to_file), ROLL (rollout_dump_dir), verifiers (results),
    rLLM (episodes), SkyRL (dumped_evals), OpenRLHF (batch inference) and Inspect (.eval) are known by their names and
    columns; of any other JSON lines or Parquet the columns are named below (--column). Text may be
    compressed (.gz, .zst). An import of a long log that was stopped goes on where it was when it is run again.
    """

    log: Positional[Path]
    """The file, or the folder that the trainer fills with them, which is read whole."""
    to: Path
    """Parquet file of rollouts to write."""
    checkpoint: Path | None = None
    """Folder, .gguf file or series: tokenizer, chat template, ids of policies. By default what lies beside the log."""
    workers: int | None = None
    """Processes that read; by default one a core and at most four, and one for logs of less than 32 MiB."""
    config: OmitArgPrefixes[ImportConfig] = field(default_factory=ImportConfig)

    def run(self) -> None:
        from tsae.rollouts.importing import import_log

        print(import_log(self.log, self.to, self.checkpoint, self.config, workers=self.workers))
        say_wrote(self.to)


@dataclass(frozen=True)
class Bands:
    """Put every problem into easy, medium or hard by a policy's pass rate."""

    rollouts: Path
    """Parquet file of rollouts."""
    to: Path
    """Parquet file to write; may be the same."""
    reference: str | None = None
    """Policy whose pass rate counts; by default all policies together."""
    measured_on: Path | None = None
    """Separate rollouts of the same problems to measure on. By default a response's band is measured on the other half
    of its problem's responses, so that problems are not called hard for bad luck."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the problems that is easy, and the share that is hard, such as 0.3 0.3."""

    def run(self) -> None:
        from tsae.rollouts.difficulty import band_counts, found_how
        from tsae.rollouts.table import problem_bands

        rollouts = tsae.Rollouts.read(self.rollouts)
        measured_on = None if self.measured_on is None else tsae.Rollouts.read(self.measured_on)
        cutoffs = self.cutoffs if self.shares is None else BandQuantiles(*self.shares)
        banded = rollouts.with_bands(self.reference, cutoffs=cutoffs, measured_on=measured_on)
        say_wrote(banded.write(self.to), banded)
        print(f"problems: {band_counts(problem_bands(banded.frame))}")
        print(found_how(banded.info["bands"]))


@dataclass(frozen=True)
class Difficulty:
    """How difficulty moved: pass rates and bands of every checkpoint, pass@k, and what groups have to teach."""

    rollouts: Path
    """Parquet file with rollouts of several checkpoints."""
    series: tuple[str, ...] = ()
    """Folder of the checkpoints, which names runs and steps; without it all policies are one run, in their order."""
    reference: str | None = None
    """Policy that sets shares and bands, and that others are compared with; by default the base, or the first."""
    to: Path | None = None
    """Folder for the tables and the page difficulty.html."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the reference's problems that is easy, and the share that is hard."""
    config: OmitArgPrefixes[DifficultyConfig] = field(default_factory=DifficultyConfig)

    def run(self) -> None:
        found = tsae.difficulty(
            tsae.Rollouts.read(self.rollouts),
            self.config,
            series=load_series(*self.series) if self.series else None,
            reference=self.reference,
            cutoffs=self.cutoffs if self.shares is None else BandQuantiles(*self.shares),
        )
        with as_json(self.json) as write:
            print(found)
            if self.to is not None:
                say_wrote(found.save(self.to))
            tables = {"rates": found.rates, "migration": found.migration, "pass_at_k": found.pass_at_k}
            write({**found.info, "paths": found.paths, **tables, "groups": found.groups})


@dataclass(frozen=True)
class Behaviours:
    """What responses do: loops, repeated answers, skipped computation, formats; by band, with paired changes."""

    rollouts: Path
    """Parquet file with the texts of the responses."""
    to: Path | None = None
    """Parquet file to write with a column for every behaviour; may be the same."""
    reference: str | None = None
    """Policy that others are compared with, and whose successes set a problem's usual length; by default the first."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    required_steps: str | None = None
    """module:function of your own (prompt, answer) -> operations that a solution needs, or None."""

    def run(self) -> None:
        from tsae.base.plugins import find_function
        from tsae.report.printed.findings import behaviour_text, format_text
        from tsae.rollouts.behaviours import behaviour_table, format_table, with_behaviours

        rollouts = tsae.Rollouts.read(self.rollouts)
        reference = self.reference or rollouts.policies[0]
        fix = "Give module:function for your own (prompt, answer) -> number of operations."
        name = self.required_steps
        required = None if name is None else find_function(name, where="required_steps", fix=fix)
        found = with_behaviours(rollouts, required_steps=required, reference=reference)
        behaviours, formats = (table(found, reference=reference) for table in (behaviour_table, format_table))
        with as_json(self.json) as write:
            print(behaviour_text(behaviours))
            print(f"\n{format_text(formats)}")
            if self.to is not None:
                say_wrote(found.write(self.to), found)
            write({"behaviours": behaviours, "formats": formats})


@dataclass(frozen=True)
class Formats:
    """Say whose logs are read, in which versions, what to switch on there, and what each log cannot tell."""

    def run(self) -> None:
        print(formats_text(shutil.get_terminal_size().columns))


@dataclass(frozen=True)
class RolloutsCommand:
    """Sample rollouts, import logs, list the known formats, and measure difficulty and behaviour."""

    command: OmitArgPrefixes[
        Annotated[Sample, subcommand("sample", prefix_name=False)]
        | Annotated[Import, subcommand("import", prefix_name=False)]
        | Annotated[Formats, subcommand("formats", prefix_name=False)]
        | Annotated[Bands, subcommand("bands", prefix_name=False)]
        | Annotated[Difficulty, subcommand("difficulty", prefix_name=False)]
        | Annotated[Behaviours, subcommand("behaviours", prefix_name=False)]
    ]

    def run(self) -> None:
        self.command.run()
