"""What is tormented: small real artefacts, the commands that read them, and what comes of them undamaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tsae
from tsae.base.files import sha256
from tsae.rollouts.problems import write_problems

LIMIT_S = 120
_SERIES = Path(tsae.__file__).parent / "testbed" / "series"
SERIES = (str(_SERIES / "base"), str(_SERIES / "hard-100"))


@dataclass(frozen=True)
class Stage:
    """A command that reads artefacts."""

    name: str
    command: tuple[str, ...]
    """Its words; paths are relative to the folder of the artefacts, and results go to "out"."""
    reads: tuple[str, ...] = ()
    """Artefacts that are damaged for it."""


READERS = (
    Stage("bands", ("rollouts", "bands", "--rollouts", "raw.parquet", "--to", "out/banded.parquet"), ("raw.parquet",)),
    Stage("difficulty", ("rollouts", "difficulty", "--rollouts", "raw.parquet", "--n-draws", "100",
                         "--json", "out/difficulty.json"), ("raw.parquet",)),
    Stage("show", ("store", "show", "acts", "--json", "out/show.json"), ("acts",)),
    Stage("evaluate", ("evaluate", "--sae", "sae", "--store", "acts", "--json", "out/found.json"), ("sae", "acts")),
    Stage("train", ("train", "--store", "acts", "--to", "out/sae", "--d-sae", "32", "--k", "4", "--tokens", "2000",
                    "--batch-tokens", "256", "--site", "blocks.1.hook_resid_post"), ("acts",)),
    Stage("export", ("export", "--sae", "sae", "--to", "out/exported"), ("sae",)),
    Stage("encode", ("encode", "--sae", "sae", "--store", "acts", "--to", "out/features"), ("sae", "acts")),
    Stage("diff", ("diff", "--features", "features", "--to", "out/diff", "--min-problems", "5",
                   "--n-permutations", "200", "--n-bootstrap", "100"), ("features",)),
    Stage("reinforcement", ("reinforcement", "--features", "features", "--n-permutations", "100",
                            "--json", "out/pushed.json"), ("features",)),
    Stage("report", ("report", "--diff", "diff", "--features", "features", "--to", "out/page.html"),
          ("diff", "features")),
)  # fmt: skip
WRITERS = (
    Stage("sample", ("rollouts", "sample", "--series", *SERIES, "--problems", "problems.jsonl", "--n-samples", "4",
                     "--to", "out/raw.parquet", "--max-new-tokens", "40", "--verifier",
                     "tsae.testbed.verifier:verify")),
    Stage("capture", ("capture", "--series", *SERIES, "--rollouts", "rollouts.parquet", "--to", "out/acts",
                      "--shard-tokens", "2000")),
    Stage("capture-parts", ("capture", "--series", *SERIES, "--rollouts", "rollouts.parquet", "--to", "out/acts",
                            "--shard-tokens", "2000", "--parts", "3", "--workers", "2")),
    Stage("train-long", ("train", "--store", "acts", "--to", "out/sae", "--d-sae", "32", "--k", "4", "--tokens", "8000",
                         "--batch-tokens", "256", "--save-every-steps", "4", "--site", "blocks.1.hook_resid_post")),
    Stage("encode-parts", ("encode", "--sae", "sae", "--store", "acts", "--to", "out/features", "--parts", "2",
                           "--workers", "2")),
    *(stage for stage in READERS if stage.name in ("bands", "encode", "diff", "report", "export")),
)  # fmt: skip
"""Commands that are disturbed while they write."""
STAGES = tuple({stage.name: stage for stage in (*READERS, *WRITERS)}.values())
LOGS = Path(__file__).resolve().parents[2] / "tests" / "logs"
IMPORTS: dict[str, tuple[str, ...]] = {
    "verl": (), "open-instruct": (), "nemo-rl": (), "prime-rl": (), "prime-rl-stream": ("--skip", "errored", "empty"),
    "prime-rl-tokens": (), "open-r1": (), "trl": ("--outcome", "digits", "--skip", "unscored"),
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% endif %}"
)
_UNLIKE = ("run.json", "checksums.json", "metrics.jsonl", "training.json")  # times, and sums over files with times


def start(
    words: Sequence[str | Path], where: Path, disturbed: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command, in a group of processes of its own.

    Args:
        words: of the command, without "tsae".
        where: working folder.
        disturbed: what `torments/inside/sitecustomize.py` is to do inside of the process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
    if disturbed is not None:
        paths = [str(Path(__file__).parent / "inside"), os.environ.get("PYTHONPATH", "")]
        environment |= {**disturbed, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "tsae", *map(str, words)], cwd=where, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip


def run(
    words: Sequence[str | Path], where: Path, disturbed: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `start` starts it.

    Raises:
        subprocess.TimeoutExpired: where it takes longer than the limit; then all its processes are killed.
    """
    process = start(words, where, disturbed)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def watched(
    words: Sequence[str | Path], here: Path, disturbed: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str] | None, str]:
    """(how a command ended, what is bad of it). Outside of "out" it may change nothing that was there."""
    before = {path: sha256(path) for path in here.rglob("*") if path.is_file() and here / "out" not in path.parents}
    try:
        ended = run(words, here, disturbed)
    except subprocess.TimeoutExpired:
        return None, f"takes longer than {LIMIT_S} s"
    except ValueError:
        return None, ""  # no process takes such a word
    changed = [path.relative_to(here).as_posix() for path, digest in before.items()
               if not path.is_file() or sha256(path) != digest]  # fmt: skip
    return ended, f"changed {', '.join(changed)}" if changed else unusual_end(ended)


