"""Build the arithmetic testbed: train the base, run GRPO on each level, measure every checkpoint.

Stages, in order: base, easy, medium, hard, measure. A finished stage is skipped, so that an interrupted build goes on
where it stopped. What the folder holds at the end is what ships in tsae/testbed/series:

    series.json               the checkpoints, and what made them
    base/ easy-025/ ...       one Hugging Face checkpoint each, with its tokenizer
    logs/RUN/completions/     TRL's own completion logs
    measured.json, .md        accuracy and behaviour of every checkpoint on every level

The same seed gives the same weights on the same machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from organism.measuring import Measurement, measure, to_markdown, to_records
from organism.pages import fill
from organism.pretraining import BaseConfig, ModelConfig, train_base

from tsae.errors import TsaeError
from tsae.testbed.chains import LEVELS, N_EASY_CHAINS, generate_problems
from tsae.testbed.grpo import data_set, grpo_on_cpu, right_answers
from tsae.testbed.tokenizer import make_tokenizer

STAGES = ("base", *LEVELS, "measure")


@dataclass(frozen=True)
class GRPORecipe:
    """How each run is trained with TRL's GRPOTrainer; everything else is TRL's default."""

    steps: int = 150
    """Optimiser steps; one generation batch each."""
    save_at: tuple[int, ...] = (25, 50, 100, 150)
    """Steps whose weights are kept."""
    log_every: int = 25
    """Steps between two completion logs; the first step is logged too."""
    prompts: int = 16
    """Distinct problems per step."""
    samples: int = 16
    """Responses per problem: the group over which advantages are normalised."""
    lr: float = 1e-4
    """Learning rate, constant."""
    temperature: float = 1.0
    """Of sampling."""
    beta: float = 0.0
    """Weight of the KL penalty against the base; 0: none."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int
    threads: int
    base: BaseConfig
    grpo: GRPORecipe
    responses: int
    """Responses per cell of the measured table."""


