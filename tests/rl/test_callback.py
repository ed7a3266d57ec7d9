"""The callback in TRL, on trainings that GRPOTrainer really runs, and the run log that it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tsae
from support.refusals import refuses
from support.trl_runs import by_length, save_tiny, train
from tsae.attribution.find_settings import read_settings
from tsae.attribution.guard import Guard
from tsae.attribution.order import plan_updates
from tsae.attribution.targets import NextToken
from tsae.config import RunConfig
from tsae.doctor import find_run_log
from tsae.errors import TsaeError
from tsae.rl import RunLog, TsaeCallback
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.table import Rollouts
from tsae.testbed.grpo import data_set, grpo_on_cpu
from tsae.testbed.tokenizer import TOKEN_IDS, make_tokenizer

pytestmark = pytest.mark.filterwarnings(
    # The libraries' own: transformers renames an option that TRL's config has, and calls itself by the old name.
    "ignore:`(is_)?gradient_checkpointing(_(en|dis)able)?` is deprecated:FutureWarning"
)

PROMPTS, GROUP, WIDTH, STEPS = 2, 4, 8, 3
PROBLEMS = tsae.testbed.generate_problems("medium", 6, 0, "train")
SEVERAL = {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
"""Four micro-batches a generation, used twice: four steps, with ratios and a reference."""
LOGGED = {"log_completions": True, "num_completions_to_print": 0, "logging_steps": 1}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def half(completions: list[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "base", template=TEMPLATE)


def make_trainer(base: Path, folder: Path, *, messages: bool = False, peft: Any = None, **options: Any) -> Any:
    from trl import GRPOTrainer

    data = data_set(PROBLEMS).add_column("level", ["medium"] * len(PROBLEMS))
    if messages:
        data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
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
        model=str(base),
        reward_funcs=[by_length, half],
        train_dataset=data,
        peft_config=peft,
        args=grpo_on_cpu(folder, prompts=PROMPTS, samples=GROUP, reward_weights=[2.0, 1.0], **options),
    )


def spied(trainer: Any) -> list[dict[str, Any]]:
    """What `_compute_loss` is given, call by call."""
    seen: list[dict[str, Any]] = []
    call = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> Any:
        seen.append(dict(inputs))
        return call(model, inputs)

    trainer._compute_loss = spy
    return seen


def read(folder: Path, base: Path) -> Rollouts:
    return Rollouts.read(folder, base, ImportConfig(outcome="by_length"))


def updates(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]


def check_against(seen: Sequence[dict[str, Any]], log: Rollouts, steps: Sequence[dict[str, Any]]) -> None:
    """Every micro-batch of the log has the rows and numbers that the loss was computed from, in that order."""
    used = [(generation, part) for update in steps for generation, part in update["used"]]
    assert len(used) == len(seen) > 0
    table = {name: log.table[name].to_pylist() for name in log.table.column_names}
    for batch, (generation, part) in zip(seen, used, strict=True):
        mine = [
            row
            for row in range(len(log))
            if table["generation"][row] == generation and part in table["micro_batch"][row]
        ]
        expected = []
        for i, mask in enumerate(batch["completion_mask"].bool()):
            ids = (batch["prompt_ids"][i][batch["prompt_mask"][i].bool()], batch["completion_ids"][i][mask])
            numbers = [batch[f"{kind}_per_token_logps"][i][mask] for kind in ("old", "ref")]
            expected.append([each.tolist() for each in (*ids, *numbers)] + [batch["advantages"][i].item()])
        names = ("prompt_ids", "response_ids", "old_logprobs", "ref_logprobs", "advantage")
        assert sorted(expected) == sorted([table[name][row] for name in names] for row in mine)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("messages", [False, True])
def test_the_log_has_what_the_loss_was_computed_from(base: Path, tmp_path: Path, messages: bool) -> None:
    plain = make_trainer(base, tmp_path / "plain", messages=messages, max_steps=5, **SEVERAL)
    train(plain)
    trainer = make_trainer(base, tmp_path / "run", messages=messages, max_steps=5, **LOGGED, **SEVERAL)
    callback = TsaeCallback(trainer)
    trainer.add_callback(callback)
    seen = spied(trainer)
    train(trainer)
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    folder = tmp_path / "run" / "tsae"
    assert find_run_log(RunConfig(tmp_path / "run", to=tmp_path / "to")) == folder / "generations"
    log = read(tmp_path / "run", base)  # TRL's own log lies beside it, and is not counted too
    assert any("completions_" in note for note in log.info["log"]["notes"])
    assert len(log) == 2 * 4 * GROUP
    steps = updates(folder)
    check_against(seen, log, steps)
    history = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert [u["grad_norm"] for u in steps] == pytest.approx([line["grad_norm"] for line in history])
    assert [u["learning_rate"] for u in steps] == pytest.approx([1e-2 * (1 - i / 5) for i in range(5)])
    frame = log.frame
    plan = plan_updates(log, read_settings(tmp_path / "run"), checkpoints={}, vocabulary=None)
    assert plan.notes == []
    for update, told in zip(plan.updates, steps, strict=True):
        assert update.step == told["step"]
        for rows, (generation, part) in zip(update.parts, told["used"], strict=True):
            mine = (frame.generation == generation) & frame.micro_batch.map(lambda parts, part=part: part in parts)
            assert sorted(rows) == np.flatnonzero(mine).tolist()
    assert frame.groupby("generation").step.unique().map(list).to_dict() == {1: [1], 2: [5]}
    assert frame.policy.unique().tolist() == ["run-00000", "run-00004"]
    assert frame.micro_batch.map(tuple).value_counts().to_dict() == {(part, part): 2 * GROUP for part in range(4)}
    assert set(frame.problem_id) <= {problem.id for problem in PROBLEMS}
    assert (frame.reward == 2 * frame["reward/by_length"] + frame["reward/half"]).all()
    assert set(frame.level) == {"medium"}
    assert dict(zip(frame.problem_id, frame.answer, strict=True)).items() <= {p.id: p.answer for p in PROBLEMS}.items()
    ended = [ids[-1] == make_tokenizer().eos_token_id for ids in log.table["response_ids"].to_pylist()]
    assert frame.finish_reason.tolist() == ["stop" if end else "length" for end in ended]
    first = pq.read_table(folder / "generations" / "generation-000001-rank-0.parquet").to_pylist()[0]
    assert ("messages" in first) == messages == ("prompt" not in first)
    if messages:
        assert json.loads(first["messages"])[0]["role"] == "user"
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["base"] == str(base)
    assert settings["arguments"]["beta"] == 0.1
    assert settings["max_steps"] == 5
    assert settings["seeds"]["seed"] == 42
    assert (settings["processes"], settings["vllm"], settings["lora"]) == (1, False, None)
    assert list(settings["trained"]) == [name for name, _ in trainer.model.named_parameters()]
    assert "hub_token" not in settings["arguments"]


@pytest.mark.slow(ci=True)
def test_a_resumed_training_counts_nothing_twice(base: Path, tmp_path: Path) -> None:
    """Killed after step 4, resumed from checkpoint 2, in the middle of a generation."""
    options = {**SEVERAL, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}

    def stopped(trainer: Any, at: int) -> None:
        call = trainer.training_step

        def step(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == at:
                raise KeyboardInterrupt
            return call(*args, **kwargs)

        trainer.training_step = step

    trainer = make_trainer(base, tmp_path / "run", **options)
    TsaeCallback(trainer)
    stopped(trainer, 5)
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    folder = tmp_path / "run" / "tsae"
    assert [u["step"] for u in updates(folder)] == [1, 2, 3, 4, 5]
    with (folder / "updates.jsonl").open("a") as file:
        file.write('{"step": 6, "us')  # Half a line.
    trainer = make_trainer(base, tmp_path / "run", **options)
    TsaeCallback(trainer)
    seen = spied(trainer)
    train(trainer, resume=str(tmp_path / "run" / "checkpoint-2"))
    steps = updates(folder)
    assert [u["step"] for u in steps] == [1, 2, 3, 4, 5, 6]
    assert [u["used"] for u in steps[2:4]] == [[[2, 0], [2, 1]], [[2, 2], [2, 3]]]
    log = read(folder, base)
    check_against(seen, log, steps[2:])
    # The settings say what TRL's own file says, and the base and the number of steps.
    mine, own = read_settings(tmp_path / "run"), read_settings(tmp_path / "run" / "checkpoint-2" / "training_args.bin")
    assert mine.source == str(folder / "settings.json")
    assert (mine.loss, mine.optimiser, mine.batching) == (own.loss, own.optimiser, own.batching)
    assert (mine.base, mine.version, mine.seed, mine.weights) == (str(base), version("trl"), 42, "float32")
    # Of the first generation, one iteration of two was used.
    by_generation = log.frame.groupby("generation").micro_batch.apply(lambda parts: {len(p) for p in parts})
    assert by_generation.to_dict() == {1: {1}, 2: {2}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "bfloat16", "truncated", "evaluation"])
def test_other_trainings_are_logged_too(base: Path, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"beta": 0.0, "max_steps": 4}
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        options["peft"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options |= {"bfloat16": {"bf16": True}, "truncated": {"mask_truncated_completions": True}}.get(kind, {})
    trainer = make_trainer(base, tmp_path / "run", **options)
    if kind == "evaluation":
        trainer.eval_dataset = trainer.train_dataset
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    TsaeCallback(trainer, tmp_path / "my log" / "ü")
    seen = spied(trainer)
    train(trainer)
    log = read(tmp_path / "my log" / "ü", base)
    assert len(log) == 4 * PROMPTS * GROUP
    trained_on = sorted(
        [batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(), round(float(batch["advantages"][i]), 5)]
        for batch in seen
        if "tsae_row" in batch
        for i in range(GROUP)
    )
    rows = zip(log.table["prompt_ids"].to_pylist(), log.table["advantage"].to_pylist(), strict=True)
    assert trained_on == sorted([ids, round(advantage, 5)] for ids, advantage in rows)
    assert any("tsae_row" not in batch for batch in seen) == (kind == "evaluation")
    assert min(len(ids) for ids in log.table["response_ids"].to_pylist()) > 0
    settings = json.loads((tmp_path / "my log" / "ü" / "settings.json").read_text())
    assert (settings["lora"] is not None) == (kind == "adapter") == all("lora" in name for name in settings["trained"])
    if kind == "adapter":
        assert settings["base"] == str(base)
        assert settings["lora"]["target_modules"] == ["q_proj", "v_proj"]


# --- targets and the guard


def the_targets() -> NextToken:
    ids = [np.array(make_tokenizer()(problem.prompt).input_ids) for problem in PROBLEMS]
    return NextToken(ids, ["one", "two"] * 3, TOKEN_IDS["#"], what="direct")


@pytest.mark.slow(ci=True)
def test_shares_are_recorded_and_a_guard_is_called_before_clipping(base: Path, tmp_path: Path) -> None:
    trainer = make_trainer(base, tmp_path / "free")
    free = TsaeCallback(trainer, targets=the_targets(), refresh=1)
    train(trainer)
    plain = make_trainer(base, tmp_path / "plain")
    train(plain)
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert free.recorder is not None
    frame = free.recorder.frame
    assert frame["step"].value_counts().to_dict() == dict.fromkeys(range(1, STEPS + 1), PROMPTS * GROUP)
    # The rows of the log: shuffled ones have kept their rewards.
    log = read(tmp_path / "free" / "tsae", base).frame
    where = frame.generation.sub(1) * PROMPTS * GROUP + frame.row
    assert log.reward[where].tolist() == frame.reward.tolist()
    assert log.advantage[where].tolist() == frame.advantage.tolist()
    # Without momentum and clipping apart, the sum over samples is what the targets did.
    for name in ("direct (one)", "direct (two)"):
        column = free.targets.names.index(name)
        moved = np.diff([value[column] for value in free.recorder.values.values()])
        np.testing.assert_allclose(frame.groupby("step")[f"share: {name}"].sum(), moved, rtol=0.05, atol=1e-6)
    start = free.recorder.values[0][0]
    trainer = make_trainer(base, tmp_path / "held")
    held = TsaeCallback(
        trainer,
        targets=the_targets(),
        refresh=1,
        guard=lambda recorder: Guard(recorder, "direct (one)", harmful="rises", bound=start - 1),
    )
    train(trainer)
    assert held.guard is not None
    assert held.recorder is not None
    frame = held.recorder.frame
    # All that push it up are left out, at every step, and nothing else; the log says so.
    assert (frame.weight == 0).sum() == len(held.guard.listed) > 0
    assert (frame["share: direct (one)"] <= 1e-9).all()
    assert held.recorder.values[STEPS][0] < free.recorder.values[STEPS][0]
    left = [place for u in updates(tmp_path / "held" / "tsae") for place in u.get("weights", [])]
    out = frame[frame.weight == 0]
    assert sorted(map(tuple, left)) == sorted(zip(out.generation, out.row, out.weight, strict=True))


def test_a_trainer_that_cannot_be_followed_is_refused(base: Path, tmp_path: Path) -> None:
    refuses("is a object, expected TRL's GRPOTrainer", lambda: TsaeCallback(object()))
    trainer = make_trainer(base, tmp_path)
    with pytest.raises(TsaeError, match="a guard watches a target"):
        TsaeCallback(trainer, guard=lambda recorder: Guard(recorder, "x", harmful="rises", bound=0))
    TsaeCallback(trainer)
    refuses("has a TsaeCallback already", TsaeCallback, trainer)
    other = make_trainer(base, tmp_path)
    other.args.fp16 = True
    refuses("the trainer uses float16", lambda: TsaeCallback(other, targets=the_targets()))


# --- the log of another loop

ROW: dict[str, Any] = {"prompt_ids": [1, 11, 1, 13], "response_ids": [2, 15], "advantage": 0.5}


def test_processes_are_joined_and_hostile_names_stay_names(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a b'ü\n<x>" / "tsae"
    odd = "</script>\ud800/../step"
    row = ROW | {
        "messages": [{"role": "user", "content": "1+1?\ud800", "image": object()}],
        "rewards": {odd: 1.0, "other": float("nan")},
        "reward": 1.0,
        "truncated": False,
        "data": {"problem_id": 7, "answer": ["2"], odd: {"x": 1}, "step": 99, "advantage": "x"},
        "response_mask": [1, 0],
        "token_advantages": [0.25, 0.75],
        "sampler_logprobs": [-0.5, float("nan")],
    }
    logs = [RunLog(folder, {"trainer": "mine"}, rank=rank) for rank in range(2)]
    for step in (1, 2):
        for log in logs:
            assert log.add(step, [row, row, ROW | {"micro_batch": [], "reward": 0.0, "rewards": {odd: 0.0}}]) == step
            log.update(step, [(step, 0)], grad_norm=1.5)
    assert updates(folder) == [{"step": s, "used": [[s, 0]], "grad_norm": 1.5} for s in (1, 2)]
    found = Rollouts.read(folder, base, ImportConfig(outcome=odd.encode("utf-8", "backslashreplace").decode()))
    assert len(found) == 12  # Equal responses are responses of their own.
    frame = found.frame
    assert set(frame.step) == {1, 2}
    assert set(frame.advantage) == {0.5}
    assert set(frame.problem_id) >= {"7"}
    assert {tuple(parts) for parts in frame.micro_batch} == {(0,), ()}
    assert found.sampled(0).tolist() == [True, False]
    np.testing.assert_allclose(found.table["sampler_logprobs"][0].as_py()[0], -0.5)
    form, files, _ = find_log(folder, ImportConfig())
    assert (form.name, len(files)) == ("tsae", 4)
    shutil.copy(files[0].path, tmp_path / "somebody's.parquet")
    assert find_log(tmp_path / "somebody's.parquet", ImportConfig())[0].name == "tsae"
    # Resumed after step 1, and on one process.
    again = RunLog(folder, {"trainer": "mine"}, step=1)
    assert again.generation == 1
    assert [u["step"] for u in updates(folder)] == [1]
    assert len(list((folder / "generations").iterdir())) == 2


def test_what_is_none_is_not_known(base: Path, tmp_path: Path) -> None:
    given = ("prompt", "messages", "rewards", "reward", "data", "truncated", "micro_batch", "old_logprobs")
    for folder, row in (("without", ROW), ("none", ROW | dict.fromkeys(given))):
        RunLog(tmp_path / folder, {}).add(1, [row])
        RunLog(tmp_path / folder, {}, step=1)
    without, none = (Rollouts.read(tmp_path / of, base, ImportConfig(run="run")) for of in ("without", "none"))
    assert none.table.equals(without.table)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantage": float("nan")}, "has the advantage nan, expected a finite number"),
        ({"advantage": None}, "has no advantage"),
        ({"answer": "2"}, "has 'answer', which is not a column of the log. Facts of the problem go into data"),
        ({"step": 3}, "has 'step', which is not a column"),
        ({"old_logprobs": [0.0]}, "has 1 old_logprobs for 2 response_ids"),
        ({"response_ids": ["a", "b"]}, "a value does not fit its column"),
        ({"prompt_ids": [2**40]}, "a value does not fit its column"),
    ],
)
def test_a_row_that_cannot_be_logged_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    log = RunLog(tmp_path, {})
    refuses(said, log.add, 1, [ROW, ROW | change])
    assert not (tmp_path / "generations").exists()


def test_a_log_that_is_a_link_or_damaged_is_refused(base: Path, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log", {})
    log.add(1, [ROW])
    log.update(1, [(1, 0)])
    (file,) = (tmp_path / "log" / "generations").iterdir()
    table = pq.read_table(file)
    odd = table.append_column("ref_logprobs", [[[0.5]]])
    pq.write_table(odd, file)
    refuses("ref_logprobs has 1 values for the 2 response_ids", Rollouts.read, tmp_path / "log", base)
    file.write_bytes(b"PAR1")
    refuses(r"generation-000001-rank-0\.parquet: cannot be read", RunLog, tmp_path / "log", {}, step=1)
    (tmp_path / "log" / "updates.jsonl").unlink()
    (tmp_path / "log" / "updates.jsonl").symlink_to(tmp_path / "elsewhere")
    refuses("is a link", RunLog, tmp_path / "log", {})
