"""The loss of a batch whose tokens several gloo processes hold, against one process with the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.children import exit_codes, start_ranks
from tsae.base.distributed import ALONE, Processes, join
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training import sparse_codes
from tsae.sae.training.loss import temporal_loss

pytestmark = pytest.mark.slow  # starts several processes

D = 8


@dataclass
class Case:
    """A batch of 19 windows of 4 tokens, one of 3 and one of 1, of which each process has its own."""

    config: dict[str, Any] = field(default_factory=dict)
    lopsided: bool = False
    apart: bool = False
    dtype: torch.dtype = torch.float64
    precision: Any = "float32"
    kind: str = "random"
    copied: bool = False

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(x, pairs, trajectory, others, copies) of the whole batch; processes hold windows of the same trajectory."""
        generator = torch.Generator().manual_seed(7)
        x = 3 * torch.randn(80, D, generator=generator)
        if self.kind == "repeated":  # nothing but ties, and one at the limit: 320 codes of 11 or 12 equal ones each
            x = x[torch.arange(80) % 7]
        if self.kind == "scales":  # one process would take all codes that BatchTopK gives away
            x[self.windows(0, 2)] *= 50
        start = torch.arange(79)
        pairs = torch.stack([start, start + 1], dim=1)[(start % 4 != 3) & (start != 78)]
        others = 3 * torch.randn(len(pairs), D, generator=generator).to(self.dtype) if self.apart else None
        if self.apart:
            pairs[:, 0] = 80 + torch.arange(len(pairs))
        copies = torch.arange(80 + (len(pairs) if self.apart else 0))
        if self.copied:
            copies %= 13
        return x.to(self.dtype), pairs, torch.arange(80) // 16, others, copies

    def windows(self, rank: int, size: int) -> torch.Tensor:
        """Rows of a process's tokens."""
        window = torch.arange(80) // 4
        if self.lopsided:  # the last process has one token and no pair, the first all others
            last = torch.arange(80) == 79
            return (last if rank == size - 1 else ~last & (rank == 0)).nonzero()[:, 0]
        return (window % size == rank).nonzero()[:, 0]

    def share(
        self, rank: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        x, pairs, trajectory, others, copies = self.batch()
        rows = self.windows(rank, size)
        place = torch.full((len(x),), -1)
        place[rows] = torch.arange(len(rows))
        mine = place[pairs[:, 1]] >= 0
        current = place[pairs[mine, 1]]
        if others is None:
            return x[rows], torch.stack([place[pairs[mine, 0]], current], dim=1), trajectory[rows], None, copies[rows]
        apart = len(rows) + torch.arange(len(current))
        every = torch.cat([copies[rows], copies[80:][mine]])
        return x[rows], torch.stack([apart, current], dim=1), trajectory[rows], others[mine], every

    def sae(self) -> TemporalSAE:
        generator = torch.Generator().manual_seed(2)
        sae = TemporalSAE(D, SAEConfig(**{"d_sae": 60, "k": 4, "groups": (0.3, 0.7), "aux_weight": 0.2, **self.config}))
        sae.initialize(torch.randn(D, generator=generator), generator)
        with torch.no_grad():
            sae.b_enc.add_(0.3 * torch.randn(sae.config.d_sae, generator=generator))
        return sae.to(self.dtype)

    def dead(self) -> torch.Tensor:
        return torch.arange(self.sae().config.d_sae) % 3 == 0

    def outcome(
        self,
        x: torch.Tensor,
        pairs: torch.Tensor,
        trajectory: torch.Tensor,
        others: torch.Tensor | None,
        copies: torch.Tensor,
        among: Processes = ALONE,
    ) -> dict[str, torch.Tensor]:
        """Loss terms and gradients, added up over the processes."""
        sae = self.sae()
        terms = temporal_loss(
            sae, x, pairs, self.dead(), trajectory, others, copies, precision=self.precision, processes=among
        )
        terms.total.backward()
        among.sum_gradients(sae.parameters())
        found = {name: p.grad.contiguous() for name, p in sae.named_parameters() if p.grad is not None}
        for name in ("total", "reconstruction_high", "reconstruction", "temporal", "aux"):
            found[name] = among.sum(getattr(terms, name).detach())
        codes = sparse_codes.encode_topk(x, sae.W_enc, sae.b_enc, sae.b_dec, sae.config.k, self.precision, among)
        found["values"] = torch.cat(among.gather(codes.values.detach())).sort().values
        # Of every process, not added up: all must know the batch's.
        return {**found, "fired": terms.fired, "n": torch.tensor(terms.n_tokens)}


CASES = {
    "all terms": Case(),
    "all other pairs as negatives": Case({"negatives": "batch"}),
    "copies": Case(copied=True),
    "copies outside": Case({"negatives": "batch"}, apart=True, lopsided=True, copied=True),
    "inner products": Case({"similarity": "inner", "temperature": 3.0}),
    "three groups": Case({"groups": (0.1, 0.3, 0.6), "group_weights": (0.5, 2.0, 1.5)}),
    "more than there are": Case({"k": 50}),
    "shares without pairs and without tokens": Case(lopsided=True),
    "partners from outside": Case(apart=True, lopsided=True),
    "weighted L1": Case({"temporal": "l1"}),
    "weighted L1 to the outside": Case({"temporal": "l1"}, apart=True, lopsided=True),
    "nothing but ties": Case({"temporal_weight": 0.0}, kind="repeated"),
    "scales apart": Case({"d_sae": 2000, "k": 200}, kind="scales"),
    "float32": Case(dtype=torch.float32),
    "bfloat16": Case(dtype=torch.float32, precision="bfloat16"),
}


def run_rank(folder: Path) -> None:
    with join("cpu") as among:
        rank, size = among.rank, among.size
        for name, case in CASES.items():
            save_file(case.outcome(*case.share(rank, size), among), folder / f"{name}-{rank}.safetensors")
        x, pairs, trajectory, *_ = CASES["all terms"].share(rank, size)
        for name, fewer, ids in (
            ("pairs", pairs[: int(rank == 0)], trajectory),
            ("trajectories", pairs, torch.zeros_like(trajectory)),
        ):
            try:
                temporal_loss(CASES["all terms"].sae(), x, fewer, trajectory=ids, processes=among)
            except TsaeError as error:
                (folder / f"{name}-{rank}").write_text(str(error))


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of processes, and where they left what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    assert exit_codes(start_ranks(request.param, run_rank, folder)) == [0] * request.param
    return request.param, folder


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(outcomes: tuple[int, Path], name: str) -> None:
    size, folder = outcomes
    case = CASES[name]
    expected = case.outcome(*case.batch())
    assert expected["aux"] > 0
    if name == "more than there are":
        assert len(expected["values"]) < 80 * 50
    else:
        assert len(expected["values"]) == 80 * case.config.get("k", 4)
    tolerance = {"atol": 1e-11, "rtol": 1e-10} if case.dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-5}
    if case.precision == "bfloat16":
        tolerance = {"atol": 1e-5, "rtol": 1e-4}
    for rank in range(size):
        found = load_file(folder / f"{name}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, **tolerance, msg=lambda m, key=key: f"{name}, {key}: {m}")


def test_a_batch_with_one_pair_or_trajectory_is_refused_by_all(outcomes: tuple[int, Path]) -> None:
    size, folder = outcomes
    for rank in range(size):
        assert "has 1 pairs of tokens" in (folder / f"pairs-{rank}").read_text()
        assert "no pair has negatives" in (folder / f"trajectories-{rank}").read_text()
