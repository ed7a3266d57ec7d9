"""Interventions: edits against hand-worked ones, hooks in generation, a model whose answer one direction decides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from statements.random_sets import KINDS, exchangeable, said, sharing

import tsae
from support.builders import BOS, D_MODEL, EOS, make_rollouts, model_config, save_model
from support.refusals import refuses
from support.results import make
from tsae.causal.config import InterventionConfig
from tsae.causal.controls import FeatureScales, beyond_random, matched_features, mean_difference, overlap
from tsae.causal.edits import Donor, FeatureEdit
from tsae.causal.findings import planned_tests
from tsae.causal.intervene import intervene
from tsae.causal.intervention import Intervention, outcome_table
from tsae.checkpoints.hooks import HuggingFaceReader, during_generation, rewritten
from tsae.report.story import facts
from tsae.report.tables import necessary_and_sufficient
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.problems import Problem
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE

SITE = "blocks.1.hook_resid_post"
RIGHT, WRONG = 3, 4  # Token ids of the digits that the decided model answers with.
DECIDES, ENDS, OTHER = 0, 1, 2  # Directions of its residual stream.
SAMPLING = SamplingConfig(n_samples=2, max_new_tokens=6, batch_size=7)


def coordinates(d_model: int = D_MODEL, site: str = SITE) -> TemporalSAE:
    """Features are the positive parts of the residual stream's coordinates beyond 0.1; the rest is its error."""
    sae = TemporalSAE(d_model, SAEConfig(d_sae=d_model, k=4), site=site)
    with torch.no_grad():
        sae.W_enc.copy_(torch.eye(d_model))
        sae.W_dec.copy_(torch.eye(d_model))
        sae.threshold.fill_(0.1)
    return sae.eval()


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> tsae.CheckpointSeries:
    """A model whose blocks add nothing: it answers RIGHT where the direction DECIDES is on, else WRONG, and ends."""
    from transformers import AutoModelForCausalLM

    from tsae.testbed import make_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        embedding = 0.3 + 0.2 * torch.rand(model.model.embed_tokens.weight.shape, generator=generator)
        embedding[:, [DECIDES, ENDS]] = 0.0
        embedding[:, DECIDES] = 2.0
        embedding[[RIGHT, WRONG], DECIDES] = 0.5
        embedding[[RIGHT, WRONG], ENDS] = 4.0
        embedding[EOS] = 0.25
        model.model.embed_tokens.weight.copy_(embedding)
        head = torch.full_like(model.lm_head.weight, -10.0)
        head[[RIGHT, WRONG, EOS]] = 0.0
        head[RIGHT, DECIDES], head[WRONG, OTHER], head[EOS, ENDS] = 20.0, 10.0, 40.0
        model.lm_head.weight.copy_(head)
    folder = tmp_path_factory.mktemp("decided") / "model"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return tsae.CheckpointSeries((tsae.Checkpoint("base", str(folder)),))


PROBLEMS = [Problem(f"p{n}", "+".join("12345"[: n % 5 + 1]) + "?", str(RIGHT)) for n in range(10)]


def table_of(series: tsae.CheckpointSeries, sae: TemporalSAE, folder: Path) -> tsae.FeatureTable:
    sampled = tsae.sample(series.base, PROBLEMS, SAMPLING, verify=answer, progress=False)
    bands = [("easy", "hard")[int(id[1:]) % 2] for id in sampled.table["problem_id"].to_pylist()]
    store = tsae.capture(series, sampled.with_column("band", bands), [SITE], to=folder / "acts", progress=False)
    return tsae.encode(sae, store, to=folder / "features", progress=False)


@pytest.fixture(scope="module")
def decided_features(decided: tsae.CheckpointSeries, tmp_path_factory: pytest.TempPathFactory) -> tsae.FeatureTable:
    return table_of(decided, coordinates(), tmp_path_factory.mktemp("decided-table"))


def answer(text: str, expected: str) -> bool:
    return text.strip() == expected


DIRECTION = torch.nn.functional.one_hot(torch.tensor(DECIDES), D_MODEL).float()
ABLATION = InterventionConfig(mode="ablate", tokens="all", n_random=3, sampling=SAMPLING)
Edit = Callable[..., Intervention]


