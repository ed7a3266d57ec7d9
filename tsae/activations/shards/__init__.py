"""The files of an activation store: shards, manifest, checksums."""
