"""A server with completions and chats as the OpenAI API has them: requests, retries with longer waits, its key."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, without_secrets
from tsae.rollouts.config import KEY, EndpointConfig

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
_LONGEST_WAIT = 60.0
_MOST = 64 << 20
"""Bytes of an answer once it is unpacked: over 400,000 tokens with their log-probabilities."""
_PIECE = 1 << 16


class Endpoint:
    """A server that completes prompts.

    Args:
        config: where it is, and how to ask it.

    Raises:
        TsaeError: where it does not answer, or does not say which model it serves; where the key cannot be sent.
    """

    def __init__(self, config: EndpointConfig) -> None:
        import requests

        self.config = config
        self.url = config.url.rstrip("/")
        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isprintable() and self._key.encode("latin-1", "replace").decode("latin-1") == self._key):
            what = "holds characters that cannot be sent, expected a key of letters, digits and signs"
            raise TsaeError(what, where=f"${KEY}", fix="Set it to the key as the server's owner gave it.")
        self._session = requests.Session()
        # Nothing of ~/.netrc or of proxies goes to a server that the user named.
        self._session.trust_env = False
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=config.concurrency, pool_block=False)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        if self._key:
            self._session.headers["Authorization"] = f"Bearer {self._key}"
        self.model = config.model or self._only_model()

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        """(status, JSON) of the answer to a request for a completion; `model` is added.

        Raises:
            TsaeError: where it fails more often than `EndpointConfig.retries`.
        """
        return self._asked("POST", "completions", {"model": self.model, **body})

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """(status, JSON) of the answer to messages; `model` is added. See `complete`."""
        return self._asked("POST", "chat/completions", {"model": self.model, **body})

    def refusal(self, status: int, body: Any) -> TsaeError:
        """The error for a completion that the server refuses."""
        return TsaeError(
            f"refuses a completion with status {status} ({self._said(body)})",
            where=self.url,
            fix=f"Set {KEY} to a valid key." if status in (401, 403) else
            "Give the address with its /v1, and the model by the name that the server has for it (--server.model).",
        )  # fmt: skip

    def _only_model(self) -> str:
        status, body = self._asked("GET", "models", None)
        try:
            names = [str(model["id"]) for model in body["data"]]
        except (KeyError, TypeError):
            names = []
        if status != 200 or len(names) != 1:
            what = f"serves {', '.join(names)}" if names else f"does not say what it serves (status {status})"
            raise TsaeError(what, where=self.url, fix="Name the model with --server.model.")
        return names[0]

    def _asked(self, method: str, path: str, content: dict[str, Any] | None) -> tuple[int, Any]:
        """(status, JSON) of an answer. A failure that may pass is asked again; every wait is longer than the last."""
        import requests
        from urllib3.exceptions import HTTPError, LocationParseError

        said = ""
        for attempt in range(self.config.retries + 1):
            wait = min(_LONGEST_WAIT, self.config.first_wait * 2**attempt)
            try:
                status, body, asked_wait = self._once(method, path, content)
                if status not in _AGAIN:
                    return status, parse_json(body) if status == 200 else _read(body)
                said = f"status {status}: {self._said(_read(body))}"
                wait = asked_wait or wait
            except json.JSONDecodeError:
                said = "its answer is not JSON"
            except (requests.exceptions.InvalidURL, LocationParseError, UnicodeError) as error:
                fix = "Give an address such as http://localhost:8000/v1."
                raise TsaeError(f"is no address ({type(error).__name__})", where=self.url, fix=fix) from error
            except (requests.RequestException, HTTPError) as error:
                said = f"{type(error).__name__}"
            if attempt < self.config.retries:
                time.sleep(wait)
        what = f"does not answer, asked {self.config.retries + 1} times ({said})"
        fix = "Look after the server, and give the same command again; what it has answered is kept."
        raise TsaeError(what, where=self.url, fix=fix)

    def _once(self, method: str, path: str, content: dict[str, Any] | None) -> tuple[int, str, float]:
        """Status, text and Retry-After of an answer. It is read as it comes, so that no answer is without an end.

        Raises:
            TsaeError: where it is too large.
        """
        import requests

        end = time.monotonic() + self.config.timeout
        asked: dict[str, Any] = {
            "json": content,
            "timeout": self.config.timeout,
            "allow_redirects": False,
            "stream": True,
        }
        with self._session.request(method, f"{self.url}/{path}", **asked) as answer:
            read = bytearray()
            while piece := answer.raw.read1(_PIECE, decode_content=True):
                read += piece
                if len(read) > _MOST:
                    what = f"gives an answer of more than {_MOST:,} bytes"
                    raise TsaeError(what, where=self.url, fix="Ask for fewer tokens, or use another server.")
                if time.monotonic() > end:
                    raise requests.ReadTimeout(f"it takes more than {self.config.timeout:g} seconds")
            text = _decoded(bytes(read), answer.encoding)
            return answer.status_code, text, _asked_to_wait(answer.headers.get("Retry-After", ""))

    def hide(self, text: str) -> str:
        """The text without the key, and without other secrets (`without_secrets`)."""
        return without_secrets(text, self._key)

    def _said(self, body: Any) -> str:
        """What a server says of a refusal, in one line, without the key."""
        found = body
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
        try:
            text = self.hide(found if isinstance(found, str) else json.dumps(found))
        except RecursionError:  # it could just be read
            text = "nested too deeply"
        # Of a key that is cut, a part would be left.
        return " ".join((text.replace(self._key, "***") if self._key else text).split())[:200]


def _read(body: str) -> Any:
    """The JSON of a refusal, or its text."""
    try:
        return parse_json(body)
    except json.JSONDecodeError:
        return body


def _decoded(content: bytes, encoding: str | None) -> str:
    """The text of an answer. A server may name an encoding that is none."""
    try:
        return content.decode(encoding or json.detect_encoding(content), "replace")
    except (LookupError, ValueError):
        return content.decode("utf-8", "replace")


def _asked_to_wait(header: str) -> float:
    """Seconds of a Retry-After header; 0 for none, or a date."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(header)))
    except ValueError:
        return 0.0
