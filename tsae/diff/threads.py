"""Independent pieces of a diff in threads: numpy computes, copies and draws without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def one_blas_thread(function: Callable[P, T]) -> Callable[P, T]:
    """The function with matrix products on the thread that asks for them.

    Draws are thousands of small products. Shared out over cores that other programs use too, each waits for the last:
    the demo's diff took 54 s in place of 7 s on a busy machine.
    """

    @wraps(function)
    def limited(*args: P.args, **keys: P.kwargs) -> T:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1, user_api="blas"):
            return function(*args, **keys)

    return limited


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
