"""The contract with TRL: what our override relies on. A failure here after an update of TRL means that it changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tsae
from support.builders import random_sae
from support.refusals import refuses
from support.trl_runs import MEDIUM, by_length, save_tiny, tiny_llama, train
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rl.config import CreditConfig, CurriculumConfig, ShapingConfig
from tsae.rl.credit import Credit, shape_advantages, thresholded, token_weights
from tsae.rl.curriculum import Curriculum
from tsae.rl.exporting import read_logprob, stored_logprob
from tsae.testbed.grpo import data_set, grpo_on_cpu
from tsae.testbed.tokenizer import TOKEN_IDS, make_tokenizer

if TYPE_CHECKING:  # Every process of pytest-xdist collects this file, and one runs it: TRL takes seconds to import.
    from tsae.rl.trl import FeatureCredit

pytestmark = pytest.mark.filterwarnings(
    # The libraries' own: transformers renames an option that TRL's config has, and calls itself by the old name.
    "ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"
)

GROUP, PROMPTS, WIDTH = 4, 4, 12
SITE = "blocks.0.hook_resid_post"
IDS = [problem.id for problem in MEDIUM]


def make_trainer(
    folder: Path,
    *,
    plain: bool = False,
    reward: Any = None,
    tokenizer: Any = None,
    curriculum: Curriculum | None = None,
    credit: Any = None,
    steps: int = 1,
    micro: int = GROUP * PROMPTS,
    **options: Any,
) -> Any:
    from trl import GRPOTrainer

    from tsae.rl.trl import FeatureGRPOTrainer

    kind: Any = GRPOTrainer if plain else FeatureGRPOTrainer
    extra: dict[str, Any] = {} if plain else {"credit": credit, "curriculum": curriculum}

    return kind(
        model=tiny_llama(),
        processing_class=tokenizer or make_tokenizer(),
        reward_funcs=reward or by_length,
        train_dataset=data_set(MEDIUM),
        args=grpo_on_cpu(
            folder,
            prompts=PROMPTS,
            samples=GROUP,
            max_steps=steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=GROUP * PROMPTS // micro,
            max_completion_length=WIDTH,
            learning_rate=1e-3,
            max_grad_norm=1e9,
            **options,
        ),
        **extra,
    )


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first optimiser step, all its micro-batches together."""
    found: dict[str, torch.Tensor] = {}
    step = trainer.create_optimizer().step

    def keep(*args: Any, **kwargs: Any) -> Any:
        found.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return step(*args, **kwargs)

    trainer.optimizer.step = keep
    train(trainer)
    return found


