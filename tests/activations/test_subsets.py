"""Parts of a store, by reader, run, band and outcome: against brute force over its trajectories."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tsae
from support.refusals import refuses
from support.stores import SITE, Text, Token, numbered_store, numbers
from tsae.activations.config import Subset
from tsae.activations.store import ActivationStore
from tsae.cli import main
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE

Numbered = tuple[ActivationStore, list[Token], list[Text]]
RUNS = {"base": None, "a-1": "a", "a-2": "a", "b-1": "b"}
BANDS, OUTCOMES = ("easy", "medium", "hard", None), ("success", "failure", "unknown")
SMALL = SAEConfig(d_sae=16, k=2)
TRAINING = TrainingConfig(tokens=600, batch_tokens=100, balance=(), save_every_steps=2)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Numbered:
    """Four readers of two runs over different trajectories of every band and outcome."""
    rng = np.random.default_rng(0)
    texts = []
    for i, (band, outcome) in enumerate([*itertools.product(BANDS, OUTCOMES)] * 4):
        readers = tuple(id for j, id in enumerate(RUNS) if j == 0 or (i + j) % 3)
        response = rng.integers(0, 6, rng.integers(2, 12)).tolist()
        texts.append(Text([1, 2], response, readers, band, outcome))
    store, tokens = numbered_store(tmp_path_factory.mktemp("subsets") / "acts", texts, runs=RUNS)
    return store, tokens, texts


CASES: list[dict[str, Any]] = [
    {},
    {"readers": "a-2"},
    {"readers": ["b-1", "base"]},
    {"runs": "a"},
    {"runs": ["base", "b"], "bands": ["easy", "hard"]},
    {"bands": "medium"},
    {"outcomes": ["failure", "unknown"]},
    {"readers": ["base", "a-1"], "runs": "a", "bands": ["easy", "medium"], "outcomes": "success"},
]


def wanted(token: Token, texts: list[Text], case: dict[str, Any]) -> bool:
    text = texts[token.row]
    values = {"readers": token.reader, "runs": RUNS[token.reader] or token.reader, "bands": text.band}
    values["outcomes"] = text.outcome
    return all(values[axis] in ([given] if isinstance(given, str) else given) for axis, given in case.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("held_out", [None, True, False])
def test_windows_read_the_tokens_of_the_subset(numbered: Numbered, case: dict[str, Any], held_out: bool | None) -> None:
    store, tokens, texts = numbered
    windows = store.subset(**case).windows(SITE, held_out=held_out, window=3, partner=None)
    # A problem is on the same side whatever the subset.
    sides = [held_out is None or held_out == (token.row % 10 == 9) for token in tokens]
    expected = [i for i, t in enumerate(tokens) if wanted(t, texts, case) and sides[i]]
    assert sorted(n for batch in windows.epoch(0, 30) for n in numbers(batch.x)) == expected != []
    assert windows.n_tokens == len(expected)


@pytest.mark.parametrize("case", CASES)
def test_a_subset_of_a_subset_is_in_both(numbered: Numbered, case: dict[str, Any]) -> None:
    store, tokens, texts = numbered
    part = store.subset(outcomes=["success", "failure"]).subset(readers=["base", "a-1", "a-2"])
    found = part.subset(**case)
    expected = [t for t in tokens if wanted(t, texts, case) and texts[t.row].outcome != "unknown" and t.reader != "b-1"]
    kept = [t for t in tokens if t.reader in found.readers and found.rows[t.row]]
    assert kept == expected
    assert store.readers == list(RUNS)
    assert store.rows.all()
    assert found.whole.readers == list(RUNS)
    assert [shard.reader for shard in found.shards()] == [s.reader for s in store.shards() if s.reader in found.readers]


def test_what_does_not_occur_is_refused(numbered: Numbered) -> None:
    store = numbered[0]
    for case, message in [
        ({"readers": "c"}, r"no reader 'c'; there are base, a-1, a-2, b-1"),
        ({"runs": "c"}, r"no run 'c'; there are base, a, b"),
        ({"bands": "Easy"}, r"no band 'Easy'; there are easy, medium, hard"),
        ({"outcomes": "correct"}, r"no outcome 'correct'; there are success"),
        ({"readers": "a-1", "runs": "b"}, r"nothing is of readers a-1, runs b"),
    ]:
        refuses(message, store.subset, **case)
    refuses("no reader 'base'; there are a-1", lambda: store.subset(readers="a-1").reader_info("base"))
    refuses("nothing is of bands hard", lambda: store.subset(bands="easy").subset(bands="hard"))


def test_a_training_goes_on_only_with_the_same_subset(numbered: Numbered, tmp_path: Path) -> None:
    store, folder = numbered[0], tmp_path / "sae"
    part = store.subset(bands=["hard", "easy"], runs="a")
    tsae.train(part, SMALL, to=folder, training=TRAINING, progress=False)
    inputs = json.loads((folder / "manifest.json").read_text())["inputs"]
    assert inputs["subset"] == {"runs": ["a"], "bands": ["easy", "hard"]}
    assert list(inputs["readers"]) == ["a-1", "a-2"]
    assert json.loads((folder / "training.json").read_text())["store"]["subset"] == inputs["subset"]
    again = store.subset(runs="a").subset(bands=["easy", "hard"])  # in another order
    tsae.train(again, SMALL, to=folder, training=TRAINING, progress=False)
    for other, message in [
        (store, r"inputs\.readers\.base was absent"),
        (store.subset(runs="a"), r"inputs\.subset\.bands was .* is absent"),
        (store.subset(runs="a", bands="easy"), r"inputs\.subset\.bands was"),
        (store.subset(readers=["a-1", "a-2"], bands=["easy", "hard"]), r"inputs\.subset\.runs was .* is absent"),
    ]:
        refuses(message, tsae.train, other, SMALL, to=folder, training=TRAINING, progress=False)
    # The bands that it was made by are measured anew: another subset, although its name is the same.
    table = store.rollouts
    bands = ["hard" if band == "medium" else band for band in table.table["band"].to_pylist()]
    relabelled = store.subset(bands=["hard", "easy"], runs="a")
    relabelled.__dict__["rollouts"] = table.with_column("band", bands)
    refuses(r"inputs\.band was", tsae.train, relabelled, SMALL, to=folder, training=TRAINING, progress=False)


# --- encode and evaluate


@pytest.fixture(scope="module")
def banded(store: ActivationStore, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The captured store with bands."""
    import shutil

    folder = shutil.copytree(store.path, tmp_path_factory.mktemp("banded") / "acts")
    bands = ["easy" if problem < "p004" else "hard" for problem in store.rollouts.table["problem_id"].to_pylist()]
    store.rollouts.with_column("band", bands).write(folder / "rollouts.parquet")
    return ActivationStore(folder)


