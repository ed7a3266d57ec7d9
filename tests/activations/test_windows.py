"""Windows and batches: partners, balance, outliers and copies against loops, and memory that is used again."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from support.builders import BOS, EOS, overwrite, synthetic_store
from support.refusals import refuses
from support.stores import NEWLINE, SEMICOLON, SITE, SPECIAL, D, Text, Token, interrupted, numbered_store, numbers
from tsae.activations.batches import TokenBatch, Windows
from tsae.activations.store import ActivationStore
from tsae.base.distributed import Processes
from tsae.base.memory import Reused
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.training.loss import temporal_loss
from tsae.sae.training.train import train
from tsae.sae.training.trainer import Trainer

Numbered = tuple[ActivationStore, list[Token]]


def read(batches: Iterator[TokenBatch]) -> tuple[list[int], list[tuple[int, int]]]:
    """Numbers of the tokens in order, and (partner, token) of the pairs in order."""
    seen: list[int] = []
    pairs: list[tuple[int, int]] = []
    for batch in batches:
        mine = numbers(batch.x)
        seen += mine
        everyone = mine + ([] if batch.others is None else numbers(batch.others))
        pairs += [(everyone[a], everyone[b]) for a, b in batch.pairs.tolist()]
        assert all(b < len(mine) for _, b in batch.pairs.tolist())
    return seen, pairs


# --- partners


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Numbered:
    """Trajectories of several steps, with special tokens within them, read by two readers."""
    rng = np.random.default_rng(0)
    texts = []
    for i in range(24):
        prompt = [BOS, *rng.integers(0, 6, rng.integers(1, 5)).tolist(), *([SEMICOLON] if i % 3 else [])]
        response = rng.choice([0, 1, 2, 3, 4, SEMICOLON, NEWLINE, SPECIAL], rng.integers(1, 25)).tolist()
        texts.append(Text(prompt, [*response, EOS], ("base", "run") if i % 2 else ("base",)))
    folder = tmp_path_factory.mktemp("steps") / "acts"
    return numbered_store(folder, texts, runs={"base": None, "run": "a"})


def allowed(tokens: list[Token], partner: str, span: str, ends: tuple[int, ...]) -> dict[int, set[int]]:
    """Partners that every counted token may have, by loops over the texts."""
    may: dict[int, set[int]] = {}
    before: list[int] = []
    for n, token in enumerate(tokens):
        previous = tokens[n - 1] if n and tokens[n - 1][:2] == token[:2] else None
        new_step = previous is not None and (previous.id in ends or previous.in_prompt != token.in_prompt)
        if previous is None or (partner == "step" and new_step):
            before = []
        if token.id not in (BOS, EOS, SPECIAL) and span in ("all", "prompt" if token.in_prompt else "response"):
            may[n] = set(before)
            before = [*before, n]
    return may


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(
    ("partner", "ends", "span"),
    [
        ("earlier", (), "all"),
        pytest.param("earlier", (), "response", marks=pytest.mark.slow),
        pytest.param("earlier", (), "prompt", marks=pytest.mark.slow),
        pytest.param("step", (SEMICOLON,), "all", marks=pytest.mark.slow),
        ("step", (NEWLINE, SEMICOLON), "response"),
        ("step", (SPECIAL,), "all"),
    ],
)
def test_partners_are_all_the_earlier_tokens_that_count(
    steps: Numbered, partner: Any, ends: tuple[int, ...], span: Any
) -> None:
    store, tokens = steps
    windows = Windows(store, SITE, partner=partner, step_ends=ends, span=span, window=3)
    may = allowed(tokens, partner, span, ends)
    found: dict[int, Counter[int]] = {n: Counter() for n in may}
    for epoch in range(60):
        seen, pairs = read(windows.epoch(epoch, 64))
        assert sorted(seen) == sorted(may)
        # Every token that has an earlier one is paired, once.
        assert sorted(n for _, n in pairs) == sorted(n for n, before in may.items() if before)
        for a, n in pairs:
            found[n][a] += 1
    longest = max(may, key=lambda n: len(may[n]))
    for n, before in may.items():
        assert set(found[n]) <= before
        assert len(before) > 6 or set(found[n]) == before
    counts = [found[longest][a] for a in sorted(may[longest])]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_tokens_know_their_trajectory_whatever_their_partner(steps: Numbered) -> None:
    store, tokens = steps
    for partner in ("previous", "earlier", None):
        for batch in Windows(store, SITE, partner=partner, balance=("reader",)).epoch(0, 64):  # type: ignore[arg-type]
            assert batch.trajectory.tolist() == [tokens[n].row for n in numbers(batch.x)]
            assert len(set(batch.trajectory.tolist())) > 1
            everyone = numbers(batch.x) + ([] if batch.others is None else numbers(batch.others))
            for earlier, current in batch.pairs.tolist():
                assert tokens[everyone[earlier]].row == batch.trajectory[current]


def test_previous_partners_are_in_the_windows(steps: Numbered) -> None:
    for batch in Windows(steps[0], SITE).epoch(0, 64):
        assert batch.others is None
        assert (batch.pairs[:, 1] - batch.pairs[:, 0] == 1).all()
        assert len(np.unique(batch.pairs[:, 1])) == len(batch.pairs)


def test_without_partners_the_same_tokens_come_in_the_same_order(steps: Numbered) -> None:
    orders = [
        [numbers(batch.x) for batch in Windows(steps[0], SITE, partner=partner).epoch(2, 64)]
        for partner in ("previous", "earlier", None)
    ]
    assert orders[0] == orders[1] == orders[2]
    for batch in Windows(steps[0], SITE, partner=None).epoch(2, 64):
        assert len(batch.pairs) == len(batch.copies) == 0


@pytest.mark.parametrize("partner", ["earlier", "step"])
def test_outliers_are_no_partners(tmp_path: Path, partner: Any) -> None:
    texts = [Text([0], [1, 2, 3, 4, SEMICOLON, 1, 2, 3, 4]) for _ in range(6)]
    store, tokens = numbered_store(tmp_path / "acts", texts)
    shard = next(store.shards())
    large = {n for n, token in enumerate(tokens) if token.position in (0, 2, 7)}
    values = np.array(shard.raw(SITE))
    values[sorted(large), 1] = 1e6
    overwrite(store, shard, SITE, values)
    windows = Windows(store, SITE, partner=partner, step_ends=(SEMICOLON,) if partner == "step" else ())
    may = allowed(tokens, partner, "all", (SEMICOLON,))
    found: set[tuple[int, int]] = set()
    for epoch in range(100):
        batches = list(windows.epoch(epoch, 30))
        assert all(b.trajectory.tolist() == [tokens[n].row for n in numbers(b.x)] for b in batches)
        seen, pairs = read(iter(batches))
        assert sorted(seen) == sorted(set(range(60)) - large)
        found |= set(pairs)
    assert found == {(a, n) for n, before in may.items() for a in before if not {a, n} & large}


def test_steps_that_divide_nothing_are_refused(steps: Numbered, tmp_path: Path) -> None:
    store, _ = steps
    refuses(r"steps need step_ends.*tokens_with", Windows, store, SITE, partner="step")
    refuses(r"step_ends=\(12,\) divide no trajectory into steps", Windows, store, SITE, partner="step", step_ends=(12,))
    # A semicolon ends prompts, but divides none.
    with pytest.raises(TsaeError, match="divide no trajectory into steps"):
        Windows(store, SITE, partner="step", step_ends=(SEMICOLON,), span="prompt")
    lone = numbered_store(tmp_path / "lone", [Text([BOS], [1, SEMICOLON, 2, SEMICOLON, EOS])])[0]
    assert Windows(lone, SITE, partner="step", step_ends=(SEMICOLON,)).n_tokens == 4
    refuses("no step has two tokens that count", Windows, lone, SITE, partner="step", step_ends=(1, 2, SEMICOLON))
    single = numbered_store(tmp_path / "single", [Text([BOS], [i % 9, EOS]) for i in range(40)])[0]
    refuses(r"no trajectory has two tokens that count.*temporal-weight 0", Windows, single, SITE, partner="earlier")
    with pytest.raises(TsaeError, match='step_ends are given, but partner="earlier" knows no steps'):
        TrainingConfig(partner="earlier", step_ends=(1,))


# --- cells


UNEQUAL = {"base": 30, "a-1": 12, "b-1": 4, "b-2": 3}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Numbered:
    """Readers of very different numbers of tokens, in two bands and outcomes."""
    rng = np.random.default_rng(1)
    texts = [
        Text([BOS, 1], rng.integers(0, 9, rng.integers(20, 40)).tolist(), (reader,), band, outcome)
        for reader, n in UNEQUAL.items()
        for i in range(n)
        for band, outcome in [("hard" if i % 3 else "easy", "success" if i % 4 else "failure")]
    ]
    runs: dict[str, str | None] = {"base": None, "a-1": "a", "b-1": "b", "b-2": "b"}
    return numbered_store(tmp_path_factory.mktemp("unequal") / "acts", texts, runs=runs)


def cell_of(store: ActivationStore, token: Token, balance: tuple[str, ...]) -> tuple[str, ...]:
    table = store.rollouts.table
    values = {
        "reader": token.reader,
        "run": store.reader_info(token.reader)["run"] or token.reader,
        "band": table["band"][token.row].as_py(),
        "outcome": table["outcome"][token.row].as_py(),
    }
    return tuple(values[axis] for axis in balance)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("balance", [("reader",), ("run",), ("run", "band"), ("outcome", "reader")])
def test_every_cell_gives_an_epoch_the_same_number_of_tokens(unequal: Numbered, balance: Any) -> None:
    store, tokens = unequal
    windows = Windows(store, SITE, balance=balance, window=5)
    cells = {n: cell_of(store, token, balance) for n, token in enumerate(tokens) if token.id != BOS}
    sizes = Counter(cells.values())
    members = {cell: [n for n in cells if cells[n] == cell] for cell in sizes}
    n_epochs, equal = 40, len(cells) / len(sizes)
    times: Counter[int] = Counter()
    read_of: Counter[tuple[str, ...]] = Counter()
    for epoch in range(n_epochs):
        seen, _ = read(windows.epoch(epoch, 128))
        here = Counter(cells[n] for n in seen)
        assert all(abs(here[cell] - equal) < 5 + 1 for cell in sizes)  # within a window
        times.update(seen)
        read_of.update(here)
        # No token of a cell is read again before all were read, so that nothing is left out for good.
        for cell in sizes:
            counts = [times[n] for n in members[cell]]
            assert max(counts) - min(counts) <= 1
    assert all(abs(read_of[cell] - n_epochs * equal) < 5 + 1 for cell in sizes)  # what is over does not add up
    assert set(times) == set(cells)
    info = windows.mixture.cells
    assert {tuple(cell.labels.values()): cell.tokens for cell in info} == sizes
    assert all(tuple(cell.labels) == balance for cell in info)
    for cell in info:
        assert cell.weight == pytest.approx(equal / cell.tokens)
        mine = [times[n] / n_epochs for n in members[tuple(cell.labels.values())]]
        assert np.mean(mine) == pytest.approx(cell.weight, rel=0.02)


def test_a_part_of_a_large_cell_is_from_all_over_it(unequal: Numbered) -> None:
    store, tokens = unequal
    windows = Windows(store, SITE, balance=("reader",), window=5)
    assert windows.mixture.cells[0].weight < 0.5
    for epoch in range(4):
        seen, _ = read(windows.epoch(epoch, 128))
        assert len({tokens[n].row for n in seen if tokens[n].reader == "base"}) > 0.8 * UNEQUAL["base"]


def test_small_cells_are_cut_anew_each_time(unequal: Numbered) -> None:
    """b-2 is read about four times an epoch; its pairs come from several cuts."""
    store, tokens = unequal
    windows = Windows(store, SITE, balance=("reader",), window=5)
    _, pairs = read(windows.epoch(0, 128))
    mine = [pair for pair in pairs if tokens[pair[1]].reader == "b-2"]
    of_cell = {n for n, token in enumerate(tokens) if token.reader == "b-2" and token.id != BOS}
    adjacent = {(n - 1, n) for n in of_cell if n - 1 in of_cell and tokens[n - 1].row == tokens[n].row}
    assert set(mine) <= adjacent
    assert len(set(mine)) > 0.95 * len(adjacent) > 0.81 * len(adjacent)  # a single cut gives 4/5 of them


def batches_of(windows: Windows, epoch: int) -> list[tuple[list[int], list[list[int]]]]:
    return [(numbers(batch.x), batch.pairs.tolist()) for batch in windows.epoch(epoch, 60)]


def test_cells_of_equal_size_change_nothing(tmp_path: Path) -> None:
    readers = ("base", "a-1", "b-1")
    texts = [
        Text([BOS, 1], [(i + t) % 9 for t in range(20 + 5 * (i % 4 > 1))], readers, "easy" if i % 2 else "hard")
        for i in range(24)
    ]
    runs: dict[str, str | None] = {"base": None, "a-1": "a", "b-1": "b"}
    store, _ = numbered_store(tmp_path / "acts", texts, runs=runs)
    plain = Windows(store, SITE)
    for balance in (("reader",), ("run",), ("band",), ("reader", "band")):
        balanced = Windows(store, SITE, balance=balance)  # type: ignore[arg-type]
        assert len(balanced.mixture.cells) > 1
        assert balanced.norms == plain.norms
        for epoch in range(3):
            assert batches_of(balanced, epoch) == batches_of(plain, epoch)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced": {"balance": ("run", "band")},
    "earlier": {"partner": "earlier", "balance": ("run", "band")},
    "step": {"partner": "step", "step_ends": (3,), "balance": ("reader",)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_depend_on_seed_and_epoch_alone(unequal: Numbered, name: str) -> None:
    def windows(seed: int = 0) -> Windows:
        return Windows(unequal[0], SITE, seed=seed, **OPTIONS[name])

    once = windows()
    list(once.epoch(5, 60))
    batches = list(once.epoch(2, 60))
    for start in (0, 4):
        rest = [batch for batch in batches if batch.number >= start]
        for a, b in zip(windows().epoch(2, 60, start=start), rest, strict=True):
            assert a.number == b.number
            for field in ("x", "pairs", "others"):
                np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    whole = read(iter(batches))
    for other in (read(once.epoch(3, 60)), read(windows(1).epoch(2, 60))):
        assert other[0] != whole[0]
        assert other[1] != whole[1]
    # Shares: the windows of a batch once each, every token with the partner that it has in the whole batch.
    shares = [list(once.epoch(2, 60, share=(i, 3))) for i in range(3)]
    for batch, parts in zip(batches, zip(*shares, strict=True), strict=True):
        together = [read(iter([part])) for part in parts]
        for mine, found in zip(read(iter([batch])), zip(*together, strict=True), strict=True):
            assert sorted(mine) == sorted(itertools.chain(*found))  # type: ignore[type-var]


def test_what_is_estimated_is_of_the_mixture(tmp_path: Path) -> None:
    """A reader of nine tenths of the tokens at one point, another at √10 from it: in the mixture, half of each."""
    texts = [Text([1], [2] * 9, ("base",)) for _ in range(90)] + [Text([1], [2] * 9, ("run",)) for _ in range(10)]
    store, _ = numbered_store(tmp_path / "acts", texts, runs={"base": None, "run": "a"})
    for shard in store.shards():
        overwrite(store, shard, SITE, [0, 0, 1, 0] if shard.reader == "base" else [0, 3, 0, 0])
    balanced, plain = Windows(store, SITE, balance=("reader",)), Windows(store, SITE)
    # More than half are one point, so that the centre is the mean: (0, .3, .9, 0).
    assert plain.norms.mean == pytest.approx(0.9 * 0.1**0.5 + 0.1 * 8.1**0.5)
    assert balanced.norms.mean == pytest.approx(10**0.5 / 2, rel=0.01)
    config = SAEConfig(d_sae=8, k=2, dead_after_tokens=100)
    training = TrainingConfig(tokens=1000, batch_tokens=100, initial_bias="mean")
    trainer = Trainer(balanced, config, training, Processes())
    bias = trainer.sae.b_dec.detach() / trainer.scale + trainer.centre
    np.testing.assert_allclose(bias, [0, 1.5, 0.5, 0], rtol=0.02)


def test_what_cannot_be_balanced_is_refused(unequal: Numbered, tmp_path: Path) -> None:
    texts = [Text([1], [2] * 9, band="easy" if i % 3 else None, outcome="success") for i in range(12)]
    store, _ = numbered_store(tmp_path / "acts", texts)
    message = (
        r"rollouts\.parquet: the band of 4 trajectories is unknown \(first: row 0\).*`tsae rollouts bands`.*--balance"
    )
    refuses(message, Windows, store, SITE, balance=("reader", "band"))
    # Only what is read matters: every tenth problem is held out, and nobody has read row 9's.
    assert [cell.as_dict() for cell in Windows(store, SITE, balance=("outcome",)).mixture.cells] == [
        {"outcome": "success", "tokens": 120, "weight": 1.0}
    ]
    unknown, _ = numbered_store(tmp_path / "unknown", [Text([1], [2] * 9) for _ in range(12)])
    with pytest.raises(TsaeError, match=r"the outcome of 12 trajectories is unknown.*Leave those trajectories out"):
        Windows(unknown, SITE, balance=("outcome",))
    # Of three bands the store has two: the third is not a cell, and takes no share.
    bands = Windows(unequal[0], SITE, balance=("band",)).mixture.cells
    assert [cell.labels["band"] for cell in bands] == ["easy", "hard"]
    for wrong in (("readers",), ("reader", "reader")):
        refuses("balance", TrainingConfig, balance=wrong)


# --- trainings with these options


CONFIG = SAEConfig(d_sae=16, k=2)


@pytest.fixture(scope="module")
def noisy(unequal: Numbered, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The same store with activations that an SAE can learn something from."""
    store = ActivationStore(shutil.copytree(unequal[0].path, tmp_path_factory.mktemp("noisy") / "acts"))
    rng = np.random.default_rng(2)
    for shard in store.shards():
        overwrite(store, shard, SITE, (rng.random((shard.n_tokens, 12)) < 0.2) @ rng.normal(size=(12, D)) + 1)
    return store


