"""Journal: finished parts of an import, in a hidden folder beside its target, so that it can be stopped and resumed.

The name of a part's folder follows from its files (paths, sizes, times of writing), from how they are read, and from
the tokenizer. An import that is run again uses the parts that it finds under these names, if the checkpoints that
sampled them are the same. The folder is deleted when the import ends, or fails before several parts were read.

For a log that grows, parts can be kept, in a folder that is named. Of a file that grows, the bytes of the part count
then, and not when the file was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from tsae.base.files import sha256, write_json
from tsae.base.provenance import version_of
from tsae.base.seal import read_sealed, with_checksum
from tsae.checkpoints.loading import tokenizer_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.entry import hash64
from tsae.rollouts.logs.on_disk.log_files import LogFile, grows
from tsae.rollouts.logs.on_disk.parts import Part
from tsae.rollouts.logs.tokens import Tokens
from tsae.rollouts.rewards import BY_NAME

_STATE = "part.json"


class Job(NamedTuple):
    """A part that is to be read, or was."""

    part: Part
    folder: Path
    """For what is read."""
    done: bool


class Journal:
    """Finished parts of one import.

    Args:
        to: its target.
        settings: see `settings`.
        skip: kinds of trajectories that are left out. A part that was read with other kinds is used if it has no
            trajectory that is an error now.
        agrees: whether a part, by its "asked", has the policies that it would have now.
        kept: folder for the parts, in which those of this log stay.
    """

    def __init__(
        self,
        to: Path,
        settings: Mapping[str, Any],
        skip: Sequence[str],
        agrees: Callable[[Any], bool] = lambda asked: True,
        kept: Path | None = None,
    ) -> None:
        self.to, self.folder, self.skip = to, kept or to.with_name(f".{to.name}.parts"), set(skip)
        self._agrees, self._stays, self._names = agrees, kept is not None, set[str]()
        self.found = self._used = self._read = 0
        """Parts that were there before, those of them that were used, and those that were read since."""
        self._settings = json.dumps(settings, sort_keys=True)
        self._lock: TextIO | None = None

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise TsaeError(
                "another import writes this file", where=self.to, fix="Wait until it has ended, or give another --to."
            ) from error
        except (ImportError, OSError):  # Windows, or a disk without locks
            pass
        for folder in self.folder.iterdir():
            if (folder / _STATE).is_file():
                self.found += 1
            elif folder.is_dir():
                shutil.rmtree(folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        if self._stays:
            for folder in self.folder.iterdir() if error is None else ():
                if folder.is_dir() and folder.name not in self._names:
                    shutil.rmtree(folder)
            self._lock.close()
            return
        several = max(self._used + self._read, len(list(self.folder.glob(f"*/{_STATE}")))) > 1
        if error is None or not several:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def job(self, part: Part) -> Job:
        """A part, its folder, and whether it was read before."""
        told = part.as_dict()
        if self._stays:
            told["files"] = [
                (*row[:-2], _digest(file)) if grows(file.path) else row
                for file, row in zip(part.files, told["files"], strict=True)
            ]
        text = self._settings + json.dumps(told)
        folder = self.folder / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        self._names.add(folder.name)
        if not (folder / _STATE).is_file():
            return Job(part, folder, done=False)
        try:
            found = _state(folder)
            done = self.skip >= found["counts"].get("skipped", {}).keys() and self._agrees(found["asked"])
            done = done and all(sha256(folder / name) == digest for name, digest in found["sha256"].items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, TsaeError):
            done = False  # damaged: it is read again
        if not done:
            shutil.rmtree(folder)
        return Job(part, folder, done=done)

    def take(self, job: Job) -> dict[str, Any]:
        """The state of a finished part."""
        self._used += job.done
        self._read += not job.done
        return _state(job.folder)

    def told(self) -> str:
        """How much of an earlier import was used."""
        others = self.found - self._used
        changed = f"; {others:,} others were of another log or other settings, and were not used" if others else ""
        return f"{self._used:,} of {self._used + self._read:,} parts had been read before{changed}"


def settings(form: Format, series: CheckpointSeries, tokens: Tokens, config: ImportConfig) -> dict[str, Any]:
    """What the parts of a log depend on beside their files, for JSON."""
    read, tokenizer = asdict(config), tokens.tokenizer
    for name in ("skip", "noisy_rewards", "strict"):  # They only decide what is an error.
        del read[name]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "form": form.name,
        "config": read,
        "pads": tokens.pads,
        "series": len(series) > 1,  # Which checkpoint sampled is compared part by part.
        "tokenizer": tokenizer_fingerprint(tokenizer) if backend is None else hash64(backend.to_str()),
        "template": tokenizer.chat_template,
        "model": [tokens.context, sorted(tokens.ends)],
        "versions": [version_of(name) for name in ("tsae", "transformers", "tokenizers")],
        # A user's function may have changed: no part that it judged is used again.
        "verifier": None if config.verifier in (None, *BY_NAME) else uuid.uuid4().hex,
    }


def _state(folder: Path) -> dict[str, Any]:
    return read_sealed(folder / _STATE, "Import again.")


def _digest(file: LogFile) -> str:
    """Of the bytes of a piece of a file."""
    found = hashlib.blake2b(digest_size=16)
    with file.path.open("rb") as stream:
        stream.seek(file.start)
        left = file.path.stat().st_size if file.stop is None else file.stop - file.start
        while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


def begin(folder: Path) -> Path:
    """A temporary folder for a part, until it is finished."""
    folder = folder.with_name(f"{folder.name}.{os.getpid()}")
    folder.mkdir()
    return folder


def finish(begun: Path, state: Mapping[str, Any]) -> None:
    """Give a finished part its own folder."""
    digests = {file.name: sha256(file) for file in sorted(begun.iterdir())}
    write_json(begun / _STATE, with_checksum({**state, "sha256": digests}))
    os.replace(begun, begun.with_suffix(""))
