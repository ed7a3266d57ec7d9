"""Gradients of a run's samples, along its path, on disk.

A folder has one safetensors file a step:

    gradients (n, P)   each sample's part of the gradient of −loss at the weights before the step
    rows (n,)          its row of the rollouts
    pulls (n,)         w_i A_i, by which the gradient of its log-probability was multiplied
    spread (n, T)      how that gradient is spread over its sampled tokens; sums to 1, with zeros behind

An interrupted build goes on where it stopped. checksums.json has the checksum of every file, which is compared when it
is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import gradients_and_spread
from tsae.attribution.training.loss import PolicyLoss
from tsae.base.disk.tensors import tensors_replacing
from tsae.base.files import as_path, reading, write_json
from tsae.base.progress import progress_bar
from tsae.base.seal import check_seal, read_sealed, seal, with_checksum
from tsae.diff.policy_gradient.derivatives import padded
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_BYTES = {"float32": 4, "bfloat16": 2}

_FIX = "Remove the folder, and build the gradients again."


@dataclass(frozen=True)
class StepGradients:
    """What the store holds of a step."""

    rows: np.ndarray
    """(n,) of the rollouts."""
    gradients: torch.Tensor
    """(n, P) float32."""
    pulls: torch.Tensor
    """(n,) w_i A_i."""
    spread: torch.Tensor
    """(n, T) shares of the sampled tokens in a sample's log-ratio."""


class GradientStore:
    """Reads what `build_gradients` wrote.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder)
        path = self.folder / "gradients.json"
        if not path.is_file():
            raise TsaeError("holds no gradients.json", where=self.folder, fix="Build the gradients first.")
        self.info: dict[str, Any] = read_sealed(path, _FIX)
        with reading(path, _FIX):
            self.steps: list[int] = list(self.info["steps"])

    def step(self, number: int) -> tuple[np.ndarray, torch.Tensor]:
        """((n,) rows of the rollouts, (n, P) float32 gradients) of a step's samples."""
        found = self.whole_step(number)
        return found.rows, found.gradients

    def whole_step(self, number: int) -> StepGradients:
        """Everything about a step's samples.

        Raises:
            TsaeError: where its file is missing or damaged.
        """
        self.check(number)
        with reading(_file(self.folder, number), _FIX):
            found = load_file(_file(self.folder, number))
            return StepGradients(found["rows"].numpy(), found["gradients"].float(), found["pulls"], found["spread"])

    def check(self, number: int) -> Path:
        """The file of a step, after its bytes were compared with its checksum.

        Raises:
            TsaeError: where it is missing or damaged.
        """
        file = _file(self.folder, number)
        check_seal(self.folder, _FIX, [file.name], others=False)
        return file

    @property
    def loss(self) -> PolicyLoss:
        """Of the run."""
        return PolicyLoss(**self.info["loss"])


def build_gradients(
    path: TrainingPath,
    rollouts: Rollouts,
    batches: Mapping[int, np.ndarray],
    loss: PolicyLoss,
    to: str | Path,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    budget: int = 8 * 10**9,
    batch_tokens: int = 4096,
    progress: bool = True,
) -> GradientStore:
    """Compute every sample's gradient at the weights that its step began with.

    Args:
        path: of the run.
        rollouts: have tokens and advantages.
        batches: rows of the rollouts by the number of the step that trained on them; the first is 1.
        loss: the trainer's.
        to: folder of the store.
        dtype: on disk; auto takes float32 where it fits the budget, else bfloat16.
        budget: bytes on disk.
        batch_tokens: tokens in a forward pass, with padding.
        progress: show a bar.

    Raises:
        TsaeError: where the gradients fit the budget in no precision, advantages are missing, or the folder holds
            another run's.
    """
    to, n, size = as_path(to), sum(map(len, batches.values())), len(path.trained)
    if dtype == "auto":
        dtype = "float32" if n * size * 4 <= budget else "bfloat16"
    check_budget(n, size, budget, to, dtype)
    advantage = rollouts.frame.advantage.to_numpy(dtype=float)
    used = np.concatenate(list(batches.values()))
    if not np.isfinite(advantage[used]).all():
        raise TsaeError(
            f"{(~np.isfinite(advantage[used])).sum()} of {n} samples have no advantage",
            where=rollouts.origin,
            fix="Set advantages from rewards (Rollouts.with_advantages), or drop these rows.",
        )
    steps = sorted(batches)
    info = {"rollouts": rollouts.fingerprint, "loss": vars(loss), "dtype": dtype, "n_weights": size, "steps": steps}
    _begin(to, info)
    with progress_bar("gradients", "sample", n, shown=progress) as bar:
        for step in steps:
            if not _file(to, step).is_file():
                _build_step(path, rollouts, np.asarray(batches[step]), loss, to, step, dtype, batch_tokens)
            bar.update(len(batches[step]))
    return GradientStore(to)


