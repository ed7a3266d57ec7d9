"""Retrain the mixed run on subsets of its problems: what attribution is measured against.

    python scripts/retrain_mixed.py --run /data/mixed/run --to /data/mixed/retrained

Trains the run first if its folder is not there. The subsets are all problems, random halves of them, random samples of
80 %, each band left out, and each band alone. Each is trained on the logged responses (replayed), and on new ones for
every sampling seed. The folder gets

    problems.json        the run's settings, and its problems
    rollouts.parquet     its log, imported
    retrained.jsonl      a line a retraining: id, name and kind of the subset, include (problem ids), sampling, seconds,
                         and its targets
    weights/ID.safetensors   its final weights, one float32 vector in the order of model.named_parameters()

The targets are the probability of a direct answer on 24 held-out problems of each band. The weights are there for
others. Retrainings that the folder holds are not repeated: an interrupted call goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from organism.mixed import (
    BANDS,
    SETTINGS,
    MixedConfig,
    direct_share,
    held_out,
    logged_probabilities,
    put,
    retrain,
    train,
)
from safetensors.torch import load_file, save_file

import tsae.testbed
from tsae.base.files import replacing, write_json
from tsae.base.progress import progress_bar
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.importing import import_log
from tsae.rollouts.problems import Problem
from tsae.rollouts.table import Rollouts

Sampling = Literal["replayed"] | int
Target = Callable[[torch.Tensor], np.ndarray]
"""Numbers of final weights (P,)."""

_RESULTS, _ABOUT = "retrained.jsonl", "problems.json"


@dataclass(frozen=True)
class Subset:
    """Problems that a retraining keeps."""

    name: str
    kind: Literal["all", "half", "most", "without", "alone"]
    include: tuple[str, ...]
    """Ids, in the order of the run's problems."""