@pytest.mark.parametrize("name", ["earlier", "step"])
@pytest.mark.parametrize("temporal", ["contrastive", pytest.param("l1", marks=pytest.mark.slow)])
def test_a_training_goes_on_with_the_same_bits(
    noisy: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, temporal: Any
) -> None:
    config = replace(CONFIG, temporal=temporal)
    training = TrainingConfig(tokens=8000, batch_tokens=160, save_every_steps=17, **OPTIONS[name])
    whole = train(noisy, config, to=tmp_path / "whole", training=training, progress=False)

    def run(folder: Path) -> TemporalSAE:
        return train(noisy, config, to=folder, training=training, progress=False)

    again = run(interrupted(monkeypatch, noisy, tmp_path / "sae", training=training, training_of=run))
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    info = json.loads((tmp_path / "sae" / "training.json").read_text())
    assert info["training"] == json.loads((tmp_path / "whole" / "training.json").read_text())["training"]
    assert sum(cell["tokens"] for cell in info["mixture"]) == info["tokens_in_store"]
    assert {round(cell["tokens"] * cell["weight"]) for cell in info["mixture"]} == {
        round(info["tokens_in_store"] / len(info["mixture"]))
    }
    rows = [json.loads(line) for line in (tmp_path / "sae" / "metrics.jsonl").read_text().splitlines()]
    # Cosines about the centre have either sign, and so has the L1 term that they weight.
    assert all(row["temporal"] != 0 if temporal == "l1" else row["temporal"] > 0 for row in rows)


