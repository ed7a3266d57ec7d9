"""Files of torch.save and numpy.savez from strangers: arrays and plain containers are read, and no code in them is run.

No array becomes larger than what the file holds of it.
"""

from __future__ import annotations

import warnings
import zipfile
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np

from tsae.base.files import reading
from tsae.base.untrusted import check_zip
from tsae.errors import TsaeError


def read_torch_file(file: Path, *, refused: str, damaged: str, mapped: bool = False) -> Any:
    """What a file of torch.save holds.

    Args:
        file: it, on this disk.
        refused: what to do about one that needs pickle.
        damaged: what to do about one that cannot be read.
        mapped: numbers stay on the disk until they are used.

    Raises:
        TsaeError: where it holds other objects than tensors, arrays and plain containers, one of the first two stands
            for more numbers than the file has, or it cannot be read.
    """
    import torch

    with reading(file, damaged, "is not a file of torch.save"):
        try:
            if zipfile.is_zipfile(file):
                check_zip(file)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a pickle's protocol, which does not matter here
                with torch.serialization.safe_globals(_numpy()):
                    found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            what = f"holds more than tensors and plain containers ({cause(error)}): it needs pickle, which may run code"
            raise TsaeError(f"{what}, and is not loaded", where=file, fix=refused) from error
        _check_tensors(found, file.stat().st_size)
        return found


def _numpy() -> list[Any]:
    """What numbers and arrays of numpy are made of, under the names that numpy 1 and 2 give it."""
    made = (("_reconstruct", np.zeros(0).__reduce__()[0]), ("scalar", np.float64(0).__reduce__()[0]))
    named = [(f, f"numpy.{core}.multiarray.{name}") for name, f in made for core in ("core", "_core")]
    kinds = {type(np.dtype(code)) for code in "?bhilqBHILQefdSU"}
    return [np.ndarray, np.dtype, *kinds, *named]


def _check_tensors(content: Any, n_bytes: int) -> None:
    """Refuse a tensor or array that is larger than its data in the file. Looks into each container once."""
    import torch

    seen, waiting = set(), [content]
    while waiting:
        found = waiting.pop()
        found = getattr(found, "_local_tensor", found)  # of a DTensor this process has a part
        if isinstance(found, torch.Tensor):
            if found.layout is not torch.strided or found.device.type != "cpu" or found.is_quantized:
                raise ValueError(f"it holds a tensor that is {found.layout}, {found.dtype} on {found.device.type}")
            if found.numel() * found.element_size() > found.untyped_storage().nbytes():
                raise ValueError(f"a tensor of shape {tuple(found.shape)} stands for more numbers than the file holds")
        elif isinstance(found, np.ndarray) and found.nbytes > n_bytes:
            raise ValueError(f"an array of shape {found.shape} stands for more numbers than the file holds")
        elif isinstance(found, dict | list | tuple | set) and id(found) not in seen:
            seen.add(id(found))
            waiting += found.values() if isinstance(found, dict) else found


def cause(error: Exception) -> str:
    """The most telling line of an error: torch names what it refused below its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "nsupported" in line), lines[0])[:200]


_TIMES = 16
"""Times the file's size that an array may unpack to; weights hardly shrink."""


def read_npz(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in a file.

    Raises:
        ValueError: where an array unpacks to far more than the file, names a larger shape than it has bytes for, or
            holds objects.
        OSError, BadZipFile, zlib.error: where it cannot be read.
    """
    check_zip(file, most=_TIMES * file.stat().st_size)
    with np.load(file, allow_pickle=False) as data:
        for member in data.zip.infolist():
            with data.zip.open(member) as stream:
                needed = _bytes_of(stream)
            if needed > member.file_size:
                raise ValueError(f"its part {member.filename[:60]} has {member.file_size:,} bytes, not {needed:,}")
        return {name: data[name] for name in data}


def _bytes_of(stream: IO[bytes]) -> int:
    """What the header of an array says that it has. numpy makes room for as much before it reads."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"it is of version {version} of numpy's format")
    shape, _, dtype = read(stream)
    return int(prod(shape) * dtype.itemsize)
