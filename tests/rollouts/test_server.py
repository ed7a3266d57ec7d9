"""Sampling by a server: its requests and answers, its faults, and whether its responses are the checkpoint's own.

The server of most tests speaks vLLM's dialect and generates with the real tiny model. The slow test talks to
`transformers serve`.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from support.builders import BOS, EOS, save_perturbed
from support.children import free_port
from support.logs import refused
from tsae import testbed
from tsae.base.part import Part
from tsae.checkpoints.loading import Checkpoint
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts import inference_server as endpoint
from tsae.rollouts.config import EndpointConfig, SamplingConfig, ServerConfig
from tsae.rollouts.generation import agreement
from tsae.rollouts.inference_server import Endpoint
from tsae.rollouts.problems import Problem, write_problems
from tsae.rollouts.rewards import find_verifier
from tsae.rollouts.sampling import Response, sample, sample_part

pytestmark = pytest.mark.slow(ci=True)

PROBLEMS = [Problem(f"p{i}", f"{i}+{i + 1}*3?", str(i)) for i in range(6)]
CONFIG = SamplingConfig(n_samples=4, max_new_tokens=12, batch_size=5)


class Served(ThreadingHTTPServer):
    """One model behind vLLM's completions; `faults` are answered first, one a request."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        checkpoint = Checkpoint("served", str(folder))
        self.model, self.tokenizer = checkpoint.load_model(), checkpoint.load_tokenizer()
        self.lock, self.bodies, self.keys = threading.Lock(), list[dict[str, Any]](), list[str]()
        self.faults: list[tuple[int, str, dict[str, str]]] = []
        self.change: Any = lambda answer: answer
        self.top_k = 0
        self.key = ""

    @property
    def config(self) -> ServerConfig:
        return ServerConfig(url=f"http://127.0.0.1:{self.server_address[1]}/v1", first_wait=0.01, retries=3)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([body["prompt"]])
        generator = torch.Generator().manual_seed(body["seed"])
        ids, logprobs = list[int](), list[float]()
        with torch.no_grad():
            while len(ids) < body["max_tokens"] and EOS not in ids:
                logits = self.model(torch.cat([prompt, torch.tensor([ids], dtype=torch.long)], 1)).logits[0, -1]
                kept = logits / body["temperature"]
                if self.top_k:
                    kept = kept.masked_fill(kept < kept.topk(self.top_k).values[-1], -math.inf)
                ids.append(int(torch.multinomial(kept.softmax(-1), 1, generator=generator)))
                logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        choice = {
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if ids[-1] == EOS else "length",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return self.change({"choices": [choice], "usage": usage})

    def reply(self, handler: _Handler) -> None:
        with self.lock:
            self.bodies.append(handler.body)
            self.keys.append(handler.headers.get("Authorization", ""))
            if self.key and self.keys[-1] != f"Bearer {self.key}":
                status, text, headers = 401, json.dumps({"error": {"message": f"bad key {self.keys[-1]}"}}), {}
            elif self.faults:
                status, text, headers = self.faults.pop(0)
            else:
                status, text, headers = 200, json.dumps(self.complete(handler.body)), {}
            handler.send(status, text.encode(), **headers)


class _Handler(BaseHTTPRequestHandler):
    """Answers a completion as its server's `reply` writes."""

    server: Any

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send(200, b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with suppress(OSError):  # the client gave up
            self.server.reply(self)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served(llama: Path) -> Iterator[Served]:
    with running(server := Served(llama)):
        yield server


@pytest.mark.slow
def test_ids_are_those_that_were_sampled(policy: Checkpoint, served: Served) -> None:
    found = sample(policy, PROBLEMS, CONFIG, server=served.config, verify=lambda *_: True, progress=False)
    prompts = [policy.load_tokenizer()(p.prompt)["input_ids"] for p in PROBLEMS]
    assert len(served.bodies) == len(found) + 1  # the first is asked twice, to learn how
    assert len({body["seed"] for body in served.bodies}) == len(found)
    answers = {(tuple(b["prompt"]), tuple(served.complete(b)["choices"][0]["token_ids"])) for b in served.bodies}
    for i, record in enumerate(found.table.to_pylist()):
        assert record["problem_id"] == f"p{i // 4}"
        assert record["prompt_ids"] == prompts[i // 4]
        assert (tuple(record["prompt_ids"]), tuple(record["response_ids"])) in answers
        assert record["finish_reason"] == ("stop" if record["response_ids"][-1] == EOS else "length")
        assert record["policy"] == "base"
        assert record["outcome"] == "success"
    assert found.info["served"] == {"model": None, "ids": "sampled", "other_lengths": 0}
    again = sample(policy, PROBLEMS[::-1], replace(CONFIG, batch_size=7), server=served.config, progress=False)
    by_problem = [
        sorted(tuple(r["response_ids"]) for r in t.table.to_pylist() if r["problem_id"] == "p3") for t in (found, again)
    ]
    assert by_problem[0] == by_problem[1]  # a request's seed depends on its problem alone


def test_what_is_asked_leaves_nothing_to_the_servers_defaults(policy: Checkpoint, served: Served) -> None:
    sample(policy, PROBLEMS, replace(CONFIG, temperature=0.7), server=served.config, progress=False)
    body = served.bodies[-1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.7, 12)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert body["return_token_ids"] is True


@pytest.mark.slow
def test_an_overloaded_server_is_asked_again(policy: Checkpoint, served: Served) -> None:
    served.faults = [
        (429, json.dumps({"error": {"message": "slow down"}}), {"Retry_After": "0.02"}),
        (500, "<html>oops</html>", {}),
        (200, '{"choices": [{"text": "1', {}),  # cut off
        (503, "", {}),
        (200, "[]", {"Content_Length": "50"}),  # the connection ends before the answer does
    ]
    plain = sample(policy, PROBLEMS, CONFIG, server=replace(served.config, retries=6), progress=False)
    assert not served.faults
    assert plain.table.equals(sample(policy, PROBLEMS, CONFIG, server=served.config, progress=False).table)


@pytest.mark.slow(ci=True)
def test_what_was_answered_is_kept(policy: Checkpoint, served: Served, tmp_path: Path) -> None:
    whole = sample(policy, PROBLEMS, CONFIG, server=served.config, progress=False)
    served.bodies.clear()

    def fail_after(n: int) -> Any:
        seen: list[Any] = []

        def change(answer: Any) -> Any:
            seen.append(answer)
            if len(seen) > n:
                served.faults = [(500, "full", {})] * 1000
            return answer

        return change

    served.change = fail_after(13)
    one = replace(served.config, concurrency=1)
    with pytest.raises(TsaeError, match=r"does not answer, asked 4 times \(status 500: full\)"):
        sample(policy, PROBLEMS, CONFIG, server=one, pieces=tmp_path, progress=False)
    done = sorted(path.name for path in (tmp_path / "base").iterdir())
    assert 2 <= len(done) - 1 < 5  # sampling.json is one
    served.change, served.faults = lambda answer: answer, []
    served.bodies.clear()
    found = sample(policy, PROBLEMS, CONFIG, server=one, pieces=tmp_path, progress=False)
    assert found.table.equals(whole.table)
    assert len(served.bodies) == 24 + 1 - 5 * (len(done) - 1)


def test_batches_of_other_prompts_are_not_taken(policy: Checkpoint, tmp_path: Path) -> None:
    """The vocabulary is the same: only the template differs."""
    copy = replace(policy, path=str(shutil.copytree(policy.path, tmp_path / "model")))
    tokenizer, config = copy.load_tokenizer(), replace(CONFIG, prompt_format="chat")
    for template, other in (("{{ messages[0]['content'] }}", False), ("{{ messages[0]['content'] }}=", True)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(copy.path)
        again: Any = {"part": Part(0, 3), "pieces": tmp_path / "pieces", "progress": False}
        with pytest.raises(TsaeError, match="another sampling: prompts differ") if other else nullcontext():
            sample_part(copy, PROBLEMS, config, **again)


def test_batches_that_end_elsewhere_are_not_taken(policy: Checkpoint, tmp_path: Path) -> None:
    """What ends a response may be said by generation_config.json alone, which no fingerprint is of."""
    copy = replace(policy, path=str(shutil.copytree(policy.path, tmp_path / "model")))
    again: Any = {"part": Part(0, 3), "pieces": tmp_path / "pieces", "progress": False}
    sample_part(copy, PROBLEMS, CONFIG, **again)
    sample_part(copy, PROBLEMS, CONFIG, **again)
    file = Path(copy.path) / "generation_config.json"
    told = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**told, "eos_token_id": [1, 2]}))
    refused("another sampling: ends differ", sample_part, copy, PROBLEMS, CONFIG, **again)


@pytest.mark.slow
def test_parts_give_what_one_gives(policy: Checkpoint, served: Served, tmp_path: Path) -> None:
    for server in (None, served.config):
        whole = sample(policy, PROBLEMS, CONFIG, server=server, progress=False)
        pieces = tmp_path / str(server is None)
        left = [
            sample_part(policy, PROBLEMS, CONFIG, part=Part(i, 3), pieces=pieces, server=server, progress=False)
            for i in (2, 0, 1)
        ]
        assert left == [4, 2, 0]
        if server is not None:
            served.bodies.clear()
        assert sample(policy, PROBLEMS, CONFIG, server=server, pieces=pieces, progress=False).table.equals(whole.table)
        assert not served.bodies
        with pytest.raises(TsaeError, match="holds responses of another sampling: config differ"):
            sample(policy, PROBLEMS, replace(CONFIG, seed=5), server=server, pieces=pieces, progress=False)
        with pytest.raises(TsaeError, match="holds responses of another sampling: problems, prompts differ"):
            sample(policy, PROBLEMS[1:], CONFIG, server=server, pieces=pieces, progress=False)
        other: Any = {"pieces": tmp_path / "other", "server": server, "progress": False}
        sample_part(policy, PROBLEMS, replace(CONFIG, seed=5), part=Part(2, 5), **other)
        shutil.copy(tmp_path / "other" / "base" / "000002.json", pieces / "base")
        with pytest.raises(TsaeError, match=r"000002\.json: cannot be read .*it is of another sampling"):
            sample(policy, PROBLEMS, CONFIG, server=server, pieces=pieces, progress=False)
        shutil.rmtree(tmp_path / "other")
        (pieces / "base" / "000001.json").write_text('{"responses": [{"ids": [1]}]}')
        with pytest.raises(TsaeError, match=r"000001\.json: has no checksum"):
            sample(policy, PROBLEMS, CONFIG, server=server, pieces=pieces, progress=False)


def test_a_key_is_sent_and_never_shown(
    policy: Checkpoint, served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served.key = "s3cret"
    with pytest.raises(TsaeError, match=r"status 401 \(bad key\)\. Set TSAE_SERVER_KEY to a valid key"):
        sample(policy, PROBLEMS, CONFIG, server=served.config, progress=False)
    monkeypatch.setenv("TSAE_SERVER_KEY", "expired-key")
    with pytest.raises(TsaeError, match=r"status 401 \(bad key Bearer \*\*\*\)") as refused:
        sample(policy, PROBLEMS, CONFIG, server=served.config, progress=False)
    assert "expired-key" not in str(refused.value)
    monkeypatch.setenv("TSAE_SERVER_KEY", "s3cret")
    found = sample(policy, PROBLEMS, CONFIG, server=served.config, pieces=tmp_path, progress=False)
    found.write(tmp_path / "rollouts.parquet")
    # Neither does a password in the address go anywhere but to the server.
    monkeypatch.delenv("TSAE_SERVER_KEY")
    served.key = ""
    server = replace(served.config, url=served.config.url.replace("//", "//user:passw0rd@"))
    found = sample(policy, PROBLEMS, CONFIG, server=server, pieces=tmp_path / "b", progress=False)
    found.write(tmp_path / "b" / "rollouts.parquet")
    assert served.keys[-1].startswith("Basic ")
    served.key = "another"
    with pytest.raises(TsaeError, match=r"http://\*\*\*@127\.0\.0\.1"):
        sample(policy, PROBLEMS, CONFIG, server=server, pieces=tmp_path / "c", progress=False)
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or not [word for word in (b"s3cret", b"passw0rd") if word in file.read_bytes()]


def altered(name: str, value: Any) -> Any:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        (answer["usage"] if name in answer["usage"] else answer["choices"][0])[name] = value
        return answer

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (altered("prompt_tokens", 9), "read another prompt than was sent: 9 tokens, expected 7"),
        (altered("prompt_token_ids", [1]), "read another prompt than was sent"),
        (altered("token_ids", [3, 2000]), "gives token id 2000, and the checkpoint's tokenizer has 20"),
        (altered("token_ids", [3, -1]), "gives token id"),
        (altered("text", "other"), "gives ids that the checkpoint's tokenizer decodes to another text"),
        (altered("text", None), "gives no completion .choices.0.text: .*string"),
        (altered("token_ids", ["x"]), "gives no completion .choices.0.token_ids"),
        (altered("token_ids", [1.5]), "gives no completion .choices.0.token_ids"),
        (altered("token_ids", "123"), "gives no completion .choices.0.token_ids"),
        (altered("prompt_token_ids", 7), "gives no completion .choices.0.prompt_token_ids"),
        (lambda answer: altered("prompt_tokens", 0)(altered("prompt_token_ids", None)(answer)), "0 tokens, expected 7"),
        (
            lambda answer: altered("logprobs", {"token_logprobs": [math.nan] * 12})(
                altered("token_ids", [3] * 12)(altered("text", "\ufffd")(altered("finish_reason", "length")(answer)))
            ),
            "gives no completion .choices.0.logprobs.*finite",
        ),
        (lambda _: {"object": "error"}, r"gives no completion .choices: Field required"),
        (lambda _: ["x"], r"gives no completion .*valid dictionary"),
    ],
)
def test_answers_of_something_else_are_refused(change: Any, what: str, policy: Checkpoint, served: Served) -> None:
    served.change = change
    refused(what, sample, policy, PROBLEMS, CONFIG, server=served.config, progress=False)


