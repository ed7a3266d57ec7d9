"""Do the tests bite? Small faults are planted in the code, one at a time, and the tests that run that line must fail.

The tests of `.ci/run` run once with coverage, which records the tests that run each line. Places are drawn at random,
as many from every room, and at each one of cosmic-ray's operators. Every mutant is tested in a copy of the repository
by the tests that run its line: first those of its room, then the others. One that passes them all survives, and is
printed with its line, to be judged: some are equivalent.

Left out: annotations and what is imported for them alone, docstrings and messages of errors, which no test of behaviour
needs to see; operators that only remove a decorator.

    python scripts/check_mutants.py --per-room 40 --to runs/mutants
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from queue import Queue

import tyro
from scipy.stats import binomtest

ROOT = Path(__file__).resolve().parents[1]
_TESTS = ("-m", "not slow or slow(ci=True)")
"""Those of `.ci/run`."""
ROOMS = ("activations", "diff", "features", "rollouts", "sae")
LEFT_OUT = ("core/RemoveDecorator",)


@dataclass(frozen=True)
class Config:
    """How many mutants, and where."""

    to: Path = Path("runs/mutants")
    """Folder for the coverage and the results; a run that was stopped resumes."""
    per_room: int = 40
    """Mutants of every room."""
    rooms: tuple[str, ...] = ROOMS
    """Rooms of tsae that are mutated."""
    tests: tuple[str, ...] = ("tests",)
    """Folders of tests that count, such as those of these rooms: sooner done, and a lower score."""
    workers: int = 2
    """Mutants that are tested at once, each in a copy of the repository."""
    first: int = 40
    """Tests that are tried first."""
    timeout: float = 300
    """Seconds after which a mutant counts as one that hangs. Tests that are only slow need more."""
    seed: int = 0
    """Seed of the draw."""


@dataclass(frozen=True)
class Mutant:
    """One fault: an operator of cosmic-ray at a place of a file."""

    room: str
    path: str
    operator: str
    occurrence: int
    line: int


def main(config: Config) -> None:
    config.to.mkdir(parents=True, exist_ok=True)
    coverage = (config.to / "coverage.sqlite").resolve()
    if not coverage.is_file():
        cover(coverage, config)
    tests = tests_by_line(coverage)
    results = config.to / "mutants.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    done = {(r["path"], r["operator"], r["occurrence"]): r for r in known}
    mutants = [m for room in config.rooms for m in draw(room, config, tests)]
    copies: Queue[Path] = Queue()
    for i in range(config.workers):
        copies.put(copy(config.to / f"copy-{i}"))

    def judge(mutant: Mutant) -> dict[str, object]:
        key = (mutant.path, mutant.operator, mutant.occurrence)
        if key in done:
            return done[key]
        place = copies.get()
        try:
            found = test(mutant, place, chosen_tests(mutant, tests[mutant.path]), config)
        finally:
            copies.put(place)
        with results.open("a") as out:
            out.write(json.dumps(found) + "\n")
        where = f"{mutant.path}:{mutant.line}  {mutant.operator}"
        print(f"{found['outcome']:9} {found['seconds']:6.1f} s  {where}", flush=True)
        return found

    with ThreadPoolExecutor(config.workers) as pool:
        judged = list(pool.map(judge, mutants))
    report(judged, config)


def cover(to: Path, config: Config) -> None:
    """Run the tests once, and record which test runs which line."""
    settings = to.with_name("coveragerc")
    settings.write_text("[run]\nsource = tsae\nconcurrency = thread,multiprocessing\n")
    command = ["-m", "pytest", "-q", *config.tests, *_TESTS, "-n", str(config.workers), "--dist", "loadfile"]
    command += ["--cov=tsae", "--cov-context=test", f"--cov-config={settings}", "--cov-report="]
    command += ["-o", f"cache_dir={to.parent}/cache"]
    # These limit the memory of their process, and the tracer needs more.
    command += ["--deselect=tests/base/test_hostile_hdf5.py"]
    environment = {**os.environ, "COVERAGE_FILE": str(to), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment)
    if ran.returncode > 1:
        to.unlink(missing_ok=True)
        raise SystemExit(f"pytest ended with {ran.returncode}, so no line is known with its tests")


def tests_by_line(data: Path) -> dict[str, dict[int, list[str]]]:
    """Path, line and the tests that run it, those of its own room first.

    A test that fails without any fault, as under the tracer or on a busy machine, cannot judge: it is left out.
    """
    from coverage import CoverageData

    failed = data.with_name("cache") / "v/cache/lastfailed"
    left_out = set(json.loads(failed.read_text())) if failed.is_file() else set()
    print(f"{len(left_out)} tests fail without any fault and are left out: {', '.join(sorted(left_out))}", flush=True)
    read = CoverageData(str(data))
    read.read()
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in read.measured_files():
        path = Path(file).resolve().relative_to(ROOT).as_posix()
        room = path.split("/")[1]
        for line, contexts in read.contexts_by_lineno(file).items():
            tests = {context.rpartition("|")[0] for context in contexts if context} - left_out
            found[path][line] = sorted(tests, key=lambda name: (not name.startswith(f"tests/{room}/"), name))
    return found


def draw(room: str, config: Config, tests: dict[str, dict[int, list[str]]]) -> list[Mutant]:
    """Places of a room in random order; at each one operator."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for file in sorted((ROOT / "tsae" / room).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        skipped = lines_left_out(file.read_text(encoding="utf-8"))
        nodes = list(ast_nodes(get_ast_from_path(file)))
        for name in cosmic_ray.plugins.operator_names():
            kind = cosmic_ray.plugins.get_operator(name)
            if kind.arguments() or name.startswith(LEFT_OUT):
                continue
            operator = kind()
            positions = [span for node in nodes for span in operator.mutation_positions(node)]
            for occurrence, (start, _) in enumerate(positions):
                if not any(low <= start <= high for low, high in skipped):
                    places[path, *start].append(Mutant(room, path, name, occurrence, start[0]))
    rng = random.Random(f"{config.seed} {room}")
    chosen = (rng.choice(places[place]) for place in rng.sample(sorted(places), len(places)))
    return list(islice(filter(is_code, chosen), config.per_room))


