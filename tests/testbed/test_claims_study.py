"""The study of the literature's claims: its judgements on planted data, and the page against the shipped records."""

import json
from pathlib import Path

import check_claims
import numpy as np
import pytest
from organism.claims import Records, half_time, judge, judge_claim
from organism.pages import marks

from support.refusals import refuses
from tsae.claims.judging import STUDIED

LEVELS = ("easy", "medium", "long", "hard")


@pytest.mark.parametrize(
    ("path", "sign", "step"),
    [
        ([0, 0, 1, 1], 1, 15),
        ([1, 0.5, 0, 0], -1, 10),
        ([0, 0.2, 0.4, 0.8], 1, 20),
        ([0.5, 0.5, 0.48, 0.5], -1, None),  # too short a way
        ([0.5, 0.6, 0.9, 0.9], -1, None),  # the other way
        ([20, 19.5, 19.5, 19.5], -1, None),
    ],
)
def test_half_time_interpolates(path: list[float], sign: int, step: float | None) -> None:
    measured = {str(10 * i): {"medium": {"accuracy": value}} for i, value in enumerate(path)}
    found = half_time({"measured": measured}, "medium", "accuracy", sign)
    assert found is None if step is None else found == pytest.approx(step)


def planted(gains: dict[str, float]) -> Records:
    """Five seeds of the arms easy, medium and hard whose accuracy changes by so much on every level."""
    rng = np.random.default_rng(0)
    records = []
    for arm, gain in gains.items():
        for seed in range(5):
            cell = {level: {"accuracy": 0.5 + gain + rng.normal(0, 0.01)} for level in LEVELS}
            start = {level: {"accuracy": 0.5} for level in LEVELS}
            records.append({"arm": arm, "seed": seed, "measured": {"0": start, "60": cell}})
    return Records.of(records)


def test_planted_gains_are_judged() -> None:
    assert judge_claim("a", planted({"easy": 0.1, "medium": 0.3, "hard": -0.2})).verdict == "reproduced"
    assert judge_claim("a", planted({"easy": 0.1, "medium": 0.3, "hard": 0.4})).verdict == "partly"
    assert judge_claim("a", planted({"easy": 0.3, "medium": 0.1, "hard": 0.4})).verdict == "not reproduced"
    assert judge_claim("b", planted({"hard": -0.1})).verdict == "reproduced"
    assert judge_claim("b", planted({"hard": 0.0})).verdict == "not reproduced"


def test_the_shipped_records_give_the_verdicts_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims.main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["ratio"] >= 0.9
    assert line["reproduced"] + line["partly"] + line["not"] + line["untestable"] == len(STUDIED)
    assert line["differing"] == [k for k, j in judge(_shipped()).items() if j.verdict == "cannot be tested"]


def _shipped() -> Records:
    return Records.of(check_claims.read_records(check_claims.RECORDS))


def test_another_verdict_on_the_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = check_claims.DOC.read_text(encoding="utf-8")
    verdicts = check_claims.verdicts_of(check_claims.DOC)
    key = next(k for k, verdict in verdicts.items() if verdict == "reproduced")
    row = next(line for line in page.splitlines() if line.startswith(f"| **{key}**"))
    forged = tmp_path / "claims.md"
    forged.write_text(page.replace(row, row.replace("| reproduced |", "| not reproduced |")), encoding="utf-8")
    monkeypatch.setattr(check_claims, "DOC", forged)
    check_claims.main([])
    assert key in json.loads(capsys.readouterr().out.splitlines()[-1])["differing"]


def test_missing_records_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_claims.main(["--records", str(tmp_path / "none.gz")]) == 1
    assert "is missing" in capsys.readouterr().err
    refuses("is missing", check_claims.read_records, tmp_path / "none.gz")


def test_every_claim_has_a_prediction() -> None:
    predictions = json.loads(check_claims.PREDICTIONS.read_text(encoding="utf-8"))
    assert list(predictions) == list(STUDIED)


def test_the_page_shows_the_records_of_every_dictionary() -> None:
    records = _shipped()
    page = check_claims.DOC.read_text(encoding="utf-8")
    begins, ends = marks("dictionaries")
    assert page.partition(begins)[2].partition(ends)[0].strip() == check_claims.dictionary_table(records).strip()


@pytest.mark.parametrize("key", ["e", "f", "g"])
def test_every_dictionary_gives_the_verdict_of_the_t_sae(key: str) -> None:
    """Of correlation alone; as the page says, by a crosscoder's shared codes too."""
    record = _shipped().by_arm["features"][0]
    cells = {name: cell["shifts"] for name, cell in record["dictionaries"].items()}
    cells["shared codes"] = record["dictionaries"]["crosscoder"]["shared"]
    judged = {
        name: judge_claim(key, Records.of([{**record, "dictionaries": {"T-SAE": {"shifts": shifts}}}])).verdict
        for name, shifts in cells.items()
    }
    assert len(judged) == 8
    assert len(set(judged.values())) == 1, judged


@pytest.mark.parametrize("key", ["e", "f", "g"])
def test_the_page_shows_what_ablations_do(key: str) -> None:
    record = _shipped().by_arm["features"][0]
    row = next(
        line for line in check_claims.DOC.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {key}: ")
    )
    for place, name in ((2, "T-SAE"), (3, "difference")):
        of = Records.of([{**record, "dictionaries": {"T-SAE": record["dictionaries"][name]}}])
        assert row.split(" | ")[place - 1] == check_claims.shown(judge_claim(key, of).parts[-1])
