"""The temporal SAE: its loss worked by hand, its gradients, its files, its training on planted features."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from safetensors.torch import save_file

from support.builders import random_sae, synthetic_store
from support.damage import resealed
from support.refusals import refuses
from support.stores import numbers_by_hand
from tsae.activations.batches import Windows
from tsae.activations.store import ActivationStore
from tsae.base.distributed import Processes
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.evaluation import evaluate
from tsae.sae.training.loss import temporal_loss
from tsae.sae.training.train import train
from tsae.sae.training.trainer import Trainer, calibrate, geometric_median

SITE = "blocks.1.hook_resid_post"


# --- the formulas as they are written down, without regard to speed


def batch_topk(pre: torch.Tensor, k: int) -> torch.Tensor:
    limit = pre.flatten().sort(descending=True).values[k * len(pre) - 1]
    return pre * (pre >= limit)


def info_nce(
    current: torch.Tensor,
    previous: torch.Tensor,
    trajectory: torch.Tensor | None = None,
    config: SAEConfig | None = None,
) -> torch.Tensor:
    config = config or SAEConfig(temperature=1.0)
    if config.similarity == "cosine":
        current, previous = (c / c.norm(dim=1, keepdim=True).clamp_min(1e-12) for c in (current, previous))
    logits = current @ previous.T / config.temperature
    if trajectory is not None:
        same = trajectory[:, None] == trajectory[None, :]
        logits = logits.masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), -torch.inf)
    return -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()).mean() / 2


def weighted_l1(x: torch.Tensor, high: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The authors' formula, over √d_model."""
    current, partner = pairs[:, 1], pairs[:, 0]
    alike = torch.nn.functional.cosine_similarity(x[current], x[partner], dim=-1)
    return ((high[current] - high[partner]).abs().sum(-1) * alike).mean() / x.shape[1] ** 0.5


def bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().double()


