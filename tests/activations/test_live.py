"""Activations straight from the models: against a store of the same trajectories, and what is held in memory."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts
from support.checkpoints import rewrite
from support.children import exit_codes, killed_until_done, past, run_tsae, start
from support.refusals import fails, refuses
from support.stand_in import ERRORS, short_of_memory
from support.stores import checkpoint, interrupted, same_files
from tsae.activations.live import ActivationCache, LiveSource, LiveWindows, equal_blocks
from tsae.activations.store import ActivationStore
from tsae.activations.windows import unpacked
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig

pytestmark = pytest.mark.slow(ci=True)

SITE = "blocks.1.hook_resid_post"
CONFIG = tsae.LiveConfig(buffer_tokens=400, batch_tokens=128)
TRAINING = TrainingConfig(tokens=6000, batch_tokens=100, learning_rate=3e-3, save_every_steps=5)
SAE = SAEConfig(d_sae=64, k=4)

Token = tuple[str, int, int]  # reader, row in the rollouts, position in the trajectory


@pytest.fixture(scope="module")
def source(series: CheckpointSeries, rollouts: Any) -> LiveSource:
    return LiveSource(series, rollouts, SITE, config=CONFIG)


class Recording(LiveWindows):
    """Notes every block, which of its portions are computed, and the windows of every batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.fills: list[tuple[list[int], int]] = []  # portions of a block, and their tokens
        self.computed: list[int] = []
        self.read: list[list[Token]] = []
        super().__init__(*args, **options)

    def _fill(self, portions: np.ndarray) -> None:
        super()._fill(portions)
        self.fills.append((portions.tolist(), len(self._row)))

    def _computed(self, portion: int) -> np.ndarray:
        self.computed.append(portion)
        return super()._computed(portion)

    def _plan(self, number: int, windows: np.ndarray, *rest: Any) -> Any:
        tokens = []
        for place, length in sorted(zip(*map(np.ndarray.tolist, unpacked(windows, self._bits)), strict=True)):
            at = int(np.searchsorted(self._places.base, place, side="right")) - 1
            shard, low = self.shards[at], place - int(self._places.base[at])
            text = int(np.searchsorted(shard.offsets, low, side="right")) - 1
            assert low + length <= shard.offsets[text + 1]  # within one trajectory
            first = low - int(shard.offsets[text])
            tokens += [(shard.reader, int(shard.trajectory[text]), first + i) for i in range(length)]
        self.read.append(tokens)
        return super()._plan(number, windows, *rest)


@pytest.fixture(scope="module")
def stored(store: ActivationStore) -> dict[Token, np.ndarray]:
    """The activation of every token, as capture stored it."""
    found = {}
    for shard in store.shards():
        x = shard.read(SITE, slice(None))
        for i, row in enumerate(shard.trajectory.tolist()):
            for t in range(shard.offsets[i + 1] - shard.offsets[i]):
                found[shard.reader, row, t] = x[shard.offsets[i] + t]
    return found


