"""The config of a run in W&B's own file (run-….wandb): all that an offline run leaves of it.

The file has W&B's head of 7 bytes, and then records as LevelDB's log writes them: blocks of 32 KB, in which each piece
of a record has a checksum (4 bytes), a length (2) and its place (1: whole, 2: first, 3: middle, 4: last). Records are
protobuf messages. Of their fields two count here: 5 is a change of the config, and 17 the run, whose field 4 is a
change. A change has items to set (1) and to remove (2), and an item a key (1), or a path of keys (2), and JSON (16).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsae.base.files import reading
from tsae.base.untrusted import parse_json

_MOST = 16 << 20
"""Bytes that are read. The config comes first."""
_BLOCK = 1 << 15


def read_config(file: Path) -> dict[str, Any]:
    """The run's config, by name.

    Raises:
        TsaeError: where the file is damaged.
    """
    found: dict[str, Any] = {}
    with reading(file, "Give the run's training_args.bin, or its config as W&B shows it, as YAML."):
        with file.open("rb") as stream:
            content = stream.read(_MOST)
        if content[:4] != b":W&B":
            raise ValueError("it is not a file of W&B")
        for record in _records(content):
            for number, value in _fields(record):
                for part, change in _fields(value) if number == 17 else [(4, value)] if number == 5 else []:
                    if part == 4:
                        _apply(found, change)
    return found


def _apply(config: dict[str, Any], change: bytes) -> None:
    for number, item in _fields(change):
        fields = list(_fields(item))
        keys = [value.decode() for part, value in fields if part in (1, 2)]
        if number == 1 and len(keys) == 1:
            config[keys[0]] = parse_json(next(value for part, value in fields if part == 16))
        elif number == 2 and len(keys) == 1:
            config.pop(keys[0], None)


def _records(content: bytes) -> Iterator[bytes]:
    place, pieces = 7, b""
    while place + 7 <= len(content):
        if _BLOCK - place % _BLOCK < 7:  # what is left of a block is filled with zeros
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        piece = content[place + 7 : place + 7 + length]
        if not kind or len(piece) < length:  # nothing more, or torn by a kill
            return
        pieces = piece if kind in (1, 2) else pieces + piece
        if kind in (1, 4):
            yield pieces
        place += 7 + length


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a message that have a length; others are passed over."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
            if byte < 128 or shift > 63:
                return value

    while place < len(message):
        key = number()
        if key & 7 == 2:
            length = number()
            yield key >> 3, message[place : place + length]
            place += length
        elif key & 7 == 0:
            number()
        elif key & 7 in (1, 5):
            place += 8 if key & 7 == 1 else 4
        else:
            raise ValueError("a record of it is damaged")
