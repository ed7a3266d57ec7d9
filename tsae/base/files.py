"""Files that are written whole or not at all, their checksums, and reading what may be damaged."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import sqlite3
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote
from uuid import uuid4

from safetensors import SafetensorError

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, first_line, is_panic, refuse

_DAMAGED = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError, OverflowError),
    *(SafetensorError, zipfile.BadZipFile, zlib.error, csv.Error, sqlite3.Error),
)

T = TypeVar("T")
_PARTIAL = ".tsae.tmp"


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that a user gives: ``~`` is a home folder, and file:///a%20b is /a b. Other URLs stay as they are."""
    text = os.fspath(path)
    if text.startswith("file:/"):  # Path makes one slash of three
        text = unquote(re.sub(r"file:(//(localhost(?=/))?)?", "", text, count=1))
    return Path(os.path.expanduser(text))


def partial_name(path: str | Path) -> Path:
    """The name beside a file under which it is written: hidden, and one that nobody gives to a file of their own.

    It is always the same, so that the next writer of the file finds what a killed process left.
    """
    path = as_path(path)
    return path.with_name(f".{path.name}{_PARTIAL}")


@contextmanager
def replacing(path: str | Path, *, shared: bool = False) -> Iterator[Path]:
    """Give a temporary name to write under; the file takes the place of `path` when the block ends without an error.

    Args:
        path: missing folders are made.
        shared: whether other processes may write the same file at once, so that the name has to be a new one.
    """
    path = as_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path.with_name(f"{path.name}.{uuid4().hex}") if shared else path)
    partial.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write into; it becomes `path` when the block ends without an error.

    Args:
        path: missing, or an empty folder.
        replace: whether a folder with something in it is replaced.

    Raises:
        TsaeError: where something is in the folder that is not to be replaced, or it is a link.
    """
    path = Path(os.path.abspath(as_path(path)))
    kept = path.is_dir() and not replace and any(path.iterdir())
    refuse(
        path,
        (path.is_symlink(), "is a link, and a folder is to be written", "Give the folder that it leads to."),
        (kept, "is not empty", "Give another folder, or empty this one."),
    )
    partial = partial_name(path)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: str | Path, content: str) -> Path:
    """Write UTF-8 text whole or not at all. Lone surrogates are escaped as in JSON: UTF-8 cannot hold them."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8", "backslashreplace"))
    return as_path(path)


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON whole or not at all; the same content gives the same bytes."""
    return write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=_plain) + "\n")


def write_first(path: str | Path, content: Any, write: Callable[[Path, Any], Path]) -> None:
    """Write JSON unless the file is there: of several processes that do this at once, one writes.

    Raises:
        OSError: where nothing can be written.
    """
    path = as_path(path)
    own = write(path.with_name(f"{path.name}.{uuid4().hex}"), content)
    try:
        os.link(own, path)  # fails where another was first
    except FileExistsError:
        pass
    except OSError:
        os.replace(own, path)  # a file system without hard links
    own.unlink(missing_ok=True)


def clear_first(path: str | Path) -> None:
    """Remove what processes left that were killed in `write_first`, once none can be in it any more."""
    path = as_path(path)
    for left in path.parent.iterdir():
        if is_beginning(path, left.name):
            left.unlink(missing_ok=True)


def is_beginning(path: Path, left: str) -> bool:
    """Whether a name is one under which `write_first` writes a file before it is there, and no name of a user's own."""
    name = re.escape(path.name)
    names = rf"{name}\.[0-9a-f]{{32}}|\.{name}\.[0-9a-f]{{32}}{re.escape(_PARTIAL)}"
    return re.fullmatch(names, left) is not None


def is_lock(folder: Path, name: str) -> bool:
    """Whether a file in a folder is the folder's lock, which lies inside where the folder is a mounted volume."""
    return name.startswith(f".{folder.resolve().name}.") and name.endswith(".lock")


def need_no_link(file: str | Path) -> None:
    """Refuse a link where a file is going to be appended to: it may lead anywhere.

    Raises:
        TsaeError: where it is one.
    """
    refuse(file, (as_path(file).is_symlink(), "is a link, expected a file of this folder", "Remove the link."))