@pytest.fixture(scope="module")
def edit(decided: tsae.CheckpointSeries, decided_features: tsae.FeatureTable) -> Edit:
    """Edits the feature that decides, or others, beside all controls."""
    given = {"verify": answer, "exclude": [OTHER, ENDS], "progress": False}

    def edited(config: InterventionConfig = ABLATION, chosen: Any = (DECIDES,), **more: Any) -> Intervention:
        checkpoint, table = more.pop("checkpoint", decided.base), more.pop("table", decided_features)
        return intervene(checkpoint, more.pop("sae", coordinates()), table, chosen, config, **{**given, **more})

    return edited


@pytest.fixture(scope="module")
def found(edit: Edit) -> Intervention:
    """The feature that decides is ablated, beside all controls."""
    return edit(direction=DIRECTION)


# -- the edit


def test_an_edit_moves_its_features_and_keeps_the_rest_and_the_error() -> None:
    torch.manual_seed(0)
    sae = TemporalSAE(5, SAEConfig(d_sae=7, k=2), site=SITE)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        sae.b_enc.zero_()
        sae.threshold.fill_(0.3)
    x = torch.randn(40, 5)
    f, row = sae.encode(x), sae.W_dec.detach()
    assert (f[:, 2] > 0).any()
    assert (f[:, 2] == 0).any()
    chosen = (2, 5)
    expected = {
        "ablate": -f[:, 2:3] * row[2] - f[:, 5:6] * row[5],
        "clamp": (1.5 - f[:, 2:3]) * row[2] + (0.5 - f[:, 5:6]) * row[5],
        "steer": (1.5 * row[2] + 0.5 * row[5]).expand(40, -1),
    }
    expected["mean"] = expected["clamp"]
    for mode, delta in expected.items():
        edit = FeatureEdit(sae, chosen, mode, (0.0, 0.0) if mode == "ablate" else (1.5, 0.5))  # type: ignore[arg-type]
        torch.testing.assert_close(edit.delta(x), delta)
        torch.testing.assert_close(edit.reversed().delta(x), -delta)
        assert not edit.reversed().reversed().delta(x).equal(torch.zeros_like(x))
        assert replace(edit, sign=0.0).delta(x).abs().max() == 0
        along = replace(edit, direction=torch.nn.functional.normalize(torch.ones(5), dim=0)).delta(x)
        torch.testing.assert_close(along.norm(dim=1), delta.norm(dim=1))
        assert (along.std(dim=1) < 1e-5).all()  # All along (1, …, 1).
    # Decoding the edited codes and putting the error back gives the same as adding the difference.
    codes = f.clone()
    codes[:, [2, 5]] = 0
    error = x - sae.decode(f)
    torch.testing.assert_close(x + expected["ablate"], sae.decode(codes) + error)


def test_a_direction_goes_the_way_the_features_go() -> None:
    unit = torch.nn.functional.one_hot(torch.tensor(5), D_MODEL).float()
    x = torch.zeros(2, D_MODEL)
    x[0, 3], x[1, 3] = 0.5, 3.0
    edit = FeatureEdit(coordinates(), (3,), "clamp", (2.0,), direction=unit)
    assert edit.delta(x)[:, 5].tolist() == pytest.approx([1.5, -1.0])


def test_tokens_beyond_the_norm_limit_are_left_alone() -> None:
    sae = coordinates()
    sae.training_info["norms"] = {"limit": 3.0}
    hidden = torch.ones(1, 2, D_MODEL)
    hidden[0, 1] = 0.5
    edited = FeatureEdit(sae, (0,), "ablate", (0.0,)).change(hidden, torch.ones(1, 2, dtype=torch.bool))
    assert edited[0, :, 0].tolist() == [1.0, 0.0]
    assert edited[0, :, 1:].equal(hidden[0, :, 1:])


# -- in generation


