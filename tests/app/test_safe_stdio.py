"""Nothing that a log holds may steer the terminal."""

from __future__ import annotations

import io
import sys

import pytest
from tqdm import tqdm

from tsae.commands.system import safe_stdio


def test_control_characters_are_shown_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_stdio():
        print("a\x1b[31mb\x00c\u202ed\x9be\tf")
        print("one\rtwo", file=sys.stderr)
    found = capsys.readouterr()
    assert found.out == "a‹U+001B›[31mb‹U+0000›c‹U+202E›d‹U+009B›e\tf\n"
    assert found.err == "one‹U+000D›two\n"


def test_a_stream_is_given_back_after_an_error() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), safe_stdio():
        raise KeyError("x")
    assert (sys.stdout, sys.stderr) == before


def test_progress_bars_still_move(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for tame in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        if tame:
            with safe_stdio():
                _two_bars()
        else:
            _two_bars()
        said.append(stream.getvalue())
    assert said[0] == said[1]
    assert "\x1b[A" in said[0]


def _two_bars() -> None:
    with tqdm(total=2, file=sys.stderr, bar_format="{n}", mininterval=0) as outer:
        for _ in range(2):
            with tqdm(total=1, file=sys.stderr, leave=False, bar_format="inner {n}", mininterval=0) as inner:
                inner.update()
            outer.update()
