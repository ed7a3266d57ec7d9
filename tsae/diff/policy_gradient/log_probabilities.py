"""Log-probabilities of whole responses under the policies that sampled them, from the log or read by checkpoints."""

from __future__ import annotations

import numpy as np

from tsae.activations.forward_batches import OutOfMemory, read_batches
from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.checkpoints.hooks import HuggingFaceReader, PredictingReader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

COLUMN = "logprob"
"""Column of the rollouts: Σ log π over the response tokens that the policy sampled, end token included, in nats, at the
temperature of sampling."""


def logged(rollouts: Rollouts, rows: np.ndarray) -> np.ndarray | None:
    """(n,) log-probabilities from the log, or None if any is missing."""
    if COLUMN not in rollouts.frame.columns:
        return None
    found = rollouts.frame[COLUMN].to_numpy(dtype=float)[rows]
    return found if np.isfinite(found).all() else None


def response_logprobs(
    rollouts: Rollouts, rows: np.ndarray, series: CheckpointSeries, *, device: str = "cpu", batch_tokens: int = 16_384
) -> np.ndarray | None:
    """Let every policy read its own responses again.

    Args:
        rollouts: has the trajectories.
        rows: (n,) of them.
        series: has the checkpoints that sampled them, at temperature 1.
        device: torch device.
        batch_tokens: tokens in a forward pass, with padding.

    Returns:
        (n,) Σ log π in nats; None where a policy is not in the series.

    Raises:
        TsaeError: where a batch does not fit into memory, or a checkpoint has another tokenizer or too short a context.
    """
    policy = rollouts.frame.policy.to_numpy()[rows]
    if not set(policy) <= {checkpoint.id for checkpoint in series}:
        return None
    prompt, found = rollouts.lengths("prompt_ids")[rows], np.empty(len(rows))
    for id in dict.fromkeys(policy):
        mine = np.flatnonzero(policy == id)
        checkpoint = series[id]
        check_tokenizer(checkpoint, rollouts, rows=rows[mine])
        model = checkpoint.load_model(device=device)
        config = model.config.get_text_config()
        check_context(rollouts, getattr(config, "max_position_embeddings", None), config.vocab_size, rows=rows[mine])
        reader = PredictingReader(HuggingFaceReader(model, ["blocks.0.hook_resid_pre"]))
        texts = [np.concatenate(rollouts.tokens(int(rows[i]))) for i in mine]
        try:
            for batch in read_batches(reader, texts, batch_tokens):
                ends = np.cumsum([len(texts[i]) for i in batch.texts])
                parts = np.split(batch.values["logprob"].double().cpu().numpy(), ends[:-1])
                for i, part in zip(mine[batch.texts], parts, strict=True):
                    found[i] = part[prompt[i] :][rollouts.sampled(int(rows[i]))].sum()
        except OutOfMemory as error:
            what = f"a batch of {batch_tokens} tokens does not fit into memory"
            raise TsaeError(what, where="response_logprobs", fix="Set a smaller batch_tokens.") from error
    return found
