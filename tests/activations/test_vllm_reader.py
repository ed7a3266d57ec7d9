"""Hidden states from a server: what a store then holds, and every way in which such a server can be wrong.

The server speaks vLLM's dialect, and writes files as its ExampleHiddenStatesConnector does: under a lock, after the
answer, layers in ascending order. It computes with the real tiny model, and takes states from what transformers returns
as `hidden_states`, not from our hooks.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from support.builders import N_LAYERS, make_rollouts
from support.children import free_port
from support.refusals import refuses
from support.stores import contents
from tsae.activations.capture import capture, capture_part
from tsae.activations.config import CaptureConfig, StatesConfig
from tsae.activations.forward_batches import Batch, Misread
from tsae.activations.manifest import check_store
from tsae.activations.store import ActivationStore
from tsae.activations.vllm_reader import Sample, StatesReader
from tsae.base.part import Part
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

pytestmark = pytest.mark.slow(ci=True)

SITE = "blocks.1.hook_resid_post"
CONFIG = CaptureConfig(backend="vllm", shard_tokens=150, batch_tokens=128)
Files = dict[str, torch.Tensor]


class Engine(ThreadingHTTPServer):
    """A model behind vLLM's completions; `change` spoils what is written, `spoil` whole requests."""

    daemon_threads = True

    def __init__(self, checkpoint: Path, folder: Path, layers: tuple[int, ...] = (2,)) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = Checkpoint("served", str(checkpoint)).load_model()
        self.folder, self.layers = folder, layers
        self.bodies, self.pages = list[dict[str, Any]](), dict[str, Any]()
        self.change: Callable[[Files], Files] = lambda files: files
        self.name: Callable[[Path], object] = str
        self.content: Callable[[bytes], bytes] = lambda content: content
        self.locks, self.writes, self.delay, self.status = True, True, 0.005, 200
        self.one = threading.Lock()

    def config(self, **options: Any) -> StatesConfig:
        url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        return StatesConfig(**{"url": url, "folder": self.folder, "first_wait": 0.01, "retries": 4, **options})

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        """(n_tokens, n_layers, d_model). The last block is hooked, for transformers gives its output after the norm."""
        last: list[torch.Tensor] = []
        handle = self.model.model.layers[-1].register_forward_hook(lambda _, __, out: last.append(out))
        found = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        handle.remove()
        return torch.stack([(last[-1] if id == N_LAYERS else found[id])[0] for id in sorted(self.layers)], 1)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.one:
            self.bodies.append(body)
            files = {"hidden_states": self.states(body["prompt"]), "token_ids": torch.tensor(body["prompt"])}
            path = self.folder / f"cmpl-{len(self.bodies)}.safetensors"
        content = self.content(save({name: value.contiguous() for name, value in self.change(files).items()}))
        lock = path.with_name(f"{path.name}.lock").open("wb") if self.locks else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.delay)
            if self.writes:
                path.write_bytes(content)
            if lock is not None:
                lock.close()

        threading.Thread(target=write, daemon=True).start()
        named = self.name(path)
        return {"choices": [{"text": "x"}], "kv_transfer_params": named and {"hidden_states_path": named}}


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        pages = {"/v1/models": {"data": [{"id": "tiny"}]}, **self.server.pages}
        self._answer(200, pages[self.path]) if self.path in pages else self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            return self._answer(200, self.server.complete(body))
        return self._answer(self.server.status, {"error": {"message": "the context is full"}})

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def one(checkpoint: Path, layers: tuple[int, ...] = (2,)) -> Engine:
        folder = tmp_path / f"states-{len(engines)}"
        folder.mkdir()
        engines.append(Engine(checkpoint, folder, layers))
        threading.Thread(target=engines[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return engines[-1]

    yield one
    for engine in engines:
        engine.shutdown()
        engine.server_close()


@pytest.fixture
def engine(start: Callable[..., Engine], series_folder: Path) -> Engine:
    return start(series_folder / "base")


@pytest.fixture
def base(series: CheckpointSeries) -> CheckpointSeries:
    return series.select([])


@pytest.fixture
def texts(fingerprint: str) -> Rollouts:
    return make_rollouts(tokenizer=fingerprint)


Take = Callable[..., ActivationStore]


@pytest.fixture
def take(engine: Engine, base: CheckpointSeries, texts: Rollouts, tmp_path: Path) -> Take:
    """Captures what the engine computes; other words are the server's."""

    def taken(config: CaptureConfig = CONFIG, server: StatesConfig | None = None, **options: Any) -> ActivationStore:
        server = server or engine.config(**options)
        return capture(base, texts, [SITE], to=tmp_path / "acts", config=config, server=server, progress=False)

    return taken


def values(store: ActivationStore, site: str, reader: str = "base") -> dict[int, np.ndarray]:
    found = {}
    for shard in store.shards(reader):
        for i, row in enumerate(shard.trajectory.tolist()):
            found[row] = shard.read(site, slice(int(shard.offsets[i]), int(shard.offsets[i + 1])))
    return found


def test_the_store_is_that_of_our_own_forward_passes(
    start: Callable[..., Engine], series_folder: Path, base: CheckpointSeries, texts: Rollouts, tmp_path: Path
) -> None:
    sites = [SITE, "blocks.0.hook_resid_pre", "blocks.2.hook_resid_post", "blocks.1.hook_resid_pre"]
    engine = start(series_folder / "base", layers=(3, 0, 2, 1))  # given in any order, written in ascending order
    found = capture(base, texts, sites, to=tmp_path / "a", config=CONFIG, server=engine.config(), progress=False)
    plain = replace(CONFIG, backend="huggingface")
    wanted = capture(base, texts, sites, to=tmp_path / "b", config=plain, progress=False)
    for site in sites:
        theirs, ours = values(found, site), values(wanted, site)
        assert theirs.keys() == ours.keys() == set(range(len(texts)))
        assert all(np.allclose(theirs[row], ours[row], atol=1e-5) for row in ours)
    manifest = {**found.manifest, "readers": [], "config": []}
    assert manifest == {**wanted.manifest, "readers": [], "config": []}
    assert found.manifest["config"]["backend"] == "vllm"
    assert len(engine.bodies) == len(texts)
    assert all(body["max_tokens"] == 1 for body in engine.bodies)
    assert len({body["cache_salt"] for body in engine.bodies}) == len(texts)  # no request finds another's prefix
    assert not list(engine.folder.iterdir())
    assert "127.0.0.1" not in (tmp_path / "a" / "manifest.json").read_text()


def test_parts_give_the_bytes_of_one_and_an_interrupted_capture_goes_on(
    take: Take, engine: Engine, base: CheckpointSeries, texts: Rollouts, tmp_path: Path
) -> None:
    whole = take()
    n = len(whole.manifest["readers"][0]["shards"])
    assert n == 3
    engine.status = 400
    part: Any = {"to": tmp_path / "b", "config": CONFIG, "server": engine.config(), "progress": False}
    with pytest.raises(TsaeError, match=r"refuses a completion with status 400 \(the context is full\)"):
        capture_part(base, texts, [SITE], part=Part(0, 3), **part)
    engine.status, engine.bodies = 200, []
    left = [len(capture_part(base, texts, [SITE], part=Part(i, 3), **part)) for i in (2, 0, 0, 1)]
    assert left[0] > left[1] == left[2] > left[3] == 0
    assert len(engine.bodies) == len(texts)  # nothing was read twice
    assert contents(whole.path, "*.h5") == contents(tmp_path / "b", "*.h5")


@pytest.mark.slow
def test_each_reader_has_a_server_of_its_own(
    start: Callable[..., Engine],
    series_folder: Path,
    series: CheckpointSeries,
    texts: Rollouts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = start(series_folder / "base"), start(series_folder / "easy-10")
    texts.write(tmp_path / "rollouts.parquet")

    def command(engine: Engine, *more: object) -> None:
        words = ["capture", "--series", series_folder, "--rollouts", tmp_path / "rollouts.parquet", "--sites", SITE]
        words += ["--to", tmp_path / "acts", "--backend", "vllm", "--shard-tokens", 150, "--server.first-wait", 0.01]
        words += ["--server.url", engine.config().url, "--server.folder", engine.folder, *more]
        main([str(word) for word in words])

    for words in ((), ("--server.reader", "easy-11")):
        with pytest.raises(SystemExit):
            command(one, *words)
    said = capsys.readouterr().err
    assert "a server serves one checkpoint, and here are base, easy-10. Name it (--server.reader)" in said
    assert "no checkpoint 'easy-11'; there are base, easy-10" in said
    with pytest.raises(SystemExit):
        command(one, "--server.reader", "easy-10")
    assert "away from the checkpoint's own on the median token" in capsys.readouterr().err
    command(other, "--server.reader", "easy-10")
    assert "this is done; other parts have" in capsys.readouterr().out
    command(one, "--server.reader", "base")
    assert "wrote" in capsys.readouterr().out
    wanted = capture(
        series, texts, [SITE], to=tmp_path / "b", config=replace(CONFIG, backend="huggingface"), progress=False
    )
    for reader in ("base", "easy-10"):
        ours = values(wanted, SITE, reader)
        theirs = values(ActivationStore(tmp_path / "acts"), SITE, reader)
        assert all(np.allclose(theirs[row], ours[row], atol=1e-5) for row in ours)
    alone = {"to": tmp_path / "c", "config": CONFIG, "server": one.config(reader="base"), "progress": False}
    with pytest.raises(TsaeError, match=r"other readers have \d+ shards still to record, such as easy-10/00000\.h5"):
        capture(series, texts, [SITE], **alone)


# --- servers that are wrong


def states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Files], Files]:
    return lambda files: {**files, "hidden_states": change(files["hidden_states"])}


def at(token: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[token] = value
        return states

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            states(lambda x: x[2:]),
            r"states have the shape .*, expected .* while reader base reads trajectory \d+ \(problem p\d+\)",
        ),
        (lambda f: {k: v[:-1] for k, v in f.items()}, r"are of other token ids: \d+, expected the trajectory's \d+"),
        (lambda f: {**f, "token_ids": f["token_ids"].flip(0)}, "are of other token ids"),
        (lambda f: {"hidden_states": f["hidden_states"]}, "lack token_ids; the file holds hidden_states"),
        (states(lambda x: x.repeat(1, 2, 1)), r"have the shape \(18, 2, 16\), expected \(18, 1, 16\).*--server.layers"),
        (states(lambda x: x[:, 0]), r"have the shape \(\d+, 16\), expected .*\(tokens, layers, d_model\)"),
        (states(lambda x: x[..., :8]), r"have the shape \(\d+, 1, 8\), expected \(\d+, 1, 16\)"),
        (states(at(1, torch.nan)), "not finite, on token 1"),
        (states(at(1, 0.0)), "are all zero, or not finite, on token 1 "),
        (states(lambda x: x.bfloat16()), r"are bfloat16, and the store is float32 .*--dtype bfloat16"),
        (states(lambda x: x.int()), "are int32, and the store is float32"),
        (states(lambda x: x.flip(0)), f"at {SITE} are .* away from the checkpoint's own on the median token"),
        (states(lambda x: torch.cat([x[:-1], x[:1]])), r"and \d\.\d+ on token \d+; rounding makes at most"),
        (states(lambda x: x + 0.02 * x.norm() * torch.randn(x.shape)), "away from the checkpoint's own"),
    ],
)
def test_states_that_are_not_the_checkpoints_are_refused(
    change: Any, what: str, engine: Engine, take: Take, tmp_path: Path
) -> None:
    engine.change = change
    refuses(what, take)
    assert not (tmp_path / "acts").exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x.double(), "are float64, and another trajectory's float32"),
        (lambda x: x[..., :8], r"have the shape \(\d+, 1, 8\), expected \(\d+, 1, 16\)"),
    ],
)
def test_answers_that_differ_from_each_other_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], what: str, engine: Engine
) -> None:
    engine.change = lambda f: f if len(engine.bodies) == 1 else states(change)(f)
    reader = StatesReader(engine.config(concurrency=1, retries=1000), engine.model, [SITE], torch.float32)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(Misread, match=what) as refused:
        reader.read(ids, torch.ones_like(ids))
    assert refused.value.text == 1


