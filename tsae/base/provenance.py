"""run.json: the config, inputs and versions of a stage, so that every figure can be traced to what made it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tsae.base.files import plain, replacing, write_json
from tsae.base.seal import SEAL, seal, with_checksum
from tsae.errors import public

_PACKAGES = ("tsae", "torch", "transformers", "transformer_lens", "sae_lens", "h5py", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {package: version_of(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **{name: told for name, told in found.items() if told is not None}}


@cache
def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is missing. Its metadata are parsed once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run_content(stage: str, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What run.json holds: the stage, its config, the hashes of its inputs, and versions. No times: reruns are equal.

    Passwords and keys in it are hidden (`tsae.errors.without_secrets`).
    """
    return with_checksum(public(plain({"stage": stage, "config": config, "inputs": inputs, "versions": versions()})))


def write_run(folder: str | Path, stage: str, config: Any, inputs: dict[str, Any]) -> Path:
    """Write run.json (`run_content`) into the folder of a stage's results, and seal the folder if it has a seal."""
    file = Path(folder) / "run.json"
    with replacing(file) as partial:
        write_json(partial, run_content(stage, config, inputs))
        if (Path(folder) / SEAL).is_file():
            # The seal comes first. Otherwise a kill in between could leave a finished folder without a seal.
            seal(folder, coming={file.name: partial})
    return file
