"""Which command made an output: a hidden file beside it, so that it can be made again.

The command of ``out/features`` is in ``out/.features.command.json``. The folder in which the command was given is
kept relative to the output, so that a tree of folders can be moved as a whole. Passwords and keys are not written.

Such a file may come from a stranger, with the folder that it lies in: `MadeBy.doubt` says what must not be run unseen.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from tsae.base.files import reading, write_json
from tsae.base.provenance import version_of
from tsae.base.seal import read_sealed, with_checksum
from tsae.errors import TsaeError, public

_COMMANDS = (
    "run", "watch", "demo", "rollouts", "drift", "capture", "store", "train", "export", "encode", "diff", "attribute",
    "causal", "reinforcement", "influence", "report", "reformulate", "credit", "explain", "claims",
)  # fmt: skip
"""Those that write artefacts."""
_FORGET = "Remove it: the command that made the output is then not known any more."
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps):[0-9]+")
_DOUBTFUL = ("--trust", "--log-to", "--training.log-to", "--executor", "--slurm", "--ray")


@dataclass(frozen=True)
class MadeBy:
    """A command that made an output."""

    words: tuple[str, ...]
    """Without "tsae"."""
    where: Path
    """Its working folder."""

    @property
    def doubt(self) -> str:
        """Why the command must be looked at before it is run; empty where it only computes."""
        for word in self.words:
            value = word.partition("=")[2] if word.startswith("--") else word
            if "***" in word:
                return f"has a part that was not written down, because it is secret ({word})"
            if "://" in word:
                return f"calls an address ({value})"
            # Whatever a colon stands in may name a module.
            if ":" in value and not value.startswith("tsae.") and not _DEVICE.fullmatch(value):
                return f"runs code of its own ({value})"
            if word.replace("_", "-").startswith(_DOUBTFUL):  # either is understood
                return f"has the option {word}"
        if sum(word.partition("=")[0] == "--to" for word in self.words) > 1:
            return "names more than one output"
        return ""

    @property
    def runnable(self) -> list[str]:
        """Its words without what makes other files than its output, opens a browser, or waits for more to come."""
        found: list[str] = []
        skipping = False
        for word in self.words:
            name = word.partition("=")[0]
            if name in ("--json", "--markdown", "--open"):
                skipping = name != "--open" and "=" not in word
            elif not skipping:
                found.append(word)
            else:
                skipping = False
        if self.words[:1] == ("watch",) and "--once" not in found:
            found.append("--once")
        return found

    def __str__(self) -> str:
        text = shlex.join(["tsae", *self.words])
        here = self.where.resolve() == Path.cwd()
        return text if here else f"(cd {shlex.quote(os.path.relpath(self.where))} && {text})"

    @property
    def outputs(self) -> list[Path]:
        """The paths that the command writes. `tsae claims RUN` has no --to: it writes claims.json into RUN."""
        if self.words[:1] == ("claims",):
            return [self.where / word / "claims.json" for word in self.words[1:2]]
        return self.values("--to")

    def values(self, option: str) -> list[Path]:
        """The paths that an option names."""
        found: list[Path] = []
        taking = False
        for word in self.words:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                taking = name.replace("_", "-") == option
                word = value if equals else ""
            if taking and word:
                found.append(self.where / word)
        return found


_under_way: ContextVar[tuple[Path, tuple[str, ...]] | None] = ContextVar("_under_way", default=None)
"""Of the running command: its output, and its words."""


@contextmanager
def under_way(output: Path, words: Sequence[str]) -> Iterator[None]:
    """Remember which command writes an output while the block runs. `record_early` writes it down.

    Raises:
        TsaeError: where a folder stands in the place of its record.
    """
    _need_no_folder(command_file(Path(os.path.abspath(output))))
    token = _under_way.set((output, tuple(words)))
    try:
        yield
    finally:
        _under_way.reset(token)


def record_early(output: Path) -> None:
    """Write down the running command just before its output takes its place.

    After a kill the same command may then replace the output, because it is known to have written it.
    """
    command = _under_way.get()
    if command is not None and command[0] == output:
        record_command(*command)


def record_command(output: Path, words: Sequence[str]) -> None:
    """Write down the command that made a file or folder. Where no further file can be written, it goes without."""
    output = Path(os.path.abspath(output))
    file, here = command_file(output), Path.cwd()
    given = list(words)
    if not MadeBy(tuple(given), here).outputs:
        given += ["--to", os.path.relpath(output, here)]
    content = {
        "command": public(given),
        "from": os.path.relpath(here, output.parent),
        "output": output.name,
        "tsae": version_of("tsae"),
    }
    with suppress(OSError):  # the output is complete, and does not fail for this
        write_json(file, with_checksum(content))


def made_by(output: Path) -> MadeBy | None:
    """The command that made a file or folder; None where it is not known: made by Python code, or moved since.

    Raises:
        TsaeError: where the record of it is damaged, or holds no command that writes this output.
    """
    output = Path(os.path.abspath(output))
    file = command_file(output)
    _need_no_folder(file)
    if not file.is_file():
        return None
    found = read_sealed(file, _FORGET)
    with reading(file, _FORGET):
        words, where = tuple(map(str, found["command"])), Path(os.path.normpath(output.parent / found["from"]))
        if found["output"] != output.name:
            raise TsaeError(f"is the command of {found['output']}", where=file, fix=_FORGET)
    command = MadeBy(words, where)
    named = {Path(os.path.abspath(path)) for path in command.outputs}
    if words[:1] not in [(name,) for name in _COMMANDS] or not named:
        raise TsaeError(f"is no command that writes {output.name} ({shlex.join(words)})", where=file, fix=_FORGET)
    return command if named == {output} else None


def command_file(output: Path) -> Path:
    """Where the command of an output is written down."""
    return output.with_name(f".{output.name}.command.json")


def _need_no_folder(file: Path) -> None:
    if file.is_dir():
        raise TsaeError("is a folder, expected the record of a command", where=file, fix=_FORGET)
