"""Runs that trained an adapter: against the chain rule, and on a LoRA training with peft and torch alone."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum

import tsae
from support.builders import make_rollouts, save_model, save_perturbed
from support.checkpoints import save_adapter, save_resized
from tsae.attribution.config import AttributionConfig
from tsae.attribution.credit.effects import simulate
from tsae.attribution.gradients.gradient_store import batches_of, build_gradients
from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights, sample_gradients
from tsae.attribution.targets import NextToken
from tsae.attribution.training.optimiser import Optimiser
from tsae.attribution.training.loss import PolicyLoss
from tsae.attribution.trainer.recipe import Recipe
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

RECIPE = Recipe(
    Optimiser("adam", 3e-3, "constant", max_grad_norm=0.05), PolicyLoss("dr_grpo", max_completion_length=16), "the test"
)
TOKEN = 3
FAST = AttributionConfig(targets=("outcome",), groups=("outcome",), subsets=0, singles=1, n_fixed=12)


@pytest.fixture(scope="module")
def log(fingerprint: str) -> Rollouts:
    """Four steps of three problems with four responses each."""
    table = make_rollouts(n_problems=12, n_samples=4, tokenizer=fingerprint).with_advantages()
    return table.with_column("step", np.arange(len(table)) // 12 + 1)


def train(base: Path, log: Rollouts, to: Path, kept: np.ndarray | None = None) -> None:
    """A LoRA training with no code of the attribution; an adapter is saved after every step."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        adam = torch.optim.Adam(parameters, lr=3e-3)
        for step in range(1, 5):
            adam.zero_grad()
            rows = np.flatnonzero(log.frame["step"] == step)
            for row in rows if kept is None else rows[kept[rows]]:
                prompt, response = log.tokens(int(row))
                ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
                chance = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
                picked = chance[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(prompt) - 1 :]
                (-log.frame.advantage[row] / (16 * len(rows)) * picked.sum()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
            adam.step()
            model.save_pretrained(to / f"checkpoint-{step}")


@pytest.fixture(scope="module")
def run(llama: Path, log: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(llama, log, folder)
    return folder


def first_chance(checkpoint: Checkpoint, prompts: list[np.ndarray]) -> float:
    """Mean probability that a response begins with TOKEN, prompt by prompt."""
    model, found = checkpoint.load_model(), []
    for prompt in prompts:
        logits = model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
        found.append(float(torch.softmax(logits, -1)[TOKEN]))
    return float(np.mean(found))


def test_gradients_are_those_of_the_merged_weights(llama: Path, tmp_path: Path) -> None:
    """y = (W + s B A) x, so that dA = s Bᵀ dW and dB = s dW Aᵀ."""
    adapter = save_adapter(llama, tmp_path / "adapter", r=3, lora_alpha=8)
    base = Checkpoint(id="base", path=str(llama))
    model = Checkpoint(id="run", path=str(adapter), run="run", step=1, base=base).load_model(dtype="float64")
    trained = TrainedWeights(model, [name for name, _ in model.named_parameters() if ".lora_" in name])
    ids = torch.randint(3, 18, (4, 9), generator=torch.Generator().manual_seed(0))
    mask, weight = torch.ones_like(ids), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()
    parts = sample_gradients(trained, ids, mask, weight).split(trained.sizes, dim=1)
    found = dict(zip(trained.parameters, parts, strict=True))
    merged = base.load_model(dtype="float64")
    places = {n.removesuffix(".lora_A.default.weight"): p for n, p in trained.parameters.items() if ".lora_A." in n}
    for name, a in places.items():
        b = trained.parameters[f"{name}.lora_B.default.weight"]
        merged.get_parameter(f"{name}.weight").data += 8 / 3 * b.detach() @ a.detach()
    whole = TrainedWeights(merged, [f"{name}.weight" for name in places])
    of_merged = sample_gradients(whole, ids, mask, weight).split(whole.sizes, dim=1)
    assert len(places) > 8
    for (name, a), change in zip(places.items(), of_merged, strict=True):
        b = trained.parameters[f"{name}.lora_B.default.weight"]
        change = change.view(4, b.shape[0], a.shape[1])
        expected = {
            "lora_A": 8 / 3 * einsum(b, change, "out rank, sample out into -> sample rank into"),
            "lora_B": 8 / 3 * einsum(change, a, "sample out into, rank into -> sample out rank"),
        }
        for part, value in expected.items():
            torch.testing.assert_close(
                found[f"{name}.{part}.default.weight"], value.flatten(1).detach(), rtol=1e-5, atol=1e-9
            )


def test_a_run_of_adapters_is_attributed(llama: Path, run: Path, log: Rollouts, tmp_path: Path) -> None:
    series = tsae.CheckpointSeries.load(llama, run)
    found = tsae.attribute(series, log, tmp_path / "out", recipe=RECIPE, first_token=TOKEN, config=FAST, progress=False)
    # The path begins at the base, exactly: the first step leaves A as it was.
    assert found.segments.path_error.max() < 1e-3
    assert any("this is exact" in note for note in found.info["notes"])
    target = found.targets.set_index("target").loc["P (first token)"]
    first = log.select(np.flatnonzero(log.frame["step"] == 1))
    prompts = list({first.frame.problem_id[row]: first.tokens(row)[0] for row in range(len(first))}.values())
    realised = first_chance(list(series)[-1], prompts) - first_chance(series.base, prompts)
    assert target.after - target.before == pytest.approx(realised, abs=1e-6)
    share = found.samples[found.samples.target == "P (first token)"].share
    assert share.sum() == pytest.approx(realised, rel=0.03)
    sample = found.of_target("P (first token)", 1).iloc[0]
    tokens = found.tokens(int(sample.trajectory), "P (first token)", series)
    assert tokens.share.sum() == pytest.approx(sample.share, rel=0.02)


@pytest.mark.slow
def test_effects_are_near_to_lora_trainings_on_the_rest(llama: Path, run: Path, log: Rollouts, tmp_path: Path) -> None:
    series = tsae.CheckpointSeries.load(llama, run)
    path = TrainingPath.of(series)
    # Only A and B of the three adapted modules of every layer.
    modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in path.trained.parameters}
    assert modules == {"q_proj", "v_proj", "down_proj"}
    loss = PolicyLoss("dr_grpo", max_completion_length=16, epsilon=None)
    store = build_gradients(path, log, batches_of(log), loss, tmp_path / "g", progress=False)
    problem = log.frame.problem_id.to_numpy()
    prompts = [log.tokens(row)[0] for row in range(0, 24, 4)]
    target = NextToken(prompts, ["all"] * len(prompts), TOKEN, what="P")
    random = np.random.default_rng(0)
    kept = np.array([np.isin(problem, random.permutation(np.unique(problem))[:6]) for _ in range(6)])
    found = simulate(store, path, RECIPE.optimiser, target, kept, again="replayed", progress=False).changes[:, 0]
    before, really = first_chance(series.base, prompts), []
    for i, mask in enumerate(kept):
        train(llama, log, tmp_path / str(i), mask)
        last = Checkpoint(id="x", path=str(tmp_path / str(i) / "checkpoint-4"), run="x", step=4, base=series.base)
        really.append(first_chance(last, prompts) - before)
    assert np.corrcoef(found, really)[0, 1] > 0.9
    assert np.abs(found - really).mean() < 0.15 * np.abs(really).max()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"bias": "all"}, r"self_attn.q_proj.base_layer.bias beside A and B"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head.modules_to_save.default.weight beside A and B"),
        ({"target_parameters": ["k_proj.weight"]}, "updates of single parameters"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    base = save_model(tmp_path / "base", "qwen2")  # which has biases
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        save_adapter(base, folder, seed=step, target_modules=["q_proj", "v_proj"], **options)
    with pytest.raises(TsaeError, match=said):
        TrainingPath.of(tsae.CheckpointSeries.load(base, tmp_path / "run"))


def test_where_the_beginning_is_assumed_it_is_said(llama: Path, run: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    for step in (3, 4):
        shutil.copytree(run / f"checkpoint-{step}", late / f"checkpoint-{step}")
    path = TrainingPath.of(tsae.CheckpointSeries.load(llama, late))
    assert path.steps == [0, 3, 4]
    assert path.notes == [
        "The adapter before the first step is not there: it is taken to have had the A of step 3, and B = 0."
    ]
    parts = dict(zip(path.trained.parameters, path.weights(0).split(path.trained.sizes), strict=True))
    assert all((part == 0).all() == (".lora_B." in name) for name, part in parts.items())


def test_whole_models_and_adapters_make_no_path(llama: Path, run: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    shutil.copytree(run / "checkpoint-1", mixed / "checkpoint-1")
    save_perturbed(llama, mixed / "checkpoint-2")
    with pytest.raises(TsaeError, match="has whole models and adapters"):
        TrainingPath.of(tsae.CheckpointSeries.load(llama, mixed))
    series = tsae.CheckpointSeries.load(llama, run)
    twice = replace(series, checkpoints=(*series, replace(series.last("run"), id="again")))
    with pytest.raises(TsaeError, match=r"has two checkpoints after step \d+, one of them again"):
        TrainingPath.of(twice)


def test_a_run_that_resized_the_vocabulary_begins_at_the_base(llama: Path, tmp_path: Path) -> None:
    """More tokens, and spare ones cut off: those that both have begin with the base's weights."""
    base = Checkpoint("base", str(llama))
    for name, size in (("more", 24), ("fewer", 19)):
        for step in (1, 2):
            save_resized(llama, tmp_path / name / f"checkpoint-{step}", size, seed=step)
        path = TrainingPath.of(tsae.CheckpointSeries.load(llama, tmp_path / name))
        assert path.steps == [0, 1, 2]
        assert path.notes[0].startswith("The run resized the vocabulary: tokens that base does not have")
        first, n = list(tsae.CheckpointSeries.load(llama, tmp_path / name))[1].load_model(), min(size, 20)
        path.put(0)
        for key, weight in path.trained.parameters.items():
            by_token = "embed_tokens" in key or "lm_head" in key
            rows = n if by_token else len(weight)
            assert torch.equal(weight[:rows], base.load_model().get_parameter(key)[:rows])
            assert torch.equal(weight[rows:], first.get_parameter(key)[rows:])


def test_checkpoints_of_other_sizes_make_no_path(llama: Path, tmp_path: Path) -> None:
    """Both sizes are named; and a vocabulary that changes on the way is none that one run trained."""
    save_model(tmp_path / "wide" / "checkpoint-1", d_model=24)
    with pytest.raises(TsaeError, match=r"the shape \(\d+, 16\) for the weight \S+, and \S+ has the shape \(\d+, 24\)"):
        TrainingPath.of(tsae.CheckpointSeries.load(llama, tmp_path / "wide"))
    for step, size in ((1, 20), (2, 24)):
        save_resized(llama, tmp_path / "grows" / f"checkpoint-{step}", size)
    with pytest.raises(TsaeError, match=r"the shape \(24, 16\) for the weight \S+, and \S+ has the shape \(20, 16\)"):
        TrainingPath.of(tsae.CheckpointSeries.load(llama, tmp_path / "grows"))