def is_code(mutant: Mutant) -> bool:
    """Whether the mutant is Python at all.

    One operator takes the ** of a dictionary for a power; another cannot replace an exception with a dotted name.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(mutated(mutant, ROOT), mutant.path, "exec")
    except (SyntaxError, AttributeError):
        return False
    return True


def mutated(mutant: Mutant, root: Path) -> str:
    """The file with its fault."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    found: str = mutate_code((root / mutant.path).read_text(encoding="utf-8"), operator, mutant.occurrence)
    return found


def lines_left_out(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of annotations, of what only they need, and of errors that are raised: (line, column) of begin and end."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            parts = [node]
        for part in parts:
            if part is not None:
                end = (part.end_lineno or part.lineno, part.end_col_offset or 0)  # type: ignore[attr-defined]
                found.append(((part.lineno, part.col_offset), end))  # type: ignore[attr-defined]
    return found


def copy(to: Path) -> Path:
    """The repository's files as git tracks them, in a folder of their own."""
    shutil.rmtree(to, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to.resolve()


def test(mutant: Mutant, place: Path, tests: list[str], config: Config) -> dict[str, object]:
    """Plant the fault in a copy, run the tests of its line, and take it out again."""
    file, began = place / mutant.path, time.monotonic()
    source, faulty = file.read_text(encoding="utf-8"), mutated(mutant, place)
    found: dict[str, object] = {**asdict(mutant), "was": source.splitlines()[mutant.line - 1].strip()}
    found["becomes"] = faulty.splitlines()[mutant.line - 1].strip()
    outcome = "survived" if tests else "untested"
    try:
        file.write_text(faulty, encoding="utf-8")
        for part in (tests[: config.first], tests[config.first :]):
            if part and outcome == "survived":
                outcome = outcome_of(part, place, config.timeout)
    finally:
        file.write_text(source, encoding="utf-8")
    return {**found, "outcome": outcome, "n_tests": len(tests), "seconds": time.monotonic() - began}


def chosen_tests(mutant: Mutant, by_line: dict[int, list[str]]) -> list[str]:
    """The tests that run the mutant's line.

    A line that runs on import counts for whichever test imported it first, but all of the file may depend on it: its
    tests are those that run any line, and the one that holds for all modules.
    """
    if in_function((ROOT / mutant.path).read_text(encoding="utf-8"), mutant.line):
        return by_line.get(mutant.line, [])
    names = {name for tests in by_line.values() for name in tests}
    own = sorted(names, key=lambda name: (not name.startswith(f"tests/{mutant.room}/"), name))
    return ["tests/app/test_architecture.py", *(own or [f"tests/{mutant.room}"])]


def in_function(source: str, line: int) -> bool:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return any(f.body[0].lineno <= line <= (f.end_lineno or 0) for f in functions)


def outcome_of(tests: list[str], place: Path, timeout: float) -> str:
    listed = place / "mutant-tests.txt"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", *_TESTS, "-p", "no:cacheprovider", f"@{listed}"]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    # 4: the fault stops conftest.py or a test's file from being imported; else a test is not found.
    if ran.returncode not in (0, 1, 2, 3) and "conftest" not in ran.stderr and "ERROR collecting" not in ran.stdout:
        raise SystemExit(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    return "killed" if ran.returncode else "survived"


def report(judged: list[dict[str, object]], config: Config) -> None:
    """Score by room with its 95 % interval, the survivors, and a line of JSON."""
    figures = {}
    for room in (*config.rooms, "all"):
        mine = [found for found in judged if room in ("all", found["room"])]
        killed = sum(found["outcome"] in ("killed", "timeout") for found in mine)
        share = binomtest(killed, len(mine)).proportion_ci(0.95, "wilson")
        hang = sum(found["outcome"] == "timeout" for found in mine)
        figures[room] = {"killed": killed, "by timeout": hang, "of": len(mine), "low": share.low, "high": share.high}
        interval = f"[{share.low:.1%}, {share.high:.1%}]"
        print(f"{room:12} {killed:4} of {len(mine):4}  {killed / len(mine):.1%} {interval}, {hang} by timeout")
    for found in judged:
        if found["outcome"] not in ("killed", "timeout"):
            print(f"\n{found['outcome']}: {found['path']}:{found['line']}\n  - {found['was']}\n  + {found['becomes']}")
    score = figures["all"]["killed"] / figures["all"]["of"]
    print(json.dumps({"name": "mutants", "ratio": score, "rooms": figures}))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
