"""`tsae capture` and `tsae drift`."""

from __future__ import annotations

import tsae
from tsae.activations.capture import capture_part
from tsae.base.disk.made_by import record_early
from tsae.base.part import Part
from tsae.base.table_export import write_table
from tsae.base.torchrun import first_process
from tsae.commands.common import as_json, given, load_series, say_wrote
from tsae.commands.options.checkpoints import Capture, Drift
from tsae.errors import TsaeError
from tsae.report.pages.drift import write_drift
from tsae.report.printed.drift import drift_text


def run_capture(options: Capture) -> None:
    series = load_series(*options.series)
    series = series.select(options.checkpoints) if options.checkpoints else series.final()
    rollouts = tsae.Rollouts.read(options.rollouts)
    sites, config, server = list(options.sites), options.config, given(options.server)
    # A server computes for one reader; what the others read comes by other commands.
    if options.part is not None or server is not None:
        part = Part() if options.part is None else Part.of(options.part)
        missing = capture_part(series, rollouts, sites, to=options.to, part=part, config=config, server=server)
        if missing:
            done = f"part {part}" if options.part is not None else "this"
            print(f"{done} is done; other parts have {len(missing)} shards still to record, such as {missing[0]}")
            return
    store = tsae.capture(series, rollouts, sites, to=options.to, config=config, server=server)
    if first_process():
        say_wrote(store.path, store)


def run_drift(options: Drift) -> None:
    series = load_series(*options.series)
    series = series.select(options.checkpoints) if options.checkpoints else series
    if len(series) < 2:
        raise TsaeError("there is nothing but the base", where=series.name, fix="Give at least one more checkpoint.")
    drift = tsae.weight_drift(series, spectral=options.spectral)
    with as_json(options.json) as write:
        print(drift_text(drift))
        if options.to is not None:
            record_early(options.to)
            write_table(options.to / "drift.parquet", drift)
            write_drift(drift, options.to / "drift.html")
            say_wrote(options.to)
        write({"drift": drift})