def test_other_requests_states_are_refused(engine: Engine, take: Take) -> None:
    """Of one request in ten, the batch had those of its neighbour, cut or repeated to the same length."""
    before = list[torch.Tensor]()

    def exchange(files: Files) -> Files:
        mine = files["hidden_states"]
        before.append(mine)
        if len(before) % 10:
            return files
        theirs = before[-2]
        return {**files, "hidden_states": theirs.repeat(len(mine), 1, 1)[: len(mine)]}

    engine.change = exchange
    refuses(f"the server's states at {SITE} are .*Try --server.concurrency 1", take, check=1000)


def test_chunks_that_forget_what_came_before_are_refused(engine: Engine, take: Take) -> None:
    def halves(files: Files) -> Files:
        ids = files["token_ids"].tolist()
        middle = len(ids) - 3
        return {**files, "hidden_states": torch.cat([engine.states(ids[:middle]), engine.states(ids[middle:])])}

    engine.change = halves
    refuses("away from the checkpoint's own", take)


@pytest.mark.parametrize("layers", [(1,), (3,)])
def test_another_layer_is_refused(layers: tuple[int, ...], engine: Engine, take: Take) -> None:
    engine.layers = layers
    refuses(rf"at {SITE} are those of layer {layers[0]}, expected 2 .*--server.layers", take)
    refuses(rf"{SITE} is layer 2 of vLLM, and the server gives {layers[0]}", take, layers=layers)


