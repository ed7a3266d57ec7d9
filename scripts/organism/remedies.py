"""Cures for training on problems that are too hard: the arms that notebook 6 trains.

Every arm is GRPO from the shipped base on hard chains (10 to 14 operations). *oracle*: credit from the ground-truth
annotation. *guided*: token weights from features, of mean 1 (`tsae.rl.credit`); *shuffled*: the same with the features'
entries shuffled. *reformulation*: half of the problems are backward reformulations of 3 to 9 operations. With
*adaptive*: reformulations of 3 to 13 operations and hard problems, drawn by the current pass rate; credit is for those
of at most 9 operations, on which it was learned. The words of an arm are joined by "+", as in reformulation+guided.

The same seed gives the same run on the same machine. `scripts/run_remedies.py` of commit 6b406c1b has all arms of
docs/remedies.md.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import LlamaForCausalLM

import tsae
from organism.measuring import measure
from tsae.base.files import write_json
from tsae.rl.config import CreditConfig, CurriculumConfig, ShapingConfig
from tsae.rl.credit import Credit
from tsae.rl.credit_fitting import fit_credit
from tsae.rl.curriculum import Curriculum
from tsae.rl.trl import FeatureCredit, FeatureGRPOTrainer
from tsae.rollouts.problems import Problem
from tsae.testbed.annotate import annotate
from tsae.testbed.backward import reformulate_chains
from tsae.testbed.chains import generate_problems, parse_prompt
from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS, VOCABULARY

SITE = "blocks.2.hook_resid_post"
REFERENCE_LEVELS = {(1, 3): 100, (4, 6): 400, (7, 9): 400}
"""Operations, and problems of the reference's rollouts, each sampled 16 times."""
LONGEST = max(most for _, most in REFERENCE_LEVELS)
PER_LENGTH = 120
"""Problems of each number of operations, of the adaptive arms."""
GUESSED = 0.1
"""Of ten digits."""
PROMPTS, SAMPLES = 8, 16
MEASURED = ("accuracy", "direct", "skipped", "flawless", "length")


def prepare(to: Path, *, quick: bool = False) -> None:
    """The reference's rollouts, its SAE and the credit learned from them, below one folder."""
    if (to / "credit" / "credit.json").is_file():
        return
    base = tsae.testbed.series().base
    file = to / "rollouts.parquet"
    if not file.is_file():
        problems = [
            problem
            for ops, n in REFERENCE_LEVELS.items()
            for problem in generate_problems(ops, n // 20 if quick else n, seed=1, split="train")
        ]
        sampling = tsae.SamplingConfig(n_samples=16, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=512, seed=0)
        to.mkdir(parents=True, exist_ok=True)
        tsae.sample(base, problems, sampling, verify=tsae.testbed.verify).write(file)
    store = tsae.capture(tsae.CheckpointSeries((base,)), tsae.Rollouts.read(file), [SITE], to=to / "activations")
    training = tsae.TrainingConfig(tokens=20_000 if quick else 1_500_000, batch_tokens=1024)
    sae = tsae.train(store, tsae.SAEConfig(d_sae=256, k=8), to=to / "sae", training=training)
    fit_credit(tsae.encode(sae, store, to=to / "features"), CreditConfig()).save(to / "credit")


def train(out: Path, arms: Sequence[str], seeds: int, *, steps: int, responses: int) -> None:
    """Train so many seeds of each arm, and measure them at the end by so many responses to problems of each band.

    Results lie beside the "reference" of `prepare`. What is there is not made again. Two runs go on at a time, each in
    a process of its own with one thread.
    """
    runs = [(arm, seed) for seed in range(seeds) for arm in arms if not result_file(out, arm, seed, steps).is_file()]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(run, arm, seed, out, steps, responses) for arm, seed in runs]:
            done.result()


def result_file(out: Path, arm: str, seed: int, steps: int) -> Path:
    """Such as guided-0-80.json."""
    return out / f"{arm}-{seed}-{steps}.json"


