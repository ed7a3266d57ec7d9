"""Cures for training on problems that are too hard, compared on the arithmetic testbed.

Every arm is GRPO from the shipped base, by default on hard chains only (10 to 14 operations):

    plain                  GRPO
    oracle                 credit from the ground-truth annotation: what better credit could reach
    guided                 token weights from features, mean 1 (tsae.rl.credit, 1)
    shuffled               as guided, features' entries shuffled: the control
    surprisal              as guided, but a token scores the worse, the less probable the base finds it: no features
    reformulation          half of the problems are backward reformulations of 3 to 9 operations
    reformulation+guided   the two together
    both                   guided and plausibility
    plausibility           successes that look like failures earn less (tsae.rl.credit, 2)
    dense                  guided, and the scores as dense reward (tsae.rl.credit, 3)
    adaptive               plain, problems of all bands drawn by the current pass rate
    kl                     plain, with a KL penalty against the base
    reformulation+shuffled the control of reformulation+guided
    reformulation+both     reformulation, guided and plausibility
    reformulation+adaptive, reformulation+guided+adaptive, reformulation+shuffled+adaptive
                           problems and their backward reformulations of 3 to 13 operations, drawn by the current pass
                           rate; credit on those of at most 9 operations, as it was learned on

Stages: *prepare* samples the base on chains of 1 to 9 operations, trains a T-SAE on what it computed, and learns credit
from these rollouts' rewards. Then every arm and seed is a run of its own, in a process of its own; finished ones are
skipped, so that an interrupted series goes on; the trained model is kept under checkpoints/, and what an adaptive arm
drew in a Parquet file. Last the table of all finished runs is printed and, with --doc, written between two marker lines
of a Markdown file. The same seed gives the same run on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from organism.pages import fill, markdown

from tsae.base.files import write_json
from tsae.errors import TsaeError
from tsae.rl.config import CurriculumConfig, ShapingConfig

if TYPE_CHECKING:
    import torch

    from tsae.rollouts.problems import Problem

SHAPINGS = {
    "guided": ShapingConfig(strength=2.0),
    "both": ShapingConfig(strength=2.0, plausibility=True),
    "plausibility": ShapingConfig(strength=0.0, plausibility=True),
    "dense": ShapingConfig(strength=2.0, dense=0.3),
}
"""Of the arms with credit from features; "shuffled" and "surprisal" have that of "guided"."""

SLIP_SCORE = -4.6
"""Mean score of a wrong result (docs/remedies.md), which "surprisal" gives a token that has probability 0."""

ARMS = (
    "plain",
    "oracle",
    "guided",
    "shuffled",
    "surprisal",
    "reformulation",
    "reformulation+guided",
    "both",
    "plausibility",
    "dense",
    "adaptive",
    "kl",
    "reformulation+shuffled",
    "reformulation+both",
    "reformulation+adaptive",
    "reformulation+guided+adaptive",
    "reformulation+shuffled+adaptive",
)
"""In the order in which they are run."""

SITE = "blocks.2.hook_resid_post"
REFERENCE_LEVELS = {(1, 3): 100, (4, 6): 400, (7, 9): 400}
"""Operations, and problems of the reference's rollouts, each sampled 16 times."""
LONGEST = max(most for _, most in REFERENCE_LEVELS)
BANDS = {"easy": (1, 1), "2-3 ops": (2, 3), "medium": (4, 6), "7-9 ops": (7, 9), "hard": (10, 14)}
"""Of the arm "adaptive"."""
PER_LENGTH = 120
"""Problems of each number of operations, of the other adaptive arms."""
GUESSED = 0.1
"""Of ten digits."""
PROMPTS, SAMPLES = 8, 16
MEASURED = ("accuracy", "direct", "skipped", "flawless", "length")


