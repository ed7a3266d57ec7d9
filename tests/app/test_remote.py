"""Stores, features and rollouts at a URL: the same bytes as here, in parts, through a small cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

import tsae
from support.builders import digest_without_command, digests, make_rollouts
from support.children import free_port
from support.refusals import fails
from tsae.activations.capture import capture_part
from tsae.base import mirror
from tsae.base.part import Part
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.features.encode import encode_part
from tsae.rollouts.generation import Generator
from tsae.rollouts.problems import Problem, write_problems
from tsae.sae.quality.stability import Stability

pytestmark = pytest.mark.slow(ci=True)

SITE = "blocks.1.hook_resid_post"
CONFIG = tsae.CaptureConfig(shard_tokens=60)


@pytest.fixture(scope="module")
def here(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rollouts, store, SAE and features of one process on this machine, and an SAE of another seed."""
    folder = tmp_path_factory.mktemp("here")
    series = tsae.CheckpointSeries.load(llama)
    rollouts = make_rollouts(n_problems=8, n_samples=4, tokenizer=fingerprint)
    store = tsae.capture(series, rollouts, [SITE], to=folder / "acts", config=CONFIG, progress=False)
    training = tsae.TrainingConfig(tokens=2000, batch_tokens=100)
    sae = tsae.train(store, tsae.SAEConfig(d_sae=32, k=4), training=training, to=folder / "sae", progress=False)
    other = replace(training, seed=1)
    tsae.train(store, tsae.SAEConfig(d_sae=32, k=4), training=other, to=folder / "other", progress=False)
    tsae.encode(sae, store, to=folder / "features", progress=False)
    rollouts.write(folder / "rollouts.parquet")
    return {"folder": folder, "series": series, "rollouts": rollouts, "sae": sae}


