"""Commands in parts: the command of each part, and results that do not depend on parts, processes and deaths."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tsae
from support.builders import digests, make_rollouts
from support.cli import run
from support.refusals import fails, refuses
from tsae.cli import parse
from tsae.commands.spreading import Spread, resources, run_parts, slurm_script, without_spread
from tsae.errors import TsaeError
from tsae.rollouts.problems import Problem, write_problems


def test_a_part_is_told_all_but_how_the_work_is_spread() -> None:
    words = "capture --series a b --parts 7 --slurm partition=gpu time=4:00:00 --to acts --workers=2 --print-slurm"
    assert without_spread([*words.split(), "--executor", "slurm"]) == ["capture", "--series", "a", "b", "--to", "acts"]
    assert without_spread(["capture", "--print_slurm", "--retries", "1", "--sites", "x"]) == ["capture", "--sites", "x"]


def test_the_job_array_says_the_same_command_with_a_part(tmp_path: Path) -> None:
    words = ["capture", "--series", "my runs", "--rollouts", "r.parquet", "--to", str(tmp_path / "acts")]
    spread = Spread(parts=7, slurm=("partition=gpu", "--time=1:00:00"))
    script = slurm_script([sys.executable, "-m", "tsae", *words], spread, tmp_path / "acts")
    lines = script.splitlines()
    assert "#SBATCH --array=1-7" in lines
    assert "#SBATCH --partition=gpu" in lines
    assert "#SBATCH --time=1:00:00" in lines
    (task,) = (shlex.split(line.replace("$SLURM_ARRAY_TASK_ID", "3")) for line in lines if '--part "' in line)
    options = parse(task[task.index("tsae") + 1 : -1])
    assert (options.part, options.series, options.to) == ("3/7", ("my runs",), tmp_path / "acts")
    assert not options.spread.asked


@pytest.mark.parametrize("sign", ["\n", "\r", "\0", "\x1b", "\u2028"])
@pytest.mark.parametrize("place", ["word", "slurm", "to"])
def test_no_word_makes_a_line_of_its_own_in_the_script(place: str, sign: str) -> None:
    word = f"a{sign}touch b{sign}#"
    command = ["python", "-m", "tsae", "capture", *([word] if place == "word" else [])]
    spread = Spread(parts=2, slurm=(word,) if place == "slurm" else ())
    with pytest.raises(TsaeError, match="holds a line break or another control character, expected one line of text"):
        slurm_script(command, spread, Path(word if place == "to" else "acts"))


def test_logs_of_a_job_lie_where_the_output_does() -> None:
    command = ["python", "-m", "tsae", "capture"]
    script = slurm_script(command, Spread(parts=2), Path("/my runs/50%j #1"))
    assert '#SBATCH --output="/my runs/50%%j #1.parts/%a-of-2.log"\n' in script
    for sign in ('"', "\\"):
        with pytest.raises(TsaeError, match=r'holds " or \\, which SLURM cannot be given'):
            slurm_script(command, Spread(parts=2), Path(f"a{sign}b"))


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(("starts", "again"), [(0, True), (1, True), (2, False)])
def test_a_task_asks_to_start_again_before_its_time_is_over(starts: int, again: bool, tmp_path: Path) -> None:
    """Bash runs the script; a part is stood for by a command that waits, and SLURM by its signal and by `scontrol`."""
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/asked\nexit 1\n')
    (tmp_path / "scontrol").chmod(0o755)
    part = ["/bin/bash", "-c", f'echo "$@" > {tmp_path}/part; sleep 0.5; exit 7', "capture"]
    script = slurm_script(part, Spread(parts=4, retries=2), tmp_path / "acts")
    assert "#SBATCH --signal=B:USR1@60\n" in script
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "812"}
    environment |= {"SLURM_RESTART_COUNT": str(starts)} if starts else {}
    with subprocess.Popen(["bash", "-c", script], env=environment) as task:
        while not (tmp_path / "part").is_file():
            time.sleep(0.01)
        task.send_signal(signal.SIGUSR1)
        assert task.wait() == 7  # what the part says, if SLURM does not end the task
    assert (tmp_path / "part").read_text() == "--part 3/4\n"
    assert (tmp_path / "asked").is_file() == again
    assert not again or (tmp_path / "asked").read_text() == "requeue 812\n"


@pytest.mark.parametrize("option", ["--parts 0", "--parts 999999999999", "--workers -1", "--retries -1"])
def test_numbers_that_make_no_sense_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "capture", "--series", "a", "--rollouts", "r", "--to", "acts", *option.split()).err
    assert re.search(r"Spread: \w+=-?\d+ must be at (least|most)", said)


def test_without_slurm_the_script_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses("there is no sbatch here", run_parts, ["capture"], Spread(parts=2, executor="slurm"), tmp_path, "cpu")
    with pytest.raises(TsaeError, match="is one part, and all are to be run"):
        run_parts(["capture", "--part=1/2"], Spread(parts=2, print_slurm=True), tmp_path, "cpu")
    assert not run_parts(["capture"], Spread(parts=2, print_slurm=True), tmp_path, "cpu")
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=tsae-capture\n")


@pytest.fixture(scope="module")
def whole(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """A capture by one process: the options of the command, and the store."""
    folder = tmp_path_factory.mktemp("whole")
    make_rollouts(n_problems=8, n_samples=4, tokenizer=fingerprint).write(folder / "rollouts.parquet")
    command: list[object] = ["capture", "--series", llama, "--rollouts", folder / "rollouts.parquet"]
    command += ["--shard-tokens", 60, "--sites", "blocks.1.hook_resid_post"]
    run(*command, "--to", folder / "acts")
    return command, folder / "acts"


@pytest.mark.slow
def test_parts_here_give_the_same_bytes(whole: tuple[list[object], Path], tmp_path: Path) -> None:
    command, acts = whole
    run(*command, "--to", tmp_path / "acts", "--parts", 3, "--workers", 2)
    assert digests(tmp_path / "acts") == digests(acts)
    assert sorted(p.name for p in (tmp_path / "acts.parts").iterdir()) == [f"{i}-of-3.log" for i in (1, 2, 3)]


@pytest.mark.slow
def test_an_encoding_in_parts_is_joined(whole: tuple[list[object], Path], tmp_path: Path) -> None:
    _, acts = whole
    sizes = ("--tokens", 400, "--batch-tokens", 100, "--d-sae", 32, "--k", 4)
    run("train", "--store", acts, "--to", tmp_path / "sae", *sizes)
    run("encode", "--sae", tmp_path / "sae", "--store", acts, "--to", tmp_path / "one")
    run("encode", "--sae", tmp_path / "sae", "--store", acts, "--to", tmp_path / "two", "--parts", 2, "--workers", 2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.slow
def test_a_sampling_in_parts_is_put_together(llama: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    write_problems([Problem(f"p{i}", f"{i}+1?", str(i + 1)) for i in range(6)], problems)
    command = ["rollouts", "sample", "--series", llama, "--problems", problems, "--n-samples", 3]
    command += ["--max-new-tokens", 6, "--batch-size", 4]
    (tmp_path / "one.parquet.pieces").mkdir()
    (tmp_path / "one.parquet.pieces" / "notes.txt").write_text("mine")
    run(*command, "--to", tmp_path / "one.parquet")
    assert [file.name for file in (tmp_path / "one.parquet.pieces").iterdir()] == ["notes.txt"]
    run(*command, "--to", tmp_path / "two.parquet", "--parts", 2, "--workers", 2)
    one, two = (tsae.Rollouts.read(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert one.table.equals(two.table)
    assert not (tmp_path / "two.parquet.pieces").exists()


@pytest.mark.slow
def test_a_refused_part_is_not_started_again(whole: tuple[list[object], Path], tmp_path: Path) -> None:
    """Its reason is for the user to put right."""
    command, _ = whole
    with pytest.raises(SystemExit) as ended:
        run(*command[:-1], "blocks.9.hook_resid_post", "--to", tmp_path / "acts", "--parts", 2)
    assert ended.value.code == 2
    log = (tmp_path / "acts.parts" / "1-of-2.log").read_text(encoding="utf-8")
    assert log.count("blocks.9.hook_resid_post") == 1


@pytest.mark.slow
def test_a_job_array_gives_the_same_bytes_though_a_node_dies(
    whole: tuple[list[object], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for SLURM runs the script's tasks, last one first; it kills the second and starts it again."""
    command, acts = whole
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        "#!/bin/bash\nset -e\nscript=$(mktemp)\ncat > $script\n"
        "for i in 3 2 1; do\n"
        "  export SLURM_ARRAY_TASK_ID=$i\n"
        '  if [ $i = 2 ]; then timeout -s KILL 6 bash $script >> "$TASKS" 2>&1 || true; fi\n'
        '  bash $script >> "$TASKS" 2>&1\n'
        "done\necho Submitted batch job 1\n"
    )
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TASKS", str(tmp_path / "tasks.log"))
    run(*command, "--to", tmp_path / "acts", "--parts", 3, "--executor", "slurm")
    assert "Submitted batch job 1" in capfd.readouterr().out
    assert digests(tmp_path / "acts") == digests(acts)


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a shell script stand in for the command of a part."""

    def stand_in(script: str) -> None:
        (tmp_path / "part.sh").write_text(script)
        monkeypatch.setattr("tsae.commands.spreading.TSAE", ("/bin/sh", str(tmp_path / "part.sh")))

    return stand_in


def test_every_worker_has_a_gpu_of_its_own(
    part: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the process may use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    part('echo "$CUDA_VISIBLE_DEVICES"; sleep 0.3\n')
    assert run_parts(["capture"], Spread(parts=4), tmp_path / "acts", "cuda")
    logs = [(tmp_path / "acts.parts" / f"{i}-of-4.log").read_text().strip() for i in (1, 2, 3, 4)]
    assert set(logs[:2]) == set(logs) == {"4", "6"}


def test_what_the_user_stops_is_not_started_again(
    part: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part is done, and the interruption comes while the second runs."""
    part(f'echo "$3" >> {tmp_path}/said; [ "$3" = 1/3 ] || exec sleep 900\n')

    class Interrupted:
        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self) -> None:
            while "2/3" not in (tmp_path / "said").read_text():
                time.sleep(0.05)
            raise KeyboardInterrupt

    monkeypatch.setattr("tsae.commands.spreading.progress_bar", lambda *_: Interrupted())
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_parts(["capture"], Spread(parts=3, workers=2), tmp_path / "acts", "cpu")
    assert time.monotonic() - began < 300
    said = (tmp_path / "said").read_text().split()
    assert len(said) == len(set(said))


