"""Difficulty that moves: intervals, bands by shares, migration against chance, pass@k, groups, and their page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import beta, binom

import tsae
from support.builders import graded
from support.logs import refused
from support.trl_runs import tiny_llama, train
from tsae.base.statistics import jeffreys_interval, wilson_interval
from tsae.errors import TsaeError
from tsae.report.difficulty import migration_figure, pass_at_k_figure
from tsae.rollouts import difficulty as dealing
from tsae.rollouts.bands import pass_rates
from tsae.rollouts.config import BandCutoffs, BandQuantiles, DifficultyConfig
from tsae.rollouts.difficulty import band_migration, difficulty, estimate, pass_at_k, paths
from tsae.rollouts.fresh_rollouts import separate_rollouts
from tsae.rollouts.rewards import KINDS, group_advantages, group_summary, group_table
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts


def sampled(rates: dict[str, np.ndarray], n: int, seed: int) -> Rollouts:
    """n responses to every problem, right with the policy's true rates."""
    rng = np.random.default_rng(seed)
    drawn = {policy: rng.binomial(n, rate) for policy, rate in rates.items()}
    return graded({p: {f"p{i:03d}": (int(c), n - int(c)) for i, c in enumerate(v)} for p, v in drawn.items()})


def counted(rates: dict[str, np.ndarray], n: int, seed: int) -> pd.DataFrame:
    """What `difficulty` counts of n responses to every problem, right with the policy's true rates."""
    rng = np.random.default_rng(seed)
    parts = []
    for policy, rate in rates.items():
        c = rng.binomial(n, rate)
        ids = [f"p{i:03d}" for i in range(len(c))]
        parts.append(pd.DataFrame({"policy": policy, "problem_id": ids, "n": n, "successes": c, "pass_rate": c / n}))
    return pd.concat(parts, ignore_index=True)


# --- intervals and bands


def test_jeffreys_is_the_beta_posterior() -> None:
    for confidence in (0.8, 0.95):
        tail = (1 - confidence) / 2
        for trials in (1, 8, 50):
            for successes in {0, 1, trials // 2, trials}:
                posterior = beta(successes + 0.5, trials - successes + 0.5)
                low, high = jeffreys_interval(successes, trials, confidence)
                assert low == pytest.approx(0.0 if successes == 0 else posterior.ppf(tail), abs=1e-9)
                assert high == pytest.approx(1.0 if successes == trials else posterior.ppf(1 - tail), abs=1e-9)
    assert [float(end) for end in jeffreys_interval(0, 0)] == [0, 1]


@pytest.mark.parametrize("interval", [wilson_interval, jeffreys_interval])
def test_intervals_hold_the_true_rate_as_often_as_they_say(interval: Any) -> None:
    n, counts = 16, np.arange(17)
    low, high = interval(counts, np.full(17, n), 0.95)
    rates = np.linspace(0.02, 0.98, 97)
    coverage = [binom.pmf(counts, n, rate)[(low <= rate) & (rate <= high)].sum() for rate in rates]
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.012)
    assert min(coverage) > 0.83


def test_pass_rates_have_the_interval_that_is_asked_for() -> None:
    frame = graded({"base": {"a": (3, 1)}}).frame
    assert pass_rates(frame, "", interval="jeffreys").low["a"] == pytest.approx(beta(3.5, 1.5).ppf(0.025))
    assert pass_rates(frame, "", confidence=0.8).low["a"] > pass_rates(frame, "").low["a"]


