"""Settings as they lie: finds the file that a trainer left, and gives it to the reader of that trainer.

Of several files the first of this order counts: those of a run log (`tsae.rl`), training_args.json or .yaml,
training_args.bin, what W&B keeps of the run, a recipe in YAML. They lie in the run's folder or in its checkpoints.
Beside them lie the version (README.md, requirements.txt of W&B), the number of steps and the logged learning rates
(trainer_state.json), and the base.

An offline run of W&B leaves its config in W&B's own file (run-….wandb) alone. It has W&B's head of 7 bytes, and then
records as LevelDB's log writes them: blocks of 32 KB, in which each piece of a record has a checksum (4 bytes), a
length (2) and its place (1: whole, 2: first, 3: middle, 4: last). Records are protobuf messages. Of their fields two
count here: 5 is a change of the config, and 17 the run, whose field 4 is a change. A change has items to set (1) and to
remove (2), and an item a key (1), or a path of keys (2), and JSON (16).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from tsae.attribution import trl
from tsae.attribution.config_words import Words, trainer_of
from tsae.attribution.other_trainers import READERS
from tsae.attribution.settings import Optimiser, RunSettings
from tsae.base.files import as_path, read_object, reading
from tsae.base.inert_pickle import read_dataclass
from tsae.base.untrusted import parse_json, parse_yaml
from tsae.checkpoints.series import CheckpointSeries, base_on_card
from tsae.errors import TsaeError
from tsae.rollouts.trainers.token_logs import TSAE as RUN_LOG

_STATE = "trainer_state.json"
_CORRECT = "Correct the file, or remove it."
_WANDB = ("", "wandb/latest-run/", "wandb/run-*/", "wandb/offline-run-*/")
_FILES = (
    "tsae/settings.json", "training_args.json", "training_args.yaml", "training_args.bin",
    "checkpoint-*/training_args.json", "checkpoint-*/training_args.bin",
    *(f"{place}files/config.yaml" for place in _WANDB), *(f"{place}*.wandb" for place in _WANDB),
    "checkpoint-*/args.json", "args.json", ".hydra/config.yaml", "*.yaml", "*.yml", "*.toml", "configs/*.toml",
)  # fmt: skip
"""Where settings lie, best first; of several of a kind the last counts. From args.json on they may be anything."""
_OF_RUN_LOG = {"model_name_or_path": "base", "num_processes": "processes", "max_steps": "max_steps"}
"""Names in the settings of a run log, by the words of TRL that say the same."""
_LARGEST = 4 << 20
"""Bytes of a file of settings."""


def find_settings(
    series: CheckpointSeries, run: str | None = None, where: str | Path | None = None, *, version: str | None = None
) -> RunSettings:
    """The settings: what the caller names, or those beside a checkpoint of the run.

    Raises:
        TsaeError: where there are none, or what they name cannot be replayed.
    """
    mine = [c for c in series if not c.is_base and run in (None, c.run)]
    folders = list(dict.fromkeys(folder for c in mine for folder in (Path(c.path).parent, Path(c.path))))
    found = where if where is not None else next((folder for folder in folders if _file(folder)), None)
    if found is not None:
        return read_settings(found, version=version)
    what = "the trainer's settings do not lie beside the checkpoints (training_args.bin or .json, wandb/, .hydra/)"
    fix = "Give the file (settings=…, --settings), or a tsae.RunSettings."
    raise TsaeError(what, where=str(folders[0]) if folders else series.name, fix=fix)


def read_settings(where: str | Path, *, version: str | None = None) -> RunSettings:
    """Read the settings of a run, whichever trainer left them.

    Args:
        where: a file with settings, or the run's folder.
        version: of the trainer that wrote the run; by default what its README.md or W&B say.

    Raises:
        TsaeError: where there are no settings, they name what is not replayed, have a word that is not known and may
            change an update, or the logged learning rates are others.
    """
    where = as_path(where)
    file = where if where.is_file() else _file(where)
    if file is None:
        what = "holds no settings of a training (training_args.bin or .json, wandb/, .hydra/config.yaml, a recipe)"
        raise TsaeError(what, where=where, fix="Give the file, or the run's folder.")
    settings = _load(file)
    folders = _beside(file)
    with reading(next((f / _STATE for f in folders if (f / _STATE).is_file()), file), _CORRECT):
        states = [read_object(f / _STATE, _CORRECT) for f in folders if (f / _STATE).is_file()]
        state = max(states, key=lambda state: state.get("global_step", 0), default={})
        n_steps = max(0, int(state.get("max_steps") or 0)) or None
    with reading(file, _CORRECT):
        try:
            found = _read(settings, file, folders, n_steps, version)
        except ZeroDivisionError as error:
            raise ValueError("a size in it is 0, or larger than what it divides") from error
    with reading(folders[0] / _STATE, _CORRECT):
        _check_rates(found.optimiser, state, file)
    return found


def _read(
    settings: Mapping[str, Any], file: Path, folders: list[Path], n_steps: int | None, version: str | None
) -> RunSettings:
    trainer = trainer_of(settings)
    if reader := READERS.get(trainer or ""):
        found = reader(settings, file, n_steps)
        return replace(found, version=version or found.version)
    if trainer is None and not file.name.startswith("training_args"):
        fix = "Give the file with all settings of the training."
        raise TsaeError("does not hold the settings of a trainer that is known", where=file, fix=fix)
    beside = trl.Beside(
        version or settings.get("trl_version") or _version(folders),
        n_steps,
        next((base for folder in folders if (base := base_on_card(folder))), None),
        _object(folders, "config.json"),
        _object(folders, "adapter_config.json"),
        _kept(folders),
    )
    return trl.of(settings, file=file, beside=beside)


def _claimed(file: Path) -> bool:
    """Whether a file of any name holds settings; one that is damaged is passed over."""
    with suppress(TsaeError):
        return trainer_of(_load(file)) is not None
    return False


def _file(folder: str | Path) -> Path | None:
    """The file with settings in a folder."""
    return next(_files(as_path(folder)), None)


def _files(folder: Path) -> Iterator[Path]:
    """Files with settings in a folder, one of a kind, the best first."""
    for pattern in _FILES:
        for file in sorted(
            folder.glob(pattern), key=lambda file: [_numbers(Path(p)) for p in file.parts], reverse=True
        ):
            if _FILES.index(pattern) < _FILES.index("checkpoint-*/args.json") or _claimed(file):
                yield file
                break  # of several of a kind the last counts


def bases_in_settings(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models that files with settings in a folder name as the one that training started from, and the files.

    Settings that cannot be replayed name it, too.
    """
    for file in _files(folder):
        with suppress(TsaeError):
            settings = _load(file)
            if trainer := trainer_of(settings):
                # prime-rl has its words with and without this beginning.
                names = (Words(settings, file, trainer, own).take("run", "base")["base"] for own in ("", "trainer."))
                yield from ((name, file) for name in names if isinstance(name, str))