@pytest.mark.parametrize("tokens", ["predicting", "first", "response", "all"])
def test_the_residual_stream_is_edited_by_hand_at_the_right_tokens(llama: Path, tokens: str) -> None:
    model: Any = tsae.Checkpoint("base", str(llama)).load_model()
    sae = coordinates()
    # The second prompt ends in a special token, as chat templates do: it is edited nevertheless.
    ids = torch.tensor([[18, 18, BOS, 3, 10], [BOS, 5, 12, 7, EOS]])
    mask = (ids != 18).long()
    edit = FeatureEdit(sae, (4, 6), "steer", (3.0, -2.0))
    around = edit.hook(lambda model: partial(rewritten, model), tokens, (BOS, EOS))
    seen: list[torch.Tensor] = []
    after = model.model.layers[2].register_forward_pre_hook(lambda _m, args: seen.append(args[0].clone()))
    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 18, "eos_token_id": None}
    with torch.no_grad(), around(model, ids, mask):
        out = model.generate(input_ids=ids, attention_mask=mask, **options)
    after.remove()
    got = torch.cat(seen, dim=1)  # (2, 5 + 3, d_model): the last token is never read.
    # Blocks up to the site do not see the edit, so that what they compute of the same tokens is what was edited.
    full = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    plain = HuggingFaceReader(model, [SITE]).read(out[:, :8], full)[SITE]
    moved = torch.zeros(2, 8, dtype=torch.bool)
    moved[:, 5:] = tokens != "first"
    if tokens in ("predicting", "first"):
        moved[:, 4] = True
    if tokens == "all":
        moved[0, 3:5] = moved[1, 1:5] = True
    expected = plain.clone()
    expected[..., 4] += 3.0 * moved
    expected[..., 6] -= 2.0 * moved
    real = full.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)


def test_cache_and_padding_make_no_difference(llama: Path) -> None:
    model: Any = tsae.Checkpoint("base", str(llama)).load_model()
    edit = FeatureEdit(coordinates(), (1, 4, 9), "clamp", (2.0, 1.0, 3.0))
    prompts = [[BOS, 3], [BOS, 5, 12, 7, 16], [BOS]]

    def responses(batch: list[list[int]], use_cache: bool) -> list[list[int]]:
        width = max(map(len, batch))
        ids = torch.tensor([[18] * (width - len(p)) + p for p in batch])
        around = edit.hook(lambda model: partial(rewritten, model), "all", (BOS, EOS))
        options = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 18, "eos_token_id": None}
        with torch.no_grad(), around(model, ids, (ids != 18).long()):
            out = model.generate(input_ids=ids, attention_mask=(ids != 18).long(), use_cache=use_cache, **options)
        return out[:, width:].tolist()

    together = responses(prompts, True)
    assert together == responses(prompts, False)
    assert together == [responses([prompt], True)[0] for prompt in prompts]


def test_a_pass_that_is_neither_prompt_nor_next_token_is_refused() -> None:
    at = during_generation(lambda hidden, where: hidden, torch.ones(1, 4, dtype=torch.bool))
    at(torch.zeros(1, 4, 2))
    at(torch.zeros(1, 1, 2))
    with pytest.raises(RuntimeError, match="neither"):
        at(torch.zeros(1, 3, 2))


@pytest.mark.slow
def test_hooks_that_change_nothing_give_the_same_tokens(series: Any, tmp_path: Path) -> None:
    sae = coordinates()
    base = tsae.CheckpointSeries((series.base,))
    features = table_of(base, sae, tmp_path)
    alive = np.flatnonzero(FeatureScales.of(features, "base").typical > 0)
    config = InterventionConfig(mode="steer", amount=2.0, n_random=1, sampling=SAMPLING)
    given: dict[str, Any] = {"problems": PROBLEMS, "progress": False}
    found = intervene(base.base, sae, features, alive[:2].tolist(), config, **given)
    plain = tsae.sample(base.base, PROBLEMS, SAMPLING, progress=False)
    drawn = found.rollouts
    ids = {name: drawn.where(policy=name).table["response_ids"].to_pylist() for name in drawn.policies}
    assert ids["none"] == ids["no_op"] == plain.table["response_ids"].to_pylist()
    assert ids["features"] != ids["none"]
    assert "(no interval: 1 random set)" in found.summary("response_length")
    assert found.info["no_op_identical"] is True
    assert "accuracy" not in set(found.outcomes.behaviour)  # There was no verifier.
    bridged = replace(config, backend="transformer_lens")
    through = intervene(base.base, sae, features, alive[:2].tolist(), bridged, **given)
    assert through.rollouts.table["response_ids"].equals(found.rollouts.table["response_ids"])
    assert through.info["no_op_identical"] is True


# -- what it finds


