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
import math
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

from tsae.base.files import as_path, as_tsae_error, partial_name, write_json, writing
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, first_line, without_secrets

NOTES = ".remote"
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
        root = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / _name(url)
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


def published(*paths: Path) -> None:
    """Upload files, or what is new in folders, in the order given; nothing for paths outside of mirrors.

    Raises:
        TsaeError: where one cannot be written.
    """
    for path in paths:
        if (mirror := _of(path)) is not None:
            for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
                if not file.name.endswith(".tmp"):
                    mirror.upload(file)


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
        self.notes = root.with_name(f"{root.name}{NOTES}")

    def url_of(self, path: Path) -> str:
        name = self._name(path)
        return f"{self.url}/{name}" if name else self.url

    def refresh(self) -> None:
        """Look again what lies at the URL, and fetch what is not fetched one by one."""
        before = self.noted()
        known = self._listed()
        # What was uploaded since, beside this, is not in the listing.
        since = {name: noted["there"] for name, noted in self.noted().items() if noted != before.get(name)}
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
        if here is None or here == (self._noted(name) or {}).get("here"):
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
                self._known = {known: state for known, state in self._known.items() if not _is_below(known, name)}
            for known in self.noted():
                if _is_below(known, name):
                    self._note_file(known).unlink(missing_ok=True)

    def _fetch(self, name: str) -> None:
        file = self.root / name if name else self.root
        state, known = self._listing()[name], self._noted(name)
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
        fix = "Check the address, and install what fsspec needs for it, such as s3fs."
        with as_tsae_error("cannot be reached", self.url, fix):
            import fsspec

            fs, path = fsspec.core.url_to_fs(self.url)
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
                fix = f"Make room, or set {CACHE} to a larger disk; {CACHE_GB} limits what is kept there."
                raise TsaeError(f"is full ({error.strerror})", where=cache_folder(), fix=fix) from error
            fix = "Check the address, and that your credentials are valid there. The same command then resumes."
            raise TsaeError(f"cannot be {what} ({first_line(error)})", where=self.url, fix=fix) from error

    def _name(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def _note(self, name: str, here: list[int], state: str) -> None:
        with _lock, writing(self.notes, f"Make room there, or set {CACHE} to another folder."):
            if self._known is not None:
                self._known[name] = state
            file = self._note_file(name)
            # A name of its own: another process may write the same note.
            os.replace(write_json(f"{file}.{uuid4().hex}", {"there": state, "here": here}), file)

    def noted(self) -> dict[str, Any]:
        """Path below the URL -> its state there and here."""
        names = [unquote(file.name.removesuffix(".json")) for file in self.notes.glob("*.json")]
        return {name: noted for name in names if (noted := self._noted(name)) is not None}

    def _noted(self, name: str) -> Any:
        with suppress(OSError, ValueError):
            return parse_json(self._note_file(name).read_text(encoding="utf-8"))

    def _note_file(self, name: str) -> Path:
        return self.notes / f"{quote(name, safe='')}.json"

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
            for notes in cache_folder().glob(f"*/*{NOTES}"):
                root = notes.with_name(notes.name.removesuffix(NOTES))
                for name, noted in Mirror("", root).noted().items():
                    file = root / name if name else root
                    if not _LAZY.fullmatch(name) or file == keep:
                        continue
                    if (found := self._state_here(file)) is not None and found == noted["here"]:
                        files.append((_used.get(file, found[2]), found[1], file))
            held = sum(size for _, size, _ in files) + ((self._state_here(keep) or [0, 0])[1] if keep else 0)
            for _, size, file in sorted(files):
                if held <= limit:
                    break
                file.unlink(missing_ok=True)
                held -= size


def _is_below(name: str, folder: str) -> bool:
    """Whether a name is that of a file, or of a file in a folder."""
    return name == folder or name.startswith(f"{folder}/" if folder else "")


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


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE, "") or Path.home() / ".cache" / "tsae").expanduser().absolute()


def _of(path: Path) -> Mirror | None:
    if not _mirrors:
        return None
    path = Path(path)
    return next((_mirrors[parent] for parent in (path, *path.parents) if parent in _mirrors), None)