def dense_terms(
    sae: TemporalSAE,
    x: torch.Tensor,
    pairs: torch.Tensor,
    dead: torch.Tensor,
    trajectory: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda factor: factor,
) -> dict[str, torch.Tensor]:
    """The loss's terms in float64; values, not gradients, are of products whose factors are rounded."""
    c, tokens = sae.config, (x if others is None else torch.cat([x, others])).double()
    W_enc, W_dec, b_enc, b_dec = (p.double() for p in (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec))
    exact = (tokens - b_dec) @ W_enc
    pre = torch.relu(exact + (rounded(tokens - b_dec) @ rounded(W_enc) - exact).detach() + b_enc)
    codes = torch.cat([batch_topk(some, c.k) for some in pre.split([len(x), len(pre) - len(x)]) if len(some)])
    x, n = x.double(), len(x)
    errors = [x - codes[:n, :end] @ W_dec[:end] - b_dec for end in [round(s * c.d_sae) for s in np.cumsum(c.groups)]]
    high = codes[:, : c.d_high]
    if c.temporal == "l1":
        temporal = weighted_l1(tokens, high, pairs)
    else:
        of_pairs = None if trajectory is None else trajectory[pairs[:, 1]]
        temporal = info_nce(high[pairs[:, 1]], high[pairs[:, 0]], of_pairs, c)
    again = exact[:n] + (rounded(x) @ rounded(W_enc) - b_dec @ W_enc - exact[:n]).detach()
    kept = torch.relu(again + b_enc) * dead
    kept = kept * (kept >= kept.sort(1, descending=True).values[:, [sae.d_model // 2 - 1]])
    residual = errors[-1].detach()
    unexplained = (residual - rounded(kept) @ rounded(W_dec)).pow(2).mean()
    terms = {
        "reconstruction_high": errors[0].pow(2).mean(),
        "reconstruction": errors[-1].pow(2).mean(),
        "temporal": temporal,
        "aux": unexplained / (residual - residual.mean(0)).pow(2).mean(),
    }
    total = sum(weight * error.pow(2).mean() for weight, error in zip(c.weights, errors, strict=True))
    total = total + c.temporal_weight * (c.weights[0] if c.temporal == "l1" else 1) * temporal
    return {**terms, "total": total + c.aux_weight * terms["aux"]}


@pytest.mark.parametrize("apart", [False, True], ids=["partners in the batch", "partners of their own"])
@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"k": 4, "temperature": 0.1},
        {"k": 30, "temperature": 0.01},
        {"group_weights": (0.2, 0.8)},
        {"groups": (1.0,)},
        {"groups": (1.0,), "similarity": "inner"},
        {"groups": (0.1, 0.3, 0.6), "group_weights": (0.5, 2.0, 1.5)},
        {"groups": (0.1, 0.3, 0.6), "similarity": "inner"},
        {"temporal": "l1", "k": 1},
        {"temporal": "l1", "group_weights": (0.2, 0.8)},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_dense_formulas(options: dict[str, Any], apart: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    usual: dict[str, Any] = {"d_sae": 40, "k": 4, "groups": (0.2, 0.8), "temperature": 0.5}
    sae = TemporalSAE(8, SAEConfig(**{**usual, "temporal_weight": 0.8, "aux_weight": 0.2, **options}))
    sae.initialize(torch.randn(8, generator=generator), generator)
    sae.double()
    x, others = (3 * torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (50, 25))
    if apart:
        pairs = torch.stack([50 + torch.arange(25), 2 * torch.arange(25)], dim=1)
    else:
        # Two tokens alike (differences of 0); one a partner thrice, so that what comes back adds up; one its own.
        x[4] = x[5]
        pairs = torch.stack([torch.arange(0, 49), torch.arange(1, 50)], dim=1)
        pairs = torch.cat([pairs, torch.tensor([[3, 9], [3, 5], [7, 7]])])
    dead, trajectory = torch.rand(40, generator=generator) < 0.4, torch.arange(50) // 10
    given = (sae, x, pairs, dead, trajectory, others if apart else None)
    expected, found = dense_terms(*given), temporal_loss(*given)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, msg=lambda m, name=name: f"{name}: {m}")
    codes = batch_topk(torch.relu((x - sae.b_dec) @ sae.W_enc + sae.b_enc), sae.config.k)
    assert torch.equal(found.fired, (codes > 0).any(0))
    gradients = (torch.autograd.grad(total, list(sae.parameters())) for total in (found.total, expected["total"]))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)


def test_bfloat16_rounds_the_factors_of_large_products_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    sae = TemporalSAE(32, SAEConfig(d_sae=200, k=5, aux_weight=0.1))
    sae.initialize(torch.randn(32, generator=generator), generator)
    x, start = 2 * torch.randn(120, 32, generator=generator), torch.arange(119)
    pairs, dead = torch.stack([start, start + 1], dim=1)[start % 8 != 7], torch.arange(200) % 4 == 0
    terms = dense_terms(sae, x, pairs, dead, rounded=bfloat16)
    found = temporal_loss(sae, x, pairs, dead, precision="bfloat16")
    exact = temporal_loss(sae, x, pairs, dead)
    values = torch.stack(list(terms.values()))
    in_bfloat16, in_float32 = (torch.stack([getattr(t, name) for name in terms]) for t in (found, exact))
    assert ((in_bfloat16 / values - 1).abs() < 1e-6).all()
    assert 1e-5 < (in_float32 / values - 1).abs().max() < 5e-3
    # Without AuxK, whose gradient is rounded too, the gradients are those of the exact factors.
    parameters = list(sae.parameters())
    gradients = (
        torch.autograd.grad(of["reconstruction_high"] + of["reconstruction"] + of["temporal"], parameters)
        for of in (found._asdict(), terms)
    )
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-5 * b.norm()
    # AuxK's are rounded on every device.
    weights = [sae.W_enc, sae.W_dec]
    again = temporal_loss(sae, x, pairs, dead, precision="bfloat16").aux
    for a, b in zip(torch.autograd.grad(again, weights), torch.autograd.grad(exact.aux, weights), strict=True):
        assert 1e-6 * b.norm() < (a - b).norm() < 2e-2 * b.norm()


# --- a T-SAE of two dimensions and three latents, worked on paper


@pytest.fixture
def small() -> TemporalSAE:
    """Latent 0 is high-level. k = 2 keeps four of the six codes of two tokens."""
    sae = TemporalSAE(
        2, SAEConfig(d_sae=3, k=2, groups=(1 / 3, 2 / 3), temporal_weight=0.7, temperature=1.0, aux_weight=0.1)
    )
    with torch.no_grad():
        sae.W_dec.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]))
        sae.W_enc.copy_(sae.W_dec.T)
        sae.b_enc.copy_(torch.tensor([0.0, 0.5, -1.0]))
        sae.b_dec.copy_(torch.tensor([1.0, 0.0]))
    return sae


X = torch.tensor([[3.0, 1.0], [2.0, 4.0]])
BOTH_WAYS = torch.tensor([[0, 1], [1, 0]])


def test_an_sae_that_lies_on_another_device_is_copied(small: TemporalSAE) -> None:
    there = TemporalSAE.of(small, device="meta")
    assert (there.W_dec.device.type, small.W_dec.device.type) == ("meta", "cpu")
    assert TemporalSAE.of(small, device="cpu") is small