def test_bands_measured_anew_are_another_training(noisy: ActivationStore, tmp_path: Path) -> None:
    training = TrainingConfig(tokens=400, batch_tokens=160)
    for name, balance in (("band", ("band",)), ("outcome", ("outcome",)), ("plain", ("reader",))):
        train(noisy, CONFIG, to=tmp_path / name, training=replace(training, balance=balance), progress=False)
    store = ActivationStore(shutil.copytree(noisy.path, tmp_path / "acts"))
    n = len(store.rollouts)
    store.rollouts.with_column("band", ["easy"] * (n - 20) + ["medium"] * 20).write(store.path / "rollouts.parquet")
    store = ActivationStore(store.path)
    with pytest.raises(TsaeError, match=r"holds another training \(inputs\.band was \w+…?, is \w+"):
        train(store, CONFIG, to=tmp_path / "band", training=replace(training, balance=("band",)), progress=False)
    for name, balance in (("outcome", ("outcome",)), ("plain", ("reader",))):
        train(store, CONFIG, to=tmp_path / name, training=replace(training, balance=balance), progress=False)


def test_one_token_a_trajectory_trains_without_the_temporal_term(tmp_path: Path) -> None:
    """As the message about missing pairs says."""
    store, _ = numbered_store(tmp_path / "acts", [Text([BOS], [i % 9, EOS]) for i in range(60)])
    training = TrainingConfig(tokens=600, batch_tokens=60)
    with pytest.raises(TsaeError, match=r"no trajectory has two adjacent tokens that count.*--temporal-weight 0"):
        train(store, CONFIG, training=training, progress=False)
    plain = train(store, replace(CONFIG, temporal_weight=0.0), training=training, progress=False)
    assert plain.training_info["last"]["step"] == 9
    assert plain.training_info["tokens_in_store"] == 54


