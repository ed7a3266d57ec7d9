"""Capture, the store, and windows of adjacent tokens: against direct forward passes and brute-force loops."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.builders import (
    ARCHITECTURES,
    BOS,
    D_MODEL,
    EOS,
    N_LAYERS,
    make_rollouts,
    model_config,
    save_model,
    save_perturbed,
    save_series,
)
from support.checkpoints import reweigh
from support.refusals import refuses
from support.stores import contents, edit
from tsae.activations import capture as recording
from tsae.activations.batches import TokenBatch, Windows
from tsae.activations.capture import capture, capture_part
from tsae.activations.config import CaptureConfig, LiveConfig
from tsae.activations.live import LiveSource
from tsae.activations.manifest import check_store, read_manifest
from tsae.activations.shard import Shard, ShardWriter
from tsae.activations.store import ActivationStore
from tsae.base.artefact import file_hash
from tsae.base.part import Part
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

SITE = "blocks.1.hook_resid_post"
SMALL = CaptureConfig(shard_tokens=200, batch_tokens=128)


def direct(checkpoint: Checkpoint, texts: Iterable[np.ndarray], layers: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """The oracle: one unpadded forward pass a text, and what Hugging Face's own blocks give."""
    model = checkpoint.load_model()
    kept: list[torch.Tensor] = []
    for layer in layers:
        model.model.layers[layer].register_forward_hook(
            lambda m, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
    for ids in texts:
        kept.clear()
        with torch.no_grad():
            model(torch.from_numpy(ids.astype(np.int64))[None])
        yield [found[0].numpy() for found in kept]


Take = Callable[..., ActivationStore]


@pytest.fixture
def take(series: CheckpointSeries, rollouts: Rollouts, tmp_path: Path) -> Take:
    """Captures the session's series and rollouts, or others, below tmp_path."""

    def taken(to: str = "acts", **changed: Any) -> ActivationStore:
        given = {"series": series, "rollouts": rollouts, "sites": [SITE], "config": SMALL, "progress": False, **changed}
        return capture(to=tmp_path / to, **given)

    return taken


def rows_of(store: ActivationStore, reader: str) -> dict[int, tuple[Shard, slice]]:
    found = {}
    for shard in store.shards(reader):
        for i, row in enumerate(shard.trajectory.tolist()):
            found[row] = (shard, slice(int(shard.offsets[i]), int(shard.offsets[i + 1])))
    return found


def test_the_store_holds_what_a_direct_forward_gives(
    store: ActivationStore, series: CheckpointSeries, rollouts: Rollouts
) -> None:
    for checkpoint in series:
        read = rows_of(store, checkpoint.id)
        assert len(list(store.shards(checkpoint.id))) > 2
        texts = [np.concatenate(rollouts.tokens(row)) for row in sorted(read)]
        for row, ids, found in zip(sorted(read), texts, direct(checkpoint, texts, (1, 2)), strict=True):
            shard, where = read[row]
            assert shard.token_ids[where].tolist() == ids.tolist()
            for site, expected in zip((SITE, "blocks.2.hook_resid_post"), found, strict=True):
                np.testing.assert_allclose(shard.read(site, where), expected, atol=1e-5, rtol=0)


def test_readers_read_what_the_plan_says(
    store: ActivationStore, rollouts: Rollouts, take: Take, tmp_path: Path
) -> None:
    policy = np.array(rollouts.table["policy"].to_pylist())
    assert sorted(rows_of(store, "base")) == list(range(72))  # "auto": the base reads everything
    assert sorted(rows_of(store, "easy-10")) == np.flatnonzero(np.isin(policy, ["base", "easy-10"])).tolist()
    three, own_alone = make_rollouts(("base", "easy-10", "elsewhere"), n_problems=3), replace(SMALL, plan="own")
    paired = take("a", rollouts=three, config=replace(SMALL, plan="paired"))
    assert sorted(rows_of(paired, "base")) == list(range(27))
    assert sorted(rows_of(paired, "easy-10")) == list(range(18))
    # A policy that is not a checkpoint of the series: everyone reads everything.
    assert sorted(rows_of(take("b", rollouts=three), "easy-10")) == list(range(27))
    foreign, config = make_rollouts(("elsewhere",), n_problems=2), replace(SMALL, plan="paired")
    refuses("no trajectory was sampled by 'base'; policies are elsewhere", take, "c", rollouts=foreign, config=config)
    assert not (tmp_path / "c").exists()
    own = take("d", rollouts=three, config=own_alone)
    assert sorted(rows_of(own, "base")) == list(range(9))
    assert sorted(rows_of(own, "easy-10")) == list(range(9, 18))
    message = "no trajectory was sampled by 'easy-10'; policies are base"
    refuses(message, take, "e", rollouts=make_rollouts(), config=own_alone)


def test_shards_are_cut_at_their_budget(store: ActivationStore) -> None:
    for reader in store.readers:
        sizes = [shard.n_tokens for shard in store.shards(reader)]
        assert max(sizes) <= 200
        assert min(a + b for a, b in pairwise(sizes)) > 200 - 20


def test_the_default_site_is_the_middle_block(series: CheckpointSeries, take: Take) -> None:
    assert take(series=series.select([]), rollouts=make_rollouts(n_problems=2), sites=None).sites == [SITE]


def test_both_backends_fill_the_same_store(store: ActivationStore, take: Take) -> None:
    other = take(sites=store.sites, config=replace(SMALL, backend="transformer_lens"))
    for a, b in zip(store.shards(), other.shards(), strict=True):
        assert a.trajectory.tolist() == b.trajectory.tolist()
        for site in store.sites:
            np.testing.assert_allclose(a.read(site, slice(None)), b.read(site, slice(None)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_torchs(store: ActivationStore, take: Take, dtype: Any) -> None:
    half = take(config=replace(SMALL, dtype=dtype))
    assert half.manifest["dtype"] == dtype
    for a, b in zip(store.shards(), half.shards(), strict=True):
        assert b.raw(SITE).dtype.itemsize == 2
        full = torch.from_numpy(a.read(SITE, slice(None)))
        np.testing.assert_array_equal(b.read(SITE, slice(None)), full.to(getattr(torch, dtype)).float().numpy())
        picked = np.array([0, 3, 3, 1])
        np.testing.assert_array_equal(b.read(SITE, picked), b.read(SITE, slice(None))[picked])


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        # Every architecture in bfloat16, and every precision of two, which pass hidden states in either way.
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (dtype != "bfloat16" and name not in ("llama", "gpt2")))
        for name in ARCHITECTURES
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_models_of_any_precision_are_stored_in_their_own_bit_for_bit(
    tmp_path: Path, architecture: str, dtype: Any
) -> None:
    """Every site of every layer; batches of one trajectory are what the model computes on that trajectory alone."""
    path = save_model(tmp_path / "model", architecture)
    series, rollouts = CheckpointSeries.load(path), make_rollouts(n_problems=3, n_samples=2)
    sites = [f"blocks.{layer}.hook_resid_{point}" for layer in range(N_LAYERS) for point in ("pre", "post")]
    config = CaptureConfig(model_dtype=dtype, batch_tokens=1)
    store = capture(series, rollouts, sites, to=tmp_path / "acts", config=config, progress=False)
    assert store.manifest["dtype"] == dtype
    model = series.base.load_model(dtype=dtype)
    blocks = model.transformer.h if architecture == "gpt2" else model.model.layers
    (shard,) = store.shards()
    for i, row in enumerate(shard.trajectory.tolist()):
        kept: dict[str, torch.Tensor] = {}
        handles = []
        for layer, block in enumerate(blocks):

            def keep(_: Any, args: Any, kwargs: Any, out: Any, layer: int = layer, kept: Any = kept) -> None:
                kept[f"blocks.{layer}.hook_resid_pre"] = (args[0] if args else kwargs["hidden_states"])[0]
                kept[f"blocks.{layer}.hook_resid_post"] = (out[0] if isinstance(out, tuple) else out)[0]

            handles.append(block.register_forward_hook(keep, with_kwargs=True))
        with torch.no_grad():
            model(torch.from_numpy(np.concatenate(rollouts.tokens(row)).astype(np.int64))[None])
        for handle in handles:
            handle.remove()
        where = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
        for site in sites:
            assert kept[site].dtype == getattr(torch, dtype)
            np.testing.assert_array_equal(shard.read(site, where), kept[site].float().numpy(), err_msg=site)


def test_reading_gives_arrays_of_ones_own(store: ActivationStore) -> None:
    shard = next(store.shards())
    before = shard.read(SITE, slice(0, 4)).copy()
    shard.read(SITE, slice(0, 4))[:] = 7
    np.testing.assert_array_equal(shard.read(SITE, slice(0, 4)), before)


# --- interruption


class Interrupted(BaseException):
    """As a KeyboardInterrupt would."""


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    finish, written = ShardWriter.finish, []

    def stop(self: ShardWriter) -> str:
        if len(written) == n:
            raise Interrupted
        written.append(1)
        return finish(self)

    monkeypatch.setattr(ShardWriter, "finish", stop)


@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_an_interrupted_capture_goes_on_to_the_same_bytes(
    store: ActivationStore, take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, after)
        with pytest.raises(Interrupted):
            take(sites=store.sites)
    assert len(list((tmp_path / "acts").rglob("*.h5"))) == after
    refuses("its capture did not finish", ActivationStore, tmp_path / "acts")
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "acts").rglob("*.h5")}
    take(sites=store.sites)
    assert contents(tmp_path / "acts") == contents(store.path)
    assert all(p.stat().st_mtime_ns == time for p, time in done.items())  # finished shards were not computed again