def forget(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As on another machine: nothing is known, and nothing lies in the cache."""
    monkeypatch.setattr(mirror, "_mirrors", {})
    monkeypatch.setenv("TSAE_CACHE", str(cache))


def remote_digests(fs: Any, folder: str) -> dict[str, str]:
    return {name[len(folder) :].lstrip("/"): digest_without_command(fs.cat(name)) for name in fs.find(folder)}


def test_machines_that_share_a_url(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them capture a part each, two encode; a last one joins and reads. None sees another's disk."""
    folder = here["folder"]
    here["rollouts"].write("memory://bucket/rollouts.parquet")
    rollouts = tsae.Rollouts.read("memory://bucket/rollouts.parquet")
    left = []
    for index in (1, 0, 2):
        forget(monkeypatch, tmp_path / f"capture-{index}")
        left.append(
            len(capture_part(here["series"], rollouts, [SITE], to="memory://bucket/acts", part=Part(index, 3),
                             config=CONFIG, progress=False))
        )  # fmt: skip
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert remote_digests(remote, "/bucket/acts") == digests(folder / "acts")
    monkeypatch.setenv("TSAE_CACHE_GB", "2e-5")  # two shards and a half
    for index in (1, 0):
        forget(monkeypatch, tmp_path / f"encode-{index}")
        store = tsae.ActivationStore("memory://bucket/acts")
        missing = encode_part(here["sae"], store, to="memory://bucket/features", part=Part(index, 2), progress=False)
        kept = list((tmp_path / f"encode-{index}").rglob("0*.h5")) + list((tmp_path / f"encode-{index}").rglob("*.npz"))
        assert sum(file.stat().st_size for file in kept) < 3e4
    assert missing == 0
    forget(monkeypatch, tmp_path / "join")
    tsae.encode(here["sae"], "memory://bucket/acts", to="memory://bucket/features", progress=False)
    assert remote_digests(remote, "/bucket/features") == digests(folder / "features")
    forget(monkeypatch, tmp_path / "read")
    table = tsae.FeatureTable.load("memory://bucket/features")
    assert (table.codes[:] != tsae.FeatureTable.load(folder / "features").codes[:]).nnz == 0
    batches = list(tsae.ActivationStore("memory://bucket/acts").windows(SITE, partner=None).epoch(0, 100))
    assert sum(len(batch.x) for batch in batches) > 200


@pytest.mark.parametrize("fails_at", [1, 3])
def test_what_was_recorded_stays_where_an_upload_fails(
    here: dict[str, Any], remote: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    put, seen = type(remote).put_file, list[str]()

    def fails(fs: Any, file: str, to: str, **options: Any) -> None:
        seen.append(to) if to.endswith(".h5") else None
        if len(seen) >= fails_at:
            raise OSError(104, "Connection reset by peer")
        put(fs, file, to, **options)

    options: dict[str, Any] = {"to": "memory://bucket/acts", "config": CONFIG, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(type(remote), "put_file", fails)
        with pytest.raises(TsaeError, match=r"cannot be written to .*Connection reset by peer"):
            tsae.capture(here["series"], here["rollouts"], [SITE], **options)
    there, local = remote.find("/bucket/acts"), mirror.local("memory://bucket/acts", fetch=False)
    assert [name for name in there if name.endswith(".h5")] == [
        f"/bucket/acts/base/{i:05d}.h5" for i in range(fails_at - 1)
    ]
    assert len(list(local.rglob("*.h5"))) >= fails_at
    tsae.capture(here["series"], here["rollouts"], [SITE], **options)
    assert remote_digests(remote, "/bucket/acts") == digests(here["folder"] / "acts")


def test_a_capture_refused_before_anything_is_recorded_leaves_nothing_at_the_url(
    here: dict[str, Any], remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tsae.activations import capture as module

    monkeypatch.setattr(module, "capture_shard", Mock(side_effect=TsaeError("activations are not finite")))
    with pytest.raises(TsaeError, match="not finite"):
        tsae.capture(here["series"], here["rollouts"], [SITE], to="memory://bucket/acts", config=CONFIG, progress=False)
    assert remote.find("/bucket") == []


def test_a_capture_goes_on_at_another_machine(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dies after four shards, which are then not read again."""
    from tsae.activations import capture as module

    real, seen = module.capture_shard, list[str]()

    def dies(reader: Any, checkpoint: Any, rollouts: Any, piece: Any, *rest: Any) -> Any:
        if len(seen) == 4:
            raise KeyboardInterrupt
        seen.append(piece.file)
        return real(reader, checkpoint, rollouts, piece, *rest)

    options: dict[str, Any] = {"to": "memory://bucket/acts", "config": CONFIG, "progress": False}
    monkeypatch.setattr(module, "capture_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        tsae.capture(here["series"], here["rollouts"], [SITE], **options)
    there = [name for name in remote.find("/bucket/acts") if name.endswith(".h5")]
    assert 2 <= len(there) <= 4  # those that were on their way are lost with the machine
    forget(monkeypatch, tmp_path / "second")
    again = list[str]()
    monkeypatch.setattr(module, "capture_shard", lambda *a: again.append(a[3].file) or real(*a))
    tsae.capture(here["series"], here["rollouts"], [SITE], **options)
    assert not {f"/bucket/acts/{name}" for name in again} & set(there)
    assert remote_digests(remote, "/bucket/acts") == digests(here["folder"] / "acts")


def test_a_shard_that_was_damaged_there_is_named(here: dict[str, Any], remote: Any) -> None:
    acts = here["folder"] / "acts"
    remote.pipe({f"/bucket/acts/{name}": (acts / name).read_bytes() for name in digests(acts)})
    content = bytearray(remote.cat("/bucket/acts/base/00002.h5"))
    content[len(content) // 2] ^= 1
    remote.pipe("/bucket/acts/base/00002.h5", bytes(content))
    with pytest.raises(TsaeError, match=r"00002\.h5"):
        tsae.encode(here["sae"], "memory://bucket/acts", progress=False)


def test_features_that_have_no_stability_any_more(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, to = here["folder"], "memory://bucket/features"
    shutil.copytree(folder / "sae", tmp_path / "sae")
    tsae.stability(here["sae"], [folder / "other"]).save(tmp_path / "sae")
    tsae.encode(tmp_path / "sae", folder / "acts", to=to, progress=False)
    assert remote.exists("/bucket/features/stability.json")
    tsae.encode(folder / "sae", folder / "acts", to=to, progress=False)
    assert remote_digests(remote, "/bucket/features") == digests(folder / "features")
    forget(monkeypatch, tmp_path / "read")
    assert tsae.FeatureTable.load(to).stability is None


def test_pieces_that_another_machine_has_joined_are_dropped(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first one takes them for those of its next encoding, and is refused."""
    folder, to = here["folder"], "memory://bucket/features"
    encode_part(here["sae"], folder / "acts", to=to, part=Part(0, 2), progress=False)
    first = mirror._mirrors
    forget(monkeypatch, tmp_path / "second")
    encode_part(here["sae"], folder / "acts", to=to, part=Part(1, 2), progress=False)
    tsae.encode(here["sae"], folder / "acts", to=to, progress=False)
    monkeypatch.setattr(mirror, "_mirrors", first)
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))
    assert encode_part(folder / "other", folder / "acts", to=to, part=Part(0, 2), progress=False)
    tsae.encode(folder / "other", folder / "acts", to=to, progress=False)
    assert tsae.FeatureTable.load(to).info["sae"]["weights"] != here["sae"].fingerprint
    assert not [name for name in remote.find("/bucket") if "/pieces/" in name]


def test_stability_of_an_sae_at_a_url(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = here["folder"]
    remote.pipe({f"/bucket/sae/{name}": (folder / "sae" / name).read_bytes() for name in digests(folder / "sae")})
    command = ["evaluate", "--sae", "memory://bucket/sae", "--store", str(folder / "acts")]
    command += ["--seeds", str(folder / "other"), "--json", str(tmp_path / "found.json")]
    before, put = remote_digests(remote, "/bucket/sae"), type(remote).put_file
    expired = Mock(side_effect=PermissionError("The provided token has expired."))
    monkeypatch.setattr(type(remote), "put_file", expired)
    said = fails(capsys, *command)
    assert "wrote memory://bucket/sae" not in said.out
    assert "memory://bucket/sae: cannot be written to (The provided token has expired.)" in said.err
    assert "stability" in json.loads((tmp_path / "found.json").read_text())  # what was computed is not lost
    assert remote_digests(remote, "/bucket/sae") == before
    assert Stability.beside(mirror.local("memory://bucket/sae"), here["sae"].fingerprint) is None
    monkeypatch.setattr(type(remote), "put_file", put)
    main(command)
    assert "wrote memory://bucket/sae/stability.json" in capsys.readouterr().out
    forget(monkeypatch, tmp_path / "read")
    assert Stability.beside(mirror.local("memory://bucket/sae"), here["sae"].fingerprint) is not None


def test_machines_sample_into_one_url(
    here: dict[str, Any], remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two sample a part each, the first joins; another policy's batches, at the URL too, stay."""
    monkeypatch.chdir(tmp_path)
    write_problems([Problem(str(i), "1+1=", "2") for i in range(4)], tmp_path / "problems.jsonl")
    command = ["rollouts", "sample", "--series", here["series"].base.path, "--problems", "problems.jsonl"]
    command += ["--n-samples", "2", "--max-new-tokens", "6", "--batch-size", "2", "--verifier", "support.cli:lucky"]
    main([*command, "--to", "here.parquet"])
    before = {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    command += ["--to", "memory://bucket/raw.parquet"]
    main([*command, "--part", "1/2"])
    assert "part 1/2 is done; other parts have 2 batches still to sample" in capsys.readouterr().out
    first, cache = mirror._mirrors, os.environ["TSAE_CACHE"]
    forget(monkeypatch, tmp_path / "cache" / "second")
    main([*command, "--part", "2/2"])
    assert "part 2/2 is done; so are all others" in capsys.readouterr().out
    remote.pipe("/bucket/raw.parquet.pieces/other/000000.json", b"{}")
    monkeypatch.setattr(mirror, "_mirrors", first)
    monkeypatch.setenv("TSAE_CACHE", cache)
    monkeypatch.setattr(Generator, "generate", None)  # nothing is sampled again
    main(command)
    (tmp_path / "joined.parquet").write_bytes(remote.cat("/bucket/raw.parquet"))  # its command names the URL
    tables = [pq.read_table(tmp_path / name).replace_schema_metadata() for name in ("joined.parquet", "here.parquet")]
    assert tables[0].equals(tables[1])
    (tmp_path / "joined.parquet").unlink()
    assert remote.find("/bucket/raw.parquet.pieces") == ["/bucket/raw.parquet.pieces/other/000000.json"]
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == before - {"cache"}


# --- a real S3 server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """moto's server, and the variables with which s3fs finds it."""
    port = free_port()
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=log, stderr=log) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        process.terminate()
    log.close()


MAKE = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
LIST = f"""
import json, s3fs, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.builders import digest_without_command
fs = s3fs.S3FileSystem()
print(json.dumps({{n: digest_without_command(fs.cat(n)) for n in fs.find('bucket')}}))
"""


@pytest.mark.slow
def test_the_commands_on_s3(here: dict[str, Any], s3: dict[str, str], tmp_path: Path) -> None:
    """Every command is a process of its own with an empty cache."""
    folder, number = here["folder"], iter(range(100))

    def environment() -> dict[str, str]:
        cache = {"TSAE_CACHE": str(tmp_path / f"cache-{next(number)}"), "PYTHONPATH": os.pathsep.join(sys.path)}
        return {**os.environ, **s3, **cache}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tsae", *map(str, words)]
        return subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=900)

    def python(code: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout

    python(MAKE)
    rollouts = ["--rollouts", "s3://bucket/rollouts.parquet"]
    python(f"import tsae; tsae.Rollouts.read({str(folder / 'rollouts.parquet')!r}).write({rollouts[1]!r})")
    capture = ["capture", "--series", here["series"].base.path, *rollouts, "--sites", SITE, "--shard-tokens", 60]
    capture += ["--to", "s3://bucket/acts"]
    assert "part 2/2 is done; other parts have" in run(*capture, "--part", "2/2").stdout
    done = run(*capture, "--part", "1/2")
    assert "wrote s3://bucket/acts" in done.stdout, done.stderr
    encode = ["encode", "--sae", folder / "sae", "--store", "s3://bucket/acts", "--to", "s3://bucket/features"]
    done = run(*encode, "--parts", 2, "--workers", 2)
    assert "wrote s3://bucket/features" in done.stdout, done.stderr
    found = json.loads(python(LIST))
    wanted = {f"bucket/acts/{name}": digest for name, digest in digests(folder / "acts").items()}
    wanted |= {f"bucket/features/{name}": digest for name, digest in digests(folder / "features").items()}
    assert {name: digest for name, digest in found.items() if name != "bucket/rollouts.parquet"} == wanted
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3:")]
    done = run("verify", "s3://bucket/acts")
    assert re.match("s3://bucket/acts +store +intact", done.stdout), done.stderr
    s3["AWS_ENDPOINT_URL"], address = "http://127.0.0.1:9", s3["AWS_ENDPOINT_URL"]
    done = run(*encode)
    s3["AWS_ENDPOINT_URL"] = address
    assert done.returncode == 2, done.stderr
    assert "tsae: s3://bucket/" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_may_be_addresses_of_this_machine(here: dict[str, Any], tmp_path: Path) -> None:
    words = ["--rollouts", f"file://{here['folder']}/rollouts.parquet", "--to", f"file://{tmp_path}/d"]
    main(["rollouts", "difficulty", *words])
    assert (tmp_path / "d" / "difficulty.json").is_file()