def test_every_term_of_the_loss_by_hand(small: TemporalSAE) -> None:
    terms = temporal_loss(small, X, BOTH_WAYS, torch.tensor([False, False, True]))
    # High-level alone: (3, 0) and (1, 0), errors (0, 1) and (1, 4), over two tokens of two dimensions.
    high = (1 + 17) / 4
    # All: (3, 1.5) and (1 + 2.8 · .6, 4.5 + 2.8 · .8) = (2.68, 6.74), errors (0, −.5) and (−.68, −2.74).
    everything = (0.25 + 0.4624 + 7.5076) / 4
    # High codes are 2 at the first token and 0 at the second; pairs (0 → 1) and (1 → 0) give
    # cosines [[0, 0], [1, 0]], whose diagonals are the right partners, in rows and in columns.
    temporal = (math.log(2) + math.log(1 + math.e)) / 2
    # Latent 2 alone gives (.6, .8) and (1.68, 2.24) for the residuals (0, −.5) and (−.68, −2.74);
    # these deviate from their mean (−.34, −1.62) by ± (.34, 1.12).
    aux = ((0.36 + 1.69 + 5.5696 + 24.8004) / 4) / (2 * (0.1156 + 1.2544) / 4)
    assert terms.reconstruction_high.item() == pytest.approx(high, rel=1e-5)
    assert terms.reconstruction.item() == pytest.approx(everything, rel=1e-5)
    assert terms.temporal.item() == pytest.approx(temporal, rel=1e-5)
    assert terms.aux.item() == pytest.approx(aux, rel=1e-5)
    assert terms.total.item() == pytest.approx(high / 2 + everything + 0.7 * temporal + 0.1 * aux, rel=1e-5)
    assert terms.fired.tolist() == [True, True, True]


def test_the_weighted_l1_by_hand(small: TemporalSAE) -> None:
    """Codes are (2, 1.5, 0) and (0, 4.5, 2.8); latent 0 and, in a wider group, latent 1 are high-level."""
    cosine = (3 * 2 + 1 * 4) / math.sqrt(10 * 20)
    for groups, difference in (((1 / 3, 2 / 3), 2.0), ((2 / 3, 1 / 3), 2.0 + 3.0)):
        config = replace(small.config, temporal="l1", groups=groups, group_weights=(0.2, 0.8), aux_weight=0.0)
        sae = TemporalSAE(2, config)
        sae.load_state_dict(small.state_dict())
        terms = temporal_loss(sae, X, BOTH_WAYS)
        assert terms.temporal.item() == pytest.approx(cosine * difference / math.sqrt(2), rel=1e-5)
        reconstruction = 0.2 * terms.reconstruction_high + 0.8 * terms.reconstruction
        assert terms.total.item() == pytest.approx((reconstruction + 0.7 * 0.2 * terms.temporal).item(), rel=1e-5)
        terms.temporal.backward()
        assert sae.b_enc.grad is not None
        # Of both pairs: latent 0 is larger at token 0, latent 1 at token 1, where each is active.
        slope = cosine / math.sqrt(2)
        expected = [slope, 0.0, 0.0] if difference == 2 else [slope, slope - slope, 0.0]
        torch.testing.assert_close(sae.b_enc.grad, torch.tensor(expected))
    # A token and its own opposite are not alike: the term is below 0.
    opposite = torch.cat([X[:1], -X[:1]])
    assert temporal_loss(sae, opposite, BOTH_WAYS).temporal.item() < 0


def test_terms_without_weight_or_without_the_dead_are_left_out(small: TemporalSAE) -> None:
    plain = TemporalSAE(2, replace(small.config, temporal_weight=0.0, aux_weight=0.0))
    plain.load_state_dict(small.state_dict())
    dead = torch.tensor([False, False, True])
    terms = temporal_loss(plain, X, torch.empty(0, 2, dtype=torch.long), dead)
    assert terms.total.item() == pytest.approx((terms.reconstruction_high + terms.reconstruction).item())
    assert temporal_loss(small, X, BOTH_WAYS).aux.item() == 0
    assert temporal_loss(small, X, BOTH_WAYS, torch.zeros(3, dtype=torch.bool)).aux.item() == 0


@pytest.mark.parametrize("n_pairs", [0, 1])
def test_a_batch_without_pairs_is_refused(small: TemporalSAE, n_pairs: int) -> None:
    refuses(f"has {n_pairs} pairs of tokens", temporal_loss, small, X, BOTH_WAYS[:n_pairs])


def test_a_batch_of_one_trajectory_is_refused(small: TemporalSAE) -> None:
    one = torch.zeros(len(X), dtype=torch.long)
    refuses("no pair has negatives", temporal_loss, small, X, BOTH_WAYS, trajectory=one)
    every = TemporalSAE(small.d_model, replace(small.config, negatives="batch"))
    every.load_state_dict(small.state_dict())
    expected = temporal_loss(every, X, BOTH_WAYS).temporal
    assert temporal_loss(every, X, BOTH_WAYS, trajectory=one).temporal == expected


