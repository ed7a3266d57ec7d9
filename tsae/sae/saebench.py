"""A T-SAE as SAEBench takes SAEs: an object with weights, encode, decode and a config of its own.

::

    import sae_bench.evals.core.main as core

    bench = saebench_sae(tsae.TemporalSAE.load("sae"), "pythia-70m-deduped")
    core.multiple_evals(selected_saes=[("mine", bench)], …)

SAEBench knows SAEs by what they have, so that nothing of it is imported. It loads models of TransformerLens by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tsae.checkpoints.forward.hooks import Site
from tsae.sae.model import TemporalSAE


@dataclass(frozen=True)
class BenchMetadata:
    """What SAEBench reads of a config's metadata."""

    model_name: str
    hook_name: str
    context_size: int
    hook_head_index: int | None = None
    prepend_bos: bool = True
    dataset_path: str = ""
    seqpos_slice: tuple[int | None, ...] = (None,)
    neuronpedia_id: str | None = None
    sae_lens_version: str | None = None
    sae_lens_training_version: str | None = None


@dataclass
class BenchConfig:
    """What SAEBench reads of a config; its scripts set dtype."""

    model_name: str
    d_in: int
    d_sae: int
    hook_layer: int
    hook_name: str
    context_size: int
    metadata: BenchMetadata
    dtype: str = "float32"
    device: str = "cpu"
    architecture: str = "jumprelu"
    hook_head_index: int | None = None
    apply_b_dec_to_input: bool = True
    normalize_activations: str = "none"
    prepend_bos: bool = True
    dataset_path: str = ""
    seqpos_slice: tuple[int | None, ...] = (None,)
    training_tokens: int = -1
    neuronpedia_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a dict."""
        return {**vars(self), "metadata": vars(self.metadata)}


class BenchSAE(torch.nn.Module):
    """See the module.

    Args:
        sae: the T-SAE.
        cfg: its description.
    """

    def __init__(self, sae: TemporalSAE, cfg: BenchConfig) -> None:
        super().__init__()
        self.sae, self.cfg = sae, cfg
        self.W_enc, self.W_dec, self.b_enc, self.b_dec = sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec

    @property
    def device(self) -> torch.device:
        return self.W_dec.device

    @property
    def dtype(self) -> torch.dtype:
        return self.W_dec.dtype

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_in) -> (…, d_sae)."""
        return self.sae.encode(x)

    def decode(self, feature_acts: torch.Tensor) -> torch.Tensor:
        """(…, d_sae) -> (…, d_in)."""
        return self.sae.decode(feature_acts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, d_in) -> (…, d_in), the reconstruction."""
        return self.decode(self.encode(x))


def saebench_sae(sae: TemporalSAE, model_name: str, *, context_size: int = 128) -> BenchSAE:
    """The SAE for SAEBench's ``selected_saes``; weights are shared.

    Args:
        sae: trained at the output of a block.
        model_name: TransformerLens name of the model.
        context_size: tokens of the texts that SAEBench reads.

    Raises:
        TsaeError: where the SAE's site is not one of the residual stream.
    """
    site = Site.parse(sae.site)
    metadata = BenchMetadata(model_name, sae.site, context_size)
    dtype = str(sae.W_dec.dtype).removeprefix("torch.")
    cfg = BenchConfig(
        model_name, sae.d_model, sae.config.d_sae, site.layer, sae.site, context_size, metadata, dtype=dtype
    )
    return BenchSAE(sae, cfg)
