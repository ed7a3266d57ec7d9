"""Options of the commands that give results to others: export, push."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tsae.report.hub.config import PushConfig

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
    """neuronpedia: folder that `tsae diff` wrote. It has the texts of tokens, and the next tokens that each
    feature promotes."""
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


@dataclass(frozen=True)
class Push:
    """Push an SAE to the Hugging Face Hub, with a card; of a run also its features and its page.

    Shows what would be pushed, and asks. --to-folder writes just that into a folder, and pushes nothing.

    Anybody then loads it: tsae run RUN --sae org/name, or tsae.load_sae("org/name").
    """

    repo: Positional[str]
    """Name on the Hub: org/name."""
    source: Positional[Path]
    """Folder of an SAE (`tsae train`), or of a whole run (`tsae run`, `tsae demo`)."""
    config: Annotated[PushConfig, arg(name="")] = field(default_factory=PushConfig)
    to_folder: Path | None = None
    """Folder for exactly what would be pushed: model, dataset and space. Nothing is pushed."""
    yes: bool = False
    """Push without asking."""