def append_line(file: str | Path, line: str, fix: str) -> None:
    """Append a line of text to a file. Half a line that a kill left at its end does not run into it.

    Args:
        file: a missing one is made, with its folder.
        line: without a line break.
        fix: what to do where it cannot be written.

    Raises:
        TsaeError: where the file is a link, or the disk is full or fails.
    """
    path = as_path(file)
    need_no_link(path)
    with writing(path, fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags, 0o666), "r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 1))
            torn = stream.read(1) not in (b"", b"\n")
            stream.write(("\n" if torn else "").encode() + line.encode() + b"\n")


_SEEKING = threading.Lock()


def read_at(descriptor: int, view: memoryview, place: int) -> int:
    """Read bytes at a place of a file into a buffer, from any thread, and return how many there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], place)
    with _SEEKING:  # Windows: all threads share one position.
        os.lseek(descriptor, place, os.SEEK_SET)
        piece = os.read(descriptor, min(len(view), 1 << 24))
    view[: len(piece)] = piece
    return len(piece)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk; nothing where it does not exist."""
    folder = path.is_dir()
    if not path.exists() or (folder and os.name == "nt"):  # Windows opens no folders, and flushes none.
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)  # Windows flushes only what may be written.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def once_a_state(read: Callable[[str], T]) -> Callable[[str | Path], T]:
    """Have a process call a function of a file again only if the file's size, inode or times have changed."""
    known = lru_cache(maxsize=1 << 16)(lambda file, *_: read(file))

    @wraps(read)
    def found(file: str | Path) -> T:
        state = os.stat(file)
        return known(str(file), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)

    return found


@once_a_state
def digest(file: str) -> str:
    """The SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def reading(file: str | Path, fix: str, what: str | Callable[[], str] = "cannot be read") -> Iterator[None]:
    """Turn what readers raise on a damaged file into a TsaeError that names it.

    Args:
        file: what is read in the block.
        fix: what makes it anew.
        what: is wrong then, or a function that says it when something is.

    Raises:
        TsaeError: in place of errors of the system, JSON, CSV, SQLite, pyarrow, pandas, h5py, safetensors, zip archives
            and torch, and of content that is not as it was written.
    """
    try:
        yield
    except TsaeError:
        raise
    except _DAMAGED as error:
        found = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise TsaeError(f"{what() if callable(what) else what} ({found})", where=file, fix=fix) from error


@contextmanager
def as_tsae_error(what: str, where: str | Path, fix: str) -> Iterator[None]:
    """Turn anything that a large library raises into a TsaeError: transformers and the like have no narrower class.

    Args:
        what: is wrong then, such as "cannot load its tokenizer".
        where: the files lie.
        fix: what a user can do.
    """
    try:
        yield
    except BaseException as error:  # the tokenizers library panics
        if isinstance(error, TsaeError | MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        what = f"{what} ({first_line(error)})"
        if "trust_remote_code" in str(error):
            what = "needs Python code of its own (auto_map), which is never run"
            fix = "Give a model that transformers itself can load, or save this one in such a form."
        raise TsaeError(what, where=where, fix=fix) from error


@contextmanager
def writing(where: str | Path, fix: str) -> Iterator[None]:
    """Turn what writers raise on a full or failing disk into a TsaeError.

    Args:
        where: the file or folder that is written.
        fix: what to do, and what has been kept.

    Raises:
        TsaeError: in place of errors of the system and of h5py.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise TsaeError(f"cannot be written to ({first_line(error)})", where=where, fix=fix) from error


def read_object(file: str | Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        TsaeError: where the file is missing or damaged, or holds something else.
    """
    with reading(file, fix):
        content = parse_json(as_path(file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, expected an object")
    return content


def plain(content: Any) -> Any:
    """Content as JSON gives it back: dataclasses are objects, tuples lists, paths texts."""
    return json.loads(json.dumps(content, default=_plain))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not go into JSON")
