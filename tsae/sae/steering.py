"""A feature as a steering vector: a file for llama.cpp or anything that reads safetensors, and a hook.

::

    vector = SteeringVector.of(sae, 412, scale=3.2)       # 3.2: the feature's typical activation
    handle = vector.attach(model, strength=2)             # a model of transformers
    llm.apply_model(lambda model: vector.attach(model))   # vLLM with enforce_eager=True, on one device
    handle.remove()

The vector is added to the residual stream at every token, those of the prompt too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tsae.base.files import as_path, reading, replacing
from tsae.base.filters import need_features
from tsae.base.tensors import write_tensors
from tsae.base.untrusted import parse_json
from tsae.checkpoints.hooks import attach, decoder_blocks, site_names
from tsae.checkpoints.sites import check_sites
from tsae.errors import TsaeError, needing
from tsae.sae.model import TemporalSAE


@dataclass(frozen=True)
class SteeringVector:
    """What is added to the residual stream at a site."""

    vector: torch.Tensor
    """(d_model,) float32."""
    site: str
    """TransformerLens name."""
    info: dict[str, Any] = field(default_factory=dict)
    """feature, scale, and the SAE's fingerprint."""

    def __post_init__(self) -> None:
        vector = self.vector
        if vector.ndim != 1 or not vector.is_floating_point() or not bool(vector.isfinite().all()):
            what = f"a vector of shape {tuple(vector.shape)} and {vector.dtype}, expected (d_model,) finite numbers"
            raise TsaeError(what, where="SteeringVector")

    @classmethod
    def of(cls, sae: TemporalSAE, feature: int, scale: float = 1.0) -> SteeringVector:
        """The feature's decoder row times a scale, in units of activation.

        Raises:
            TsaeError: where there is no such feature.
        """
        need_features([feature], sae.config.d_sae, "SteeringVector")
        vector = scale * sae.W_dec[feature].detach().float().cpu()
        return cls(vector, sae.site, {"feature": feature, "scale": scale, "sae": sae.fingerprint})

    def attach(self, model: Any, strength: float = 1.0) -> Any:
        """Add strength times the vector in every forward pass, until `remove` of the result is called.

        Args:
            model: of transformers, or the one inside of vLLM, whose blocks give (change, residual stream).
            strength: factor.

        Raises:
            TsaeError: where the model has no such site or another width, or the strength is not finite.
        """
        width = model.config.get_text_config().hidden_size if hasattr(model, "config") else len(self.vector)
        if width != len(self.vector) or not isfinite(strength):
            what = f"the vector has {len(self.vector)} numbers, the model {width} a token; the strength is {strength}"
            fix = "Give a vector of this model, and a finite strength."
            raise TsaeError(what, where="SteeringVector.attach", fix=fix)
        blocks = decoder_blocks(model)
        (place,) = check_sites([self.site], len(blocks), type(model).__name__)
        return attach(blocks, place, lambda hidden: hidden + strength * self.vector.to(hidden))

    def save(self, file: str | Path) -> Path:
        """Write a safetensors file with the tensor ``vector``; site and info are its metadata."""
        metadata = {"site": self.site, "info": json.dumps(self.info), "format": "pt"}
        return write_tensors(file, {"vector": self.vector}, metadata)

    @classmethod
    def load(cls, file: str | Path) -> SteeringVector:
        """Read a file that `save` wrote.

        Raises:
            TsaeError: where it is something else, or damaged.
        """
        with reading(file, "Export it again."), safe_open(as_path(file), framework="pt") as stream:
            metadata = stream.metadata() or {}
            return cls(stream.get_tensor("vector"), metadata["site"], parse_json(metadata["info"]))

    def to_gguf(self, file: str | Path, model_hint: str = "") -> Path:
        """Write a control vector of llama.cpp: ``llama-cli --control-vector-scaled FILE 1.5``.

        Args:
            file: its path.
            model_hint: llama.cpp's name of the architecture, such as qwen2.

        Raises:
            TsaeError: where gguf is not installed, or llama.cpp cannot steer this site: it adds after a block other
                than the first.
        """
        with needing("gguf", "writing GGUF", str(file)):
            from gguf import GGUFWriter
        name = site_names(self.site).get("llama.cpp")
        if name is None:
            what = f"llama.cpp cannot steer {self.site}: control vectors begin behind the second block"
            raise TsaeError(what, where=str(file), fix="Use an SAE of a later block, or export safetensors.")
        with replacing(file) as partial:
            writer = GGUFWriter(partial, "controlvector")
            writer.add_string("controlvector.model_hint", model_hint)
            writer.add_uint32("controlvector.layer_count", 1)
            writer.add_tensor(name, self.vector.numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return as_path(file)
