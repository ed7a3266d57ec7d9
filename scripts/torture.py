"""Damage artefacts and hand nonsense to commands, at random, and see whether tsae says so.

Small real artefacts are made once: rollouts of two shipped checkpoints, store, SAE, features, diff. Then every case is
drawn from its number and the seed alone, and runs the real command in a process of its own:

- damaged: one file of one artefact is changed (flipped bit, zeroed page, cut, emptied, removed, exchanged with another,
  replaced by a folder or by a link to nowhere), and a command that reads the artefact follows;
- log: one to three places of a trainer's log are changed (a value, a key, a line, a column, the encoding), and it is
  imported;
- command: one or two options of a valid command line get a value that nobody means (negative, huge, no number, a path
  that is missing, an input, somebody else's file).

A case is good if the command ends well with the results of the undamaged artefacts, or if it ends with exit code 2 and
one paragraph, and no file that it did not write is changed. It is bad if results differ in silence, if there is a
traceback or another exit code, if it takes longer than two minutes, or if somebody else's file is touched. Of a changed
log it is good, too, if what it gives can be read and holds only ids of the vocabulary.

    python scripts/torture.py --cases 200 --seed 1
    python scripts/torture.py --seed 1 --case 37          # one of them again

Ends with one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

import tsae
from tsae.base.files import sha256
from tsae.rollouts.problems import write_problems

_LIMIT_S = 120
_SERIES = Path(tsae.__file__).parent / "testbed" / "series"
Kind = Literal["damaged", "log", "command"]


@dataclass(frozen=True)
class Torture:
    """How many cases, and which."""

    cases: int = 200
    seed: int = 1
    only: Kind | None = None
    """Cases of one kind."""
    case: int | None = None
    """Only the case of this number."""
    workers: int = 2
    to: Path | None = None
    """Folder of the artefacts, which is kept and used again; by default a temporary one."""


@dataclass(frozen=True)
class Stage:
    """A command that reads artefacts."""

    name: str
    command: tuple[str, ...]
    """Its words; paths are relative to the folder of the artefacts, and results go to "out"."""
    reads: tuple[str, ...]
    """Artefacts that are damaged for it."""


STAGES = (
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
_LOGS = Path(__file__).resolve().parents[1] / "tests" / "logs"
_IMPORTS: dict[str, tuple[str, ...]] = {
    "verl": (), "open-instruct": (), "nemo-rl": (), "prime-rl": (), "prime-rl-stream": ("--skip", "errored", "empty"),
    "prime-rl-tokens": (), "open-r1": (), "trl": ("--outcome", "digits", "--skip", "unscored"),
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% endif %}"
)
_UNLIKE = ("run.json", "checksums.json", "metrics.jsonl", "training.json")  # times, and sums over files with times


def run(words: Sequence[str | Path], where: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
    command = [sys.executable, "-m", "tsae", *map(str, words)]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S
    )


def make(folder: Path) -> None:
    """The artefacts, and what every stage makes of them undamaged."""
    done = folder / "done"
    if done.is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_problems(tsae.testbed.generate_problems("medium", 16, 0), folder / "problems.jsonl")
    series = (str(_SERIES / "base"), str(_SERIES / "hard-100"))
    for words in (
        ("rollouts", "sample", "--series", *series, "--problems", "problems.jsonl", "--n-samples", "4", "--to",
         "raw.parquet", "--max-new-tokens", "40", "--verifier", "tsae.testbed.verifier:verify"),
        ("rollouts", "bands", "--rollouts", "raw.parquet", "--to", "rollouts.parquet"),
        ("capture", "--series", *series, "--rollouts", "rollouts.parquet", "--to", "acts"),
        ("train", "--store", "acts", "--to", "sae", "--d-sae", "64", "--k", "4", "--tokens", "20000",
         "--batch-tokens", "512"),
        ("encode", "--sae", "sae", "--store", "acts", "--to", "features"),
        ("diff", "--features", "features", "--to", "diff", "--min-problems", "5", "--n-permutations", "200",
         "--n-bootstrap", "100"),
    ):  # fmt: skip
        ended = run(words, folder)
        if ended.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr}")
    for stage in STAGES:
        (folder / "out").mkdir()
        ended = run(stage.command, folder)
        if ended.returncode:
            raise SystemExit(f"{stage.name} ended with {ended.returncode}:\n{ended.stderr}")
        (folder / "out").rename(folder / f"expected-{stage.name}")
    chat = shutil.copytree(_SERIES / "base", folder / "chat")
    (chat / "chat_template.jinja").write_text(_TEMPLATE)
    for name, options in _IMPORTS.items():
        ended = run(_importing(name, folder / "imported.parquet", options, _LOGS / name, chat), folder)
        if ended.returncode:
            raise SystemExit(f"the log {name} ended with {ended.returncode}:\n{ended.stderr}")
    done.touch()


def _importing(name: str, to: Path, options: Sequence[str], log: Path, chat: Path) -> list[str | Path]:
    return ["rollouts", "import", log, "--to", to, "--checkpoint", chat, "--workers", "1", *options]


def results(folder: Path) -> dict[str, str]:
    """Checksums of what a command wrote, by name, but for what differs between two runs of it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _UNLIKE)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def damages(file: Path, other: Path, rng: np.random.Generator) -> Mapping[str, Callable[[], object]]:
    whole = bytearray(file.read_bytes())
    place = int(rng.integers(0, max(len(whole), 1)))

    def flip() -> None:
        whole[place] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(whole)

    def zeros() -> None:
        page = place // 4096 * 4096
        whole[page : page + 4096] = bytes(len(whole[page : page + 4096]))
        file.write_bytes(whole)

    def exchange() -> None:
        content = other.read_bytes()
        other.write_bytes(file.read_bytes())
        file.write_bytes(content)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def link() -> None:
        file.unlink()
        file.symlink_to(file.parent / "nowhere")

    return {
        "flip": flip, "zeros": zeros, "cut": lambda: file.write_bytes(whole[:place]),
        "empty": lambda: file.write_bytes(b""), "remove": file.unlink, "exchange": exchange, "folder": folder,
        "link": link,
    }  # fmt: skip


