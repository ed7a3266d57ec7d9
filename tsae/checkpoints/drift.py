"""Weight drift: where training wrote. ‖W − W₀‖ / ‖W₀‖ of every weight of every checkpoint of a series.

Weights are read from safetensors in blocks of rows, without making a model, so the block bounds memory and not the
checkpoint; a spectral norm takes up to 1 GiB for one update. A LoRA update s·B·A is never formed: with the QR factors
R_B of B and R_A of Aᵀ, its singular values are those of the small matrix s·R_B·R_Aᵀ. The spectral norm of another
update D comes from Lanczos iterations on DᵀD, to about 0.1 %.

`update_of` measures the update of one checkpoint as the models are loaded, for noise of the same size.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch

from tsae.base.files import read_object, reading
from tsae.base.progress import progress_bar
from tsae.checkpoints.loading import Checkpoint, ModelLoader, check_places
from tsae.checkpoints.lora import LoraUpdate, fitting_updates
from tsae.checkpoints.record import Noise, frobenius
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import (
    common_rows,
    folder_of,
    has_no_part,
    is_adapter,
    is_gguf,
    weight_files,
)
from tsae.errors import TsaeError, refuse

_BLOCK = 1 << 24  # elements read at once
_EXACT = 1 << 18  # elements of an update whose singular values are computed directly
_IN_MEMORY = 1 << 28  # elements of an update that is formed for its spectral norm
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)")
_OUTER = re.compile(r"^(?:.*\.)?(?:model|language_model|transformer)\.")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weight_drift(series: CheckpointSeries, *, spectral: bool = True, progress: bool = True) -> pd.DataFrame:
    """How far every weight of every checkpoint is from the base's.

    Where a run's vocabulary has another size, its embeddings and head are compared for the tokens that both have.

    Args:
        series: whole models and LoRA adapters.
        spectral: compute spectral norms, which takes most of the time.
        progress: show a bar.

    Returns:
        one row a checkpoint (but the base) and tensor:

        checkpoint, run, step
        tensor          name in the base's file
        layer           index of the block, <NA> outside of blocks
        module          name within the block (``self_attn.q_proj``); indices of experts are ``*``
        n_weights
        base_norm       ‖W₀‖, Frobenius
        update_norm     ‖W − W₀‖, Frobenius
        relative        update_norm / base_norm; NaN where the base is zero
        share           of the checkpoint's squared update over all tensors
        spectral        largest singular value of the update; NaN for no matrix, and for over 2²⁸ weights
        stable_rank     (update_norm / spectral)², at most the rank
        changed         share of weights that differ at all; NaN for a LoRA update, which is not formed
        rounding        ‖W₀ rounded to the checkpoint's precision − W₀‖ / ‖W₀‖: the drift without any training where the
                        checkpoint is stored more coarsely than the base

    Raises:
        TsaeError: where weights are missing, have another shape or no place in the model, are quantised or not finite,
            or an adapter holds other weights than LoRA's.
    """
    base = _Tensors(series.base)
    rows: list[dict[str, Any]] = []
    norms: dict[str, float] = {}
    for checkpoint in list(series)[1:]:
        after = _trained_tensors(checkpoint, base)
        if base.has_class:
            check_places([series.base, checkpoint])
        names = [name for name in dict.fromkeys([*base.names, *after]) if base.dtype(name) in _FLOATS]
        for name in progress_bar(f"drift of {checkpoint.id}", "tensor", over=names, shown=progress):
            layer, module = place(name)
            where = {"checkpoint": checkpoint.id, "run": checkpoint.run, "step": checkpoint.step, "tensor": name}
            measured = _measure(base, name, after.get(name), norms, spectral)
            rows.append({**where, "layer": layer, "module": module, **measured})
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({"layer": "Int64"})
    squared = table.update_norm**2
    total = squared.groupby(table.checkpoint).transform("sum")
    table["share"] = (squared / total).where(total > 0, 0.0)
    return table


def drift_by(drift: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Combine rows of `weight_drift`, as if their tensors were one.

    Args:
        drift: of `weight_drift`.
        by: columns such as layer or module; none for a whole checkpoint. Rows without a layer are one group.

    Returns:
        checkpoint, the given columns, n_weights, relative, share and changed.
    """
    keys = ["checkpoint", *by]
    parts = drift[keys].assign(
        n_weights=drift.n_weights,
        base_squared=drift.base_norm**2,
        update_squared=drift.update_norm**2,
        share=drift.share,
        n_changed=drift.changed * drift.n_weights,
        counted=drift.n_weights.where(drift.changed.notna(), 0),
    )
    table = parts.groupby(keys, sort=False, dropna=False).sum().reset_index()
    table["relative"] = np.sqrt(table.update_squared / table.base_squared.where(table.base_squared > 0))
    table["changed"] = (table.n_changed / table.counted.where(table.counted == table.n_weights)).astype(float)
    return table[[*keys, "n_weights", "relative", "share", "changed"]]


