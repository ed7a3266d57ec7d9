"""Files of a log as disks, editors and running trainings leave them: compressed, cut off, growing, marked, empty."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.logs import read, refused
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs import import_parts as parts
from tsae.rollouts.logs import log_files, readers
from tsae.rollouts.parquet import read_pieces
from tsae.rollouts.table import Rollouts

ROWS = [
    {"prompt": f"{i}+1=?", "response": f"#{i + 1}", "correct": bool(i % 2), "problem_id": str(i), "policy": "m"}
    for i in range(5)
]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
MARK = b"\xef\xbb\xbf"


def responses(found: Rollouts) -> list[str]:
    return list(found.table["response"].to_pylist())


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd}


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACKED.get(path.suffix, bytes)(data))
    return path


# --- compressed


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_files_are_read_as_what_is_in_them(policy: Checkpoint, tmp_path: Path, suffix: str) -> None:
    plain = read(written(tmp_path / "log.jsonl", LINES), policy)
    packed = read(written(tmp_path / f"log.jsonl{suffix}", LINES), policy)
    assert packed.table.equals(plain.table)
    # Several frames after one another, as a writer leaves them that appends.
    pack = PACKED[suffix]
    both = tmp_path / "both" / f"log.jsonl{suffix}"
    both.parent.mkdir()
    both.write_bytes(pack(LINES[:100]) + pack(LINES[100:]))
    assert read(both.parent, policy).table.equals(plain.table)


@pytest.mark.parametrize("suffix", PACKED)
def test_names_of_compressed_files_tell_the_trainer_and_the_step(
    policy: Checkpoint, tmp_path: Path, suffix: str
) -> None:
    for step in (1, 2, 10):
        row = {"input": "1+1=?", "output": f"#{step}", "gts": "2", "score": 1.0}
        written(tmp_path / "run" / f"{step}.jsonl{suffix if step > 1 else ''}", json.dumps(row).encode())
    found = read(tmp_path / "run", policy, prompt_format="plain")
    assert found.info["log"]["format"] == "verl rollout data"
    assert found.table["policy"].to_pylist() == ["run-00000", "run-00001", "run-00009"]
    turns = [{"observation": "1+1=?", "chat_completions": [], "info": {}}]
    name = f"episode_hash1.json{suffix}"
    assert log_files.first_row(written(tmp_path / name, json.dumps(turns[0]).encode())) == turns[0]
    assert log_files.find_files(tmp_path / "run") == sorted((tmp_path / "run").iterdir())


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("lost", [1, 9, 60])
def test_a_compressed_file_that_is_cut_off_is_refused(
    policy: Checkpoint, tmp_path: Path, suffix: str, lost: int
) -> None:
    path = written(tmp_path / f"log.jsonl{suffix}", LINES)
    path.write_bytes(path.read_bytes()[:-lost])
    for skip in ((), ("cut",)):
        refused(rf"log\.jsonl{suffix}: cannot be read beyond line \d.*[Tt]runcated", read, path, policy, skip=skip)


@pytest.mark.parametrize("suffix", PACKED)
def test_what_is_no_compressed_file_is_refused(policy: Checkpoint, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(LINES)
    refused(r"cannot be read beyond line 0", read, path, policy)
    path = written(tmp_path / f"log.parquet{suffix}", b"x")
    refused(r"a compressed \.parquet file; .* Unpack it", read, path, policy)


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("name", ["log.jsonl", "episode_hash1.json"])
def test_what_unpacks_without_end_is_not_read_into_memory(
    policy: Checkpoint, tmp_path: Path, suffix: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    path = written(tmp_path / f"{name}{suffix}", b'{"prompt": "' + b"0" * (1 << 24))
    assert path.stat().st_size < 1 << 15
    refused("more than 1 MiB", read, path, policy)


# --- the ends of files


def test_half_a_line_at_the_end_can_be_left_out(policy: Checkpoint, tmp_path: Path) -> None:
    for number in (1, 2):
        written(tmp_path / "log" / f"{number}.jsonl", b"\n" * number + LINES[:-20])
    refused(r"1\.jsonl:6: .*the line has no end.*leave such rows out with --skip cut", read, tmp_path / "log", policy)
    found = read(tmp_path / "log", policy, skip=("cut",))
    assert responses(found) == ["#1", "#2", "#3", "#4"] * 2
    assert found.info["log"]["skipped"] == {"cut": 2}
    # A bad line that has an end is not half a line, nor is a last line that lacks its line break alone.
    for data, message in ((LINES[:-20] + b"\n", "5: not a line of JSON"), (b"{\n" + LINES, "1: not a line of JSON")):
        refused(message, read, written(tmp_path / "bad.jsonl", data), policy, skip=("cut",))
    assert len(read(written(tmp_path / "whole.jsonl", LINES[:-1]), policy)) == 5
    refused("holds no trajectories", read, written(tmp_path / "half.jsonl", LINES[:20]), policy)


def test_half_a_line_of_columns_can_be_left_out(policy: Checkpoint, tmp_path: Path) -> None:
    line = {"step": ["1", "1"], "prompt": ["1", "2"], "completion": ["#1", "#2"], "digits": [1.0, 0.0]}
    data = json.dumps(line).encode() + b"\n" + json.dumps(line).encode()[:50]
    path = written(tmp_path / "run" / "completions.jsonl", data)
    refused("the line has no end", read, path, policy)
    found = read(path, policy, skip=("cut",))
    assert (responses(found), found.info["log"]["skipped"]) == (["#1", "#2"], {"cut": 1})


def test_of_a_file_that_grows_what_was_there_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", LINES)
    (part,) = parts.parts_of([log_files.LogFile(path, "run")], cut=True)
    with path.open("ab") as file:
        file.write(LINES)
    assert [row for _, row in part.files[0].rows()] == ROWS
    path.write_bytes(LINES[:-20])
    (part,) = parts.parts_of([log_files.LogFile(path, "run")], cut=True)
    path.write_bytes(LINES)
    with pytest.raises(log_files.HalfLine, match=r"log\.jsonl:5"):
        list(part.files[0].rows())


def test_files_without_trajectories_are_counted(policy: Checkpoint, tmp_path: Path) -> None:
    for name, data in (("1", LINES), ("2", b""), ("3", b"\n \n"), ("4", MARK), ("5", LINES.replace(b"1", b"3"))):
        written(tmp_path / "log" / f"{name}.jsonl", data)
    written(tmp_path / "log" / "6.jsonl.gz", b"")
    (tmp_path / "log" / "7.parquet").touch()
    with pytest.warns(UserWarning, match="4 problem ids have several prompts each"):
        found = read(tmp_path / "log", policy)
    assert len(found) == 10
    notes = found.info["log"]["notes"]
    assert "5 files hold no trajectories: 2.jsonl, 3.jsonl, 4.jsonl and 2 more" in notes


# --- bytes


def test_line_ends_and_marks_of_other_systems_are_understood(policy: Checkpoint, tmp_path: Path) -> None:
    plain = read(written(tmp_path / "log.jsonl", LINES), policy)
    for name, data in (
        ("windows.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("marked.jsonl", MARK + LINES),
        ("both.jsonl", MARK + LINES.replace(b"\n", b"\r\n")),
        ("packed.jsonl.gz", MARK + LINES),
        ("spaced.jsonl", b"\n\n" + LINES.replace(b"\n", b" \n\t\n")),
    ):
        assert read(written(tmp_path / name, data), policy).table.equals(plain.table)


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "\xe9"}\n',
        b'{"prompt": "\xc3\n',
        MARK + b"{}\n",
        b"\0" * 512,
        LINES[:80].decode().encode("utf-16"),
    ],
    ids=["latin-1", "cut character", "a mark inside", "zeros of a crash", "utf-16"],
)
def test_bytes_that_are_no_text_are_named_by_their_line(policy: Checkpoint, tmp_path: Path, line: bytes) -> None:
    two = b"".join(LINES.splitlines(keepends=True)[:2])
    for name in ("log.jsonl", "log.jsonl.gz"):
        path = written(tmp_path / name, two + line)
        refused(rf"{name}:3: not a line of JSON in UTF-8", read, path, policy)


# --- logs of a few kilobytes that stand for gigabytes: refused, in little memory


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Not a gigabyte more is ever in memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before < 1 << 30


def stands_for_more(path: Path, llama: Path, match: str) -> None:
    with pytest.raises(TsaeError, match=match) as said:
        Rollouts.read(path, Checkpoint("base", str(llama)), ImportConfig(run="r"))
    assert str(path) in str(said.value)


def long_texts(path: Path, *, rows: int, size: int) -> Path:
    """A dictionary of one text, and rows that name it."""
    texts = pa.array(["7" * size]).dictionary_encode().dictionary
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), texts)
    table = pa.table({"prompt": column, "response": ["1"] * rows, "correct": [True] * rows})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)
    assert path.stat().st_size < 20_000
    return path


@pytest.mark.slow(ci=True)
@pytest.mark.usefixtures("little_memory")
def test_a_long_text_that_a_parquet_file_repeats(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows of 16 MB: 32 GB."""
    path = long_texts(tmp_path / "log.parquet", rows=2000, size=1 << 24)
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    stands_for_more(path, llama, "row 0 has more than 1 MiB")


