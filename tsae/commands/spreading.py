"""Parts of a command: processes here, a SLURM job array, or tasks on Ray. Each is the command itself with --part i/n.

Nothing is sent between parts, and nothing is kept here: what is finished lies in the command's own output folder. So a
part that died is started again and goes on, and so does the whole command.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from unicodedata import category

from tsae.base.progress import progress_bar
from tsae.commands.options.spread import Spread
from tsae.commands.ray_parts import last_line, run_on_ray
from tsae.errors import TsaeError

TIED = "TSAE_TIED"
"""Set for a part on this machine: it ends when its input does, because then the process that started it is gone."""
TSAE = (sys.executable, "-m", "tsae")


def run_parts(words: Sequence[str], spread: Spread, to: Path, device: str) -> bool:
    """Run a command's parts.

    Args:
        words: the command's name and options, as they were given.
        spread: how.
        to: the command's output folder.
        device: torch device of the command.

    Returns:
        whether all parts are done now; False where they were only submitted, or printed.

    Raises:
        TsaeError: where a part fails more often than `spread.retries`, SLURM takes no job, Ray cannot be used, or the
            words name one part.
    """
    if any(word.partition("=")[0] == "--part" for word in words):
        raise TsaeError(
            "is one part, and all are to be run", where="--part", fix="Give --part, or --parts and its options."
        )
    words = without_spread(words)
    command = [*TSAE, *words]
    if spread.print_slurm:
        print(slurm_script(command, spread, to), end="")
        return False
    logs(to).mkdir(parents=True, exist_ok=True)
    if spread.executor == "slurm":
        print(_submit(slurm_script(command, spread, to)))
        return False
    with progress_bar("parts", "part", spread.parts) as bar:
        if spread.executor == "ray":
            failed = run_on_ray(words, spread, logs(to), device, bar.update)
        else:
            failed = _run_here(command, spread, to, device, bar.update)
    if failed:
        number = min(failed)
        raise TsaeError(
            f"{len(failed)} of {spread.parts} parts failed; part {number} says: {failed[number]}",
            where=logs(to) / f"{number}-of-{spread.parts}.log",
            fix="Put that right, and give the same command again; what is finished is kept.",
        )
    return True


def end_with_parent() -> None:
    """End this process as soon as its input is closed, if it is a part that another process here has started.

    A part that outlived a killed command would be in the way of the next one.
    """
    if os.environ.pop(TIED, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock would be in the way of the interpreter's end
            pass
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def logs(to: Path) -> Path:
    """The folder of what each part said, beside the output folder."""
    return to.with_name(f"{to.name}.parts")


def without_spread(words: Sequence[str]) -> list[str]:
    """The words without the options of `Spread`."""
    names = {f"--{field.name}".replace("_", "-") for field in fields(Spread)}
    flags = {"--print-slurm", "--no-print-slurm"}
    found: list[str] = []
    skipping = False
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in names | flags:
            skipping = name not in flags and "=" not in word
        elif not skipping or word.startswith("-"):
            skipping = False
            found.append(word)
    return found


def slurm_script(command: Sequence[str], spread: Spread, to: Path) -> str:
    """A job array's script: one task a part.

    A task whose node died starts again, and so does one that comes near its time limit, `spread.retries` times at most.
    It goes on from what it has finished.

    Raises:
        TsaeError: where a word would not stay in its line of the script.
    """
    for word in (*command, *spread.slurm, str(to)):
        if any(category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in word):
            what = f"{word!r} holds a line break or another control character, expected one line of text"
            raise TsaeError(what, where="--executor slurm", fix="Use names without such characters.")
    log = str(logs(to))
    if {'"', "\\"} & set(log):
        what = f'{log} holds " or \\, which SLURM cannot be given in the name of a log'
        raise TsaeError(what, where="--to", fix="Use a folder without them.")
    # SLURM reads % as the start of a number of the job.
    output = f"{log.replace('%', '%%')}/%a-of-{spread.parts}.log"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=tsae-{command[len(TSAE)]}",
        f"#SBATCH --array=1-{spread.parts}",
        f'#SBATCH --output="{output}"',
        "#SBATCH --requeue",
        # A minute before the time limit, to the script alone.
        "#SBATCH --signal=B:USR1@60",
        "#SBATCH --open-mode=append",
        *(f"#SBATCH --{option.removeprefix('--')}" for option in spread.slurm),
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(log)}",
        f'again() {{ test "${{SLURM_RESTART_COUNT:-0}}" -ge {spread.retries} || scontrol requeue "$SLURM_JOB_ID"; }}',
        'trap "again || true" USR1',
        # Not in the foreground, for bash would wait for it before it looks at the signal.
        f'{shlex.join(command)} --part "$SLURM_ARRAY_TASK_ID/{spread.parts}" &',
        "while kill -0 $! 2> /dev/null; do wait $! || :; done",
        "wait $!",
    ]
    return "\n".join(lines) + "\n"


def _submit(script: str) -> str:
    try:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise TsaeError(
            "there is no sbatch here", where="--executor slurm", fix="Use --print-slurm, and submit the script there."
        ) from error
    if done.returncode:
        raise TsaeError(
            f"sbatch takes no job ({done.stderr.strip() or done.returncode})",
            where="--executor slurm",
            fix="Give what your cluster needs, such as --slurm partition=gpu.",
        )
    return done.stdout.strip()


def _run_here(
    command: Sequence[str], spread: Spread, to: Path, device: str, done: Callable[[], None]
) -> dict[int, str]:
    """Of each part that failed, the last line of what it said."""
    gpus = _gpus() if device == "cuda" else []
    workers = min(spread.workers or len(gpus) or 1, spread.parts)
    free: SimpleQueue[int] = SimpleQueue()
    for worker in range(workers):
        free.put(worker)
    running: set[subprocess.Popen[bytes]] = set()
    stopped, starting = Event(), Lock()

    def run_one(number: int) -> str | None:
        """The last line of what a part said, if it failed."""
        log = logs(to) / f"{number}-of-{spread.parts}.log"
        worker = free.get()
        try:
            environment = {**os.environ, TIED: "1"}
            # Processes that each take all cores slow each other down.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
            for _ in range(spread.retries + 1):
                with log.open("ab") as said:
                    with starting:
                        if stopped.is_set():  # A part that died because the user stopped is not started again.
                            return "stopped"
                        process = subprocess.Popen(
                            [*command, "--part", f"{number}/{spread.parts}"],
                            stdin=subprocess.PIPE,
                            stdout=said,
                            stderr=said,
                            env=environment,
                        )
                        running.add(process)
                    with process:  # keeps its input open until it has ended
                        status = process.wait()
                    running.discard(process)
                if status in (0, 2):  # What a user has to put right does not go away by itself.
                    break
            return None if status == 0 else last_line(log) or f"exit status {status}"
        finally:
            free.put(worker)

    failed: dict[int, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        tasks = {pool.submit(run_one, number): number for number in range(1, spread.parts + 1)}
        try:
            for task in as_completed(tasks):
                said = task.result()
                if said is not None:
                    failed[tasks[task]] = said
                done()
        except BaseException:
            with starting:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    process.terminate()
            raise
    return failed


def _gpus() -> list[str]:
    """Names of the GPUs that may be used, for CUDA_VISIBLE_DEVICES."""
    import torch

    known = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [known[i] if i < len(known) and known[i] else str(i) for i in range(torch.cuda.device_count())]
