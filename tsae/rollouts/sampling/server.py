"""Responses of an inference server that offers completions as the OpenAI API does (vLLM, SGLang, transformers serve).

Prompts go out as token ids where the server takes ids, and responses come back as ids where it gives them (vLLM's
``return_token_ids``). A server that takes and gives text only gets a text that is tokenised to the same ids, and its
responses are tokenised here; the rollouts say so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig, ServerConfig
from tsae.rollouts.logs.entries.fields import is_finite
from tsae.rollouts.prompts import tokenize
from tsae.rollouts.sampling.batches import Request, Response
from tsae.rollouts.sampling.endpoint import Endpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
                        yield self._collected(*running.pop(0))
                while running:
                    yield self._collected(*running.pop(0))
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
            choice = body["choices"][0]
            text, reason = choice["text"], str(choice.get("finish_reason") or "unknown")
            usage = body.get("usage") or {}
            ids, read = choice.get("token_ids"), choice.get("prompt_token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
            stop = choice.get("stop_reason")
            n_read, n_sampled = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise TsaeError(
                f"gives no completion ({type(error).__name__}: {error})", where=self.url, fix="Check its log."
            ) from error
        if not isinstance(text, str):
            raise TsaeError(f"gives a text that is a {type(text).__name__}", where=self.url, fix="Check its log.")
        for name, given_ids in (("token_ids", ids), ("prompt_token_ids", read)):
            if given_ids is not None and not _are_ids(given_ids):
                raise TsaeError(f"gives {name} that are no list of token ids", where=self.url, fix="Check its log.")
        if (read is not None and read != prompt) or n_read not in (None, len(prompt)):
            raise TsaeError(
                f"read another prompt than was sent: {len(read) if n_read is None else n_read} tokens, expected "
                f"{len(prompt)}",
                where=self.url,
                fix="Give the checkpoint that it serves; its tokenizer is another one, or adds tokens of its own.",
            )
        exact = ids is not None
        found = list(ids) if exact else tokenize(self.tokenizer, text, add_special_tokens=False)
        if found and not 0 <= min(found) <= max(found) < len(self.tokenizer):
            what = f"gives token id {max(found)}, and the checkpoint's tokenizer has {len(self.tokenizer)}"
            raise TsaeError(what, where=self.url, fix="Give the checkpoint that it serves.")
        if exact and not _same_text(text, str(self.tokenizer.decode(found, skip_special_tokens=True))):
            what = f"gives ids whose text is another one with the checkpoint's tokenizer ({text[:40]!r})"
            raise TsaeError(what, where=self.url, fix="Give the checkpoint that it serves.")
        if reason == "stop" and not (found and found[-1] in self.ends):
            found.append(stop if isinstance(stop, int) and stop in self.ends else self.ends[0])
        if not found:
            raise TsaeError("gave a response without any token", where=self.url, fix="Raise max_new_tokens.")
        given = None
        if exact and isinstance(logprobs, list) and len(logprobs) == len(found) and None not in logprobs:
            # With NaN among them, they would differ from the checkpoint's by no number.
            if not all(map(is_finite, logprobs)):
                what = "gives log-probabilities that are no finite numbers"
                raise TsaeError(what, where=self.url, fix="Check its log.")
            given = tuple(map(float, logprobs))
        # Without ids, a text whose tokens are as many as were sampled; a server may count the end or not.
        fits = exact or n_sampled in (None, len(found), len(found) - (found[-1] in self.ends))
        return Response(tuple(found), "stop" if reason == "stop" else "length", given, exact, fits)

    def _collected(self, number: int, futures: list[Future[Response]]) -> tuple[int, list[Response]]:
        return number, [future.result() for future in futures]

    def _seed(self, name: str, number: int) -> int:
        digest = hashlib.sha256(f"{self.config.seed}/{name}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def _are_ids(value: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and all(isinstance(id, int) and not isinstance(id, bool) for id in value)


def _same_text(theirs: str, ours: str) -> bool:
    """Up to white space at the ends, and bytes that are no text."""
    if "\ufffd" in theirs + ours:
        return True
    return theirs.strip() == ours.strip()
