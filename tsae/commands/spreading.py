"""Parts of a command: processes here, a SLURM job array, or tasks on Ray. Each is the command itself with --part i/n.

Nothing is sent between parts, and nothing is kept here: what is finished lies in the command's own output folder. So a
part that died is started again and resumes, and so does the whole command. On Ray a part runs in the worker's own
process, so that it ends with its node, and Ray starts it again on another.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Annotated, Any, Literal
from unicodedata import category

from pydantic import Field

from tsae.base.progress import progress_bar
from tsae.base.validation import Daily, config
from tsae.errors import TsaeError, first_line, needing, refuse

TIED = "TSAE_TIED"
"""Set for a part on this machine: it ends when its input does, because then the process that started it is gone."""
TSAE = (sys.executable, "-m", "tsae")
_KNOWN = ("num_cpus", "num_gpus", "memory", "accelerator_type")
"""Resources that Ray knows."""


@config
class Spread:
    """Division of the work into parts, each a process of its own, on this machine or on a cluster."""

    parts: Daily[Annotated[int, Field(ge=1, le=10_000)]] = 1
    """Divide the work into so many parts. The result does not depend on how many there are. If one fails, it is started
    again, and resumes from what it has finished."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Where parts run. local: processes on this machine. slurm: a job array. ray (needs tsae[ray]): tasks of the Ray
    cluster at $RAY_ADDRESS, of a cluster that runs on this machine, or of a new one here. All nodes must see the same
    files under the same paths."""
    workers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Local parts at a time; 0: one for each GPU with --device cuda, else one."""
    retries: Annotated[int, Field(ge=0, le=10_000)] = 2
    """How often a part is started again. SLURM starts it again when its node died or its time is nearly over."""
    slurm: tuple[str, ...] = ()
    """Options of the job array, such as --slurm partition=gpu gres=gpu:1 time=4:00:00."""
    ray: tuple[str, ...] = ()
    """What a part takes of the Ray cluster, such as --ray num_cpus=8 num_gpus=1 memory=64e9; other names are resources
    of your own. By default one CPU, and one GPU with --device cuda."""
    print_slurm: bool = False
    """Print the job array's script, and stop."""

    @property
    def asked(self) -> bool:
        """Whether the work is divided at all."""
        return self.parts > 1 or self.print_slurm or self.executor != "local"


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
    one = any(word.partition("=")[0] == "--part" for word in words)
    refuse("--part", (one, "is one part, and all are to be run", "Give --part, or --parts and its options."))
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
            f"{len(failed)} of {spread.parts} parts failed; part {number}: {failed[number]}",
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
    """The folder of the parts' logs, beside the output folder."""
    return to.with_name(f"{to.name}.parts")