# --- the model


def test_inference_keeps_what_exceeds_the_threshold(small: TemporalSAE) -> None:
    small.threshold.fill_(1.5)
    torch.testing.assert_close(small.encode(X), torch.tensor([[2.0, 0.0, 0.0], [0.0, 4.5, 2.8]]))
    torch.testing.assert_close(small.encode_high(X), torch.tensor([[2.0], [0.0]]))
    torch.testing.assert_close(small.decode(small.encode(X)), torch.tensor([[3.0, 0.0], [2.68, 6.74]]))


@pytest.mark.parametrize("scale", [0.25, 8.0, 1.7])
def test_folding_a_scale_changes_the_units_and_nothing_else(small: TemporalSAE, scale: float) -> None:
    small.threshold.fill_(1.2)
    expected = small.encode(X), small.decode(small.encode(X))
    small.fold_scale(scale)
    found = small.encode(X / scale), small.decode(small.encode(X / scale))
    for a, b in zip(found, expected, strict=True):
        if scale == 1.7:
            torch.testing.assert_close(a * scale, b)
        else:
            assert torch.equal(a * scale, b)  # exact for powers of two


def test_what_is_saved_is_loaded(small: TemporalSAE, tmp_path: Path) -> None:
    small.threshold.fill_(0.25)
    small.site, small.training_info = SITE, {"norms": {"limit": 3.5}}
    loaded = TemporalSAE.load(small.save(tmp_path / "sae"))
    assert loaded.config == small.config
    assert (loaded.d_model, loaded.site, loaded.training_info) == (2, SITE, {"norms": {"limit": 3.5}})
    for name, value in small.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    again = loaded.save(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "sae").iterdir()
    }


@pytest.mark.parametrize("file", ["config.json", "training.json", "sae.safetensors"])
def test_an_sae_without_a_file_or_with_another_byte_is_refused(small: TemporalSAE, file: str, tmp_path: Path) -> None:
    folder = small.save(tmp_path / "sae")
    (folder / file).write_bytes((folder / file).read_bytes()[:-1] + b"?")
    refuses(f"{re.escape(file)} is damaged", TemporalSAE.load, folder)
    (folder / file).unlink()
    refuses(re.escape(file), TemporalSAE.load, folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", r"config\.json: cannot be read"),
        ("config.json", b"[]", r"config\.json: cannot be read"),
        ("config.json", {"d_model": -1}, "d_model is -1"),
        ("config.json", {"d_model": 3}, "does not fit"),
        ("config.json", {"d_model": 10**15}, r"does not fit .*W_enc has shape"),
        ("config.json", {"site": 5}, "names the site 5"),
        ("config.json", {"site": "x\ny"}, r"names the site 'x\\ny'"),
        ("config.json", {"sae": {"architecture": "topk"}}, "architecture is not a field"),
        ("config.json", {"sae": {"k": 99}}, "k=99 exceeds d_sae=3"),
        ("config.json", {"sae": {"k": 2.5}}, r"k=2\.5"),
        ("config.json", {"sae": {"d_sae": 10**15, "k": 1}}, "does not fit"),
        ("config.json", {"sae": {"temporal_weight": float("nan")}}, "temporal_weight=nan"),
        ("config.json", {"sae": []}, r"config\.json: cannot be read"),
        ("training.json", b"[1]", r"training\.json: cannot be read"),
        ("training.json", b'{"norms": [1]}', "does not fit"),
        ("training.json", b'{"norms": {"limit": "abc"}}', "does not fit"),
        ("training.json", b'{"norms": {"limit": 1, "centre": [1, 2, 3]}}', "does not fit"),
        ("sae.safetensors", b"?", r"sae\.safetensors"),
        ("sae.safetensors", {"W_enc": torch.full((2, 3), math.nan)}, "W_enc .*finite"),
        ("sae.safetensors", {"W_dec": torch.full((3, 2), math.inf)}, "W_dec .*finite"),
        ("sae.safetensors", {"W_enc": torch.zeros(2, 3, dtype=torch.complex64)}, r"W_enc holds torch\.complex64"),
    ],
)
def test_files_with_values_of_no_use_are_refused(
    small: TemporalSAE, file: str, content: Any, message: str, tmp_path: Path
) -> None:
    folder = small.save(tmp_path / "sae")
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    elif file == "sae.safetensors":
        save_file({**small.state_dict(), **content}, folder / file)
    else:
        whole = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**whole, **content, "sae": _with(whole["sae"], content.get("sae", {}))}))
    refuses(message, lambda: TemporalSAE.load(resealed(folder)))


