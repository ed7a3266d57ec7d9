"""The mixed run and its retrainings: against the run itself, and against a loop over single samples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import organism.groups
import pytest
import retrain_mixed
import torch
from organism.groups import sample_groups
from organism.mixed import BANDS, MixedConfig, direct_share, held_out, put, retrain, train
from retrain_mixed import load_weights, realised, retrain_all, subsets

from tsae import CheckpointSeries, Rollouts
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.targets import NextToken
from tsae.errors import TsaeError
from tsae.rollouts.importing import import_log
from tsae.testbed import parse_prompt, series
from tsae.testbed.tokenizer import BOS, EOS, MAX_RESPONSE_TOKENS, TOKEN_IDS

TINY = MixedConfig(per_band=2, steps=2, groups=3, samples=4)
BASE = series().base


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(TINY, BASE, tmp_path_factory.mktemp("mixed") / "run", progress=False)


@pytest.fixture(scope="module")
def rollouts(run: Path) -> Rollouts:
    import_log(run, run.parent / "rollouts.parquet", progress=False)
    return Rollouts.read(run.parent / "rollouts.parquet")


def problems_of(config: MixedConfig) -> list[str]:
    return [problem.id for problem in config.problems]


def prompt_ids(prompt: str) -> list[int]:
    return [TOKEN_IDS[BOS], *(TOKEN_IDS[character] for character in prompt)]


def test_every_problem_is_asked_equally_often_and_by_no_step_twice() -> None:
    config = MixedConfig()
    assert len(config.schedule) == 30
    assert all(len({problem.id for problem in step}) == 12 for step in config.schedule)
    asked = Counter(problem.id for step in config.schedule for problem in step)
    assert asked == dict.fromkeys(problems_of(config), 15)
    assert config.schedule != replace(config, seed=1).schedule


def test_problems_are_of_their_bands_and_none_is_held_out() -> None:
    config = MixedConfig()
    for band, (fewest, most) in BANDS.items():
        assert sum(problem.level == band for problem in config.problems) == 8
        assert len(held_out(config)[band]) == 24
        for problem in (*held_out(config)[band], *(p for p in config.problems if p.level == band)):
            assert problem.level == band
            assert fewest <= parse_prompt(problem.prompt).n_ops <= most
    assert not set(problems_of(config)) & {p.id for some in held_out(config).values() for p in some}


def test_a_run_is_read_as_any_users(run: Path, rollouts: Rollouts) -> None:
    checkpoints = CheckpointSeries.load(run)
    assert [c.id for c in checkpoints] == ["run-00000", "run-00001", "run-00002"]
    checkpoints["run-00002"].load_tokenizer()
    frame = rollouts.frame
    assert frame["step"].tolist() == [1] * 12 + [2] * 12
    assert frame.policy.tolist() == ["run-00000"] * 12 + ["run-00001"] * 12
    assert frame.round_trip.all()
    assert sorted(set(frame.level)) == sorted(BANDS)
    for step, asked in enumerate(TINY.schedule, 1):
        mine = frame[frame["step"] == step]
        assert mine.problem_id.tolist() == [problem.id for problem in asked for _ in range(4)]
        assert mine.answer.tolist() == [problem.answer for problem in asked for _ in range(4)]
    for row, prompt in enumerate(frame.prompt):
        assert rollouts.tokens(row)[0].tolist() == prompt_ids(prompt)
    again = rollouts.with_advantages().frame.advantage
    assert np.abs(again).max() > 0.8
    np.testing.assert_allclose(frame.advantage, again, rtol=0, atol=1e-12)


def test_settings_and_state_are_written(run: Path) -> None:
    settings = json.loads((run / "training_args.json").read_text())
    assert settings == TINY.training_args()
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in history] == [1, 2]
    assert all(0 < line["grad_norm"] < 1 and line["clipped"] is False for line in history)


def test_replaying_all_problems_repeats_the_run(run: Path, rollouts: Rollouts) -> None:
    expected = TrainedWeights(CheckpointSeries.load(run)["run-00002"].load_model()).vector()
    assert torch.equal(retrain(TINY, BASE, rollouts, problems_of(TINY), "replayed"), expected)
    assert torch.equal(retrain(TINY, BASE, rollouts, problems_of(TINY), TINY.seed), expected)
    assert not torch.equal(retrain(TINY, BASE, rollouts, problems_of(TINY), 1), expected)
    assert not torch.equal(TrainedWeights(BASE.load_model()).vector(), expected)


def by_single_samples(
    config: MixedConfig, rollouts: Rollouts, kept: list[int], then: dict[tuple[int, int], float] | None = None
) -> tuple[torch.Tensor, dict[tuple[int, int], float]]:
    """The oracle: the loss as it is written, sample by sample without padding, in double precision.

    Also gives the log-probabilities by row and place; `then` are those of the policy that sampled the log.
    """
    model = BASE.load_model(dtype="float64").requires_grad_(True)
    adam = torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=config.betas, eps=config.eps)
    seen: dict[tuple[int, int], float] = {}
    for step in range(1, config.steps + 1):
        loss = sum(parameter.sum() for parameter in model.parameters()) * 0.0
        for row in kept:
            if rollouts.frame["step"][row] != step:
                continue
            prompt, response = rollouts.tokens(row)
            ids = torch.tensor([[*prompt, *response]])
            log = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
            a = rollouts.frame.advantage[row]
            for place in range(len(prompt), ids.shape[1]):
                now = log[place - 1, ids[0, place]]
                seen[row, place] = now.item()
                ratio = (now - (now.item() if then is None else then[row, place])).exp()
                loss = loss - min(ratio * a, ratio.clamp(0.8, 1.2) * a, key=lambda x: x.item())
        adam.zero_grad()
        (loss / (config.groups * config.samples * MAX_RESPONSE_TOKENS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        adam.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), seen


@pytest.mark.parametrize("limit", [0.01, 1.0], ids=["clipped", "not clipped"])
def test_a_replay_without_a_problem_lacks_its_summands_and_nothing_else(rollouts: Rollouts, limit: float) -> None:
    # With so large an ε Adam divides no rounding errors by each other.
    config = replace(TINY, eps=1e-3, learning_rate=0.1, max_grad_norm=limit)
    frame = rollouts.frame
    taught = frame.problem_id[frame.advantage.abs() > 0].unique().tolist()
    include = [problem for problem in problems_of(TINY) if problem != taught[0]]
    kept = [row for row, problem in enumerate(frame.problem_id) if problem in include]
    found, start = retrain(config, BASE, rollouts, include, "replayed"), TrainedWeights(BASE.load_model()).vector()
    then = by_single_samples(config, rollouts, list(range(len(rollouts))))[1]
    expected, now = by_single_samples(config, rollouts, kept, then)
    ratios = np.exp([now[key] - then[key] for key in now])
    assert (np.abs(ratios - 1) > 0.2).any()
    assert (expected - start).abs().max() > 1e-3
    assert (found - expected).norm() < 1e-3 * (expected - start).norm()


def test_a_step_without_samples_still_moves_the_weights(rollouts: Rollouts) -> None:
    config = replace(TINY, eps=1e-3, learning_rate=0.1)
    include = [problem.id for problem in TINY.schedule[0]]
    kept = [row for row, problem in enumerate(rollouts.frame.problem_id) if problem in include]
    assert set(rollouts.frame["step"][kept]) == {1}
    found = retrain(config, BASE, rollouts, include, "replayed")
    start, expected = TrainedWeights(BASE.load_model()).vector(), by_single_samples(config, rollouts, kept)[0]
    assert (found - expected).norm() < 1e-3 * (expected - start).norm()
    # Single samples are left out with their rows.
    selected = retrain(config, BASE, rollouts.select(kept), problems_of(TINY), "replayed")
    assert torch.equal(selected, found)


def test_groups_are_what_greedy_generation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, the repeated cache, and rows that leave the batch change nothing: here the likeliest token is drawn."""

    def likeliest(chances: torch.Tensor, n: int, **_: Any) -> torch.Tensor:
        return chances.argmax(dim=-1, keepdim=True)

    monkeypatch.setattr(organism.groups.torch, "multinomial", likeliest)
    model = BASE.load_model(dtype="float32")
    prompts = [prompt_ids(p.prompt) for band in held_out(TINY, 3).values() for p in band]
    found = sample_groups(model, prompts, 2, torch.Generator(), 40)
    lengths = set()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        expected = whole[0, len(prompt) :].tolist()
        assert found[2 * number] == found[2 * number + 1] == expected
        lengths.add(len(expected))
    assert {3, 40} < lengths
    assert found[0][-1] == TOKEN_IDS[EOS]