def test_bands_by_shares_of_the_problems() -> None:
    """Nine problems, thirds; ties stay together, also where that makes a band larger."""
    rollouts = graded({"base": {f"p{i}": (i, 8 - i) for i in range(9)}})
    again = rollouts.with_column("response_ids", [[3]] * len(rollouts))
    banded = rollouts.with_bands("base", cutoffs=BandQuantiles(), measured_on=again)
    found = banded.frame.groupby("problem_id").band.first()
    assert found.tolist() == ["hard"] * 3 + ["medium"] * 3 + ["easy"] * 3
    assert banded.info["bands"] == {
        "reference": "base", "easy": 0.75, "hard": 0.25, "separate": True, "cross_fitted": False, "halved": 0,
        "unbanded": 0, "quantiles": {"easy": 1 / 3, "hard": 1 / 3},
    }  # fmt: skip
    rates = np.array([0, 0, 0, 0, 0.5, 0.5, 1, 1, 1, 1])
    many = np.arange(100) / 100
    found = BandQuantiles(easy=0.07, hard=0.07).cutoffs(many).band(many)
    assert [(found == name).sum() for name in ("easy", "hard")] == [7, 7]
    cutoffs = BandQuantiles(easy=0.2, hard=0.2).cutoffs(rates)
    assert cutoffs == BandCutoffs(easy=1.0, hard=0.0)
    assert cutoffs.band(rates).tolist() == ["hard"] * 4 + ["medium"] * 2 + ["easy"] * 4
    with pytest.raises(TsaeError, match="90% of the problems have the pass rate 0, which would be easy and hard"):
        BandQuantiles().cutoffs(np.array([0.0] * 9 + [1.0]))
    for shares in ((0.5, 0.5), (0.0, 0.3), (0.3, -0.1)):
        refused("leave nothing", BandQuantiles, *shares)
    refused("easy=nan is not finite", BandQuantiles, float("nan"), 0.2)


# --- migration


def migration(rollouts: Rollouts, seed: int = 0, **options: Any) -> pd.DataFrame:
    found = difficulty(rollouts, DifficultyConfig(seed=seed, n_draws=400, k=(1,)), **options)
    return found.migration.set_index(["start", "end", "from_band", "to_band"])


def test_moves_are_counted() -> None:
    rollouts = graded(
        {
            "base": {"a": (4, 0), "b": (2, 2), "c": (0, 4), "d": (0, 4), "lost": (1, 3)},
            "mid": {"a": (4, 0), "b": (4, 0), "c": (2, 2), "d": (0, 4)},
            "end": {"a": (0, 4), "b": (4, 0), "c": (4, 0), "d": (0, 4), "new": (4, 0)},
        }
    )
    found = migration(rollouts)
    assert list(dict.fromkeys(found.index.droplevel([2, 3]))) == [("base", "mid"), ("mid", "end"), ("base", "end")]
    moved = found[found.n > 0].n.to_dict()
    assert {k[2:]: n for k, n in moved.items() if k[:2] == ("base", "end")} == {
        ("easy", "hard"): 1, ("medium", "easy"): 1, ("hard", "easy"): 1, ("hard", "hard"): 1,
    }  # fmt: skip
    assert moved["mid", "end", "easy", "easy"] == 1
    assert found.share["base", "end", "hard", "easy"] == 0.5
    assert (found.n_problems == 4).all()  # those that all three were measured on
    assert np.isnan(found.share["mid", "end", "medium", "hard"]) is np.False_
    # Every row of the null adds up to the problems, too.
    assert found.expected.groupby(level=[0, 1]).sum().tolist() == pytest.approx([4, 4, 4])


def test_expected_moves_are_those_of_dealing_outcomes_anew() -> None:
    """One problem, four responses a side, three right in all: the hypergeometric distribution by hand."""
    rollouts = graded({"base": {"a": (3, 1)}, "run": {"a": (0, 4)}})
    found = band_migration(
        difficulty(rollouts, DifficultyConfig(k=(1,))).rates, ["base", "run"], BandCutoffs(), n_draws=20_000
    ).set_index(["from_band", "to_band"])
    ways = {s: len(list(itertools.combinations(range(3), s))) * len(list(itertools.combinations(range(5), 4 - s)))
            for s in range(4)}  # fmt: skip
    total = sum(ways.values())
    # 3 : 0 and 0 : 3 are easy and hard; 2 : 1 and 1 : 2 medium and hard.
    expected = {("easy", "hard"): ways[3], ("medium", "hard"): ways[2], ("hard", "medium"): ways[1]}
    for bands, n in expected.items():
        assert found.expected[bands] == pytest.approx(n / total, abs=0.012)
    assert found.p["easy", "hard"] == pytest.approx(ways[3] / total, abs=0.012)


