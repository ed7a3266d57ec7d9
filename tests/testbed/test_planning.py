"""The task that has an order to choose: its ground truth on hand-worked responses, and what its text plants."""

import json
import random
from pathlib import Path

import claims_study
import numpy as np
import pytest
import torch
from organism import planning
from organism.arms import Arm, Batch, run_arm
from organism.claims import JUDGES, Records
from organism.corpus import Document
from organism.pretraining import ModelConfig, llama_config
from transformers import LlamaForCausalLM

from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem
from tsae.testbed.chains import parse_prompt
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS, MAX_TOKENS, TOKEN_IDS, split_tokens
from tsae.testbed.verifier import verify


def judged(prompt: str, response: str) -> list[tuple[bool | None, bool | None]]:
    """(plan, result) of every step."""
    labels = planning.annotate(prompt, split_tokens(response))
    assert len(labels) == len(split_tokens(response))
    return [(labels[i - 2].correct, label.correct) for i, label in enumerate(labels) if label.role == "execution"]


@pytest.mark.parametrize(
    ("prompt", "value"), [("3+5*8+2*4?", 1), ("1+2*3?", 7), ("9*9+9*9+9?", 1), ("2*3+4*5*6?", 6), ("1+1+1+1*0?", 3)]
)
def test_precedence(prompt: str, value: int) -> None:
    assert planning.evaluate(parse_prompt(prompt)) == value


YES, SLIP, BAD = (True, True), (True, False), (False, True)


@pytest.mark.parametrize(
    ("prompt", "response", "steps"),
    [
        # The products in both orders, and a sum as soon as no product stands beside it.
        ("3+5*8+2*4?", "5*8=0;2*4=8;3+0=3;3+8=1;#1<eos>", [YES] * 4),
        ("3+5*8+2*4?", "2*4=8;5*8=0;0+8=8;3+8=1;#1<eos>", [YES] * 4),
        ("3+5*8+2*4?", "5*8=0;3+0=3;2*4=8;3+8=1;#1<eos>", [YES] * 4),
        ("1+2+3*4?", "1+2=3;3*4=2;3+2=5;#5<eos>", [YES] * 3),
        # From left to right: what remains of it is 8*8+2*4, then 4+2*4, then 6*4.
        ("3+5*8+2*4?", "3+5=8;8*8=4;4+2=6;6*4=4;#4<eos>", [BAD, YES, BAD, YES]),
        # A slip is carried on, and its right result is then not there.
        ("3+5*8+2*4?", "5*8=1;2*4=8;3+1=4;4+8=2;#2<eos>", [SLIP, YES, YES, YES]),
        ("3+5*8+2*4?", "5*8=1;2*4=8;3+0=3;3+8=1;#1<eos>", [SLIP, YES, BAD, YES]),
        # The same operation twice.
        ("1*2+4+1*2?", "1*2=2;2+4=6;1*2=2;6+2=8;#8<eos>", [YES] * 4),
        ("1*2+4+1*2?", "1*2=2;4+2=6;1*2=2;2+6=8;#8<eos>", [YES] * 4),
        ("1*2+4+1*2?", "1*2=2;2+4=6;4+2=6;#6<eos>", [YES, YES, BAD]),
        # After 2*3, either 6+2*3*4 or 2*3+6*4 remains: 6*4 decides which.
        ("2*3+2*3*4?", "2*3=6;6*4=4;2*3=6;4+6=0;#0<eos>", [YES] * 4),
        ("2*3+2*3*4?", "2*3=6;3*4=2;2*2=4;6+4=0;#0<eos>", [YES] * 4),
        # 2+2 may take the two that stand alone, and not a factor.
        ("2+2+2*3?", "2+2=4;2*3=6;4+6=0;#0<eos>", [YES] * 3),
        ("2+2*3+1?", "2+2=4;#4<eos>", [BAD]),
        # Sums and products commute. 5*2 would need factors of one product, and 4+3 two sums.
        ("9+4+2*5*7?", "7*2=4;9+4=3;5*4=0;0+3=3;#3<eos>", [YES] * 4),
        ("2*5+2*3+4?", "5*2=0;5*3=5;0+4=4;#4<eos>", [YES, BAD, YES]),
        ("2*5+7*3+4?", "5*7=5;2*5=0;3*0=0;0+4=4;#4<eos>", [BAD, YES, YES, YES]),
        # A digit counts as often as it remains. Then a step too many.
        ("1+2*3+4?", "2*3=6;2*3=6;1+6=7;6+6=2;#7<eos>", [YES, BAD, YES, BAD]),
        ("1+2*3+4?", "2*3=6;1+6=7;7+4=1;1+0=1;#1<eos>", [YES, YES, YES, BAD]),
    ],
)
def test_steps_are_judged(prompt: str, response: str, steps: list[tuple[bool, bool]]) -> None:
    assert judged(prompt, response) == steps


