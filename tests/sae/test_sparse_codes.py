"""Selection and decoding of active codes equal the dense formulas, in values and gradients, also by kernels.

Whole numbers are small enough that every product of encoding is exact, in bfloat16 too, so that equal means equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tsae.sae.config import Precision
from tsae.sae.training import sparse_codes

N, D, D_SAE, K = 90, 6, 40, 4
WEIGHTS = ("W_enc", "b_enc", "b_dec", "W_dec")


def case(kind: str) -> tuple[torch.Tensor, list[torch.Tensor], list[tuple[int, int]], int]:
    """x, weights as named above, groups of latents, k."""
    draw = torch.Generator().manual_seed(len(kind))
    x, *weights = (
        torch.randint(-2, 3, shape, generator=draw).float()
        for shape in ((N, D), (D, D_SAE), (D_SAE,), (D,), (D_SAE, D))
    )
    groups, k = [(0, 8), (8, 20), (20, D_SAE)], K
    if kind == "no code in a group, no latent in another":
        weights[1][:8], groups = -200, [(0, 8), (8, 8), (8, D_SAE)]
    if kind == "fewer than asked for":
        weights[1], k = weights[1] - 25, 10
    if kind == "biases above the products":
        weights[1] *= 64
    return x, weights, groups, k


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(("precision", "kernels"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "kind",
    ["ties", "no code in a group, no latent in another", "fewer than asked for", "biases above the products"],
)
def test_codes_reconstructions_and_gradients_are_those_of_the_dense_formulas(
    kind: str, precision: Precision, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, groups, k = case(kind)
    if kernels:
        pytest.importorskip("triton")
    monkeypatch.setattr(sparse_codes, "_WITH_KERNELS", ("cpu",) if kernels else ())
    shares = (1.0, 0.0, 3.0)

    def outcome(dense: bool) -> dict[str, Any]:
        W_enc, b_enc, b_dec, W_dec = leaves = [weight.clone().requires_grad_() for weight in weights]
        if dense:
            pre = (x - b_dec) @ W_enc + b_enc
            kept = torch.zeros(pre.numel()).scatter(0, pre.flatten().argsort(descending=True, stable=True)[: k * N], 1)
            codes = pre.relu() * kept.view_as(pre)
            values, token, latent = codes[codes > 0], *codes.nonzero().T
            residual, errors = x - b_dec, []
            for start, stop in groups:
                residual = residual - codes[:, start:stop] @ W_dec[start:stop]
                errors.append(residual.square().sum() / 8)
            total = sum(share * error for share, error in zip(shares, errors, strict=True))
        else:
            values, token, latent, *_ = found = sparse_codes.encode_topk(x, W_enc, b_enc, b_dec, k, precision)
            total, errors, residual = sparse_codes.reconstruct(x, found, W_dec, b_dec, groups, shares, 8, precision)
        (total + values.sum()).backward()
        gradients = {name: leaf.grad for name, leaf in zip(WEIGHTS, leaves, strict=True)}
        exact = {"values": values, "token": token, "latent": latent}
        return {**exact, "errors": torch.stack(list(errors)), "residual": residual, "total": total, **gradients}

    found, expected = outcome(dense=False), outcome(dense=True)
    assert (len(expected["values"]) < k * N) == (kind == "fewer than asked for")
    share = 1e-2 if kernels and precision == "bfloat16" else 1e-5
    for name, value in expected.items():
        if name in ("values", "token", "latent"):
            assert torch.equal(found[name], value), name
        else:
            assert (found[name] - value).norm() <= share * value.norm(), name


def test_a_bound_of_every_latent_finds_what_lies_above_with_its_bias() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 16, generator=draw), torch.randn(16, 300, generator=draw)
    bias = 4 * torch.randn(300, generator=draw)
    pre = sparse_codes._Preactivations(x, weight, bias, torch.zeros(16), "bfloat16")
    whole = (pre.of(slice(None)) + bias).flatten()
    values = whole.sort().values[-8000::37]
    for bound in [torch.tensor(0.0), *values, *torch.nextafter(values, torch.tensor(0.0))]:
        found, above = pre.above(bound)
        assert torch.equal(found, (whole > bound).nonzero()[:, 0])
        assert torch.equal(above, whole[found])


def test_the_nth_largest() -> None:
    values = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(0)).float()
    for n in (1, 7, 100, 200):
        assert sparse_codes._nth_largest(values, n) == values.kthvalue(len(values) - n + 1).values
