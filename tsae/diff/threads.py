"""Run independent pieces of a diff in threads: numpy releases the interpreter's lock while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

from threadpoolctl import threadpool_limits

from tsae.base.memory import give_back

P = ParamSpec("P")
T = TypeVar("T")


def one_blas_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Let the function compute each matrix product on the calling thread alone.

    Draws are thousands of small products. If BLAS spreads each over cores that other programs use, every product waits
    for the slowest core: the demo's diff took 54 s instead of 7 s on a busy machine.
    """

    @wraps(function)
    def limited(*args: P.args, **keys: P.kwargs) -> T:
        with threadpool_limits(1, user_api="blas"):
            return function(*args, **keys)

    return limited


def in_threads(jobs: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """Yield the jobs' results in order. An error of a job is raised in its place, and jobs that wait are cancelled."""
    if threads == 1:
        yield from (job() for job in jobs)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
                give_back()
        finally:
            for future in futures:
                future.cancel()