@pytest.mark.parametrize(
    "response",
    ["", "<eos>", "#1<eos>", ";;#", "1+2", "1-2=9;", "1+2=3", "2*3=6=6;", "<pad>+2=3;", "=" * 40, "é;2+?=1;"],
)
def test_what_is_no_step_is_not_judged(response: str) -> None:
    labels = planning.annotate("1+2*3+4?", split_tokens(response))
    assert {(label.role, label.correct, label.step) for label in labels} <= {("other", None, None)}
    assert len(labels) == len(split_tokens(response))


def test_a_broken_part_leaves_the_steps_around_it() -> None:
    labels = planning.annotate("1+2*3+4?", split_tokens("2*3=6;1++6;1+6=7;"))
    roles = [label.role for label in labels]
    step = ["planning"] * 3 + ["other", "execution", "other"]
    assert roles == step + ["other"] * 5 + step
    assert [label.step for label in labels if label.role == "execution"] == [0, 1]


def test_a_prompt_that_is_no_expression_is_refused() -> None:
    with pytest.raises(TsaeError, match="not an arithmetic chain"):
        planning.annotate("1+?", ["1"])


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(0)
    return [planning.sample_document(rng) for _ in range(4000)]


def test_the_text_plants_its_shares(documents: list[Document]) -> None:
    steps = [judged(document.prompt, document.response) for document in documents]
    planned = np.mean([all(plan for plan, _ in own) for own in steps])
    slips = [not result for own in steps for _, result in own]
    for share, expected, n in (
        (planned, planning.PLANNED, len(steps)),
        (np.mean(slips), planning.SLIP_RATE, len(slips)),
    ):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / n) ** 0.5
    assert all(len(own) == parse_prompt(d.prompt).n_ops for own, d in zip(steps, documents, strict=True))
    assert max(len(d.prompt) + len(d.response) for d in documents) + 2 <= MAX_TOKENS
    assert max(len(d.response) for d in documents) < MAX_RESPONSE_TOKENS


def test_planned_scratchpads_without_a_slip_are_right(documents: list[Document]) -> None:
    flawless = 0
    for document in documents:
        answer = str(planning.evaluate(parse_prompt(document.prompt)))
        if all(step == YES for step in judged(document.prompt, document.response)):
            flawless += 1
            assert verify(document.response, answer)
    assert flawless > 1000


@pytest.mark.parametrize(
    ("prompt", "places"), [("1+2*3+4*5?", [1, 3]), ("1+6+4*5?", [0, 2]), ("2*3*4+1+1?", [0, 1, 3]), ("1+1?", [0])]
)
def test_what_may_come_next(prompt: str, places: list[int]) -> None:
    assert planning.allowed(parse_prompt(prompt)) == places


def test_problems_are_the_same_each_time_and_apart() -> None:
    ours = planning.generate_problems((3, 5), 200, 1, "train")
    assert ours == planning.generate_problems((3, 5), 200, 1, "train")
    assert len({problem.id for problem in ours}) == 200
    assert not {problem.id for problem in ours} & {problem.id for problem in planning.generate_problems((3, 5), 200, 1)}
    assert {parse_prompt(problem.prompt).n_ops for problem in ours} == {3, 4, 5}


def batch_of(*texts: str) -> Batch:
    """Responses to 1+2*3+4, with the entropy i / 10 at token i."""
    responses = [[TOKEN_IDS[token] for token in split_tokens(text)] for text in texts]
    right = np.array([verify(text, "1") for text in texts])
    entropy = [np.arange(len(ids)) / 10 for ids in responses]
    return Batch([Problem("p", "1+2*3+4?", "1")] * len(texts), responses, right.astype(float), right, entropy)


