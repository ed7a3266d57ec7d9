"""Calls beside the work: all of them run, in order, and what one raises reaches the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from support.stand_in import stand_in_gpu, there
from tsae.base.beside import Beside, ahead, to_cpu


@pytest.mark.parametrize("behind", [0, 2])
def test_calls_run_in_order_and_few_are_unfinished(behind: int) -> None:
    done, most, go = list[int](), 0, threading.Semaphore(behind)

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            assert behind == 0 or go.acquire(timeout=10)
            done.append(number)

        return run

    with Beside(behind) as beside:
        for number in range(6):
            beside.run(call(number))
            most = max(most, number + 1 - len(done))
            if len(done) < number + 1 - (behind and behind - 1):
                go.release()
        for _ in range(6):
            go.release()
    assert done == list(range(6))
    assert most <= behind


fails = Mock(side_effect=ValueError("disk"))


@pytest.mark.parametrize("behind", [0, 1])
def test_what_a_call_raises_reaches_the_caller(behind: int) -> None:
    done = list[int]()
    with pytest.raises(ValueError, match="disk"), Beside(behind) as beside:
        beside.run(fails)
    beside = Beside(behind)
    beside.__enter__()
    with pytest.raises(ValueError, match="disk"):  # noqa: PT012
        for _ in range(5):
            beside.run(fails)
    beside.run(lambda: done.append(1))
    beside.__exit__(KeyError)  # the calls are over before the block is left
    assert done == [1]


def test_reading_ahead_keeps_the_order_and_bounds_what_is_held() -> None:
    begun = list[int]()

    def read(number: int) -> int:
        begun.append(number)
        return number * number

    found = ahead(read, range(7), 2)
    assert [next(found), next(found)] == [0, 1]
    assert len(begun) <= 4
    assert list(found) == [4, 9, 16, 25, 36]
    with pytest.raises(ValueError, match="disk"):
        list(ahead(fails, [0], 2))


def test_a_copy_from_a_gpu_lies_on_the_cpu() -> None:
    with stand_in_gpu():
        tensor = torch.arange(4).to("cuda")
        copy = to_cpu(tensor)()
        assert there(tensor)
        assert not there(copy)
    assert torch.equal(copy, torch.arange(4))
    assert to_cpu(copy)() is copy
