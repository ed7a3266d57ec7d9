"""The one error class for what a user can put right, and what no message and no file of ours may hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

_HIDDEN = "***"
_IN_URLS = (
    # user:password@ before the host, also where Path has made one slash of two. A password may hold @, / and ': all
    # up to the word's last @ is hidden then. What stands after a port is a path.
    re.compile(
        r"(\b[a-z][a-z0-9+.-]+:/{1,2})"
        r"(?:[^/\s@:'\"\[]*:(?!\d{1,5}(?:[/?#'\"\s]|$))[^\s\"]{1,1000}|[^/\s'\"]+)(?=@)"
    ),
    re.compile(
        r"([?&;](?:[\w.-]*(?:token|key|secret|passw(?:or)?d|passphrase|signature|sig|credential|auth|jwt)[\w.-]*"
        r"|(?:[\w.-]*[_.-])?(?:pass|pwd?))=)[^&;\s'\"]+",
        re.I,
    ),
)
_BY_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[a-z]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|AKIA[0-9A-Z]{16})\b"
)
_NAMES = re.compile(
    # A file or folder with a key in it, such as AWS_WEB_IDENTITY_TOKEN_FILE, is not a secret.
    r"^(?!.*_(?:FILE|PATH|DIR)$).*(?:(?:^|_)(?:TOKEN|SECRET|PASSWORD)(?:_|$)|(?:API|ACCESS|SERVER|ACCOUNT)_?KEY)",
    re.I,
)
_SHORTEST = 8  # characters; a shorter value may be an everyday word


def without_secrets(text: str, *known: str) -> str:
    """A text with passwords and keys as ***.

    These are what stands before the host of a URL, values of a URL's query that are named like a key, what has the
    shape of a key of Hugging Face, OpenAI, GitHub or AWS, and the values of environment variables that are named like
    one, such as HF_TOKEN, TSAE_SERVER_KEY and AWS_SECRET_ACCESS_KEY.

    Args:
        text: with or without any.
        known: further secrets.
    """
    for pattern in _IN_URLS:
        text = pattern.sub(rf"\1{_HIDDEN}", text)
    text = _BY_SHAPE.sub(_HIDDEN, text)
    for name, value in [*os.environ.items(), *(("TOKEN", value) for value in known)]:
        if len(value := value.strip()) >= _SHORTEST and value in text and _NAMES.search(name):
            text = text.replace(value, _HIDDEN)
    return text


def public(content: Any) -> Any:
    """JSON content, all of whose texts are `without_secrets`."""
    if isinstance(content, dict):
        return {without_secrets(str(name)): public(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [public(value) for value in content]
    return without_secrets(content) if isinstance(content, str) else content


class TsaeError(Exception):
    """Something a user can put right: printed as one paragraph, without a traceback on the command line.

    Args:
        what: what was found, and what was expected instead.
        where: the file, folder or argument in which it was found.
        fix: what to do about it.

    Passwords and keys in any of them are hidden (`without_secrets`).
    """

    def __init__(self, what: str, *, where: str | Path | None = None, fix: str | None = None) -> None:
        self.what = without_secrets(what.strip())
        self.where = None if where is None else without_secrets(str(where))
        self.fix = None if fix is None else without_secrets(fix.strip())
        super().__init__(str(self))

    def __str__(self) -> str:
        # Names of files may hold line breaks, which would pass for lines of ours.
        where = (self.where or "").replace("\n", "‹U+000A›")
        parts = [f"{where}: {self.what}" if where else self.what]
        parts[0] = parts[0].rstrip(".") + "."
        if self.fix:
            parts.append(self.fix.rstrip(".") + ".")
        return " ".join(parts)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next if it ends in a colon; or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:300]


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust, such as tokenizers, met what it did not expect. Python sees no `Exception`."""
    return type(error).__name__ == "PanicException"


def refuse(where: str | Path | None, *rules: tuple[object, str, str | None]) -> None:
    """Raise a TsaeError for the first broken one of some rules.

    Args:
        where: the file, folder or argument that the rules are about.
        rules: of each, whether it is broken, what was found, and what to do about it.
    """
    for broken, what, fix in rules:
        if broken:
            raise TsaeError(what, where=where, fix=fix)


@contextmanager
def needing(package: str, what: str, where: str | Path | None = None) -> Iterator[None]:
    """Import a package that not every user has.

    Args:
        package: as pip calls it.
        what: needs it.
        where: in which file, folder or option.

    Raises:
        TsaeError: where it cannot be imported; names the versions that the project's extras ask for.
    """
    try:
        yield
    except ImportError as error:
        try:
            known = [line.partition(";")[0].strip() for line in requires("tsae") or ()]
        except PackageNotFoundError:
            known = []
        wanted = next((line for line in known if re.match(rf"{re.escape(package)}\b(?!-)", line)), package)
        found = f"{what} needs {package}, which is not installed ({error})"
        raise TsaeError(found, where=where, fix=f"pip install '{wanted}'") from error
