"""A folder's seal: checksums of what a stage wrote, compared when a later stage reads it.

checksums.json holds the SHA-256 of every sealed file. A file that was changed, exchanged or lost since then is refused
by name, before any number is made of it.

JSON files that are written again and again, or stand alone, carry their own checksum (`with_checksum`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from tsae.base.files import as_path, plain, read_object, replacing, sha256, write_json
from tsae.base.remote.mirror import removed
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError

SEAL = "checksums.json"
_CHECKSUM = "checksum"
_THREADS = 4
"""Files that are read at once; the lock of the interpreter is free meanwhile."""


def seal(folder: str | Path, names: Iterable[str] = (), *, coming: Mapping[str, Path] | None = None) -> None:
    """Write down the checksums of files in a folder. Earlier entries stay if their files still exist.

    Args:
        folder: that holds the files.
        names: of the files. A file that does not exist is taken out of the seal.
        coming: files that will be renamed after this call: the new name, and where the file is now.
    """
    write_json(Path(folder) / SEAL, {"sha256": _digests(Path(folder), names, coming or {})})


def _digests(folder: Path, names: Iterable[str], coming: Mapping[str, Path]) -> dict[str, str]:
    """What the seal shall say: the checksum of each file."""
    file = folder / SEAL
    known = _read(file) if file.is_file() else {}
    found = {name: told for name, told in known.items() if (folder / name).is_file()}
    found |= {name: digest(folder / name) for name in names if (folder / name).is_file()}
    found |= {name: sha256(path) for name, path in coming.items()}
    return dict(sorted(found.items()))


def write_sealed(folder: str | Path, name: str, content: Mapping[str, Any], others: Iterable[str]) -> None:
    """Write the seal of a folder, and then the JSON file that completes it. So a complete folder always has a seal.

    Args:
        folder: that holds the files.
        name: of the JSON file.
        content: of it.
        others: the other files, which are there already or do not exist.
    """
    with replacing(as_path(folder) / name) as partial:
        write_json(partial, {**content, "sealed": True})
        seal(folder, others, coming={name: partial})


def write_whole(
    folder: str | Path,
    name: str,
    content: Mapping[str, Any],
    others: Mapping[str, Callable[[Path], object] | None],
) -> Path:
    """Write all files of a folder, with their seal, in the place of those that are there.

    Everything is written under temporary names first: until then the earlier result stays, whatever happens.

    Args:
        folder: missing ones are made.
        name: of the JSON file that completes the folder, and comes last.
        content: of it.
        others: what writes each of the other files; None where there is none this time.

    Returns:
        The folder.

    Raises:
        TsaeError: where the folder has a seal that is damaged, or a URL at which nothing can be removed.
    """
    folder = as_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # names that are entered first are given last
        coming = {name: stack.enter_context(replacing(folder / name))}
        for other, write in others.items():
            if write is not None:
                coming[other] = stack.enter_context(replacing(folder / other))
                write(coming[other])
        write_json(coming[name], {**content, "sealed": True})
        gone = [other for other, write in others.items() if write is None]
        sealed = {file: told for file, told in _digests(folder, (), coming).items() if file not in gone}
        write_json(stack.enter_context(replacing(folder / SEAL)), {"sha256": sealed})
        # All is written; only renames are left. Without its JSON file, a folder with files of both results counts as
        # incomplete.
        for lost in (name, *gone):
            (folder / lost).unlink(missing_ok=True)
    for lost in gone:
        removed(folder / lost)  # at the URL, too
    return folder


def check_seal(folder: str | Path, fix: str, needed: Iterable[str] = (), *, others: bool = True) -> None:
    """Compare sealed files with their checksums.

    Args:
        folder: that holds the files.
        fix: what makes them anew.
        needed: files that the seal has to name.
        others: compare all others that it names, too.

    Raises:
        TsaeError: where a sealed file is missing or has other bytes, or the seal is missing or damaged, or does not
            name a file that is needed.
    """
    folder, needed = Path(folder), list(needed)
    if not (folder / SEAL).is_file():
        raise TsaeError(f"its {SEAL} is missing, so that nothing says whether it is whole", where=folder, fix=fix)
    known = _read(folder / SEAL)
    strange = [name for name in needed if name not in known]
    if strange:
        raise TsaeError(f"holds {strange[0]}, which was not written with the rest of it", where=folder, fix=fix)
    wanted = list(known) if others else needed
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise TsaeError(f"{missing[0]} is missing", where=folder, fix=fix)
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, same in zip(wanted, pool.map(lambda n: unchanged(folder / n, known[n]), wanted), strict=True):
            if not same:
                raise TsaeError(
                    f"{name} is damaged: its bytes have changed since it was written", where=folder, fix=fix
                )


def read_whole(folder: Path, files: Sequence[str], fix: str, make: str) -> dict[str, Any]:
    """The object in the JSON file that completes a folder, after all files were compared with their checksums.

    Args:
        folder: that holds the files.
        files: that have to be there, and in the seal; first the JSON file.
        fix: what makes them anew where they are damaged.
        make: what makes them where one is missing.

    Raises:
        TsaeError: where a file is missing; as `check_seal`; or where the JSON file holds something else.
    """
    for name in files:
        if not (folder / name).is_file():
            raise TsaeError(f"holds no {name}", where=folder, fix=make)
    check_seal(folder, fix, files)
    content = read_object(folder / files[0], fix)
    content.pop("sealed", None)
    return content


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON content that carries the SHA-256 of the rest of it, and says so."""
    content = {**{name: value for name, value in content.items() if name != _CHECKSUM}, "sealed": True}
    return {**content, _CHECKSUM: _content_digest(content)}


