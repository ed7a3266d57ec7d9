"""`tsae store show`: a module of its own, because it needs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tsae.activations.shards.manifest import read_manifest
from tsae.base.files import reading
from tsae.base.seal import read_sealed
from tsae.commands.common import as_json
from tsae.commands.options.store_show import Show
from tsae.errors import TsaeError


def run_show(options: Show) -> None:
    manifest = read_manifest(options.store)
    _need_own(manifest, options.store)
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


def _need_own(manifest: dict[str, Any], store: Path) -> None:
    """Refuse a manifest and a run.json of different captures. No shard is opened."""
    record, fix = store / "run.json", "Put back the file that was exchanged, or capture again in a new folder."
    if not record.is_file():
        return
    with reading(record, fix):
        of = read_sealed(record, fix)["inputs"].get("rollouts")
    if of not in (None, manifest["rollouts"]):
        what = f"is of another capture (rollouts {manifest['rollouts']}) than run.json beside it ({of})"
        raise TsaeError(what, where=store / "manifest.json", fix=fix)