def test_activations_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    store, _ = numbered_store(tmp_path / "acts", [Text([1], [2] * 9) for _ in range(12)])
    for shard in store.shards():
        overwrite(store, shard, SITE, 0)
    with pytest.raises(TsaeError, match="all tokens have the same activations"):
        _ = Windows(store, SITE).norms
    other, _ = numbered_store(tmp_path / "other", [Text([1], [2] * 9) for _ in range(12)])
    with pytest.raises(TsaeError, match=r"no token is within 1e-09 times the median norm"):
        _ = Windows(other, SITE, max_norm=1e-9).norms
    for shard in other.shards():
        with np.errstate(over="ignore"):
            overwrite(other, shard, SITE, 1e30 * np.array(shard.read(SITE, slice(None))))
    with pytest.raises(TsaeError, match=r"activations are so large that their norms are beyond float32"):
        _ = Windows(other, SITE).norms


def test_activations_may_be_small(tmp_path: Path) -> None:
    """Less than 1 in all."""
    store, _ = numbered_store(tmp_path / "acts", [Text([1], [2] * 9) for _ in range(12)])
    for shard in store.shards():
        overwrite(store, shard, SITE, 1e-6 * np.array(shard.read(SITE, slice(None))))
    norms = Windows(store, SITE).norms
    assert 0 < norms.median < 1e-3
    assert norms.limit == pytest.approx(10 * norms.median)


