"""`tsae store`: check, statistics."""

from __future__ import annotations

import pyarrow as pa

import tsae
from tsae.activations.recording.repair import repair_store
from tsae.activations.shards.checksums import check_store
from tsae.activations.shards.manifest import read_manifest
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.remote.mirror import shown
from tsae.checkpoints.series import CheckpointSeries
from tsae.commands.common import as_json, say_wrote
from tsae.commands.options.store import Check, Statistics
from tsae.errors import TsaeError
from tsae.report.printed.findings import statistics_text
from tsae.rollouts.parquet import write_table


def run_check(options: Check) -> None:
    if options.repair != (options.series is not None):
        raise TsaeError(
            "--repair and --series go together: damaged shards are captured again from the checkpoints",
            where="tsae store check",
            fix="Give both or neither.",
        )
    damages = check_store(options.store)
    manifest = read_manifest(options.store)
    n = sum(len(reader["shards"]) for reader in manifest["readers"])
    content = {"shards": n, "complete": manifest["complete"], "damaged": [vars(d) for d in damages], "repaired": []}
    with as_json(options.json) as write:
        for damage in damages:
            print(f"damaged: {damage.file}: {damage.what}")
        if not manifest["complete"]:
            print("the capture did not finish; the same `tsae capture` goes on")
        if damages and options.series is None:
            write(content)
            raise TsaeError(
                f"{len(damages)} of {n} shards are damaged",
                where=options.store,
                fix=f"Have them captured again: tsae store check {options.store} --repair --series SERIES.",
            )
        if damages and options.series is not None:
            series = CheckpointSeries.load(options.series)
            with sole_writer(options.store):
                for repaired in repair_store(options.store, series, check_store(options.store)):
                    found = "the bytes of" if repaired.same else "other last bits than"
                    print(f"repaired: {repaired.file}: {found} the first capture")
                    content["repaired"].append(vars(repaired))
        print(f"{shown(options.store)}: all {n} shards are whole")
        write(content)


def run_statistics(options: Statistics) -> None:
    store = tsae.ActivationStore(options.store).subset(options.subset)
    table = tsae.trajectory_statistics(store, quantile=options.quantile)
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    write_table(options.to, arrow.schema, [arrow], {"kind": "token statistics"})
    print(statistics_text(table))
    say_wrote(options.to, f"{len(table):,} rows")