def counted(store: ActivationStore, span: str = "all", held_out: bool | None = None) -> set[Token]:
    """By loops over the trajectories."""
    problems = list(dict.fromkeys(store.rollouts.table["problem_id"].to_pylist()))
    found = set()
    for shard in store.shards():
        for row in shard.trajectory.tolist():
            problem = problems.index(store.rollouts.table["problem_id"][row].as_py())
            prompt, response = store.rollouts.tokens(row)
            for t, id in enumerate([*prompt, *response]):
                inside = span == "all" or (span == "prompt") == (t < len(prompt))
                if inside and id not in store.special_ids and held_out in (None, problem % 10 == 9):
                    found.add((shard.reader, row, t))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"span": "response", "held_out": False, "window": 3},
        {"partner": "earlier"},
        {"partner": "step", "step_ends": (3, 4), "span": "response"},
        {"partner": None, "held_out": True},
    ],
)
def test_an_epoch_is_every_counted_token_once_as_the_store_has_it(
    source: LiveSource, store: ActivationStore, stored: dict[Token, np.ndarray], options: dict[str, Any]
) -> None:
    windows = Recording(source, SITE, max_norm=1e6, **options)
    expected = counted(store, options.get("span", "all"), options.get("held_out"))
    for epoch in range(2):
        windows.read.clear()
        batches = list(windows.epoch(epoch, 64))
        assert Counter(itertools.chain(*windows.read)) == Counter(expected)
        assert windows.n_tokens == len(expected)
        # Outliers apart, and there are none, a batch without pairs alone is left out.
        given = [tokens for tokens in windows.read if len(tokens) > 3]
        for batch, tokens in zip(batches, given, strict=True):
            x = (batch.x if batch.others is None else torch.cat([batch.x, batch.others])).numpy()
            np.testing.assert_allclose(batch.x.numpy(), np.stack([stored[t] for t in tokens]), atol=1e-5)
            assert batch.trajectory.tolist() == [row for _, row, _ in tokens]
            for partner, token in batch.pairs.tolist():
                reader, row, t = tokens[token]
                if partner < len(tokens):
                    assert tokens[partner] == (reader, row, t - 1)
                else:
                    earlier = [stored[reader, row, s] for s in range(t) if (reader, row, s) in expected]
                    assert min(np.abs(x[partner] - e).max() for e in earlier) < 1e-5


def test_the_buffer_never_holds_more_than_its_limit(source: LiveSource, rollouts: Any) -> None:
    windows = Recording(source, SITE, held_out=False)
    for epoch in range(3):
        for _ in windows.epoch(epoch, 64):
            assert sum(map(len, windows._cache._rows.values())) <= len(windows._cache.values) == 400
    sizes = [size for _, size in windows.fills]
    assert max(sizes) <= 400
    # Even blocks, rather than a small last one.
    assert min(sizes) > 200
    assert len(windows.fills) - 1 >= 3 * windows.n_tokens / 400  # the first of all is filled for the norms, too


def test_an_epoch_begins_with_what_the_one_before_left_behind(source: LiveSource) -> None:
    windows = Recording(source, SITE)
    size, computed = windows._portions.size, []
    for epoch in range(4):
        windows.computed.clear()
        list(windows.epoch(epoch, 64))
        computed.append(size[windows.computed].sum())
    held = computed[0] + size[windows.fills[0][0]].sum() - np.array(computed[1:])
    assert computed[0] + size[windows.fills[0][0]].sum() == windows.n_tokens
    assert (held > 400 - size.max() * 2).all()
    assert (held <= 400).all()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_few_and_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, most = rng.integers(1, 60, 300), int(rng.integers(60, 500))
    block = equal_blocks(size, most)
    assert (np.diff(block) >= 0).all()
    totals = np.bincount(block, weights=size)
    assert totals.max() <= most
    assert totals.min() > 0
    assert len(totals) <= max(1, size.sum() / (most - 59)) + 1
    assert equal_blocks(np.array([7]), 7).tolist() == [0]
    assert equal_blocks(np.full(10, 7), 7).tolist() == list(range(10))


def test_the_order_is_a_function_of_seed_and_epoch(source: LiveSource) -> None:
    def order(seed: int, epoch: int, fresh: bool = True) -> list[list[Token]]:
        windows = Recording(source, SITE, seed=seed)
        if not fresh:
            list(windows.epoch(3, 64))
        windows.read.clear()
        list(windows.epoch(epoch, 64))
        return windows.read

    first = order(0, 0)
    assert first == order(0, 0) == order(0, 0, fresh=False)
    assert first != order(1, 0)
    assert first != order(0, 1)
    # Mixed: a batch has tokens of many trajectories, as far as a buffer of 400 tokens has them.
    assert np.median([len({(reader, row) for reader, row, _ in batch}) for batch in first]) > 6


