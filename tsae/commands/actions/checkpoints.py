"""`tsae capture` and `tsae drift`."""

from __future__ import annotations

import tsae
from tsae.base.torchrun import first_process
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.commands.options.checkpoints import Capture, Drift
from tsae.errors import TsaeError
from tsae.report.pages.drift import write_drift
from tsae.report.printed.drift import drift_text


def run_capture(options: Capture) -> None:
    series = load_series(*options.series)
    series = series.select(options.checkpoints) if options.checkpoints else series.final()
    rollouts = tsae.Rollouts.read(options.rollouts)
    store = tsae.capture(series, rollouts, list(options.sites), to=options.to, config=options.config)
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
            options.to.mkdir(parents=True, exist_ok=True)
            drift.to_parquet(options.to / "drift.parquet", index=False)
            write_drift(drift, options.to / "drift.html")
            say_wrote(options.to)
        write({"drift": drift})