def test_deals_in_blocks_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = np.random.default_rng(0).random(7)
    rates = counted({"base": rate, "run": rate, "end": rate}, 30, 0)
    whole = band_migration(rates, ["base", "run", "end"], BandCutoffs(), n_draws=50)
    sizes, real = list[int](), dealing._counts
    monkeypatch.setattr(dealing, "_DEALT", 100, raising=False)
    monkeypatch.setattr(dealing, "_counts", lambda *args: sizes.append(args[0].size) or real(*args))
    found = band_migration(rates, ["base", "run", "end"], BandCutoffs(), n_draws=50)
    pd.testing.assert_frame_equal(found, whole, check_exact=True)
    assert max(sizes) <= 100


@pytest.mark.slow(ci=True)  # measures an error rate
def test_where_nothing_changed_moves_are_those_of_chance() -> None:
    """p-values of 120 data sets in which both checkpoints solve every problem equally often."""
    rng = np.random.default_rng(5)
    small, excess = dict.fromkeys(itertools.product(BANDS, BANDS), 0), []
    for seed in range(120):
        rate = rng.beta(0.7, 0.7, size=80)
        rates = counted({"base": rate, "run": rate}, 8, seed)
        found = band_migration(rates, ["base", "run"], BandCutoffs(), n_draws=400, seed=seed)
        found = found.set_index(["from_band", "to_band"])
        for cell in small:
            small[cell] += found.p[cell] <= 0.05
        away = [a != b for a, b in found.index]
        excess.append(found.n[away].sum() - found.expected[away].sum())
    assert max(small.values()) <= 14  # 6 expected; more than 14 has a chance of 0.1 %
    assert abs(np.mean(excess)) < 3 * np.std(excess) / np.sqrt(len(excess))


def test_planted_moves_are_found() -> None:
    rate = np.full(80, 0.5)
    better = np.where(np.arange(80) < 30, 0.95, 0.5)
    found = migration(sampled({"base": rate, "run": better}, 16, 1)).loc["base", "run"]
    cell = found.loc["medium", "easy"]
    assert cell.n >= 20
    assert cell.n > 1.5 * cell.null_high
    assert cell.p < 0.01
    assert found.p["medium", "hard"] > 0.05
    assert found.n["medium", "medium"] < found.expected["medium", "medium"]


def test_paths_follow_the_series() -> None:
    from tsae.checkpoints.loading import Checkpoint
    from tsae.checkpoints.series import CheckpointSeries

    rollouts = graded({p: {"a": (1, 1)} for p in ("r-20", "base", "r-10", "s-10")})
    series = CheckpointSeries(
        tuple(
            Checkpoint(id, "x", run=run, step=step)
            for id, run, step in [
                ("base", None, 0), ("r-20", "r", 20), ("r-10", "r", 10), ("s-10", "s", 10), ("t-10", "t", 10)
            ]
        )
    )  # fmt: skip
    assert paths(rollouts, series) == {"r": ["base", "r-10", "r-20"], "s": ["base", "s-10"]}
    assert paths(rollouts) == {"": ["r-20", "base", "r-10", "s-10"]}
    found = difficulty(rollouts, DifficultyConfig(n_draws=100), series=series)
    assert found.info["reference"] == "base"
    assert set(found.migration.run) == {"r", "s"}
    other = CheckpointSeries((Checkpoint("zero", "x"), Checkpoint("one", "x", run="r", step=1)))
    refused("no run of the series sampled these rollouts", difficulty, rollouts, series=other)


def test_bands_of_every_policy_use_the_references_cutoffs() -> None:
    base = {f"p{i}": (i, 8 - i) for i in range(9)}
    run = {f"p{i}": (8, 0) for i in range(9)}
    found = difficulty(graded({"base": base, "run": run}), cutoffs=BandQuantiles())
    assert found.info["cutoffs"] == {"easy": 0.75, "hard": 0.25}
    assert found.bands()[list(BANDS)].to_numpy().tolist() == [[3, 3, 3], [9, 0, 0]]
    assert found.bands().mean_pass_rate.tolist() == pytest.approx([0.5, 1.0])
    # Eight of eight has a Wilson interval from .68, Jeffreys' begins at .74: neither is surely easy.
    assert found.bands().sure.tolist() == [0, 0]
    many = difficulty(graded({"base": {"a": (400, 0), "b": (0, 400), "c": (200, 200), "d": (300, 100)}}))
    assert many.rates.set_index("problem_id").sure.to_dict() == {"a": True, "b": True, "c": True, "d": False}


# --- pass@k