_NONSENSE = ("-1", "0", "1e18", "999999999999", "nan", "x", "", "\u202e", "-", "missing/file", "/dev/null",
             "raw.parquet", "acts", "precious.txt", "precious.json", "precious.parquet")  # fmt: skip


def disturb(rng: np.random.Generator, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one or two values exchanged for nonsense."""
    words = list(command)
    values = [i for i, word in enumerate(words) if i and words[i - 1].startswith("--")]
    for place in rng.permutation(values)[: rng.integers(1, 3)].tolist():
        words[place] = str(rng.choice(_NONSENSE))
    return tuple(words)


_VALUES: tuple[Any, ...] = (
    None, "x", "", 1, -7, 0.5, True, [], {}, [[]], {"a": {"b": []}}, float("nan"), float("-inf"), 10**400, "\u0000",
    "\ud800", "<script>alert(1)</script>", "=1+1", "../../x", "\u202e\u001b[31m", [10**6], [-1], "9" * 100_000,
)  # fmt: skip


def change_log(folder: Path, rng: np.random.Generator) -> str:
    """Change a file of a log; gives what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = files[int(rng.integers(len(files)))]
    if file.suffix == ".parquet":
        return f"{_change_table(file, rng)} {file.name}"
    lines = file.read_bytes().split(b"\n")
    place = int(rng.integers(max(1, len(lines) - 1)))
    how = str(rng.choice(["value", "key", "cut", "twice", "order", "mark", "bytes", "null", "nested", "long", "deep"]))
    if how in ("value", "key", "long", "nested"):
        lines[place] = _change_line(lines[place], how, rng)
    elif how == "cut":
        lines[place] = lines[place][: int(rng.integers(len(lines[place]) + 1))]
    elif how == "twice":
        lines.insert(place, lines[place])
    elif how == "order":
        lines = [lines[i] for i in rng.permutation(len(lines))]
    elif how == "mark":
        lines[0] = b"\xef\xbb\xbf" + lines[0]
    elif how == "deep":
        lines[place] = b"[" * 100_000 + b"]" * 100_000
    else:
        at = int(rng.integers(len(lines[place]) + 1))
        lines[place] = lines[place][:at] + (b"\xff\xfe" if how == "bytes" else b"\x00") + lines[place][at:]
    file.write_bytes(b"\n".join(lines))
    return f"{how} in line {place + 1} of {file.name}"


def _change_line(line: bytes, how: str, rng: np.random.Generator) -> bytes:
    """Exchange, remove or stretch something in an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # changed before
        return line
    inside: Any = row
    found: list[tuple[Any, Any]] = []
    while isinstance(inside, (dict, list)) and inside and (not found or rng.random() < 0.6):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        found.append((inside, keys[int(rng.integers(len(keys)))]))
        inside = inside[found[-1][1]]
    if not found:
        return line
    holder, key = found[-1]
    if how == "key":
        del holder[key]
    elif how == "long":
        holder[key] = "7" * 10_000_000
    elif how == "nested":
        holder[key] = {"messages": [{"role": "user", "content": [{"type": "text", "text": json.loads(line)}]}]}
    else:
        holder[key] = _VALUES[int(rng.integers(len(_VALUES)))]
    return json.dumps(row).encode()


def _change_table(file: Path, rng: np.random.Generator) -> str:
    """Change a column of a Parquet file."""
    table = pq.read_table(file)
    name = str(rng.choice(table.column_names))
    index, n = table.column_names.index(name), table.num_rows
    how = str(rng.choice(["drop", "nulls", "text", "numbers", "lists", "objects", "flip"]))
    columns = {
        "nulls": pa.nulls(n), "text": pa.array(["\u202e<b>"] * n), "numbers": pa.array([float("nan")] * n),
        "lists": pa.array([[10**6]] * n), "objects": pa.array([{"a": [None]}] * n),
    }  # fmt: skip
    if how == "flip":
        whole = bytearray(file.read_bytes())
        whole[int(rng.integers(len(whole)))] ^= 255
        file.write_bytes(whole)
    else:
        table = table.remove_column(index)
        pq.write_table(table if how == "drop" else table.add_column(index, name, columns[how]), file)
    return f"{how} {name} of"


def attempt_log(number: int, torture: Torture, made: Path, room: Path) -> tuple[str, str, str]:
    """As `attempt`, of a trainer's log."""
    rng = np.random.default_rng([torture.seed, number])
    name = str(rng.choice(list(_IMPORTS)))
    here = room / str(number)
    try:
        log = shutil.copytree(_LOGS / name, here / name)
        what = f"{name}: " + ", ".join(change_log(log, rng) for _ in range(rng.integers(1, 4)))
        to = here / "rollouts.parquet"
        try:
            ended = run(_importing(name, to, _IMPORTS[name], log, made / "chat"), here)
        except subprocess.TimeoutExpired:
            return "log", what, f"takes longer than {_LIMIT_S} s"
        if wrong := unusual_end(ended):
            return "log", what, wrong
        if ended.returncode == 0:
            rollouts = tsae.Rollouts.read(to)
            for column in ("prompt_ids", "response_ids"):
                ids = rollouts.table[column].combine_chunks().flatten().to_numpy()
                if len(ids) and not 0 <= ids.min() <= ids.max() < 20:
                    return "log", what, f"gives {column} outside of the vocabulary"
        return "log", what, ""
    except tsae.TsaeError as error:
        return "log", what, f"gives what cannot be read: {error}"
    finally:
        shutil.rmtree(here, ignore_errors=True)


def unusual_end(ended: subprocess.CompletedProcess[str]) -> str:
    """What is bad of how a command ended: a traceback, another exit code than 0 and 2, or 2 without a word."""
    said = ended.stderr.strip()
    if "Traceback" in said:
        return f"traceback: {said.splitlines()[-1]}"
    if ended.returncode == 2:
        return "" if said else "exit code 2 without a word"
    return f"exit code {ended.returncode}: {said[-200:]}" if ended.returncode else ""


def attempt(number: int, torture: Torture, made: Path, room: Path) -> tuple[str, str, str]:
    """(kind, what was done, what is bad: empty where the case is good)."""
    rng = np.random.default_rng([torture.seed, number])
    kind = torture.only or str(rng.choice(["damaged", "log", "command"], p=[0.5, 0.25, 0.25]))
    if kind == "log":
        return attempt_log(number, torture, made, room)
    stage = STAGES[int(rng.integers(len(STAGES)))]
    here = room / str(number)
    needed = {artefact for artefact in ("raw.parquet", "acts", "sae", "features", "diff") if artefact in stage.command}
    here.mkdir()
    try:
        for artefact in sorted(needed):
            source = made / artefact
            shutil.copytree(source, here / artefact) if source.is_dir() else shutil.copy(source, here / artefact)
        (here / "out").mkdir()
        command, what = stage.command, ""
        if kind == "damaged":
            whole = here / str(rng.choice(stage.reads))
            files = sorted(p for p in whole.rglob("*") if p.is_file()) if whole.is_dir() else [whole]
            file = files[int(rng.integers(len(files)))]
            alike = [p for p in files if p != file and p.suffix == file.suffix] or files
            possible = damages(file, alike[int(rng.integers(len(alike)))], rng)
            how = str(rng.choice(list(possible)))
            possible[how]()
            what = f"{stage.name}: {how} {file.relative_to(here)}"
        else:
            command = disturb(rng, command)
            what = f"tsae {' '.join(map(repr, command))}"
            for name in ("precious.txt", "precious.json", "precious.parquet"):
                (here / name).write_text('{"precious": 1}')
        before = {path: sha256(path) for path in here.rglob("*") if path.is_file()}
        try:
            ended = run(command, here)
        except subprocess.TimeoutExpired:
            return kind, what, f"takes longer than {_LIMIT_S} s"
        except ValueError:
            return kind, what, ""  # no process takes such a word
        changed = [path.relative_to(here).as_posix() for path, digest in before.items()
                   if not path.is_file() or sha256(path) != digest]  # fmt: skip
        if changed:
            return kind, what, f"changed {', '.join(changed)}"
        if wrong := unusual_end(ended):
            return kind, what, wrong
        if (
            ended.returncode == 0
            and kind == "damaged"
            and results(here / "out") != results(made / f"expected-{stage.name}")
        ):
            found, expected = results(here / "out"), results(made / f"expected-{stage.name}")
            names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            return kind, what, f"silently different: {', '.join(names[:4])}"
        return kind, what, ""
    finally:
        shutil.rmtree(here, ignore_errors=True)


def main() -> None:
    torture = tyro.cli(Torture, description=__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        made, room = (torture.to or Path(temporary) / "made").absolute(), Path(temporary) / "cases"
        make(made)
        room.mkdir()
        numbers = range(torture.cases) if torture.case is None else [torture.case]
        kinds: Counter[str] = Counter()
        bad = []
        with ThreadPoolExecutor(torture.workers) as pool:
            found = pool.map(lambda number: attempt(number, torture, made, room), numbers)
            for number, (kind, what, wrong) in zip(numbers, found, strict=True):
                kinds[f"{kind}, {'bad' if wrong else 'good'}"] += 1
                if wrong or torture.case is not None:
                    print(f"{number}: {what}\n    {wrong or 'good'}", flush=True)
                if wrong:
                    bad.append({"case": number, "kind": kind, "what": what, "wrong": wrong})
    figures = {"cases": len(numbers), "seed": torture.seed, "kinds": dict(sorted(kinds.items())), "bad": bad}
    print(json.dumps({"name": "torture", "ratio": len(bad) / max(len(numbers), 1), **figures}))


if __name__ == "__main__":
    main()