@pytest.mark.parametrize(
    ("version", "runner", "refused"),
    [
        ("0.17.1", None, r"is vLLM 0\.17\.1, and vLLM gives hidden states since 0\.18"),
        ("0.18.0", None, ""),
        ("0.27.1", True, r"0\.27\.1 with model runner V2.*0\.28.*Start it with VLLM_USE_V2_MODEL_RUNNER=0"),
        ("0.27.1", False, ""),
        ("0.27.1", None, ""),  # it does not say which runner it uses
        ("0.33.0", True, ""),
        ("0.29.0rc1.dev3+g1234", True, ""),
        ("dev", None, ""),
    ],
)
def test_the_servers_version_and_runner(
    version: str, runner: bool | None, refused: str, engine: Engine, take: Take
) -> None:
    engine.pages = {"/version": {"version": version}}
    if runner is not None:
        engine.pages["/server_info?config_format=json"] = {"vllm_env": {"VLLM_USE_V2_MODEL_RUNNER": runner}}
    with pytest.raises(TsaeError, match=refused) if refused else nullcontext():
        take()
    assert bool(engine.bodies) == (not refused)


def test_files_that_cannot_be_read_or_are_elsewhere(engine: Engine, take: Take, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"mine")
    (engine.folder / "link.safetensors").symlink_to(secret)

    def refused(what: str, **options: Any) -> None:
        for name, value in options.items():
            setattr(engine, name, value)
        refuses(what, take, retries=2)
        engine.locks, engine.writes, engine.delay = True, True, 0.005
        engine.name, engine.content = str, lambda content: content

    refused(r"which cannot be read \(.*No such file.*\) while reader base reads trajectory \d+", writes=False)
    refused(r"which cannot be read \(.*No such file", writes=False, locks=False)
    refused(r"which cannot be read \(is still being written\)", delay=0.5)
    refused(r"which cannot be read \(.*(not fully covered|IncompleteBuffer)", content=lambda content: content[:-8])
    refused(r"no file of hidden states in .*states-0, but .*secret.*shared_storage_path", name=lambda _: str(secret))
    refused("no file of hidden states in", name=lambda path: f"{path.parent}/../secret.safetensors")
    refused("no file of hidden states in", name=lambda path: str(path.with_name("link.safetensors")))
    refused(r"names no file of hidden states.*Start it as: vllm serve", name=lambda _: None)
    (engine.folder / "loop").symlink_to(engine.folder / "loop")
    for named in (7, f"{engine.folder}/a\0b", f"{engine.folder}/loop"):
        refused("names no file of hidden states", name=lambda _, named=named: named)
    assert secret.read_bytes() == b"mine"


