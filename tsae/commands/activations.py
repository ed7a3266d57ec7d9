"""`tsae capture` and `tsae store`: show and statistics."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

import tsae
from tsae.activations.config import CaptureConfig, StatesConfig, Subset
from tsae.base.mirror import local
from tsae.base.part import Part, first_process
from tsae.base.validation import Daily, config
from tsae.commands.common import as_json, chosen_readers, load_series, say_wrote, with_address
from tsae.commands.spreading import Spread


@config
class Capture:
    """Record residual-stream activations while checkpoints read trajectories. Resumes an unfinished capture.

    On several processes: torchrun --nproc-per-node 2 -m tsae capture …

    In parts that know nothing of each other: --parts 8 --workers 2 on this machine, --parts 8 --executor slurm on a
    cluster, or --part 2/8 wherever you start it.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json, or as a trainer left it). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
    rollouts: Path
    """Parquet file of rollouts, which the checkpoints read."""
    to: Path
    """Folder of the activation store."""
    sites: Daily[tuple[str, ...]] = ()
    """TransformerLens names such as blocks.14.hook_resid_post; by default the output of the middle block."""
    checkpoints: Daily[tuple[str, ...]] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    part: str | None = None
    """Record only a part of the shards, such as 2/7. Parts know nothing of each other; the last one to finish completes
    the store, which is the same as that of one process."""
    config: OmitArgPrefixes[CaptureConfig] = field(default_factory=CaptureConfig)
    server: StatesConfig = field(default_factory=StatesConfig)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)

    def execute(self) -> None:
        from tsae.activations.capture import capture_part

        series = chosen_readers(load_series(*self.series), self.checkpoints)
        rollouts = tsae.Rollouts.read(self.rollouts)
        sites, config, server = list(self.sites), self.config, with_address(self.server)
        # A server computes for one reader; what the others read comes by other commands.
        if self.part is not None or server is not None:
            part = Part() if self.part is None else Part.of(self.part)
            missing = capture_part(series, rollouts, sites, to=self.to, part=part, config=config, server=server)
            if missing:
                done = f"part {part}" if self.part is not None else "this"
                print(f"{done} is done; other parts have {len(missing)} shards still to record, such as {missing[0]}")
                return
        store = tsae.capture(series, rollouts, sites, to=self.to, config=config, server=server)
        if first_process():
            say_wrote(store.path, store)


@config
class Show:
    """Show what an activation store holds."""

    store: Positional[Path]
    """Folder that `tsae capture` wrote."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.activations.manifest import inside, read_manifest
        from tsae.activations.shard import open_shard

        manifest, folder = read_manifest(self.store), local(self.store, fetch=False)
        for reader, shard in ((r["id"], shard) for r in manifest["readers"] for shard in r["shards"]):
            if (file := inside(folder, shard["file"])).is_file():  # Those at a URL are not fetched for this.
                open_shard(file, manifest, reader, shard, outline=True)
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


@config
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

    def execute(self) -> None:
        import pyarrow as pa

        from tsae.report.terminal import statistics_text
        from tsae.rollouts.parquet import write_table

        store = tsae.ActivationStore(self.store).subset(self.subset)
        table = tsae.trajectory_statistics(store, quantile=self.quantile)
        arrow = pa.Table.from_pandas(table, preserve_index=False)
        write_table(self.to, arrow.schema, [arrow], {"kind": "token statistics"})
        print(statistics_text(table))
        say_wrote(self.to, f"{len(table):,} rows")


@config
class StoreCommand:
    """Show what an activation store holds, or make a table of what its readers predicted."""

    command: OmitArgPrefixes[
        Annotated[Show, subcommand("show", prefix_name=False)]
        | Annotated[Statistics, subcommand("statistics", prefix_name=False)]
    ]
