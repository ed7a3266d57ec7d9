"""Options of `tsae export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ExportFormat = Literal["saelens", "delphi", "neuronpedia", "safetensors", "gguf"]


@dataclass(frozen=True)
class Export:
    """Write an SAE, its features or steering vectors in the form of another tool.

    saelens: the SAE as plain sae_lens loads it, with the same codes bit for bit. safetensors, gguf: features as
    steering vectors, the latter for llama.cpp. delphi: a cache of activations. neuronpedia: features, activations and
    labels.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE: a path, org/name on the Hugging Face Hub, or
    saelens:RELEASE/ID. Written as saelens, every command reads it without a network."""
    to: Path
    """Folder to write, new or empty."""
    format: ExportFormat = "saelens"
    """Which form."""
    architecture: Literal["jumprelu", "tsae_temporal"] = "jumprelu"
    """saelens: jumprelu for plain sae_lens; tsae_temporal, with encode_high, after `import tsae.sae.saelens`."""
    site: str | None = None
    """Where its activations come from, if the files of a published SAE do not say: blocks.14.hook_resid_post."""
    features: Path | None = None
    """Folder that `tsae encode` wrote. For steering vectors it gives their scale: a feature's typical activation."""
    choose: tuple[int, ...] = ()
    """Features by number; for neuronpedia by default all."""
    diff: Path | None = None
    """neuronpedia: folder that `tsae diff` wrote; gives the tokens' texts and which next tokens features promote."""
    explanations: Path | None = None
    """neuronpedia: folder that `tsae explain` wrote."""
    reader: str | None = None
    """delphi: whose activations; by default the base's."""
    context: int = 256
    """delphi: tokens of a sequence."""
    model: str = ""
    """What the other tool calls the model: for delphi a name or path of its tokenizer, for neuronpedia its id, for gguf
    the architecture of llama.cpp, such as qwen2."""
    source: str = "tsae"
    """neuronpedia: its id of the SAE, such as 14-tsae-4k."""
    creator: str = ""
    """neuronpedia: its id of the user who owns what is imported."""
