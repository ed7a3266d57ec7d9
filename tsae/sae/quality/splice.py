"""Splice the SAE's reconstruction into the residual stream, and measure what the model loses.

One forward pass as the model is, one with x̂ in place of x at the counted tokens, one with 0 there:

- loss: mean next-token cross-entropy in nats, at the replaced tokens that have a next one;
- recovered: (loss with 0 − loss with x̂) / (loss with 0 − loss as it is); 1 where nothing is lost, 0 where x̂ is
  no better than nothing. It means nothing where zeros do the model no harm;
- KL: mean over replaced tokens of KL(model as it is ‖ model with x̂), in nats.

Special tokens and tokens beyond the outlier limit keep their activations: the SAE saw none of them in training.
Intervals are percentile bootstraps over problems. By default only predictions of response tokens count, although
prompts are replaced too: reinforcement learning does not train predictions of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import reduce

from tsae.activations.forward_batches import pad
from tsae.activations.shard import TokenSpan, rows_mask
from tsae.activations.store import ActivationStore
from tsae.base.statistics import counts, percentile_interval
from tsae.checkpoints.hooks import positions, rewritten
from tsae.checkpoints.loading import Checkpoint, ModelLoader, weights_fingerprint
from tsae.errors import TsaeError, refuse
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DRAWS = 1000


@dataclass(frozen=True)
class LossRecovered:
    """What one reader loses. Losses and KL are in nats per token."""

    reader: str
    n_tokens: int
    """Tokens whose predictions count."""
    n_trajectories: int
    n_problems: int
    loss: float
    """Loss of the model as it is."""
    loss_spliced: float
    loss_ablated: float
    recovered: float
    recovered_low: float
    """Bounds of the 95 % interval over problems."""
    recovered_high: float
    kl: float
    kl_low: float
    kl_high: float


@torch.no_grad()
def loss_recovered(
    sae: TemporalSAE,
    store: ActivationStore,
    checkpoint: Checkpoint,
    rows: list[int],
    *,
    span: TokenSpan = "all",
    targets: TokenSpan = "response",
    beyond: Callable[[torch.Tensor], torch.Tensor] | None = None,
    batch_tokens: int = 1024,
    loader: ModelLoader | None = None,
) -> LossRecovered:
    """Measure on trajectories of a store.

    Args:
        sae: fits the store.
        store: names the trajectories, and the weights that its reader had.
        checkpoint: the reader.
        rows: row ids of the trajectories.
        span: whose tokens are replaced.
        targets: predictions of which tokens count, made at replaced tokens.
        beyond: (…, d_model) -> (…) bool, outliers, which are not replaced; by default none are.
        batch_tokens: tokens of a forward pass, padding included; one trajectory at least. Logits of the whole
            vocabulary are held for each.
        loader: loads the model; one for several adapters loads their base once.

    Raises:
        TsaeError: where the checkpoint is not the one that the store was captured with, or no tokens count.
    """
    device = sae.W_dec.device
    model = (loader or ModelLoader(device=str(device))).load(checkpoint)
    expected = store.reader_info(checkpoint.id).get("weights")
    # After loading, so that a rewrite in between is seen.
    if expected is not None and expected != weights_fingerprint(checkpoint):
        what = f"its weights or its config are not those that reader {checkpoint.id} had when {store.path} was captured"
        raise TsaeError(what, where=checkpoint.path, fix="Give the series that was captured, or capture again.")
    rollouts = store.rollouts
    texts = [np.concatenate(rollouts.tokens(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: len(texts[i]))
    sums = np.zeros((len(rows), 6))  # n_next, loss, spliced, ablated, n, KL
    while order:
        width, batch = 0, list[int]()
        while order and (not batch or (len(batch) + 1) * max(width, len(texts[order[0]])) <= batch_tokens):
            batch.append(order.pop(0))
            width = len(texts[batch[-1]])
        ids, mask = pad([texts[t] for t in batch])
        counted, scored = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for i, t in enumerate(batch):
            n = len(texts[t])
            inside, predicted = (
                rows_mask(texts[t], np.array([0, n]), rollouts, np.array([rows[t]]), which, special)
                for which, special in ((span, store.special_ids), (targets, frozenset()))
            )
            counted[i, :n] = torch.from_numpy(inside)
            # Of the last token, which predicts none, the KL counts where the token itself does.
            scored[i, :n] = torch.from_numpy(np.append(predicted[1:], predicted[-1]))
        found = spliced_losses(
            model, sae, *(tensor.to(device) for tensor in (ids, mask, counted, scored)), beyond=beyond
        )
        sums[batch] = found.cpu().numpy()
    what = f"none of the {len(rows)} trajectories has a token to replace"
    refuse(store.path, (sums[:, 0].sum() == 0, what, "Choose another token span, or raise max_norm."))
    problem_ids = rollouts.table["problem_id"].to_pylist()
    return _summary(checkpoint.id, sums, [problem_ids[row] for row in rows])


def spliced_losses(
    model: PreTrainedModel,
    sae: TemporalSAE,
    ids: torch.Tensor,
    mask: torch.Tensor,
    counted: torch.Tensor,
    scored: torch.Tensor,
    *,
    beyond: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sums over the tokens of every row that are replaced and scored.

    Args:
        model: a causal LM.
        sae: of one of its sites.
        ids: (B, T) token ids, right-padded.
        mask: (B, T) 1 for real tokens.
        counted: (B, T) bool, tokens to replace.
        scored: (B, T) bool, tokens whose prediction of the next one counts.
        beyond: (…, d_model) -> (…) bool, outliers, which are not replaced; by default none are.

    Returns:
        (B, 6) float64: such tokens with a next one; over these the loss as it is, with x̂, with 0; all such tokens; over
        these KL.
    """
    reached: list[torch.Tensor] = []

    def reconstructed(hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.float()
        replaced = counted if beyond is None else counted & ~beyond(x)
        reached.append(replaced)
        x[replaced] = sae.decode(sae.encode(x[replaced]), x[replaced])
        return x.to(hidden.dtype)

    def ablated(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.masked_fill(reached[0][..., None], 0.0)

    clean = _log_probabilities(model, ids, mask)
    with rewritten(model, sae.site, reconstructed):
        spliced = _log_probabilities(model, ids, mask)
    with rewritten(model, sae.site, ablated):
        zero = _log_probabilities(model, ids, mask)
    replaced = reached[0] & scored
    kl = reduce(clean.exp() * (clean - spliced), "batch token vocabulary -> batch token", "sum")
    has_next = replaced[:, :-1] & mask[:, 1:].bool()
    columns = [has_next.double().sum(1)]
    for log_p in (clean, spliced, zero):
        loss = -log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        columns.append((loss.double() * has_next).sum(1))
    columns += [replaced.double().sum(1), (kl.double() * replaced).sum(1)]
    return torch.stack(columns, dim=1)


def _log_probabilities(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T, vocabulary) float32."""
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    return logits.float().log_softmax(-1)


def _summary(reader: str, sums: np.ndarray, problems: list[str]) -> LossRecovered:
    code = np.unique(problems, return_inverse=True)[1]
    by_problem = np.zeros((code.max() + 1, sums.shape[1]))
    np.add.at(by_problem, code, sums)

    def measures(totals: np.ndarray) -> np.ndarray:
        """(…, 6) sums -> (…, 5): losses, recovered, KL."""
        n_next, clean, spliced, zero, n, kl = np.moveaxis(totals, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Where zeroing does no harm, there is nothing to recover.
            recovered = np.where(zero == clean, np.nan, (zero - spliced) / (zero - clean))
            return np.stack([clean / n_next, spliced / n_next, zero / n_next, recovered, kl / n], axis=-1)

    loss, spliced, zero, recovered, kl = measures(by_problem.sum(0)).tolist()
    n = len(by_problem)
    drawn = measures(counts(n, _DRAWS, 0) @ by_problem)
    (recovered_low, kl_low), (recovered_high, kl_high) = percentile_interval(drawn[:, 3:])
    return LossRecovered(
        reader=reader,
        n_tokens=int(sums[:, 4].sum()),
        n_trajectories=len(sums),
        n_problems=n,
        loss=loss,
        loss_spliced=spliced,
        loss_ablated=zero,
        recovered=recovered,
        recovered_low=float(recovered_low),
        recovered_high=float(recovered_high),
        kl=kl,
        kl_low=float(kl_low),
        kl_high=float(kl_high),
    )