def main(arguments: list[str] | None = None) -> int:
    """Run the stages that are asked for; 1 where the user has something to put right."""
    options = parse(arguments)
    # Before torch is loaded: OpenMP threads that spin while they wait starve each other on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        build(options.out, recipe_of(options), options.only or list(STAGES))
        if options.readme is not None:
            table = options.out / "measured.md"
            if not table.is_file():
                raise TsaeError("nothing measured yet", where=table, fix="Run the stage 'measure' too.")
            fill(options.readme, "measured", table.read_text(encoding="utf-8"))
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to build in; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: 0)")
    parser.add_argument("--steps", type=int, help="GRPO steps per run (default: 150)")
    parser.add_argument("--base-steps", type=int, help="training steps of the base (default: 900)")
    parser.add_argument("--only", nargs="+", choices=STAGES, help="stages to run (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; the weights depend on it (default: 2)")
    parser.add_argument("--readme", type=Path, help="Markdown file whose measured table to replace")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds: nothing is learned")
    return parser.parse_args(arguments)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that the options ask for."""
    base, grpo, responses = BaseConfig(), GRPORecipe(), 1000
    if options.quick:
        base = BaseConfig(model=ModelConfig(n_layers=1, d_model=32, n_heads=2, d_mlp=64), steps=20, batch=16, warmup=2)
        grpo = GRPORecipe(steps=2, save_at=(1, 2), log_every=1, prompts=2, samples=4)
        responses = 8
    if options.base_steps is not None:
        base = replace(base, steps=options.base_steps)
    if options.steps is not None:
        kept = tuple(step for step in grpo.save_at if step < options.steps)
        grpo = replace(grpo, steps=options.steps, save_at=(*kept, options.steps))
    if base.steps < 1 or grpo.steps < 1:
        raise TsaeError("there must be at least one step", where="--steps, --base-steps")
    return Recipe(seed=options.seed, threads=options.threads, base=base, grpo=grpo, responses=responses)


def build(out: Path, recipe: Recipe, stages: list[str]) -> None:
    """Run the stages in their order, skipping what is finished."""
    out.mkdir(parents=True, exist_ok=True)
    check_unclaimed(out, recipe)
    for stage in (stage for stage in STAGES if stage in stages):
        if is_finished(out, stage, recipe):
            print(f"{stage}: finished before", file=sys.stderr)
            continue
        if stage != "base" and not (out / "base").exists():
            raise TsaeError(f"stage {stage!r} needs the base", where=out / "base", fix="Run --only base first.")
        started = time.monotonic()
        with quietly(recipe.threads):
            if stage == "base":
                build_base(out, recipe)
            elif stage == "measure":
                measure_all(out, recipe)
            else:
                build_run(out, recipe, stage)
        write_series(out, recipe, stage, time.monotonic() - started)
        print(f"{stage}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)


def is_finished(out: Path, stage: str, recipe: Recipe) -> bool:
    """Whether a stage has left everything behind; the table must cover every checkpoint that is there by now."""
    if stage == "base":
        return (out / "base").exists()
    if stage != "measure":
        return all((out / checkpoint_id(stage, step)).exists() for step in recipe.grpo.save_at)
    measured = out / "measured.json"
    if not measured.exists() or not (out / "measured.md").exists():
        return False
    covered = {row["checkpoint"] for row in json.loads(measured.read_text(encoding="utf-8"))}
    return covered == {entry["id"] for entry in existing_checkpoints(out, recipe)}


def checkpoint_id(run: str, step: int) -> str:
    """Such as easy-025."""
    return f"{run}-{step:03d}"


def check_unclaimed(out: Path, recipe: Recipe) -> None:
    """Refuse a folder in which a series was begun with another recipe."""
    path = out / "series.json"
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))["made_by"]["recipe"]
    now = json.loads(json.dumps(asdict(recipe)))
    differing = sorted(key for key in now if before.get(key) != now[key])
    if differing:
        what = f"was begun with another recipe (differing: {', '.join(differing)})"
        raise TsaeError(what, where=path, fix="Give the same options, or another --out.")


def build_base(out: Path, recipe: Recipe) -> None:
    """Train the base and save it."""
    from tqdm import tqdm

    with tqdm(total=recipe.base.steps, desc="base", unit="step") as bar:
        model = train_base(recipe.base, recipe.seed, lambda step, loss: bar.update())
    save_checkpoint(model, out / "base")


def build_run(out: Path, recipe: Recipe, run: str) -> None:
    """GRPO from the base on one run's problems, with TRL's own trainer and completion log."""
    from tqdm import tqdm
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    grpo = recipe.grpo
    logs = out / "logs" / run
    shutil.rmtree(logs, ignore_errors=True)
    wanted = grpo.steps * grpo.prompts
    # On "easy" there are only 300 chains: the trainer goes through them again and again.
    problems = generate_problems(run, min(wanted, N_EASY_CHAINS) if run == "easy" else wanted, recipe.seed, "train")
    bar = tqdm(total=grpo.steps, desc=run, unit="step")

    def correct(completions: list[str], answer: list[str], **others: Any) -> list[float]:
        """TRL's reward function: 1 for a right final answer, 0 otherwise."""
        for name, values in {"answer": answer, **others}.items():
            if name in ("problem_id", "answer", "completion_ids"):
                others["log_extra"](name, values)
        rewards = right_answers(completions, answer)
        bar.set_postfix(reward=f"{sum(rewards) / len(rewards):.2f}", refresh=False)
        return rewards

    class Keeper(TrainerCallback):
        """Keeps the weights of the steps asked for, and moves the progress bar."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            bar.update()
            if state.global_step in grpo.save_at:
                save_checkpoint(kwargs["model"], out / checkpoint_id(run, state.global_step))

    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(out / "base", dtype="float32"),
        processing_class=make_tokenizer(),
        reward_funcs=correct,
        train_dataset=data_set(problems),
        callbacks=[Keeper()],
        args=grpo_on_cpu(
            logs, prompts=grpo.prompts, samples=grpo.samples, seed=recipe.seed, max_steps=grpo.steps,
            temperature=grpo.temperature, learning_rate=grpo.lr, lr_scheduler_type="constant", beta=grpo.beta,
            logging_steps=grpo.log_every, logging_first_step=True, log_completions=True,
        ),
    )  # fmt: skip
    # TRL prints every logged completion to stdout, and there is no option against it.
    with bar, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train()


def measure_all(out: Path, recipe: Recipe) -> None:
    """Every checkpoint on every level: measured.json and measured.md."""
    from tqdm import tqdm
    from transformers import AutoTokenizer, LlamaForCausalLM

    checkpoints = [entry["id"] for entry in existing_checkpoints(out, recipe)]
    measured: list[Measurement] = []
    with tqdm(total=len(checkpoints) * len(LEVELS), desc="measure", unit="cell") as bar:
        for name in checkpoints:
            model = LlamaForCausalLM.from_pretrained(out / name, dtype="float32").eval()
            tokenizer = AutoTokenizer.from_pretrained(out / name)
            for level in LEVELS:
                n = min(recipe.responses, N_EASY_CHAINS) if level == "easy" else recipe.responses
                problems = generate_problems(level, n, recipe.seed)
                measured.append(measure(name, model, tokenizer, problems, recipe.responses, recipe.seed))
                bar.update()
    (out / "measured.json").write_text(json.dumps(to_records(measured), indent=1) + "\n", encoding="utf-8")
    (out / "measured.md").write_text(to_markdown(measured), encoding="utf-8")


def save_checkpoint(model: Any, path: Path) -> None:
    """Weights and tokenizer, entered under the final name only when complete."""
    unfinished = path.with_name(path.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    # The trainer switches the cache off while it trains; a checkpoint is for sampling, too.
    cache, model.config.use_cache = model.config.use_cache, True
    model.save_pretrained(unfinished)
    model.config.use_cache = cache
    make_tokenizer().save_pretrained(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def existing_checkpoints(out: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """The entries of series.json for the checkpoints that are there, base first."""
    entries: list[dict[str, Any]] = [{"id": "base", "path": "base", "run": None, "step": 0, "trained_on": None}]
    for run in LEVELS:
        for step in recipe.grpo.save_at:
            name = checkpoint_id(run, step)
            entries.append({"id": name, "path": name, "run": run, "step": step, "trained_on": run})
    return [entry for entry in entries if (out / entry["path"]).is_dir()]


def write_series(out: Path, recipe: Recipe, stage: str, seconds: float) -> None:
    """Enter what is there into series.json, with what made it and how long each stage took."""
    path = out / "series.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    packages = ("torch", "transformers", "trl", "tokenizers", "numpy")
    series = {
        "name": "arithmetic",
        "checkpoints": existing_checkpoints(out, recipe),
        "made_by": {
            "script": "scripts/build_testbed.py",
            "seed": recipe.seed,
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "recipe": asdict(recipe),
            "seconds": {**before.get("made_by", {}).get("seconds", {}), stage: round(seconds, 1)},
        },
    }
    path.write_text(json.dumps(series, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def quietly(threads: int) -> Iterator[None]:
    """Compute on so many threads, without bars and notices of libraries that a user of this script cannot act on."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("trl", "accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        yield
    torch.set_num_threads(before)


if __name__ == "__main__":
    sys.exit(main())