@pytest.fixture(scope="module")
def sae(banded: ActivationStore) -> TemporalSAE:
    training = TrainingConfig(site="blocks.1.hook_resid_post", tokens=2000, batch_tokens=200)
    return tsae.train(banded, SAEConfig(d_sae=48, k=4), training=training, progress=False)


PARTS: list[dict[str, Any]] = [
    {"readers": "easy-10"},
    {"bands": "easy", "outcomes": "success"},
    {"runs": "easy", "bands": "hard"},
]


@pytest.mark.parametrize("case", PARTS)
def test_a_subset_is_encoded_as_in_the_whole(
    banded: ActivationStore, sae: TemporalSAE, case: dict[str, Any], tmp_path: Path
) -> None:
    whole = tsae.encode(sae, banded, progress=False)
    part = tsae.encode(sae, banded.subset(**case), to=tmp_path / "features", batch_tokens=100, progress=False)
    table = banded.rollouts.frame
    keep: Callable[[int], bool] = lambda i: all(  # noqa: E731
        {
            "readers": whole.readers[whole.reader[i]],
            "runs": {"base": "base", "easy-10": "easy"}[whole.readers[whole.reader[i]]],
            "bands": table.band[whole.trajectory[i]],
            "outcomes": table.outcome[whole.trajectory[i]],
        }[axis]
        == value
        for axis, value in case.items()
    )
    rows = [i for i in range(whole.n_rows) if keep(i)]
    assert 0 < len(rows) < whole.n_rows
    assert part.trajectory.tolist() == whole.trajectory[rows].tolist()
    assert [part.readers[r] for r in part.reader] == [whole.readers[r] for r in whole.reader[rows]]
    for mine, i in enumerate(rows):
        a, b = (slice(t.row_offsets[r], t.row_offsets[r + 1]) for t, r in ((part, mine), (whole, i)))
        assert part.token_ids[a].tolist() == whole.token_ids[b].tolist()
        np.testing.assert_allclose(part.codes[a].toarray(), whole.codes[b].toarray(), atol=1e-5)
    run = json.loads((tmp_path / "features" / "manifest.json").read_text())
    assert run["inputs"]["subset"] == {axis: [value] for axis, value in case.items()}


