"""Files of torch.save: tensors and plain containers are read, and no code in them is run."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from tsae.base.untrusted import check_zip
from tsae.errors import TsaeError

_DAMAGED = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile)


def read_torch_file(file: Path, *, refused: str, damaged: str) -> Any:
    """What a file of torch.save holds.

    Args:
        file: it, on this disk.
        refused: what to do about one that needs pickle.
        damaged: what to do about one that cannot be read.

    Raises:
        TsaeError: where it holds other objects than tensors and plain containers, or cannot be read.
    """
    import torch

    try:
        if zipfile.is_zipfile(file):
            check_zip(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a pickle's protocol, which does not matter here
            return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise TsaeError(
            f"holds more than tensors and plain containers ({cause(error)}): it needs pickle, which may run code, "
            "and is not loaded",
            where=file,
            fix=refused,
        ) from error
    except _DAMAGED as error:
        raise TsaeError(f"is no file of torch.save ({cause(error)})", where=file, fix=damaged) from error


def cause(error: Exception) -> str:
    """The most telling line of an error: torch names what it refused below its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "nsupported" in line), lines[0])[:200]
