"""`tsae rollouts`: sample, import, formats, bands, difficulty and behaviours."""

from __future__ import annotations

import shutil
from dataclasses import field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

import tsae
from tsae.base.filters import find_function
from tsae.base.mirror import local, published, refreshed, removed, url_of
from tsae.base.part import Part
from tsae.base.validation import Daily, config
from tsae.commands.common import as_json, load_series, print_part, say_wrote, with_address
from tsae.commands.spreading import Spread
from tsae.errors import refuse
from tsae.rollouts.config import (
    BandCutoffs,
    BandsBy,
    BandSource,
    DifficultyConfig,
    ImportConfig,
    SamplingConfig,
    ServerConfig,
)


@config
class Formats:
    """List the trainers whose logs are read, in which versions, what to switch on there, and what each log lacks."""

    def execute(self) -> None:
        from tsae.rollouts.known_logs import formats_text

        print(formats_text(shutil.get_terminal_size().columns))


@config
class Sample:
    """Sample rollouts of problems from checkpoints, check their answers, and set advantages. Resumes an unfinished
    sampling.

    An inference server can sample instead, from one checkpoint at a time: --checkpoints ID --server.url
    http://localhost:8000/v1

    The work can be divided into independent parts: --parts 8 --workers 2 runs them here, --executor slurm or ray on a
    cluster. Or start each part yourself, with --part 2/8.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json, or as a trainer left it). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
    problems: Path
    """JSON lines of id, prompt, answer and, optionally, level."""
    to: Path
    """Parquet file of rollouts to write."""
    verifier: Daily[str] = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    checkpoints: Daily[tuple[str, ...]] = ()
    """Ids to sample from; by default the base and the last step of every run."""
    server: Daily[ServerConfig] = field(default_factory=ServerConfig)
    part: str | None = None
    """Sample only a part of the batches, such as 2/7. When all parts are done, the same command without this puts them
    together."""
    sampling: OmitArgPrefixes[SamplingConfig] = field(default_factory=SamplingConfig)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)

    def execute(self) -> None:
        from tsae.checkpoints.loading import ModelLoader
        from tsae.rollouts.problems import read_problems
        from tsae.rollouts.rewards import find_verifier
        from tsae.rollouts.sampling import remove_batches, sample_part

        series = load_series(*self.series)
        chosen = [series[id] for id in self.checkpoints] if self.checkpoints else list(series.final())
        problems, verify = read_problems(self.problems), find_verifier(self.verifier)
        server = with_address(self.server)
        what = f"a server samples from one checkpoint, and here are {', '.join(c.id for c in chosen)}"
        fix = "Name one with --checkpoints, and put the files together with `Rollouts.concat`."
        refuse("--server.url", (server is not None and len(chosen) > 1, what, fix))
        loader = ModelLoader(device=self.sampling.device)
        pieces = f"{url_of(self.to)}.pieces"
        if self.part is not None:
            part = Part.of(self.part)
            missing = sum(
                sample_part(c, problems, self.sampling, part=part, pieces=pieces, server=server, loader=loader)
                for c in chosen
            )
            print_part(self.part, missing, "batches still to sample")
            return
        of_each = [
            tsae.sample(c, problems, self.sampling, verify=verify, server=server, pieces=pieces, loader=loader)
            for c in chosen
        ]
        rollouts = tsae.Rollouts.concat(of_each).with_advantages()
        say_wrote(rollouts.write(self.to), repr(rollouts))
        published(self.to)  # before its pieces are removed
        room = local(pieces, fetch=False)
        for checkpoint in chosen:
            remove_batches(room, checkpoint.id)
        refreshed(room)
        if room.is_dir() and not any(room.iterdir()):
            removed(room)
        served = rollouts.info.get("served")
        if served and served["ids"] != "sampled":
            print(
                "the server gives no token ids: those of each response are of its text, and of "
                f"{served['other_lengths']} responses they are not as many as were sampled"
            )


@config
class Import:
    """Read a trainer's rollout log, tokenise it if it has text only, and print what was read and assumed.

    Logs of many trainers are known by their names and columns; `tsae rollouts formats` lists them. Name the columns of
    any other table below (--column): JSON lines, Parquet, JSON, CSV or Arrow. Files may be compressed by gzip or zstd.
    To resume a stopped import, run it again.
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

    def execute(self) -> None:
        from tsae.rollouts.importing import import_log

        print(import_log(self.log, self.to, self.checkpoint, self.config, workers=self.workers))
        say_wrote(self.to)