def lay_out(stage: Stage, made: Path, here: Path) -> None:
    """Copy what a stage reads, and make its folder for results."""
    for name in ("raw.parquet", "rollouts.parquet", "problems.jsonl", "acts", "sae", "features", "diff"):
        source = made / name
        if name in stage.command:
            shutil.copytree(source, here / name) if source.is_dir() else shutil.copy(source, here / name)
    (here / "out").mkdir()


def difference(found: Path, expected: Path) -> str:
    """Which results differ from those of the undamaged artefacts, if any do."""
    one, two = results(found), results(expected)
    names = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
    return f"silently different: {', '.join(names[:4])}" if names else ""


def make(folder: Path) -> None:
    """The artefacts, and what every stage makes of them undamaged."""
    done = folder / "done"
    if done.is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_problems(tsae.testbed.generate_problems("medium", 16, 0), folder / "problems.jsonl")
    for words in (
        ("rollouts", "sample", "--series", *SERIES, "--problems", "problems.jsonl", "--n-samples", "4", "--to",
         "raw.parquet", "--max-new-tokens", "40", "--verifier", "tsae.testbed.verifier:verify"),
        ("rollouts", "bands", "--rollouts", "raw.parquet", "--to", "rollouts.parquet"),
        ("capture", "--series", *SERIES, "--rollouts", "rollouts.parquet", "--to", "acts"),
        ("train", "--store", "acts", "--to", "sae", "--d-sae", "64", "--k", "4", "--tokens", "20000",
         "--batch-tokens", "512"),
        ("encode", "--sae", "sae", "--store", "acts", "--to", "features"),
        ("diff", "--features", "features", "--to", "diff", "--min-problems", "5", "--n-permutations", "200",
         "--n-bootstrap", "100"),
    ):  # fmt: skip
        ended = run(words, folder)
        if ended.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr}")
    writes = {}
    for stage in STAGES:
        (folder / "out").mkdir()
        count = folder / "count"
        start = time.perf_counter()
        ended = run(stage.command, folder, {"TORMENT": f"count:0:{folder / 'out'}", "TORMENT_COUNT": str(count)})
        if ended.returncode:
            raise SystemExit(f"{stage.name} ended with {ended.returncode}:\n{ended.stderr}")
        writes[stage.name] = [len(count.read_text().splitlines()), time.perf_counter() - start]
        count.unlink()
        for litter in (folder / "out").glob("*.parts"):  # what parts said
            shutil.rmtree(litter)
        (folder / "out").rename(folder / f"expected-{stage.name}")
    (folder / "writes.json").write_text(json.dumps(writes))
    chat = shutil.copytree(_SERIES / "base", folder / "chat")
    (chat / "chat_template.jinja").write_text(_TEMPLATE)
    for name, options in IMPORTS.items():
        ended = run(importing(name, folder / "imported.parquet", options, LOGS / name, chat), folder)
        if ended.returncode:
            raise SystemExit(f"the log {name} ended with {ended.returncode}:\n{ended.stderr}")
    done.touch()


def importing(name: str, to: Path, options: Sequence[str], log: Path, chat: Path) -> list[str | Path]:
    return ["rollouts", "import", log, "--to", to, "--checkpoint", chat, "--workers", "1", *options]


def results(folder: Path) -> dict[str, str]:
    """Checksums of what a command wrote, by name, but for what differs between two runs of it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _UNLIKE)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def unusual_end(ended: subprocess.CompletedProcess[str]) -> str:
    """What is bad of how a command ended: a traceback, another exit code than 0 and 2, or 2 without a word."""
    said = ended.stderr.strip()
    if "Traceback" in said:
        return f"traceback: {said.splitlines()[-1]}"
    if ended.returncode == 2:
        return "" if said else "exit code 2 without a word"
    return f"exit code {ended.returncode}: {said[-200:]}" if ended.returncode else ""
