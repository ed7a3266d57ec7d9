"""`tsae rollouts`: sample, import, bands, difficulty, behaviours."""

from __future__ import annotations

from tsae.commands.options.rollouts import Bands, Behaviours, Difficulty, Import, Sample

import tsae
from tsae.base.disk.made_by import record_early
from tsae.base.part import Part
from tsae.base.plugins import find_function
from tsae.base.remote.mirror import local, published, refreshed, removed, url_of
from tsae.checkpoints.loading import ModelLoader
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.errors import TsaeError
from tsae.report.printed.findings import behaviour_text, format_text
from tsae.rollouts.bands import band_counts, found_how
from tsae.rollouts.behaviours import behaviour_table, by_thirds, format_table, with_behaviours
from tsae.rollouts.importing import import_log
from tsae.rollouts.problems import read_problems
from tsae.rollouts.rewards import find_verifier
from tsae.rollouts.sampling import remove_batches, sample_part
from tsae.rollouts.schema import problem_bands


def run_sample(options: Sample) -> None:
    series = load_series(*options.series)
    chosen = [series[id] for id in options.checkpoints] if options.checkpoints else list(series.final())
    problems, verify = read_problems(options.problems), find_verifier(options.verifier)
    server = options.server if options.server.url else None
    if server is None and options.server != type(options.server)():
        raise TsaeError("is missing", where="--server.url", fix="Give the server's address.")
    if server is not None and len(chosen) > 1:
        raise TsaeError(
            f"a server samples from one checkpoint, and here are {', '.join(c.id for c in chosen)}",
            where="--server.url",
            fix="Name one with --checkpoints, and put the files together with `Rollouts.concat`.",
        )
    loader = ModelLoader(device=options.sampling.device)
    pieces = f"{url_of(options.to)}.pieces"
    if options.part is not None:
        part = Part.of(options.part)
        missing = sum(
            sample_part(c, problems, options.sampling, part=part, pieces=pieces, server=server, loader=loader)
            for c in chosen
        )
        rest = f"other parts have {missing} batches still to sample" if missing else "so are all others"
        print(f"part {part} is done; {rest}. The same command without --part puts them together.")
        return
    of_each = [
        tsae.sample(c, problems, options.sampling, verify=verify, server=server, pieces=pieces, loader=loader)
        for c in chosen
    ]
    rollouts = tsae.Rollouts.concat(of_each).with_advantages()
    record_early(options.to)
    say_wrote(rollouts.write(options.to), rollouts)
    published(options.to)  # before its pieces are removed
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


def run_import(options: Import) -> None:
    print(import_log(options.log, options.to, options.checkpoint, options.config, workers=options.workers))
    say_wrote(options.to)


def run_bands(options: Bands) -> None:
    rollouts = tsae.Rollouts.read(options.rollouts)
    measured_on = None if options.measured_on is None else tsae.Rollouts.read(options.measured_on)
    banded = rollouts.with_bands(options.reference, cutoffs=_cutoffs(options), measured_on=measured_on)
    record_early(options.to)
    say_wrote(banded.write(options.to), banded)
    print(f"problems: {band_counts(problem_bands(banded.frame))}")
    print(found_how(banded.info["bands"]))


def _cutoffs(options: Bands | Difficulty) -> tsae.BandCutoffs | tsae.BandQuantiles:
    return options.cutoffs if options.shares is None else tsae.BandQuantiles(*options.shares)


def run_difficulty(options: Difficulty) -> None:
    found = tsae.difficulty(
        tsae.Rollouts.read(options.rollouts),
        options.config,
        series=load_series(*options.series) if options.series else None,
        reference=options.reference,
        cutoffs=_cutoffs(options),
    )
    with as_json(options.json) as write:
        print(found)
        if options.to is not None:
            record_early(options.to)
            say_wrote(found.save(options.to))
        tables = {"rates": found.rates, "migration": found.migration, "pass_at_k": found.pass_at_k}
        write({**found.info, "paths": found.paths, **tables, "groups": found.groups})


def run_behaviours(options: Behaviours) -> None:
    rollouts = tsae.Rollouts.read(options.rollouts)
    reference, name = options.reference or rollouts.policies[0], options.required_steps
    fix = "Give module:function for your own (prompt, answer) -> number of operations."
    required = None if name is None else find_function(name, takes=2, where="required_steps", fix=fix)
    found = with_behaviours(rollouts, required_steps=required, reference=reference)
    shown = found if options.reference else by_thirds(found)
    reference = options.reference or shown.policies[0]
    behaviours, formats = (table(shown, reference=reference) for table in (behaviour_table, format_table))
    with as_json(options.json) as write:
        print(behaviour_text(behaviours))
        print(f"\n{format_text(formats)}")
        if options.to is not None:
            record_early(options.to)
            say_wrote(found.write(options.to), found)
        write({"behaviours": behaviours, "formats": formats})