def main(arguments: list[str] | None = None) -> int:
    """Prepare, run, tabulate; 1 where the user has something to put right."""
    options = parse(arguments)
    # Before torch is loaded: OpenMP threads that spin while they wait starve each other on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if options.one is not None:
            arm, seed = options.one
            run(arm, int(seed), options)
            return 0
        if not options.table_only:
            prepare(options.out / "reference", quick=options.quick)
            run_all(options)
        table = tabulate(options.out, options.steps)
        print(table)
        if options.doc is not None:
            fill(options.doc, "remedies", table)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; made if missing")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm (default: 3)")
    parser.add_argument("--steps", type=int, default=80, help="optimiser steps per run (default: 80)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    parser.add_argument("--responses", type=int, default=500, help="per band when measuring (default: 500)")
    parser.add_argument("--doc", type=Path, help="Markdown file whose table 'remedies' to replace")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute or two: nothing is learned")
    parser.add_argument("--table-only", action="store_true", help="tabulate what is finished, run nothing")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.responses = 2, 8
    return options


def prepare(to: Path, *, quick: bool = False) -> None:
    """The reference's rollouts, its SAE and the credit learned from them, below one folder."""
    import tsae
    from tsae.rl.config import CreditConfig
    from tsae.rl.credit_fitting import fit_credit
    from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

    if (to / "credit" / "credit.json").is_file():
        return
    base = tsae.testbed.series().base
    file = to / "rollouts.parquet"
    if not file.is_file():
        problems = [
            problem
            for ops, n in REFERENCE_LEVELS.items()
            for problem in tsae.testbed.generate_problems(ops, n // 20 if quick else n, seed=1, split="train")
        ]
        sampling = tsae.SamplingConfig(n_samples=16, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=512, seed=0)
        to.mkdir(parents=True, exist_ok=True)
        tsae.sample(base, problems, sampling, verify=tsae.testbed.verify).write(file)
    rollouts = tsae.Rollouts.read(file)
    store = tsae.capture(tsae.CheckpointSeries((base,)), rollouts, [SITE], to=to / "activations")
    training = tsae.TrainingConfig(tokens=20_000 if quick else 1_500_000, batch_tokens=1024)
    sae = tsae.train(store, tsae.SAEConfig(d_sae=256, k=8), to=to / "sae", training=training)
    features = tsae.encode(sae, store, to=to / "features")
    credit = fit_credit(features, CreditConfig())
    print(credit)
    credit.save(to / "credit")


def run_all(options: argparse.Namespace) -> None:
    """All runs, `jobs` at a time, seed by seed, so that every arm has its first result early."""
    from tqdm import tqdm

    waiting = [
        (arm, seed)
        for seed in range(options.seeds)
        for arm in options.arms
        if not result_file(options.out, arm, seed, options.steps).is_file()
    ]

    def in_process(arm: str, seed: int) -> None:
        file = options.out / f"{arm}-{seed}.log"
        with open(file, "wb") as log:
            if subprocess.call(command_of(options, arm, seed), stdout=log, stderr=log):
                raise TsaeError(f"the run {arm}, seed {seed} failed", where=file)

    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(waiting), desc="runs", unit="run") as bar:
        try:
            for done in as_completed([pool.submit(in_process, *run) for run in waiting]):
                done.result()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def command_of(options: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """The command of one run."""
    settings = {"--out": options.out, "--steps": options.steps, "--responses": options.responses}
    return [
        *(sys.executable, __file__, "--one", arm, str(seed)),
        *(str(part) for pair in settings.items() for part in pair),
    ]


def result_file(out: Path, arm: str, seed: int, steps: int) -> Path:
    """Such as both-0-80.json."""
    return out / f"{arm}-{seed}-{steps}.json"


def run(arm: str, seed: int, options: argparse.Namespace) -> None:
    """One run: train, measure after half of the steps and at the end, write the result."""
    import torch
    from transformers import LlamaForCausalLM, TrainerCallback

    import tsae
    from tsae.rl.curriculum import Curriculum
    from tsae.rl.trl import FeatureGRPOTrainer
    from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers

    torch.set_num_threads(1)
    started = time.monotonic()
    problems = problems_of(arm, options.steps * PROMPTS, seed)
    curriculum = None
    if arm.endswith("adaptive"):
        levels = {problem.id: f"{n_ops_of(problem.prompt):02d} operations" for problem in problems}
        curriculum = Curriculum(list(levels), SAMPLES, CurriculumConfig(seed=seed, guess=GUESSED), levels=levels)
    measured: dict[int, Any] = {}

    class Measurer(TrainerCallback):
        """Measures half-way, without touching the run's random numbers."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (options.steps // 2, options.steps):
                with torch.random.fork_rng(devices=[]):
                    measured[state.global_step] = measure_model(kwargs["model"], options.responses)

    trainer = FeatureGRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(tsae.testbed.series().base.path, dtype="float32"),
        processing_class=tsae.testbed.make_tokenizer(),
        reward_funcs=right_answers,
        train_dataset=data_set(problems),
        callbacks=[Measurer()],
        credit=credit_of(arm, options.out / "reference", seed),
        curriculum=curriculum,
        args=grpo_on_cpu(
            options.out / "trainer",
            prompts=PROMPTS,
            samples=SAMPLES,
            seed=seed,
            max_steps=options.steps,
            temperature=1.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            beta=0.1 if arm == "kl" else 0.0,
        ),
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train()
    trainer.model.config.use_cache = True  # the trainer switched it off; a checkpoint is for sampling, too
    result_of = result_file(options.out, arm, seed, options.steps)
    kept = options.out / "checkpoints" / result_of.stem
    trainer.model.save_pretrained(kept)
    tsae.testbed.make_tokenizer().save_pretrained(kept)
    if curriculum is not None:
        curriculum.history().to_parquet(result_of.with_suffix(".parquet"))
    seconds = time.monotonic() - started
    result = {"arm": arm, "seed": seed, "seconds": seconds, "measured": measured, "shaping": shaping_of(arm)}
    write_json(result_of, result)


def problems_of(arm: str, n: int, seed: int) -> list[Problem]:
    """The training problems of an arm."""
    import random

    from tsae.testbed.backward import reformulate_chains
    from tsae.testbed.chains import generate_problems

    if arm == "adaptive":
        return [
            problem
            for name, ops in BANDS.items()
            for problem in generate_problems(ops if name != "easy" else name, 60, seed, "train")
        ]
    rng = random.Random(seed)
    if arm.endswith("+adaptive"):
        hard = generate_problems("hard", 4 * n, seed, "train")
        made = [item.problem for item in reformulate_chains(hard, kind="backward", n_ops=(3, 13))]
        by_length: dict[int, list[Problem]] = defaultdict(list)
        for problem in rng.sample([*made, *hard], len(made) + len(hard)):
            by_length[n_ops_of(problem.prompt)].append(problem)
        return [problem for length in sorted(by_length) for problem in by_length[length][:PER_LENGTH]]
    hard = generate_problems("hard", n, seed, "train")
    if not arm.startswith("reformulation"):
        return hard
    made = [item.problem for item in reformulate_chains(hard, kind="backward", n_ops=(3, 9))]
    return [*rng.sample(hard, n // 2), *rng.sample(made, n - n // 2)]


def n_ops_of(prompt: str) -> int:
    from tsae.testbed.chains import parse_prompt

    return parse_prompt(prompt).n_ops


def shaping_of(arm: str) -> dict[str, Any] | None:
    """The shaping of an arm with credit from features."""
    name = arm.removeprefix("reformulation+").removesuffix("+adaptive")
    name = name.replace("shuffled", "guided").replace("surprisal", "guided")
    return asdict(SHAPINGS[name]) if name in SHAPINGS else None


def credit_of(arm: str, reference: Path, seed: int) -> Any:
    """The advantage rule of an arm, or None."""
    import torch

    import tsae
    from tsae.rl.credit import Credit
    from tsae.rl.trl import FeatureCredit

    class Surprisal(FeatureCredit):
        """Scores without features."""

        def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            logprob = self.reader.read_and_predict(ids, mask)[1].logprob[:, batch["prompt_ids"].shape[1] :]
            return SLIP_SCORE * -logprob.nan_to_num().expm1()

    if arm == "oracle":
        return oracle
    shaping = shaping_of(arm)
    if shaping is None:
        return None
    credit = Credit.load(reference / "credit")
    if "shuffled" in arm:
        credit = credit.shuffled(seed)
    kind = Surprisal if arm == "surprisal" else FeatureCredit
    applies = (lambda row: n_ops_of(row["prompt"]) <= LONGEST) if arm.endswith("+adaptive") else None
    return kind(tsae.testbed.series().base, reference / "sae", credit, ShapingConfig(**shaping), applies=applies)


def oracle(rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """Ground-truth credit: successes are credited up to the first wrong token, failures blamed on that token alone.

    A marker that comes before all steps are written counts as wrong: a direct answer earns nothing and is blamed.
    """
    import torch

    from tsae.testbed.annotate import annotate
    from tsae.testbed.chains import parse_prompt
    from tsae.testbed.tokenizer import VOCABULARY

    weights = torch.zeros(batch["completion_ids"].shape)
    for number, row in enumerate(rows):
        n = int(batch["completion_mask"][number].sum())
        tokens = [VOCABULARY[token] for token in batch["completion_ids"][number, :n].tolist()]
        labels = annotate(row["prompt"], tokens)
        written, wrong = 0, None
        for place, label in enumerate(labels):
            written += label.role == "result"
            early = label.role == "answer_marker" and written < parse_prompt(row["prompt"]).n_ops
            if label.correct is False or early:
                wrong = place
                break
        if batch["advantages"][number] > 0:
            weights[number, : n if wrong is None else wrong] = 1
        elif wrong is not None:
            weights[number, wrong] = 1
    return batch["advantages"].unsqueeze(1) * weights


def measure_model(model: Any, responses: int) -> dict[str, dict[str, float]]:
    """Accuracy and behaviour by band."""
    from organism.measuring import measure

    import tsae

    training, cache = model.training, model.config.use_cache
    model.eval()
    model.config.use_cache = True
    found = {}
    for level in tsae.testbed.LEVELS:
        problems = tsae.testbed.generate_problems(level, min(responses, 300) if level == "easy" else responses, 0)
        result = measure("run", model, tsae.testbed.make_tokenizer(), problems, responses, 0)
        found[level] = {name: getattr(result, name).value for name in MEASURED}
    model.train(training)
    model.config.use_cache = cache
    return found


COLUMNS = [("easy", "accuracy"), ("medium", "accuracy"), ("hard", "accuracy"), ("medium", "direct"), ("hard", "direct"),
           ("medium", "skipped"), ("hard", "skipped"), ("hard", "flawless")]  # fmt: skip
"""Of the table: band and measure."""


def results(out: Path, arms: Sequence[str] = ARMS, steps: int = 80) -> pd.DataFrame:
    """What finished runs measured: arm, seed, band, and a column a measure."""
    files = [path for arm in arms for path in sorted(out.glob(f"{arm}-[0-9]*-{steps}.json"))]
    found = [json.loads(path.read_text()) for path in files]
    named = [({name: run[name] for name in ("arm", "seed")}, run["measured"][str(steps)]) for run in found]
    rows = [{**name, "band": band, **values} for name, of in named for band, values in of.items()]
    return pd.DataFrame(rows, columns=["arm", "seed", "band", *MEASURED])


def tabulate(out: Path, steps: int) -> str:
    """A Markdown table of all finished runs: mean over seeds, and their standard deviation."""
    rows = []
    for arm, found in results(out, steps=steps).groupby("arm", sort=False):
        row = [str(arm), str(found.seed.nunique())]
        for level, name in COLUMNS:
            values = found.loc[found.band == level, name]
            spread = f" ± {_share(values.std())}" if len(values) > 1 else ""
            row.append(f"{_share(values.mean())}{spread}")
        rows.append(row)
    return markdown(["arm", "seeds", *map(" ".join, COLUMNS)], rows)


def _share(value: Any) -> str:
    return f"{value:.2f}".removeprefix("0")


if __name__ == "__main__":
    raise SystemExit(main())
