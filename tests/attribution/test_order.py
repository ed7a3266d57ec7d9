"""The rows of every optimiser step: hand-made logs, torch's own draws, and trainings that TRL really runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.refusals import refuses
from support.trl_runs import with_kl
from tsae.attribution.loss import PolicyLoss
from tsae.attribution.order import Plan, plan_updates, read_history
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.base.files import write_json
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.table import Rollouts
from tsae.testbed import series

SETTINGS = RunSettings(Optimiser(n_steps=8), PolicyLoss(), Batching(2, 4, 2), source="training_args.bin", seed=3)
"""Two steps an iteration and two iterations: four steps a generation, each of two micro-batches of four."""
WORDS, ROWS, LENGTHS, PER_EPOCH = 11, 16, (5, 7, 3, 4), 2


def log_of(steps: Sequence[int], n_rows: int = ROWS, **columns: Sequence[Any]) -> Rollouts:
    """A generation of so many rows at each of these steps; problems come again after `PER_EPOCH` generations."""
    records = [
        {
            "problem_id": f"p{number % PER_EPOCH}-{row // 4}",
            "policy": "run",
            "prompt_ids": [1, 2],
            "response_ids": [3] * (LENGTHS[number % len(LENGTHS)] if row == 5 else 2),
            "outcome": "unknown",
            "step": step,
        }
        for number, step in enumerate(steps)
        for row in range(n_rows)
    ]
    for name, values in columns.items():
        for record, value in zip(records, values, strict=True):
            record[name] = value
    return Rollouts.from_records(records)


def plan_of(log: Rollouts, settings: RunSettings = SETTINGS, **others: Any) -> Plan:
    return plan_updates(log, settings, **{"checkpoints": {}, "vocabulary": WORDS, **others})


def as_trl_draws(folder: Path, *, on_cpu: bool, n: int = 4, seed: int = 3) -> tuple[dict[int, Path], list[list[int]]]:
    """Checkpoints at every fourth step, and the rows of every micro-batch, by what TRL draws from torch."""
    checkpoints, parts = {}, []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for number in range(n):
            if number % PER_EPOCH == 0:
                torch.empty((), dtype=torch.int64).random_()
            for _ in range(LENGTHS[number] if on_cpu else 0):
                torch.multinomial(torch.rand(ROWS, WORDS, generator=torch.Generator()), 1)
            cut = (torch.randperm(ROWS).reshape(4, 4) + number * ROWS).tolist()
            parts += [*cut, *cut]
            checkpoints[4 * number + 4] = folder / f"checkpoint-{4 * number + 4}"
            checkpoints[4 * number + 4].mkdir(parents=True)
            torch.save(
                {"python": (3, (1, 2), None), "cpu": torch.get_rng_state()},
                folder / f"checkpoint-{4 * number + 4}/rng_state.pth",
            )
    return checkpoints, parts


def steps_of(plan: Plan) -> list[tuple[int, int, bool]]:
    return [(u.step, u.generation, u.first) for u in plan.updates]


def parts_of(plan: Plan) -> list[list[int]]:
    return [part.tolist() for update in plan.updates for part in update.parts]


def test_one_step_a_generation_has_the_rows_of_the_log() -> None:
    plan = plan_of(log_of((1, 2, 3)), replace(SETTINGS, batching=Batching(2)))
    assert steps_of(plan) == [(1, 0, True), (2, 1, True), (3, 2, True)]
    assert parts_of(plan)[2:4] == [list(range(16, 24)), list(range(24, 32))]
    assert [rows.tolist() for rows in plan.generations] == [list(range(low, low + 16)) for low in (0, 16, 32)]
    # A log of every second step names a generation by the last step that it saw.
    for logged in ((1, 3), (2, 4)):
        twice = plan_of(log_of(logged), replace(SETTINGS, batching=Batching(2, iterations=2)))
        assert steps_of(twice) == [(1, 0, True), (2, 0, False), (3, 1, True), (4, 1, False)]
        assert parts_of(twice)[:2] == parts_of(twice)[2:4]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("kept", [(4, 8, 12, 16), (16,), (8,), ()])
def test_the_order_is_that_of_torchs_generator(on_cpu: bool, kept: tuple[int, ...], tmp_path: Path) -> None:
    checkpoints, parts = as_trl_draws(tmp_path, on_cpu=on_cpu)
    settings = replace(SETTINGS, facts={"use_cpu": on_cpu} if not kept else {})
    plan = plan_of(log_of((1, 5, 9, 13)), settings, checkpoints={step: checkpoints[step] for step in kept})
    assert parts_of(plan) == parts
    assert steps_of(plan) == [(i + 1, i // 4, i % 4 == 0) for i in range(16)]
    assert ("sampled too" in plan.notes[0]) == on_cpu
    assert len(plan.notes) == 1 + (max(kept, default=0) < 16)


def test_some_steps_alone_start_from_the_state_before_them(tmp_path: Path) -> None:
    checkpoints, parts = as_trl_draws(tmp_path, on_cpu=True)
    log, unseeded = log_of((1, 5, 9, 13)), replace(SETTINGS, seed=None)
    plan = plan_of(log, unseeded, checkpoints=checkpoints, steps=(10, 14))
    assert steps_of(plan) == [(10, 0, False), (11, 0, False), (12, 0, False), (13, 1, True), (14, 1, False)]
    assert parts_of(plan) == parts[18:28]
    assert [int(rows[0]) for rows in plan.generations] == [32, 48]
    # A log that starts at step 9 is enough for these, where the trainer says when epochs begin.
    write_json(checkpoints[16] / "trainer_state.json", {"log_history": [{"step": 16, "epoch": 2.0}]})
    later = plan_of(log.select(np.arange(len(log)) >= 32), unseeded, checkpoints=checkpoints, steps=(9, 16))
    assert [u.step for u in later.updates] == list(range(9, 17))


def test_the_trainers_state_says_lengths_and_epochs(tmp_path: Path) -> None:
    """A log of text may have lost a token, and a data set may ask a problem twice."""
    checkpoints, parts = as_trl_draws(tmp_path, on_cpu=True)
    history = [
        {"step": 1 + 4 * i, "completions/max_length": length, "epoch": (1 + 4 * i) / 8, "loss": float("nan")}
        for i, length in enumerate(LENGTHS)
    ]
    write_json(checkpoints[16] / "trainer_state.json", {"log_history": history})
    log = log_of((1, 5, 9, 13), problem_id=["the same"] * 64, response_ids=[[3]] * 64)
    assert parts_of(plan_of(log, checkpoints=checkpoints)) == parts
    assert read_history(checkpoints)[5]["completions/max_length"] == 7
    with pytest.raises(TsaeError, match=r"the rng_state\.pth of step 4 does not follow from what was drawn before"):
        plan_of(log, checkpoints={step: checkpoints[step] for step in (4, 8)})


def test_the_logs_own_order_needs_no_generator() -> None:
    """Of `tsae.rl.TsaeCallback`: the second generation was given up after three of its four steps."""
    rng = np.random.default_rng(0)
    number = np.concatenate([rng.permutation(np.repeat(np.arange(4), 4)) for _ in range(2)])
    used = [[n, n] if row < 16 or n < 2 else [n] for row, n in enumerate(number.tolist())]
    log = log_of((1, 5), generation=[7] * 16 + [8] * 16, micro_batch=used)
    plan = plan_of(log, replace(SETTINGS, seed=None))
    assert plan.notes == []
    assert [u.step for u in plan.updates] == list(range(1, 8))
    for update in plan.updates:
        half = (update.step - 1) % 2
        rows = slice(16 * update.generation, 16 * update.generation + 16)
        for part, found in enumerate(update.parts):
            np.testing.assert_array_equal(found, np.flatnonzero(number[rows] == 2 * half + part) + rows.start)
    with pytest.raises(TsaeError, match="a generation has 2 micro-batches, and the log has one of number 3"):
        plan_of(log, replace(SETTINGS, batching=Batching(1, 2)))


def test_steps_that_are_missing() -> None:
    one = replace(SETTINGS, batching=Batching())
    tenth = replace(one, facts={"logging_steps": 10})
    with pytest.raises(TsaeError) as caught:
        plan_of(log_of((10, 20)), tenth)
    assert str(caught.value) == (
        "rollouts: lacks 18 of the steps 1 to 20, the first of them step 1; one step in 10 was logged. "
        "Log every step: logging_steps=1 in TRL, with log_completions=True."
    )
    with pytest.raises(TsaeError, match=r"lacks 4 of the steps 1 to 6, the first of them step 1; it starts at step 5"):
        plan_of(log_of((5, 6)), one)
    refuses(r"lacks 1 of the steps 1 to 3, the first of them step 2\.", lambda: plan_of(log_of((1, 3)), one))
    # Steps beyond the training's last one were not taken.
    assert len(plan_of(log_of((1, 5)), replace(SETTINGS, facts={"max_steps": 6})).updates) == 6


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": None}, "4 steps use each generation, and no seed and no state of the generator is known before"),
        ({"batching": Batching(2, 4, 2, processes=8)}, "and each of several processes shuffled its own"),
        ({"facts": {"per_device_train_batch_size": 2}}, "and each of several processes shuffled its own"),
        ({"facts": {"use_vllm": True}}, "and vLLM, which may seed the generator anew, leaves no rng_state.pth"),
        ({"trainer": "verl", "batching": Batching(1, 4)}, "the log does not say which samples each was made of"),
        ({"batching": Batching(4), "loss": PolicyLoss("bnpo"), "seed": None}, "which samples a micro-batch has"),
        ({"batching": Batching(2), "loss": PolicyLoss(top_entropy_quantile=0.2), "seed": None}, "the loss depends on"),
    ],
)  # fmt: skip
def test_an_order_that_matters_and_is_not_known(changed: dict[str, Any], said: str) -> None:
    each = int(changed.get("batching", SETTINGS.batching).updates)
    with pytest.raises(TsaeError) as caught:
        plan_of(log_of((1, 1 + each) if "trainer" not in changed else (1, 2)), replace(SETTINGS, **changed))
    text = str(caught.value)
    assert said in text
    assert text.startswith("training_args.bin: say that ")
    assert "Log the order: tsae.rl.TsaeCallback(trainer), one line." in text
    assert "\n" not in text


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match="4 micro-batches and a generation has 2: steps mix generations"):
        plan_of(log_of((1,)), replace(SETTINGS, batching=Batching(4, 2)))
    refuses("two generations in the steps 5 to 8, which use one by the settings", lambda: plan_of(log_of((1, 5, 7))))
    log = log_of((1, 5))
    with pytest.raises(TsaeError, match="some rows are not in the log: its generations have 15 to 16"):
        plan_of(log.select(np.arange(len(log)) != 20))
    checkpoints, _ = as_trl_draws(tmp_path, on_cpu=False, n=1)
    torch.save({"cpu": torch.zeros(5056, dtype=torch.uint8)}, checkpoints[4] / "rng_state.pth")
    refuses(r"rng_state\.pth.*cannot be read", plan_of, log, checkpoints=checkpoints)


def test_other_trainers_count_generations() -> None:
    verl = replace(SETTINGS, trainer="verl", batching=Batching(1, 4), facts={"order": "log", "max_steps": 2})
    plan = plan_of(log_of((1, 2)), verl)
    assert [u.step for u in plan.updates] == list(range(1, 9))
    assert parts_of(plan)[5] == list(range(20, 24))
    assert plan.notes == []
    unknown = replace(verl, facts={"order": "unknown", "order_fix": "actor.shuffle=False keeps the order"})
    refuses(r"each was made of\. actor\.shuffle=False keeps the order", lambda: plan_of(log_of((1, 2)), unknown))


@pytest.mark.slow(ci=True)
@pytest.mark.filterwarnings(
    # The libraries' own: transformers renames an option that TRL's config has, and calls itself by the old name.
    "ignore:`(is_)?gradient_checkpointing(_(en|dis)able)?` is deprecated:FutureWarning"
)
def test_a_training_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL penalty, two iterations, two steps an iteration, epochs of two generations; steps log the same rows again."""
    import trl.trainer.grpo_trainer as trl

    true: list[tuple[int, list[int]]] = []
    shuffle, loss = trl.shuffle_sequence_dict, trl.GRPOTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        true.append((self.state.global_step + 1, inputs["row"].tolist()))
        return loss(self, model, inputs, *others, **named)

    monkeypatch.setattr(trl, "shuffle_sequence_dict", lambda rows: shuffle(rows | {"row": torch.arange(ROWS)}))
    monkeypatch.setattr(trl.GRPOTrainer, "compute_loss", compute_loss)
    small = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "save_steps": 4}
    with_kl(tmp_path / "run", 12, **small).train()
    log = Rollouts.read(tmp_path / "run", series().base.path, ImportConfig(max_response_tokens=6))
    assert len(log) == 3 * ROWS
    assert log.info["log"]["skipped"] == {"repeated": 9 * ROWS}
    checkpoints = {step: tmp_path / "run" / f"checkpoint-{step}" for step in (4, 8, 12)}
    plan = plan_of(log, replace(SETTINGS, seed=5), checkpoints=checkpoints, vocabulary=20)
    found = [(u.step, (part - plan.generations[u.generation][0]).tolist()) for u in plan.updates for part in u.parts]
    assert found == true
    assert len(plan.notes) == 1
