"""Options of `tsae store`: check, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from tsae.activations.config import Subset
from tsae.commands.options.store_show import Show


@dataclass(frozen=True)
class Check:
    """Compare every shard of an activation store with its checksum. Exit status 2 if any is damaged."""

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    repair: bool = False
    """Capture damaged shards again; needs --series."""
    series: Path | None = None
    """Folder of the checkpoints that the store was captured from."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""


@dataclass(frozen=True)
class Statistics:
    """Tabulate entropy, choice points, log-probabilities and KL from the base, one row per reader and trajectory.

    Needs a store captured with --token-statistics.
    """

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    to: Path
    """Parquet file to write."""
    quantile: float = 0.8
    """Response tokens with an entropy above this quantile of their run are choice points."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)


@dataclass(frozen=True)
class StoreCommand:
    """Show what an activation store holds, find and repair damaged shards, or tabulate what readers predicted."""

    command: OmitArgPrefixes[
        Annotated[Show, subcommand("show", prefix_name=False)]
        | Annotated[Check, subcommand("check", prefix_name=False)]
        | Annotated[Statistics, subcommand("statistics", prefix_name=False)]
    ]