def test_ablating_the_direction_that_decides_flips_the_answer(found: Intervention) -> None:
    accuracy = found.table(behaviour="accuracy", band="all").set_index("condition")["mean"]
    assert accuracy["none"] == accuracy["no_op"] == 1.0
    assert accuracy["features"] == accuracy["mean_difference"] == 0.0
    assert (accuracy[["random", "random_1", "random_2", "random_3", "same_norm", "wrong_sign"]] == 1.0).all()
    assert set(found.rollouts.where(policy="features").table["response"].to_pylist()) == {str(WRONG)}
    assert found.summary("accuracy").startswith(
        "Ablating feature 0 in base lowers accuracy: 1 → 0, -1 [-1, -1], beyond random -1 [-1, -1]; "
        "matched random features: +0 [+0, +0], single sets +0 to +0 (3)"
    )
    changes = found.changes("accuracy")
    assert changes.loc[["none", "features", "random"], "accuracy"].tolist() == ["1", "-1 [-1, -1]", "+0 [+0, +0]"]
    assert list(found.changes().columns) == found.measured
    few = (
        "was measured on too few problems for accuracy on hard problems: 1 → 0, -1, too few problems (5; 8 are needed)"
    )
    assert f"{few}, beyond random -1 (no interval: too few problems); " in found.summary("accuracy", "hard")
    assert found.summary("accuracy").endswith("(10 problems, 20 responses).")
    tokens = int(found.rollouts.where(policy="features").lengths("response_ids").sum())
    assert found.info["rows"] == {"problems": 10, "trajectories": 20, "tokens": tokens}
    assert found.record()["rows"] == found.info["rows"]


@pytest.mark.slow
def test_clamping_and_steering_go_by_the_typical_activation_of_responses(edit: Edit) -> None:
    for mode, amount, right in (("clamp", 1.0, 1.0), ("clamp", 0.0, 0.0), ("steer", -4.0, 0.0), ("steer", 1.0, 1.0)):
        config = InterventionConfig(mode=mode, amount=amount, tokens="first", n_random=1, sampling=SAMPLING)  # type: ignore[arg-type]
        accuracy = edit(config).table(behaviour="accuracy", band="all").set_index("condition")["mean"]
        assert accuracy["features"] == right, (mode, amount)


@pytest.mark.parametrize(("table", "shared"), [(False, 1), (True, 2)])
def test_problems_on_which_features_were_found_are_counted(
    edit: Edit, decided_features: tsae.FeatureTable, table: bool, shared: int
) -> None:
    """Texts: one is known by another id, and another has a known id. Rollouts: two of the features' own problems."""
    config = replace(ABLATION, n_random=2, sampling=replace(SAMPLING, n_samples=1))
    own = decided_features.rollouts
    asked: Any = [replace(PROBLEMS[0], id="x"), replace(PROBLEMS[1], prompt="5+5?")]
    if table:
        asked = own.select(own.frame.problem_id.isin(["p1", "p3"]).to_numpy())
    made = edit(config, problems=asked, verify=None)
    assert (made.info["n_problems"], made.info["n_of_features"]) == (2, shared)
    assert made.record()["n_of_features"] == shared


def test_outcomes_are_paired_and_have_wilson_intervals() -> None:
    base = make_rollouts(("none", "features", "random_1", "random_2", "same_norm_1", "wrong_sign"), n_problems=30)
    table = outcome_table(base, confidence=0.95)
    frame = base.frame.assign(right=base.frame.outcome == "success")
    means = frame.groupby(["policy", "problem_id"]).right.mean().unstack(0)
    row = table[(table.condition == "features") & (table.behaviour == "accuracy")].iloc[0]
    assert row.change == pytest.approx((means.features - means.none).mean())
    assert row.beyond_random == pytest.approx((means.features - means[["random_1", "random_2"]].mean(axis=1)).mean())
    assert row.change_low < row.change < row.change_high
    assert row.beyond_low < row.beyond_random < row.beyond_high
    # Of a random set there is nothing beyond random.
    assert set(table[table.beyond_random.notna()].condition) == {"features", "wrong_sign"}
    for condition, rows in {
        "features": ["features"],
        "random": ["random_1", "random_2"],
        "random_2": ["random_2"],
    }.items():
        row = table[(table.condition == condition) & (table.behaviour == "accuracy")].iloc[0]
        right = frame[frame.policy.isin(rows)].right
        interval = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        assert (row.wilson_low, row.wilson_high) == pytest.approx((interval.low, interval.high))
    assert table[table.behaviour == "response_length"].wilson_low.isna().all()


# -- beyond random


@pytest.mark.parametrize(("n_sets", "promised"), [(5, 0.09), (InterventionConfig().n_random, 0.06), (20, 0.06)])
@pytest.mark.parametrize("kind", KINDS)
def test_features_like_the_random_ones_go_beyond_them_rarely(kind: str, n_sets: int, promised: float) -> None:
    rng = np.random.default_rng(0)
    rate = sum(said(exchangeable(rng, n_sets, kind=kind)) != 0 for _ in range(1000)) / 1000
    assert rate <= promised + 2 * np.sqrt(promised * (1 - promised) / 1000)  # 2 standard errors of 1,000 draws


