"""Parts of a command as tasks of a Ray cluster.

A task runs the command with --part in the worker's own process, so that it ends with its node. Ray starts it again on
another. Nothing passes through Ray but the words of the command and the last line of what it said: results are files.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tsae.commands.options.spread import Spread
from tsae.errors import TsaeError

_KNOWN = ("num_cpus", "num_gpus", "memory", "accelerator_type")


def run_on_ray(
    words: Sequence[str], spread: Spread, logs: Path, device: str, done: Callable[[], None]
) -> dict[int, str]:
    """Run a command's parts on a Ray cluster, and wait for them.

    Args:
        words: the command's name and options, without those of `Spread`.
        spread: how.
        logs: folder for what each part says.
        device: torch device of the command.
        done: called whenever a part ends.

    Returns:
        of each part that failed, the last line of what it said.

    Raises:
        TsaeError: where Ray is not installed, cannot be reached, or has no node that a part fits on.
    """
    ray = _ray()
    needs = resources(spread.ray, device)
    ours = not ray.is_initialized()
    if ours:
        _connect(ray)
    try:
        _check_fits(ray, needs)
        options = {"max_retries": spread.retries, "retry_exceptions": [_Died], "max_calls": 1, **needs}
        task = ray.remote(**options)(_run_part)
        here = str(Path.cwd())
        waiting = {
            task.options(name=f"tsae-{words[0]}-{number}").remote(
                list(words), f"{number}/{spread.parts}", str(logs / f"{number}-of-{spread.parts}.log"), here
            ): number
            for number in range(1, spread.parts + 1)
        }
        failed: dict[int, str] = {}
        try:
            while waiting:
                (ended,), _ = ray.wait(list(waiting), num_returns=1)
                number = waiting.pop(ended)
                try:
                    said = ray.get(ended)
                except ray.exceptions.RayError as error:
                    said = _reason(error)
                if said:
                    failed[number] = said
                done()
        except BaseException:
            for each in waiting:
                ray.cancel(each, force=True)
            raise
        return failed
    finally:
        if ours:
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
            if not (name and 0 <= number < float("inf")):
                raise ValueError
        except ValueError:
            raise TsaeError(
                f"{word!r} is no amount of a resource", where="--ray", fix="Give NAME=NUMBER, such as num_gpus=1."
            ) from None
        (found if name in _KNOWN else own)[name] = number
    return found | ({"resources": own} if own else {})


class _Died(Exception):
    """A part ended by something that may go away, and is started again."""


def _run_part(words: list[str], part: str, log: str, folder: str) -> str:
    """The task: gives what a user has to put right, or nothing."""
    os.chdir(folder)
    sys.argv = ["tsae", *words, "--part", part]
    status: Any = 0
    with open(log, "a", encoding="utf-8") as said, redirect_stdout(said), redirect_stderr(said):
        print(
            f"part {part} on {socket.gethostname()}, Ray node {_ray().get_runtime_context().get_node_id()}", flush=True
        )
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
    """The last line of what a part said, without the name of the program."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").strip().splitlines()
    return lines[-1].removeprefix("tsae: ") if lines else ""


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise TsaeError("Ray is not installed", where="--executor ray", fix="pip install 'tsae[ray]'") from error
    return ray


def _connect(ray: Any) -> None:
    # Ray reports its use to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "/" not in host:
            # Ray itself tries for ever.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has no class of its own for a cluster that does not answer
        found = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TsaeError(
            f"the cluster at {address or 'this machine'} cannot be used ({found})",
            where="--executor ray",
            fix="Set RAY_ADDRESS to a running cluster, or unset it.",
        ) from error


def _check_fits(ray: Any, needs: Mapping[str, Any]) -> None:
    """Ray would wait for ever for a node that has what a part needs."""
    wanted = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"], **needs.get("resources", {})}
    if "memory" in needs:
        wanted["memory"] = needs["memory"]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
        most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in wanted}
        there = ", ".join(f"{name} {amount:g}" for name, amount in most.items())
        raise TsaeError(
            f"no node has what a part needs ({asked}); the most that a node has is {there}",
            where="--executor ray",
            fix="Ask for less with --ray, such as --ray num_gpus=0, or add a node.",
        )


def _reason(error: Any) -> str:
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
