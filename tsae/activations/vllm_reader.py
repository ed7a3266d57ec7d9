"""Hidden states that a vLLM server writes (experimental): an alternative to forward passes on this machine.

A server that was started with the method ``extract_hidden_states`` and the connector ``ExampleHiddenStatesConnector``
writes one file a request. For every trajectory:

1. Its token ids go out as a prompt, for one new token. The answer names the file (``hidden_states_path``).
2. The server holds a lock (PATH.lock) until the file is whole. It is read then: ``token_ids`` (n_tokens,) and
   ``hidden_states`` (n_tokens, n_layers, d_model). Both are deleted.
3. Ids and lengths must be those of the trajectory, and all values finite. No token may be without states.
4. Layers stand in ascending order, whatever the order in the server's settings: states are collected while the model
   runs. Id i is what enters block i, which is what leaves block i - 1; 0 are the embeddings.

Before the first trajectory the server is asked which version it is, and in vLLM's development mode which model runner
it uses (`check_version`): runner V2 gives states since 0.28 only, and is the default since 0.25.1.

Engines have given shortened states (vLLM issue 44485: cached prefixes) and other requests' states (speculators issue
279: batches), and the rest looks right then. So every request has a cache of its own (``cache_salt``), and the
checkpoint itself reads a sample of every shard again (`Sample`).

All this is from vLLM's source and documentation. It has not yet been run against vLLM itself.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tsae.activations.config import StatesConfig
from tsae.activations.forward_batches import Batch, Misread, OutOfMemory, read_batches
from tsae.base.files import writing
from tsae.checkpoints.hooks import HuggingFaceReader, decoder_blocks
from tsae.checkpoints.sites import Site
from tsae.errors import TsaeError, refuse
from tsae.rollouts.inference_server import Endpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V1 = "VLLM_USE_V2_MODEL_RUNNER=0"
"""What makes a server use its model runner V1."""
START = (
    'vllm serve CHECKPOINT --no-enable-prefix-caching --no-enable-chunked-prefill --speculative-config \'{"method": '
    '"extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": '
    '{"eagle_aux_hidden_state_layer_ids": [15]}}}\' --kv-transfer-config \'{"kv_connector": '
    '"ExampleHiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": '
    f'"/dev/shm/states"}}}}\' (vLLM 0.25.1 to 0.27 with {V1} in front)'
)
"""How a server is started whose layer 15, what leaves block 14, is captured."""
_FIRST, _V2_ABLE = (0, 18), (0, 28)
"""Versions of vLLM that give hidden states at all, and with model runner V2."""
_MEDIAN, _FAR, _RARE = 16, 48, 0.001
"""The median token's state may be so many units of the coarser precision away from the checkpoint's own, and further
than the second number only a thousandth of the sample's tokens. The unit is at least that of TF32, with which GPUs may
multiply float32.