def without_spread(words: Sequence[str]) -> list[str]:
    """The words without the options of `Spread`, and without --part."""
    names = {"--part", *(f"--{field.name}".replace("_", "-") for field in fields(Spread))}
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
    It resumes from what it has finished.

    Raises:
        TsaeError: where a word would not stay in its line of the script.
    """
    for word in (*command, *spread.slurm, str(to)):
        odd = any(category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in word)
        what = f"{word!r} holds a line break or another control character, expected one line of text"
        refuse("--executor slurm", (odd, what, "Use names without such characters."))
    log = str(logs(to))
    what = f'{log} holds " or \\, which SLURM cannot be given in the name of a log'
    refuse("--to", ({'"', "\\"} & set(log), what, "Use a folder without them."))
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
    where = "--executor slurm"
    try:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        fix = "Use --print-slurm, and submit the script there."
        raise TsaeError("there is no sbatch here", where=where, fix=fix) from error
    what = f"sbatch takes no job ({done.stderr.strip() or done.returncode})"
    refuse(where, (done.returncode, what, "Give what your cluster needs, such as --slurm partition=gpu."))
    return done.stdout.strip()


def _run_here(
    command: Sequence[str], spread: Spread, to: Path, device: str, done: Callable[[], None]
) -> dict[int, str]:
    """The last line that each failed part printed, by its number."""
    gpus = _gpus() if device == "cuda" else []
    workers = min(spread.workers or len(gpus) or 1, spread.parts)
    # Processes that each take all cores slow each other down.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)), **os.environ, TIED: "1"}
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    for worker in range(workers):
        free.put({"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if gpus else {})
    running: set[subprocess.Popen[bytes]] = set()
    stopped, starting = Event(), Lock()

    def run_once(number: int, log: Path, gpu: dict[str, str]) -> int:
        with log.open("ab") as output:
            with starting:
                if stopped.is_set():  # A part that died because the user stopped is not started again.
                    return 2
                process = subprocess.Popen(
                    [*command, "--part", f"{number}/{spread.parts}"],
                    stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment | gpu,
                )  # fmt: skip
                running.add(process)
            with process:  # keeps its input open until it has ended
                process.wait()
            running.discard(process)
            return process.returncode

    def run_one(number: int) -> str:
        log, gpu, status = logs(to) / f"{number}-of-{spread.parts}.log", free.get(), 0
        try:
            for _ in range(spread.retries + 1):
                status = run_once(number, log, gpu)
                if status in (0, 2):  # What a user has to put right does not go away by itself.
                    break
        finally:
            free.put(gpu)
        return (last_line(log) or f"exit status {status}") if status else ""

    failed: dict[int, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        tasks = {pool.submit(run_one, number): number for number in range(1, spread.parts + 1)}
        try:
            for task in as_completed(tasks):
                if why := task.result():
                    failed[tasks[task]] = why
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


def run_on_ray(
    words: Sequence[str], spread: Spread, logs: Path, device: str, done: Callable[[], None]
) -> dict[int, str]:
    """Run a command's parts on a Ray cluster, and wait for them.

    Args:
        words: the command's name and options, without those of `Spread`.
        spread: how.
        logs: folder for the parts' logs.
        device: torch device of the command.
        done: called whenever a part ends.

    Returns:
        the last line that each failed part printed, by its number.

    Raises:
        TsaeError: where Ray is not installed, cannot be reached, or has no node that a part fits on.
    """
    needs = resources(spread.ray, device)
    ray = _connected()
    try:
        _check_fits(ray, needs)
        task = ray.remote(max_retries=spread.retries, retry_exceptions=[_Died], max_calls=1, **needs)(_run_part)
        waiting = {
            task.options(name=f"tsae-{words[0]}-{number}").remote(
                list(words), f"{number}/{spread.parts}", str(logs / f"{number}-of-{spread.parts}.log"), str(Path.cwd())
            ): number
            for number in range(1, spread.parts + 1)
        }
        failed: dict[int, str] = {}
        try:
            while waiting:
                (ended,), _ = ray.wait(list(waiting), num_returns=1)
                number = waiting.pop(ended)
                try:
                    why = ray.get(ended)
                except ray.exceptions.RayError as error:
                    why = first_line(getattr(error, "cause", None) or error)
                if why:
                    failed[number] = why
                done()
        except BaseException:
            for each in waiting:
                ray.cancel(each, force=True)
            raise
        return failed
    finally:
        ray.shutdown()


def resources(given: Sequence[str], device: str) -> dict[str, Any]:
    """What `ray.remote` takes of NAME=NUMBER words.

    Raises:
        TsaeError: where a word is none of these.
    """
    found: dict[str, Any] = {"num_cpus": 1.0, "num_gpus": float(device.startswith("cuda"))}
    own: dict[str, float] = {}
    for word in given:
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_") if name.replace("-", "_") in _KNOWN else name
        if name == "accelerator_type":
            found[name] = value
            continue
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        amount, fix = name and 0 <= number < float("inf"), "Give NAME=NUMBER, such as num_gpus=1."
        refuse("--ray", (not amount, f"{word!r} is not an amount of a resource", fix))
        (found if name in _KNOWN else own)[name] = number
    return found | ({"resources": own} if own else {})


class _Died(Exception):
    """A part ended by something that may go away, and is started again."""


def _run_part(words: list[str], part: str, log: str, folder: str) -> str:
    """The task: returns what a user has to put right, or nothing."""
    os.chdir(folder)
    sys.argv = ["tsae", *words, "--part", part]
    status: Any = 0
    with open(log, "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        node = importlib.import_module("ray").get_runtime_context().get_node_id()
        print(f"part {part} on {socket.gethostname()}, Ray node {node}", flush=True)
        try:
            runpy.run_module("tsae", run_name="__main__")
        except SystemExit as ended:
            status = ended.code or 0
        except Exception as error:
            traceback.print_exc()
            raise _Died(f"{type(error).__name__}: {error}") from None
    if status not in (0, 2):
        raise _Died(f"exit status {status}")
    return last_line(Path(log)) or "exit status 2" if status else ""


def last_line(log: Path) -> str:
    """The last line that a part printed, without the name of the program."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").strip().splitlines()
    return lines[-1].removeprefix("tsae: ") if lines else ""


def _connected() -> Any:
    """The module `ray`, connected to a cluster."""
    where = "--executor ray"
    with needing("ray", "spreading over Ray", where):
        import ray

    # Ray reports its use to its makers by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "/" not in host:
            # Ray itself tries for ever.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has no class of its own for a cluster that does not answer
        what = f"the cluster at {address or 'this machine'} cannot be used ({first_line(error)})"
        raise TsaeError(what, where=where, fix="Set RAY_ADDRESS to a running cluster, or unset it.") from error
    return ray


def _check_fits(ray: Any, needs: Mapping[str, Any]) -> None:
    """Ray would wait for ever for a node that has what a part needs."""
    wanted = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"], **needs.get("resources", {})}
    if "memory" in needs:
        wanted["memory"] = needs["memory"]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        return
    asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
    there = ", ".join(f"{name} {max((node.get(name, 0) for node in nodes), default=0):g}" for name in wanted)
    what = f"no node has what a part needs ({asked}); the most that a node has is {there}"
    fix = "Ask for less with --ray, such as --ray num_gpus=0, or add a node."
    raise TsaeError(what, where="--executor ray", fix=fix)
