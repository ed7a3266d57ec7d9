"""Worker processes of an import. Each reads one part of the log after another into folders.

A worker is started fresh, not forked. It gets a line of JSON with what all parts need, then a line for every part. It
answers with lines of JSON: its progress, that a part is done, or what is wrong with it. It loads tsae, and nothing else
of the program that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import Format
from tsae.rollouts.logs.running.journal import Job

PARALLEL_FROM = 1 << 25
"""Bytes of a log. A worker takes seconds to start; a smaller log is read in that time."""
_MOST = 4
MOST = 256
"""Workers that may be asked for; each takes tens of megabytes before it reads anything."""
_PROGRAM = ("-P", "-m", "tsae.rollouts.import_worker")

Say = Callable[[int, int, int], None]
"""Gets a job's number, and the bytes and trajectories that were read of it."""


def default_workers(n_bytes: int) -> int:
    """Number of worker processes for a log of so many bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST) if n_bytes >= PARALLEL_FROM else 1


def setup(form: Format, series: CheckpointSeries, config: ImportConfig, pads: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker needs to know, for JSON."""
    left_out = ("noise", "base")  # of the weights, which are not read
    checkpoints = [{name: value for name, value in asdict(c).items() if name not in left_out} for c in series]
    return {"form": form.name, "config": asdict(config), "checkpoints": checkpoints, "pads": pads}


def read_in_workers(jobs: Iterable[Job], n: int, common: Mapping[str, Any], say: Say) -> Generator[Job]:
    """Jobs in their order, each when it is done.

    Args:
        jobs: what is to be read.
        n: processes.
        common: see `setup`.
        say: is told the progress, from several threads.

    Raises:
        TsaeError: what is wrong with the first part that has an error.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(common)) for _ in range(n)]
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            idle.put(worker)
        pool = ThreadPoolExecutor(n)
        stack.callback(pool.shutdown, cancel_futures=True)
        # They are killed before the pool is shut down, so that no thread waits for an answer.
        for worker in workers:
            stack.callback(worker.kill)

        def read(number: int, job: Job) -> None:
            worker = idle.get()
            try:
                worker.read(number, job, say)
            finally:
                idle.put(worker)

        begun: deque[tuple[Job, Future[None] | None]] = deque()
        waiting = enumerate(jobs)
        while True:
            # Two a worker, so that none waits.
            while len(begun) < 2 * n and (following := next(waiting, None)) is not None:
                begun.append((following[1], None if following[1].done else pool.submit(read, *following)))
            if not begun:
                return
            job, reading = begun.popleft()
            if reading is not None:
                reading.result()
            yield job


class _Worker:
    """One process."""

    def __init__(self, common: Mapping[str, Any]) -> None:
        self._common = common

    def __enter__(self) -> _Worker:
        self._said = tempfile.TemporaryFile()
        # A worker finds modules as this process does: a verifier may lie anywhere.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to this process, which ends its workers.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._write(self._common)
        return self

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, *error: object) -> None:
        self.kill()
        for stream in (self._to, self._from, self._said):
            with suppress(BrokenPipeError):
                stream.close()

    def read(self, number: int, job: Job, say: Say) -> None:
        """Let it read a part.

        Raises:
            TsaeError: what is wrong with the part, or that the process has ended.
        """
        self._write({"part": job.part.as_dict(), "folder": str(job.folder)})
        for line in self._from:
            answer = json.loads(line)
            if "read" in answer:
                say(number, answer["read"], answer["trajectories"])
            elif "error" in answer:
                what, where, fix = answer["error"]
                raise TsaeError(what, where=where, fix=fix)
            else:
                return
        self._ended()

    def _write(self, message: Mapping[str, Any]) -> None:
        try:
            self._to.write(json.dumps(message) + "\n")
            self._to.flush()
        except BrokenPipeError:
            self._ended()

    def _ended(self) -> NoReturn:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        if code > 0 and lines:
            raise RuntimeError("a worker of the import failed:\n" + "\n".join(lines[-40:]))
        what = f"a process that read the log was ended from outside (exit status {code})"
        fix = "If memory ran out, say --workers 1; the import goes on where it stopped."
        raise TsaeError(what, where="--workers", fix=fix)