@config
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
    source: OmitArgPrefixes[BandSource] = field(default_factory=BandSource)
    """Bands from elsewhere instead. Bands that are there already are kept beside (--by own of other commands)."""

    def execute(self) -> None:
        from tsae.rollouts.bands import band_counts, found_how
        from tsae.rollouts.schema import problem_bands

        rollouts, elsewhere = tsae.Rollouts.read(self.rollouts), self.source != BandSource()
        measured = self.reference is not None or self.measured_on is not None
        what = "bands come from elsewhere, and a policy's pass rate is asked for"
        refuse("tsae rollouts bands", (elsewhere and measured, what, "Give two commands, one after the other."))
        if elsewhere:
            banded = rollouts.with_source(self.source, _cutoffs(self))
        else:
            measured_on = None if self.measured_on is None else tsae.Rollouts.read(self.measured_on)
            banded = rollouts.with_bands(self.reference, cutoffs=_cutoffs(self), measured_on=measured_on)
        say_wrote(banded.write(self.to), repr(banded))
        print(f"problems: {band_counts(problem_bands(banded.frame))}")
        print(found_how(banded.info["bands"]))
        if beside := banded.info.get("bands_beside"):
            print(f"kept beside: {', '.join(beside)}")


@config
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
    by: BandsBy = "auto"
    """Whose bands sort pass@k and groups, where the rollouts have several: own, difficulty or level."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the reference's problems that is easy, and the share that is hard."""
    config: OmitArgPrefixes[DifficultyConfig] = field(default_factory=DifficultyConfig)

    def execute(self) -> None:
        found = tsae.difficulty(
            tsae.Rollouts.read(self.rollouts).by(self.by),
            self.config,
            series=load_series(*self.series) if self.series else None,
            reference=self.reference,
            cutoffs=_cutoffs(self),
        )
        with as_json(self.json) as write:
            print(found)
            if self.to is not None:
                say_wrote(found.save(self.to))
            tables = {"rates": found.rates, "migration": found.migration, "pass_at_k": found.pass_at_k}
            write({**found.info, "paths": found.paths, **tables, "groups": found.groups})


@config
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
    by: BandsBy = "auto"
    """Whose bands, where the rollouts have several: own, difficulty or level."""
    required_steps: str | None = None
    """module:function of your own (prompt, answer) -> operations that a solution needs, or None."""

    def execute(self) -> None:
        from tsae.report.terminal import behaviour_text, format_text
        from tsae.rollouts.bands import bands_label
        from tsae.rollouts.behaviours import behaviour_table, by_thirds, format_table, with_behaviours

        rollouts = tsae.Rollouts.read(self.rollouts).by(self.by)
        reference, name = self.reference or rollouts.policies[0], self.required_steps
        fix = "Give module:function for your own (prompt, answer) -> number of operations."
        required = None if name is None else find_function(name, takes=2, where="required_steps", fix=fix)
        found = with_behaviours(rollouts, required_steps=required, reference=reference)
        shown = found if self.reference else by_thirds(found)
        reference = self.reference or shown.policies[0]
        behaviours, formats = (table(shown, reference=reference) for table in (behaviour_table, format_table))
        with as_json(self.json) as write:
            print(behaviour_text(behaviours, bands_label(rollouts.info.get("bands"))))
            print(f"\n{format_text(formats)}")
            if self.to is not None:
                say_wrote(found.write(self.to), repr(found))
            write({"behaviours": behaviours, "formats": formats})


@config
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


def _cutoffs(options: Bands | Difficulty) -> tsae.BandCutoffs | tsae.BandQuantiles:
    return options.cutoffs if options.shares is None else tsae.BandQuantiles(*options.shares)