def test_random_sets_that_share_features_count_for_less() -> None:
    rng = np.random.default_rng(0)
    drawn = [sharing(rng) for _ in range(1000)]
    assert sum(said(sets, shared=shared) != 0 for sets, shared in drawn) <= 60 + 2 * 7.5
    assert sum(said(sets) != 0 for sets, _ in drawn) > 100
    assert overlap([[1, 2], [2, 3], [4, 5]]) == pytest.approx(1 / 6)


def test_beyond_random_by_hand_and_where_it_cannot_be_told() -> None:
    chosen, sets = np.tile([3.0, 5.0, 4.0, 4.0], 2), np.repeat([[1.0], [2.0], [3.0]], 8, axis=1)
    found = beyond_random(chosen, sets, 0.95)
    # t(2) = 4.303, variance of the sets 1 · (1 + 1/3); of the problems 4/7 / 8, t(7) = 2.365.
    half = np.sqrt(4.303**2 * 4 / 3 + 2.365**2 / 14)
    assert (found.difference, found.low, found.high) == pytest.approx((2, 2 - half, 2 + half), rel=1e-3)
    one = beyond_random(chosen, sets[:1], 0.95)
    assert one.difference == 3
    assert np.isnan(one.low)
    sets[1, 0] = np.nan
    few = beyond_random(chosen, sets, 0.95)
    assert few.n_problems == 7
    assert np.isnan([few.low, few.high]).all()
    nothing = beyond_random(chosen * np.nan, sets, 0.95)
    assert nothing.n_problems == 0
    assert np.isnan(nothing.difference)
    same = beyond_random(np.ones(8), np.ones((3, 8)), 0.95)
    assert same[:3] == (0, 0, 0)


def test_no_random_set_comes_twice() -> None:
    """Ten sets for a single feature: of the ten nearest each once, or else the sets would look alike by chance."""
    sae = TemporalSAE(4, SAEConfig(d_sae=40, k=2), site=SITE)
    rate = np.linspace(0.01, 0.4, 40)
    scales = FeatureScales(rate=rate, mean=rate, typical=np.ones(40), n_tokens=10**9, own=True)
    sets = matched_features([7], scales, sae, 10, 0)
    assert len({s[0] for s in sets}) == 10
    assert len({s[0] for s in matched_features([7], scales, sae, 20, 0)}) == 20
    refuses("39 other features fire, too few for 40 different random sets", matched_features, [7], scales, sae, 40, 0)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_files_keep_it(
    found: Intervention, edit: Edit, decided_features: tsae.FeatureTable, tmp_path: Path
) -> None:
    again = edit(table=decided_features.save(tmp_path / "features"), direction=DIRECTION)
    assert again.outcomes.equals(found.outcomes)
    assert again.rollouts.fingerprint == found.rollouts.fingerprint
    loaded = Intervention.load(found.save(tmp_path / "causal"))
    assert loaded.outcomes.equals(found.outcomes)
    assert loaded.info == json.loads(json.dumps(found.info))
    assert repr(loaded) == repr(found)
    drawn = edit(replace(ABLATION, sampling=replace(SAMPLING, seed=1)), problems=PROBLEMS)
    assert drawn.info["random"] != found.info["random"]
    assert set(drawn.outcomes.band) == {"all"}


def test_a_diff_of_the_same_sae_takes_note(found: Intervention) -> None:
    from types import SimpleNamespace

    from tsae.diff.feature_diff import FeatureDiff

    nothing: Any = SimpleNamespace()
    info = {"sae": found.info["sae"], "causally_tested": False}
    diff = FeatureDiff(nothing, nothing, nothing, nothing, info=info)
    marked = found.mark(found.mark(diff))
    assert [test["features"] for test in marked.info["causally_tested"]] == [[DECIDES], [DECIDES]]
    assert marked.info["causally_tested"][0]["summaries"]["accuracy"] == found.summary("accuracy")
    assert diff.info["causally_tested"] is False
    foreign = replace(diff, info={"sae": {"weights": "another"}})
    refuses("another SAE", found.mark, foreign)


# -- controls