def test_a_server_without_locks_is_waited_for(engine: Engine, take: Take) -> None:
    engine.locks, engine.delay = False, 0.05
    take()
    assert not list(engine.folder.iterdir())


def test_rounding_is_allowed(engine: Engine, take: Take) -> None:
    """The server multiplies in float32 and writes bfloat16; the checkpoint multiplies in bfloat16."""
    engine.change = states(lambda x: x.bfloat16())
    found = take(replace(CONFIG, model_dtype="bfloat16"), check=1000)
    assert found.manifest["dtype"] == "bfloat16"
    for shard in found.manifest["readers"][0]["shards"]:
        assert shard["read_again"]["trajectories"] == shard["n_trajectories"]
        assert 1e-4 < shard["read_again"]["largest_difference"] < 0.1
    reader = StatesReader(engine.config(), engine.model, [SITE], torch.float32)
    ids = [np.arange(5)] * 40
    chosen = Sample(reader, ids, "base/00000.h5").chosen
    assert len(chosen) == 8
    assert chosen == Sample(reader, ids, "base/00000.h5").chosen != Sample(reader, ids, "base/00001.h5").chosen
    assert Sample(reader, ids[:5], "x").chosen == set(range(5))


def test_a_token_in_a_thousand_may_be_far_away(engine: Engine) -> None:
    """Rounding has a long tail. One token of each trajectory has not."""
    reader = StatesReader(engine.config(check=100), engine.model, [SITE], torch.float32)
    texts = [np.arange(100) % 17 for _ in range(20)]
    theirs = engine.states(texts[0].tolist())[:, 0]
    odd = theirs.clone()
    odd[-1] *= 1.5
    sample = Sample(reader, texts, "base/00000.h5")
    assert sample.chosen == set(range(20))
    for t in range(20):
        sample.compare(Batch(np.array([t]), {SITE: odd if t in (3, 9) else theirs}, [100]))
    assert sample.largest == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(Misread, match=r"0\.5 on token 99") as refused:
        sample.compare(Batch(np.array([7, 4]), {SITE: torch.cat([theirs, odd])}, [100, 100]))
    assert refused.value.text == 4


