"""An HDF5 file on a disk that is full: an error, and never a crash of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tsae.base.hdf5 import HDF5Writer

_WRITE = """
import resource, sys
import numpy as np
from tsae.base.hdf5 import HDF5Writer
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with HDF5Writer(sys.argv[1]) as file:
        file.create_dataset("a", data=np.arange(10_000.0))
        file.create_group("b").attrs["c"] = 1
        float(file["a"][9_999])
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("size", [10, 1_000, 60_000])
def test_a_full_disk_is_said_and_the_process_lives(tmp_path: Path, size: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(tmp_path / "x.h5"), str(size)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "27\n", "")


def test_the_file_is_that_of_h5py(tmp_path: Path) -> None:
    for extend in (False, True):
        with HDF5Writer(tmp_path / "x.h5", extend=extend) as file:
            file.create_dataset(f"a{extend}", data=np.arange(1000), chunks=(100,), compression="gzip")
    with h5py.File(tmp_path / "x.h5") as file:
        assert sorted(file) == ["aFalse", "aTrue"]
        for name in file:
            np.testing.assert_array_equal(file[name][:], np.arange(1000))
    with HDF5Writer(tmp_path / "x.h5") as file:
        assert list(file) == []


def test_an_error_of_the_block_goes_first(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), HDF5Writer(tmp_path / "x.h5"):
        raise KeyError("mine")
