"""Mirrors: copies on this machine of files and folders at a URL. They are fetched and uploaded with fsspec.

A stage works on the local copy, whose paths are like any other. Three calls keep both sides together:

- `local(path)` gives the local path of a URL, and fetches what lies there, without the large files that are fetched one
  by one. A path that is none is given back.
- `needed(path)` fetches one file of a mirror, if it is not there or has changed.
- `published(path)` uploads one file of a mirror, or all that is new in a folder.

Copies lie under $TSAE_CACHE (by default ~/.cache/tsae). Shards that were fetched or uploaded are removed again, the
least recently used first, where they exceed $TSAE_CACHE_GB (by default 100). The one in use is kept.
Whether a copy is still that of the URL is told by what the file system says of the file (`state_there`).

What lies on both sides is noted beside the copy, in the folder NAME.remote: for every file its state at the URL and
here. Several processes may share a cache. Each note is a file of its own, so that none is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from tsae.base.files import as_path, as_tsae_error, replacing
from tsae.base.untrusted import parse_json
from tsae.errors import refuse, without_secrets

NOTES = ".remote"
CACHE = "TSAE_CACHE"
CACHE_GB = "TSAE_CACHE_GB"
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(//?)(?=[^/])")
_LAZY = re.compile(r"(.*/)?[^/]+/\d{5}\.h5|(.*/)?pieces/\d{6}\.npz")
"""Files that are fetched when they are needed: shards of a store, pieces of an encoding."""
_STATES = (
    *("ETag", "etag", "blob_id", "sha", "Content-MD5", "Digest"),
    *("mtime", "created", "modify", "modified", "last_modified", "Last-Modified", "LastModified", "updated"),
)
"""How file systems call the version of a file, or else the time of its last change."""
_THREADS = 8
_lock = threading.Lock()
_mirrors: dict[Path, Mirror] = {}
_used: dict[Path, int] = {}
"""When this process last used a file, in nanoseconds."""


def _name(url: str) -> str:
    """The last part of a URL, without a query or a user before the host, which may hold a key."""
    name = without_secrets(url).partition("?")[0].rstrip("/").rpartition("/")[2].rpartition("***@")[2]
    return "data" if name in ("", ".", "..") else name


def is_url(path: str | Path) -> bool:
    """Whether this names a place that is not on this machine; `Path` makes one slash of two."""
    found = _URL.match(str(path))
    # One letter is a Windows drive; file:// is on this machine.
    return found is not None and found[1] != "file"


def url_of(path: str | Path) -> str:
    """The URL of a copy, with its password if it has one; or the URL that is given, with both slashes."""
    mirror, name = _of(path)
    return _URL.sub(r"\1://", str(path), count=1) if mirror is None else f"{mirror.url}/{name}".rstrip("/")


def local(path: str | Path, *, fetch: bool = True) -> Path:
    """The path on this machine.

    Args:
        path: a path, or the URL of a file or folder; file:///a is /a, also where `Path` has made one slash of three.
        fetch: look what lies at the URL and fetch it, but for shards. Not for an output that is written anew.

    Raises:
        TsaeError: where the URL cannot be reached.
    """
    if not is_url(path):
        return as_path(path)
    url = url_of(path)
    _cache_limit()
    root = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / _name(url)
    mirror = _mirrors.setdefault(root, Mirror(url, root))
    if fetch:
        mirror.refresh()
    return root


def shown(path: str | Path) -> str:
    """What messages call a path: its URL, if it has one."""
    return str(path) if _of(path)[0] is None else without_secrets(url_of(path))


def in_words(text: str) -> str:
    """A message that names URLs and not their copies."""
    for root, mirror in _mirrors.items():
        text = text.replace(str(root), without_secrets(mirror.url))
    return text


def refreshed(folder: Path) -> None:
    """Fetch what others have written to a mirror since; nothing for a folder that is none."""
    if (mirror := _of(folder)[0]) is not None:
        mirror.refresh()


def needed(path: Path) -> Path:
    """The same path, once its file is there; it need not be one of a mirror.

    Raises:
        TsaeError: where it cannot be fetched.
    """
    mirror, name = _of(path)
    if mirror is not None and name in mirror.listing():
        mirror.fetch(name)
    return path


def there(path: Path) -> bool:
    """Whether a file is on this machine, or at the URL."""
    mirror, name = _of(path)
    return path.is_file() or (mirror is not None and name in mirror.listing())


def published(*paths: Path) -> None:
    """Upload files, or what is new in folders, in the order given; nothing for paths outside of mirrors.

    Raises:
        TsaeError: where one cannot be written.
    """
    for path in paths:
        if _of(path)[0] is not None:
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                mirror, name = _of(file)
                if mirror is not None and file.is_file() and not name.endswith(".tmp"):
                    mirror.upload(name)


def removed(path: Path) -> None:
    """Remove a file or folder, here and at the URL."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    mirror, name = _of(path)
    if mirror is not None:
        mirror.remove(name)