@pytest.mark.parametrize("tokens", ["response", "first", "predicting", "all"])
def test_scales_are_counted_as_a_loop_counts_them(decided_features: tsae.FeatureTable, tokens: Any) -> None:
    scales = FeatureScales.of(decided_features, "base", tokens)
    codes, response, edited = decided_features.codes.toarray(), [], []
    for row in range(decided_features.n_rows):
        prompt, reply = decided_features.rollouts.tokens(int(decided_features.trajectory[row]))
        start = int(decided_features.row_offsets[row])
        answered = [start + len(prompt) + i for i, id in enumerate(reply) if id != EOS]
        asked = [start + i for i in range(1, len(prompt))]
        response += answered
        edited += {"response": answered, "first": asked[-1:], "predicting": asked[-1:] + answered}.get(
            tokens, asked + answered
        )
    assert scales.n_tokens == len(edited)
    assert scales.rate == pytest.approx((codes[edited] > 0).mean(0))
    assert scales.mean == pytest.approx(codes[edited].mean(0), rel=1e-5)
    for feature in range(codes.shape[1]):
        fired = codes[response][codes[response][:, feature] > 0, feature]
        assert scales.typical[feature] == pytest.approx(fired.mean() if len(fired) else 0.0, rel=1e-5)
    assert not FeatureScales.of(decided_features, "stranger").own


def test_random_features_are_near_and_others() -> None:
    rng = np.random.default_rng(0)
    sae = TemporalSAE(4, SAEConfig(d_sae=200, k=2), site=SITE)
    with torch.no_grad():
        sae.W_dec.copy_(torch.nn.functional.normalize(torch.randn(200, 4), dim=1))
    rate, typical = 10 ** rng.uniform(-4, -1, 200), 10 ** rng.uniform(-1, 1, 200)
    typical[:50] = 0.0
    scales = FeatureScales(rate=rate, mean=rate * typical, typical=typical, n_tokens=10**9, own=True)
    chosen, exclude = [60, 61, 62], [70, 71]
    sets = matched_features(chosen, scales, sae, 20, 0, exclude=exclude)
    assert sets == matched_features(chosen, scales, sae, 20, 0, exclude=exclude)
    assert len(set(sets)) > 15
    place = np.log(np.stack([rate[50:], typical[50:]], axis=1))
    others = np.setdiff1d(np.arange(50, 200), [*chosen, *exclude])
    place = np.log(np.stack([rate, np.maximum(typical, 1e-9)], axis=1)) / place[others - 50].std(0)
    for ids in sets:
        assert len(set(ids)) == 3
        assert set(ids) <= set(others.tolist())
        for feature, match in zip(chosen, ids, strict=True):
            distance = ((place[others] - place[feature]) ** 2).sum(1)
            assert (distance < ((place[match] - place[feature]) ** 2).sum()).sum() < 12
    refuses("too few", matched_features, list(range(50, 130)), scales, sae, 1, 0)


def test_the_mean_difference_is_between_own_responses(store: Any, rollouts: Any) -> None:
    direction = mean_difference(store, SITE, "easy-10", "base")
    means = []
    for reader in ("easy-10", "base"):
        rows = []
        for shard in store.shards(reader):
            for i, trajectory in enumerate(shard.trajectory):
                if rollouts.table["policy"][int(trajectory)].as_py() == reader:
                    prompt, _ = rollouts.tokens(int(trajectory))
                    low, high = shard.offsets[i] + len(prompt), shard.offsets[i + 1] - 1  # Without <eos>.
                    rows.append(shard.read(SITE, np.arange(low, high)))
        means.append(np.concatenate(rows).mean(0, dtype=np.float64))
    expected = (means[0] - means[1]) / np.linalg.norm(means[0] - means[1])
    assert direction.numpy() == pytest.approx(expected, abs=1e-5)
    refuses("same mean", mean_difference, store, SITE, "base", "base")
    refuses("no reader 'nobody'", mean_difference, store, SITE, "nobody", "base")


# -- what is refused


@pytest.mark.parametrize(
    ("chosen", "said"),
    [([], "no features chosen"), ([16], "no feature 16; there are 0 to 15"), ([-1], "no feature -1"),
     ([2, 2], "comes twice")],
)  # fmt: skip
def test_features_that_do_not_exist(edit: Edit, chosen: list[int], said: str) -> None:
    refuses(said, edit, chosen=chosen)


