"""Servers on loopback: chat completions whose answers a function makes, and a Hugging Face Hub in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

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


TOKEN = "hf_" + "t" * 30


class Hub:
    """What the server holds and saw.

    Attributes:
        repositories: "models/org/name" -> {path: bytes}.
        lfs: files that were uploaded beside the commit, by SHA-256.
        commits: numbers of files, one entry a commit.
        tokens: what came as Authorization.
        refused: (method, path) of requests that it does not know.
        listed: "org/name" -> what it answers to questions for refs and commits.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.lfs: dict[str, bytes] = {}
        self.commits: list[int] = []
        self.tokens: set[str | None] = set()
        self.refused: list[tuple[str, str]] = []
        self.listed: dict[str, dict[str, Any]] = {}
        self.url = ""

    def add(self, repository: str, folder: Path, below: str = "") -> None:
        """Hold the files of a folder."""
        held = self.repositories.setdefault(f"models/{repository}", {})
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            held[f"{below}{file.relative_to(folder).as_posix()}"] = file.read_bytes()

    def sha(self, repository: str) -> str:
        content = {name: hashlib.sha1(data).hexdigest() for name, data in self.repositories[repository].items()}
        return hashlib.sha1(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            path = unquote(urlsplit(self.path).path)
            if found := re.fullmatch(
                r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?.*)?", path
            ):
                kind, name, what, _ = found.groups()
                repository = f"{kind}/{name}"
                if repository not in hub.repositories:
                    return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                files = hub.repositories[repository]
                if what == "tree":
                    return self.answer([_entry(file, data) for file, data in sorted(files.items())])
                told = {"id": name, "sha": hub.sha(repository), "siblings": []}
                told["siblings"] = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
                return self.answer({**told, "private": False, "tags": [], "downloads": 0, "likes": 0})
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(refs|commits)(?:/main)?", path):
                return self.answer(hub.listed[found[1]][found[2]])
            if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repository, file = f"{found[1] or 'models/'}{found[2]}", found[4]
                data = hub.repositories.get(repository, {}).get(file)
                if data is None:
                    code = "EntryNotFound" if repository in hub.repositories else "RepoNotFound"
                    return self.answer(b"", 404, {"X-Error-Code": code})
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                headers = {"ETag": etag, "X-Repo-Commit": hub.sha(repository)}
                if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                    return self.answer(data[int(part[1]) : int(part[2]) + 1], 206, headers)
                return self.answer(data, headers=headers)
            hub.refused.append((self.command, path))
            return self.answer({"error": "unknown"}, 404)

        def do_PUT(self) -> None:
            hub.lfs[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self) -> None:
            path, body = unquote(urlsplit(self.path).path), self.body()
            hub.tokens.add(self.headers.get("Authorization"))
            if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/paths-info/[^/]+", path):
                files = hub.repositories.get(f"{found[1]}/{found[2]}", {})
                wanted = parse_qs(body.decode())["paths"]
                return self.answer([_entry(name, files[name]) for name in wanted if name in files])
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                asked = json.loads(body)
                kind = f"{asked.get('type', 'model')}s"
                owner = asked.get("organization") or "me"
                name = f"{owner}/{asked['name']}"
                there = f"{kind}/{name}" in hub.repositories
                hub.repositories.setdefault(f"{kind}/{name}", {})
                return self.answer({"url": f"{hub.url}/{name}"}, 409 if there else 200)
            if found := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/preupload/\w+", path):
                modes = [
                    {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.answer({"files": modes})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}", "header": {}}}}
                    for item in json.loads(body)["objects"]
                ]
                return self.answer({"transfer": "basic", "objects": objects})
            if found := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)/commit/\w+", path):
                held = hub.repositories[f"{found[1]}/{found[2]}"]
                entries = [json.loads(line) for line in body.splitlines()]
                for entry in (e for e in entries if e["key"] in ("file", "lfsFile")):
                    value = entry["value"]
                    data = base64.b64decode(value["content"]) if entry["key"] == "file" else hub.lfs[value["oid"]]
                    held[value["path"]] = data
                hub.commits.append(len(entries) - 1)
                sha = hub.sha(f"{found[1]}/{found[2]}")
                return self.answer({"commitUrl": f"{hub.url}/{found[2]}/commit/{sha}", "commitOid": sha})
            hub.refused.append((self.command, path))
            return self.answer({"error": "unknown"}, 404)

    return Handler


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".h5", ".parquet", ".npz")) else "regular"


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub_here(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Run a Hub, and point this process and its children to it, with an empty cache and no token."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # This process has read its environment already.
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