def outside(folder: Path) -> Path:
    """A folder for what is only needed for now: this one, or for one in a mirror a folder beside it, on the same disk.

    Nothing in it is uploaded.
    """
    mirror = _of(folder)[0]
    return folder if mirror is None else mirror.root.parent


class Mirror:
    """One URL and its copy. Files are named by their path below it; "" is the file of a URL that is one.

    Args:
        url: of a file or folder.
        root: the local path.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url.rstrip("/"), root
        self._known: dict[str, str] | None = None
        """What lies at the URL: name -> what tells its state."""
        self._notes = root.with_name(f"{root.name}{NOTES}")

    def refresh(self) -> None:
        """Look again what lies at the URL, and fetch what is not fetched one by one."""
        before = self.noted()
        known = self._listed()
        # What was uploaded since, beside this, is not in the listing.
        since = {name: noted["there"] for name, noted in self.noted().items() if noted != before.get(name)}
        self._known = known | since
        for name, noted in before.items():
            # What is not as it was noted was written here since, and is not uploaded yet.
            if name not in self._known and _state_here(self.root / name) == noted["here"]:
                (self.root / name).unlink(missing_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self.fetch, [name for name in known if not _LAZY.fullmatch(name)]))

    def listing(self) -> dict[str, str]:
        if self._known is None:
            self._known = self._listed()
        return self._known

    def fetch(self, name: str) -> None:
        file, state, noted = self.root / name, self.listing()[name], self._noted(name)
        _used[file] = time.time_ns()
        if noted is None or noted["there"] != state or noted["here"] != _state_here(file):
            with self._at(name, "read") as (fs, place):
                with replacing(file, shared=True) as partial:
                    fs.get_file(place, str(partial))
                    # Another process that shares the cache may replace or remove it at once.
                    here = _state_here(partial)
                self._note(name, here, state)
            if _LAZY.fullmatch(name):
                _make_room(keep=file)

    def upload(self, name: str) -> None:
        here = _state_here(self.root / name)
        if here is None or here == (self._noted(name) or {}).get("here"):
            return
        with self._at(name, "written to") as (fs, place):
            fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(self.root / name), place)
            fs.invalidate_cache()
            info = fs.info(place)
            if info["size"] != here[1]:
                raise OSError(f"{info['size']} bytes of {here[1]} have arrived")
            self._note(name, here, state_there(fs, place, info))
        if _LAZY.fullmatch(name):
            _make_room()

    def remove(self, name: str) -> None:
        with self._at(name, "written to") as (fs, place):
            fs.invalidate_cache()
            found = fs.find(place, withdirs=True, detail=True) if fs.exists(place) else {}
            # The name means itself: to `fs.rm` a * or [ is a pattern. What is in a folder comes before it.
            for path in sorted((path for path in found if _is_below(path, place)), reverse=True):
                if found[path].get("type") != "directory":
                    fs.rm_file(path)
                else:
                    with suppress(OSError, NotImplementedError):  # object stores have no folders
                        fs.rmdir(path)
        for known in {*self.noted(), *(self._known or ())}:
            if _is_below(known, name):
                (self._known or {}).pop(known, None)
                self._note_file(known).unlink(missing_ok=True)

    def _listed(self) -> dict[str, str]:
        with self._at("", "read") as (fs, place):
            fs.invalidate_cache()
            found = fs.find(place, detail=True)
            names = {path[len(place) :].lstrip("/"): path for path in found if _is_below(path, place)}
            # Names must not lead out of the folder.
            names = {name: path for name, path in names.items() if not {"..", "."} & set(re.split(r"[/\\\\]", name))}
            with ThreadPoolExecutor(_THREADS) as pool:
                states = pool.map(lambda path: state_there(fs, path, found[path]), names.values())
                return dict(zip(names, states, strict=True))

    @contextmanager
    def _at(self, name: str, what: str) -> Iterator[tuple[Any, str]]:
        """The file system, and the place of a file there. Every file system of fsspec raises errors of its own."""
        fix = f"Check the address, your credentials, and the room in {cache_folder()} (${CACHE}, ${CACHE_GB})."
        with as_tsae_error(f"cannot be {what}", self.url, f"{fix} The same command then resumes."):
            import fsspec

            fs, place = fsspec.core.url_to_fs(self.url)
            yield fs, f"{place.rstrip('/')}/{name}".rstrip("/")

    def _note(self, name: str, here: list[int] | None, there: str) -> None:
        with replacing(self._note_file(name), shared=True) as partial:
            partial.write_text(json.dumps({"there": there, "here": here}), encoding="utf-8")
        if self._known is not None:
            self._known[name] = there

    def noted(self) -> dict[str, Any]:
        """Name -> the file's state there and here."""
        names = [unquote(file.name.removesuffix(".json")) for file in self._notes.glob("*.json")]
        return {name: noted for name in names if (noted := self._noted(name)) is not None}

    def _noted(self, name: str) -> Any:
        with suppress(OSError, ValueError):
            return parse_json(self._note_file(name).read_text(encoding="utf-8"))

    def _note_file(self, name: str) -> Path:
        return self._notes / f"{quote(name, safe='')}.json"


