"""The callback in TRL, on trainings that GRPOTrainer really runs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from organism.pretraining import ModelConfig, llama_config

import tsae
from tsae.attribution.credit.shares import shares
from tsae.attribution.gradients.gradient_store import batches_of, build_gradients
from tsae.attribution.online.guard import Guard
from tsae.attribution.online.recording import read_recording
from tsae.attribution.online.trl_callback import AttributionCallback
from tsae.attribution.targets import NextToken
from tsae.attribution.trainer.recipe import read_recipe
from tsae.errors import TsaeError
from tsae.testbed.grpo import data_set, grpo_on_cpu
from tsae.testbed.tokenizer import TOKEN_IDS, make_tokenizer

pytestmark = pytest.mark.filterwarnings(
    # The libraries' own: transformers renames an option that TRL's config has, and calls itself by the old name.
    "ignore:`(is_)?gradient_checkpointing(_(en|dis)able)?` is deprecated:FutureWarning",
)

PROMPTS, GROUP, WIDTH, STEPS = 2, 4, 8, 3
PROBLEMS = tsae.testbed.generate_problems("medium", 6, 0, "train")


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


def make_trainer(folder: Path, **options: Any) -> Any:
    from transformers import LlamaForCausalLM
    from trl import GRPOTrainer

    torch.manual_seed(0)
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": PROMPTS,
        "max_completion_length": WIDTH,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.3,
        **options,
    }
    return GRPOTrainer(
        model=LlamaForCausalLM(llama_config(ModelConfig(n_layers=1, d_model=32, n_heads=2, d_mlp=64))),
        processing_class=make_tokenizer(),
        reward_funcs=[by_length, lambda completions, **_: [0.5] * len(completions)],
        train_dataset=data_set(PROBLEMS),
        args=grpo_on_cpu(folder / "trainer", prompts=PROMPTS, samples=GROUP, reward_weights=[2.0, 1.0], **options),
    )


def the_targets() -> NextToken:
    ids = [np.array(make_tokenizer()(problem.prompt).input_ids) for problem in PROBLEMS]
    return NextToken(ids, ["one", "two"] * 3, TOKEN_IDS["#"], what="direct")


def run(to: Path, options: dict[str, Any] | None = None, **recording: Any) -> AttributionCallback:
    trainer = make_trainer(to, **options or {})
    callback = AttributionCallback(trainer, the_targets(), **recording)
    trainer.add_callback(callback)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return callback


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"optim": "adamw_torch_fused", "gradient_checkpointing": True}, marks=pytest.mark.slow)],
)
def test_recording_changes_no_weight(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = make_trainer(tmp_path, **options)
    before = [p.detach().clone() for p in plain.model.parameters()]
    with contextlib.redirect_stdout(io.StringIO()):
        plain.train()
    watched = run(tmp_path, options)
    for one, other, start in zip(plain.model.parameters(), watched.trainer.model.parameters(), before, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, start)
    assert np.abs(watched.recorder.frame["now: direct (one)"]).max() > 0


@pytest.mark.parametrize("loss", ["dapo", pytest.param("dr_grpo", marks=pytest.mark.slow)])
def test_shares_are_those_of_attribution_after_the_run(tmp_path: Path, loss: str) -> None:
    callback = run(tmp_path, {"loss_type": loss}, refresh=1, folder=tmp_path / "recording", every=1)
    frame = callback.recorder.frame
    assert frame["step"].value_counts().to_dict() == dict.fromkeys(range(1, STEPS + 1), PROMPTS * GROUP)
    assert set(frame.problem_id) <= {problem.id for problem in PROBLEMS}
    assert set(frame.reward) == {0.5, 2.5}
    # TRL's own formula: shuffled rows have kept their rewards.
    for _, group in frame.groupby(["step", "problem_id"]):
        expected = (group.reward - group.reward.mean()) / (group.reward.std() + 1e-4)
        np.testing.assert_allclose(group.advantage, expected, atol=1e-4)
    path, rollouts = read_recording(tmp_path / "recording", callback.recorder.trained)
    recipe = read_recipe(tmp_path / "recording")
    assert recipe.optimiser.name == "sgd"
    store = build_gradients(path, rollouts, batches_of(rollouts), recipe.loss, tmp_path / "g", progress=False)
    after = shares(store, path, recipe.optimiser, the_targets(), progress=False)
    assert after.segments.path_error.max() < 1e-3
    online = frame[["share: direct (one)", "share: direct (two)"]].to_numpy()[after.rows]
    assert np.abs(online).max() > 1e-4
    np.testing.assert_allclose(online, after.shares, rtol=2e-3, atol=1e-4 * np.abs(after.shares).max())
    values = callback.recorder.values
    np.testing.assert_allclose(values[STEPS] - values[0], after.realised, atol=1e-6)


def test_the_guard_is_called_once_a_step_before_clipping(tmp_path: Path) -> None:
    free = run(tmp_path, refresh=1)
    column = free.recorder.frame["share: direct (one)"].groupby(free.recorder.frame.step).sum()
    assert column.max() > 0
    start = free.recorder.values[0][0]
    held = run(
        tmp_path,
        refresh=1,
        guard=lambda recorder: Guard(recorder, "direct (one)", harmful="rises", bound=start - 1),
    )
    assert held.guard is not None
    frame = held.recorder.frame
    # All that push it up are left out, at every step, and nothing else.
    assert (frame.weight == 0).sum() == len(held.guard.listed) > 0
    assert (frame["share: direct (one)"] <= 1e-9).all()
    assert sorted(held.guard.listed.step.unique()) == sorted(frame.step[frame.weight == 0].unique())
    assert held.recorder.values[STEPS][0] < free.recorder.values[STEPS][0]


def test_a_trainer_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(TsaeError, match="no recorder before the training begins"):
        _ = AttributionCallback(trainer, the_targets()).recorder
    trainer.args.mask_truncated_completions = True
    with pytest.raises(TsaeError, match="mask_truncated_completions"):
        AttributionCallback(trainer, the_targets(), folder=tmp_path / "r")
    trainer.args.fp16 = True
    with pytest.raises(TsaeError, match="the trainer uses float16"):
        AttributionCallback(trainer, the_targets())