def test_a_part_that_dies_is_started_again(part: Callable[[str], None], tmp_path: Path) -> None:
    part(f'echo "$@" >> {tmp_path}/said; [ $(grep -c 2/2 {tmp_path}/said) = 2 ] || [ "$3" = 1/2 ]\n')
    assert run_parts(["capture"], Spread(parts=2), tmp_path / "acts", "cpu")
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["capture --part 1/2", "capture --part 2/2", "capture --part 2/2"]
    with pytest.raises(TsaeError, match="1 of 2 parts failed; part 2: exit status 1"):
        run_parts(["capture"], Spread(parts=2, retries=0), tmp_path / "other", "cpu")


# --- Ray: a node dies in mid-work, and what comes out is the same


def test_what_a_part_takes() -> None:
    assert resources((), "cpu") == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert resources((), "cuda:0")["num_gpus"] == 1
    given = ("num-cpus=8", "num_gpus=0.5", "memory=64e9", "accelerator_type=H100", "tpu-slot=2")
    wanted = {"num_cpus": 8.0, "num_gpus": 0.5, "memory": 64e9, "accelerator_type": "H100"}
    assert resources(given, "cuda") == wanted | {"resources": {"tpu-slot": 2.0}}
    for wrong in ("num_gpus", "num_gpus=one", "=3", "num_cpus=-1", "memory=inf", "memory=nan"):
        refuses("is not an amount of a resource", resources, (wrong,), "cpu")


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
    assert "2 of 2 parts failed; part 1: " in said
    assert "blocks.9.hook_resid_post" in said
    assert (tmp_path / "acts.parts" / "1-of-2.log").read_text().count("Ray node") == 1  # not started again
    began = time.monotonic()
    assert "the cluster at 127.0.0.1:1 cannot be used" in says(RAY_ADDRESS="127.0.0.1:1")
    assert time.monotonic() - began < 600