def test_groups_are_drawn_from_the_models_distribution() -> None:
    model = BASE.load_model(dtype="float32")
    for prompt in ([*prompt_ids("3+4?")], [*prompt_ids("3+4*2-5?")]):
        drawn = sample_groups(model, [prompt], 4000, torch.Generator().manual_seed(0), 1)
        share = np.bincount([ids[0] for ids in drawn], minlength=20) / 4000
        with torch.inference_mode():
            exact = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1], dim=-1).numpy()
        assert np.all(np.abs(share - exact) < 4 * np.sqrt(exact * (1 - exact) / 4000) + 1e-3)


def test_direct_shares_are_those_that_attribution_explains() -> None:
    model, problems = BASE.load_model(dtype="float32"), held_out(TINY)
    groups = [band for band, some in problems.items() for _ in some]
    prompts = [np.array(prompt_ids(p.prompt)) for some in problems.values() for p in some]
    expected = NextToken(prompts, groups, TOKEN_IDS["#"], what="direct").values(TrainedWeights(model))
    np.testing.assert_allclose([direct_share(model, some) for some in problems.values()], expected, rtol=1e-5)
    weights = TrainedWeights(model).vector()
    found = realised(BASE, TINY, weights * 1.01, {"sum": lambda w: w.sum()[None].numpy()})
    given = weights * 1.01
    put(model, given)
    assert found["direct (hard)"] == direct_share(model, problems["hard"])
    next(model.parameters()).zero_()
    assert torch.equal(given, weights * 1.01)
    assert found["sum"] == [float((weights * 1.01).sum())]


