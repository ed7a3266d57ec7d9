"""Is a checkpoint complete? A trainer writes it file by file, and may be doing so while somebody else looks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tsae.base.untrusted import parse_json
from tsae.checkpoints.weight_files import ADAPTER_CONFIG, is_adapter, json_object, weight_files
from tsae.errors import TsaeError

_LAST = "trainer_state.json"
"""The Hugging Face Trainer writes it after weights and optimizer."""
_LARGEST_HEAD = 100_000_000
"""Bytes; safetensors itself reads no larger one."""


def unfinished(folders: Sequence[Path]) -> dict[Path, str]:
    """The checkpoints of one training that are not complete, and what is missing.

    Complete is a checkpoint with a configuration that can be read, and with all weight files in the length that their
    heads announce; and with a trainer_state.json, if another checkpoint has one.
    """
    last = any((folder / _LAST).is_file() for folder in folders)
    found = {folder: _missing(folder, last=last) for folder in folders}
    return {folder: missing for folder, missing in found.items() if missing}


def _missing(folder: Path, *, last: bool) -> str:
    try:
        json_object(folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json"))
        short = next((file.name for file in weight_files(folder) if not _whole(file)), None)
        if short is not None:
            return f"{short} is not all there"
        if last:
            json_object(folder / _LAST)
    except TsaeError as error:
        return error.what
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _whole(file: Path) -> bool:
    """Whether a safetensors file has the length that its head announces."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        total = file.stat().st_size
        if not 2 <= size <= min(total - 8, _LARGEST_HEAD):
            return False
        try:
            head = parse_json(stream.read(size))
            ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
            return bool(total == 8 + size + max(ends, default=0))
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
