"""A list of stages: what has its key is loaded, the rest is made, whatever happened between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tsae.errors import TsaeError
from tsae.stages import RunRecord, Stage, carry_out


class Work:
    """Two stages and a page, which count what they make."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[str]()
        self.fails: Callable[[str], None] = lambda name: None

    def stage(self, name: str, option: int, *inputs: str) -> Stage:
        file = self.folder / name

        def make(*values: int) -> int:
            self.made.append(name)
            self.fails(name)
            file.write_text(str(option + sum(values)))
            return option + sum(values)

        def load(*values: int) -> int:
            if not (text := file.read_text()).isdigit():
                raise TsaeError("is damaged", where=file)
            return int(text)

        return Stage(name, name, {name: option}, make, load, inputs, fingerprint=lambda value: value)

    def run(self, first: int, second: int) -> tuple[int, list[str], list[str]]:
        """The page, what was made, and what was said."""
        stages = [self.stage("a", first), self.stage("b", second, "a"), self.stage("page", 0, "b")]
        record = RunRecord(self.folder, "run.json", {"run": {}, "versions": {}}, "an analysis")
        said: list[str] = []
        self.made.clear()
        return carry_out(stages, record, lambda *_, **__: None, said.append)["page"], self.made, said


@pytest.fixture
def work(tmp_path: Path) -> Work:
    found = Work(tmp_path / "out")
    assert found.run(1, 2) == (3, ["a", "b", "page"], [])
    assert found.run(1, 2) == (3, [], [])
    return found


@pytest.mark.parametrize(
    ("options", "page", "made", "said"),
    [
        ((1, 5), 6, ["b", "page"], ["made anew:   b, page (changed: b)"]),
        ((2, 2), 4, ["a", "b", "page"], ["made anew:   a, b, page (changed: a)"]),
        ((2, 1), 3, ["a", "b", "page"], ["made anew:   a, b, page (changed: a, b)"]),
    ],
)
def test_what_rests_on_a_changed_option_is_made_anew(
    work: Work, options: tuple[int, int], page: int, made: list[str], said: list[str]
) -> None:
    assert work.run(*options) == (page, made, said)
    assert not (work.folder / ".before").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TsaeError("cannot be made")])
def test_the_first_options_find_what_they_made(work: Work, error: Any) -> None:
    """Although a stage with other options failed or was killed meanwhile."""

    def fail(name: str) -> None:
        (work.folder / name).write_text("half")
        raise error

    work.fails = fail
    for wrong in (7, 8):
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            work.run(1, wrong)
        assert not (work.folder / "page").exists()
    work.fails = lambda name: None
    assert work.run(1, 2)[:2] == (3, ["page"])
    assert work.run(1, 2) == (3, [], [])
    assert not (work.folder / ".before").exists()


def test_a_damaged_stage_is_made_again(work: Work) -> None:
    (work.folder / "a").write_text("?")
    page, made, said = work.run(1, 2)
    assert (page, made[0]) == (3, "a")
    assert said == [f"{work.folder / 'a'}: is damaged; a made again"]


def test_a_disk_that_fails_for_now_damages_nothing(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path) -> str:
        raise TsaeError("cannot be read", where=self) from OSError("input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", unreadable)
        record = RunRecord.__new__(RunRecord)  # the record itself is read before
        record.folder, record.stages, record.before = work.folder, {"a": {"settings": {"a": 1}, "inputs": {}}}, {}
        with pytest.raises(TsaeError, match="cannot be read"):
            carry_out([work.stage("a", 1), work.stage("page", 0, "a")], record, lambda *_, **__: None, print)
    assert (work.folder / "a").is_file()
