"""`tsae store show`: a module of its own, because it needs no model."""

from __future__ import annotations

from tsae.activations.shards.manifest import read_manifest
from tsae.commands.common import as_json
from tsae.commands.options.store_show import Show


def run_show(options: Show) -> None:
    manifest = read_manifest(options.store)
    with as_json(options.json) as write:
        print(f"{options.store}: {manifest['dtype']}" + ("" if manifest["complete"] else ", not finished"))
        for site, info in manifest["sites"].items():
            print(f"  {site}: d_model {info['d_model']}")
        for reader in manifest["readers"]:
            tokens = sum(shard["n_tokens"] for shard in reader["shards"])
            trajectories = sum(shard["n_trajectories"] for shard in reader["shards"])
            n = len(reader["shards"])
            print(f"  {reader['id']}: {tokens:,} tokens of {trajectories:,} trajectories, {n} shards")
        write(manifest)