def place(tensor: str) -> tuple[int | None, str]:
    """(layer, module) of a tensor's name."""
    match = _LAYER.search(tensor)
    layer, rest = (int(match[1]), match[2]) if match else (None, _OUTER.sub("", tensor))
    return layer, re.sub(r"\.\d+(?=\.)", ".*", rest.removesuffix(".weight"))


_COLUMNS = [
    "checkpoint", "run", "step", "tensor", "layer", "module", "n_weights", "base_norm", "update_norm", "relative",
    "share", "spectral", "stable_rank", "changed", "rounding",
]  # fmt: skip


class _Tensors:
    """The weights of one model, read in blocks of rows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from safetensors import safe_open

        folder = folder_of(checkpoint)
        what = "is a GGUF file, whose weights are quantised, or an adapter; expected a whole model in safetensors"
        refuse(folder, (is_gguf(folder) or is_adapter(folder), what, "Give its base."))
        self.where = checkpoint.path
        self._files: dict[str, Any] = {}
        for file in weight_files(folder):
            with reading(file, "Complete the checkpoint."):
                opened = safe_open(file, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
        self.names = [name for name in self._files if not has_no_part(name)]
        config = read_object(folder / "config.json", "Give a complete checkpoint.")
        self._tied = bool(config.get("tie_word_embeddings", False))
        self.has_class = "model_type" in config and "auto_map" not in config
        """Whether transformers can make the model."""

    def find(self, name: str) -> str | None:
        """The name that a weight has in the files: its own, or that of the weight it is tied to."""
        if name in self._files:
            return name
        if self._tied and name == "lm_head.weight":
            return next((n for n in self.names if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor as it is stored; the whole of one without dimensions."""
        if self.shape(name):
            return self._slice(name)[start:stop]
        stored = self.find(name)
        return self._files[stored or name].get_tensor(stored or name).reshape(1)

    def whole(self, name: str) -> torch.Tensor:
        return self.rows(name, 0, 1 << 62)

    def _slice(self, name: str) -> Any:
        stored = self.find(name) or name
        return self._files[stored].get_slice(stored)


@dataclass(frozen=True)
class _Trained:
    """One tensor of a checkpoint."""

    rows: Callable[[int, int, torch.Tensor], torch.Tensor]
    """(start, stop, the base's rows) -> the checkpoint's rows, both as floats."""
    dtype: torch.dtype | None
    """As it is stored; None where it is computed."""
    n_rows: int
    """Compared with the base's: all, or those of the smaller vocabulary."""
    lora: LoraUpdate | None = None
    """Where the whole update is s·B·A."""


def _trained_tensors(checkpoint: Checkpoint, base: _Tensors) -> dict[str, _Trained]:
    """The weights of a checkpoint by their names in the base, without those that an adapter leaves as they are."""
    if is_adapter(folder_of(checkpoint)):
        fitting = fitting_updates(checkpoint, lambda name: base.shape(name) if base.find(name) else None, base.where)
        return {
            name: _Trained(update.rows, None, (*base.shape(name), 1)[0], update if update.is_plain else None)
            for name, update in fitting
        }
    own = _Tensors(checkpoint)
    lost = [name for name in base.names if own.find(name) is None]
    new = [name for name in own.names if base.find(name) is None]
    _check_names(lost, new, base.where, checkpoint)
    trained = {}
    for name in dict.fromkeys([*base.names, *own.names]):
        n_rows, kinds = common_rows(name, own.shape(name), base.shape(name)), (own.dtype(name), base.dtype(name))
        if n_rows is not None and all(kind in _FLOATS for kind in kinds):
            trained[name] = _Trained(partial(_rows_of, own, name), _FLOATS[kinds[0]], n_rows)
        # A mask of integers or the like, which is equal in both, has no drift.
        elif n_rows is None or kinds[0] != kinds[1] or not torch.equal(own.whole(name), base.whole(name)):
            found, expected = (f"{each.dtype(name)} of the shape {each.shape(name)}" for each in (own, base))
            _refuse_tensor(name, found, expected, base.where, checkpoint)
    return trained