def test_bands_measured_after_a_capture_reach_the_store(rollouts: Rollouts, take: Take) -> None:
    """Activations depend on token ids alone, so that the same capture takes other outcomes and bands over."""
    take()
    banded = rollouts.with_column("band", ["easy"] * len(rollouts))
    assert banded.fingerprint == rollouts.fingerprint
    assert set(take(rollouts=banded).rollouts.frame.band) == {"easy"}


def test_another_capture_is_not_mixed_in(
    store: ActivationStore, series: CheckpointSeries, rollouts: Rollouts, take: Take, tmp_path: Path, llama: Path
) -> None:
    shutil.copytree(store.path, tmp_path / "acts")
    before = contents(tmp_path / "acts")
    moved = save_perturbed(llama, tmp_path / "moved", seed=9)
    other = replace(series, checkpoints=(series.base, replace(series["easy-10"], path=str(moved))))
    for message, changed in (
        ("sites differ", {"sites": [SITE]}),
        ("dtype differ", {"config": replace(SMALL, dtype="float16")}),
        ("config differ", {"config": replace(SMALL, shard_tokens=300)}),
        ("rollouts differ", {"rollouts": rollouts.select(np.arange(70))}),
        ("readers differ", {"series": series.select([])}),
        ("holds another capture: readers differ", {"series": other}),
    ):
        refuses(message, take, **{"sites": store.sites, **changed})
    assert contents(tmp_path / "acts") == before
    edit(tmp_path / "acts", lambda m: m.update(tokenizer="0123456789abcdef"))
    refuses("holds another capture: tokenizer differ", take, sites=store.sites)