def _with(config: dict[str, Any], change: Any) -> Any:
    return {**config, **change} if isinstance(change, dict) else change


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"k": 4096 + 1}, "k=4097 exceeds d_sae=4096"),
        ({"k": 0}, "k=0"),
        ({"d_sae": 1, "k": 1}, "d_sae=1"),
        ({"groups": (0.0, 1.0)}, "groups.0=0.0"),
        ({"groups": (0.2, 0.7)}, "add up to 0.9"),
        ({"d_sae": 4, "k": 1, "groups": (0.05, 0.95)}, "leave a group empty"),
        ({"group_weights": (1.0,)}, "do not go with groups"),
        ({"temporal_weight": -1.0}, "temporal_weight=-1.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"aux_weight": -0.1}, "aux_weight=-0.1"),
        ({"similarity": "cos"}, "similarity='cos'"),
        ({"temporal": "L1"}, "temporal='L1'"),
    ],
)
def test_saes_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    refuses(message.replace(".", r"\."), SAEConfig, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokens": 100}, "tokens=100 is less than batch_tokens=2048"),
        ({"batch_tokens": 15}, "batch_tokens=15 must hold at least two windows of window=8"),
        ({"window": 1}, "window=1"),
        ({"warmup_share": 0.5, "decay_share": 0.6}, "exceed 1"),
        ({"warmup_share": -0.1}, "warmup_share=-0.1"),
        ({"initial_bias": "median"}, "initial_bias='median'"),
    ],
)
def test_trainings_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    refuses(message.replace(".", r"\."), TrainingConfig, **config)


# --- training


Planted = tuple[ActivationStore, np.ndarray]
N_PLANTED, N_SLOW, D = 24, 4, 32


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Sparse sums of known directions: one of four lasts for a whole trajectory, two of twenty change every token."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(N_PLANTED, D))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    offset = rng.normal(size=D)
    texts = []
    for _ in range(200):
        codes = np.zeros((30, N_PLANTED))
        codes[:, rng.integers(N_SLOW)] = rng.uniform(2, 4) * rng.uniform(0.9, 1.1, size=30)
        for row in codes:
            row[N_SLOW + rng.choice(N_PLANTED - N_SLOW, 2, replace=False)] = rng.uniform(2, 4, size=2)
        texts.append(codes @ directions + offset + 0.02 * rng.normal(size=(30, D)))
    return synthetic_store(tmp_path_factory.mktemp("planted") / "acts", texts), directions


PLANTED = SAEConfig(d_sae=40, k=3, groups=(0.2, 0.8))
TRAINING = TrainingConfig(tokens=128_000, batch_tokens=512, learning_rate=6e-3)


@pytest.fixture(scope="module")
def trained(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "sae"
    train(planted[0], PLANTED, to=folder, training=TRAINING, progress=False)
    return folder


def test_training_recovers_planted_features(planted: Planted, trained: Path) -> None:
    store, directions = planted
    sae = TemporalSAE.load(trained)
    cosine = np.abs(directions @ sae.W_dec.detach().numpy().T)  # (n_planted, d_sae)
    assert (cosine.max(1) > 0.9).mean() > 0.8
    found = evaluate(sae, store)
    assert found.fve > 0.9
    assert found.l0 == pytest.approx(3, rel=0.25)


def test_decoder_rows_have_unit_norm_in_raw_units(planted: Planted, trained: Path) -> None:
    sae = TemporalSAE.load(trained)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(40), atol=1e-5, rtol=0)
    x = torch.from_numpy(next(planted[0].shards()).read("x.site", slice(0, 500)))
    assert float((sae.encode(x) > 0).sum(1).float().mean()) == pytest.approx(3, rel=0.05)
    assert float(sae.threshold) > 0
    torch.testing.assert_close(sae(x), sae.decode(sae.encode(x)))


