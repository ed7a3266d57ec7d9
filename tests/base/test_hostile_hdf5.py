"""HDF5 files from strangers: they name no other file, unpack to nothing, and claim no more than they hold."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tsae
from support.damage import resealed
from support.refusals import refuses
from support.results import source
from tsae.base.hdf5 import places
from tsae.features.feature_table import FeatureTable

_HUGE = 25_000_000_000  # entries: 100 GB of float32


def soft(file: h5py.File, name: str, _: Path) -> None:
    file.move(name, "moved")
    file[name] = h5py.SoftLink("/moved")


def external_link(file: h5py.File, name: str, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["a"] = np.zeros(1)
    del file[name]
    file[name] = h5py.ExternalLink(str(folder / "other.h5"), "/a")


def external_storage(file: h5py.File, name: str, folder: Path) -> None:
    (folder / "secret").write_bytes(b"secret" * 10_000)
    shape, dtype = file[name].shape, file[name].dtype
    del file[name]
    file.create_dataset(name, shape, dtype, external=[(str(folder / "secret"), 0, h5py.h5f.UNLIMITED)])


def virtual(file: h5py.File, name: str, folder: Path) -> None:
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "a", file[name].shape)
    del file[name]
    file.create_virtual_dataset(name, layout)


def compressed(file: h5py.File, name: str, _: Path) -> None:
    """A chunk of a gigabyte of zeros is a few hundred kilobytes; how many of them there are costs nothing."""
    dtype = file[name].dtype
    del file[name]
    made = file.create_dataset(name, (_HUGE,), dtype, chunks=(1 << 20,), compression="gzip")
    made[: 1 << 20] = 0


def never_written(file: h5py.File, name: str, _: Path) -> None:
    dtype = file[name].dtype
    del file[name]
    file.create_dataset(name, (_HUGE,), dtype)


def of_words(file: h5py.File, name: str, _: Path) -> None:
    del file[name]
    file.create_dataset(name, data=["a", "b"], dtype=h5py.string_dtype())


def circle(file: h5py.File, name: str, _: Path) -> None:
    file["again"] = file["/"]


ATTACKS: dict[Callable[[h5py.File, str, Path], None], str] = {
    soft: "is a link to another place, which is not followed",
    external_link: "is a link to another place, which is not followed",
    external_storage: "names another file, which is not read",
    virtual: "names another file, which is not read",
    compressed: "is not stored contiguously",
    never_written: "is not stored contiguously",
    of_words: "is not an array of numbers",
    circle: "is nested too deeply",
}


@pytest.fixture
def little_memory() -> Any:
    """Nothing here needs a gigabyte more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_hostile_shard_and_a_hostile_feature_table_are_refused(
    attack: Any, store: tsae.ActivationStore, tmp_path: Path
) -> None:
    acts = shutil.copytree(store.path, tmp_path / "acts")
    shard = store.manifest["readers"][0]["shards"][0]["file"]
    features = source(["one", "two three"])[0].save(tmp_path / "features")
    for file in (acts / shard, features / "features.h5"):
        with h5py.File(file, "r+") as opened:
            attack(opened, "token_ids", tmp_path)
    refuses(rf"{shard}.*{ATTACKS[attack]}", lambda: list(tsae.ActivationStore(acts).shards()))
    refuses(rf"features.*{ATTACKS[attack]}", FeatureTable.load, resealed(features))


def test_a_dataset_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    """The header says a thousand times what is there."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file["a"] = np.arange(1000)
        offset = file["a"].id.get_offset()
    assert offset is not None
    with h5py.File(tmp_path / "a.h5") as file:
        os.truncate(tmp_path / "a.h5", offset + 100)
        with pytest.raises(ValueError, match="/a is larger than the file"):
            places(file)
