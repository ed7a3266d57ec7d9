"""A server with chat completions, whose answers a function makes of the messages: real HTTP on loopback."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tsae.diff.label_contexts import CLOSE, OPEN
from tsae.rollouts.config import EndpointConfig


class ChatServer(ThreadingHTTPServer):
    """Answers with ``answer(instructions, content)``; `seconds` is how long it takes."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, Any], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.seconds, self.n_asked, self.keys = answer, 0.0, 0, list[str]()

    @property
    def config(self) -> EndpointConfig:
        url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        return EndpointConfig(url=url, first_wait=0.01, retries=1, concurrency=4)


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.n_asked += 1
        time.sleep(self.server.seconds)
        system, user = (body["messages"][place]["content"] for place in (0, -1))
        content = self.server.answer(system, json.loads(user))
        usage = {"total_tokens": len(system + user) // 4}
        self._answer({"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage})

    def _answer(self, content: Any) -> None:
        text = json.dumps(content).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            pass  # the client gave up


@contextmanager
def serving(answer: Callable[[str, Any], str]) -> Iterator[ChatServer]:
    with ChatServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def marked(text: str) -> list[str]:
    return re.findall(f"{OPEN}(.*?){CLOSE}", text)


def oracle(instructions: str, content: Any) -> str:
    """Knows that features stand for words: the label is the word that is marked most, and fits texts with it."""
    if "active" in content:
        words = [word for text in content["active"] for part in marked(text["text"]) for word in part.split()]
        return json.dumps({"label": f"the word {max(words, key=words.count)}"})
    word = content["label"].rsplit(" ", 1)[1]
    of_marks = OPEN in instructions
    holds = [word in (" ".join(marked(text)) if of_marks else text).split() for text in content["texts"]]
    return json.dumps([int(hold) for hold in holds])