@pytest.mark.parametrize("k", [1, 7, 30])
def test_a_calibrated_sae_has_k_codes_per_token(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    sae = TemporalSAE(8, SAEConfig(d_sae=40, k=k)).requires_grad_(False)
    sae.initialize(torch.randn(8, generator=generator), generator)
    x = 3 * torch.randn(2500, 8, generator=generator)  # several chunks
    positive = int((sae.encode(x) > 0).sum())
    sae.threshold.fill_(1e9)  # of no account
    calibrate(sae, x)
    assert int((sae.encode(x) > 0).sum()) == min(k * len(x), positive)
    assert sae.threshold.shape == ()


def test_a_training_too_short_for_a_running_mean_ends_at_k(planted: Planted) -> None:
    store, _ = planted
    sae = train(store, PLANTED, training=replace(TRAINING, tokens=15_360), progress=False)
    assert evaluate(sae, store).l0 == pytest.approx(PLANTED.k, rel=0.01)


@pytest.mark.parametrize(("n_problems", "set_on"), [(200, "problems left out"), (199, "training problems")])
def test_the_threshold_is_set_on_problems_left_out_where_there_are_enough(
    tmp_path: Path, n_problems: int, set_on: str
) -> None:
    rng = np.random.default_rng(0)
    store = synthetic_store(tmp_path / "acts", [rng.normal(size=(6, D)) for _ in range(n_problems)])
    config = replace(PLANTED, d_sae=400)
    sae = train(store, config, training=replace(TRAINING, tokens=25_600), progress=False)
    assert sae.training_info["threshold_set_on"] == set_on

    def l0(held_out: bool) -> float:
        x = Windows(store, "x.site", held_out=held_out, partner=None).first_tokens
        return float((sae.encode(torch.from_numpy(x)) > 0).sum(1).float().mean())

    # Tokens that were read many times have fewer codes than those that were never read.
    assert l0(set_on == "problems left out") == pytest.approx(PLANTED.k, rel=0.003)
    assert l0(False) < 0.9 * l0(True)


def test_the_first_of_several_groups_has_half_a_weight_beside_a_temporal_term() -> None:
    assert (SAEConfig().d_high, SAEConfig(d_sae=10, k=2, groups=(0.2, 0.8)).d_high) == (round(0.1 * 4096), 2)
    assert SAEConfig().weights == (0.5, 1.0)
    assert SAEConfig(groups=(0.1, 0.3, 0.6)).weights == (0.5, 1.0, 1.0)
    assert SAEConfig(temporal_weight=0.0).weights == (1.0, 1.0)
    assert SAEConfig(groups=(1.0,)).weights == (1.0,)
    assert SAEConfig(group_weights=(0.2, 0.8)).weights == (0.2, 0.8)


def test_the_temporal_weight_rises(planted: Planted) -> None:
    windows = Windows(planted[0], "x.site", held_out=False)
    training = replace(TRAINING, tokens=512 * 20, temporal_rise_share=0.5)
    config = replace(PLANTED, dead_after_tokens=2000, aux_weight=0.0)
    trainer = Trainer(windows, config, training, Processes())
    for batch, share in zip(trainer.batches(), [*np.arange(0.1, 1, 0.1), *[1.0] * 11], strict=True):
        pairs, trajectory, copies = map(torch.from_numpy, (batch.pairs, batch.trajectory, batch.copies))
        terms = temporal_loss(trainer.sae, trainer.scaled(batch.x), pairs, None, trajectory, copies=copies)
        row = trainer.step(batch)
        if row is not None:
            expected = terms.reconstruction + terms.reconstruction_high / 2 + share * terms.temporal
            assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.steps == 20
    fine_tuned = Trainer(windows, config, training, Processes(), trainer.finish(windows.first_tokens))
    batch = next(fine_tuned.batches())
    row = fine_tuned.step(batch)
    assert row is not None
    assert row["loss"] > row["temporal"]


def test_adam_remembers_nothing_along_the_decoder_rows(planted: Planted) -> None:
    windows = Windows(planted[0], "x.site", held_out=False)
    trainer = Trainer(windows, replace(PLANTED, dead_after_tokens=2000), TRAINING, Processes())
    rows = trainer.sae.W_dec.detach().clone()
    batch = next(trainer.batches())
    loss = temporal_loss(trainer.sae, trainer.scaled(batch.x), torch.from_numpy(batch.pairs)).total
    (gradient,) = torch.autograd.grad(loss, [trainer.sae.W_dec])
    along = (gradient * rows).sum(1, keepdim=True)
    assert (along.abs() > 0.1 * gradient.norm(dim=1, keepdim=True)).float().mean() > 0.5
    trainer.step(batch)
    remembered = trainer.optimizer.state[trainer.sae.W_dec]["exp_avg"]
    assert (remembered * rows).sum(1).abs().max() < 1e-6 * remembered.abs().max()
    # The rest is kept, up to the clipping of the norm and Adam's 1 − β₁.
    across = gradient - along * rows
    factor = (remembered * across).sum() / across.square().sum()
    torch.testing.assert_close(remembered, factor * across, atol=1e-6 * float(remembered.abs().max()), rtol=1e-4)


def test_the_temporal_weight_makes_high_codes_alike(planted: Planted, trained: Path) -> None:
    store, _ = planted
    plain = train(store, replace(PLANTED, temporal_weight=0.0), training=TRAINING, progress=False)
    temporal = TemporalSAE.load(trained)

    def contrast(sae: TemporalSAE) -> float:
        """InfoNCE over pairs of held-out trajectories, lower is more alike."""
        batch = next(Windows(store, "x.site", held_out=True).epoch(0, 10_000))
        codes, pairs = sae.encode_high(batch.x), torch.from_numpy(batch.pairs)
        return info_nce(codes[pairs[:, 1]], codes[pairs[:, 0]]).item()

    assert contrast(temporal) < contrast(plain) - 0.1


def test_the_same_seed_gives_the_same_weights(planted: Planted) -> None:
    short = replace(TRAINING, tokens=8192)
    one, two = (train(planted[0], PLANTED, training=short, progress=False).state_dict() for _ in range(2))
    other = train(planted[0], PLANTED, training=replace(short, seed=1), progress=False).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["W_dec"], other["W_dec"])


