"""Options of commands whose work divides into parts that know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsae.errors import TsaeError

_MOST = 10_000
"""More parts, processes or tries than any cluster runs at once."""


@dataclass(frozen=True)
class Spread:
    """The work in parts, each a process of its own, on this machine or on a cluster."""

    parts: int = 1
    """Divide the work into so many parts. The result does not depend on how many there are. If one fails, it is started
    again, and goes on from what it has finished."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Where parts run: local: processes on this machine; slurm: a job array; ray: tasks of a Ray cluster (needs
    tsae[ray]), the one at $RAY_ADDRESS, or one that runs on this machine, or a new one here. All nodes must see the
    same files under the same paths."""
    workers: int = 0
    """Local parts at a time; 0: one for each GPU with --device cuda, else one."""
    retries: int = 2
    """How often a part is started again. SLURM starts it again when its node died or its time is nearly over."""
    slurm: tuple[str, ...] = ()
    """Options of the job array, such as --slurm partition=gpu gres=gpu:1 time=4:00:00."""
    ray: tuple[str, ...] = ()
    """What a part takes of the Ray cluster, such as --ray num_cpus=8 num_gpus=1 memory=64e9; other names are resources
    of your own. By default one CPU, and one GPU with --device cuda."""
    print_slurm: bool = False
    """Print the job array's script, and stop."""

    def __post_init__(self) -> None:
        for name, least in (("parts", 1), ("workers", 0), ("retries", 0)):
            if not least <= getattr(self, name) <= _MOST:
                raise TsaeError(f"is {getattr(self, name)}, expected {least} to {_MOST:,}", where=f"--{name}")

    @property
    def asked(self) -> bool:
        """Whether the work is divided at all."""
        return self.parts > 1 or self.print_slurm or self.executor != "local"
