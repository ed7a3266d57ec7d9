"""Windows and macOS: nothing on the main path calls what only POSIX, or only Linux, has."""

from __future__ import annotations

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from support.refusals import refuses
from tsae.base.files import append_line, flush_to_disk, read_at
from tsae.features.sparse_matrices import StoredColumns, StoredFile, write_columns

ROOT = Path(__file__).parents[2]
_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "msvcrt", "winreg"}
_OF_OS = {
    *("preadv", "pread", "pwrite", "pwritev", "readv", "writev", "sendfile", "posix_fadvise", "fork", "forkpty"),
    *("getuid", "geteuid", "getgid", "setsid", "setpgid", "killpg", "getpgid", "wait3", "nice", "umask", "chown"),
    *("mkfifo", "mknod", "statvfs", "uname", "sysconf", "sched_getaffinity", "getloadavg", "rename", "symlink"),
    *("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "fsync", "fdatasync", "sync", "link", "open"),
}
_OF_SIGNAL = {"SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGSTOP", "alarm", "setitimer", "pthread_kill"}
_ALLOWED = {
    "tsae/base/files.py": ["os.fsync", "os.link", "os.open", "os.preadv"],  # each with what Windows has instead
    "tsae/cli.py": ["os.open"],  # os.devnull
    "tsae/features/sparse_matrices.py": ["os.open"],  # binary
    "tsae/rollouts/importing.py": ["os.sched_getaffinity"],  # where there is one
    "tsae/watching.py": ["os.link"],  # else a copy
    "tsae/activations/vllm_reader.py": ["import fcntl"],  # vLLM runs on Linux; refused elsewhere
}


def posix_alone(source: str) -> list[str]:
    """What a module names that other systems do not have, or have in another way."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= {f"import {name}" for name in names if name in _MODULES}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            forbidden = {"os": _OF_OS, "signal": _OF_SIGNAL}.get(node.value.id, set())
            found |= {f"{node.value.id}.{node.attr}"} if node.attr in forbidden else set()
    return sorted(found)


def test_nothing_on_the_main_path_is_of_one_system_alone() -> None:
    files = sorted((ROOT / "tsae").rglob("*.py"))
    found = {file.relative_to(ROOT).as_posix(): posix_alone(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in found.items() if names} == _ALLOWED


def test_such_a_call_would_be_seen() -> None:
    bad = "import fcntl\nimport os, signal\nos.getuid()\nos.kill(1, signal.SIGKILL)\nos.replace(a, b)"
    assert posix_alone(bad) == ["import fcntl", "os.getuid", "signal.SIGKILL"]


def test_no_file_has_a_name_that_windows_refuses() -> None:
    """Nor are two told apart by the case of a letter alone."""
    names = [path for folder in ("tsae", "tests", "docs", "notebooks", "data") for path in (ROOT / folder).rglob("*")]
    shown = [path.relative_to(ROOT).as_posix() for path in names if "__pycache__" not in path.parts]
    assert not [name for name in shown if set(name) & set('<>:"|?*\\') or name.endswith((" ", "."))]
    assert len({name.lower() for name in shown}) == len(shown)


def test_files_are_read_and_written_in_place_without_positional_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: many threads share one position of the file."""
    for name in ("preadv", "pread", "pwrite"):
        monkeypatch.delattr(os, name)
    codes = sp.random_array((200, 50), density=0.1, rng=np.random.default_rng(0), dtype=np.float32).tocsr()
    write_columns(tmp_path / "columns.h5", "columns", codes, np.bincount(codes.indices, minlength=50))
    columns = StoredColumns(StoredFile(tmp_path / "columns.h5"), "columns", 200)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: columns[:, [i % 50]].toarray(), range(400)))
    assert all((column == codes[:, [i % 50]].toarray()).all() for i, column in enumerate(found))


def test_a_short_file_ends_a_read_and_a_flush_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    file = tmp_path / "a"
    file.write_bytes(b"abc\r\n")
    with file.open("rb") as stream:
        view = memoryview(bytearray(9))
        assert (read_at(stream.fileno(), view, 1), bytes(view[:4])) == (4, b"bc\r\n")
    flush_to_disk(file)
    flush_to_disk(tmp_path)
    flush_to_disk(tmp_path / "missing")


def test_lines_are_appended_where_links_cannot_be_refused_by_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_NOFOLLOW")
    append_line(tmp_path / "lines", "one", "")
    append_line(tmp_path / "lines", "two", "")
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
    (tmp_path / "link").symlink_to(tmp_path / "lines")
    refuses("is a link", append_line, tmp_path / "link", "three", "")
