"""Child processes of tests: forked from a server, given a port among them, and killed until they are done."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tsae.errors import TsaeError

# The server has imported what captures and trainings import and computed nothing: children start at once.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "tqdm.auto",
        "transformers.models.llama.modeling_llama",
        "torch._dynamo",
        "tsae.activations.capture",
        "tsae.activations.batches",
        "tsae.checkpoints.hooks",
        "tsae.sae.training.train",
    ]
)


def start(target: Callable[..., None], *args: Any) -> Any:
    child = _processes.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def start_ranks(size: int, target: Callable[..., None], *args: Any) -> list[Any]:
    """Children that find each other as torchrun's do; one that is refused ends with 2."""
    port = free_port()
    return [start(_on_rank, rank, size, port, target, *args) for rank in range(size)]


def _on_rank(rank: int, size: int, port: int, target: Callable[..., None], *args: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)  # as in the tests' own process, whose results these are compared with
    try:
        target(*args)
    except TsaeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def exit_codes(children: list[Any]) -> list[int | None]:
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def run_tsae(*words: Any, processes: int = 1) -> None:
    """Run a command of tsae in one process, or in several that torchrun starts. It says once what it wrote."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else ()), "-m", "tsae", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, err = child.communicate(timeout=900)
        finally:
            child.terminate()  # torchrun then ends its processes, which a kill would leave behind
    assert child.returncode == 0, err
    assert out.count("wrote ") == 1


def killed_until_done(begin: Callable[[], Any], wait: Callable[[Any, int], None]) -> int:
    """Begin again and again, kill each time, until one has ended by itself; returns how many were killed.

    Args:
        begin: starts a child.
        wait: (child, kills so far); it is killed when this returns.
    """
    kills = 0
    while True:
        child = begin()
        wait(child, kills)
        child.kill()
        child.join()
        if child.exitcode == 0:
            return kills
        assert child.exitcode == -signal.SIGKILL
        kills += 1


def past(progress: Callable[[], int], seconds: float) -> Callable[[Any, int], None]:
    """Waits until a child gets past where the one before left it, and then for up to so many seconds."""

    def wait(child: Any, kills: int) -> None:
        before = progress()  # the child has only just begun
        while child.is_alive() and progress() == before:
            time.sleep(0.001)
        time.sleep(random.uniform(0, seconds))

    return wait
