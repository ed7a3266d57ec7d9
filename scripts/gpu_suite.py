"""The tests and benches of `scripts/gpu_suite.sh`, each bounded in time, and their page.

A part gets its share of the minutes, and what the parts before it left. It runs in a process of its own: neither a
crash nor a bench that hangs takes the others with it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SHARES_OF = 220
_LEAST = 5
"""Seconds in which nothing could start."""
_MACHINE = """
import json, os, platform, sys, torch, transformers
device = sys.argv[1]
if device.startswith("cuda") and not torch.cuda.is_available():
    sys.exit("gpu_suite: torch sees no GPU on this machine")
try:
    import tyro
except ImportError as error:
    sys.exit(f"gpu_suite: {error}: run scripts/gpu_suite.sh --wheels where there is network, and copy .wheels along")
name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"a CPU ({platform.machine()})"
versions = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
versions |= {"transformers": transformers.__version__}
print(f"{name}, {os.cpu_count()} CPU cores, " + ", ".join(f"{key} {value}" for key, value in versions.items() if value))
"""


@dataclass(frozen=True)
class Part:
    """A process and its section of the page."""

    title: str
    seconds: int
    """Its share of the minutes, of `_SHARES_OF`."""
    arguments: tuple[str, ...]


def parts(device: str, scale: str, rows: Path) -> list[Part]:
    """In the order of their worth."""
    sizes = () if scale == "tiny" else ("--sizes", "2048x32768x64", "4096x65536x64")
    large = sizes and ("--sizes", "4096x65536x64")
    every = sizes and (*sizes, "4096x131072x64")

    def bench(title: str, seconds: int, *options: str) -> Part:
        common = ("--device", device, "--scale", scale, "--rows", str(rows), "--seconds", str(seconds // 6))
        return Part(title, seconds, ("scripts/bench_gpu.py", *common, "--parts", *options))

    half = ("--precisions", "bfloat16")
    # -v: of a run that is cut off, too, the log says which tests passed
    tests: tuple[str, ...] = ("-m", "pytest", "-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
    tests += ("tests/sae/test_kernels.py", "tests/app/test_gpu.py")
    return [
        Part("Tests", 70, tests),
        bench("Training step in bfloat16", 55, "train", *half, *every),
        bench("Capture", 50, "capture", "--rounds", "2", *large),
        bench("Encoding", 25, "encode", "--rounds", "2", *large),
        bench("Training step in float32", 20, "train", "--precisions", "float32", *large),
    ]


def run(command: list[str], seconds: float, log: Path) -> int | None:
    """The exit code of a command; None where it was cut off. What it prints is appended to the log."""
    with log.open("a") as stream:
        child = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def section(part: Part, code: int | None, seconds: float, printed: str, tables: Path) -> str:
    """What the page says of a part that has ended."""
    lines = printed.strip().splitlines() or ["nothing was printed"]
    found = tables.read_text("utf-8").strip("\n").split("\n", 1)[1] if tables.is_file() else ""
    text = f"\n## {part.title}\n{found}\n"
    if part.title == "Tests":
        failed = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
        text += "\n".join([lines[-1].strip("= "), "", *(f"- `{line}`" for line in failed)]).strip() + "\n"
    if code is None:
        text += f"\nCut off after {seconds:.0f} s.\n"
    elif code:
        text += f"\nEnded with exit code {code}: `{lines[-1]}`\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "runs" / "gpu")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    options = parser.parse_args()
    begin = time.monotonic()
    found = subprocess.run([sys.executable, "-c", _MACHINE, options.device], capture_output=True, text=True)
    if found.returncode:
        sys.exit(found.stderr.strip().splitlines()[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    log, rows, page = (options.out.resolve() / name for name in ("log.txt", "rows.jsonl", "measured-gpu.md"))
    for file in (log, rows):
        file.write_text("")
    text = f"# Measured on a GPU\n\nBy `scripts/gpu_suite.sh` on {found.stdout.strip()}; {date.today()}.\n"
    text += "Sizes are tiny: a rehearsal, whose numbers say nothing.\n" if options.tiny else ""
    every = parts(options.device, "tiny" if options.tiny else "full", rows)
    with tempfile.TemporaryDirectory() as folder:
        for i, part in enumerate(every):
            left = options.minutes * 60 - (time.monotonic() - begin)
            own, later = (sum(p.seconds for p in some) * options.minutes * 60 / _SHARES_OF for some in (
                every[i : i + 1], every[i + 1 :]
            ))  # fmt: skip
            seconds = min(left, max(own, left - later))
            print(f"{part.title}: at most {seconds:.0f} of {left:.0f} s", flush=True)
            tables, before = Path(folder) / f"{i}.md", log.stat().st_size
            command = [sys.executable, *part.arguments]
            command += ["--to", str(tables)] if "scripts/bench_gpu.py" in command else []
            if seconds < _LEAST:
                text += f"\n## {part.title}\n\nNot run: no time was left.\n"
            else:
                code = run(command, seconds, log)
                printed = log.read_bytes()[before:].decode(errors="replace")
                print("\n".join(line for line in printed.splitlines() if not line.startswith("{")), flush=True)
                text += section(part, code, seconds, printed, tables)
            page.write_text(text, encoding="utf-8")
    print(f"The page is {page}")


if __name__ == "__main__":
    main()
