"""A T-SAE as SAEBench takes SAEs: an object with weights, encode, decode and a config of its own.

::

    import sae_bench.evals.core.main as core

    bench = saebench_sae(tsae.TemporalSAE.load("sae"), "pythia-70m-deduped")
    core.multiple_evals(selected_saes=[("mine", bench)], …)

SAEBench knows SAEs by what they have, so that nothing of it is imported. It loads models of TransformerLens by name.
A published SAE is described as its own files do: architecture, whether the bias is taken off the input, context, BOS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tsae.checkpoints.hooks import Site
from tsae.errors import TsaeError
from tsae.sae.exchange.saelens_files import ForeignConfig
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


def saebench_sae(sae: TemporalSAE, model_name: str, *, context_size: int | None = None) -> BenchSAE:
    """The SAE for SAEBench's ``selected_saes``; weights are shared.

    Args:
        sae: trained at the output of a block, or published.
        model_name: TransformerLens name of the model.
        context_size: tokens of the texts that SAEBench reads; by default what a published SAE's files say, else 128.

    Raises:
        TsaeError: where the SAE's site is not one of the residual stream, or it normalises every token: SAEBench
            decodes codes alone, which do not tell by what.
    """
    site = Site.parse(sae.site)
    config, told = sae.config, _told(sae.training_info.get("sae_lens"))
    if context_size is not None:
        told["context_size"] = context_size
    metadata = BenchMetadata(model_name, sae.site, **{"context_size": 128, **told})
    shared = ("context_size", "prepend_bos", "dataset_path", "neuronpedia_id")
    computed: dict[str, Any] = {name: getattr(metadata, name) for name in shared}
    if isinstance(config, ForeignConfig):
        if config.normalize != "none":
            raise TsaeError(
                f"normalises every token ({config.normalize}), and SAEBench decodes codes without the activations",
                where="saebench_sae",
                fix="Load it in SAEBench with sae_lens (to_saelens writes that form).",
            )
        # Without a threshold a JumpReLU is a ReLU.
        plain = config.architecture == "jumprelu" and not bool(sae.threshold.any())
        computed["architecture"] = "standard" if plain else config.architecture
        computed["apply_b_dec_to_input"] = config.apply_b_dec_to_input
    dtype = str(sae.W_dec.dtype).removeprefix("torch.")
    cfg = BenchConfig(
        model_name, sae.d_model, config.d_sae, site.layer, sae.site, metadata=metadata, dtype=dtype, **computed
    )
    return BenchSAE(sae, cfg)


def _told(metadata: Any) -> dict[str, Any]:
    """What a published SAE's files say of how it is to be read, where that is of use."""
    found = metadata if isinstance(metadata, dict) else {}
    texts = ("dataset_path", "neuronpedia_id", "sae_lens_version", "sae_lens_training_version")
    told = {name: found[name] for name in texts if isinstance(found.get(name), str)}
    if isinstance(found.get("prepend_bos"), bool):
        told["prepend_bos"] = found["prepend_bos"]
    size = found.get("context_size")
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        told["context_size"] = size
    return told