def test_a_subset_is_measured_as_its_slice_of_the_whole(banded: ActivationStore, sae: TemporalSAE) -> None:
    whole = tsae.evaluate(sae, banded, held_out=None)
    for case, by, value in (({"readers": "easy-10"}, "reader", "easy-10"), ({"bands": "hard"}, "band", "hard")):
        found = tsae.evaluate(sae, banded.subset(**case), held_out=None)
        expected = next(s for s in whole.slices if (s.by, s.value) == (by, value))
        assert found.n_tokens == expected.n_tokens < whole.n_tokens
        for name in ("fve", "fve_high", "cosine", "l0", "alive"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name))
    only = tsae.evaluate(sae, banded.subset(outcomes="success", readers="base"), held_out=None)
    outcome = banded.rollouts.table["outcome"].to_pylist()
    assert only.n_trajectories <= sum(o == "success" for o in outcome)


def test_the_command_line_takes_the_same_subset_everywhere(banded: ActivationStore, tmp_path: Path) -> None:
    part = ["--runs", "easy", "--bands", "easy", "hard", "--outcomes", "failure"]
    site, store = "blocks.1.hook_resid_post", str(banded.path)
    main(["train", "--store", store, "--to", str(tmp_path / "sae"), "--site", site, "--tokens", "600", "--k", "4",
          "--batch-tokens", "100", "--d-sae", "48", *part])  # fmt: skip
    main(["encode", "--store", store, "--sae", str(tmp_path / "sae"), "--to", str(tmp_path / "features"), *part])
    main(["evaluate", "--store", store, "--sae", str(tmp_path / "sae"), "--json", str(tmp_path / "e.json"),
          "--all-problems", *part])  # fmt: skip
    expected = {"runs": ["easy"], "bands": ["easy", "hard"], "outcomes": ["failure"]}
    for stage in ("sae", "features"):
        assert json.loads((tmp_path / stage / "manifest.json").read_text())["inputs"]["subset"] == expected
    written = json.loads((tmp_path / "e.json").read_text())
    assert written["subset"] == expected
    direct = banded.subset(Subset(runs=("easy",), outcomes=("failure",)))
    found = tsae.evaluate(tmp_path / "sae", direct, held_out=None)
    assert written["evaluation"]["fve"] == pytest.approx(found.fve)
    assert tsae.FeatureTable.load(tmp_path / "features").readers == ["easy-10"]


def test_no_subset_leaves_a_training_as_it_was(numbered: Numbered, tmp_path: Path) -> None:
    store = numbered[0]
    assert store.subset(Subset()).identity(SITE) == store.identity(SITE)
    assert "subset" not in store.identity(SITE)
    training = replace(TRAINING, tokens=200)
    a, b = (tsae.train(s, SMALL, training=training, progress=False) for s in (store, store.subset(readers=list(RUNS))))
    assert a.W_enc.equal(b.W_enc)
