"""What commands share: loading series and rollouts, printing what was written, and results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import tsae
from tsae.base.artefact import version_of
from tsae.base.files import write_json
from tsae.base.mirror import shown
from tsae.errors import TsaeError, refuse
from tsae.report.text import for_json
from tsae.rollouts.config import EndpointConfig

Server = TypeVar("Server", bound=EndpointConfig)


def load_series(*sources: str | Path) -> tsae.CheckpointSeries:
    """Load a series, and print its notes to standard error."""
    series = tsae.CheckpointSeries.load(*sources)
    for note in series.notes:
        print(f"note: {note}", file=sys.stderr)
    return series


def chosen_readers(series: tsae.CheckpointSeries, ids: Sequence[str]) -> tsae.CheckpointSeries:
    """The base and the named checkpoints; by default the last step of every run."""
    return series.select(ids) if ids else series.final()


def own_rollouts(path: Path, policy: str) -> tsae.Rollouts:
    """Rollouts that a policy sampled.

    Raises:
        TsaeError: where there are none.
    """
    rollouts = tsae.Rollouts.read(path)
    what = f"holds nothing that {policy} sampled; policies are {', '.join(rollouts.policies)}"
    fix = "Give rollouts of that checkpoint, or another --checkpoint."
    refuse(path, (policy not in rollouts.policies, what, fix))
    return rollouts.where(policy=policy)


def with_address(server: Server) -> Server | None:
    """A server, if its address was given.

    Raises:
        TsaeError: where other options of it were given, and no address.
    """
    if server.url or server == type(server)():
        return server if server.url else None
    raise TsaeError("is missing", where="--server.url", fix="Give the server's address.")


def print_part(part: str, missing: int, what: str) -> None:
    """Print that a part of a command is done."""
    rest = f"other parts have {missing} {what}" if missing else "so are all others"
    print(f"part {part} is done; {rest}. The same command without --part puts them together.")


def say_wrote(path: Path, what: object | None = None) -> None:
    """Print what was written."""
    print(f"wrote {shown(path)}" + (f": {what}" if what is not None else ""))


@contextmanager
def as_json(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Do what `--json` asks for: yields a function that writes the results of a command.

    Writes a whole file or none. For ``-`` the results go to standard output and the command's text to standard error,
    so that a program reads JSON alone. Without a path nothing is written.
    """
    out = sys.stdout

    def write(content: Mapping[str, Any]) -> None:
        if path == Path("-"):
            print(json.dumps(for_json(content), indent=2, allow_nan=False), file=out)
        elif path is not None:
            # By this mark a command knows, later, that it may replace the file.
            say_wrote(write_json(path, {"written_by": f"tsae {version_of('tsae')}", **for_json(content)}))

    if path == Path("-"):
        with redirect_stdout(sys.stderr):
            yield write
    else:
        yield write