# --- the index


@pytest.mark.slow(ci=True)
def test_an_epoch_takes_eight_bytes_a_window_and_some_more(tmp_path: Path) -> None:
    texts = list(np.random.default_rng(0).normal(size=(3000, 500, 1)))
    windows = synthetic_store(tmp_path, texts).windows("x.site", window=2, partner=None)
    tracemalloc.start()
    try:
        order = windows._order(1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(order) > 750_000
    assert peak < 8 * len(order) + 6e6


Key = tuple[str, tuple[int, ...]]
Siblings = tuple[ActivationStore, list[Token], list[Key]]


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> Siblings:
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
    siblings: Siblings, options: dict[str, Any], share: tuple[int, int]
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


@pytest.mark.parametrize("negatives", ["trajectories", "batch"])
@pytest.mark.parametrize("partner", ["previous", "earlier"])
def test_no_pair_has_a_copy_of_its_positive_among_its_negatives(
    siblings: Siblings, negatives: Any, partner: Any
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


def address(x: np.ndarray | torch.Tensor) -> int:
    return int(np.asarray(x).__array_interface__["data"][0])


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    rng = np.random.default_rng(0)
    texts = [rng.standard_normal((30, 64)).astype(np.float32) for _ in range(60)]
    # Some outliers, so that batches are made from what is left.
    for text in texts[::3]:
        text[4] *= 100
    return Windows(synthetic_store(tmp_path_factory.mktemp("reading") / "acts", texts), SITE, partner="earlier")


HOLDERS: dict[str, Callable[[np.ndarray], Any]] = {
    "view": lambda x: x[3:7],
    "row": lambda x: x[3],
    "transpose": lambda x: x.T[2:],
    "tensor": torch.from_numpy,
    "view of a tensor": lambda x: torch.from_numpy(x)[3:4],
    "memoryview": lambda x: x.data[3:4],
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_whatever_shows_memory_holds_it(hold: str) -> None:
    memory = Reused(4)
    x = memory.empty(50, 8, np.float32)
    x[:] = np.arange(400).reshape(50, 8)
    held = HOLDERS[hold](x)
    before, where = held.tolist(), address(x)
    del x
    for _ in range(10):
        other = memory.empty(50, 8, np.float32)
        assert address(other) != where
        other[:] = -1
    assert held.tolist() == before
    del held, other
    assert where in {address(y) for y in [memory.empty(50, 8, np.float32) for _ in range(4)]}


def test_two_threads_never_get_the_same_memory() -> None:
    memory, wrong = Reused(4), []

    def use(number: int) -> None:
        for _ in range(500):
            x = memory.empty(20, 16, np.float32)
            x[:] = number
            if not (x == number).all():
                wrong.append(number)
            del x

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_batches_that_are_kept_stay_as_they_are(windows: Windows) -> None:
    every = list(windows.epoch(1, 100))
    copies = [[deepcopy(a) for a in (b.x, b.others, b.pairs, b.trajectory)] for b in windows.epoch(1, 100)]
    assert len(every) == len(copies) > 10
    for batch, wanted in zip(every, copies, strict=True):
        for found, expected in zip((batch.x, batch.others, batch.pairs, batch.trajectory), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert not any(np.shares_memory(a.x, b.x) for i, a in enumerate(every) for b in every[:i])
    # Every other one is kept, while the memory of those between is used again.
    kept = [batch for batch in windows.epoch(1, 100) if batch.number % 2]
    for batch in kept:
        np.testing.assert_array_equal(batch.x, copies[batch.number][0])


def test_batches_that_are_dropped_take_no_fresh_memory(windows: Windows) -> None:
    places = {address(batch.x) for batch in windows.epoch(0, 50)}
    assert len(places) <= 15 < sum(1 for _ in windows.epoch(0, 50))


def test_leaving_an_epoch_ends_what_reads_ahead(windows: Windows) -> None:
    before = threading.active_count()
    epoch = windows.epoch(0, 100)
    next(epoch)
    assert threading.active_count() > before
    epoch.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batches_are_the_rows_that_are_stored(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.standard_normal((30, 6)).astype(np.float32) for _ in range(40)]
    store = synthetic_store(tmp_path / "acts", texts, dtype=dtype)
    rounded = torch.from_numpy(np.concatenate(texts)).to(getattr(torch, dtype))
    for partner in ("previous", "earlier"):
        windows = Windows(store, SITE, partner=partner, max_norm=1e6)  # type: ignore[arg-type]
        batches = list(windows.epoch(0, 100))
        assert all(batch.x.dtype == rounded.dtype for batch in batches)
        assert sorted(torch.cat([batch.x for batch in batches]).tolist()) == sorted(rounded.tolist())
    others = torch.cat([batch.others for batch in batches if batch.others is not None])
    assert len(others) > 500
    assert set(map(tuple, others.tolist())) <= set(map(tuple, rounded.tolist()))