def test_what_does_not_fit_together(
    decided: tsae.CheckpointSeries, decided_features: tsae.FeatureTable, edit: Edit, tmp_path: Path
) -> None:
    def refused(said: str, **options: Any) -> None:
        config = InterventionConfig(n_random=1, sampling=SAMPLING)
        refuses(said, edit, config, [OTHER], **{"exclude": (), **options})

    foreign = coordinates()
    with torch.no_grad():
        foreign.b_enc.add_(0.5)
    refused("encoded with another SAE", sae=foreign)
    refused("unknown site 'blocks.1.hook_mlp_out'", sae=coordinates(site="blocks.1.hook_mlp_out"))
    refused(r"blocks\.7\.hook_resid_post does not exist", sae=coordinates(site="blocks.7.hook_resid_post"))
    wide = tsae.Checkpoint("wide", str(save_model(tmp_path / "wide", d_model=24)))
    refused("has d_model 24, the SAE expects 16", checkpoint=wide)
    later, model = shutil.copytree(decided.base.path, tmp_path / "later"), decided.base.load_model()
    model.lm_head.weight.data.add_(0.25)
    model.save_pretrained(later)
    refused("its weights or its config are not those that", checkpoint=replace(decided.base, path=str(later)))
    silent = decided_features.codes[:].tolil()
    silent[:, OTHER] = 0
    refused("fires on no response token", table=replace(decided_features, codes=silent.tocsr()))
    rollouts = decided_features.rollouts
    strange = type(rollouts)(rollouts.table, {**rollouts.info, "tokenizer": "other"})
    refused("its tokenizer", table=replace(decided_features, rollouts=strange))
    refused("is not the one that the trajectories were tokenised with", problems=strange)
    refused("no feature 99", exclude=[99])
    refused("the direction has shape", direction=torch.ones(3))
    refused("the direction has shape", direction=torch.full((D_MODEL,), float("nan")))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"amount": float("nan")}, "not finite"), ({"mode": "clamp", "amount": -1.0}, "not negative"),
     ({"mode": "steer", "amount": 0.0}, "changes nothing"), ({"n_random": 0}, "n_random=0"),
     ({"confidence": 1.0}, "confidence=1.0"),
     ({"mode": "transplant", "backend": "transformer_lens"}, "hooks on the Hugging Face model")],
)  # fmt: skip
def test_settings_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    refuses(said, InterventionConfig, **options)


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"policy": "none"}, "no key 'policy'"), ({"behaviour": "x"}, "no behaviour 'x'"),
     ({"condition": "nothing"}, "no condition 'nothing'; there are none, no_op")],
)  # fmt: skip
def test_keys_and_values_that_are_not_there(found: Intervention, keys: dict[str, str], said: str) -> None:
    refuses(said, found.table, **keys)


# -- transplants


@pytest.mark.parametrize(("use_cache", "padded"), [(True, True), (False, True), (True, False)])
def test_the_whole_stream_makes_a_model_of_two_halves(series: Any, use_cache: bool, padded: bool) -> None:
    """The donor's blocks up to the site and the model's own above it."""
    own, other = (series[id].load_model() for id in ("base", "easy-10"))
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(0.3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(len(weights))))
    both = series.base.load_model()
    both.model.embed_tokens.load_state_dict(other.model.embed_tokens.state_dict())
    for block in range(2):  # The site is the output of block 1.
        both.model.layers[block].load_state_dict(other.model.layers[block].state_dict())
    ids, mask = torch.tensor([[18, 18, 3, 5], [18, 7, 9, 4], [5, 12, 16, 7]]), torch.ones(3, 4, dtype=torch.long)
    mask[0, :2] = mask[1, :1] = 0 if padded else 1
    options: Any = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 18, "eos_token_id": None}

    def answers(model: Any, edit: FeatureEdit | None) -> list[list[int]]:
        torch.manual_seed(5)
        with torch.no_grad():
            if edit is None:
                return model.generate(input_ids=ids, attention_mask=mask, use_cache=use_cache, **options).tolist()
            with edit.hook(lambda model: partial(rewritten, model), "all", ())(model, ids, mask):
                return model.generate(input_ids=ids, attention_mask=mask, use_cache=use_cache, **options).tolist()

    whole = FeatureEdit(coordinates(), (), "transplant", (), donor=Donor(other, SITE), whole=True)
    assert answers(own, whole) == answers(both, None) != answers(own, None)
    for donor, same in ((both, False), (series.base.load_model(), True)):
        part = FeatureEdit(coordinates(), (1, 2), "transplant", (), donor=Donor(donor, SITE))
        assert (answers(own, part) == answers(own, None)) == same


