"""`tsae serve`: the page and its examples, from this machine, to this machine's own page."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.refusals import refuses
from support.results import MARKUP, make, rendered, source
from tsae.base.files import write_text
from tsae.commands.report import Serve, files_of_page
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.report.examples import contexts
from tsae.report.serving import ServedRun, server

pytestmark = pytest.mark.slow(ci=True)


@pytest.fixture(scope="module")
def diff() -> FeatureDiff:
    table, strings = source(["plain", MARKUP, "</script>"])
    made = make(behaviours=make().behaviours.iloc[:0])
    return replace(made, source=table, info={**made.info, "token_strings": strings})


class Served:
    """A server of what `following` ends with: a diff, or an error in reading it."""

    def __init__(self, diff: FeatureDiff, file: Path) -> None:
        self.file, self.following, self.reads = file, [diff], 0
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        self.run = ServedRun(self.read, lambda: files_of_page(file.parent.parent), "first")

    def read(self) -> Any:
        self.reads += 1
        if isinstance(self.following[-1], Exception):
            raise self.following[-1]
        return self.following[-1], None, None


@pytest.fixture(scope="module")
def both(diff: FeatureDiff, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Served]]:
    served = Served(diff, tmp_path_factory.mktemp("served") / "diff" / "manifest.json")
    with server(served.run, 0) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found, served
        found.shutdown()


@pytest.fixture
def found(both: tuple[Any, Served]) -> Any:
    return both[0]


def ask(found: Any, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", found.server_port, timeout=120)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_examples_are_those_of_the_report(found: Any, diff: FeatureDiff) -> None:
    strings = diff.info.get("token_strings", {})
    seen = 0
    for feature in range(diff.source.n_features):
        status, body, _ = ask(found, f"/examples/{feature}")
        assert status == 200
        expected = contexts(diff.source, [feature], strings)
        if expected.chunks:
            assert json.loads(body) == json.loads(json.dumps([expected.trajectories, expected.chunks[0]]))
            seen += 1
        else:
            assert json.loads(body) == []
    assert seen > 2
    assert json.loads(ask(found, "/examples/999999")[1]) == []


def test_the_page_asks_its_own_server_and_nobody_else(found: Any, diff: FeatureDiff) -> None:
    status, body, headers = ask(found, "/")
    page = body.decode()
    assert status == 200
    assert "connect-src 'self'" in page
    assert "part-examples-0" not in page
    assert "part-trajectories" not in page
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    written = rendered(diff, "first")
    assert "connect-src 'none'" in written
    assert "part-examples-0" in written


def test_others_are_refused(found: Any) -> None:
    assert found.server_address[0] == "127.0.0.1"
    own = f"localhost:{found.server_port}"
    assert ask(found, "/", Host=own)[0] == 200
    assert ask(found, "/examples/0", Host=own, Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(found, "/examples/0", Host="localhost:9000")[0] == 200  # through a tunnel
    assert ask(found, "/", Host="127.0.0.1", Origin="http://127.0.0.1")[0] == 200  # at port 80
    for host in ("evil.example", "[::1]", "[::1]:80", "", "localhost.evil.example"):
        assert ask(found, "/", Host=host)[0] == 403
    for path in ("/", "/examples/0"):
        assert ask(found, path, Host=f"evil.example:{found.server_port}")[0] == 403
        assert ask(found, path, Host="127.0.0.1.evil.example:80")[0] == 403
        assert ask(found, path, Origin="http://evil.example")[0] == 403
    assert ask(found, "/examples/0", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(found, "/", "POST")[0] == 403
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(found, "/", method)[0] == 501
    assert ask(found, "/playground")[0] == 404


def test_no_file_can_be_asked_for(found: Any) -> None:
    up = ("/diff.json", "/../diff.json", "/%2e%2e/diff.json", "//etc/passwd", "/examples/../diff.json", "/index.html")
    for path in (*up, "/examples/0/x", "/examples/-1", "/examples/" + "9" * 30, "/examples/"):
        status, body, _ = ask(found, path)
        assert status == 404, path
        assert b"{" not in body


def test_what_cannot_be_served_is_said(found: Any, tmp_path: Path) -> None:
    refuses(r"port \d+ is taken.*--port 0", server, found.RequestHandlerClass.run, found.server_port)
    refuses("cannot listen there", server, found.RequestHandlerClass.run, 99_999_999)
    refuses(r"holds no diff/manifest\.json", Serve(tmp_path).execute)


def test_a_changed_diff_is_shown(both: tuple[Any, Served], diff: FeatureDiff) -> None:
    found, served = both
    first = ask(found, "/")[1]
    served.following.append(make(runs=False, behaviours=diff.behaviours))
    os.utime(served.file, ns=(1, 1))
    assert ask(found, "/")[1] != first
    assert json.loads(ask(found, "/examples/0")[1]) == []  # this one has no features


@pytest.mark.parametrize("error", [KeyError("sae"), ValueError("odd"), TsaeError("is damaged", where="labels")])
def test_whatever_a_file_holds_the_page_stays_and_a_line_says_why(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(make((), runs=False), tmp_path / "diff" / "manifest.json")
    first = served.run.page()
    served.following.append(error)
    os.utime(served.file, ns=(1, 1))
    assert [served.run.page() for _ in range(3)] == [first] * 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the page stays as it was" in said
    assert str(error) in said


def test_examples_that_cannot_be_read_are_no_traceback(
    both: tuple[Any, Served], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, served = both

    class Broken:
        def of(self, feature: int) -> Any:
            return [float("nan")]

    monkeypatch.setattr(served.run, "_examples", Broken())
    assert ask(found, "/examples/0")[0] == 500
    said = capsys.readouterr().err
    assert said.startswith("tsae: feature 0 is shown without examples")
    assert said.count("\n") == 1


def test_a_closed_tab_is_no_traceback(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for raw in (b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n\r\n" % found.server_port):
        for _ in range(5):
            with socket.create_connection(found.server_address[:2]) as client:
                client.sendall(raw)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.3)
    assert ask(found, "/")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_what_comes_changes_or_goes_later_is_shown(tmp_path: Path) -> None:
    """Labels, an attribution, claims and a causal test; an unchanged folder is not read again."""
    served = Served(make((), runs=False), tmp_path / "diff" / "manifest.json")
    pieces = ("explanations/explanations.json", "attribution/attribution.json", "claims.json", "causal/one/causal.json")
    changes: list[Callable[[], Any]] = [partial(write_text, tmp_path / piece, "{}") for piece in pieces]
    changes += [partial(write_text, tmp_path / pieces[-1], "{ }"), (tmp_path / pieces[-1]).unlink]
    for n, change in enumerate(changes, 1):
        served.run.page()
        assert served.reads == n
        change()
        served.run.page()
        assert served.reads == n + 1


@pytest.mark.slow(ci=True)
def test_a_browser_shows_examples_on_demand(diff: FeatureDiff, tmp_path: Path, browser: Any) -> None:
    from playwright.sync_api import expect

    said: list[str] = []
    with server(Served(diff, tmp_path / "diff" / "manifest.json").run, 0) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"http://127.0.0.1:{found.server_port}/#feature-3")
        expect(page.locator("#feature-3 .example").first).to_contain_text(MARKUP)
        assert page.evaluate("window.__attacked") is None
        assert [line for line in said if "favicon" not in line and "404" not in line] == []
        found.shutdown()
        found.server_close()
        page.goto(page.url.replace("#feature-3", "#feature-5"))
        expect(page.locator("#feature-5")).to_contain_text("The server does not answer")
