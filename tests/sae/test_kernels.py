"""The kernels for a GPU against dense formulas and against torch's sparse products.

Without a GPU Triton interprets them: `tests/support` tells it so before it is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from tsae.sae.config import SAEConfig  # noqa: E402
from tsae.sae.model import TemporalSAE  # noqa: E402
from tsae.sae.training import kernels, sparse_codes  # noqa: E402
from tsae.sae.training.loss import temporal_loss  # noqa: E402
from tsae.sae.training.trainer import adam, update  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow(ci=True)]
N, D, M, HIGH = 13, 48, 200, 40


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Case:
    """Random codes, of which one token has none."""

    def __init__(self) -> None:
        self.pre, self.least = random(N, M), random(M, seed=1).abs() + 0.5
        self.pre[3] = -1.0
        self.index, self.values, _ = kernels.above(self.pre, self.least)
        self.token, self.latent = self.index // M, self.index % M
        self.order = self.latent.argsort(stable=True)
        self.ends = sparse_codes.offsets(self.latent[self.order], M)
        self.dense = torch.zeros_like(self.pre).index_put((self.token, self.latent), self.values)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_entries_above_a_bound(case: Case) -> None:
    assert torch.equal(case.index, (case.pre > case.least).view(-1).nonzero()[:, 0])
    assert torch.equal(case.values, case.pre.view(-1)[case.index])
    wide, none = random(3, 5000), torch.full((5000,), torch.inf, device=DEVICE)
    bias, one = random(5000, seed=1), torch.ones(5000, device=DEVICE)
    exact = (wide > 1).view(-1).nonzero()[:, 0]
    for most in (None, len(exact) - 9, len(exact) + 9):
        index, values, n = kernels.above(wide, one, bias, most)
        own = slice(0, len(exact) if most is None else most)
        assert torch.equal(index[: len(exact)], exact[own])
        assert n.item() == len(exact)
        assert torch.equal(values[: len(exact)], (wide + bias).view(-1)[exact[own]])
        assert (values[len(exact) :] == -torch.inf).all()
    assert len(kernels.above(wide, none)[0]) == 0


@pytest.mark.parametrize("n", [1, 4000, 5000])
def test_the_largest_of_what_was_found(n: int) -> None:
    values = random(9000).mul(8).round()  # many are equal
    out = torch.zeros(n, device=DEVICE), *torch.zeros(2, n, dtype=torch.long, device=DEVICE)
    found = 3 * torch.arange(9000, device=DEVICE)
    kernels.largest(values, found, values.sort().values[-n], out, 7, 2)
    exact = values.sort(descending=True, stable=True).indices[:n].sort().values
    for ours, theirs in zip(out, (values[exact], found[exact] // 7 + 2, found[exact] % 7), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_reconstruction_and_gradients(case: Case, precision: torch.dtype) -> None:
    x, bias, rows = random(N, D, seed=2), random(D, seed=3).requires_grad_(), random(M, D, seed=4).to(precision)
    weights, group = torch.tensor([0.5, 1.0], device=DEVICE), (case.latent >= HIGH).long()
    place = case.token * 2 + group
    errors, by_value, gradient, residual = kernels.reconstruct(
        x, bias.detach(), rows, case.values, case.latent, sparse_codes.offsets(place, 2 * N), weights, True, N
    )
    values, exact = case.values.clone().requires_grad_(), rows.float().requires_grad_()
    codes = torch.zeros(N, M, device=DEVICE).index_put((case.token, case.latent), values)
    of_groups = codes[:, :HIGH] @ exact[:HIGH], codes[:, HIGH:] @ exact[HIGH:]
    for of_group in of_groups:
        of_group.retain_grad()
    first = x - bias - of_groups[0]
    second = first - of_groups[1]
    (0.5 * first.square().sum() + second.square().sum()).backward()
    share = 1e-5 if precision == torch.float32 else 1e-2
    torch.testing.assert_close(errors, torch.stack([first, second], 1).square().sum(2).detach(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(residual, second.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_value, values.grad, rtol=1e-4, atol=1e-3)
    theirs = torch.stack([of_group.grad for of_group in of_groups], 1)
    assert (gradient.view(N, 2, D).float() - theirs).norm() < share * theirs.norm()
    by_latent = (case.values[case.order], place[case.order], case.ends, gradient)
    by_row, sums = kernels.by_latent(*by_latent)
    assert (by_row - exact.grad).norm() < share * exact.grad.norm()
    torch.testing.assert_close(sums, case.dense.sum(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.by_latent(*by_latent, across=True)[0].T, by_row)


def test_codes_of_norm_one(case: Case) -> None:
    ends = sparse_codes.offsets(case.token, N)
    unit, norm = kernels.unit(case.values, case.latent, ends, HIGH)
    values, gradient = case.values.clone().requires_grad_(), random(len(case.values), seed=2)
    high = torch.zeros_like(case.dense).index_put((case.token, case.latent), values)[:, :HIGH]
    exact = torch.nn.functional.normalize(high, dim=1)
    slope = torch.zeros_like(case.dense).index_put((case.token, case.latent), gradient)[:, :HIGH]
    exact.backward(slope)
    own = case.latent < HIGH
    torch.testing.assert_close(unit[own], exact.detach()[case.token[own], case.latent[own]], rtol=1e-5, atol=1e-6)
    assert (unit[~own] == 0).all()
    found = kernels.across_unit(gradient * own, unit, norm, ends)
    torch.testing.assert_close(found, values.grad, rtol=1e-4, atol=1e-5)


def test_products_of_two_sparse_factors(case: Case) -> None:
    """With a token that is in several pairs, and pairs that share both."""
    pairs = torch.tensor([[0, 1], [1, 2], [1, 4], [1, 4], [3, 5], [12, 0], [7, 7]], device=DEVICE)
    others = torch.tensor([[2, 2], [5, 3], [5, 1], [0, 12]], device=DEVICE)
    codes = (case.values, case.token, N, case.order, case.ends, HIGH)
    own, every = (kernels.Contrasted.of(*codes, each) for each in (pairs, others))
    dense = case.dense[:, :HIGH]
    found = kernels.similarities(own, every, 0.5)
    torch.testing.assert_close(found, dense[pairs[:, 1]] @ dense[others[:, 0]].T / 2, rtol=1e-5, atol=1e-5)
    wide, of_row, of_column = random(7, 4, seed=5), random(7, seed=6), random(4, seed=7)
    for matrix, side, diagonal in ((wide, 1, 2), (wide.T.contiguous().T, 0, -1)):
        total = torch.ones_like(case.values)
        kernels.pulled(matrix, of_row, of_column, diagonal, 0.5, own, every, side, total)
        weight = matrix * (of_row[:, None] + of_column)
        weight.diagonal(diagonal).sub_(0.5)
        by_code = torch.zeros_like(dense).index_add(0, pairs[:, side], weight @ dense[others[:, 1 - side]])
        exact = torch.cat([by_code, torch.zeros(N, M - HIGH, device=DEVICE)], 1)[case.token, case.latent]
        torch.testing.assert_close(total, 1 + exact, rtol=1e-4, atol=1e-4)


def test_exponentials_and_their_sums() -> None:
    logits, groups, others = random(35, 300), torch.arange(35) // 4, torch.arange(300) // 9
    both = [torch.stack([of, of % 3 * 0 + torch.arange(len(of)) % 97], 1).to(DEVICE) for of in (groups, others)]
    alike = (both[0][:, None] == both[1][None]).any(2)
    alike.diagonal(5).fill_(False)
    exact = (logits - 2).exp().masked_fill(alike, 0)
    rows, columns = kernels.exponentials(logits, *both, 5, 2.0)
    for ours, theirs in ((logits, exact), (rows, exact.sum(1)), (columns, exact.sum(0))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_a_step_of_the_trainer(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for devices in ((DEVICE,), ()):
        monkeypatch.setattr(sparse_codes, "_WITH_KERNELS", devices)
        sae = TemporalSAE(D, SAEConfig(d_sae=M, k=6))
        sae.initialize(torch.zeros(D), torch.Generator().manual_seed(1))
        optimizer = adam(sae.to(DEVICE), 1e-2)
        for step in (1, 2, 3):
            for i, parameter in enumerate(sae.parameters()):
                parameter.grad = size * random(*parameter.shape, seed=10 * step + i) / 100
            update(sae, optimizer, step)
        state = [optimizer.state[p][name] for p in sae.parameters() for name in ("step", "exp_avg", "exp_avg_sq")]
        found.append([*sae.parameters(), *state])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [
    {}, {"precision": "bfloat16"}, {"similarity": "inner"}, {"groups": (0.1, 0.3, 0.6)}, {"others": True}, {"k": 80}
], ids=str)  # fmt: skip
def test_the_loss_and_its_gradients(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(settings)
    precision, apart = options.pop("precision", "float32"), options.pop("others", False)
    sae = TemporalSAE(D, SAEConfig(**{"d_sae": M, "k": 6, **options}))
    sae.initialize(torch.zeros(D), torch.Generator().manual_seed(1))
    sae = sae.to(DEVICE)
    with torch.no_grad():
        sae.b_dec += 0.1
    x, others = 2 * random(40, D), 2 * random(8, D, seed=1) if apart else None
    start = torch.arange(39, device=DEVICE)
    pairs = torch.stack([start, start + 1], 1)[start % 8 != 7]
    if apart:
        pairs[:8, 0] = 40 + torch.arange(8, device=DEVICE)
    dead, trajectory = torch.arange(M, device=DEVICE) % 7 == 0, torch.arange(40, device=DEVICE) // 16
    found = []
    for devices in ((DEVICE,), ()):
        monkeypatch.setattr(sparse_codes, "_WITH_KERNELS", devices)
        terms = temporal_loss(sae, x, pairs, dead, trajectory, others, precision=precision)
        gradients = torch.autograd.grad(terms.total, list(sae.parameters()))
        found.append(
            ([terms.total, terms.reconstruction_high, terms.reconstruction, terms.temporal, terms.aux], gradients)
        )
    (ours, by_kernels), (theirs, by_torch) = found
    share = 1e-4 if precision == "float32" else 1e-2
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=share, atol=0)
    for a, b in zip(by_kernels, by_torch, strict=True):
        assert (a - b).norm() < share * b.norm()


def test_a_machine_where_triton_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(sparse_codes, "_WITH_KERNELS", (DEVICE,))
    monkeypatch.setattr(kernels, "above", fails)
    sparse_codes._kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="slower: Failed to find C compiler"):
            assert sparse_codes.kernels_for(torch.empty(0, device=DEVICE)) is None
        assert sparse_codes.kernels_for(torch.empty(0, device=DEVICE)) is None  # and says so once
    finally:
        sparse_codes._kernels.cache_clear()