def test_pass_at_k_is_that_of_all_subsets() -> None:
    for n, c in itertools.product(range(1, 8), range(8)):
        if c > n:
            continue
        outcomes = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            hits = [any(drawn) for drawn in itertools.combinations(outcomes, k)]
            assert estimate(np.array([n]), np.array([c]), k)[0] == pytest.approx(np.mean(hits), abs=1e-12)
    assert np.isnan(estimate(np.array([3]), np.array([1]), 4)[0])
    assert estimate(np.array([2, 4, 5]), np.array([1, 1, 1]), 1).tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 5])
    assert estimate(np.array([4000]), np.array([1]), 2000)[0] == pytest.approx(0.5)


def test_pass_at_k_by_band_with_paired_differences() -> None:
    outcomes = {
        "base": {"a": (4, 0), "b": (1, 3), "c": (0, 4)},
        "run": {"a": (4, 0), "b": (3, 1), "c": (1, 3), "d": (0, 4)},
    }
    found = difficulty(graded(outcomes), DifficultyConfig(k=(1, 2, 8)))
    table = found.pass_at_k.set_index(["policy", "band", "k"])
    assert table.pass_at_k["base", "all", 1] == pytest.approx((1 + 0.25 + 0) / 3)
    assert table.pass_at_k["base", "all", 2] == pytest.approx((1 + 0.5 + 0) / 3)
    assert table.pass_at_k["run", "all", 1] == pytest.approx((1 + 0.75 + 0.25 + 0) / 4)
    assert table.difference["run", "all", 1] == pytest.approx((0 + 0.5 + 0.25) / 3)  # over the problems of both
    assert table.n_paired["run", "all", 1] == 3
    assert table.n_problems["run", "all", 1] == 4
    assert table.pass_at_k["run", "hard", 2] == pytest.approx((1 + 0.5) / 2)  # b and c were hard for the base
    assert np.isnan(table.difference["base", "all", 1])
    assert 8 not in set(found.pass_at_k.k)  # nobody gave eight responses
    assert (table.low <= table.pass_at_k + 1e-12).sum() == table.low.notna().sum()


def test_the_paired_interval_is_that_of_differences() -> None:
    """Problems differ much more than checkpoints do: pairing finds what two intervals side by side would not."""
    rng = np.random.default_rng(0)
    rate = rng.random(60)
    found = difficulty(sampled({"base": rate, "run": np.clip(rate + 0.12, 0, 1)}, 32, 0), DifficultyConfig(k=(1,)))
    row = found.pass_at_k.set_index(["policy", "band"]).loc["run", "all"]
    base = found.pass_at_k.set_index(["policy", "band"]).loc["base", "all"]
    assert row.low < base.high  # the two overlap
    assert 0.05 < row.difference_low < row.difference < row.difference_high
    again = pass_at_k(found.rates, pd.DataFrame(), reference="base", k=[1])
    assert again.set_index("policy").difference_low["run"] == pytest.approx(row.difference_low)


# --- groups and advantages


def test_groups_are_named() -> None:
    outcomes = {"base": {"none": (0, 4), "one": (1, 3), "some": (2, 2), "all": (4, 0), "lone": (1, 0)}}
    found = group_table(graded(outcomes).frame).set_index("problem_id")
    assert found.kind.to_dict() == {
        "none": "all failures",
        "one": "single success",
        "some": "mixed",
        "all": "all successes",
        "lone": "one response",
    }
    assert found.no_variance.to_dict() == {"none": True, "one": False, "some": False, "all": True, "lone": True}
    # 1 of 4: mean .25, unbiased deviation .5; 2 of 4: mean .5, deviation sqrt(1/3).
    assert found.top_advantage["one"] == pytest.approx(0.75 / (0.5 + 1e-4))
    assert found.positive["some"] == pytest.approx(2 * 0.5 / (np.sqrt(1 / 3) + 1e-4))
    summary = group_summary(found.reset_index()).iloc[0]
    assert summary[list(KINDS)].tolist() == [1, 1, 1, 1, 1]
    assert summary.no_variance == 3
    assert summary.single_success_share == pytest.approx(
        found.positive["one"] / (found.positive["one"] + found.positive["some"])
    )