def test_a_damaged_shard_is_computed_again(take: Take) -> None:
    store = take()
    before = values(store, SITE)
    (store.path / "base" / "00001.h5").write_bytes(b"damage")
    assert [damage.file for damage in check_store(store.path)] == ["base/00001.h5"]
    after = values(take(), SITE)
    assert all(np.allclose(after[row], before[row], atol=1e-5) for row in before)


def test_what_a_server_needs(engine: Engine, base: CheckpointSeries, texts: Rollouts, tmp_path: Path) -> None:
    def refused(what: str, config: CaptureConfig = CONFIG, **options: Any) -> None:
        server = engine.config(**options) if options else None
        refuses(what, capture, base, texts, [SITE], to=tmp_path / "acts", config=config, server=server, progress=False)

    refused("needs the address of a vLLM server and the folder")
    refused("needs the address of a vLLM server and the folder", folder=None)
    refused("is not a folder. Give the server's shared_storage_path", folder=tmp_path / "nowhere")
    refused(r"does not answer, asked 1 times", url=f"http://127.0.0.1:{free_port()}/v1", retries=0)
    refused("is given, and the backend is huggingface", replace(CONFIG, backend="huggingface"), check=2)
    refuses('token_statistics=True needs another backend than "vllm"', replace, CONFIG, token_statistics=True)
    for wrong in ({"check": 0}, {"layers": (-1,)}, {"url": "x"}, {"retries": -1}):
        refuses(next(iter(wrong)), StatesConfig, **wrong)
