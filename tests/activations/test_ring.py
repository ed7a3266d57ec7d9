"""The activations that a live training holds: the newest portions, no more than fit, computed once while they stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tsae
from tsae.activations.live import LiveSource, LiveWindows, Ring
from tsae.checkpoints.series import CheckpointSeries
from tsae.sae.config import SAEConfig, TrainingConfig

SITE = "blocks.1.hook_resid_post"


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_holds_what_was_used_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, ring, used = rng.integers(1, 9, 40), Ring(50, 2, "float32"), list[int]()
    for _ in range(60):
        wanted = [int(p) for p in rng.permutation(40)[: rng.integers(1, 6)]]
        missing = ring.missing({p: int(sizes[p]) for p in wanted})
        # Those used last, as far as they fit beside what is wanted, are not missing.
        newest, total = set[int](), 0
        for portion in reversed(used):
            total += int(sizes[portion])
            if total > 50:
                break
            newest.add(portion)
        assert not newest & set(missing)
        for portion, rows in missing.items():
            ring.put(portion, rows, np.full((sizes[portion], 2), portion, np.float32))
        ring.use(wanted)
        for portion, rows in zip(wanted, ring.rows(wanted), strict=True):
            assert (ring.values[rows] == portion).all()
            assert len(rows) == sizes[portion]
            np.testing.assert_allclose(ring.norms[rows], portion * 2**0.5, rtol=1e-6)
        used = [p for p in used if p not in wanted] + wanted


def test_a_buffer_that_holds_an_epoch_has_every_trajectory_read_once(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, real = list[int](), LiveWindows._computed
    source = LiveSource(series, rollouts, SITE, config=tsae.LiveConfig(buffer_tokens=4000, batch_tokens=128))
    training = TrainingConfig(tokens=3500, batch_tokens=100, learning_rate=3e-3)
    with monkeypatch.context() as patch:
        patch.setattr(LiveWindows, "_computed", lambda self, n: computed.append(n) or real(self, n))
        tsae.train(source, SAEConfig(d_sae=64, k=4), training=training, progress=False)
    windows = source.windows(SITE, held_out=False, balance=("reader",))
    assert windows.n_tokens < training.tokens / 2
    assert sorted(computed) == list(range(len(windows._portions.size)))
