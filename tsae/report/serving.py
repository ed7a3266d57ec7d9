"""The report of a run from a local server, for runs whose examples do not fit into one file.

The page is the report without its examples. The card of a feature asks for them when it is opened, so that every active
feature has some, and the page stays small. The page is written anew when a file that it rests on has
changed, such as the diff under `tsae watch`, or came or went, such as labels, causal tests, an attribution or claims.

The server listens on this machine alone (127.0.0.1) and answers /, /examples/FEATURE and, where the checkpoints are at
hand, /playground (`tsae.report.playground`). It reads no other path, so no file can be asked for. It refuses requests
by another host's name and from other pages, so that no web page that is open in the same browser reads the run, or has
its models answer. The page's policy allows it requests to this server only.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from tsae.attribution.attribution import Attribution
from tsae.base.untrusted import parse_json
from tsae.claims.run_claims import Claims
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.report.examples import ExamplesOnDemand
from tsae.report.page import render
from tsae.report.playground import Playground, Question
from tsae.report.text import capitalised

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_LARGEST = 1 << 20
"""Bytes of a question."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    # What may run is in the page's own policy; both apply.
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class ServedRun:
    """A page and its examples.

    Args:
        read: reads the diff, with its features, and the attribution and the claims if there are any.
        files: lists the files of which one changes, comes or goes whenever what is read does. They need not exist.
        title: of the page.
        play: opens the playground of a diff; its error says why there is none.
    """

    def __init__(
        self,
        read: Callable[[], tuple[FeatureDiff, Attribution | None, Claims | None]],
        files: Callable[[], Iterable[Path]],
        title: str | None = None,
        play: Callable[[FeatureDiff], Playground] | None = None,
    ) -> None:
        self._read, self._files, self._title, self._play = read, files, title, play
        self.playground: Playground | None = None
        self._lock = Lock()
        self._seen: Mapping[Path, tuple[int, int]] = {}
        self._told = ""
        self._load()

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        """Time and size of the files that are there."""
        found = {}
        for file in self._files():
            with suppress(OSError):
                facts = file.stat()
                found[file] = facts.st_mtime_ns, facts.st_size
        return found

    def _load(self) -> None:
        seen = self._stamps()
        diff, attribution, claims = self._read()
        playground = self._opened(diff)
        given = {"served": True, "playground": playground is not None}
        page = "".join(render(diff, self._title, attribution, claims, **given)).encode("utf-8", "replace")
        source, strings = diff.source, diff.info.get("token_strings", {})
        self._examples = None if source is None else ExamplesOnDemand(source, strings)
        self._page, self._seen, self.playground = page, seen, playground

    def _opened(self, diff: FeatureDiff) -> Playground | None:
        try:
            return None if self._play is None else self._play(diff)
        except Exception as error:  # the page is served in any case
            self._tell(error, "there is no playground")
            return None

    def answer(self, playground: Playground, question: bytes) -> tuple[int, bytes, str]:
        """Status, body and kind of the answers to a question of the page, or of a sentence on why there are none."""
        try:
            found = playground.answer(Question(**parse_json(question)))
            return 200, json.dumps(found, separators=(",", ":"), allow_nan=False).encode(), "application/json"
        except TsaeError as error:
            return 422, TsaeError(capitalised(error.what), fix=error.fix).args[0].encode("utf-8", "replace"), _TEXT
        except (ValueError, TypeError):
            return 400, b"The question cannot be read.", _TEXT
        except Exception as error:
            self._tell(error, "a question has no answer")
            return 500, b"The answer could not be computed; the terminal says why.", _TEXT

    def page(self) -> bytes:
        """HTML of the run as it is now. While the run is being written, or is damaged, the page is the one before."""
        with self._lock:
            try:
                if self._stamps() != self._seen:
                    self._load()
            except Exception as error:  # whatever a file holds, the server keeps running
                self._tell(error, "the page stays as it was")
            return self._page

    def examples(self, feature: int) -> bytes | None:
        """JSON [trajectories, examples] of a feature, or [] where it has none; None where they cannot be read."""
        try:
            with self._lock:
                found = [] if self._examples is None else self._examples.of(feature)
            return json.dumps(found, separators=(",", ":"), allow_nan=False).encode("utf-8")
        except Exception as error:
            self._tell(error, f"feature {feature} is shown without examples")
            return None

    def _tell(self, error: Exception, what: str) -> None:
        """Say in the terminal, in one line and once, what cannot be shown."""
        said = str(error) if isinstance(error, TsaeError) else f"{type(error).__name__}: {error}"
        line = " ".join(f"tsae: {what}. {said}".split())
        if line != self._told:
            print(line, file=sys.stderr, flush=True)
        self._told = line


_TEXT = "text/plain; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version, timeout = "tsae", "", 120
    run: ServedRun

    def handle(self) -> None:
        with suppress(ConnectionError):  # a tab that is closed while it loads
            super().handle()

    def do_GET(self) -> None:
        if self._is_foreign():
            return self._send(403, b"This server answers to 127.0.0.1 and localhost alone.")
        if self.path == "/":
            return self._send(200, self.run.page(), "text/html; charset=utf-8")
        named = re.fullmatch(r"/examples/([0-9]{1,9})", self.path)
        play = self.run.playground if re.fullmatch(r"/playground(\?.*)?", self.path) else None
        if named is None and play is None:
            return self._send(404, b"There is nothing here: this server has the page at / alone.")
        if self._is_of_another_page():
            return self._send(403, b"Another page asked. Paste this address into the browser's address bar.")
        if play is not None:
            return self._send(200, play.page(), "text/html; charset=utf-8")
        assert named is not None
        found = self.run.examples(int(named[1]))
        if found is None:
            return self._send(500, b"The examples cannot be read; the terminal says why.")
        return self._send(200, found, "application/json")

    def do_POST(self) -> None:
        length, kind = self.headers.get("Content-Length", ""), self.headers.get("Content-Type", "")
        playground = self.run.playground
        if self._is_foreign() or self._is_of_another_page() or not self.headers.get("Origin"):
            return self._send(403, b"The playground's own page alone may ask.")
        if playground is None or self.path != "/playground":
            return self._send(404, b"There is no playground here.")
        # A browser asks before another page sends this kind, and gets no leave.
        if kind != "application/json":
            return self._send(415, b"A question is JSON.")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _LARGEST:
            return self._send(413, b"The question is too long.")
        return self._send(*self.run.answer(playground, self.rfile.read(int(length))))

    def _is_foreign(self) -> bool:
        """Whether another name than this machine's, or another page, is in a request.

        Other pages can make a browser ask: by a name of theirs that points here, or from where they are.
        """
        host = self.headers.get("Host", "")
        # A browser leaves port 80 out.
        return host.rsplit(":", 1)[0] not in _NAMES or self.headers.get("Origin", f"http://{host}") != f"http://{host}"

    def _is_of_another_page(self) -> bool:
        return self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")

    def _send(self, status: int, body: bytes, kind: str = _TEXT) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing of single requests."""


def server(run: ServedRun, port: int) -> ThreadingHTTPServer:
    """A server of a run on this machine; `serve_forever` starts it.

    Args:
        run: what is served.
        port: 0 for a free one.

    Raises:
        TsaeError: where the port is taken, or may not be used.
    """
    try:
        return ThreadingHTTPServer((HOST, port), type("Handler", (_Handler,), {"run": run}))
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        what = f"port {port} is taken: another program listens there" if taken else f"cannot listen there ({error})"
        fix = "Give another port (--port), or --port 0 for a free one."
        raise TsaeError(what, where=f"{HOST}:{port}", fix=fix) from error
