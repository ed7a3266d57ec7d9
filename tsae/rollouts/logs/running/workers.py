"""Worker processes of an import: each reads parts of the log, one after another, into folders.

A worker is started anew, not forked, and gets a line of JSON with what all parts need, then one for every part. It
answers with lines of JSON: how far it is, that a part is done, or what is wrong with it. Nothing else goes through its
pipes, and what it loads of the program that started it is tsae alone.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn

from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.log_format import Format
from tsae.rollouts.logs.running.journal import Job

PARALLEL_FROM = 1 << 25
"""Bytes of a log; a worker takes seconds to start, in which a smaller one is read."""
_MOST = 4
_PROGRAM = ("-P", "-m", "tsae.rollouts.import_worker")


def default_workers(n_bytes: int) -> int:
    """Worker processes for a log of so many bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST) if n_bytes >= PARALLEL_FROM else 1


def setup(form: Format, series: CheckpointSeries, config: ImportConfig) -> dict[str, Any]:
    """What a worker needs to know, as JSON has it."""
    left_out = ("noise", "base")  # of the weights, which no one reads
    checkpoints = [{name: value for name, value in asdict(c).items() if name not in left_out} for c in series]
    return {"form": form.name, "config": asdict(config), "checkpoints": checkpoints}


def read_in_workers(
    jobs: Iterable[Job], n: int, common: Mapping[str, Any], say: Callable[[int, int, int], None]
) -> Generator[Job]:
    """Jobs in their order, each when it is done.

    Args:
        jobs: what is to be read.
        n: processes.
        common: see `setup`.
        say: gets a job's number, and the bytes and trajectories that were read of it.

    Raises:
        TsaeError: what is wrong with the first part that has an error.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(common)) for _ in range(n)]
        selector = stack.enter_context(selectors.DefaultSelector())
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        waiting = enumerate(jobs)
        begun: dict[int, Job] = {}
        errors: dict[int, TsaeError] = {}
        ended: set[int] = set()
        following = 0
        while True:
            while following in ended:
                if following in errors:
                    raise errors[following]
                yield begun.pop(following)
                following += 1
            for worker in workers:
                while worker.job is None and not errors and (job := next(waiting, None)) is not None:
                    begun[job[0]] = job[1]
                    if job[1].done:
                        ended.add(job[0])
                    else:
                        worker.give(*job)
            if following in ended:
                continue
            if not begun:
                return
            for key, _ in selector.select():
                for number, answer in key.data.answers():
                    if "read" in answer:
                        say(number, answer["read"], answer["trajectories"])
                        continue
                    ended.add(number)
                    if "error" in answer:
                        what, where, fix = answer["error"]
                        errors[number] = TsaeError(what, where=where, fix=fix)


class _Worker:
    """One process."""

    def __init__(self, common: Mapping[str, Any]) -> None:
        self.job: int | None = None
        self._common = common
        self._rest = b""
        """The beginning of a line that is still to come."""

    def __enter__(self) -> _Worker:
        self._said = tempfile.TemporaryFile()
        # As this process finds modules, so does the worker: a verifier may lie anywhere.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the process that ends its workers.
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout
        self._write(self._common)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        for stream in (self._process.stdin, self.output, self._said):
            with suppress(BrokenPipeError):
                stream.close()

    def give(self, number: int, job: Job) -> None:
        """Give it a part to read."""
        self.job = number
        self._write({"part": job.part.as_dict(), "folder": str(job.folder)})

    def answers(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(the number of its job, what it says), of what it has said by now; after its last word it has no job.

        Raises:
            TsaeError: where the process has ended.
        """
        # Past any buffer: lines that wait in one would not be waited for.
        found = os.read(self.output.fileno(), 1 << 16)
        if not found:
            self._ended()
        *lines, self._rest = (self._rest + found).split(b"\n")
        for line in lines:
            number, answer = self.job, json.loads(line)
            assert number is not None
            if "read" not in answer:
                self.job = None
            yield number, answer

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _ended(self) -> NoReturn:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        if code > 0 and lines:
            raise RuntimeError("a worker of the import failed:\n" + "\n".join(lines[-40:]))
        raise TsaeError(
            f"a process that read the log was ended from outside (exit status {code})",
            where="--workers",
            fix="If memory ran out, say --workers 1; the import goes on where it stopped.",
        )
