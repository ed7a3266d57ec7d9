"""Configs of captures and live sources, and the subset of a store. Imports nothing heavy: the CLI builds on it."""

from __future__ import annotations

from typing import Literal

from tsae.base.validation import Count, Daily, Size, UserPath, config
from tsae.errors import TsaeError
from tsae.rollouts.config import EndpointConfig

Partner = Literal["previous", "earlier", "step"]
Axis = Literal["reader", "run", "band", "outcome"]


@config
class Subset:
    """Some of a store's readers and trajectories; an axis that is not given takes everything."""

    readers: tuple[str, ...] = ()
    """Ids of the checkpoints whose activations count; by default all readers."""
    runs: tuple[str, ...] = ()
    """Runs whose checkpoints' activations count; the base is a run of its own, named by its id."""
    bands: tuple[str, ...] = ()
    """Bands of the problems whose trajectories count: easy, medium, hard; by default all, known or not."""
    outcomes: tuple[str, ...] = ()
    """Outcomes of the trajectories that count: success, failure, unknown."""

    def as_dict(self) -> dict[str, tuple[str, ...]]:
        """The axes that are given, their values sorted; for JSON and comparisons."""
        return {axis: tuple(sorted(set(values))) for axis, values in vars(self).items() if values}


@config
class ReadingConfig:
    """How checkpoints read trajectories."""

    plan: Daily[Literal["auto", "paired", "all", "own"]] = "auto"
    """Which reader reads which trajectories. "paired": the base reads all of them, every other reader the base's and
    its own. The two parts of a shift need that. "all": every reader reads all. "own": every reader reads what it
    sampled. Total shifts and dynamics need that. "auto": "paired" where checkpoints of the series sampled the rollouts,
    else "all"."""
    backend: Literal["huggingface", "transformer_lens", "vllm"] = "huggingface"
    """Forward hooks on the Hugging Face model (sdpa attention), or a TransformerBridge (eager, slower). "vllm" is
    experimental, and not yet tried with vLLM itself. A vLLM server then computes hidden states (--server), and the
    checkpoint reads a sample of the trajectories again."""
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward pass; "auto" is that of the checkpoint's file."""
    dtype: Daily[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Stored precision; "auto" is that of the forward pass."""
    batch_tokens: Count = 16_384
    """Tokens of one forward pass, with padding. A shard that does not fit into memory is read with half as many."""
    device: Daily[str] = "cpu"
    """Torch device: cpu, cuda, cuda:1, …; "auto" spreads a model that is too large for one over all GPUs, and the CPU
    (accelerate)."""

    def __post_init__(self) -> None:
        if self.device == "auto" and self.backend == "transformer_lens":
            what = 'device="auto" needs backend="huggingface": a TransformerBridge runs on one device'
            raise TsaeError(what, where=type(self).__name__, fix="Use the Hugging Face backend, or name one device.")


@config
class CaptureConfig(ReadingConfig):
    """How activations are captured."""

    shard_tokens: Count = 500_000
    """Tokens of one shard; an interruption costs at most the shard in progress."""
    steady_shards: bool = False
    """Let shards begin at certain problems, a quarter as large as shard_tokens on average. Then most shards stay what
    they are when trajectories are added or left out, and a later capture can copy them (`tsae watch`)."""
    token_statistics: Daily[bool] = False
    """Also store each token's log-probability and the entropy of its prediction, 8 bytes a token. All layers then run,
    and the head on every token: about twice the time of a capture at the middle layer of a 7B model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "vllm" and self.token_statistics:
            what = 'token_statistics=True needs another backend than "vllm", which gives hidden states alone'
            raise TsaeError(what, where="CaptureConfig", fix="Leave --token-statistics out, or --backend vllm.")


@config
class StatesConfig(EndpointConfig):
    """A vLLM server that writes hidden states into a folder (experimental). It serves one reader of the series."""

    folder: UserPath | None = None
    """The folder into which it writes, its shared_storage_path, as this machine sees it. Files are deleted when they
    have been read."""
    reader: str | None = None
    """Id of the checkpoint that it serves, if the series has several. Give the command again for each other."""
    layers: tuple[Size, ...] = ()
    """Its eagle_aux_hidden_state_layer_ids; by default those of the sites. Id i is what leaves block i - 1; 0 are
    the embeddings."""
    check: Count = 8
    """Trajectories of every shard that the checkpoint reads again, on the device. They must agree up to rounding."""


@config
class LiveConfig(ReadingConfig):
    """How models compute activations while a training runs (`tsae.activations.live`)."""

    backend: Literal["huggingface", "transformer_lens"] = "huggingface"
    """Forward hooks on the Hugging Face model (sdpa attention), or a TransformerBridge (eager, slower)."""
    buffer_tokens: Count = 1_000_000
    """Tokens whose activations are held at once, in main memory. A batch mixes the tokens of one buffer. An epoch
    begins with the tokens that the epoch before held last, and does not compute them again."""
    models: Count | None = None
    """Models held on the device at once; by default all. With fewer, every buffer loads them in turn."""
