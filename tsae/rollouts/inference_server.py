"""Responses of an inference server that offers completions as the OpenAI API does (vLLM, SGLang, transformers serve).

Prompts go out as token ids where the server takes ids, and responses come back as ids where it gives them (vLLM's
``return_token_ids``). A server that takes and gives text only gets a text that is tokenised to the same ids, and its
responses are tokenised here; the rollouts say so.

`Endpoint` sends the requests, with retries after longer and longer waits, and with the server's key.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import BaseModel, Field, FiniteFloat, StrictInt, StrictStr, ValidationError

from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, without_secrets
from tsae.rollouts.config import KEY, EndpointConfig, SamplingConfig, ServerConfig
from tsae.rollouts.generation import Request, Response
from tsae.rollouts.problems import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _LogProbs(BaseModel):
    token_logprobs: list[FiniteFloat | None] | None = None


class _Choice(BaseModel):
    text: StrictStr
    finish_reason: Any = None
    stop_reason: Any = None
    token_ids: list[StrictInt] | None = None
    prompt_token_ids: list[StrictInt] | None = None
    logprobs: _LogProbs | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None


_SHAPES = ("ids, and all settings", "ids", "text")


class Server:
    """A server that samples from a checkpoint.

    Args:
        server: where it is, and how to ask it.
        config: how it samples.
        tokenizer: the checkpoint's.
        ends: ids of the tokens that end a response.

    Raises:
        TsaeError: where it does not answer, or does not say which model it serves.
    """

    def __init__(
        self, server: ServerConfig, config: SamplingConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
    ) -> None:
        self.server, self.config, self.tokenizer, self.ends = server, config, tokenizer, list(ends)
        self.endpoint = Endpoint(server)
        self.url = self.endpoint.url
        self.shape: str | None = None
        """How requests are written; found out with the first one."""

    def generate(
        self, prompts: Sequence[list[int]], batches: Sequence[tuple[int, Sequence[Request]]], seeds: Sequence[str]
    ) -> Iterator[tuple[int, list[Response]]]:
        """(number, responses) of every batch, in order, while the next one is under way.

        Args:
            prompts: of every problem, its token ids.
            batches: number and requests of each.
            seeds: of every problem, a name; with the request's number and the seed it decides the request's seed.

        Raises:
            TsaeError: where the server refuses, or fails more often than `ServerConfig.retries`; where it gives ids of
                another tokenizer.
        """

        def one(request: Request) -> Response:
            return self.ask(prompts[request.problem], self._seed(seeds[request.problem], request.number))

        if batches and self.shape is None:
            one(batches[0][1][0])
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            running: list[tuple[int, list[Future[Response]]]] = []
            try:
                for number, requests in batches:
                    running.append((number, [pool.submit(one, request) for request in requests]))
                    if len(running) > 1:
                        yield _collected(*running.pop(0))
                yield from (_collected(*each) for each in running)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def ask(self, prompt: list[int], seed: int) -> Response:
        """One response.

        Raises:
            TsaeError: as `generate`.
        """
        shapes = [self.shape] if self.shape else list(_SHAPES)
        for shape in shapes:
            status, body = self.endpoint.complete(self._request(prompt, seed, shape))
            if status == 200:
                response = self._response(prompt, body)
                self.shape = shape
                return response
            if status not in (400, 422) or shape == shapes[-1]:
                break
        raise self.endpoint.refusal(status, body)

    def _request(self, prompt: list[int], seed: int, shape: str) -> dict[str, Any]:
        config = self.config
        body = {"prompt": prompt, "max_tokens": config.max_new_tokens, "temperature": config.temperature}
        body |= {"top_p": 1.0, "seed": seed}
        if shape == _SHAPES[0]:
            # A server takes what is not named from the checkpoint's generation_config.json.
            plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            return body | plain | {"n": 1, "logprobs": 1, "return_token_ids": True}
        if shape == _SHAPES[1]:
            return body | {"n": 1, "logprobs": 1}
        plain = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": config.temperature}
        ends = {"eos_token_id": self.ends, "pad_token_id": self.ends[0], "max_new_tokens": config.max_new_tokens}
        return body | {"prompt": self._text(prompt), "generation_config": json.dumps(plain | ends)}

    def _text(self, prompt: list[int]) -> str:
        """A text that the tokenizer turns into the prompt's ids.

        Raises:
            TsaeError: where there is none.
        """
        without = prompt[1:] if prompt[:1] == [self.tokenizer.bos_token_id] else prompt
        for ids in (prompt, without):
            text = str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if tokenize(self.tokenizer, text) == prompt:
                return text
        what = "takes text and no token ids, and a prompt's text is not tokenised to the prompt's ids again"
        raise TsaeError(what, where=self.url, fix="Use a server that takes token ids, such as vLLM.")

    def _response(self, prompt: list[int], body: Any) -> Response:
        try:
            answer = _Completion.model_validate(body)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            place = ".".join(map(str, found["loc"]))
            self._refuse(f"gives no completion ({place}: {found['msg']})", "Check its log.", error)
        choice, usage = answer.choices[0], answer.usage or _Usage()
        text, reason, ids, read = choice.text, choice.finish_reason, choice.token_ids, choice.prompt_token_ids
        if (read is not None and read != prompt) or usage.prompt_tokens not in (None, len(prompt)):
            n = len(read or ()) if usage.prompt_tokens is None else usage.prompt_tokens
            self._refuse(f"read another prompt than was sent: {n} tokens, expected {len(prompt)}")
        exact = ids is not None
        found_ids = list(ids or ()) if exact else tokenize(self.tokenizer, text, add_special_tokens=False)
        if found_ids and not 0 <= min(found_ids) <= max(found_ids) < len(self.tokenizer):
            what = f"gives token id {max(found_ids)}, and the checkpoint's tokenizer has {len(self.tokenizer)}"
            self._refuse(what)
        if exact and not _same_text(text, str(self.tokenizer.decode(found_ids, skip_special_tokens=True))):
            self._refuse(f"gives ids that the checkpoint's tokenizer decodes to another text ({text[:40]!r})")
        if reason == "stop" and not (found_ids and found_ids[-1] in self.ends):
            stop = choice.stop_reason
            found_ids.append(stop if isinstance(stop, int) and stop in self.ends else self.ends[0])
        if not found_ids:
            self._refuse("gave a response without any token", "Raise max_new_tokens.")
        logprobs, given = (choice.logprobs or _LogProbs()).token_logprobs, None
        if exact and logprobs is not None and len(logprobs) == len(found_ids) and None not in logprobs:
            given = tuple(value for value in logprobs if value is not None)
        # Without ids, a text whose tokens are as many as were sampled; a server may count the end or not.
        fits = exact or usage.completion_tokens in (None, len(found_ids), len(found_ids) - (found_ids[-1] in self.ends))
        return Response(tuple(found_ids), "stop" if reason == "stop" else "length", given, exact, fits)

    def _refuse(
        self,
        what: str,
        fix: str = "Give the checkpoint that it serves; its tokenizer is another one, or adds tokens.",
        cause: Exception | None = None,
    ) -> NoReturn:
        raise TsaeError(what, where=self.url, fix=fix) from cause

    def _seed(self, name: str, number: int) -> int:
        digest = hashlib.sha256(f"{self.config.seed}/{name}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def _collected(number: int, futures: list[Future[Response]]) -> tuple[int, list[Response]]:
    return number, [future.result() for future in futures]


def _same_text(theirs: str, ours: str) -> bool:
    """Whether two texts are equal, up to white space at the ends and bytes that are not text."""
    return "\ufffd" in theirs + ours or theirs.strip() == ours.strip()


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

    def about(self, name: str) -> dict[str, Any]:
        """What vLLM says of itself beside its /v1, such as ``version``; nothing where the server has no such page."""
        import requests

        try:
            status, text, _ = self._once("GET", f"{self.url.removesuffix('/v1')}/{name}", None)
            found = parse_json(text) if status == 200 else {}
        except (requests.RequestException, ValueError):
            found = {}
        return found if isinstance(found, dict) else {}

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
                raise TsaeError(f"is not an address ({type(error).__name__})", where=self.url, fix=fix) from error
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
        url, timeout = path if "://" in path else f"{self.url}/{path}", self.config.timeout
        with self._session.request(
            method, url, json=content, timeout=timeout, allow_redirects=False, stream=True
        ) as answer:
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
    """The text of an answer. A server may name an unknown encoding."""
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
