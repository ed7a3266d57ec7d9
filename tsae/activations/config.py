"""Config of a capture, and words that name how its tokens are read. Imports nothing heavy: the CLI builds its options
from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError

Partner = Literal["previous", "earlier", "step"]
Axis = Literal["reader", "run", "band", "outcome"]


@dataclass(frozen=True)
class CaptureConfig:
    """How activations are captured."""

    plan: Literal["auto", "paired", "all"] = "auto"
    """Which reader reads what. "paired": the base reads everything, every other checkpoint the base's trajectories and
    its own, which is what the shift decomposition needs. "all": every reader reads everything. "auto": "paired" where
    the checkpoints of the series sampled the rollouts, else "all"."""
    backend: Literal["huggingface", "transformer_lens"] = "huggingface"
    """Forward hooks on the Hugging Face model (sdpa attention), or a TransformerBridge (eager, slower)."""
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward pass; "auto" is that of the checkpoint's file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Stored precision; "auto" is that of the forward pass."""
    batch_tokens: int = 16_384
    """Tokens of one forward pass, padding included."""
    shard_tokens: int = 500_000
    """Tokens of one shard; an interruption costs at most the shard in progress."""
    token_statistics: bool = False
    """Store the entropy of each token's prediction and the token's log-probability too, in 8 bytes a token. All layers
    then run, not only those up to the last site, and the head on every token: from a middle layer of a 7B model about
    twice the time."""
    device: str = "cpu"
    """A torch device."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="CaptureConfig")
