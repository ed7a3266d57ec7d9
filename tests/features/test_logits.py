"""Logit effects, against the slope of the real model's logits when its last residual stream moves along a feature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tsae
from tsae.checkpoints.hooks import decoder_blocks, rewritten
from tsae.errors import TsaeError
from tsae.features.contexts import logit_effects


def test_effects_are_the_slope_of_the_logits(any_model: Path) -> None:
    checkpoint = tsae.CheckpointSeries.load(any_model).base
    model = checkpoint.load_model(dtype="float32").double()
    d_model = model.config.get_text_config().hidden_size
    site = f"blocks.{len(decoder_blocks(model)) - 1}.hook_resid_post"
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms of a fresh model are all ones, which would hide one that is forgotten.
            if "norm" in name or "ln_f" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    # A stream of mean 0 and length 1 per dimension, and directions at right angles to it and of mean 0: along them a
    # norm is linear with slope 1, to second order.
    basis = torch.linalg.qr(torch.cat([torch.ones(d_model, 1), torch.randn(d_model, 6)], dim=1).double())[0].T
    stream, directions = basis[1] * d_model**0.5, basis[2:]

    def logits(x: torch.Tensor) -> torch.Tensor:
        with rewritten(model, site, lambda hidden: x.to(hidden.dtype).expand_as(hidden)), torch.no_grad():
            return model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]

    sae = tsae.TemporalSAE(d_model, tsae.SAEConfig(d_sae=len(directions), k=2, groups=(0.5, 0.5)), site=site)
    sae.W_dec.data = directions.float()
    n = len(logits(stream)) - 1  # One token without a string, as where a vocabulary is padded.
    found = logit_effects(sae, model.float(), [str(i) for i in range(n)], n=4)
    model.double()
    for feature, direction in enumerate(directions):
        slope = ((logits(stream + 0.02 * direction) - logits(stream - 0.02 * direction)) / 0.04)[:n]
        slope = (slope - slope.mean()).numpy()
        row = found.loc[feature]
        top = np.argsort(-slope)[:4]
        assert row.promotes == [str(i) for i in top]
        np.testing.assert_allclose(row.promotes_by, slope[top], rtol=2e-3)
        bottom = np.argsort(slope)[:4]
        assert row.suppresses == [str(i) for i in bottom]
        np.testing.assert_allclose(row.suppresses_by, slope[bottom], rtol=2e-3)


def test_a_direction_that_moves_no_logit_promotes_nothing(llama: Path) -> None:
    sae = tsae.TemporalSAE(16, tsae.SAEConfig(d_sae=8, k=2), site="blocks.2.hook_resid_post")
    sae.W_dec.data.normal_(generator=torch.Generator().manual_seed(0))
    sae.W_dec.data[3] = 0
    found = logit_effects(sae, tsae.CheckpointSeries.load(llama).base, [str(i) for i in range(20)], n=4)
    assert found.loc[3].tolist() == [[], [], [], []]
    assert len(found.loc[2].promotes) == len(found.loc[2].suppresses_by) == 4


def test_a_model_of_another_width_is_refused(llama: Path) -> None:
    sae = tsae.TemporalSAE(7, tsae.SAEConfig(d_sae=8, k=2), site="blocks.0.hook_resid_post")
    with pytest.raises(TsaeError, match="no unembedding that reads 7 dimensions"):
        logit_effects(sae, tsae.CheckpointSeries.load(llama).base, ["a", "b"])