@pytest.mark.slow(ci=True)
@pytest.mark.usefixtures("little_memory")
def test_pieces_of_rollouts_are_no_larger_than_a_row(tmp_path: Path) -> None:
    path = long_texts(tmp_path / "rollouts.parquet", rows=2000, size=1 << 24)
    pieces = read_pieces(path)
    assert len(next(pieces)) == 0
    assert next(pieces).nbytes < 1 << 29


@pytest.mark.usefixtures("little_memory")
def test_a_run_of_equal_ids_without_end(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million equal token ids in one row, in a few hundred bytes."""
    ids = pa.ListArray.from_arrays(pa.array([0, 10_000_000], pa.int32()), pa.array([7], pa.int32()).take(
        pa.array([0], pa.int32()).take(pa.nulls(10_000_000, pa.int32()).fill_null(0))))  # fmt: skip
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"prompt_ids": ids, "response_ids": [[1]], "correct": [True]}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    stands_for_more(path, llama, "row 0 has more than 1 MiB")


@pytest.mark.usefixtures("little_memory")
def test_lists_of_a_torch_file_that_hold_each_other(tmp_path: Path, llama: Path) -> None:
    """Ten lists of the list before, twelve times over."""
    content: list[Any] = ["x"]
    for _ in range(12):
        content = [content] * 10
    path = tmp_path / "rollout_data_1.pt"
    torch.save({"samples": [{"prompt": "1+1=", "response": "2", "metadata": content}], "rollout_id": 1}, path)
    assert path.stat().st_size < 5000
    stands_for_more(path, llama, "stands for more values than it has bytes")


@pytest.mark.usefixtures("little_memory")
def test_a_torch_file_whose_parts_are_compressed(tmp_path: Path, llama: Path) -> None:
    torch.save({"samples": [{"tokens": torch.zeros(1 << 21, dtype=torch.int64)}]}, tmp_path / "plain.pt")
    path = tmp_path / "rollout_data_1.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert path.stat().st_size < 200_000
    stands_for_more(path, llama, "is compressed")
