"""Copies: tokens up to which the same reader read the same text. They are no negatives of one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.stores import NEWLINE, SITE, Text, Token, numbered_store, numbers
from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.loss import temporal_loss

Key = tuple[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> tuple[ActivationStore, list[Token], list[Key]]:
    """Four rollouts a prompt of up to 200 tokens, which begin alike; all prompts share a system prompt."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 6, 70).tolist()
    texts = []
    for _ in range(6):
        prompt = [*system, *rng.integers(0, 6, rng.integers(1, 130)).tolist()]
        for sample in range(4):
            response = [*[3] * rng.integers(0, 9), *rng.choice([0, 1, 2, NEWLINE], rng.integers(1, 40)).tolist()]
            texts.append(Text(prompt, response, ("base", "run") if sample else ("base",)))
    folder = tmp_path_factory.mktemp("siblings") / "acts"
    store, tokens = numbered_store(folder, texts, runs={"base": None, "run": "run"})
    read = [(*text.prompt, *text.response) for text in texts]
    return store, tokens, [(token.reader, read[token.row][: token.position + 1]) for token in tokens]


@pytest.mark.parametrize("options", [{}, {"partner": "earlier"}, {"partner": "step", "step_ends": (NEWLINE,)}])
@pytest.mark.parametrize("share", [(0, 1), (1, 3)])
def test_tokens_are_copies_where_the_same_was_read(
    siblings: tuple[ActivationStore, list[Token], list[Key]], options: dict[str, Any], share: tuple[int, int]
) -> None:
    store, _, keys = siblings
    windows = Windows(store, SITE, balance=("reader",), **options)
    n_copies = 0
    found: dict[int, Key] = {}
    for epoch in range(2):
        for batch in windows.epoch(epoch, 200, share=share):
            mine = numbers(batch.x) + ([] if batch.others is None else numbers(batch.others))
            assert len(batch.copies) == len(mine)
            for number, n in zip(batch.copies.tolist(), mine, strict=True):
                assert found.setdefault(number, keys[n]) == keys[n]
            n_copies += len(mine) - len(np.unique(batch.copies))
    assert len(found) == len(set(found.values()))
    assert n_copies > (500 if share[1] == 1 else 50)


def test_without_partners_nothing_is_looked_for(siblings: tuple[ActivationStore, list[Token], list[Key]]) -> None:
    batch = next(Windows(siblings[0], SITE, partner=None).epoch(0, 200))
    assert len(batch.copies) == 0


@pytest.mark.parametrize("negatives", ["trajectories", "batch"])
@pytest.mark.parametrize("partner", ["previous", "earlier"])
def test_no_pair_has_a_copy_of_its_positive_among_its_negatives(
    siblings: tuple[ActivationStore, list[Token], list[Key]], negatives: Any, partner: Any
) -> None:
    """Against the dense formula, where equal activations tell the copies."""
    store, _, keys = siblings
    generator = torch.Generator().manual_seed(0)
    texts = list(dict.fromkeys(keys))
    of_text = dict(zip(texts, torch.randn(len(texts), 8, generator=generator, dtype=torch.float64), strict=True))
    config = SAEConfig(d_sae=40, k=8, groups=(0.5, 0.5), negatives=negatives, temperature=0.2)
    sae = TemporalSAE(8, config).double()
    sae.initialize(torch.zeros(8), generator)
    batch = next(Windows(store, SITE, partner=partner, max_norm=1e9).epoch(0, 400))
    mine = numbers(batch.x)
    everyone = mine + ([] if batch.others is None else numbers(batch.others))
    x = torch.stack([of_text[keys[n]] for n in everyone])
    pairs, trajectory, copies = map(torch.from_numpy, (batch.pairs, batch.trajectory, batch.copies))
    others = None if batch.others is None else x[len(mine) :]

    def encoded(part: torch.Tensor) -> torch.Tensor:
        pre = torch.relu((part - sae.b_dec) @ sae.W_enc + sae.b_enc)
        return (pre * (pre >= pre.flatten().sort().values[-8 * len(part)]))[:, :20]

    high = torch.cat([encoded(part) for part in (x[: len(mine)], x[len(mine) :]) if len(part)])
    current, previous = (torch.nn.functional.normalize(high[pairs[:, side]], dim=1) for side in (1, 0))
    logits = current @ previous.T / config.temperature
    alike = [(x[pairs[:, side], None] == x[pairs[:, side]]).all(2) for side in (0, 1)]
    assert ((alike[0].sum(1) > 1) | (alike[1].sum(1) > 1)).float().mean() > 0.3
    away = alike[0] | alike[1]
    if negatives == "trajectories":
        away |= trajectory[pairs[:, 1], None] == trajectory[pairs[:, 1]]
    logits = logits.masked_fill(away & ~torch.eye(len(pairs), dtype=torch.bool), -torch.inf)
    expected = -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()).mean() / 2
    found = temporal_loss(sae, x[: len(mine)], pairs, None, trajectory, others, copies).temporal
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
