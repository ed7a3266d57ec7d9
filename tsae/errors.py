"""The one error class for what a user can put right."""

from __future__ import annotations

from pathlib import Path


class TsaeError(Exception):
    """Something a user can put right: said in one paragraph, without a traceback on the command line.

    Args:
        what: what was found, and what was expected instead.
        where: the file, folder or argument in which it was found.
        fix: what to do about it.
    """

    def __init__(self, what: str, *, where: str | Path | None = None, fix: str | None = None) -> None:
        self.what = what.strip()
        self.where = None if where is None else str(where)
        self.fix = None if fix is None else fix.strip()
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        parts[0] = parts[0].rstrip(".") + "."
        if self.fix:
            parts.append(self.fix.rstrip(".") + ".")
        return " ".join(parts)


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust, such as tokenizers, met what it did not expect. Python sees no `Exception`."""
    return type(error).__name__ == "PanicException"
