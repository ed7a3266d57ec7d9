"""Artefacts: what a stage writes, and how the next stage sees that it is whole.

An artefact is a folder. Its files are written under temporary names and renamed; ``manifest.json`` comes last and
closes the folder. It holds the kind and its format version, versions of packages, the command, the config, fingerprints
of the inputs, and the hash (XXH3, 128 bits) of every file. A reader compares the hashes. A file is read for that once,
and again when its size, inode or times have changed.

A lone JSON file that is read back (`write_record`), such as the manifest itself, carries the hash of its content. A
lone Parquet file carries its hash, too (`tsae.base.hashed_parquet`). Pages and --json output are only views, and carry
none.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from tsae.base.files import as_path, once_a_state, partial_name, plain, read_object, reading, replacing, write_json
from tsae.base.mirror import removed
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, public, refuse

MANIFEST = "manifest.json"
_PACKAGES = ("tsae", "torch", "transformers", "transformer_lens", "sae_lens", "h5py", "numpy", "scipy")
_THREADS = 4
"""Files that are hashed at once; the lock of the interpreter is free meanwhile."""


@dataclass(frozen=True)
class Kind:
    """A kind of artefact, declared where it is written."""

    name: str
    version: int
    """Of the format; raised when an older reader would misread it."""
    main: str
    """The JSON file that holds what is neither a table nor an array; empty where there is none."""
    fix: str
    """What makes one, such as "Make it with `tsae diff`."."""
    load: Callable[[Path], object] | None = None
    """Reads a folder, and raises TsaeError where it is not whole; by default its files are only compared."""


_running: ContextVar[tuple[Sequence[str], Path] | None] = ContextVar("_running", default=None)
"""Words of the running command, and its output."""


@contextmanager
def running_command(words: Sequence[str], to: Path | None) -> Iterator[None]:
    """Record in every manifest which command writes it, while the block runs.

    Args:
        words: of the command, without "tsae".
        to: its output.
    """
    token = _running.set(None if to is None else (words, Path(os.path.abspath(to))))
    try:
        yield
    finally:
        _running.reset(token)


def command_facts(path: Path, *, alone: bool = False) -> dict[str, Any]:
    """The running command, and its working folder relative to what it writes.

    Args:
        path: that is written; there is no command for what lies outside of its output.
        alone: the path is the command's output, and not only a file in it.
    """
    words, to = _running.get() or ((), None)
    path = Path(os.path.abspath(path))
    if not words or to is None or not path.is_relative_to(to) or (alone and path != to):
        return {}
    return {"command": public(list(words)), "from": os.path.relpath(Path.cwd(), path.parent)}


def command_text(facts: Mapping[str, Any], path: Path) -> str:
    """The command in a manifest, as it is typed here; empty where there is none."""
    words, path = facts.get("command"), Path(os.path.abspath(path))
    if not isinstance(words, list):
        return ""
    text = shlex.join(["tsae", *map(str, words)])
    folder = Path(os.path.normpath(path.parent / str(facts.get("from", "."))))
    return text if folder == Path.cwd() else f"(cd {shlex.quote(os.path.relpath(folder))} && {text})"


def write_artefact(
    folder: str | Path,
    kind: Kind,
    content: Mapping[str, Any] | None,
    files: Mapping[str, Callable[[Path], object]] | None = None,
    *,
    there: Iterable[str] = (),
    config: Any = None,
    inputs: Mapping[str, Any] | None = None,
    gives: Mapping[str, Any] | None = None,
    to: Path | None = None,
) -> Path:
    """Write an artefact in the place of the one that is there.

    All files are written under temporary names first: until then the earlier artefact stays, whatever happens. A kill
    between the renames leaves a folder without manifest, which no reader takes for a whole one. The manifest is written
    under its temporary name before anything else. It shows that the folder is ours, even after several kills.

    Args:
        folder: missing ones are made.
        kind: of the artefact.
        content: of its main file.
        files: what writes each of the other files.
        there: names of further files of it, which lie in the folder already.
        config: what it was made with.
        inputs: fingerprints of what it was made from, by name.
        gives: fingerprints of what it holds, for what is made from it; by default those of its inputs.
        to: where the folder will lie, if it is only a temporary one.

    Returns:
        The folder.
    """
    folder = as_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    before = manifest_of(folder) or {}
    main = {} if content is None else {kind.main: partial(write_json, content=content)}
    writers: dict[str, Callable[[Path], object]] = {**main, **(files or {})}
    manifest = partial_name(folder / MANIFEST)
    write_record(manifest, {"files": {}, **before, "kind": kind.name})
    try:
        with ExitStack() as stack:
            coming: dict[str, Path] = {}
            for name, write in writers.items():
                coming[name] = stack.enter_context(replacing(folder / name))
                write(coming[name])
            hashes = _hashes({**{name: folder / name for name in there}, **coming})
            facts = {
                "kind": kind.name,
                "version": kind.version,
                "config": config,
                "inputs": dict(inputs or {}),
                "gives": dict((inputs if gives is None else gives) or {}),
                "files": hashes,
                "versions": versions(),
                **command_facts(to or folder),
            }
            write_record(manifest, facts)
            gone = [_inside(folder, name) for name in before.get("files", ()) if name not in hashes]
            # All is written; only renames are left.
            for lost in (folder / MANIFEST, *gone):
                lost.unlink(missing_ok=True)
        os.replace(manifest, folder / MANIFEST)
    except BaseException:
        if is_whole(folder) or not any((folder / name).exists() for name in writers):
            manifest.unlink(missing_ok=True)  # else it says whose files these are
        raise
    for lost in gone:
        removed(lost)  # at the URL, too
    return folder


def add_to_artefact(folder: str | Path, name: str, write: Callable[[Path], object]) -> Path:
    """Write one more file of an artefact, or write it anew, and enter it in the manifest.

    Raises:
        TsaeError: where another file of it is damaged or missing: nothing is added to what is not whole.
    """
    folder, fix = as_path(folder), "Make it again."
    facts = read_record(folder / MANIFEST, fix)
    others = {other: told for other, told in facts["files"].items() if other != name}
    check_files(folder, {"files": others}, (), fix)
    with replacing(folder / MANIFEST) as manifest, replacing(folder / name) as coming:
        write(coming)
        write_record(manifest, {**facts, "files": {**facts["files"], **_hashes({name: coming})}})
        (folder / MANIFEST).unlink()
    return folder / name


def read_artefact(folder: str | Path, kind: Kind, needed: Iterable[str] = (), fix: str | None = None) -> dict[str, Any]:
    """The content of an artefact's main file, after all its files were compared with their hashes.

    Args:
        folder: that holds it.
        kind: that it must be.
        needed: files that it must have beside the main file.
        fix: what to do about a damaged one; by default `Kind.fix`.

    Raises:
        TsaeError: where the folder has no manifest, or that of another kind or version; a file is missing, damaged, or
            not of this artefact.
    """
    folder, fix = as_path(folder), fix or kind.fix
    read_manifest(folder, kind, (kind.main, *needed), fix)
    return read_object(folder / kind.main, fix)


def read_manifest(folder: Path, kind: Kind, needed: Iterable[str] = (), fix: str | None = None) -> dict[str, Any]:
    """The manifest of an artefact, after its files were compared with their hashes; see `read_artefact`."""
    fix = fix or kind.fix
    if not (folder / MANIFEST).is_file():
        raise TsaeError(f"holds no complete {kind.name}: {MANIFEST} is missing", where=folder, fix=kind.fix)
    found = read_record(folder / MANIFEST, fix)
    refuse(folder, (found.get("kind") != kind.name, f"holds {found.get('kind')!s:.40}, expected {kind.name}", kind.fix))
    if found.get("version") != kind.version:
        what = f"is a {kind.name} of version {found.get('version')!s:.40}, this tsae reads {kind.version}"
        raise OtherVersion(what, where=folder, fix=fix)
    check_files(folder, found, needed, fix)
    return found


class OtherVersion(TsaeError):
    """An artefact that another version of tsae wrote, which this one does not read."""


def check_files(folder: Path, manifest: Mapping[str, Any], needed: Iterable[str], fix: str) -> None:
    """Compare the files of an artefact with the hashes in its manifest.

    Raises:
        TsaeError: where one is missing or has other bytes, or the manifest does not name one that is needed.
    """
    with reading(folder / MANIFEST, fix, "does not say which files there are"):
        hashes = {_inside(folder, name): str(told) for name, told in manifest["files"].items()}
    unknown = [folder / name for name in needed if folder / name not in hashes]
    for file in (*unknown, *hashes):
        refuse(folder, (not file.is_file(), f"{file.relative_to(folder)} is missing", fix))
    for file in unknown:
        refuse(folder, (True, f"holds {file.relative_to(folder)}, which is not of this artefact", fix))
    for file, found in zip(hashes, _hashes({str(file): file for file in hashes}).values(), strict=True):
        what = f"{file.name} is damaged: its bytes have changed since it was written"
        refuse(folder, (found != hashes[file], what, fix))


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest in a folder, or the one that a killed process was about to give it; None where none can be read."""
    for file in (folder / MANIFEST, partial_name(folder / MANIFEST)):
        with suppress(OSError, ValueError):
            found = parse_json(file.read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(found.get("kind"), str):
                return found
    return None


def is_whole(folder: Path) -> bool:
    """Whether a manifest closes a folder."""
    return (folder / MANIFEST).is_file()


def write_record(file: str | Path, content: Mapping[str, Any]) -> Path:
    """Write a JSON file that is read back, with the hash of its content. Passwords and keys in it are hidden."""
    known = public(plain({name: value for name, value in content.items() if name != "checksum"}))
    return write_json(file, {**known, "checksum": _content_hash(known)})


def read_record(file: str | Path, fix: str) -> dict[str, Any]:
    """The content of a file of `write_record`.

    Raises:
        TsaeError: where the file is missing, cannot be read, has no checksum, or has changed since it was written.
    """
    found = read_object(file, fix)
    told = found.pop("checksum", None)
    with reading(file, fix, "is damaged"):  # what can just be read may be nested too deeply to be written
        same = told == _content_hash(found)
    refuse(
        file,
        (told is None, "has no checksum, so that nothing says whether it is whole", fix),
        (not same, "is damaged: its content has changed since it was written", fix),
    )
    return found


def _content_hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


@once_a_state
def file_hash(file: str) -> str:
    """XXH3 (128 bits) of a file's bytes."""
    found = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        while chunk := stream.read(1 << 20):  # hashlib.file_digest reads less at once, and takes a fifth longer
            found.update(chunk)
    return found.hexdigest()


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(files, pool.map(file_hash, files.values()), strict=True))


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder, or in a folder below it; never one that leads to elsewhere."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise TypeError(f"{name!r} is not a file of the folder")
    return folder / name


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {package: version_of(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **{name: told for name, told in found.items() if told is not None}}


@cache
def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is missing. Its metadata are parsed once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
