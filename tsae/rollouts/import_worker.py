"""A worker process of an import; see `tsae.rollouts.logs.running.workers`."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ColumnNames, ImportConfig
from tsae.rollouts.importing import read_part
from tsae.rollouts.log_detection import FORMATS
from tsae.rollouts.logs.on_disk.parts import Part
from tsae.rollouts.logs.tokens import Tokens

_EVERY = 0.2
"""Seconds between two reports of progress."""


def main() -> None:
    # Other output, such as a verifier's, must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    serve(iter(lines.get, None), say)


def serve(lines: Iterator[str], say: Callable[..., None]) -> None:
    """Read parts of a log.

    Args:
        lines: of JSON: what all parts need, then one for every part.
        say: gets the progress, that a part is done, or what is wrong with it.
    """
    setup = json.loads(next(lines))
    form = next(form for form in FORMATS if form.name == setup["form"])
    config = _config(setup["config"])
    series = CheckpointSeries(tuple(Checkpoint(**found) for found in setup["checkpoints"]))
    tokens = Tokens(series.base, config, setup["pads"])
    for line in lines:
        job = json.loads(line)
        last = time.monotonic()

        def so_far(n_bytes: int, n: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _EVERY:
                last = time.monotonic()
                say(read=n_bytes, trajectories=n)

        try:
            read_part(Part.from_dict(job["part"]), Path(job["folder"]), form, series, tokens, config, so_far)
        except TsaeError as error:
            say(error=[error.what, error.where, error.fix])
        else:
            say(done=True)


def _listen(lines: queue.Queue[str]) -> None:
    """Pass lines on; end at once if the process that writes them is gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(1)


def _config(found: dict[str, Any]) -> ImportConfig:
    """The configuration from JSON, which has no tuples."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return ImportConfig(**{**values, "columns": ColumnNames(**found["columns"])})


if __name__ == "__main__":
    main()
