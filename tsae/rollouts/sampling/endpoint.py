"""A server with completions and chats as the OpenAI API has them: requests, retries with longer waits, its key."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from tsae.errors import TsaeError
from tsae.rollouts.config import EndpointConfig

KEY = "TSAE_SERVER_KEY"
"""Environment variable with the server's key."""
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
_LONGEST_WAIT = 60.0


class Endpoint:
    """A server that completes prompts.

    Args:
        config: where it is, and how to ask it.

    Raises:
        TsaeError: where it does not answer, or does not say which model it serves.
    """

    def __init__(self, config: EndpointConfig) -> None:
        import requests

        self.config = config
        self.url = config.url.rstrip("/")
        self._key = os.environ.get(KEY, "")
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

        said = ""
        for attempt in range(self.config.retries + 1):
            wait = min(_LONGEST_WAIT, self.config.first_wait * 2**attempt)
            try:
                answer = self._session.request(
                    method, f"{self.url}/{path}", json=content, timeout=self.config.timeout, allow_redirects=False
                )
                if answer.status_code not in _AGAIN:
                    return answer.status_code, answer.json() if answer.status_code == 200 else _content(answer)
                said = f"status {answer.status_code}: {self._said(_content(answer))}"
                wait = _asked_to_wait(answer.headers.get("Retry-After", "")) or wait
            except (requests.JSONDecodeError, RecursionError):
                said = "its answer is not JSON"
            except requests.RequestException as error:
                said = f"{type(error).__name__}"
            if attempt < self.config.retries:
                time.sleep(wait)
        raise TsaeError(
            f"does not answer, asked {self.config.retries + 1} times ({said})",
            where=self.url,
            fix="Look after the server, and give the same command again; what it has answered is kept.",
        )

    def _said(self, body: Any) -> str:
        """What a server says of a refusal, in one line, without the key."""
        found = body
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
        text = " ".join((found if isinstance(found, str) else json.dumps(found)).split())[:200]
        return text.replace(self._key, "***") if self._key else text


def _content(answer: Any) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return answer.text[:200]


def _asked_to_wait(header: str) -> float:
    """Seconds of a Retry-After header; 0 for none, or a date."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(header)))
    except ValueError:
        return 0.0
