"""Independent pieces of a diff in threads: numpy computes, copies and draws without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(jobs: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """What the jobs give, in their order; what one raises is raised in its place, and those not begun are dropped."""
    if threads == 1:
        yield from (job() for job in jobs)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
