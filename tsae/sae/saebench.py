"""A T-SAE as SAEBench takes SAEs: an object with weights, encode, decode and a config of its own.

::

    import sae_bench.evals.core.main as core

    bench = saebench_sae(tsae.TemporalSAE.load("sae"), "pythia-70m-deduped")
    core.multiple_evals(selected_saes=[("mine", bench)], …)

SAEBench recognises SAEs by their attributes, so it is not imported here. It loads models of TransformerLens by name.
A published SAE is described as its own files do: architecture, whether the bias is taken off the input, context, BOS.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tsae.checkpoints.sites import Site
from tsae.errors import TsaeError
from tsae.sae.exchange.saelens_files import ForeignConfig
from tsae.sae.model import TemporalSAE


class BenchConfig(SimpleNamespace):
    """The config that SAEBench reads: what it is computed by, and of which model; its scripts set dtype."""

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
    config, site = sae.config, Site.parse(sae.site)
    read: dict[str, Any] = {
        "context_size": 128, "prepend_bos": True, "dataset_path": "", "neuronpedia_id": None, "hook_head_index": None,
        "seqpos_slice": (None,), **_described(sae.training_info.get("sae_lens")),
    }  # fmt: skip
    if context_size is not None:
        read["context_size"] = context_size
    computed: dict[str, Any] = {"architecture": "jumprelu", "apply_b_dec_to_input": True}
    if isinstance(config, ForeignConfig):
        if config.normalize != "none":
            what = f"normalises every token ({config.normalize}), and SAEBench decodes codes without the activations"
            fix = "Load it in SAEBench with sae_lens (to_saelens writes that form)."
            raise TsaeError(what, where="saebench_sae", fix=fix)
        # Without a threshold a JumpReLU is a ReLU.
        plain = config.architecture == "jumprelu" and not bool(sae.threshold.any())
        computed["architecture"] = "standard" if plain else config.architecture
        computed["apply_b_dec_to_input"] = config.apply_b_dec_to_input
    versions = {name: read.pop(name, None) for name in ("sae_lens_version", "sae_lens_training_version")}
    named = {"model_name": model_name, "hook_name": sae.site}
    cfg = BenchConfig(
        **named, **read, **computed, d_in=sae.d_model, d_sae=config.d_sae, hook_layer=site.layer,
        dtype=str(sae.W_dec.dtype).removeprefix("torch."), device="cpu", normalize_activations="none",
        training_tokens=-1, metadata=SimpleNamespace(**named, **read, **versions),
    )  # fmt: skip
    return BenchSAE(sae, cfg)


def _described(metadata: Any) -> dict[str, Any]:
    """The reading instructions in a published SAE's files. Values of a wrong type are left out."""
    found = metadata if isinstance(metadata, dict) else {}
    texts = ("dataset_path", "neuronpedia_id", "sae_lens_version", "sae_lens_training_version")
    kinds: dict[str, type] = {**dict.fromkeys(texts, str), "prepend_bos": bool, "context_size": int}
    kept = {name: found[name] for name, kind in kinds.items() if type(found.get(name)) is kind}
    return kept if kept.get("context_size", 1) > 0 else kept | {"context_size": 128}