def test_what_lies_behind_is_not_computed(source: LiveSource) -> None:
    windows = Recording(source, SITE)
    every = list(windows.epoch(2, 64))
    fills = [portions for portions, _ in windows.fills[1:]]
    for begin in (1, len(every) // 2, len(every) - 1, len(every)):
        again = Recording(source, SITE)
        rest = list(again.epoch(2, 64, start=begin))
        assert [b.number for b in rest] == [b.number for b in every[begin:]]
        assert all(torch.equal(a.x, b.x) for a, b in zip(rest, every[begin:], strict=True))
        blocks = [portions for portions, _ in again.fills[1:]]
        assert blocks == fills[len(fills) - len(blocks) :]
    assert len(blocks) == 0
    assert again.fills[0] == windows.fills[0]  # for the norms


def test_readers_get_equal_parts(series: CheckpointSeries, store: ActivationStore) -> None:
    """The base reads twice what the run does; over epochs everything is read, nothing before all else was."""
    rollouts = make_rollouts(("base", "elsewhere", "easy-10"), n_problems=6)
    source = LiveSource(series, rollouts, SITE, config=replace(CONFIG, plan="paired"))
    windows = Recording(source, SITE, balance=("reader",))
    base, run = (cell.tokens for cell in windows.mixture.cells)
    assert base > 1.3 * run
    n_epochs = 7
    for epoch in range(n_epochs):
        windows.read.clear()
        list(windows.epoch(epoch, 64))
        of_base = sum(reader == "base" for reader, _, _ in itertools.chain(*windows.read))
        everything = sum(map(len, windows.read))
        assert of_base == pytest.approx(everything / 2, abs=8)
    seen: Counter[Token] = Counter()
    again = Recording(source, SITE, balance=("reader",))
    for epoch in range(n_epochs):
        again.read.clear()
        list(again.epoch(epoch, 64))
        seen.update(itertools.chain(*again.read))
        for reader in source.readers:
            counts = [seen[token] for token in counted_live(source) if token[0] == reader]
            assert max(counts) - min(counts) <= 1


def counted_live(source: LiveSource) -> list[Token]:
    return [
        (shard.reader, row, t)
        for shard in source.shards()
        for i, row in enumerate(shard.trajectory.tolist())
        for t, id in enumerate(shard.token_ids[shard.offsets[i] : shard.offsets[i + 1]].tolist())
        if id not in source.special_ids
    ]


def test_shares_make_up_the_whole(source: LiveSource) -> None:
    whole = list(LiveWindows(source, SITE).epoch(0, 64))
    shares = [list(LiveWindows(source, SITE).epoch(0, 64, share=(i, 2))) for i in range(2)]
    for batch, *parts in zip(whole, *shares, strict=True):
        together = torch.cat([part.x for part in parts]).numpy()
        assert sorted(map(bytes, together)) == sorted(map(bytes, batch.x.numpy()))


def test_a_subset_runs_no_other_reader(source: LiveSource, series: CheckpointSeries, rollouts: Any) -> None:
    fresh = LiveSource(series, rollouts, SITE, config=CONFIG).subset(readers="easy-10", outcomes="success")
    windows = Recording(fresh, SITE, partner=None)
    list(windows.epoch(0, 64))
    outcome = rollouts.table["outcome"].to_pylist()
    expected = [(r, row, t) for r, row, t in counted_live(source) if r == "easy-10" and outcome[row] == "success"]
    assert sorted(itertools.chain(*windows.read)) == sorted(expected)


# --- training


@pytest.mark.slow
def test_live_and_stored_trainings_explain_as_much(source: LiveSource, store: ActivationStore) -> None:
    fve: dict[str, list[float]] = {"live": [], "stored": []}
    for seed in range(3):  # Seeds of one kind differ by up to .02.
        training = replace(TRAINING, tokens=40_000, site=SITE, seed=seed)
        live = tsae.train(source, SAE, training=training, progress=False)
        from_disk = tsae.train(store, SAE, training=training, progress=False)
        # On all problems: the one that is held out says little.
        fve["live"].append(tsae.evaluate(live, store, held_out=None).fve)
        fve["stored"].append(tsae.evaluate(from_disk, store, held_out=None).fve)
    assert np.mean(fve["live"]) == pytest.approx(np.mean(fve["stored"]), abs=0.03)
    assert min(*fve["live"], *fve["stored"]) > 0.75
    assert live.training_info["tokens_in_store"] == from_disk.training_info["tokens_in_store"]
    assert live.norm_limit == pytest.approx(from_disk.norm_limit, rel=0.2)


def test_the_threshold_is_set_on_problems_that_are_read_for_it_alone(series: CheckpointSeries) -> None:
    rollouts = make_rollouts(n_problems=200, n_samples=1)
    source = LiveSource(series, rollouts, SITE, config=CONFIG)
    sae = tsae.train(source, SAE, training=TRAINING, progress=False)
    assert sae.training_info["threshold_set_on"] == "problems left out"
    left_out = source.windows(SITE, held_out=True, partner=None).first_tokens
    assert 150 < len(left_out) <= CONFIG.buffer_tokens  # as many as the buffer holds
    n_codes = float((sae.encode(torch.from_numpy(left_out)) > 0).sum(1).float().mean())
    assert n_codes == pytest.approx(SAE.k, rel=0.01)


def test_models_that_are_loaded_in_turn_give_the_same_bits(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tsae.activations import live

    loaded: list[str] = []
    opened = live.open_reader
    monkeypatch.setattr(
        live, "open_reader", lambda checkpoint, *rest: loaded.append(checkpoint.id) or opened(checkpoint, *rest)
    )
    found = []
    for models in (None, 1):
        loaded.clear()
        source = LiveSource(series, rollouts, SITE, config=replace(CONFIG, models=models))
        found.append([batch.x.numpy().tobytes() for batch in LiveWindows(source, SITE).epoch(0, 64)])
        assert len(source._readers) <= (models or 2)
        assert (len(loaded) > 5) == (models == 1), loaded
    assert found[0] == found[1]


@pytest.mark.parametrize("models", [None, 1])
def test_a_checkpoint_rewritten_while_it_is_read_is_refused(
    series_folder: Path, rollouts: Any, tmp_path: Path, models: int | None
) -> None:
    shutil.copytree(series_folder, tmp_path / "series")
    source = LiveSource(
        CheckpointSeries.load(tmp_path / "series"), rollouts, SITE, config=replace(CONFIG, models=models)
    )
    batches = LiveWindows(source, SITE).epoch(0, 64)
    next(batches)
    rewrite(tmp_path / "series" / "easy-10")
    refuses("series/easy-10: its weights or its config changed while they were in use", list, batches)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_buffer_rounds_as_a_store_does(series: CheckpointSeries, rollouts: Any, tmp_path: Path, dtype: Any) -> None:
    one = rollouts.select([0])  # one trajectory, so that forward passes are alike to the bit
    config = tsae.CaptureConfig(dtype=dtype)
    store = tsae.capture(series.select([]), one, [SITE], to=tmp_path / "acts", config=config, progress=False)
    source = LiveSource(series.select([]), one, SITE, config=replace(CONFIG, dtype=dtype))
    a, b = (next(s.windows(SITE, max_norm=1e6).epoch(0, 64)) for s in (source, store))
    assert sorted(a.x.tolist()) == sorted(b.x.tolist())


def live_run(series: Path, rollouts: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    source = LiveSource(CheckpointSeries.load(series), tsae.Rollouts.read(rollouts), SITE, config=CONFIG)
    tsae.train(source, SAE, to=folder, training=TRAINING, progress=False)


@pytest.mark.slow
def test_a_live_training_that_is_killed_ends_with_the_same_bits(
    series_folder: Path, rollouts: Any, tmp_path: Path
) -> None:
    file = rollouts.write(tmp_path / "rollouts.parquet")
    folder = tmp_path / "sae"
    assert exit_codes([start(live_run, series_folder, file, tmp_path / "whole")]) == [0]
    past_next = past(lambda: checkpoint(folder), 0.05)
    assert killed_until_done(lambda: start(live_run, series_folder, file, folder), past_next) >= 3
    same_files(folder, tmp_path / "whole")


def test_another_buffer_is_another_training(source: LiveSource, series: Any, rollouts: Any, tmp_path: Path) -> None:
    training = replace(TRAINING, tokens=200)
    tsae.train(source, SAE, to=tmp_path / "sae", training=training, progress=False)
    for change, message in [
        ({"buffer_tokens": 500}, r"inputs\.capture\.buffer_tokens was 400, is 500"),
        ({"batch_tokens": 64}, r"inputs\.capture\.batch_tokens was 128, is 64"),
    ]:
        other = LiveSource(series, rollouts, SITE, config=replace(CONFIG, **change))
        refuses(message, tsae.train, other, SAE, to=tmp_path / "sae", training=training, progress=False)
    same = LiveSource(series, rollouts, SITE, config=replace(CONFIG, models=1))
    tsae.train(same, SAE, to=tmp_path / "sae", training=training, progress=False)


def test_what_does_not_fit_is_refused(source: LiveSource, series: Any, rollouts: Any) -> None:
    small = LiveSource(series, rollouts, SITE, config=replace(CONFIG, buffer_tokens=10))
    with pytest.raises(TsaeError, match=r"a trajectory of \d+ counted tokens does not fit into buffer_tokens=10"):
        tsae.train(small, SAE, training=replace(TRAINING, batch_tokens=20), progress=False)
    with pytest.raises(TsaeError, match=r"buffer_tokens=400 must hold at least two batches of batch_tokens=300"):
        tsae.train(source, SAE, training=replace(TRAINING, batch_tokens=300), progress=False)
    refuses(r"LiveConfig: buffer_tokens=0 must be at least 1", tsae.LiveConfig, buffer_tokens=0)
    sae = tsae.TemporalSAE(16, SAE, site=SITE)
    refuses(r"LiveSource: keeps no activations, but a store is needed here", tsae.evaluate, sae, source)
    with pytest.raises(TsaeError, match=r"no site 'blocks\.2\.hook_resid_post'; there are blocks\.1"):
        tsae.train(source, SAE, training=replace(TRAINING, site="blocks.2.hook_resid_post"), progress=False)
    with pytest.raises(TsaeError, match=r"blocks\.7\.hook_resid_post does not exist"):
        LiveSource(series, rollouts, "blocks.7.hook_resid_post", config=CONFIG)
    foreign = make_rollouts(("base",), n_problems=2, tokenizer="another")
    refuses("the trajectories were tokenised with", LiveSource, series, foreign, SITE, config=CONFIG)


# --- memory, and several processes


def test_a_buffer_that_does_not_fit_into_memory_is_read_in_smaller_batches(
    series: CheckpointSeries, rollouts: Any, source: LiveSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(LiveWindows(source, SITE).epoch(1, 64))
    tried = short_of_memory(monkeypatch, 30, ERRORS[0])
    found = []
    for _ in range(2):
        tried.clear()
        with pytest.warns(RuntimeWarning, match=r"was short of memory and continues with \d+ tokens in a forward pass"):
            found.append(list(LiveWindows(LiveSource(series, rollouts, SITE, config=CONFIG), SITE).epoch(1, 64)))
        assert max(tried) > 30
        assert sum(tokens <= 30 for tokens in tried) > 10
    # Everything is there, in the same order, and short of memory at the same sizes again it is the same to the bit.
    for batch, a, b in zip(expected, *found, strict=True):
        assert torch.equal(a.x, b.x)
        assert a.trajectory.tolist() == batch.trajectory.tolist()
        np.testing.assert_allclose(a.x, batch.x, atol=1e-5)


def test_a_training_keeps_which_readers_were_short_of_memory(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = LiveSource(series, rollouts, SITE, config=replace(CONFIG, buffer_tokens=2000))
    training = replace(TRAINING, tokens=3000, save_every_steps=10)

    def train(folder: Path) -> dict[str, Any]:
        tsae.train(source, SAE, to=folder, training=training, progress=False)
        return json.loads((folder / "training.json").read_text())

    with monkeypatch.context() as patch:
        short_of_memory(patch, 30, ERRORS[0])
        with pytest.warns(RuntimeWarning, match="was short of memory"):
            folder = interrupted(monkeypatch, source, tmp_path / "sae", training_of=train)
    # There is memory again when it goes on.
    kept = train(folder)["short_of_memory"]
    assert list(kept) == source.readers
    for found in kept.values():
        assert found["batch_tokens"] == CONFIG.batch_tokens == 128
        assert found["went_on_with"] <= 30
    # Another training of the same source was never short.
    assert "short_of_memory" not in train(tmp_path / "other")


def test_what_cannot_be_read_in_smaller_batches_is_refused(
    series: CheckpointSeries, rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = LiveSource(series, rollouts, SITE, config=CONFIG).windows(SITE, max_norm=1e6)
    short_of_memory(monkeypatch, 30, ERRORS[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses(r"together while reader \S+ reads.*Several processes have to read alike", list, windows.epoch(1, 64))
    monkeypatch.delenv("WORLD_SIZE")
    short_of_memory(monkeypatch, 5, ERRORS[0])
    smaller = pytest.warns(RuntimeWarning, match="was short of memory")
    with smaller, pytest.raises(TsaeError, match=r"1 trajectories \(first: \d+\) do not fit into memory"):
        list(windows.epoch(1, 64))


@pytest.mark.slow
def test_torchrun_trains_without_a_store(series_folder: Path, rollouts: Any, tmp_path: Path) -> None:
    file = rollouts.write(tmp_path / "rollouts.parquet")
    command = ["train", "--live.series", series_folder, "--live.rollouts", file, "--live.buffer-tokens", 400]
    command += ["--live.batch-tokens", 128, "--site", SITE, "--d-sae", 64, "--k", 4, "--tokens", 3000]
    for processes, to in ((2, "two"), (1, "one")):
        run_tsae(*command, "--batch-tokens", 100, "--to", tmp_path / to, processes=processes)
    one, two = (tsae.TemporalSAE.load(tmp_path / name) for name in ("one", "two"))
    assert (one.training_info["processes"], two.training_info["processes"]) == (1, 2)
    # The same training but for the order of sums.
    torch.testing.assert_close(two.W_dec, one.W_dec, atol=1e-3, rtol=0)


def test_the_command_line_trains_without_a_store(
    series_folder: Path, rollouts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(rollouts.write(tmp_path / "rollouts.parquet"))
    live = ["--live.series", str(series_folder), "--live.rollouts", file]
    rest = ["--to", str(tmp_path / "sae"), "--d-sae", "64", "--k", "4", "--tokens", "600", "--batch-tokens", "100"]
    main(["train", *live, "--live.buffer-tokens", "400", "--live.batch-tokens", "128", "--runs", "easy", *rest])
    run = json.loads((tmp_path / "sae" / "manifest.json").read_text())
    assert run["inputs"]["capture"]["buffer_tokens"] == 400
    assert run["inputs"]["subset"] == {"runs": ["easy"]}
    assert run["inputs"]["site"] == SITE
    assert tsae.TemporalSAE.load(tmp_path / "sae").site == SITE
    for given in ([], live[:2], [*live, "--store", str(tmp_path)], ["--store", str(tmp_path), "--live.models", "1"]):
        said = "tsae train: activations come from a store, or from live models"
        assert said in fails(capsys, "train", *given, *rest).err


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_holds_what_was_used_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, cache, used = rng.integers(1, 9, 40), ActivationCache(50, 2, "float32"), list[int]()
    for _ in range(60):
        wanted = [int(p) for p in rng.permutation(40)[: rng.integers(1, 6)]]
        missing = cache.missing({p: int(sizes[p]) for p in wanted})
        # Those used last, as far as they fit beside what is wanted, are not missing.
        newest, total = set[int](), 0
        for portion in reversed(used):
            total += int(sizes[portion])
            if total > 50:
                break
            newest.add(portion)
        assert not newest & set(missing)
        for portion, rows in missing.items():
            cache.put(portion, rows, np.full((sizes[portion], 2), portion, np.float32))
        cache.use(wanted)
        for portion, rows in zip(wanted, cache.rows(wanted), strict=True):
            assert (cache.values[rows] == portion).all()
            assert len(rows) == sizes[portion]
            np.testing.assert_allclose(cache.norms[rows], portion * 2**0.5, rtol=1e-6)
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
