"""The run's settings, as trainers leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tsae.attribution.training.optimiser import Optimiser
from tsae.attribution.training.loss import PolicyLoss
from tsae.attribution.trainer.recipe import read_recipe
from tsae.errors import TsaeError

TRL = {
    "optim": "adamw_torch",
    "learning_rate": 1e-5,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
    "max_grad_norm": 0.2,
    "loss_type": "dr_grpo",
    "max_completion_length": 512,
    "temperature": 0.9,
    "beta": 0.0,
    "epsilon_high": 0.28,
}
VERL = {
    "actor_rollout_ref": {
        "actor": {
            "optim": {"lr": 1e-6, "lr_warmup_steps": 10, "total_training_steps": 100, "weight_decay": 0.01},
            "grad_clip": 1.0,
            "clip_ratio": 0.2,
            "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.3,
            "loss_agg_mode": "seq-mean-token-mean",
            "use_kl_loss": False,
        },
        "rollout": {"temperature": 1.0, "response_length": 1024},
    }
}


def settings(folder: Path, content: dict[str, Any], state: dict[str, Any] | None = None) -> Path:
    (folder / "training_args.json").write_text(json.dumps(content))
    if state is not None:
        (folder / "checkpoint-40").mkdir()
        (folder / "checkpoint-40" / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_settings_in_trls_words(tmp_path: Path) -> None:
    found = read_recipe(settings(tmp_path, TRL, {"max_steps": 95, "global_step": 40}))
    assert found.optimiser == Optimiser(
        "adamw", 1e-5, "cosine", warmup=10, n_steps=95, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.2
    )
    assert found.loss == PolicyLoss("dr_grpo", 512, 0.9, 0.2, 0.28)
    assert str(found) == (
        "adamw, learning rate 1e-05 (cosine, 10 steps of warm-up), weight decay 0.1, gradients clipped at norm 0.2, "
        f"loss dr_grpo, ratios clipped at 0.8 and 1.28 (by {tmp_path}/training_args.json)"
    )


def test_settings_in_verls_words(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(VERL))
    found = read_recipe(tmp_path)
    assert found.optimiser == Optimiser("adamw", 1e-6, "constant", warmup=10, n_steps=100, weight_decay=0.01)
    assert found.loss == PolicyLoss("grpo", None, 1.0, 0.1, 0.3)


def test_logged_rates_must_agree(tmp_path: Path) -> None:
    content = {"learning_rate": 1e-5, "lr_scheduler_type": "linear"}
    right = {
        "max_steps": 100,
        "log_history": [{"step": 1, "learning_rate": 1e-5}, {"step": 50, "learning_rate": 5.1e-6}],
    }
    assert read_recipe(settings(tmp_path, content, right)).optimiser.rate(50) == pytest.approx(5.1e-6)
    (tmp_path / "training_args.json").write_text(json.dumps({"learning_rate": 3e-5, "lr_scheduler_type": "constant"}))
    with pytest.raises(TsaeError, match=r"step 1 was 1e-05 by trainer_state\.json, 3e-05 by the settings"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optim": "adafactor"}, "the optimiser 'adafactor' cannot be simulated"),
        ({"lr_scheduler_type": "polynomial"}, "the schedule 'polynomial' cannot be simulated"),
        ({"beta": 0.04}, "the run had a KL penalty"),
        ({"loss_type": "cispo", "lr_scheduler_type": "constant"}, "kind='cispo' is none of"),
        ({"num_iterations": 2}, "a batch is used more than once"),
        ({"top_entropy_quantile": 0.2}, "tokens with less entropy were left out of the loss, which is not simulated"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "the learning rates had a schedule of their own"),
        ({"learning_rate": "fast"}, "a setting is no number"),
        ({"lr_scheduler_type": "linear"}, "needs the number of steps"),
        ({"lr_scheduler_type": "linear", "max_steps": -1}, "needs the number of steps"),  # TRL's way to say: by epochs
        ({"max_steps": 10, "learning_rate": -1}, "learning_rate=-1.0 must be above 0"),
        ({"max_steps": 10, "learning_rate": "nan"}, "learning_rate=nan is not finite"),
        ({"max_steps": 10, "adam_beta1": 1.0}, "must be at least 0, and less than 1"),
        ({"max_steps": 10, "adam_beta2": 1.5}, "must be at least 0, and less than 1"),
        ({"max_steps": 10, "max_grad_norm": -1}, "max_grad_norm=-1.0 must be above 0"),
        ({"max_steps": 10, "warmup_steps": -3}, "warmup=-3 must be a number of steps"),
        ({"max_steps": 10, "temperature": -1}, "temperature=-1.0 must be above 0"),
        ({"max_steps": 10, "epsilon": -3}, "epsilon=-3.0 and epsilon_high=0.28 at least 0"),
        ({"max_steps": 10, "max_completion_length": -5}, "max_completion_length=-5 is less than 1"),
        ({"max_steps": 10, "max_completion_length": "abc"}, "a setting is no number"),
    ],
)
def test_what_cannot_be_simulated_is_said(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match=said):
        read_recipe(settings(tmp_path, {**TRL, **changed}))


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("training_args.json", {"warmup_steps": "soon"}),
        ("training_args.json", {"epsilon": {}}),
        ("trainer_state.json", {"log_history": True}),
        ("trainer_state.json", {"log_history": [{"learning_rate": "x", "step": 1}]}),
        ("trainer_state.json", {"log_history": [5]}),
        ("trainer_state.json", {"max_steps": "many"}),
    ],
)
def test_damaged_settings_are_named(file: str, changed: dict[str, Any], tmp_path: Path) -> None:
    content = {"training_args.json": TRL, "trainer_state.json": {"max_steps": 95, "global_step": 40}}
    for name, values in content.items():
        (tmp_path / name).write_text(json.dumps({**values, **(changed if name == file else {})}))
    with pytest.raises(
        TsaeError, match=r"(training_args|trainer_state)\.json: (cannot be read|a setting is no number)"
    ):
        read_recipe(tmp_path)


def test_without_settings(tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match=r"holds no settings of the training \(training_args\.json"):
        read_recipe(tmp_path)
    (tmp_path / "training_args.json").write_text("{")
    with pytest.raises(TsaeError, match="is no JSON"):
        read_recipe(tmp_path)
