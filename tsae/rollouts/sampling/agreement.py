"""Are responses samples of a checkpoint? Its own forward pass over some of them says.

If a token was sampled from p = softmax(logits / temperature), then log p(token) has the mean −H(p) and the variance
Σ p log² p − H². Summed over tokens, (log p(token) + H) / √variance is standard normal: another model, another
temperature, top-p or a repetition penalty move it away from 0. If the server gave log-probabilities, they are compared
with the checkpoint's as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.sampling.batches import Response

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGEST_Z, _LEAST_EXCESS = 5.0, 0.02
"""Both must be exceeded: over many tokens a difference of rounding is certain, too."""
_LARGEST_DIFFERENCE = 0.1
"""Nats; bfloat16 on one side makes .01 to .03."""


@dataclass(frozen=True)
class Agreement:
    """What a checkpoint says of responses that are said to be its own."""

    n_responses: int
    n_tokens: int
    excess: float
    """Nats per token that the tokens are likelier than the checkpoint's own samples; negative where less likely."""
    z: float
    """The same in standard errors."""
    difference: float | None
    """Mean absolute difference, in nats, of the server's log-probabilities and the checkpoint's; None without any."""

    def __str__(self) -> str:
        logprobs = "" if self.difference is None else f"; log-probabilities differ by {self.difference:.3f} nats"
        return (
            f"{self.n_tokens} tokens of {self.n_responses} responses are {self.excess:+.3f} nats likelier than the "
            f"checkpoint's own samples (z {self.z:+.1f}){logprobs}"
        )

    def check(self, where: str) -> None:
        """Refuse responses of another policy.

        Raises:
            TsaeError: where tokens are likelier or less likely than they could be by chance, or log-probabilities
                differ.
        """
        fix = (
            "Let the server serve this checkpoint, without top_p, top_k, min_p and penalties (vLLM: "
            "--generation-config vllm), or name the checkpoint that it serves (--checkpoints)."
        )
        if abs(self.z) > _LARGEST_Z and abs(self.excess) > _LEAST_EXCESS:
            raise TsaeError(f"its responses are not samples of this checkpoint: {self}", where=where, fix=fix)
        if self.difference is not None and self.difference > _LARGEST_DIFFERENCE:
            raise TsaeError(f"its log-probabilities are not this checkpoint's: {self}", where=where, fix=fix)


def agreement(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[Response], temperature: float
) -> Agreement:
    """Read responses, one after another, with the checkpoint that is said to have sampled them.

    Args:
        model: the checkpoint's.
        prompts: token ids.
        responses: to them; those whose tokens are not known exactly count as far as their texts' tokens go.
        temperature: at which they were sampled.
    """
    import torch

    total, variance, n = 0.0, 0.0, 0
    differences: list[np.ndarray] = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*prompt, *response.ids]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        log_p = (logits / temperature).log_softmax(-1).double()
        p = log_p.exp()
        mean = torch.special.xlogy(p, p).sum(-1)
        each = log_p.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        square = torch.where(p > 0, p * log_p.square(), 0.0).sum(-1)
        total += float((each - mean).sum())
        variance += float((square - mean.square()).clamp(min=0).sum())
        n += len(response.ids)
        if response.logprobs is not None and len(response.logprobs) == len(response.ids):
            given = torch.tensor(response.logprobs, dtype=torch.float64, device=each.device)
            plain = logits.log_softmax(-1).double().gather(-1, ids[0, len(prompt) :, None])[:, 0]
            # Servers give them before the temperature or after it.
            nearest = min(((given - ours).abs() for ours in (plain, each)), key=lambda found: float(found.mean()))
            differences.append(nearest.cpu().numpy())
    return Agreement(
        n_responses=len(responses),
        n_tokens=n,
        excess=total / max(n, 1),
        z=total / max(variance, 1e-12) ** 0.5,
        difference=float(np.concatenate(differences).mean()) if differences else None,
    )
