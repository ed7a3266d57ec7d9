"""The crosscoder of a base and another checkpoint (Lindsey et al. 2024), as a BatchTopK SAE of both activations.

A token is x = (x_base, x_other), from `tsae.activations.store.Pair`. One code stands for both, and a latent's decoder
row has a part for each:

    f = BatchTopK(ReLU((x − b_dec) W_enc + b_enc)),   x̂_m = f W_dec[:, m] + b_dec[m]      m = base, other

So the loss, the trainer and AuxK are those of the T-SAE. Rows have norm 1 over both parts together: sparsity does not
depend on how a latent is divided between the checkpoints. An L1 penalty on the sum of both norms would push shared
latents to one side (Minder et al., arXiv 2504.02922); nothing here does.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from tsae.errors import TsaeError
from tsae.sae.model import TemporalSAE

OF_PAIR = "crosscoder"
"""In training.json: ids of the two checkpoints."""


class Crosscoder(TemporalSAE):
    """A dictionary of two checkpoints; d_model is of both together. `tsae.train` of a `Pair` makes it."""

    def __repr__(self) -> str:
        c = self.config
        return f"Crosscoder({' and '.join(self.compared)}, d_model=2·{self.width}, d_sae={c.d_sae}, k={c.k})"

    @property
    def compared(self) -> tuple[str, str]:
        """Ids of the base and the other checkpoint."""
        base, other = self.training_info[OF_PAIR]
        return str(base), str(other)

    @property
    def width(self) -> int:
        """d_model of each checkpoint."""
        return self.d_model // 2

    @property
    def decoders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(d_sae, width) decoder rows for the base, and for the other checkpoint."""
        rows = self.W_dec.detach()
        return rows[:, : self.width], rows[:, self.width :]

    @property
    def relative_norm(self) -> torch.Tensor:
        """(d_sae,) ‖other's row‖ / (‖base's row‖ + ‖other's row‖): 0 base alone, ½ shared, 1 the other alone."""
        base, other = (rows.norm(dim=1) for rows in self.decoders)
        return other / (base + other).clamp_min(1e-12)

    @classmethod
    def from_sae(cls, sae: TemporalSAE) -> Self:
        """The same weights as a crosscoder.

        Raises:
            TsaeError: where it was not trained on a pair.
        """
        if isinstance(sae, cls):
            return sae
        if OF_PAIR not in sae.training_info:
            raise TsaeError(
                "is an SAE of single activations, a crosscoder is needed here",
                where=repr(sae),
                fix="Train one: tsae crosscoder, or tsae.train(tsae.Pair(store, reader)).",
            )
        found = cls(sae.d_model, sae.config, site=sae.site, training=sae.training_info)
        found.load_state_dict(sae.state_dict())
        return found.requires_grad_(False).to(sae.W_enc.device).eval()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # Published crosscoders have a threshold for every latent.
        self.threshold = torch.empty_like(state_dict["threshold"]) if "threshold" in state_dict else self.threshold
        return super().load_state_dict(state_dict, *args, **kwargs)