# --- bad input


def poisoned(series: CheckpointSeries, id: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Any:
    reweigh(Path(shutil.copytree(series[id].path, folder)), change)
    changed = tuple(replace(c, path=str(folder)) if c.id == id else c for c in series)
    return replace(series, checkpoints=changed)


@pytest.mark.parametrize("id", ["base", "easy-10"])
def test_nan_weights_are_refused(
    series: CheckpointSeries, rollouts: Rollouts, take: Take, tmp_path: Path, id: str
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][3] = torch.nan  # only trajectories with token 3 are hit

    bad = poisoned(series, id, tmp_path / "nan", change)
    with pytest.raises(TsaeError, match=f"not finite while reader {id} reads trajectory ") as error:
        take(series=bad)
    assert str(tmp_path / "nan") in str(error.value)
    row = int(str(error.value).split("reads trajectory ")[1].split()[0])
    assert 3 in np.concatenate(rollouts.tokens(row))
    # The base's shards are good, and may be of use to another capture (earlier=…).
    assert (tmp_path / "acts").exists() == (id == "easy-10")
    assert {file.parent.name for file in (tmp_path / "acts").glob("*/*.h5")} == {"base"} - {id}


def test_a_refused_capture_removes_no_file_of_a_users_own(take: Take, tmp_path: Path) -> None:
    folder = tmp_path / "acts"
    folder.mkdir()
    for name in ("mine.txt", "manifest.json.bak", f"manifest.json.{'0a' * 15}", ".manifest.json.swp"):
        (folder / name).write_text("mine")
        refuses("is not empty and holds no activation store", take)
        assert [path.name for path in folder.iterdir()] == [name]
        (folder / name).unlink()


def test_a_capture_that_waited_for_another_removes_nothing_of_it(
    series: CheckpointSeries, rollouts: Rollouts, take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a capture is a new one is looked at once no other can write."""
    lock = recording.output_lock

    @contextmanager
    def begun_meanwhile(to: Path) -> Iterator[None]:
        with lock(to):
            capture_part(series, rollouts, [SITE], to=to, part=Part(10**8, 10**8 + 1), config=SMALL, progress=False)
            yield

    monkeypatch.setattr(recording, "output_lock", begun_meanwhile)
    refuses("holds another capture", take, config=replace(SMALL, plan="own"))
    assert (tmp_path / "acts" / "manifest.json").is_file()


def test_activations_beyond_half_precision_are_refused(series: CheckpointSeries, take: Take, tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][3] *= 1e6

    bad = poisoned(series, "base", tmp_path / "large", change)
    message = r"overflow float16 .* trajectory \d+ \(problem p\d+\).*bfloat16 or float32"
    refuses(message, take, series=bad, config=replace(SMALL, dtype="float16"))
    assert not (tmp_path / "acts").exists()


def test_tokens_outside_the_vocabulary_or_the_context_are_refused(take: Take, tmp_path: Path) -> None:
    for ids, message in (
        ([1, 20], "trajectory 0 holds token id 20, outside the model's vocabulary of 20"),
        ([-1, 2], "response_ids holds mask values below 0"),
        ([1] * 128, "trajectory 0 has 129 tokens, more than the model's context of 128"),
    ):
        record = {"problem_id": "a", "policy": "base", "prompt_ids": [BOS], "response_ids": ids, "outcome": "unknown"}
        refuses(message, lambda record=record: take(rollouts=Rollouts.from_records([record])))
    assert not (tmp_path / "acts").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 12}, "holds token id 1[0-9], outside reader odd's vocabulary of 12"),
        ({"n_positions": 8}, "trajectory [0-9]+ has [0-9]+ tokens, more than reader odd's context of 8"),
    ],
)
def test_readers_of_a_smaller_vocabulary_or_context_are_refused(
    changed: dict[str, int], message: str, rollouts: Rollouts, take: Take, tmp_path: Path
) -> None:
    save_model(tmp_path / "s" / "base", "gpt2")
    with torch.random.fork_rng():
        odd = AutoModelForCausalLM.from_config(model_config("gpt2", **changed))
    odd.save_pretrained(shutil.copytree(tmp_path / "s" / "base", tmp_path / "s" / "odd"))
    records = [{"id": "base", "path": "base"}, {"id": "odd", "path": "odd", "run": "r", "step": 1}]
    series = CheckpointSeries.load(save_series(tmp_path / "s", records))
    refuses(message, take, series=series, config=replace(SMALL, plan="all"))
    refuses(message, lambda: LiveSource(series, rollouts, SITE, config=LiveConfig(plan="all")))
    assert not (tmp_path / "acts").exists()


def test_trajectories_of_another_tokenizer_are_refused(rollouts: Rollouts, take: Take, tmp_path: Path) -> None:
    foreign = Rollouts(rollouts.table, {"tokenizer": "0123456789abcdef"})
    refuses(r"is not the one .*tokenised with \(0123456789abcdef\)", take, rollouts=foreign)
    assert not (tmp_path / "acts").exists()


def test_readers_of_another_width_are_refused(take: Take, tmp_path: Path) -> None:
    save_model(tmp_path / "s" / "base")
    save_model(tmp_path / "s" / "wide", d_model=32)
    records = [{"id": "base", "path": "base"}, {"id": "wide", "path": "wide", "run": "r", "step": 1}]
    series = CheckpointSeries.load(save_series(tmp_path / "s", records))
    refuses(r"wide.*d_model 32, expected 16", take, series=series, config=replace(SMALL, plan="all"))
    wide, base = read_manifest(tmp_path / "acts")["readers"][::-1]
    assert base["shards"]
    assert not wide["shards"]


def test_unknown_sites_and_precisions_leave_nothing_behind(take: Take, tmp_path: Path) -> None:
    for sites in (["blocks.3.hook_resid_post"], ["hook_embed"]):
        refuses("does not exist|unknown site", take, sites=sites)
    for name in ("batch_tokens", "shard_tokens"):
        refuses(f"{name}=0 must be at least 1", CaptureConfig, **{name: 0})
    assert not (tmp_path / "acts").exists()


# --- damaged stores


@pytest.fixture
def damaged(store: ActivationStore, tmp_path: Path) -> Path:
    shutil.copytree(store.path, tmp_path / "acts")
    return tmp_path / "acts"


@pytest.mark.parametrize("file", ["../outside.h5", "/etc/hostname", "base/../../outside.h5"])
def test_shard_paths_that_leave_the_store_are_refused(damaged: Path, file: str) -> None:
    shutil.copy(damaged / "base" / "00000.h5", damaged.parent / "outside.h5")
    edit(damaged, lambda m: m["readers"][0]["shards"][0].update(file=file))
    refuses("leaves the store", lambda: list(ActivationStore(damaged).shards()))


FAULTS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "none": ("offsets", lambda o: o[:0]),
    "scalar": ("offsets", lambda o: np.int64(78)),
    "broken": ("offsets", lambda o: o + 0.5),
    "back": ("offsets", lambda o: np.r_[o[0], o[2], o[1], o[3:]]),
    "before": ("offsets", lambda o: np.r_[-5, o[1:]]),
    "fewer": ("offsets", lambda o: np.r_[o[0], o[2:]]),
    "moved": ("offsets", lambda o: np.r_[o[0], o[1] + 1, o[2:]]),
    "negative": ("trajectory", lambda t: t - 3),
    "beyond": ("trajectory", lambda t: t + 999),
    "twice": ("trajectory", lambda t: t * 0),
    "short": ("token_ids", lambda t: t[:-3]),
    "pairs": ("token_ids", lambda t: np.stack([t, t], 1)),
    "wide": (f"norms/{SITE}", lambda n: np.stack([n, n], 1)),
    "words": (f"norms/{SITE}", lambda n: n.astype("S4")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_whose_arrays_do_not_fit_are_refused(fault: str, damaged: Path) -> None:
    name, change = FAULTS[fault]
    path = damaged / "base" / "00000.h5"
    with h5py.File(path, "r+") as file:
        found = file[name][()]
        del file[name]
        file[name] = change(found)
    edit(damaged, lambda m: m["readers"][0]["shards"][0].update(hash=file_hash(path)))
    assert [damage.file for damage in check_store(damaged)] == ["base/00000.h5"]
    refuses(r"base/00000.h5: its datasets are not those of the manifest", list, ActivationStore(damaged).shards())


NONSENSE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no readers": lambda m: m.pop("readers"),
    "readers by name": lambda m: m.update(readers={"base": []}),
    "a list of sites": lambda m: m.update(sites=[]),
    "another precision": lambda m: m.update(dtype="float8"),
    "a number for a reader": lambda m: m["readers"][0].update(id=7),
    "no name of a shard": lambda m: m["readers"][0]["shards"][0].update(file=None),
    "no size of a shard": lambda m: m["readers"][0]["shards"][0].pop("n_tokens"),
    "no run": lambda m: m["readers"][0].pop("run"),
    "a list for a run": lambda m: m["readers"][0].update(run=["a"]),
    "a text for a step": lambda m: m["readers"][0].update(step="x"),
    "numbers for weights": lambda m: m["readers"][0].update(weights=5),
    "a reader twice": lambda m: m["readers"].append(m["readers"][0]),
    "a shard twice": lambda m: m["readers"][0]["shards"].append(m["readers"][0]["shards"][0]),
    "lists for ids": lambda m: m.update(special_ids=[[1]]),
    "a number for the config": lambda m: m.update(config=5),
    "true for a width": lambda m: m["sites"][SITE].update(d_model=True),
    "a name that cannot be": lambda m: m["readers"][0]["shards"][0].update(file="base/\0"),
    "a name that is too long": lambda m: m["readers"][0]["shards"][0].update(file="a" * 5000),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_manifests_of_nonsense_are_refused(what: str, damaged: Path) -> None:
    edit(damaged, NONSENSE[what])
    with pytest.raises(TsaeError) as error:
        list(ActivationStore(damaged).shards())
    assert str(damaged / "manifest.json") in str(error.value)


@pytest.mark.parametrize("keep", [0, 100, 3000, -1, -400])
def test_truncated_shards_are_refused(damaged: Path, keep: int) -> None:
    path = damaged / "base" / "00000.h5"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TsaeError, match="cannot be read") as error:
        list(ActivationStore(damaged).shards())
    assert str(path) in str(error.value)


def test_missing_and_foreign_shards_are_refused(damaged: Path) -> None:
    second = damaged / "base" / "00001.h5"
    shutil.copy(damaged / "base" / "00000.h5", second)
    refuses(r"not those of the manifest.*tsae capture", lambda: list(ActivationStore(damaged).shards()))
    second.unlink()
    refuses("a shard of the manifest is missing", lambda: list(ActivationStore(damaged).shards()))


def test_bad_manifests_are_refused(damaged: Path) -> None:
    edit(damaged, lambda m: m.update(version=1))
    refuses("is a store of version 1, expected a store of version 4", ActivationStore, damaged)
    for content in ("{", "[]", "{}"):
        (damaged / "manifest.json").write_text(content)
        refuses(r"cannot be read|has no checksum", ActivationStore, damaged)
    (damaged / "manifest.json").unlink()
    refuses("no activation store", ActivationStore, damaged)


def test_a_copy_of_other_rollouts_is_refused(damaged: Path) -> None:
    make_rollouts(seed=8).write(damaged / "rollouts.parquet")
    with pytest.raises(TsaeError, match=r"rollouts\.parquet: .*not the rollouts"):
        _ = ActivationStore(damaged).rollouts


def test_unknown_readers_and_sites_are_named(store: ActivationStore) -> None:
    refuses("no reader 'hard'; there are base, easy-10", store.reader_info, "hard")
    refuses("no site 'x'", store.d_model, "x")
    assert store.d_model(SITE) == D_MODEL


# --- windows


def brute_force(
    store: ActivationStore, span: str = "all", problems: set[str] | None = None
) -> tuple[dict[bytes, int], set[tuple[bytes, bytes]]]:
    """Activations of all counted tokens with their number, and all pairs of adjacent ones, token by token."""
    tokens: dict[bytes, int] = {}
    pairs: set[tuple[bytes, bytes]] = set()
    for shard in store.shards():
        x = shard.read(SITE, slice(None))
        for i, row in enumerate(shard.trajectory.tolist()):
            prompt, response = store.rollouts.tokens(row)
            if problems is not None and store.rollouts.table["problem_id"][row].as_py() not in problems:
                continue
            previous: bytes | None = None
            for t, token in enumerate([*prompt.tolist(), *response.tolist()]):
                counted = token not in (BOS, EOS, 18)
                counted &= span == "all" or (span == "prompt") == (t < len(prompt))
                now = x[int(shard.offsets[i]) + t].tobytes() if counted else None
                if now is not None:
                    tokens[now] = tokens.get(now, 0) + 1
                    if previous is not None:
                        pairs.add((previous, now))
                previous = now
    return tokens, pairs


def seen(batches: list[TokenBatch]) -> tuple[dict[bytes, int], set[tuple[bytes, bytes]]]:
    tokens: dict[bytes, int] = {}
    pairs: set[tuple[bytes, bytes]] = set()
    for batch in batches:
        rows = [row.tobytes() for row in batch.x.numpy()]
        for row in rows:
            tokens[row] = tokens.get(row, 0) + 1
        pairs |= {(rows[a], rows[b]) for a, b in batch.pairs.tolist()}
    return tokens, pairs


@pytest.mark.parametrize("span", ["all", "response", "prompt"])
def test_windows_give_every_counted_token_once_and_every_pair_in_time(store: ActivationStore, span: Any) -> None:
    windows = Windows(store, SITE, span=span, window=3, max_norm=1e6)
    tokens, pairs = brute_force(store, span)
    assert windows.n_tokens == sum(tokens.values())
    found: set[tuple[bytes, bytes]] = set()
    for epoch in range(12):
        once, some = seen(list(windows.epoch(epoch, 64)))
        # A batch whose windows are all single tokens is left out; there is none among batches of 64.
        assert once == tokens
        assert some <= pairs  # never across trajectories, special tokens or the end of the span
        assert len(some) < len(pairs)
        found |= some
    assert found == pairs


@pytest.mark.parametrize("batch_tokens", [pytest.param(16, marks=pytest.mark.slow), 50, 64, 500, 10_000])
def test_batches_are_near_their_size_and_never_starve_the_temporal_term(
    store: ActivationStore, batch_tokens: int
) -> None:
    windows = Windows(store, SITE, window=4, max_norm=1e6)
    for epoch in range(20):
        sizes = [(len(b.x), len(b.pairs)) for b in windows.epoch(epoch, batch_tokens)]
        assert sum(n for n, _ in sizes) == windows.n_tokens
        assert all(pairs >= 2 for _, pairs in sizes)
        if windows.n_tokens > batch_tokens:
            assert all(2 / 3 * batch_tokens - 4 <= n <= 3 / 2 * batch_tokens + 4 for n, _ in sizes)


def test_every_tenth_problem_is_held_out(store: ActivationStore) -> None:
    held = {"p009"}
    tokens, pairs = brute_force(store, problems=held)
    inside = Windows(store, SITE, held_out=True, max_norm=1e6)
    assert seen(list(inside.epoch(0, 10_000)))[0] == tokens
    outside = Windows(store, SITE, held_out=False, max_norm=1e6)
    assert seen(list(outside.epoch(0, 10_000)))[1].isdisjoint(pairs)
    assert inside.n_tokens + outside.n_tokens == Windows(store, SITE).n_tokens


def test_with_few_problems_nothing_is_held_out(series: CheckpointSeries, take: Take) -> None:
    few = take(series=series.select([]), rollouts=make_rollouts(n_problems=9))
    sizes = {Windows(few, SITE, held_out=side).n_tokens for side in (None, True, False)}
    assert len(sizes) == 1


def test_outliers_are_left_out_and_pairs_do_not_bridge_them(store: ActivationStore) -> None:
    everything = Windows(store, SITE, max_norm=1e6)
    x = np.concatenate([b.x for b in everything.epoch(0, 10_000)])
    centre = np.median(x, axis=0)
    norms = np.linalg.norm(x - centre, axis=1)
    assert everything.norms.median == pytest.approx(np.median(norms))
    # Between two norms: one at the limit itself would be in or out by its last bit.
    multiple = 1.0001 * float(np.quantile(norms, 0.8) / np.median(norms))
    windows = Windows(store, SITE, max_norm=multiple, window=4)
    inside = norms <= multiple * np.median(norms)
    assert windows.norms.outlier_share == pytest.approx(1 - inside.mean())
    assert windows.norms.mean == pytest.approx(norms[inside].mean(), rel=1e-5)
    tokens, pairs = brute_force(store)

    def small(row: bytes) -> bool:
        return bool(np.linalg.norm(np.frombuffer(row, np.float32) - centre) <= windows.norms.limit)

    found: set[tuple[bytes, bytes]] = set()
    for epoch in range(16):
        once, some = seen(list(windows.epoch(epoch, 64)))
        assert once == {row: n for row, n in tokens.items() if small(row)}
        found |= some
    assert found == {(a, b) for a, b in pairs if small(a) and small(b)}


def test_windows_refuse_what_has_no_pairs(store: ActivationStore, series: CheckpointSeries, take: Take) -> None:
    refuses("window=1", Windows, store, SITE, window=1)
    record = {"problem_id": "a", "policy": "base", "prompt_ids": [BOS], "response_ids": [1, EOS], "outcome": "unknown"}
    lone = take(series=series.select([]), rollouts=Rollouts.from_records([record]))
    refuses("no trajectory has two adjacent tokens that count", Windows, lone, SITE)
    refuses("no tokens are left", Windows, lone, SITE, span="prompt")