In SmolLM2-135M (6 layers; 24 texts, 4,900 tokens), bfloat16 moves the median token of a text by up to 5.2 units from
float32's, and by 2.7 from another attention's in bfloat16; any token by 28. The next block's states are 27 units away,
and another token's 92. Deeper models have layers that are nearer to each other, so states must also be nearer to their
own."""
_FINEST = 2.0**-10


class StatesReader:
    """Reads residual streams through a vLLM server.

    Args:
        server: where it is, and what it was started with.
        model: the checkpoint's, which reads the sample.
        sites: TransformerLens names.
        dtype: stored precision.

    Raises:
        TsaeError: where the server does not answer, does not give these sites' layers, or the folder is not there.
    """

    def __init__(self, server: StatesConfig, model: PreTrainedModel, sites: Sequence[str], dtype: torch.dtype) -> None:
        assert server.folder is not None
        self.server, self.dtype = server, dtype
        self.folder = server.folder.resolve()
        refuse(server.folder, (not self.folder.is_dir(), "is not a folder", "Give the server's shared_storage_path."))
        self.ids = {site: (found := Site.parse(site)).layer + (found.point == "post") for site in sites}
        self.layers = sorted(set(server.layers or self.ids.values()))
        missing = next((site for site, id in self.ids.items() if id not in self.layers), None)
        if missing is not None:
            given = ", ".join(map(str, self.layers))
            what = f"{missing} is layer {self.ids[missing]} of vLLM, and the server gives {given}"
            fix = "Start it with that id among its eagle_aux_hidden_state_layer_ids, or choose other sites."
            raise TsaeError(what, where="StatesConfig.layers", fix=fix)
        self.columns = {site: self.layers.index(id) for site, id in self.ids.items()}
        self.d_model = model.config.get_text_config().hidden_size
        depth = len(decoder_blocks(model))
        around = {id + step for id in self.ids.values() for step in (-1, 0, 1)}
        self.own = HuggingFaceReader(model, [_site_of(id) for id in sorted(around) if 0 <= id <= depth])
        self.endpoint = Endpoint(server)
        check_version(self.endpoint)

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `HuggingFaceReader.read`: for every site (B, T, d_model), on the CPU.

        Raises:
            Misread: where the states of a trajectory are not what they should be.
            TsaeError: where the server refuses, does not write states, or fails too often.
        """
        texts = [ids[real].tolist() for ids, real in zip(input_ids.cpu(), attention_mask.cpu().bool(), strict=True)]
        with ThreadPoolExecutor(min(self.server.concurrency, len(texts))) as pool:
            running = [pool.submit(self._states, number, text) for number, text in enumerate(texts)]
            try:
                found = [future.result() for future in running]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for number, states in enumerate(found):
            if states.dtype != found[0].dtype:
                self.refuse(number, f"are {_precision(states)}, and another trajectory's {_precision(found[0])}")
        values = {}
        for site, column in self.columns.items():
            padded = torch.zeros((*attention_mask.shape, found[0].shape[-1]), dtype=found[0].dtype)
            for number, (states, mask) in enumerate(zip(found, attention_mask.cpu().bool(), strict=True)):
                padded[number, mask] = states[:, column]
            values[site] = padded
        return values

    def _states(self, text: int, ids: list[int]) -> torch.Tensor:
        """(n_tokens, n_layers, d_model) of one trajectory."""
        # Cached states of another request's prefix would not be written.
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "n": 1, "cache_salt": secrets.token_urlsafe(32)}
        status, answer = self.endpoint.complete(body)
        if status != 200:
            raise self.endpoint.refusal(status, answer)
        path = self._path(answer)
        found = self._when_written(text, path)
        # Also when they are refused next, or the folder fills up.
        for file in (path, _lock_of(path)):
            with writing(file, "Let the server write as the user who reads, or the folder fills up."):
                file.unlink(missing_ok=True)
        return self._checked(text, ids, found)

    def _path(self, answer: Any) -> Path:
        """Where the states are. The server's word is not enough to read, and delete, a file somewhere else."""
        try:
            path = Path(answer["kv_transfer_params"]["hidden_states_path"]).resolve()
        # No file, no path, or a link that leads to itself.
        except (KeyError, TypeError, OSError, ValueError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(self.folder):
            what = f"names no file of hidden states in {self.folder}, but {path}"
            fix = f"Give its shared_storage_path as --server.folder, the same on both sides. Start it as: {START}"
            raise TsaeError(what, where=self.endpoint.url, fix=fix)
        return path

    def _when_written(self, text: int, path: Path) -> dict[str, torch.Tensor]:
        """What the file holds, once the server has let go of its lock, or, without one, once it is whole."""
        # As long as a request would be tried again.
        patience = time.monotonic() + self.server.first_wait * 2 ** min(self.server.retries, 30)
        wait = 0.002
        while True:
            try:
                return _unlocked(path, lambda: load(path.read_bytes()))
            except (OSError, SafetensorError) as error:
                why = "is still being written" if isinstance(error, BlockingIOError) else str(error) or "is missing"
                if time.monotonic() > patience:
                    raise Misread(
                        text,
                        f"the server named {path.name} for its states, which cannot be read ({why})",
                        str(self.folder),
                        "Look after the server and its disk, and give the same command again.",
                    ) from error
            time.sleep(wait)
            wait = min(2 * wait, self.server.first_wait)

    def _checked(self, text: int, ids: list[int], found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if missing := {"hidden_states", "token_ids"} - found.keys():
            self.refuse(text, f"lack {' and '.join(sorted(missing))}; the file holds {', '.join(sorted(found))}")
        states = found["hidden_states"]
        read, shape, precision = found["token_ids"].flatten().tolist(), tuple(states.shape), _precision(states)
        fix = (
            "Start the server with --no-enable-prefix-caching and --no-enable-chunked-prefill, and give its "
            "eagle_aux_hidden_state_layer_ids as --server.layers."
        )
        if read != ids:
            self.refuse(text, f"are of other token ids: {len(read)}, expected the trajectory's {len(ids)}")
        if shape != (expected := (len(ids), len(self.layers), self.d_model)):
            self.refuse(text, f"have the shape {shape}, expected {expected} (tokens, layers, d_model)", fix)
        if not states.is_floating_point() or torch.finfo(states.dtype).eps > torch.finfo(self.dtype).eps:
            fix = f"Store what the server computes (--dtype {precision}), or start it with a finer --dtype."
            self.refuse(text, f"are {precision}, and the store is {str(self.dtype).removeprefix('torch.')}", fix)
        # Layer 0 are embeddings, which a model may have zeros among.
        empty = (states[:, [i for i, layer in enumerate(self.layers) if layer > 0]] == 0).all(-1).any(-1)
        if bad := (empty | ~states.isfinite().all(-1).all(-1)).nonzero().flatten().tolist():
            self.refuse(text, f"are all zero, or not finite, on token {bad[0]}")
        return states

    def refuse(
        self, text: int, what: str, fix: str = "Look after the server; restart it, or use another version."
    ) -> NoReturn:
        """Say what is wrong with the states of a text."""
        raise Misread(text, f"the server's states {what}", self.endpoint.url, fix)


def check_version(endpoint: Endpoint) -> None:
    """Refuse a vLLM that gives no hidden states; pass one that does not say which it is.

    Raises:
        TsaeError: for a version before 0.18, and for model runner V2 before 0.28.
    """
    told = str(endpoint.about("version").get("version", ""))[:40]
    found = re.match(r"(\d+)\.(\d+)", told)
    if found is None:
        return
    version = int(found[1]), int(found[2])
    what = f"is vLLM {told}, and vLLM gives hidden states since 0.18"
    refuse(endpoint.url, (version < _FIRST, what, "Update vLLM, or use --backend huggingface."))
    if version < _V2_ABLE:
        runner = (endpoint.about("server_info?config_format=json").get("vllm_env") or {}).get(
            "VLLM_USE_V2_MODEL_RUNNER"
        )
        what = f"is vLLM {told} with model runner V2, which gives hidden states since 0.28"
        refuse(endpoint.url, (runner in (True, 1, "1"), what, f"Start it with {V1} in its environment."))


class Sample:
    """Trajectories of a shard that the checkpoint reads again; the same ones whenever the shard is captured.

    Args:
        reader: what the server gives.
        texts: token ids of all of the shard's trajectories.
        name: of the shard.
    """

    def __init__(self, reader: StatesReader, texts: Sequence[np.ndarray], name: str) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        n = min(len(texts), reader.server.check)
        self.reader, self.texts = reader, texts
        self.chosen = frozenset(np.random.default_rng(seed).choice(len(texts), n, replace=False).tolist())
        """Their positions among the texts."""
        self.largest = 0.0
        """The largest distance of a token's state from the checkpoint's own so far, as a share of the latter's norm."""
        self._rare = int(_RARE * sum(len(texts[t]) for t in self.chosen) * len(reader.columns))

    def compare(self, batch: Batch) -> None:
        """Compare what the server gave for a batch with the checkpoint's own forward pass.

        Raises:
            Misread: where the difference is more than rounding.
            OutOfMemory: where the checkpoint cannot read a trajectory.
        """
        start = 0
        for t, length in zip(batch.texts.tolist(), batch.lengths, strict=True):
            if t in self.chosen:
                try:
                    (own,) = read_batches(self.reader.own, [self.texts[t]], length)
                except OutOfMemory as error:
                    raise OutOfMemory(np.array([t])) from error
                for site in self.reader.columns:
                    self._compare(t, site, batch.values[site][start : start + length], own.values)
            start += length

    def _compare(self, text: int, site: str, theirs: torch.Tensor, own: Mapping[str, torch.Tensor]) -> None:
        id, refuse = self.reader.ids[site], self.reader.refuse
        ours = own[_site_of(id)]
        far = _far(theirs, ours)
        unit = max(torch.finfo(theirs.dtype).eps, torch.finfo(ours.dtype).eps, _FINEST)
        median, largest = float(far.median()), float(far.max())
        # Of the layers beside it, one that states are nearer to.
        others = {o: own[_site_of(o)] for o in (id - 1, id + 1) if _site_of(o) in own}
        least = min(median, _MEDIAN * unit)
        nearer = next((o for o, values in others.items() if float(_far(theirs, values).median()) < least), None)
        if nearer is not None:
            refuse(
                text,
                f"at {site} are those of layer {nearer}, expected {id}",
                "Give the server's eagle_aux_hidden_state_layer_ids as --server.layers, or start it with others.",
            )
        self.largest = max(self.largest, largest)
        self._rare -= int((far > _FAR * unit).sum())
        if median > _MEDIAN * unit or self._rare < 0:
            refuse(
                text,
                f"at {site} are {median:.2g} of their norm away from the checkpoint's own on the median token, and "
                f"{largest:.2g} on token {int(far.argmax())}; rounding makes at most {_MEDIAN * unit:.2g}, and on one "
                f"token in a thousand more than {_FAR * unit:.2g}",
                "See that the server has this checkpoint's weights and layers, and neither cached prefixes nor chunked "
                "prefill. Try --server.concurrency 1. If that helps, the server mixes up requests; use another version "
                "of vLLM, or --backend huggingface.",
            )


def _site_of(id: int) -> str:
    """Where vLLM's layer is."""
    return f"blocks.{id - 1}.hook_resid_post" if id else "blocks.0.hook_resid_pre"


def _far(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """(n_tokens,) distance of each token's state from ours, as a share of the norm of ours."""
    ours = ours.cpu().float()
    return (theirs.float() - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-30)


def _precision(states: torch.Tensor) -> str:
    return str(states.dtype).removeprefix("torch.")


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _unlocked(path: Path, read: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read while nobody writes.

    Raises:
        BlockingIOError: where the server still holds the lock.
    """
    import fcntl  # vLLM runs on Linux alone, tsae elsewhere too.

    try:
        file = _lock_of(path).open("rb")
    except FileNotFoundError:  # Older servers have none, or write before they answer.
        return read()
    with file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return read()
