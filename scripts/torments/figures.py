"""Bad numbers: weights of a model that make activations NaN, infinite, huge, tiny or constant, and data with nothing in
it to find. All stages follow, each on what the one before has written."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file

import tsae
from torments import artefacts
from torments.stages import SHIPPED

KINDS = ("nan", "inf", "huge", "denormal", "constant", "dead", "equal", "one problem", "one token", "no success",
         "reward")  # fmt: skip

SERIES = (SHIPPED / "base", SHIPPED / "hard-100")


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    kind = str(rng.choice(KINDS))
    which = int(rng.integers(2))
    where = [shutil.copytree(folder, here / Path(folder).name) for folder in SERIES]
    if kind == "equal":
        shutil.copy(where[0] / "model.safetensors", where[1] / "model.safetensors")
    elif kind in ("nan", "inf", "huge", "denormal", "constant", "dead"):
        _spoil(Path(where[which]) / "model.safetensors", kind, rng)
    _choose(made / "rollouts.parquet", here / "rollouts.parquet", kind, rng)
    (here / "out").mkdir()
    what = f"numbers: {kind} in {Path(where[which]).name}"
    series = ("--series", *(path.name for path in map(Path, where)))
    for words in (
        ("capture", *series, "--rollouts", "rollouts.parquet", "--to", "out/acts"),
        ("train", "--store", "out/acts", "--to", "out/sae", "--d-sae", "64", "--k", "4", "--tokens", "4000",
         "--batch-tokens", "256", "--site", "blocks.1.hook_resid_post"),
        ("evaluate", "--sae", "out/sae", "--store", "out/acts", "--json", "out/found.json"),
        ("encode", "--sae", "out/sae", "--store", "out/acts", "--to", "out/features"),
        ("diff", "--features", "out/features", "--to", "out/diff", "--min-problems", "5", "--n-permutations", "200",
         "--n-bootstrap", "100"),
        ("report", "--diff", "out/diff", "--features", "out/features", "--to", "out/page.html"),
    ):  # fmt: skip
        ended, wrong = artefacts.watched(words, here)
        if wrong:
            return what, f"{words[0]}: {wrong}"
        if ended is None or ended.returncode:
            said = "" if ended is None else ended.stderr.strip()[-200:]
            return f"{what}; {words[0]} refuses: {said}", ""  # said aloud
    if kind in ("nan", "inf"):
        return what, "nobody says that the activations are not finite"
    return what, _implausible(here / "out/diff", kind)


def _spoil(file: Path, kind: str, rng: np.random.Generator) -> None:
    """Change weights of a model."""
    weights = load_file(file)
    name = f"model.layers.{rng.integers(2)}.mlp.down_proj.weight"  # the site lies behind the second layer
    if kind in ("nan", "inf"):
        flat = weights[name].flatten()
        flat[int(rng.integers(len(flat)))] = math.nan if kind == "nan" else math.inf
        weights[name] = flat.reshape(weights[name].shape)
    elif kind in ("huge", "denormal"):
        weights[name] = weights[name] * (1e30 if kind == "huge" else 1e-42)
    elif kind == "constant":
        for name in weights:
            if "embed" in name:
                weights[name] = torch.ones_like(weights[name])
    else:
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
    save_file(weights, file, metadata={"format": "pt"})


def _choose(source: Path, target: Path, kind: str, rng: np.random.Generator) -> None:
    """Rollouts, or few of them."""
    rollouts = tsae.Rollouts.read(source)
    frame = rollouts.table.to_pandas()
    keep = np.ones(len(frame), dtype=bool)
    if kind == "one problem":
        keep = (frame.problem_id == rng.choice(frame.problem_id.unique())).to_numpy()
    elif kind == "no success":
        keep = (frame.outcome != "success").to_numpy()
    chosen = rollouts.select(np.flatnonzero(keep))
    table = chosen.table
    if kind == "one token":
        index = table.column_names.index("response_ids")
        first = pa.array([ids[:1] for ids in table["response_ids"].to_pylist()], table.field(index).type)
        table = table.set_column(index, table.field(index), first)
    elif kind == "reward":
        index = table.column_names.index("reward")
        values = [float(rng.choice([math.nan, math.inf, -math.inf, 1e308, 5e-324])) for _ in range(table.num_rows)]
        table = table.set_column(index, table.field(index), pa.array(values, table.field(index).type))
    try:
        type(chosen)(table, chosen.info).write(target)
    except tsae.TsaeError:
        rollouts.write(target)  # refused already where it enters


def _implausible(diff: Path, kind: str) -> str:
    """What of a diff cannot be: numbers that are not finite where they are said, or discoveries in equal models."""
    shifts = pd.read_parquet(diff / "shifts.parquet")
    contrasts = pd.read_parquet(diff / "contrasts.parquet")
    if np.isinf(shifts.select_dtypes("number").to_numpy(dtype=float)).any():
        return "the shifts hold infinite numbers"
    clear = shifts[shifts.q < 0.05]
    if clear.difference.isna().any():
        return "a discovery has no size"
    if kind == "equal":
        among = contrasts[
            (contrasts.kind == "shift") & (contrasts.part == "representation") & (contrasts.n_discoveries > 0)
        ]
        if len(among):
            return f"{int(among.n_discoveries.sum())} shifts between equal models"
    return ""