@dataclass(frozen=True)
class Options:
    """Retrain the mixed run on subsets of its problems."""

    run: Path
    """The run's folder; trained first if it is missing."""
    to: Path
    """Folder of the results, outside the repository: 1.3 MB a retraining."""
    samplings: tuple[str, ...] = ("replayed", "1", "2")
    """In this order: "replayed", or seeds of new responses."""
    halves: int = 40
    """Random halves of the problems."""
    most: int = 12
    """Random samples of 80 % of the problems."""
    config: MixedConfig = field(default_factory=MixedConfig)
    """Of the run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and retrain; 1 where the user has something to put right."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    try:
        wrong = [s for s in options.samplings if s != "replayed" and not s.isdecimal()]
        if wrong:
            raise TsaeError(f"{wrong[0]!r} is neither replayed nor a seed", where="--samplings")
        base = tsae.testbed.series().base
        if not options.run.exists():
            train(options.config, base, options.run)
        chosen = subsets(options.config.problems, options.halves, options.most, options.config.seed)
        samplings: list[Sampling] = ["replayed" if s == "replayed" else int(s) for s in options.samplings]
        retrain_all(options.config, base, options.run, chosen, samplings, options.to)
    except TsaeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def subsets(problems: Sequence[Problem], halves: int, most: int, seed: int) -> list[Subset]:
    """All problems, halves, each band left out and alone, and samples of 80 %; all drawn without regard to bands."""
    rng = random.Random(f"subsets/{seed}")

    def drawn(name: str, kind: Literal["half", "most"], n: int) -> Subset:
        kept = set(rng.sample([problem.id for problem in problems], n))
        return Subset(name, kind, tuple(problem.id for problem in problems if problem.id in kept))

    found = [Subset("all", "all", tuple(problem.id for problem in problems))]
    found += [drawn(f"half-{i:02d}", "half", len(problems) // 2) for i in range(halves)]
    for band in BANDS:
        rest, own = ([p.id for p in problems if (p.level == band) == alone] for alone in (False, True))
        found.append(Subset(f"without-{band}", "without", tuple(rest)))
        found.append(Subset(f"only-{band}", "alone", tuple(own)))
    return found + [drawn(f"most-{i:02d}", "most", round(0.8 * len(problems))) for i in range(most)]


def realised(
    base: Checkpoint, config: MixedConfig, weights: torch.Tensor, also: Mapping[str, Target] | None = None
) -> dict[str, Any]:
    """The targets of final weights.

    Args:
        base: gives the model its shape.
        config: of the run, which decides what is held out.
        weights: (P,).
        also: further targets by name.

    Returns:
        "direct (BAND)": mean probability of a direct answer on 24 held-out problems; and a list of numbers for each of
        `also`.
    """
    model = base.load_model(dtype="float32")
    put(model, weights)
    found: dict[str, Any] = {f"direct ({band})": direct_share(model, some) for band, some in held_out(config).items()}
    return found | {name: target(weights).tolist() for name, target in (also or {}).items()}


def retrain_all(
    config: MixedConfig,
    base: Checkpoint,
    run: str | Path,
    chosen: Sequence[Subset],
    samplings: Sequence[Sampling],
    to: str | Path,
    also: Mapping[str, Target] | None = None,
    *,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Retrain on every subset, sampling by sampling, and append a line for each to retrained.jsonl.

    Args:
        config: of the run.
        base: of the run.
        run: its folder.
        chosen: the subsets.
        samplings: "replayed", or seeds of new responses.
        to: folder of the results; what it holds already is not repeated.
        also: further targets of final weights by name.
        progress: show a bar.

    Returns:
        the lines, in the order asked for.

    Raises:
        TsaeError: where the run has other settings, or the folder holds retrainings of another run or other subsets.
    """
    run, to = Path(run), Path(to)
    settings = json.loads((run / SETTINGS).read_text(encoding="utf-8"))
    if settings != config.training_args():
        differing = [name for name, value in config.training_args().items() if settings.get(name) != value]
        raise TsaeError(
            f"was trained with other settings ({', '.join(differing)})", where=run, fix="Give the run's own config."
        )
    _begin(config, to)
    log = to / "rollouts.parquet"
    if not log.is_file():
        import_log(run, log, progress=False)
    rollouts, known = Rollouts.read(log), _finished(to / _RESULTS)
    wanted = [(subset, sampling) for sampling in samplings for subset in chosen]
    new = any(_name(subset, sampling) not in known for subset, sampling in wanted if sampling == "replayed")
    logged = logged_probabilities(config, base, rollouts) if new else None
    with progress_bar("retrainings", "run", len(wanted), shown=progress) as bar:
        for subset, sampling in wanted:
            name = _name(subset, sampling)
            if name not in known:
                started = time.monotonic()
                weights = retrain(config, base, rollouts, set(subset.include), sampling, logged)
                seconds = round(time.monotonic() - started, 2)
                with replacing(weights_file(to, name)) as partial:
                    save_file({"weights": weights}, partial)
                line = {"id": name, **asdict(subset), "include": list(subset.include), "sampling": sampling}
                known[name] = {**line, "seconds": seconds, "targets": realised(base, config, weights, also)}
                _append(to / _RESULTS, known[name])
            elif known[name]["include"] != list(subset.include):
                raise TsaeError(f"holds {name} of other problems", where=to, fix="Give another folder.")
            bar.update()
    return [known[_name(subset, sampling)] for subset, sampling in wanted]


def weights_file(to: str | Path, id: str) -> Path:
    """Where the final weights of a retraining lie; its id is such as half-00-replayed or half-00-seed-1."""
    return Path(to) / "weights" / f"{id}.safetensors"


def load_weights(to: str | Path, id: str) -> torch.Tensor:
    """(P,) float32 final weights of a retraining; see `weights_file`."""
    return load_file(weights_file(to, id))["weights"]


def _name(subset: Subset, sampling: Sampling) -> str:
    return f"{subset.name}-" + (sampling if isinstance(sampling, str) else f"seed-{sampling}")


def _begin(config: MixedConfig, to: Path) -> None:
    """Write what the retrainings are of, or refuse a folder of another run."""
    about = {"config": asdict(config), "problems": [asdict(problem) for problem in config.problems]}
    path = to / _ABOUT
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(about)):
        raise TsaeError("holds retrainings of another run", where=to, fix="Give another folder.")
    write_json(path, about)


def _finished(path: Path) -> dict[str, dict[str, Any]]:
    """Lines by id."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        # A call was killed while it wrote: the next line would be appended to half a line.
        path.write_text(complete, encoding="utf-8")
    return {line["id"]: line for line in map(json.loads, complete.splitlines())}


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


if __name__ == "__main__":
    sys.exit(main())