def run(arm: str, seed: int, out: Path, steps: int, responses: int) -> None:
    """One run: train, measure, write the result, the model and what an adaptive arm drew."""
    torch.set_num_threads(1)
    problems = problems_of(arm, steps * PROMPTS, seed)
    curriculum = None
    if "adaptive" in arm:
        levels = {problem.id: f"{n_ops_of(problem.prompt):02d} operations" for problem in problems}
        curriculum = Curriculum(list(levels), SAMPLES, CurriculumConfig(seed=seed, guess=GUESSED), levels=levels)
    trainer = FeatureGRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(tsae.testbed.series().base.path, dtype="float32"),
        processing_class=tsae.testbed.make_tokenizer(),
        reward_funcs=right_answers,
        train_dataset=data_set(problems),
        credit=credit_of(arm, out / "reference", seed),
        curriculum=curriculum,
        args=grpo_on_cpu(
            out / "trainer", prompts=PROMPTS, samples=SAMPLES, seed=seed, max_steps=steps, temperature=1.0,
            learning_rate=1e-4, lr_scheduler_type="constant",
        ),
    )  # fmt: skip
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train()
    model = trainer.model.eval()
    model.config.use_cache = True  # the trainer switched it off; a checkpoint is for sampling, too
    file = result_file(out, arm, seed, steps)
    for part in (model, tsae.testbed.make_tokenizer()):
        part.save_pretrained(out / "checkpoints" / file.stem)
    if curriculum is not None:
        curriculum.history().to_parquet(file.with_suffix(".parquet"))
    measured = {}
    for level in tsae.testbed.LEVELS:
        asked = generate_problems(level, min(responses, 300) if level == "easy" else responses, 0)
        found = measure("run", model, tsae.testbed.make_tokenizer(), asked, responses, 0)
        measured[level] = {name: getattr(found, name).value for name in MEASURED}
    write_json(file, {"arm": arm, "seed": seed, "measured": measured})


def problems_of(arm: str, n: int, seed: int) -> list[Problem]:
    """The training problems of an arm."""
    rng = random.Random(seed)
    hard = generate_problems("hard", 4 * n if "adaptive" in arm else n, seed, "train")
    if not arm.startswith("reformulation"):
        return hard
    longest = 13 if "adaptive" in arm else LONGEST
    made = [item.problem for item in reformulate_chains(hard, kind="backward", n_ops=(3, longest))]
    if "adaptive" not in arm:
        return [*rng.sample(hard, n // 2), *rng.sample(made, n - n // 2)]
    by_length: dict[int, list[Problem]] = defaultdict(list)
    for problem in rng.sample([*made, *hard], len(made) + len(hard)):
        by_length[n_ops_of(problem.prompt)].append(problem)
    return [problem for length in sorted(by_length) for problem in by_length[length][:PER_LENGTH]]


def n_ops_of(prompt: str) -> int:
    return parse_prompt(prompt).n_ops


def credit_of(arm: str, reference: Path, seed: int) -> Any:
    """The advantage rule of an arm, or None."""
    if arm == "oracle":
        return oracle
    if "guided" not in arm and "shuffled" not in arm:
        return None
    credit = Credit.load(reference / "credit")
    credit = credit.shuffled(seed) if "shuffled" in arm else credit
    applies = (lambda row: n_ops_of(row["prompt"]) <= LONGEST) if "adaptive" in arm else None
    shaping = ShapingConfig(strength=2.0)
    return FeatureCredit(tsae.testbed.series().base, reference / "sae", credit, shaping, applies=applies)


def oracle(rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """Ground-truth credit: successes are credited up to the first wrong token, failures blamed on that token alone.

    A marker that comes before all steps are written counts as wrong: a direct answer earns nothing and is blamed.
    """
    weights = torch.zeros(batch["completion_ids"].shape)
    for number, row in enumerate(rows):
        n = int(batch["completion_mask"][number].sum())
        tokens = [VOCABULARY[token] for token in batch["completion_ids"][number, :n].tolist()]
        written, wrong = 0, None
        for place, label in enumerate(annotate(row["prompt"], tokens)):
            written += label.role == "result"
            early = label.role == "answer_marker" and written < n_ops_of(row["prompt"])
            if label.correct is False or early:
                wrong = place
                break
        if batch["advantages"][number] > 0:
            weights[number, : n if wrong is None else wrong] = 1
        elif wrong is not None:
            weights[number, wrong] = 1
    return batch["advantages"].unsqueeze(1) * weights


def results(out: Path, arms: Sequence[str], steps: int) -> pd.DataFrame:
    """What finished runs measured: arm, seed, band, and a column a measure."""
    files = [file for arm in arms for file in sorted(out.glob(f"{arm}-[0-9]*-{steps}.json"))]
    found = [json.loads(file.read_text()) for file in files]
    rows = [
        {"arm": r["arm"], "seed": r["seed"], "band": band, **values}
        for r in found
        for band, values in r["measured"].items()
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "band", *MEASURED])