def _of(path: str | Path) -> tuple[Mirror | None, str]:
    """The mirror in which a path lies, and its name there."""
    path = Path(path)
    for root in (path, *path.parents) if _mirrors else ():
        if root in _mirrors:
            return _mirrors[root], "" if root == path else path.relative_to(root).as_posix()
    return None, ""


def _is_below(name: str, folder: str) -> bool:
    """Whether a name is that of a file, or of a file in a folder."""
    return name == folder or name.startswith(f"{folder}/" if folder else "")


def _state_here(file: Path) -> list[int] | None:
    with suppress(OSError):
        found = file.stat()
        return [found.st_ino, found.st_size, found.st_mtime_ns]
    return None


def state_there(fs: Any, place: str, info: dict[str, Any]) -> str:
    """A text that changes when the file changes: its size, and its version or time.

    Args:
        fs: the file system.
        place: of the file.
        info: what a listing says of it. Where that is too little, as over HTTP, the file itself is asked about.

    Returns:
        of a file of which nothing is said: a text that no other is equal to, so that no copy passes for current.
    """

    def told(info: dict[str, Any]) -> str | None:
        found = (f"{info.get('size')} {info[name]}" for name in _STATES if info.get(name) not in (None, ""))
        return next(found, None)

    found = told(info)
    if found is None:
        with suppress(Exception):  # of a file that can be read, but not be asked about
            found = told(fs.info(place))
    return found or f"unknown {uuid4().hex}"


def _make_room(keep: Path | None = None) -> None:
    """Remove the least recently used files that can be fetched again, of all mirrors, but for the one to keep."""
    limit, held = _cache_limit() * 1e9, 0
    with _lock:
        files = []
        for notes in cache_folder().glob(f"*/*{NOTES}"):
            mirror = Mirror("", notes.with_name(notes.name.removesuffix(NOTES)))
            for name, noted in mirror.noted().items():
                file = mirror.root / name
                if _LAZY.fullmatch(name) and _state_here(file) == noted["here"]:
                    _, size, written = noted["here"]
                    files.append((file == keep, _used.get(file, written), size, file))
        for kept, _, size, file in sorted(files, reverse=True):
            held += size
            if held > limit and not kept:
                file.unlink(missing_ok=True)


def _cache_limit() -> float:
    """Gigabytes.

    Raises:
        TsaeError: where the variable holds no such number.
    """
    text = os.environ.get(CACHE_GB, "").strip()
    try:
        found = float(text or 100)
    except ValueError:
        found = -1
    fix = "Set it to a number such as 50, or unset it for 100."
    refuse(f"${CACHE_GB}", (not found >= 0, f"is {text!r}, expected gigabytes, 0 or more", fix))
    return found


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE, "") or Path.home() / ".cache" / "tsae").expanduser().absolute()