def test_subsets_are_of_their_sizes_and_seeded() -> None:
    config = MixedConfig()
    chosen = subsets(config.problems, 40, 12, 0)
    sizes = {"all": {24}, "half": {12}, "without": {16}, "alone": {8}, "most": {19}}
    assert {kind: {len(s.include) for s in chosen if s.kind == kind} for kind in sizes} == sizes
    assert Counter(s.kind for s in chosen) == {"all": 1, "half": 40, "without": 3, "alone": 3, "most": 12}
    assert len({s.name for s in chosen}) == len({s.include for s in chosen}) == len(chosen)
    assert chosen == subsets(config.problems, 40, 12, 0) != subsets(config.problems, 40, 12, 1)
    level = {problem.id: problem.level for problem in config.problems}
    by_name = {s.name: {level[id] for id in s.include} for s in chosen}
    assert by_name["without-easy"] == {"medium", "hard"}
    assert by_name["only-hard"] == {"hard"}


@pytest.mark.slow
def test_retrainings_are_kept_and_not_repeated(
    run: Path, rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts.write(tmp_path / "rollouts.parquet")  # Imported before.
    chosen = subsets(TINY.problems, 1, 0, 0)[1:3]
    lines = retrain_all(TINY, BASE, run, chosen, ["replayed", 1], tmp_path, progress=False)
    ids = ["half-00-replayed", "without-easy-replayed", "half-00-seed-1", "without-easy-seed-1"]
    assert [line["id"] for line in lines] == ids
    expected = retrain(TINY, BASE, rollouts, chosen[0].include, 1)
    assert torch.equal(load_weights(tmp_path, "half-00-seed-1"), expected)
    assert lines[2]["targets"] == realised(BASE, TINY, expected)
    # Killed while it wrote the third line: the last two are trained again, and no others.
    file = tmp_path / "retrained.jsonl"
    written = file.read_text().splitlines(keepends=True)
    file.write_text("".join(written[:2]) + written[2][:50])
    trained, real = [], retrain_mixed.retrain

    def counted(*arguments: Any) -> torch.Tensor:
        trained.append(arguments[3:5])
        return real(*arguments)

    monkeypatch.setattr(retrain_mixed, "retrain", counted)
    again = retrain_all(TINY, BASE, run, chosen, ["replayed", 1], tmp_path, progress=False)
    assert trained == [(set(subset.include), 1) for subset in chosen]
    assert [{**line, "seconds": 0} for line in again] == [{**line, "seconds": 0} for line in lines]
    assert [json.loads(line) for line in file.read_text().splitlines()] == again


def test_what_does_not_belong_together_is_refused(run: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match="does not divide the 24 problems"):
        MixedConfig(groups=7)
    with pytest.raises(TsaeError, match="samples=1 has no advantages"):
        MixedConfig(samples=1)
    with pytest.raises(TsaeError, match="the run has no problem chain:"):
        retrain(replace(TINY, seed=1), BASE, rollouts, (), "replayed")
    with pytest.raises(TsaeError, match="has the steps 1 to 2, and the run 1 to 1"):
        retrain(replace(TINY, steps=1), BASE, rollouts, problems_of(TINY), "replayed")
    with pytest.raises(TsaeError, match="exists already"):
        train(TINY, BASE, run)
    chosen = subsets(TINY.problems, 1, 0, 0)[1:2]
    with pytest.raises(TsaeError, match=r"other settings \(learning_rate\)"):
        retrain_all(replace(TINY, learning_rate=1.0), BASE, run, chosen, [1], tmp_path)
    retrain_all(TINY, BASE, run, chosen, ["replayed"], tmp_path, progress=False)
    other = [replace(chosen[0], include=chosen[0].include[1:])]
    with pytest.raises(TsaeError, match="half-00-replayed of other problems"):
        retrain_all(TINY, BASE, run, other, ["replayed"], tmp_path, progress=False)


@pytest.mark.slow  # the script's parts are tested above
def test_the_script_trains_and_retrains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"per-band": 1, "steps": 1, "groups": 3, "samples": 2}
    tiny = [f"--config.{name}={size}" for name, size in sizes.items()] + ["--halves=1", "--most=0"]
    where = ["--run", str(tmp_path / "run"), "--to", str(tmp_path / "to")]
    assert retrain_mixed.main([*where, *tiny, "--samplings", "replayed", "one"]) == 1
    assert "'one' is neither replayed nor a seed" in capsys.readouterr().err
    assert retrain_mixed.main([*where, *tiny, "--samplings", "replayed"]) == 0
    assert len((tmp_path / "to" / "retrained.jsonl").read_text().splitlines()) == 2 + 6
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").is_file()
