"""Commands in parts on a Ray cluster: a node dies in mid-work, and what comes out is the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.builders import make_rollouts
from tsae.commands.spreading import resources
from tsae.errors import TsaeError


def test_what_a_part_takes() -> None:
    assert resources((), "cpu") == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert resources((), "cuda:0")["num_gpus"] == 1
    given = ("num-cpus=8", "num_gpus=0.5", "memory=64e9", "accelerator_type=H100", "tpu-slot=2")
    wanted = {"num_cpus": 8.0, "num_gpus": 0.5, "memory": 64e9, "accelerator_type": "H100"}
    assert resources(given, "cuda") == wanted | {"resources": {"tpu-slot": 2.0}}
    for wrong in ("num_gpus", "num_gpus=one", "=3", "num_cpus=-1", "memory=inf", "memory=nan"):
        with pytest.raises(TsaeError, match="is not an amount of a resource"):
            resources((wrong,), "cpu")


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# Ray starts processes and threads, and warns in its own way: a cluster of two nodes lives in a process of its own. It
# kills the second node as soon as a part that runs there has written a shard, and says what that part was.
CLUSTER = """
import sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
parts, acts, n = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
while second is not None:
    for log in parts.glob("*.log"):
        number = int(log.name.partition("-")[0])
        if second.node_id in log.read_text():
            shards = list(acts.glob("base/*.h5"))
            mine = [shard for shard in shards if int(shard.stem) % n == number - 1]
            if mine and "is done" not in log.read_text() and "wrote" not in log.read_text():
                cluster.remove_node(second, allow_graceful=False)
                print(number, len(mine), second.node_id, flush=True)
                second = None
                break
    time.sleep(0.005)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_node_dies_in_mid_capture(llama: Path, fingerprint: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    make_rollouts(n_problems=600, n_samples=8, tokenizer=fingerprint).write(tmp_path / "rollouts.parquet")
    command = [sys.executable, "-m", "tsae", "capture", "--series", llama, "--rollouts", tmp_path / "rollouts.parquet"]
    command += ["--shard-tokens", "100", "--sites", "blocks.1.hook_resid_post"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, "--to", tmp_path / "whole"], check=True, env=environment, capture_output=True)
    acts, parts, n = tmp_path / "acts", tmp_path / "acts.parts", 3
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, parts, acts, str(n)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        spread = ["--parts", str(n), "--executor", "ray"]
        done = subprocess.run(
            [*command, "--to", acts, *spread],
            env={**environment, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        number, before, dead = cluster.stdout.readline().split()
        assert cluster.stdin is not None
        cluster.stdin.close()
    said = (parts / f"{number}-of-{n}.log").read_text()
    assert int(before) > 0
    nodes = [line.rpartition(" ")[2] for line in said.splitlines() if f"part {number}/{n} on " in line]
    assert nodes[0] == dead
    assert len(nodes) == 2
    assert nodes[1] != dead
    assert digests(acts) == digests(tmp_path / "whole")


@pytest.mark.slow
def test_what_ray_cannot_do_is_said(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    make_rollouts(n_problems=2, n_samples=2).write(tmp_path / "rollouts.parquet")
    command = [sys.executable, "-m", "tsae", "capture", "--series", llama, "--rollouts", tmp_path / "rollouts.parquet"]
    command += ["--to", tmp_path / "acts", "--parts", "2", "--executor", "ray"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def says(*more: str, **variables: str) -> str:
        done = subprocess.run(
            [*command, *more], env={**environment, **variables}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 2, done.stderr
        return done.stderr.strip().splitlines()[-1]

    assert "no node has what a part needs (CPU 1, GPU 4000)" in says("--ray", "num_gpus=4000")
    said = says("--sites", "blocks.9.hook_resid_post")
    assert "2 of 2 parts failed; part 1 says: " in said
    assert "blocks.9.hook_resid_post" in said
    assert (tmp_path / "acts.parts" / "1-of-2.log").read_text().count("Ray node") == 1  # not started again
    began = time.monotonic()
    assert "the cluster at 127.0.0.1:1 cannot be used" in says(RAY_ADDRESS="127.0.0.1:1")
    assert time.monotonic() - began < 600
