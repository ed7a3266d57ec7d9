"""run.json: what a stage was run with, so that every figure can be traced to what made it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("tsae", "torch", "transformers", "transformer_lens", "sae_lens", "h5py", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON whole or not at all; the same content gives the same bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=_plain) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def write_run(folder: str | Path, stage: str, config: Any, inputs: dict[str, Any]) -> Path:
    """Write run.json: the stage, its config, the hashes of its inputs, and versions. No times: reruns are equal."""
    return write_json(
        Path(folder) / "run.json",
        {"stage": stage, "config": config, "inputs": inputs, "versions": versions()},
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not go into JSON")
