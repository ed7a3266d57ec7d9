"""A log that grows: only its new parts are read, and only what is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tsae
from tsae.errors import TsaeError
from tsae.rollouts import importing
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.logs import import_parts as parts

SHIPPED = tsae.testbed.series_path()
_STEP = 1_200
"""Bytes of a part; a step below has more."""
PLAIN = ImportConfig(prompt_format="plain")


def lines_of(step: int) -> list[str]:
    frame = pd.read_parquet(SHIPPED / "logs" / "hard" / "completions" / "completions_00025.parquet").head(32)
    names = {"prompt": "input", "completion": "output", "answer": "gts", "correct": "score"}
    rows = frame.rename(columns=names)[list(names.values())].assign(step=step).to_dict("records")
    return [json.dumps(row) + "\n" for row in rows]


def test_parts_that_were_read_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", _STEP)
    read: list[str] = []
    really = importing.read_part

    def counted(part: parts.Part, *others: Any) -> None:
        read.append(f"{part.files[0].start}")
        really(part, *others)

    monkeypatch.setattr(importing, "read_part", counted)
    log, series = tmp_path / "run" / "log.jsonl", tsae.testbed.series()
    log.parent.mkdir()
    log.write_text("")
    known = ["hard-025"]

    def grown(*steps: int, checkpoint: str | None = None, compared: bool = False) -> tuple[int, int]:
        """(parts that were read, all parts) of the log with further steps and one more checkpoint."""
        with log.open("a") as more:
            more.writelines(line for step in steps for line in lines_of(step))
        known.extend([checkpoint] if checkpoint else [])
        size = log.stat().st_size
        with log.open("a") as more:
            more.write('{"step": 99, "prom')  # the trainer is at it
        here = series.select(known)
        for name, kept in [("fresh", None)] * compared + [("kept", tmp_path / "parts")]:
            read.clear()
            import_log(log, tmp_path / f"{name}.parquet", here, PLAIN, only={log: size}, kept=kept, progress=False)
        with log.open("r+") as more:
            more.truncate(size)
        if compared:
            assert (tmp_path / "kept.parquet").read_bytes() == (tmp_path / "fresh.parquet").read_bytes()
        return len(read), len(list((tmp_path / "parts").iterdir()))

    first, whole = grown(1, 25, 26)
    assert first == whole > 5
    again, whole = grown()
    assert (again, whole) == (0, first)
    more, longer = grown(40)
    assert longer > whole
    # The last part, which had not been full, and the new ones.
    assert more in (longer - whole, longer - whole + 1)
    # A checkpoint of steps that the log has not seen changes nothing.
    assert grown(checkpoint="hard-100") == (0, longer)
    # Step 50 was logged, and 51 sampled, before its checkpoint was there: their trajectories get another policy.
    grown(50, 51)
    changed, longest = grown(checkpoint="hard-050", compared=True)
    assert 0 < changed < longest / 2
    assert "hard-050" in tsae.Rollouts.read(tmp_path / "kept.parquet").policies
    # An earlier line that has changed is read, whatever its length.
    text = log.read_text()
    log.write_text(text.replace('"score": 1.0', '"score": 0.0', 1))
    assert grown(compared=True)[0] == 1


def test_only_the_files_that_count_are_read(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"{step}.jsonl").write_text("".join(lines_of(step)))
    (tmp_path / "3.jsonl").write_text('{"step')
    series = tsae.testbed.series().select("hard-025")
    first = tmp_path / "1.jsonl"
    only = {first: first.stat().st_size}
    import_log(tmp_path, tmp_path / "to" / "r.parquet", series, PLAIN, only=only, progress=False)
    assert set(tsae.Rollouts.read(tmp_path / "to" / "r.parquet").frame.step) == {1}
    with pytest.raises(TsaeError):
        import_log(tmp_path, tmp_path / "to" / "all.parquet", series, PLAIN, progress=False)