def test_a_server_that_refuses_is_quoted(policy: Checkpoint, served: Served) -> None:
    served.faults = [(404, json.dumps({"message": "no model tiny"}), {})]
    with pytest.raises(TsaeError, match=r"refuses a completion with status 404 \(no model tiny\)"):
        sample(policy, PROBLEMS, CONFIG, server=served.config, progress=False)
    nowhere = ServerConfig(url=f"http://127.0.0.1:{free_port()}/v1", retries=1, first_wait=0.01)
    with pytest.raises(TsaeError, match=r"does not answer, asked 2 times \(ConnectionError\)"):
        sample(policy, PROBLEMS, CONFIG, server=nowhere, progress=False)
    for name, values in (("url", ["ftp://x"]), ("concurrency", [0]), ("retries", [-1, 1001]), ("check", [-1])):
        for value in values:
            refused(name, ServerConfig, **{name: value})
    for timeout in (math.inf, math.nan, 1e10, 0.0):  # a day at most
        refused("timeout", EndpointConfig, timeout=timeout)


# --- what a server may do


def asked(reply: Callable[[_Handler], None], **changes: Any) -> Any:
    """What the client makes of an answer."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.reply = reply
    with running(server):
        url = f"http://127.0.0.1:{server.server_port}/v1"
        client = Endpoint(EndpointConfig(**{"url": url, "model": "m", "retries": 1, "first_wait": 0.01, **changes}))
        status, body = client.chat({"messages": []})
        if status != 200:
            raise client.refusal(status, body)
        return body


@pytest.mark.parametrize(
    ("status", "body", "headers", "said"),
    [
        (200, b'{"usage": ' + b"1" * 5000 + b"}", {}, "asked 2 times (its answer is not JSON)"),
        (200, b"[" * 100_000, {}, "asked 2 times (its answer is not JSON)"),
        (200, b"\xff{}", {"Content_Type": "application/json; charset=undefined"}, "asked 2 times (its answer is not"),
        (200, b"abc", {"Content_Encoding": "gzip"}, "asked 2 times (DecodeError)"),
        (200, b"[]", {"Content_Length": "50"}, "asked 2 times (ProtocolError)"),
        (400, b'{"x": ' + b"1" * 5000 + b"}", {}, "status 400 ("),
        (400, b"oops", {"Content_Type": "text/plain; charset=idna"}, "status 400 (oops)"),
        (400, b'{"error":' * 900 + b"1" + b"}" * 900, {}, "status 400 ("),
        (429, b'{"error":' * 100_000, {"Retry_After": "nan"}, "asked 2 times (status 429: "),
    ],
)
def test_an_answer_of_any_kind_is_said(status: int, body: bytes, headers: dict[str, str], said: str) -> None:
    with pytest.raises(TsaeError) as error:
        asked(lambda odd: odd.send(status, body, **headers))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "headers", [{}, {"Content_Type": "application/json"}, {"Content_Type": "application/json; charset=x"}]
)
def test_an_answer_is_read_as_it_is_encoded(headers: dict[str, str]) -> None:
    assert asked(lambda odd: odd.send(200, '{"a": "é"}'.encode(), **headers)) == {"a": "é"}
    packed = gzip.compress(b'{"a": [' + b"1, " * 100_000 + b"1]}")
    assert len(asked(lambda odd: odd.send(200, packed, Content_Encoding="gzip", **headers))["a"]) == 100_001


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def trickle(odd: _Handler) -> None:
        odd.send(200, b"", Content_Length="400")
        for _ in range(400):
            odd.wfile.write(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    refused(r"asked 2 times \(ReadTimeout\)", asked, trickle, timeout=0.3)
    assert time.monotonic() - began < 15
    monkeypatch.setattr(endpoint, "_MOST", 1 << 20)
    bomb = gzip.compress(b" " * (20 << 20))
    tracemalloc.start()
    refused(r"an answer of more than 1,048,576 bytes", asked, lambda odd: odd.send(200, bomb, Content_Encoding="gzip"))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http://[::1", "http://localhost:99999/v1", "http://localhost:abc", "http://joe:se/cretpw@h",
        "http://a..b/v1", f"http://{'a' * 70}.com/v1", "http://\u2603:1", "http:// x y/", "http://u:p\udc80@127.0.0.1:1/",
        "http://h/v1?code=s3cretpw", "http://h/v1#s3cretpw",
    ],
)  # fmt: skip
def test_what_is_no_address_is_not_asked_again(url: str) -> None:
    with pytest.raises(TsaeError, match=r"is not an address|has a query") as said:
        Endpoint(EndpointConfig(url=url, retries=6, first_wait=60.0))
    assert "cretpw" not in str(said.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://localhost:99999/v1", "http://localhost:abc"])
def test_an_address_that_cannot_be_parsed_is_refused_before_all_work(url: str) -> None:
    refused("is not an address alone", EndpointConfig, url=url)


@pytest.mark.parametrize("key", ["schlüssel-…-abcdef", "k\udc80abcdefgh", "abcd\nefgh"])
def test_a_key_that_cannot_be_sent_is_said_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TSAE_SERVER_KEY", key)
    with pytest.raises(TsaeError, match=r"^\$TSAE_SERVER_KEY: holds characters that cannot be sent") as said:
        Endpoint(EndpointConfig(url="http://127.0.0.1:1/v1", model="m"))
    assert "abc" not in str(said.value)


@pytest.mark.parametrize("length", [150, 190, 199])
@pytest.mark.parametrize("plain", [False, True])
def test_a_key_is_not_shown_in_part(length: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "supersecretkey-ABCDEFGHIJKLMNOP"
    monkeypatch.setenv("TSAE_SERVER_KEY", f"{key}\n")
    text = "x" * length + key
    body = text.encode() if plain else json.dumps({"error": {"message": text}}).encode()
    with pytest.raises(TsaeError, match=r"status 401 \(x+") as said:
        asked(lambda odd: odd.send(401, body))
    assert "su" not in str(said.value).replace("refuses", "").replace("completion", "")


# --- whose responses they are


MANY = [Problem(f"q{i}", f"{i % 10}*{i // 10}+3?", "1") for i in range(8)]
LONG = SamplingConfig(n_samples=4, max_new_tokens=40, batch_size=64)


@pytest.mark.slow(ci=True)
def test_responses_of_another_policy_are_refused(llama: Path, tmp_path: Path, served: Served) -> None:
    other = Checkpoint("other", str(save_perturbed(llama, tmp_path / "other", amount=0.4)))
    with pytest.raises(TsaeError, match=r"its responses are not samples of this checkpoint: .* nats likelier"):
        sample(other, MANY, LONG, server=replace(served.config, check=64), progress=False)
    sample(other, MANY[:1], LONG, server=replace(served.config, check=0), progress=False)


@pytest.mark.slow
def test_a_server_that_samples_its_own_way_is_seen(policy: Checkpoint, served: Served) -> None:
    """It leaves out unlikely tokens, as vLLM does where generation_config.json says so."""
    served.top_k = 8
    with pytest.raises(TsaeError, match=r"its responses are not samples of this checkpoint.*\+0\.\d+ nats likelier"):
        sample(policy, MANY, LONG, server=replace(served.config, check=64), progress=False)


def test_other_log_probabilities_are_seen(policy: Checkpoint, served: Served) -> None:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        given = answer["choices"][0]["logprobs"]
        given["token_logprobs"] = [value - 0.3 for value in given["token_logprobs"]]
        return answer

    served.change = change
    with pytest.raises(TsaeError, match=r"its log-probabilities are not this checkpoint's: .*differ by 0\.300 nats"):
        sample(policy, MANY[:3], LONG, server=served.config, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.6, marks=pytest.mark.slow)])
def test_own_samples_agree_and_the_score_is_standard_normal(policy: Checkpoint, temperature: float) -> None:
    """Over repeated samplings, z has about unit variance, and own samples are never refused."""
    model, tokenizer = policy.load_model(), policy.load_tokenizer()
    prompts = [tokenizer(p.prompt)["input_ids"] for p in MANY]
    scores = []
    for seed in range(25):
        config = SamplingConfig(n_samples=1, max_new_tokens=20, temperature=temperature, seed=seed)
        rollouts = sample(policy, MANY, config, progress=False)
        responses = [Response(tuple(ids), "stop") for ids in rollouts.table["response_ids"].to_pylist()]
        found = agreement(model, prompts, responses, temperature)
        found.check("here")
        scores.append(found.z)
    assert abs(sum(scores) / 25) < 4 / math.sqrt(25)
    assert 0.4 < sum(z * z for z in scores) / 25 < 2.2


def test_agreement_by_hand(policy: Checkpoint) -> None:
    """One token: log p + H over its standard deviation."""
    model = policy.load_model()
    with torch.no_grad():
        p = model(torch.tensor([[BOS, 4]])).logits[0, -1].double().softmax(-1)
    mean, square = float((p * p.log()).sum()), float((p * p.log() ** 2).sum())
    expected = (float(p[7].log()) - mean) / math.sqrt(square - mean**2)
    found = agreement(model, [[BOS, 4]], [Response((7,), "length", (float(p[7].log()) - 0.25,))], 1.0)
    assert found.z == pytest.approx(expected, abs=1e-4)
    assert found.excess == pytest.approx(float(p[7].log()) - mean, abs=1e-5)
    assert found.difference == pytest.approx(0.25, abs=1e-5)
    assert (found.n_tokens, found.n_responses) == (1, 1)


# --- the command, and a real server


def test_the_command(llama: Path, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_problems(PROBLEMS, tmp_path / "problems.jsonl")
    words = ["rollouts", "sample", "--series", llama, "--problems", tmp_path / "problems.jsonl"]
    words += ["--to", tmp_path / "r.parquet", "--n-samples", 3, "--max-new-tokens", 8, "--batch-size", 4]
    there = ["--server.url", served.config.url, "--server.first-wait", 0.01]
    main([str(word) for word in [*words, *there, "--part", "1/2"]])
    assert "other parts have 2 batches still to sample" in capsys.readouterr().out
    assert not (tmp_path / "r.parquet").exists()
    main([str(word) for word in [*words, *there]])
    assert (tmp_path / "r.parquet").is_file()
    assert not (tmp_path / "r.parquet.pieces").exists()
    with pytest.raises(SystemExit):
        main([str(word) for word in [*words, "--server.model", "tiny"]])
    assert "tsae: --server.url: is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_server(tmp_path: Path) -> None:
    """`transformers serve` takes text alone and gives text alone: what was sampled can be told from its length."""
    port, policy = free_port(), Checkpoint("base", str(testbed.series_path() / "base"))
    command = [Path(sys.executable).with_name("transformers"), "serve", policy.path]
    problems = testbed.generate_problems("medium", 16, 0)
    config = SamplingConfig(n_samples=4, max_new_tokens=80, batch_size=64)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(
        [*command, "--device", "cpu", "--port", str(port)], stdout=log, stderr=log
    ) as process:  # fmt: skip
        try:
            server = ServerConfig(url=f"http://localhost:{port}/v1", model=policy.path, retries=60, first_wait=0.5)
            time.sleep(1)
            server = replace(server, check=64, concurrency=4)
            verify = find_verifier("last_number")
            found = sample(policy, problems, config, server=server, verify=verify, progress=False)
        finally:
            process.terminate()
    assert found.info["served"]["ids"] == "of the text"
    assert found.info["served"]["other_lengths"] == 0
    tokenizer = policy.load_tokenizer()
    for record in found.table.to_pylist():
        assert record["prompt_ids"] == tokenizer(record["prompt"])["input_ids"]
        assert record["finish_reason"] == ("stop" if record["response_ids"][-1] == EOS else "length")
    here = sample(policy, problems, replace(config, n_samples=16), verify=verify, progress=False)
    rates = [table.frame.reward.mean() for table in (found, here)]
    assert abs(rates[0] - rates[1]) < 4 * math.sqrt(0.25 / 64 + 0.25 / 256)


def test_a_verifier_with_other_arguments_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_checks.py").write_text(
        "def one(response): return True\n\ndef two(response, answer, strict=False): return True\n\nlength = len\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("one", "length"):
        refused(rf"'my_checks:{name}' cannot be called with 2 arguments", find_verifier, f"my_checks:{name}")
    assert find_verifier("my_checks:two")("4", "4")
