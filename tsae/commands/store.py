"""The command `tsae store`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

import tsae
from tsae.activations.config import Subset
from tsae.checkpoints.series import CheckpointSeries
from tsae.commands.common import as_json, say_wrote
from tsae.errors import TsaeError


@dataclass(frozen=True)
class Show:
    """Say what an activation store holds."""

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""

    def run(self) -> None:
        from tsae.activations.store import read_manifest

        manifest = read_manifest(self.store)
        with as_json(self.json) as write:
            print(f"{self.store}: {manifest['dtype']}" + ("" if manifest["complete"] else ", not finished"))
            for site, info in manifest["sites"].items():
                print(f"  {site}: d_model {info['d_model']}")
            for reader in manifest["readers"]:
                tokens = sum(shard["n_tokens"] for shard in reader["shards"])
                trajectories = sum(shard["n_trajectories"] for shard in reader["shards"])
                n = len(reader["shards"])
                print(f"  {reader['id']}: {tokens:,} tokens of {trajectories:,} trajectories, {n} shards")
            write(manifest)


@dataclass(frozen=True)
class Check:
    """Compare every shard of an activation store with its checksum; status 2 where any is damaged."""

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    repair: bool = False
    """Capture the damaged shards again; needs the series."""
    series: Path | None = None
    """Folder of the checkpoints that the store was captured from."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""

    def run(self) -> None:
        from tsae.activations.checking import check_store, repair_store
        from tsae.activations.store import read_manifest

        if self.repair != (self.series is not None):
            raise TsaeError(
                "--repair and --series go together: damaged shards are captured again from the checkpoints",
                where="tsae store check",
                fix="Give both or neither.",
            )
        damages = check_store(self.store)
        manifest = read_manifest(self.store)
        n = sum(len(reader["shards"]) for reader in manifest["readers"])
        content = {"shards": n, "complete": manifest["complete"], "damaged": [vars(d) for d in damages], "repaired": []}
        with as_json(self.json) as write:
            for damage in damages:
                print(f"damaged: {damage.file}: {damage.what}")
            if not manifest["complete"]:
                print("the capture did not finish; the same `tsae capture` goes on")
            if damages and self.series is None:
                write(content)
                raise TsaeError(
                    f"{len(damages)} of {n} shards are damaged",
                    where=self.store,
                    fix=f"Have them captured again: tsae store check {self.store} --repair --series SERIES.",
                )
            if damages and self.series is not None:
                for repaired in repair_store(self.store, CheckpointSeries.load(self.series), damages):
                    bytes_ = (
                        "the bytes of the first capture" if repaired.same else "other last bits than the first capture"
                    )
                    print(f"repaired: {repaired.file}: {bytes_}")
                    content["repaired"].append(vars(repaired))
            print(f"{self.store}: all {n} shards are whole")
            write(content)


@dataclass(frozen=True)
class Statistics:
    """Tabulate entropy, choice points, log-probabilities and KL from the base, a row a reader and trajectory.

    Needs a store captured with --token-statistics.
    """

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    to: Path
    """Parquet file to write."""
    quantile: float = 0.8
    """Response tokens whose entropy is above this quantile of their run's are choice points."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)

    def run(self) -> None:
        from tsae.report.printed.findings import statistics_text

        table = tsae.trajectory_statistics(tsae.ActivationStore(self.store).subset(self.subset), quantile=self.quantile)
        self.to.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(self.to, index=False)
        print(statistics_text(table))
        say_wrote(self.to, f"{len(table):,} rows")


@dataclass(frozen=True)
class StoreCommand:
    """Say what an activation store holds, find and repair its damaged shards, or tabulate what readers predicted."""

    command: OmitArgPrefixes[
        Annotated[Show, subcommand("show", prefix_name=False)]
        | Annotated[Check, subcommand("check", prefix_name=False)]
        | Annotated[Statistics, subcommand("statistics", prefix_name=False)]
    ]

    def run(self) -> None:
        self.command.run()