@pytest.fixture(scope="module")
def two(decided: tsae.CheckpointSeries, tmp_path_factory: pytest.TempPathFactory) -> tsae.CheckpointSeries:
    """The base lacks the direction that decides, and answers WRONG; the run has it, and answers RIGHT."""
    model = decided.base.load_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, DECIDES] = 0.0
    folder = tmp_path_factory.mktemp("two") / "base"
    model.save_pretrained(folder)
    decided.base.load_tokenizer().save_pretrained(folder)
    return tsae.CheckpointSeries(
        (tsae.Checkpoint("base", str(folder)), tsae.Checkpoint("run-1", decided.base.path, run="run", step=1))
    )


@pytest.fixture(scope="module")
def tabled(two: tsae.CheckpointSeries, tmp_path_factory: pytest.TempPathFactory) -> tsae.FeatureTable:
    own = [tsae.sample(checkpoint, PROBLEMS, SAMPLING, verify=answer, progress=False) for checkpoint in two]
    folder = tmp_path_factory.mktemp("two-table")
    store = tsae.capture(two, tsae.Rollouts.concat(own), [SITE], to=folder / "acts", progress=False)
    return tsae.encode(coordinates(), store, to=folder / "features", progress=False)


@pytest.fixture(scope="module")
def transplanted(edit: Edit, two: tsae.CheckpointSeries, tabled: tsae.FeatureTable) -> dict[str, Intervention]:
    """By the checkpoint that generates; the other one is the donor."""
    config = replace(ABLATION, mode="transplant", n_random=2)
    return {
        into: edit(config, checkpoint=two[into], table=tabled, donor=two[of], direction=sign * DIRECTION)
        for into, of, sign in (("base", "run-1", 1), ("run-1", "base", -1))
    }


def test_a_planted_feature_moves_the_whole_effect_both_ways(transplanted: dict[str, Intervention]) -> None:
    for into, before in (("base", 0.0), ("run-1", 1.0)):
        found = transplanted[into]
        rows = found.table(behaviour="accuracy", band="all").set_index("condition")
        for name in ("none", "no_op", "random", "same_norm", "wrong_sign"):
            assert rows["mean"][name] == before, (into, name)
        for name in ("features", "mean_difference", "all_features", "whole", "donor"):
            assert rows["mean"][name] == 1 - before, (into, name)
            assert (rows.share[name], rows.share_low[name], rows.share_high[name]) == (1, 1, 1)
        assert rows.share["random"] == 0
        given = set(found.rollouts.where(policy="features").table["response"].to_pylist())
        assert given == {str(RIGHT if into == "base" else WRONG)}
        # What the donor does not change has no share.
        assert found.table(behaviour="response_length").share.isna().all()
    text = transplanted["base"].summary("accuracy")
    assert text.startswith("Transplanting feature 0 of run-1 into base raises accuracy: 0 → 1, +1 [+1, +1]")
    assert "of which move: the features 100% [100%, 100%]" in text


def test_files_and_reports_keep_a_transplant(transplanted: dict[str, Intervention], tmp_path: Path) -> None:
    loaded = Intervention.load(transplanted["base"].save(tmp_path / "into-base"))
    assert loaded.outcomes.equals(transplanted["base"].outcomes)
    record = loaded.record()
    assert facts.test_name(record) == "feature 0 of run-1 transplanted into base"
    shares = {row["condition"]: row["share"] for row in record["changes"] if row["behaviour"] == "accuracy"}
    assert shares["features"] == shares["whole"] == 1
    table = necessary_and_sufficient([record])
    assert table is not None
    (row,) = [row for row in table.rows if row[2] == "accuracy"]
    assert "100 %" in str(row[-2])


def test_a_transplant_needs_its_donor(edit: Edit, two: tsae.CheckpointSeries) -> None:
    refuses("no checkpoint whose features", edit, replace(ABLATION, mode="transplant"))
    refuses("transplants nothing", edit, donor=two["run-1"])


def test_every_planned_test_has_a_folder_of_its_own() -> None:
    """The base has what either of two runs lowered, and is ablated for both."""
    diff = make()
    raised, lowered = (
        [test.name for test in planned_tests(replace(diff, shifts=diff.shifts.assign(delta=sign)), 2)]
        for sign in (1.0, -1.0)
    )
    assert raised[::3] == ["ablate-up-run", "ablate-down-run"]
    assert lowered[::3] == ["ablate-base-against-up-run", "ablate-base-against-down-run"]
    assert len({*raised, *lowered}) == 12
