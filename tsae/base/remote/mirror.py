"""Mirrors: copies on this machine of files and folders at a URL. They are fetched and uploaded with fsspec.

A stage works on the local copy, whose paths are like any other. Three calls keep both sides together:

- `local(path)` gives the local path of a URL, and fetches what lies there, without the large files that are fetched one
  by one. A path that is none is given back.
- `needed(path)` fetches one file of a mirror, if it is not there or has changed.
- `published(path)` uploads one file of a mirror, or all that is new in a folder.

Copies lie under $TSAE_CACHE (by default ~/.cache/tsae). Shards that were fetched or uploaded are removed again, the
least recently used first, where they exceed $TSAE_CACHE_GB (by default 100). The one in use is kept.
Whether a copy is still that of the URL is told by what the file system says of the file (`state_there`).

What lies on both sides is kept beside the copy, in NAME.remote.json (`Index`): the state of every file at the URL and
of its copy. Several processes may share a cache. So for every change, a process takes a lock, reads the file again, and
replaces it with a new one.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock

from tsae.base.files import as_path, partial_name, write_json, writing
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, without_secrets

INDEX = ".remote.json"
CACHE = "TSAE_CACHE"
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(//?)(?=[^/])")
_LAZY = re.compile(r"(.*/)?[^/]+/\d{5}\.h5|(.*/)?pieces/\d{6}\.npz")
"""Files that are fetched when they are needed: shards of a store, pieces of an encoding."""
_THREADS = 8
_lock = threading.RLock()
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
    if (mirror := _of(Path(path))) is not None:
        return mirror.url_of(Path(path))
    return _URL.sub(r"\1://", str(path), count=1)


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
    with _lock:
        root = _cache() / hashlib.sha256(url.encode()).hexdigest()[:16] / _name(url)
        mirror = _mirrors.setdefault(root, Mirror(url, root))
    if fetch:
        mirror.refresh()
    return root


def shown(path: str | Path) -> str:
    """What messages call a path: its URL, if it has one."""
    return str(path) if _of(Path(path)) is None else without_secrets(url_of(path))


def in_words(text: str) -> str:
    """A message that names URLs and not their copies."""
    for root, mirror in _mirrors.items():
        text = text.replace(str(root), without_secrets(mirror.url))
    return text


def refreshed(folder: Path) -> None:
    """Fetch what others have written to a mirror since; nothing for a folder that is none."""
    if (mirror := _of(folder)) is not None:
        mirror.refresh()


def needed(path: Path) -> Path:
    """The same path, once its file is there; it need not be one of a mirror.

    Raises:
        TsaeError: where it cannot be fetched.
    """
    if (mirror := _of(path)) is not None:
        mirror.fetch(path)
    return path


def there(path: Path) -> bool:
    """Whether a file is on this machine, or at the URL."""
    mirror = _of(path)
    return path.is_file() or (mirror is not None and mirror.has(path))


def published(path: Path) -> None:
    """Upload a file, or what is new in a folder; nothing for paths outside of mirrors.

    Raises:
        TsaeError: where it cannot be written.
    """
    mirror = _of(path)
    if mirror is None:
        return
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if not file.name.endswith(".tmp"):
            mirror.upload(file)


class Uploads:
    """Uploads beside the work: one at a time, and few that wait, so that little lies on this disk alone.

    Leaving the block waits for all of them.
    """

    def __enter__(self) -> Uploads:
        self._pool, self._running = ThreadPoolExecutor(1), deque[Future[None]]()
        return self

    def add(self, *paths: Path) -> None:
        """Upload files in the order given. Files that belong to no mirror are left alone.

        Raises:
            TsaeError: where an earlier one could not be written.
        """
        if _of(paths[0]) is None:
            return
        while len(self._running) > 1 or (self._running and self._running[0].done()):
            self._running.popleft().result()
        self._running.append(self._pool.submit(_upload, paths))

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for each in self._running:
                each.result()


def _upload(paths: Iterable[Path]) -> None:
    for path in paths:
        published(path)


def removed(path: Path) -> None:
    """Remove a file or folder, here and at the URL."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if (mirror := _of(path)) is not None:
        mirror.remove(path)


def outside(folder: Path) -> Path:
    """A folder for what is only needed for now: this one, or for one in a mirror a folder beside it, on the same disk.

    Nothing in it is uploaded.
    """
    mirror = _of(folder)
    return folder if mirror is None else mirror.root.parent


