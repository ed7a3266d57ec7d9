"""Batches in memory that is used again: never that of a batch that somebody holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.builders import synthetic_store
from tsae.activations.batches import Windows
from tsae.base.memory import Reused

SITE = "x.site"


def address(x: np.ndarray | torch.Tensor) -> int:
    return int(np.asarray(x).__array_interface__["data"][0])


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    rng = np.random.default_rng(0)
    texts = [rng.standard_normal((30, 64)).astype(np.float32) for _ in range(60)]
    # Some outliers, so that batches are made from what is left.
    for text in texts[::3]:
        text[4] *= 100
    return Windows(synthetic_store(tmp_path_factory.mktemp("reading") / "acts", texts), SITE, partner="earlier")


def test_memory_is_used_again_once_nothing_holds_it() -> None:
    memory = Reused(2)
    x = memory.empty(10, 8, np.float32)
    assert x.shape == (10, 8)
    assert x.dtype == np.float32
    first = address(x)
    assert not np.shares_memory(x, memory.empty(10, 8, np.float32))
    del x
    # Smaller or of another type, it is the same memory.
    again = memory.empty(9, 8, np.uint16)
    assert address(again) == first
    assert again.dtype == np.uint16
    assert again.flags.writeable
    del again
    assert address(memory.empty(10, 8, np.float32)) == first


HOLDERS: dict[str, Callable[[np.ndarray], Any]] = {
    "view": lambda x: x[3:7],
    "row": lambda x: x[3],
    "transpose": lambda x: x.T[2:],
    "tensor": torch.from_numpy,
    "view of a tensor": lambda x: torch.from_numpy(x)[3:4],
    "memoryview": lambda x: x.data[3:4],
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_whatever_shows_memory_holds_it(hold: str) -> None:
    memory = Reused(4)
    x = memory.empty(50, 8, np.float32)
    x[:] = np.arange(400).reshape(50, 8)
    held = HOLDERS[hold](x)
    before, where = held.tolist(), address(x)
    del x
    for _ in range(10):
        other = memory.empty(50, 8, np.float32)
        assert address(other) != where
        other[:] = -1
    assert held.tolist() == before
    del held, other
    assert where in {address(y) for y in [memory.empty(50, 8, np.float32) for _ in range(4)]}


def test_no_more_is_held_than_asked_for() -> None:
    memory = Reused(3)
    kept = [memory.empty(5, 4, np.float32) for _ in range(10)]
    for a, x in enumerate(kept):
        x[:] = a
    assert [x[0, 0] for x in kept] == list(range(10))
    assert len(memory._pieces) == 3
    # What is too small makes room for what is needed.
    del kept, x
    large = memory.empty(500, 4, np.float32)
    assert large.shape == (500, 4)
    assert len(memory._pieces) == 3


def test_two_threads_never_get_the_same_memory() -> None:
    memory, wrong = Reused(4), []

    def use(number: int) -> None:
        for _ in range(500):
            x = memory.empty(20, 16, np.float32)
            x[:] = number
            if not (x == number).all():
                wrong.append(number)
            del x

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_batches_that_are_kept_stay_as_they_are(windows: Windows) -> None:
    every = list(windows.epoch(1, 100))
    copies = [[deepcopy(a) for a in (b.x, b.others, b.pairs, b.trajectory)] for b in windows.epoch(1, 100)]
    assert len(every) == len(copies) > 10
    for batch, wanted in zip(every, copies, strict=True):
        for found, expected in zip((batch.x, batch.others, batch.pairs, batch.trajectory), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert not any(np.shares_memory(a.x, b.x) for i, a in enumerate(every) for b in every[:i])
    # Every other one is kept, while the memory of those between is used again.
    kept = [batch for batch in windows.epoch(1, 100) if batch.number % 2]
    for batch in kept:
        np.testing.assert_array_equal(batch.x, copies[batch.number][0])


def test_batches_that_are_dropped_take_no_fresh_memory(windows: Windows) -> None:
    places = {address(batch.x) for batch in windows.epoch(0, 50)}
    assert len(places) <= 15 < sum(1 for _ in windows.epoch(0, 50))


def test_leaving_an_epoch_ends_what_reads_ahead(windows: Windows) -> None:
    before = threading.active_count()
    epoch = windows.epoch(0, 100)
    next(epoch)
    assert threading.active_count() > before
    epoch.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batches_are_the_rows_that_are_stored(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.standard_normal((30, 6)).astype(np.float32) for _ in range(40)]
    store = synthetic_store(tmp_path / "acts", texts, dtype=dtype)
    rounded = torch.from_numpy(np.concatenate(texts)).to(getattr(torch, dtype))
    for partner in ("previous", "earlier"):
        windows = Windows(store, SITE, partner=partner, max_norm=1e6)  # type: ignore[arg-type]
        batches = list(windows.epoch(0, 100))
        assert all(batch.x.dtype == rounded.dtype for batch in batches)
        assert sorted(torch.cat([batch.x for batch in batches]).tolist()) == sorted(rounded.tolist())
    others = torch.cat([batch.others for batch in batches if batch.others is not None])
    assert len(others) > 500
    assert set(map(tuple, others.tolist())) <= set(map(tuple, rounded.tolist()))