def test_training_writes_what_it_did(trained: Path) -> None:
    assert sorted(p.name for p in trained.iterdir()) == [
        "config.json",
        "manifest.json",
        "metrics.jsonl",
        "sae.safetensors",
        "training.json",
    ]
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [*range(0, 250, 25), 249]
    assert metrics[-1]["fve"] > metrics[0]["fve"]
    assert metrics[-1]["temporal"] < metrics[0]["temporal"]
    assert metrics[-1]["learning_rate"] < metrics[5]["learning_rate"] == pytest.approx(6e-3)
    run = json.loads((trained / "manifest.json").read_text())
    assert run["config"]["training"] == json.loads(json.dumps(asdict(replace(TRAINING, data_seed=0))))


def test_training_refuses_what_it_cannot_use(store: ActivationStore, planted: Any, tmp_path: Path) -> None:
    config = TrainingConfig(tokens=1000, batch_tokens=100)
    with pytest.raises(TsaeError, match=r"has the sites blocks\.1\.hook_resid_post, blocks\.2"):
        train(store, PLANTED, training=config, progress=False)
    refuses("no site 'nope'", train, store, PLANTED, training=replace(config, site="nope"), progress=False)
    refuses("tokens=1000000000000 must be at most", replace, config, tokens=10**12)
    refuses("learning_rate=10 must be less than 10", replace, config, learning_rate=10)
    wild = replace(PLANTED, temporal_weight=1e300)
    with pytest.raises(TsaeError, match="the loss is not finite at step"):
        train(planted[0], wild, to=tmp_path / "sae", training=replace(config, tokens=5000), progress=False)
    assert not (tmp_path / "sae" / "sae.safetensors").exists()


# --- the initial bias


def total_distance(x: np.ndarray, point: np.ndarray) -> float:
    return float(np.linalg.norm(x - point, axis=1).sum())