def _load(file: Path) -> dict[str, Any]:
    if file.suffix == ".bin":
        of, found = read_dataclass(file)
        if "GRPO" not in of.rpartition(".")[2]:
            what = f"holds a {of}, expected a GRPOConfig"
            raise TsaeError(what, where=file, fix="Give the settings of the training.")
        return found
    if file.suffix == ".wandb":
        return read_config(file)
    with reading(file, _CORRECT):
        if file.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        text = file.read_text(encoding="utf-8")
        parse: Callable[[str], Any] = parse_yaml
        if file.suffix in (".json", ".toml"):
            parse = parse_json if file.suffix == ".json" else tomllib.loads
        try:
            found = parse(text)
        except (ValueError, yaml.YAMLError) as error:
            what = f"is not {file.suffix[1:].upper()} ({str(error).splitlines()[0]})"
            raise TsaeError(what, where=file, fix=_CORRECT) from error
        if not isinstance(found, dict):
            raise TsaeError(f"holds a {type(found).__name__}, expected settings by name", where=file)
    if found.get("format") == RUN_LOG.files.title:
        known = {word: found.get(name) for word, name in _OF_RUN_LOG.items()}
        known["trl_version"] = found.get("versions", {}).get("trl")
        return found.get("arguments", found) | {word: value for word, value in known.items() if value is not None}
    inner = {name: each["value"] for name, each in found.items() if isinstance(each, dict) and "value" in each}
    return inner if len(inner) >= len(found) - 1 and inner else found  # as W&B writes it: `wandb_version` has no value


def _beside(file: Path) -> list[Path]:
    """Folders in which more of the run may lie: the file's own, the run's, and the run's checkpoints, newest first."""
    own = file.parent
    inner = own.name in ("files", ".hydra", "tsae") or own.name.startswith("checkpoint-")
    around = [own, own / "files", *([own.parent] if inner else [])]
    around += [folder.parent for folder in (own, *own.parents) if folder.name == "wandb"]
    checkpoints = [(_numbers(each), each) for folder in around for each in folder.glob("checkpoint-*")]
    return list(dict.fromkeys([*around, *(each for _, each in sorted(checkpoints, reverse=True))]))


def _numbers(file: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", file.name)]


def _version(folders: list[Path]) -> str | None:
    """TRL's, by the run's README.md or what W&B says was installed."""
    for name, pattern in (("README.md", r"^- TRL: (\S{1,40})"), ("requirements.txt", r"^trl==(\S{1,40})")):
        for folder in folders:
            if found := re.search(pattern, _text(folder / name), re.MULTILINE):
                return found[1]
    return None


def _text(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as stream:
        return stream.read(_LARGEST)


def _object(folders: list[Path], name: str) -> Mapping[str, Any]:
    file = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return {} if file is None else read_object(file, _CORRECT)


def _kept(folders: list[Path]) -> str | None:
    """Type of the numbers in the first file of weights."""
    for folder in folders:
        for name in ("adapter_model.safetensors", "model*.safetensors"):
            for file in sorted(folder.glob(name)):
                with reading(file, "Restore the file, or remove it."), safe_open(file, "np") as weights:
                    return str(weights.get_slice(next(iter(weights.keys()))).get_dtype())
    return None


def _check_rates(optimiser: Optimiser, state: Mapping[str, Any], file: Path) -> None:
    """Compare the logged learning rates with those of the settings."""
    for line in state.get("log_history", []):
        if "learning_rate" in line and "step" in line:
            logged, step = float(line["learning_rate"]), int(line["step"])
            # transformers logs the rate after the step's schedule has moved on, or before: releases differ.
            near = [optimiser.rate(s) for s in (step, step + 1) if s >= 1]
            if not any(abs(logged - rate) <= 1e-3 * max(abs(rate), 1e-12) for rate in near):
                what = f"the learning rate of step {step} was {logged:g} by {_STATE}, {near[0]:g} by the settings"
                raise TsaeError(what, where=file, fix="Give the settings of this run.")


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
            raise ValueError("one of its records is damaged")