def test_groups_have_variance_by_their_rewards() -> None:
    """A format reward lets a group learn in which all answers are wrong."""
    rollouts = graded({"base": {"a": (0, 4), "b": (2, 2)}})
    shaped = rollouts.with_column("reward", [0.0, 0.1, 0.0, 0.1, 1.0, 1.0, 1.0, 1.0])
    found = group_table(shaped.frame).set_index("problem_id")
    assert found.no_variance.to_dict() == {"a": False, "b": True}
    assert found.kind.to_dict() == {"a": "all failures", "b": "mixed"}
    unknown = rollouts.with_column("reward", [None] * 8)
    assert group_table(unknown.frame).positive.tolist() == group_table(rollouts.frame).positive.tolist()
    partly = rollouts.with_column("reward", [None, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, None])
    assert group_table(partly.frame).n.tolist() == [3, 3]


def test_steps_of_one_policy_are_groups_of_their_own() -> None:
    rollouts = graded({"run": {"a": (4, 4)}}).with_column("step", [1] * 4 + [2] * 4)
    found = group_table(rollouts.frame)
    assert found.kind.tolist() == ["all successes", "all failures"]
    assert rollouts.with_advantages().frame.advantage.tolist() == [0.0] * 8


def test_small_and_large_rewards_keep_their_advantages() -> None:
    groups = np.zeros(4)
    for scale in (1e-14, 1.0, 1e9):
        found = group_advantages(scale * np.array([1.0, 0, 0, 0]), groups, "rloo")
        assert found == pytest.approx(scale * np.array([1, -1 / 3, -1 / 3, -1 / 3]), rel=1e-9)
        assert group_advantages(np.full(4, 0.1 * scale), groups).tolist() == [0.0] * 4


def test_advantages_are_those_that_trl_logged() -> None:
    """The shipped logs hold what TRL itself computed while it trained the testbed's runs."""
    files = sorted((tsae.testbed.series_path() / "logs").rglob("*.parquet"))
    assert len(files) == 21
    for file in files:
        log = pd.read_parquet(file)
        found = group_advantages(log.correct.to_numpy(), (log.step.astype(str) + log.problem_id).to_numpy())
        np.testing.assert_allclose(found, log.advantage, atol=2e-5, err_msg=str(file))
        kinds = group_table(
            Rollouts.from_records(
                [
                    {"problem_id": r.problem_id, "policy": "p", "prompt_ids": [1], "response_ids": [1],
                     "reward": r.correct, "outcome": "success" if r.correct else "failure"}
                    for r in log.itertuples()
                ]
            ).frame
        ).set_index("problem_id")  # fmt: skip
        logged = log.groupby("problem_id").advantage.apply(lambda a: bool((a == 0).all()))
        assert kinds.no_variance.to_dict() == logged.to_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL
@pytest.mark.parametrize(
    ("kind", "options"),
    [("grpo", {}), ("dr_grpo", {"scale_rewards": "none", "loss_type": "dr_grpo"}), ("rloo", {})],
)
def test_advantages_are_those_of_a_running_trainer(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    import trl
    from datasets import Dataset

    rewards: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        drawn = np.random.default_rng(len(rewards)).integers(0, 3, len(completions)).astype(float).tolist()
        rewards.extend(drawn)
        return list(drawn)

    name = "RLOO" if kind == "rloo" else "GRPO"
    args = getattr(trl, f"{name}Config")(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=4, beta=0.0, gradient_checkpointing=False, report_to=[], bf16=False, **options,
    )  # fmt: skip
    prompts, tokenizer = Dataset.from_dict({"prompt": ["1+1?", "2+3?"] * 4}), tsae.testbed.make_tokenizer()
    model: dict[str, Any] = {"model": tiny_llama(), "train_dataset": prompts, "processing_class": tokenizer}
    runner = getattr(trl, f"{name}Trainer")(reward_funcs=reward, args=args, **model)
    train(runner)
    logged = torch.tensor(list(runner._logs["advantages"]), dtype=torch.float64)
    found = group_advantages(np.array(rewards), np.repeat(np.arange(len(rewards) // 4), 4), kind)
    assert len(set(rewards)) > 1
    torch.testing.assert_close(torch.from_numpy(found), logged, atol=1e-5, rtol=1e-5)


# --- what a person sees


@pytest.fixture(scope="module")
def measured() -> Any:
    rng = np.random.default_rng(0)
    rate = rng.random(50)
    rates = {"base": rate, "<b>run</b>-1": np.clip(rate + 0.1, 0, 1), "run-2": np.where(rate < 0.5, 0.02, 0.98)}
    return difficulty(sampled(rates, 8, 0), DifficultyConfig(n_draws=200))


def test_the_figure_shows_every_problem_once_a_checkpoint(measured: Any) -> None:
    figure = migration_figure(measured)
    bars = [t for t in figure.data if t.text and " problems " in t.text and "→" not in t.text]
    assert len(bars) == 9
    for policy in ("base", "&lt;b&gt;run&lt;/b&gt;-1", "run-2"):
        mine = [t for t in bars if t.text.startswith(f"{policy}:")]
        assert sum(int(re.search(r": (\d+) of 50", t.text)[1]) for t in mine) == 50
        assert max(max(t.y) for t in mine) == pytest.approx(1.0)
    ribbons = [t for t in figure.data if t.text and "→" in t.text and t.x[0] is not None]
    assert sum(int(re.search(r": (\d+)", t.text)[1]) for t in ribbons) == 100  # 50 problems, two steps
    assert pass_at_k_figure(measured).layout.height == 340
    alone = difficulty(graded({"base": {"a": (1, 1)}}), DifficultyConfig(k=(1,)))
    assert migration_figure(alone) is None
    assert pass_at_k_figure(alone) is None


def test_the_page_opens_without_a_network(measured: Any, tmp_path: Path) -> None:
    measured.save(tmp_path / "out")
    tables = [f"{name}.parquet" for name in ("groups", "migration", "pass_at_k", "rates")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "difficulty.html",
        "difficulty.json",
        *sorted([*tables, "manifest.json"]),
    ]
    page = (tmp_path / "out" / "difficulty.html").read_text(encoding="utf-8")
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "How difficulty moved" in markup
    assert "<b>run</b>" not in markup
    assert "&lt;b&gt;run&lt;/b&gt;-1" in markup
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", markup)
    assert "default-src 'none'" in markup
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "rates.parquet"), measured.rates)
    refused("is a folder", measured.to_html, tmp_path)


def test_the_terminal_says_the_same(measured: Any) -> None:
    text = str(measured)
    assert "50 problems, 3 checkpoints, 8 responses to a problem" in text
    counts = measured.bands().loc["run-2"]
    assert re.search(rf"run-2 +{counts.easy:.0f} +{counts.medium:.0f} +{counts.hard:.0f} ", text)
    assert "base → run-2:" in text
    assert "medium problems became" in text
    assert "measured on the other half of the responses of base to its problem" in text


def test_bands_that_are_there_are_kept() -> None:
    rollouts = graded({"base": {"a": (4, 0), "b": (2, 2), "c": (0, 4)}, "run": {"a": (0, 4), "b": (2, 2), "c": (4, 0)}})
    other = graded({"base": {"a": (0, 8), "b": (4, 4), "c": (8, 0)}})
    banded = rollouts.with_bands("base", measured_on=other)
    found = difficulty(banded, DifficultyConfig(k=(1,)))
    table = found.pass_at_k.set_index(["policy", "band"])
    assert table.pass_at_k["base", "hard"] == 1.0
    assert "separate rollouts of base" in str(found)
    assert found.rates[found.rates.policy == "base"].band.tolist() == ["easy", "medium", "hard"]


def asking(file: Path, policies: str, *problems: tuple[str, list[int], str]) -> Path:
    """A file of responses of every policy to (id, prompt, success or failure)."""
    records = [
        {"problem_id": id, "policy": policy, "prompt_ids": ids, "response_ids": [2], "outcome": outcome}
        for policy in policies.split()
        for id, ids, outcome in problems
    ]
    return Rollouts.from_records(records).write(file)


def test_separate_rollouts_are_matched_by_their_prompts(tmp_path: Path) -> None:
    """An import makes ids of its own: the same tokens are the same problem."""
    log = asking(tmp_path / "log.parquet", "run-1", ("x", [1, 2], "success"), ("y", [1, 3], "success"))
    asked = [
        (id, ids, o) for id, ids in (("a", [1, 3]), ("b", [1, 2]), ("c", [1, 2, 3])) for o in ("success", "failure")
    ]
    here = asking(tmp_path / "base.parquet", "run-1 base", *asked)
    found = separate_rollouts(here, log, "base")
    assert found.problem_id.tolist() == ["y", "y", "x", "x"]
    assert found.policy.tolist() == ["base"] * 4
    assert found.outcome.tolist() == ["success", "failure"] * 2
    refused("holds nothing that start sampled; policies are run-1, base", separate_rollouts, here, log, "start")
    with pytest.raises(TsaeError, match=r"asks none of the problems of log\.parquet"):
        separate_rollouts(asking(tmp_path / "other.parquet", "base", ("x", [1], "success")), log, "base")


@pytest.mark.parametrize(
    "bands",
    [
        "x",
        7,
        ["base"],
        {"cross_fitted": True},
        {"reference": 3, "separate": False},
        {"reference": "a", "separate": "no"},
    ],
)
def test_bands_that_a_file_describes_wrongly_are_refused(bands: Any) -> None:
    rollouts = graded({"base": {"a": (2, 2)}}, band="easy")
    with pytest.raises(TsaeError, match=r"not describe in a known way .*\. Band the rollouts again"):
        difficulty(Rollouts(rollouts.table, {"bands": bands}), DifficultyConfig(k=(1,)))


def test_problems_that_share_a_prompt_are_matched_by_their_ids(tmp_path: Path) -> None:
    """Of one prompt with several answers, each problem has a pass rate of its own, or none."""

    def matched(problems: str, policy: str = "base") -> Any:
        """Rollouts of problems such as a5+: a, whose prompt ends in token 5, was solved."""
        told = [(p[0], [1, int(p[1])], "success" if p[2] == "+" else "failure") for p in problems.split()]
        file = asking(tmp_path / f"{policy}.parquet", policy, *told)
        return file if policy != "base" else separate_rollouts(file, log, "base")

    log = matched("a5+ b5+ c6+", "run-1")
    found = matched("a5+ b5- x6+")
    assert found.problem_id.tolist() == ["a", "b", "c"]
    assert found.outcome.tolist() == ["success", "failure", "success"]
    assert matched("x5+ a5+ c6+").problem_id.tolist() == ["a", "c"]
    assert matched("c6- d6+").problem_id.tolist() == ["c"]
    refused(r"2 of its problems cannot be identified: .* share their prompt", matched, "x5+ y5+")


def test_steps_with_problems_of_their_own_have_no_moves(tmp_path: Path) -> None:
    """As in the log of a training run."""
    found = difficulty(graded({"s1": {"a": (2, 2)}, "s2": {"b": (4, 0)}}), DifficultyConfig(k=(1, 2)))
    assert found.migration.empty
    assert migration_figure(found) is None
    assert "s1 → s2: no problem was answered at every step" in str(found)
    assert found.to_html(tmp_path / "page.html").is_file()


def test_configs_are_checked() -> None:
    for bad in ({"confidence": 1.0}, {"n_draws": 5}, {"k": (0,)}):
        refused(next(iter(bad)), DifficultyConfig, **bad)
    with pytest.raises(TsaeError, match="no trajectory of known outcome was sampled by other"):
        difficulty(graded({"base": {"a": (1, 1)}}), reference="other")


@pytest.mark.parametrize("before", [False, True])
def test_pass_at_k_in_bands_of_the_same_responses_is_unbiased(before: bool) -> None:
    """Every outcome of four fair coins equally often: pass@2 is .75 in each band. Draws from both halves give .67.

    With bands `before`, no policy is named that they were measured on.
    """
    records = [
        {"problem_id": f"p{copy}-{number}", "policy": "base", "prompt_ids": [1], "response_ids": [2],
         "outcome": "success" if right else "failure", "reward": float(right)}
        for copy in range(100)
        for number, coins in enumerate(itertools.product((False, True), repeat=4))
        for right in coins
    ]  # fmt: skip
    rollouts = Rollouts.from_records(records)
    if before:
        rollouts = rollouts.with_bands(None)
        assert rollouts.info["bands"]["reference"] is None
    found = difficulty(rollouts, DifficultyConfig(k=(2,), n_draws=100)).pass_at_k
    assert found.set_index("band").pass_at_k[list(BANDS)].to_numpy() == pytest.approx([0.75] * 3, abs=0.03)