class Mirror:
    """One URL and its copy.

    Args:
        url: of a file or folder.
        root: the local path.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url.rstrip("/"), root
        self._known: dict[str, Any] | None = None
        """What lies at the URL: path below it, "" for a file, -> what tells its state."""
        self.index = Index(root)

    def url_of(self, path: Path) -> str:
        name = self._name(path)
        return f"{self.url}/{name}" if name else self.url

    def refresh(self) -> None:
        """Look again what lies at the URL, and fetch what is not fetched one by one."""
        before = self.index.read()
        known = self._listed()
        # What was uploaded since, beside this, is not in the listing.
        since = {name: noted["there"] for name, noted in self.index.noted().items() if noted != before.get(name)}
        self._known = known | since
        wanted = [name for name in self._known if not _LAZY.fullmatch(name)]
        for name, noted in before.items():
            file = self.root / name if name else self.root
            # What is not as it was noted was written here since, and is not uploaded yet.
            if name not in self._known and self._state_here(file) == noted["here"]:
                file.unlink(missing_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._fetch, wanted))

    def has(self, path: Path) -> bool:
        return self._name(path) in self._listing()

    def fetch(self, path: Path) -> None:
        name = self._name(path)
        if name in self._listing():
            self._fetch(name)

    def upload(self, file: Path) -> None:
        name = self._name(file)
        here = self._state_here(file)
        if here is None or here == self.index.noted().get(name, {}).get("here"):
            return
        with self._reached("written to"):
            fs, path = self._opened(name)
            parent = path.rpartition("/")[0]
            fs.makedirs(parent, exist_ok=True)
            fs.put_file(str(file), path)
            fs.invalidate_cache()
            info = fs.info(path)
            if info["size"] != here[1]:
                raise OSError(f"{info['size']} bytes of {here[1]} have arrived")
            self._note(name, here, state_there(fs, path, info))
        if _LAZY.fullmatch(name):
            self._make_room()

    def remove(self, path: Path) -> None:
        name = self._name(path)
        with self._reached("written to"):
            fs, place = self._opened(name)
            fs.invalidate_cache()
            if fs.exists(place):
                _delete(fs, place)
        with _lock:
            if self._known is not None:
                self._known = _without(self._known, name)
            self.index.forget(name)

    def _fetch(self, name: str) -> None:
        file = self.root / name if name else self.root
        state, known = self._listing()[name], self.index.noted().get(name)
        if known is not None and known["there"] == state and self._state_here(file) == known["here"]:
            _used[file] = time.time_ns()
            return
        partial = partial_name(file.with_name(f"{file.name}.{uuid4().hex}"))
        try:
            with self._reached("read"):
                fs, path = self._opened(name)
                file.parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(partial))
                # Another process that shares the cache may replace or remove it at once.
                here = self._state_here(partial)
                os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
        if here is not None:
            self._note(name, here, state)
        if _LAZY.fullmatch(name):
            self._make_room(keep=file)

    def _listing(self) -> dict[str, Any]:
        if self._known is None:
            self._known = self._listed()
        return self._known

    def _listed(self) -> dict[str, Any]:
        with self._reached("read"):
            fs, path = self._opened("")
            fs.invalidate_cache()
            found = fs.find(path, detail=True)
            inside = [place for place in found if place == path or place.startswith(f"{path}/")]
            names = {place[len(path) :].lstrip("/"): place for place in inside}
            # Names must not lead out of the folder.
            names = {name: at for name, at in names.items() if not {"..", "."} & set(re.split(r"[/\\\\]", name))}
            with ThreadPoolExecutor(_THREADS) as pool:
                states = pool.map(lambda place: state_there(fs, place, found[place]), names.values())
                return dict(zip(names, states, strict=True))

    def _opened(self, name: str) -> tuple[Any, str]:
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise TsaeError(
                f"cannot be reached ({error})", where=self.url, fix="Install what fsspec needs for it, such as s3fs."
            ) from error
        path = path.rstrip("/")
        return fs, f"{path}/{name}" if name else path

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        try:
            yield
        except TsaeError:
            raise
        except Exception as error:  # every file system of fsspec raises errors of its own
            if isinstance(error, OSError) and error.errno == 28:
                raise TsaeError(
                    f"is full ({error.strerror})",
                    where=_cache(),
                    fix=f"Make room, or set {CACHE} to a larger disk; {CACHE_GB} limits what is kept there.",
                ) from error
            found = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise TsaeError(
                f"cannot be {what} ({found})",
                where=self.url,
                fix="Check the address, and that your credentials are valid there; the same command then goes on.",
            ) from error

    def _name(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def _note(self, name: str, here: list[int], state: str) -> None:
        with _lock:
            if self._known is not None:
                self._known[name] = state
            self.index.note(name, state, here)

    def _state_here(self, file: Path) -> list[int] | None:
        try:
            found = file.stat()
        except OSError:
            return None
        return [found.st_ino, found.st_size, found.st_mtime_ns]

    def _make_room(self, keep: Path | None = None) -> None:
        """Remove the least recently used files that can be fetched again, of all mirrors."""
        limit = _cache_limit() * 1e9
        with _lock:
            files = []
            for index in _cache().glob(f"*/*{INDEX}"):
                root = index.with_name(index.name.removesuffix(INDEX))
                mirror = _mirrors.get(root, Mirror("", root))
                for name, noted in mirror.index.noted().items():
                    file = root / name if name else root
                    if not _LAZY.fullmatch(name) or file == keep:
                        continue
                    if (found := mirror._state_here(file)) is not None and found == noted["here"]:
                        files.append((_used.get(file, found[2]), found[1], file))
            held = sum(size for _, size, _ in files) + ((self._state_here(keep) or [0, 0])[1] if keep else 0)
            for _, size, file in sorted(files):
                if held <= limit:
                    break
                file.unlink(missing_ok=True)
                held -= size


class Index:
    """The index of one mirror.

    Args:
        root: the copy of the URL.
    """

    def __init__(self, root: Path) -> None:
        self._file = root.with_name(f"{root.name}{INDEX}")
        self._noted: dict[str, Any] | None = None

    def noted(self) -> dict[str, Any]:
        """Path below the URL -> its state there and here, as this process knows it. It is not changed in place."""
        return self.read() if self._noted is None else self._noted

    def read(self) -> dict[str, Any]:
        """The same, with what other processes have noted since."""
        try:
            found = parse_json(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self._noted = found if isinstance(found, dict) else {}
        return self._noted

    def note(self, name: str, there: str, here: list[int]) -> None:
        """Note the state of a file.

        Raises:
            TsaeError: where the index cannot be written.
        """
        self._change(lambda noted: noted | {name: {"there": there, "here": here}})

    def forget(self, name: str) -> None:
        """Forget a file, or a folder and all files in it.

        Raises:
            TsaeError: where the index cannot be written.
        """
        self._change(lambda noted: _without(noted, name))

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with _lock, writing(self._file, "Make room there, or set TSAE_CACHE to another folder."), self._alone():
            before = self.read()
            self._noted = change(before)
            if self._noted != before:
                # A name of its own, for where there are no locks.
                own = write_json(self._file.with_name(f"{self._file.name}.{uuid4().hex}"), self._noted)
                os.replace(own, self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file.with_name(f".{self._file.name}.lock"))
        # Without locks, as on some file systems, a note may be lost. Its file is then fetched or uploaded once more.
        with suppress(OSError):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _without(names: dict[str, Any], gone: str) -> dict[str, Any]:
    """The names that are left without a file, or without a folder and all files in it."""
    inside = f"{gone}/" if gone else ""
    return {name: state for name, state in names.items() if name != gone and not name.startswith(inside)}


_VERSIONS = ("ETag", "etag", "blob_id", "sha", "Content-MD5", "Digest")
_TIMES = ("mtime", "created", "modify", "modified", "last_modified", "Last-Modified", "LastModified", "updated")


def state_there(fs: Any, place: str, info: dict[str, Any]) -> str:
    """A text that changes when the file changes: its version, or its size and time.

    Args:
        fs: the file system.
        place: of the file.
        info: what a listing says of it. Where that is too little, as over HTTP, the file itself is asked about.

    Returns:
        of a file of which nothing is said: a text that no other is equal to, so that no copy passes for current.
    """
    found = _told(info)
    if found is None:
        with suppress(Exception):  # of a file that can be read, but not be asked about
            found = _told(fs.info(place))
    return found or f"unknown {uuid4().hex}"


def _delete(fs: Any, place: str) -> None:
    """Delete a file, or a folder with all that is in it. The name means itself: to `fs.rm` a * or [ is a pattern."""
    found = fs.find(place, withdirs=True, detail=True)
    inside = {name: info for name, info in found.items() if name == place or name.startswith(f"{place}/")}
    for name in sorted(inside, reverse=True):
        if inside[name].get("type") != "directory":
            fs.rm_file(name)
    for folder in (*(name for name in sorted(inside, reverse=True) if inside[name].get("type") == "directory"), place):
        with suppress(OSError, NotImplementedError):  # object stores have no folders
            fs.rmdir(folder)


def _told(info: dict[str, Any]) -> str | None:
    version = next((info[name] for name in _VERSIONS if info.get(name)), None)
    if version is not None:
        return str(version)
    time = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    return None if time is None else f"{info.get('size')} {time}"


CACHE_GB = "TSAE_CACHE_GB"


def _cache_limit() -> float:
    """Gigabytes.

    Raises:
        TsaeError: where the variable holds no such number.
    """
    text = os.environ.get(CACHE_GB, "").strip()
    try:
        found = float(text or 100)
    except ValueError:
        found = math.nan
    if not found >= 0:
        fix = "Set it to a number such as 50, or unset it for 100."
        raise TsaeError(f"is {text!r}, expected gigabytes, 0 or more", where=f"${CACHE_GB}", fix=fix)
    return found


def _cache() -> Path:
    return Path(os.environ.get(CACHE, "") or Path.home() / ".cache" / "tsae").expanduser().absolute()


def _of(path: Path) -> Mirror | None:
    if not _mirrors:
        return None
    path = Path(path)
    return next((_mirrors[parent] for parent in (path, *path.parents) if parent in _mirrors), None)