def check_budget(n: int, size: int, budget: int, where: str | Path, dtype: str = "bfloat16") -> None:
    """Refuse gradients of n samples with respect to `size` weights that take more than `budget` bytes on disk.

    Raises:
        TsaeError: where they do.
    """
    if n * size * _BYTES[dtype] > budget:
        raise TsaeError(
            f"gradients of {n:,} samples with respect to {size:,} weights take {n * size * _BYTES[dtype] / 1e9:.1f} GB",
            where=where,
            fix=f"Raise the budget ({budget / 1e9:.1f} GB), take fewer samples, or only some of the weights.",
        )


def _begin(to: Path, info: dict[str, Any]) -> None:
    to.mkdir(parents=True, exist_ok=True)
    known, info = to / "gradients.json", json.loads(json.dumps(info))
    if known.is_file():
        if read_sealed(known, _FIX) != info:
            raise TsaeError("holds the gradients of another run or loss", where=to, fix="Give another folder.")
    else:
        write_json(known, with_checksum(info))


def _build_step(
    path: TrainingPath,
    rollouts: Rollouts,
    rows: np.ndarray,
    loss: PolicyLoss,
    to: Path,
    step: int,
    dtype: str,
    batch_tokens: int,
) -> None:
    path.put(step - 1)
    weights = loss.weights(rollouts.n_sampled[rows])
    advantage = rollouts.frame.advantage.to_numpy(dtype=float)[rows]
    weighted = dict(zip(rows.tolist(), (weights * advantage).tolist(), strict=True))
    found = torch.zeros(len(rows), len(path.trained), dtype=getattr(torch, dtype))
    place = {row: i for i, row in enumerate(rows.tolist())}
    # A sample without advantage has no gradient.
    spread = torch.zeros(len(rows), int(rollouts.n_sampled[rows].max()))
    for some, ids, mask, response in padded(rollouts, rows[advantage != 0], batch_tokens, str(path.trained.device)):
        by = torch.tensor([weighted[row] for row in some.tolist()], dtype=torch.float32, device=ids.device)
        weight = by[:, None] * response[:, 1:]
        gradient, each = gradients_and_spread(path.trained, ids, mask, weight, temperature=loss.temperature)
        found[[place[row] for row in some.tolist()]] = gradient.to(found.dtype).cpu()
        for row, one, sampled in zip(some.tolist(), each, response[:, 1:], strict=True):
            own = one[sampled].float().cpu()
            spread[place[row], : len(own)] = own / own.sum().clamp_min(1e-30)
    tensors = {
        "rows": torch.from_numpy(rows.astype(np.int64)),
        "gradients": found,
        "pulls": torch.tensor([weighted[row] for row in rows.tolist()], dtype=torch.float32),
        "spread": spread,
    }
    with tensors_replacing(_file(to, step), tensors) as partial:
        # The seal is written first, so that a kill leaves no file without a checksum.
        seal(to, coming={_file(to, step).name: partial})


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def batches_of(rollouts: Rollouts, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, np.ndarray]:
    """Rows by the step of the log that trained on them.

    Raises:
        TsaeError: where the log has no steps, or some that are no whole numbers.
    """
    rows = np.arange(len(rollouts)) if rows is None else np.asarray(rows)
    if "step" not in rollouts.frame.columns:
        raise TsaeError(
            "the log has no steps", where=rollouts.origin, fix="Import a log that says the step of its rows."
        )
    step = rollouts.frame["step"].to_numpy(dtype=float, na_value=np.nan)[rows]
    if np.isnan(step).any():
        what = f"{int(np.isnan(step).sum())} of {len(step)} rows have no step"
        raise TsaeError(what, where=rollouts.origin, fix="Import a log that says the step of every row.")
    numbers = np.unique(step)
    if (broken := numbers[~np.isfinite(numbers) | (numbers % 1 != 0)]).size:
        what = f"has the step {broken[0]:g}, expected whole numbers"
        raise TsaeError(what, where=rollouts.origin, fix="Number the steps of the optimiser 1, 2, 3, …")
    return {int(number): rows[step == number] for number in numbers}