@pytest.mark.parametrize("n", [20, 201, 9000])  # the last in chunks
def test_the_geometric_median_against_a_minimizer(n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_t(2, size=(n, 3)).astype(np.float32) * [1, 1, 20] + 100
    found = geometric_median(x)
    start = np.median(x, axis=0)
    options = {"gtol": 1e-9 * len(x), "xrtol": 1e-12}
    best = scipy.optimize.minimize(lambda m: total_distance(x, m), start, method="BFGS", options=options)
    assert total_distance(x, found) <= best.fun * (1 + 1e-12)
    np.testing.assert_allclose(found, best.x, atol=2e-5)
    # Where it is none of the rows, unit vectors to all of them cancel.
    units = (x - found) / np.linalg.norm(x - found, axis=1, keepdims=True)
    assert np.linalg.norm(units.mean(0)) < 1e-6


def test_a_geometric_median_that_is_a_row_is_met() -> None:
    # A triangle with an angle of more than 120°: its corner. The mean of the last is a row, but not the median.
    corner = np.array([[0.0, 0.0], [1.0, 0.1], [-1.0, 0.1]])
    np.testing.assert_array_equal(geometric_median(corner), [0, 0])
    np.testing.assert_array_equal(geometric_median(np.float32([[0, 0], [0, 0], [0, 0], [9, 1], [1, 7]])), [0, 0])
    np.testing.assert_array_equal(geometric_median(np.full((7, 3), 2.5)), [2.5] * 3)
    held = np.array([[0.0, 0.0], [5.0, 0.0], [-1.0, 1.0], [-2.0, -1.0], [-2.0, 0.0]])
    best = scipy.optimize.minimize(lambda m: total_distance(held, m), [-1.0, 0.1], method="Nelder-Mead",
                                   options={"xatol": 1e-9, "fatol": 1e-12})  # fmt: skip
    np.testing.assert_allclose(geometric_median(held), best.x, atol=1e-6)
    assert np.linalg.norm(best.x) > 0.1


def test_training_starts_from_the_bias_that_was_chosen(planted: Planted) -> None:
    store, _ = planted
    windows = Windows(store, "x.site", held_out=False)
    sample = next(windows.epoch(0, 16_384)).x.numpy()
    assert len(sample) == 5400
    for kind, expected in (
        ("geometric_median", geometric_median(sample)),
        ("mean", sample.mean(0)),
        ("zero", np.zeros(D)),
    ):
        training = replace(TRAINING, initial_bias=kind)
        trainer = Trainer(windows, replace(PLANTED, dead_after_tokens=100), training, Processes())
        found = (trainer.sae.b_dec.detach() / trainer.scale + trainer.centre).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# --- evaluation


def test_evaluation_against_loops(planted: Planted, trained: Path) -> None:
    store, _ = planted
    sae = TemporalSAE.load(trained)
    x = next(store.shards()).read("x.site", slice(None)).reshape(200, 30, D)
    held_out = [x[i] for i in range(9, 200, 10)]
    found = evaluate(sae, store)
    assert (found.n_trajectories, found.n_tokens) == (20, 600)
    for name, value in numbers_by_hand(sae, held_out).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name
    everything = evaluate(sae, store, held_out=None)
    assert everything.n_tokens == 6000
    assert everything.fve == pytest.approx(numbers_by_hand(sae, list(x))["fve"], rel=1e-4)
    assert evaluate(sae, store, held_out=False).n_tokens == 5400


def test_evaluation_leaves_outliers_out_without_bridging_them(planted: Planted, trained: Path, tmp_path: Path) -> None:
    x = next(planted[0].shards()).read("x.site", slice(None)).reshape(200, 30, D)[:12].copy()
    x[:, 10] *= 50
    x[:, 11] *= 50
    x[3, 20] *= 50
    store = synthetic_store(tmp_path / "acts", list(x))
    sae = TemporalSAE.load(trained)
    found = evaluate(sae, store, held_out=None)
    assert found.n_tokens == 12 * 30 - 25
    limit = 10 * float(np.median(np.linalg.norm(x.reshape(-1, D), axis=1)))
    for name, value in numbers_by_hand(sae, list(x), limit).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name


def test_evaluation_leaves_out_what_training_left_out(planted: Planted, trained: Path, tmp_path: Path) -> None:
    """Half the tokens of this store are outliers, so that its own median would let them in."""
    x = next(planted[0].shards()).read("x.site", slice(None)).reshape(200, 30, D)[:12].copy()
    x[1::2] *= 20
    store = synthetic_store(tmp_path / "acts", list(x))
    sae = TemporalSAE.load(trained)
    assert sae.norm_limit == 10 * json.loads((trained / "training.json").read_text())["norms"]["median"]
    with pytest.warns(UserWarning, match="50% of tokens at x.site are left out"):
        found = evaluate(sae, store, held_out=None)
    assert found.n_tokens == 6 * 30
    assert found.fve == pytest.approx(numbers_by_hand(sae, list(x[::2]))["fve"], rel=1e-4)
    # A user's multiple of the median goes first; an SAE that stored nothing has 10 times the median.
    assert evaluate(sae, store, held_out=None, max_norm=10).n_tokens == 12 * 30
    sae.training_info = {}
    assert sae.norm_limit is None
    assert evaluate(sae, store, held_out=None).n_tokens == 12 * 30


@pytest.mark.slow(ci=True)
def test_few_trajectories_are_spread_over_all_readers(store: ActivationStore) -> None:
    sae = random_sae(site=SITE, d_sae=32, k=2)
    by_reader = [evaluate(sae, store.subset(readers=reader), held_out=None).fve for reader in store.readers]
    assert by_reader[0] != by_reader[1]
    assert evaluate(sae, store, held_out=None, max_trajectories=1).n_trajectories == 1
    some = evaluate(sae, store, held_out=None, max_trajectories=100)
    # 72 trajectories of each reader: the first hundred would be two thirds the base's.
    first = evaluate(sae, store, held_out=None, max_trajectories=144)
    assert first.n_trajectories == 144
    assert some.n_trajectories == 100
    assert some.fve == pytest.approx(first.fve, abs=0.05)


def test_saes_of_other_sites_and_widths_are_refused(store: ActivationStore, planted: Any) -> None:
    other = TemporalSAE(16, PLANTED, site="blocks.0.hook_resid_post")
    refuses(r"the SAE was trained at blocks\.0\.hook_resid_post, the store has blocks\.1", evaluate, other, store)
    wide = TemporalSAE(32, PLANTED, site=SITE)
    with pytest.raises(TsaeError, match=r"has d_model 16, the SAE expects 32") as error:
        check_fits(wide, store)
    assert str(store.path) in str(error.value)
    fits = TemporalSAE(16, PLANTED, site=SITE)
    refuses("no reader 'hard'", lambda: evaluate(fits, store.subset(readers="hard")))
