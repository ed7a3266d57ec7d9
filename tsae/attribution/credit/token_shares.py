"""Which tokens of a sample carry its share.

A sample's gradient is the sum over its tokens, so its share ⟨w_s, g⟩ is one too: of token t it is
w_i A_i ⟨w_s, ∇ log π_t⟩ (`tsae.attribution.credit.shares`). The vectors w_s are kept on disk when shares are computed,
in bfloat16: n_targets for every step, beside the gradients of a batch. One forward differentiation along w_s gives all
tokens of a sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.base.disk.tensors import tensors_replacing
from tsae.base.files import as_path, reading
from tsae.base.seal import check_seal, seal
from tsae.checkpoints.forward.hooks import positions
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


class Directions:
    """The vectors w_s of every step, on disk.

    Args:
        folder: of the files, one a step.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder)

    def keep(self, step: int, vectors: torch.Tensor) -> None:
        """Write those of a step, (n_targets, P)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tensors_replacing(self._file(step), {"vectors": vectors.to(torch.bfloat16)}) as partial:
            seal(self.folder, coming={self._file(step).name: partial})

    def read(self, step: int, target: int) -> torch.Tensor:
        """(P,) float32 of a target.

        Raises:
            TsaeError: where they were not kept, or are damaged.
        """
        if not self._file(step).is_file():
            raise TsaeError(
                f"holds no {self._file(step).name}: directions of the targets were not kept",
                where=self.folder,
                fix="Attribute again, with a larger budget for the disk (budget_gb).",
            )
        self.check([self._file(step)])
        with reading(self._file(step), "Attribute again."), safe_open(self._file(step), "pt") as file:
            found: torch.Tensor = file.get_slice("vectors")[target].float()
        return found

    def check(self, files: Sequence[Path] | None = None) -> None:
        """Compare files, by default all, with their checksums.

        Raises:
            TsaeError: where they are damaged, or the checksums are lost.
        """
        there = sorted(self.folder.glob("step-*.safetensors")) if files is None else files
        check_seal(self.folder, "Attribute again.", [file.name for file in there], others=files is None)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"


def token_shares(
    store: GradientStore, path: TrainingPath, directions: Directions, rollouts: Rollouts, row: int, step: int, j: int
) -> np.ndarray:
    """(T,) share of every token of a response in the j-th target; 0 for tokens that the policy did not sample.

    Args:
        store: of the run's gradients.
        path: has a checkpoint at or around the step's beginning.
        directions: kept by `shares`.
        rollouts: of the log.
        row: of the rollouts.
        step: that trained on it.
        j: the target.
    """
    of_step = store.check(step)
    with reading(of_step, "Attribute again."), safe_open(of_step, "pt") as file:
        place = file.get_tensor("rows").tolist().index(row)
        pull = float(file.get_tensor("pulls")[place])
    path.put(step - 1)
    trained = path.trained
    prompt, response = rollouts.tokens(row)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None].to(trained.device)
    mask = torch.ones_like(ids)
    weights = {name: parameter.detach() for name, parameter in trained.parameters.items()}
    parts = directions.read(step, j).to(trained.device).split(trained.sizes)
    along = {n: part.view_as(w).to(w.dtype) for (n, w), part in zip(weights.items(), parts, strict=True)}

    def log(moved: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
        logits = torch.func.functional_call(trained.model, moved, kwargs=inputs).logits
        every = torch.log_softmax(logits[:, :-1].float() / store.loss.temperature, dim=-1)
        return every.gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :, 0]

    with warnings.catch_warnings():
        # Forward differentiation in torch uses scripts that torch itself deprecates.
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
        slopes = torch.func.jvp(log, (weights,), (along,))[1]
    found: np.ndarray = pull * slopes.double().cpu().numpy() * rollouts.sampled(row)
    return found
