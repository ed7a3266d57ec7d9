"""Which tokens of a sample carry its share.

A GRPO loss has a summand for every token, so a sample's share is a sum over tokens: −c_t · ∂loss/∂log π_t · D_{a_t} log
π_t, with ∂loss/∂log π_t holding ratio, clipping and KL (of a ratio of whole responses every token's part of it). One
forward differentiation along a_t gives all tokens of a sample.
"""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tsae.attribution.replay.passes import Chunk, Known, Rows, Run, chunks, inputs_of, log_softmax, summands


def token_shares(
    run: Run, step: Rows, known: Known, rows: np.ndarray, direction: torch.Tensor
) -> dict[int, np.ndarray]:
    """(T,) share of every token of some responses; 0 for tokens that the policy did not sample.

    Args:
        run: has the rows; its model has the weights before the step.
        step: that used them.
        known: their log-probabilities.
        rows: of the rollouts.
        direction: (P,) of the target in this step, −c_t a_t.
    """
    trained, generation = run.trained, run.plan.generations[step.update.generation]
    weights = {name: parameter.detach() for name, parameter in trained.parameters.items()}
    parts = direction.to(trained.device).split(trained.sizes)
    along = {n: part.view_as(w).to(w.dtype) for (n, w), part in zip(weights.items(), parts, strict=True)}
    found = {}
    for chunk in chunks(run, rows, generation):
        # Of torch's attentions, this one can be differentiated forward.
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # Forward differentiation in torch uses scripts that torch itself deprecates.
            warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
            log, slope = torch.func.jvp(partial(_log, run, chunk), (weights,), (along,))[:2]
        leaf = log.detach().requires_grad_()
        with torch.enable_grad():
            policy, kl = summands(run, step, known, chunk, leaf)
            pull = torch.autograd.grad((policy + kl).sum(), leaf)[0]
        of_tokens = (pull * slope).double().cpu()
        for row, one, counted in zip(chunk.rows.tolist(), of_tokens, chunk.counted.cpu(), strict=True):
            sampled = run.rollouts.sampled(row)
            values = np.zeros(len(sampled))
            values[sampled] = one[counted].numpy()
            found[row] = values
    return found


def _log(run: Run, chunk: Chunk, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = torch.func.functional_call(run.trained.model, weights, kwargs=inputs_of(run, chunk)).logits
    return log_softmax(run, chunk, logits).gather(-1, chunk.scored_ids[..., None])[..., 0]