class Given:
    """Weights by place: (B, T) from a function of the width."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.seen: list[dict[str, Any]] = []

    def __call__(self, rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        self.seen.append({"rows": rows, "group_size": group_size, **batch})
        return batch["advantages"].unsqueeze(1) * self.weight(batch["completion_mask"].float())


@pytest.mark.parametrize(
    ("loss_type", "micro"),
    [
        pytest.param("grpo", GROUP * PROMPTS, marks=pytest.mark.slow),
        pytest.param("grpo", GROUP, marks=pytest.mark.slow),
        pytest.param("dapo", GROUP * PROMPTS, marks=pytest.mark.slow),
        ("dapo", GROUP),
        pytest.param("dr_grpo", GROUP * PROMPTS, marks=pytest.mark.slow),
        pytest.param("dr_grpo", GROUP, marks=pytest.mark.slow),
    ],
)
def test_uniform_weights_give_the_gradients_of_plain_grpo(tmp_path: Path, loss_type: str, micro: int) -> None:
    options: dict[str, Any] = {"loss_type": loss_type, "micro": micro}
    if loss_type == "dr_grpo":
        options["scale_rewards"] = "none"
    plain = gradients(make_trainer(tmp_path, plain=True, **options))
    ours = gradients(make_trainer(tmp_path, credit=Given(torch.ones_like), **options))
    assert any(gradient.abs().max() > 1e-4 for gradient in plain.values())
    assert plain.keys() == ours.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_gradient_accumulation_leaves_weighted_gradients_as_they_are(tmp_path: Path) -> None:
    def later(mask: torch.Tensor) -> torch.Tensor:
        return mask.cumsum(1) * mask

    whole = gradients(make_trainer(tmp_path, credit=Given(later), loss_type="dapo"))
    parts = gradients(make_trainer(tmp_path, credit=Given(later), loss_type="dapo", micro=GROUP))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # Two responses of 3 and 2 tokens; ratios are 1 where the old policy is the new one, so that a token's loss is
        # minus its advantage. Sums over the rows: -(2 * .5 + 2 * 1 + 2 * 1.5) = -6 and -(-1 * 2 + -1 * 0) = 2.
        ("grpo", (-6 / 3 + 2 / 2) / 2),
        ("dapo", (-6 + 2) / 5),
        ("dr_grpo", (-6 + 2) / (2 * WIDTH)),
    ],
)
def test_hand_made_weights_give_the_hand_computed_loss(tmp_path: Path, loss_type: str, expected: float) -> None:
    trainer = make_trainer(tmp_path, loss_type=loss_type)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    weights = torch.tensor([[0.5, 1.0, 1.5], [2.0, 0.0, 9.0]])  # at padding anything
    batch = {
        "prompt_ids": torch.tensor([[TOKEN_IDS["3"]], [TOKEN_IDS["4"]]]),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.tensor([[10, 11, 12], [13, 14, TOKEN_IDS["<pad>"]]]),
        "completion_mask": mask,
        "advantages": torch.tensor([2.0, -1.0]).unsqueeze(1) * weights,
        "num_items_in_batch": mask.sum(),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    assert trainer._compute_loss(trainer.model, batch).item() == pytest.approx(expected, abs=1e-6)


def test_rules_see_whole_groups_with_rows_and_advantages_that_belong_together(tmp_path: Path) -> None:
    rule = Given(torch.ones_like)
    gradients(make_trainer(tmp_path, credit=rule, micro=GROUP))
    (seen,) = rule.seen  # once a generation batch, however it is split
    assert seen["group_size"] == GROUP
    assert len(seen["rows"]) == len(seen["advantages"]) == GROUP * PROMPTS
    ids = [row["problem_id"] for row in seen["rows"]]
    assert all(len(set(ids[start : start + GROUP])) == 1 for start in range(0, len(ids), GROUP))
    assert seen["advantages"].shape == (GROUP * PROMPTS,)
    torch.testing.assert_close(seen["advantages"].view(-1, GROUP).sum(1), torch.zeros(PROMPTS), atol=1e-5, rtol=0)
    tokenizer = make_tokenizer()
    for row, prompt in zip(seen["rows"], seen["prompt_ids"], strict=True):
        assert tokenizer.decode(prompt, skip_special_tokens=True) == row["prompt"]


def make_credit(sae: tsae.TemporalSAE) -> Credit:
    """One feature is good, another bad in the state before the token 5."""
    feature = torch.zeros(sae.config.d_sae)
    feature[1] = 0.5
    info = {
        "sae": {"weights": sae.fingerprint, "site": SITE, "d_model": 32, "d_sae": sae.config.d_sae},
        "reader": "base",
        "n_learned": 9,
        "n_held_out": 6,
        "significant": True,
        "note": "",
        "difference": 1.0,
        "low": 0.5,
        "high": 1.5,
        "p": 0.01,
    }
    keys = torch.tensor([5 * sae.config.d_sae + 2])
    return Credit(CreditConfig(), feature, keys, torch.tensor([-3.0]), torch.zeros(20), 0.0, 1.0, info)


def credit_rule(*args: Any, **options: Any) -> FeatureCredit:
    from tsae.rl.trl import FeatureCredit

    return FeatureCredit(*args, **options)


def make_reference(folder: Path) -> tsae.Checkpoint:
    return tsae.Checkpoint("base", str(save_tiny(folder, seed=1)))


def test_scores_are_read_from_the_reference_in_the_state_before_each_token(tmp_path: Path) -> None:
    reference, sae = make_reference(tmp_path / "base"), random_sae(32, site=SITE, d_sae=16)
    rule = credit_rule(reference, sae, make_credit(sae), ShapingConfig(threshold=0.0))
    given = Given(torch.ones_like)
    gradients(make_trainer(tmp_path, credit=given))
    batch = given.seen[0]
    scores = rule.scores(batch)
    # The same by one unpadded forward pass a response, with Hugging Face's own hidden states.
    model = reference.load_model()
    for number in range(GROUP * PROMPTS):
        prompt = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
        response = batch["completion_ids"][number][batch["completion_mask"][number].bool()]
        with torch.no_grad():
            hidden: list[torch.Tensor] = []
            handle = model.model.layers[0].register_forward_hook(lambda _m, _i, out, kept=hidden: kept.append(out))
            probability = model(torch.cat([prompt, response])[None]).logits[0].softmax(-1)
            handle.remove()
        codes = sae.encode((hidden[0][0] if isinstance(hidden[0], tuple) else hidden[0])[0])
        for place, token in enumerate(response.tolist()):
            state = codes[len(prompt) - 1 + place]
            expected = (-3.0 * state[2] if token == 5 else 0.0) - 0.5 * state[1]
            expected = expected * (1 - probability[len(prompt) - 1 + place, token])
            assert scores[number, place].item() == pytest.approx(float(expected), abs=1e-4)
    advantages = rule(batch["rows"], batch, GROUP)
    assert advantages.shape == batch["completion_ids"].shape


def accuracy_reward(completions: list[str], **_: Any) -> list[float]:
    """Right every fourth time."""
    return [float(number % GROUP == 0) for number in range(len(completions))]


def format_reward(completions: list[str], **_: Any) -> list[float]:
    """Everything is well-formed."""
    return [1.0] * len(completions)


def style(completions: list[str], **_: Any) -> list[float]:
    """Nothing has any."""
    return [0.0] * len(completions)


def test_what_tools_wrote_earns_no_credit() -> None:
    """TRL's tool_mask is 0 there: advantages are those of the same tokens without what stands between."""
    from tsae.rl.trl import FeatureCredit

    scores = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    rule = FeatureCredit.__new__(FeatureCredit)
    rule.shaping, rule.applies = ShapingConfig(plausibility=True), None
    rule.scores = lambda batch: scores[:, : batch["completion_mask"].shape[1]]  # type: ignore[method-assign]
    tools = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 1, 1]])
    batch = {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": torch.ones(2, 5, dtype=torch.long)}
    found = rule([], {**batch, "tool_mask": tools}, 2)
    assert not found[tools == 0].any()
    scores = scores[tools == 1].reshape(2, 3)
    expected = rule([], {**batch, "completion_mask": torch.ones(2, 3, dtype=torch.long)}, 2)
    torch.testing.assert_close(found[tools == 1].reshape(2, 3), expected)


def test_a_curriculum_counts_the_reward_that_says_what_is_right(tmp_path: Path) -> None:

    def successes(rewards: list[Any], **config: Any) -> set[int]:
        curriculum = Curriculum(IDS, GROUP, CurriculumConfig(**config))
        gradients(make_trainer(tmp_path, reward=rewards, curriculum=curriculum))
        return set(curriculum.history().successes)

    assert successes([format_reward, accuracy_reward]) == {1}  # by its name
    assert successes([format_reward, style], outcome="style") == {0}
    with pytest.raises(TsaeError, match=r"has the rewards format_reward, style, and .*CurriculumConfig\(outcome="):
        successes([format_reward, style])
    with pytest.raises(TsaeError, match="has no reward 'accuracy'; there are format_reward, style"):
        successes([format_reward, style], outcome="accuracy")


def test_a_response_of_which_nothing_says_whether_it_is_right_is_refused(tmp_path: Path) -> None:
    def accuracy(completions: list[str], **_: Any) -> list[float | None]:
        return [None] * len(completions)

    trainer = make_trainer(tmp_path, reward=[accuracy, format_reward], curriculum=Curriculum(IDS, GROUP))
    refuses("accuracy gives a completion no finite reward", trainer.train)


def test_training_with_credit_and_curriculum_runs_and_is_logged(tmp_path: Path) -> None:
    reference, sae = make_reference(tmp_path / "base"), random_sae(32, site=SITE, d_sae=16)
    curriculum = Curriculum(IDS, GROUP, CurriculumConfig(explore=0.5))
    credit = credit_rule(reference, sae, make_credit(sae), ShapingConfig(plausibility=True, dense=0.1))
    gradients(make_trainer(tmp_path, credit=credit, curriculum=curriculum, steps=3))
    history = curriculum.history()
    assert len(history) == 3 * PROMPTS
    assert list(history.groupby("step").size()) == [PROMPTS] * 3
    assert (history.n == GROUP).all()
    assert set(history.problem_id) <= set(IDS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the testbed's base sampled, with log-probabilities; an SAE, and credit with entries of all kinds."""
    folder = tmp_path_factory.mktemp("exported")
    base = tsae.CheckpointSeries((tsae.testbed.series().base,))
    problems = tsae.testbed.generate_problems("medium", 6, 0, "train")
    sampling = tsae.SamplingConfig(n_samples=GROUP, max_new_tokens=48, seed=0)
    rollouts = tsae.sample(base.base, problems, sampling, verify=tsae.testbed.verify, progress=False)
    rollouts = rollouts.with_advantages()
    assert rollouts.frame.advantage.ne(0).any()
    reading = tsae.CaptureConfig(token_statistics=True, batch_tokens=512)
    site = "blocks.2.hook_resid_post"
    store = tsae.capture(base, rollouts, [site], to=folder / "acts", config=reading, progress=False)
    sae = random_sae(store.d_model(site), site=site, d_sae=32)
    sae.save(folder / "sae")
    tsae.encode(sae, store, to=folder / "features", progress=False)
    generator = torch.Generator().manual_seed(1)
    given = make_credit(sae)
    tables: dict[str, Any] = {
        "feature": 0.1 * torch.randn(32, generator=generator),
        "pair_keys": torch.arange(20 * 32),
        "pair_values": 0.1 * torch.randn(20 * 32, generator=generator),
        "token": torch.randn(20, generator=generator),
    }
    dataclasses.replace(given, **tables).save(folder / "credit")
    return folder


@pytest.mark.parametrize("source", ["store", "series"])
def test_the_export_is_what_the_trainer_does_with_the_same_trajectories(
    source: str, exported: Path, tmp_path: Path
) -> None:
    base = tsae.testbed.series().base
    probabilities = {"store": exported / "acts", "series": base.path}[source]
    words = ["credit", "weights", f"--{source}", str(probabilities), "--to", str(tmp_path / "w.parquet")]
    words += [word for name in ("credit", "features") for word in (f"--{name}", str(exported / name))]
    main([*words, "--plausibility", "--dense", "0.1"])
    rows = pq.read_table(tmp_path / "w.parquet").to_pandas().set_index("trajectory").sort_index()

    rollouts = tsae.FeatureTable.load(exported / "features").rollouts
    frame = rollouts.frame
    texts = [[torch.tensor(ids) for ids in rollouts.tokens(row)] for row in range(len(frame))]
    prompts, responses = zip(*texts, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "prompt_ids": pad(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad(responses, batch_first=True),
        "completion_mask": pad([torch.ones_like(ids) for ids in responses], batch_first=True),
        "advantages": torch.tensor(frame.advantage.to_numpy()).float(),
    }
    rule = credit_rule(base, exported / "sae", exported / "credit", ShapingConfig(plausibility=True, dense=0.1))
    scores, advantages = rule.scores(batch), rule([{}] * len(frame), batch, GROUP)
    weights = token_weights(
        thresholded(scores, rule.shaping), batch["advantages"], batch["completion_mask"], rule.shaping
    )
    # Scores that do something, and a factor that does.
    assert float(weights.max()) > 2
    assert float(scores.abs().max()) > 1
    plain = dataclasses.replace(rule.shaping, plausibility=False, dense=0.0)
    assert not torch.allclose(advantages, shape_advantages(
        scores, batch["advantages"], batch["completion_mask"], torch.arange(len(frame)) // GROUP, plain
    ))  # fmt: skip
    for row, ids in enumerate(responses):
        for name, values in (("scores", scores), ("weights", weights), ("advantages", advantages)):
            np.testing.assert_allclose(rows[f"token_{name}"][row], values[row, : len(ids)], atol=1e-5, rtol=1e-5)


def test_probabilities_of_something_else_are_refused(exported: Path, tmp_path: Path) -> None:
    words = ["credit", "weights", "--to", str(tmp_path / "w.parquet")]
    words += [word for name in ("credit", "features") for word in (f"--{name}", str(exported / name))]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    features = tsae.FeatureTable.load(exported / "features")
    store = tsae.ActivationStore(exported / "acts")
    fewer = dataclasses.replace(features, rollouts=features.rollouts.select(range(4)))
    refuses("holds other trajectories than", stored_logprob, fewer, "base", store)
    narrow = make_reference(tmp_path / "base")
    features.info["sae"]["site"] = SITE
    refuses("the reference has d_model 32, the SAE expects 96", read_logprob, features, narrow)
    base = tsae.CheckpointSeries((tsae.testbed.series().base,))
    silent = tsae.capture(base, store.rollouts, [store.sites[0]], to=tmp_path / "acts", progress=False)
    refuses("holds no log-probabilities", stored_logprob, features, "base", silent)


def test_what_cannot_work_is_said_before_training(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from tsae.rl.trl import check_arguments

    reference, sae = make_reference(tmp_path / "base"), random_sae(32, site=SITE, d_sae=16)
    credit = make_credit(sae)
    other = random_sae(32, site=SITE, d_sae=16)
    other.b_enc.data += 1
    refuses("the credit was learned on features of the SAE", credit_rule, reference, other, credit)
    wide = random_sae(48, site=SITE, d_sae=16)
    refuses("the reference has d_model 32, the SAE expects 48", lambda: credit_rule(reference, wide, make_credit(wide)))
    with pytest.raises(TsaeError, match="loss_type='cispo' takes one advantage a trajectory"):
        make_trainer(tmp_path, credit=Given(torch.ones_like), loss_type="cispo")
    endless, settings = SimpleNamespace(eos_token_id=None), GRPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    refuses("the tokenizer has no end-of-sequence token", check_arguments, settings, endless, None)
    with pytest.raises(TsaeError, match="train_dataset: has 12 problems in 12 rows, the curriculum 1"):
        make_trainer(tmp_path, curriculum=Curriculum(["chain:1+1"], GROUP))


@pytest.mark.parametrize(("value", "others"), [("nan", []), ("inf", []), ("inf", [format_reward])])
def test_rewards_that_are_not_finite_are_refused_before_the_first_step(
    tmp_path: Path, value: str, others: list[Any]
) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        return [float(value) for _ in completions]

    trainer = make_trainer(tmp_path, reward=[broken, *others])
    refuses("has no finite reward", trainer.train)
    assert trainer.state.global_step == 0