def _rows_of(own: _Tensors, name: str, start: int, stop: int, _: torch.Tensor) -> torch.Tensor:
    return _as_float(own.rows(name, start, stop))


def _check_names(lost: Sequence[str], new: Sequence[str], base: str, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that lacks weights of its base, or has others."""
    if lost or new:
        what = f"its weights are not those of {base}: {len(lost)} are missing and {len(new)} new"
        fix = "Compare checkpoints of one architecture and vocabulary, saved in the same way."
        raise TsaeError(f"{what} (first: {[*lost, *new][0]})", where=checkpoint.path, fix=fix)


def _refuse_tensor(name: str, found: str, expected: str, base: str, checkpoint: Checkpoint) -> NoReturn:
    """Refuse a tensor whose update cannot be measured: of another shape, or not of floating-point numbers."""
    what = f"{name} is stored as {found}, in {base} as {expected}; updates are of floating-point weights of one shape"
    raise TsaeError(what, where=checkpoint.path, fix="Compare models of one architecture, without quantisation.")


def _measure(
    base: _Tensors, name: str, after: _Trained | None, norms: dict[str, float], spectral: bool
) -> dict[str, Any]:
    """Norms of one tensor and its update."""
    shape = base.shape(name)
    if after is not None and shape:
        shape = (after.n_rows, *shape[1:])
    n_weights = int(np.prod(shape, dtype=np.int64))
    largest, changed, rounding = np.nan, 0.0, 0.0
    if after is None or after.lora is not None:
        if name not in norms:
            squares = (frobenius(_as_float(rows)) ** 2 for _, _, rows in _blocks(base, name, shape))
            norms[name] = float(np.sqrt(sum(squares)))
        norm = norms[name]
        singular = np.zeros(1) if after is None or after.lora is None else after.lora.singular_values()
        update, largest = float(np.sqrt((singular**2).sum())), float(singular[0])
        changed = 0.0 if after is None else np.nan
    else:
        sums = np.zeros(4)  # base, update, changed, rounding
        for start, stop, rows in _blocks(base, name, shape):
            before = _as_float(rows)
            new = after.rows(start, stop, before)
            sums[:3] += [frobenius(before) ** 2, frobenius(new - before) ** 2, float((new != before).sum())]
            if after.dtype not in (None, rows.dtype):
                sums[3] += frobenius(_as_float(rows.to(after.dtype)) - before) ** 2
        norm, update = float(np.sqrt(sums[0])), float(np.sqrt(sums[1]))
        changed = sums[2] / max(n_weights, 1)
        rounding = float(np.sqrt(sums[3])) / norm if norm else 0.0
        if spectral and len(shape) == 2 and np.isfinite(update):
            largest = _spectral_norm(base, name, after, shape) if update > 0 else 0.0
    if not (np.isfinite(norm) and np.isfinite(update)):
        raise TsaeError(f"{name} holds values that are not finite, there or in the checkpoint", where=base.where)
    if not spectral or len(shape) != 2:
        largest = np.nan
    return {
        "n_weights": n_weights,
        "base_norm": norm,
        "update_norm": update,
        "relative": update / norm if norm else np.nan,
        "spectral": largest,
        "stable_rank": (update / largest) ** 2 if largest > 0 else np.nan,
        "changed": changed,
        "rounding": rounding,
    }


def _blocks(base: _Tensors, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, rows) of a tensor of the base, as stored, as far as the shape goes."""
    shape = shape or (1,)
    step = max(1, _BLOCK // max(1, int(np.prod(shape[1:], dtype=np.int64))))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield start, stop, base.rows(name, start, stop)


def _as_float(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def _spectral_norm(base: _Tensors, name: str, after: _Trained, shape: tuple[int, ...]) -> float:
    """Largest singular value of a tensor's update; NaN for one that is too large to be formed."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    m, n = shape
    if m * n > _IN_MEMORY:
        return np.nan
    D = torch.empty((m, n), dtype=torch.float64 if base.dtype(name) == "F64" else torch.float32)
    for start, stop, rows in _blocks(base, name, shape):
        before = _as_float(rows)
        D[start:stop] = after.rows(start, stop, before) - before
    if min(m, n) <= 64:
        gram = (D.T @ D if n < m else D @ D.T).double()
        return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
    if m * n <= _EXACT:
        return float(torch.linalg.matrix_norm(D.double(), 2))

    def product(vector: np.ndarray) -> np.ndarray:
        v = torch.from_numpy(np.ascontiguousarray(vector)).reshape(-1).to(D.dtype)
        return (D.T @ (D @ v)).double().numpy()

    # An eigenvalue's error is of second order: with this tolerance it is far below 1 %.
    largest = eigsh(
        LinearOperator((n, n), matvec=product, dtype=np.float64),
        k=1,
        v0=np.random.default_rng(0).standard_normal(n),
        tol=1e-2,
        return_eigenvectors=False,
    )
    return float(np.sqrt(max(float(largest[0]), 0.0)))


@dataclass(frozen=True)
class Update:
    """How far training moved every tensor of a base."""

    norms: Mapping[str, float]
    """‖W − W₀‖, Frobenius, by name of the parameter in the loaded model."""
    relative: float
    """‖W − W₀‖ / ‖W₀‖ over all weights."""

    def noisy(self, checkpoint: Checkpoint, draw: int, *, share: float = 1.0, seed: int = 0) -> Checkpoint:
        """The base of a checkpoint with noise as large as a share of this update.

        Args:
            checkpoint: of a series; the noisy checkpoint gets its run and step, and its id with ``+noise`` and the
                number of the draw.
            draw: number of the draw.
            share: of the update's norm.
            seed: of the noise, together with the draw.
        """
        base = _base_of(checkpoint)
        norms = tuple((name, share * norm) for name, norm in self.norms.items())
        digest = hashlib.sha256(f"{checkpoint.id} {seed} {draw}".encode()).digest()
        noise = Noise(norms, int.from_bytes(digest[:6], "big"))
        id = f"{checkpoint.id}+noise{draw}"
        return replace(base, id=id, run=checkpoint.run, step=checkpoint.step, noise=noise, base=base)


def update_of(checkpoint: Checkpoint) -> Update:
    """Measure how far a checkpoint of a series is from its base, tensor by tensor, as both are loaded.

    A head that was trained apart from the embeddings to which the base ties it is left out: no activation depends on
    it. An adapter's update is computed without rounding, as if merged. Memory holds two models for a whole checkpoint,
    one for an adapter.

    Raises:
        TsaeError: where the weights are not those of the base by name or shape, are quantised, or are not finite.
    """
    base, loader = _base_of(checkpoint), ModelLoader()
    model = loader.load(base)
    before = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(before)
    norms, adapter = {}, is_adapter(folder_of(checkpoint))
    if adapter:
        loader.load(checkpoint)  # refuses weights that have no place in the base, which stays as it is
    updates = _adapter_updates if adapter else _whole_updates
    for name, update in updates(checkpoint, base, before, tied):
        norms[name] = frobenius(update)
    odd = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    refuse(checkpoint.path, (odd is not None, f"{odd} holds values that are not finite, there or in {base.path}", None))
    total = sum(norm**2 for norm in norms.values())
    squared = sum(frobenius(weight) ** 2 for weight in before.values() if weight.is_floating_point())
    return Update(norms, math.sqrt(total / squared) if squared else 0.0)


def _base_of(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.base is None:
        raise TsaeError("belongs to no series, which names its base", where=checkpoint.path)
    return checkpoint.base


def _whole_updates(
    checkpoint: Checkpoint, base: Checkpoint, before: Mapping[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, update) of every parameter but those tied to others."""
    model = checkpoint.load_model()
    after = dict(model.named_parameters(remove_duplicate=False))
    lost = [name for name in before if name not in after]
    new = [name for name, _ in model.named_parameters() if name not in before and name not in tied]
    _check_names(lost, new, base.path, checkpoint)
    for name, weight in before.items():
        other = after[name]
        n = common_rows(name, other.shape, weight.shape)
        if n is not None and weight.is_floating_point() and other.is_floating_point():
            exact = _exact(weight, other)
            if weight.ndim:  # noise goes to all rows; those that the run lacks belong to tokens that no text holds
                other, weight = other[:n], weight[:n]
            yield name, other.to(exact) - weight.to(exact)
        elif n is None or weight.dtype != other.dtype or not torch.equal(weight, other):
            found, expected = (f"{each.dtype} of the shape {tuple(each.shape)}" for each in (other, weight))
            _refuse_tensor(name, found, expected, base.path, checkpoint)


def _adapter_updates(
    checkpoint: Checkpoint, base: Checkpoint, before: Mapping[str, torch.Tensor], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, update) of every parameter that an adapter changes, but those tied to others."""
    shapes = {name: tuple(weight.shape) for name, weight in before.items()}
    for name, update in fitting_updates(checkpoint, shapes.get, base.path, tied):
        exact = before[name].to(_exact(before[name]))
        rows = exact if exact.ndim else exact.reshape(1)
        yield name, update.rows(0, len(rows), rows) - rows


def _exact(*weights: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32