def test_behaviour_by_hand() -> None:
    found = planning.behaviour(batch_of("2*3=6;1+6=7;7+4=1;#1<eos>", "1+2=4;4*3=2;2+4=6;#6<eos>"))
    assert found == pytest.approx(
        {
            "accuracy": 0.5,
            "reward": 0.5,
            "plan_right": 5 / 6,
            "result_right": 5 / 6,
            "planned": 0.5,
            # Steps begin at the tokens 0, 6 and 12: (0 + 1 + 2) / 10, (6 + 7 + 8) / 10, (12 + 13 + 14) / 10.
            "entropy/planning": 2.1,
            "entropy/execution": 1.0,
            "length": 21,
        }
    )


def test_behaviour_without_a_step() -> None:
    found = planning.behaviour(batch_of("#1<eos>", "#2<eos>"))
    assert (found["accuracy"], found["planned"]) == (0.5, 0.0)
    assert np.isnan([found["plan_right"], found["entropy/planning"], found["entropy/execution"]]).all()


def test_an_arm_trains_on_the_task() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(ModelConfig(1, 16, 2, 16))).eval()
    before, asked = model.get_input_embeddings().weight.detach().clone(), list[Problem]()

    def after(number: int, model: LlamaForCausalLM, batch: Batch) -> None:
        asked.extend(batch.problems)
        assert [len(values) for values in batch.entropy] == [len(ids) for ids in batch.responses]

    run_arm(Arm(((3, 5),), reward="random", steps=1), 0, model, model, after, generate=planning.generate_problems)
    assert len({problem.id for problem in asked}) == 8
    assert all(problem.id.startswith("planning:") for problem in asked)
    assert not torch.equal(model.get_input_embeddings().weight, before)


def test_an_interrupted_study_asks_for_no_base_that_its_arms_do_not_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All records are there, so nothing is run; without them the study would train for minutes."""
    for name in ("planning-base-0", "planning-0", "planning-1"):
        arm, seed = name.rsplit("-", 1)
        (tmp_path / f"{name}.json").write_text(json.dumps({"arm": arm, "seed": int(seed)}))
    to = tmp_path / "runs.jsonl"
    arguments = ["--out", str(tmp_path), "--arms", "planning", "--seeds", "2", "--gather", str(to)]
    assert claims_study.main(arguments) == 0
    found = [json.loads(line) for line in to.read_text().splitlines()]
    assert [(record["arm"], record["seed"]) for record in found] == [
        ("planning-base", 0),
        ("planning", 0),
        ("planning", 1),
    ]


def run_of(seed: int, plans: list[float], results: list[float], planning: list[float], execution: list[float]) -> dict:
    names = ("plan_right", "result_right", "entropy/planning", "entropy/execution")
    levels = [dict(zip(names, values, strict=True)) for values in zip(plans, results, planning, execution, strict=True)]
    measured = {str(5 * i): {"planning": level} for i, level in enumerate(levels)}
    return {"arm": "planning", "seed": seed, "measured": measured}


def test_the_claim_is_judged() -> None:
    """Half of the way: results after 2.5 steps, plans after 7.5."""
    runs = [
        run_of(seed, [0.5, 0.5, 0.9], [0.8, 1.0, 1.0], [0.5, 0.5 + rise, 0.4], [0.3, 0.2, 0.1])
        for seed, rise in enumerate((0.2, 0.22, 0.24))
    ]
    judgement = JUDGES["s"](Records.of(runs))
    assert [part.values[0] for part in judgement.parts] == pytest.approx([5.0, 0.2, 0.2])
    assert judgement.verdict == "reproduced"
    fallen = [run_of(s, [0.5, 0.9, 0.9], [0.8, 0.8, 1.0], [0.5, 0.4, 0.3 + s / 100], [0.3] * 3) for s in range(3)]
    judgement = JUDGES["s"](Records.of(fallen))
    assert [part.holds for part in judgement.parts] == [False, False, None]
    assert judgement.verdict == "not reproduced"