def without_checksum(content: Mapping[str, Any], where: str | Path, fix: str) -> dict[str, Any]:
    """Content that `with_checksum` gave, compared with its checksum.

    Raises:
        TsaeError: where it has changed, or has no checksum.
    """
    found = dict(content)
    told = found.pop(_CHECKSUM, None)
    if told is None:
        raise TsaeError("has no checksum, so that nothing says whether it is whole", where=where, fix=fix)
    try:
        same = told == _content_digest(found)
    except RecursionError as error:  # what can just be read may be too deep to be written
        raise TsaeError("is damaged: it is nested too deeply", where=where, fix=fix) from error
    if not same:
        raise TsaeError("is damaged: its content has changed since it was written", where=where, fix=fix)
    found.pop("sealed", None)
    return found


def read_sealed(file: str | Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file that carries its checksum.

    Raises:
        TsaeError: where the file is missing or damaged, or holds something else.
    """
    return without_checksum(read_object(file, fix), file, fix)


def _content_digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(plain(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_names(folder: str | Path) -> list[str]:
    """The files that the seal of a folder names; none without one.

    Raises:
        TsaeError: where the seal is damaged.
    """
    file = Path(folder) / SEAL
    return list(_read(file)) if file.is_file() else []


def changed_names(folder: str | Path) -> list[str]:
    """The files that the seal of a folder names, and that are missing or have other bytes.

    Raises:
        TsaeError: where the seal is damaged.
    """
    folder = Path(folder)
    known = _read(folder / SEAL) if (folder / SEAL).is_file() else {}
    return [name for name, told in known.items() if not (folder / name).is_file() or digest(folder / name) != told]


def sealed_digests(folder: str | Path) -> dict[str, str]:
    """The SHA-256 of every file that the seal of a folder names; none without a readable seal."""
    try:
        return _read(Path(folder) / SEAL)
    except TsaeError:
        return {}


def unchanged(file: Path, expected: str) -> bool:
    """Whether a file has this SHA-256; see `digest`."""
    return digest(file) == expected


def digest(file: Path) -> str:
    """The SHA-256 of a file. A process reads the file again only if its size or times have changed."""
    found = os.stat(file)
    return _digest(str(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=1 << 16)
def _digest(file: str, *_: int) -> str:
    return sha256(file)


def _read(file: Path) -> dict[str, str]:
    try:
        found = parse_json(file.read_text(encoding="utf-8"))["sha256"]
        # A name is that of a file beside the seal, never a path to elsewhere.
        if not all(
            isinstance(d, str) and name not in ("", "..") and Path(name).name == name for name, d in found.items()
        ):
            raise ValueError("not a checksum by name")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TsaeError(
            f"is no list of checksums ({error})", where=file, fix="Remove it if you trust the files beside it."
        ) from error
    return dict(found)
