"""Are the logged log-probabilities those of the checkpoint that is said to have sampled? A few trajectories are read.

Where a policy is a checkpoint of the series itself and its weights lie on this disk, up to 4 trajectories of the first
such checkpoint and up to 4 of the last go through the model once: at most 128 tokens of a response, in the precision of
the file. What is compared is the mean absolute difference a token, since in a sum the errors of a shifted row cancel.

More than 0.1 nats is a difference. Engines that sample in bfloat16 differ from the trainer's forward pass by about
0.01 to 0.03, weights that are a few updates apart by hardly more: this finds other weights, other prompts, other
templates and shifted tokens, and not a policy that is one update off.

Log-probabilities may be those of the softmax at the sampling temperature. Where temperature 1 does not fit, one
temperature from 0.2 to 1.5 that fits every trajectory is taken for the run's, and named. Where all tokens of a response
have one and the same value, that is a placeholder, and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsae.checkpoints.files import folder_of, is_adapter, is_gguf, is_hub_id, weight_files
from tsae.errors import TsaeError
from tsae.rollouts.logs.ledger import hash64

if TYPE_CHECKING:
    from tsae.checkpoints.checkpoint import Checkpoint

_TRAJECTORIES, _POLICIES = 4, 2
_TOKENS, _PROMPT = 128, 4096
_MOST_BYTES = 2 << 30
"""Weights that an import loads; about a billion parameters in bfloat16."""
_MOST_OFF = 0.1
_TEMPERATURES = (1.0, *(round(0.1 * i, 1) for i in range(2, 16) if i != 10))


class Told(NamedTuple):
    """A trajectory with logged log-probabilities."""

    prompt: np.ndarray
    """(n_prompt,) token ids."""
    response: np.ndarray
    """(n_response,)."""
    logprobs: np.ndarray
    """(n_response,) nats."""
    where: str


class Compared(NamedTuple):
    """What the forward passes gave."""

    compared: int
    differ: int
    first: str | None
    """Where the first stands that differs."""
    note: str
    """How it was compared, or why not."""


class LogProbs:
    """Keeps a few trajectories of every checkpoint, and reads them at the end."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.checkpoints = list(checkpoints)
        self.logged = 0
        self._ids = {checkpoint.id for checkpoint in checkpoints}
        self._kept: dict[str, list[Told]] = {}
        self._placeholders: set[float] = set()
        """Values that all tokens of some response have."""

    def put(self, policy: str, prompt: np.ndarray, response: np.ndarray, logprobs: np.ndarray, where: str) -> None:
        """Take a trajectory that has log-probabilities."""
        self.logged += 1
        if len(logprobs) > 1 and np.ptp(logprobs) == 0:
            self._placeholders.add(float(logprobs[0]))
            return
        if policy not in self._ids or len(prompt) > _PROMPT or len(logprobs) != len(response):
            return
        self._keep(policy, Told(prompt, response[:_TOKENS], logprobs[:_TOKENS], where))

    def state(self) -> dict[str, Any]:
        """What was kept, as JSON has it."""
        kept = {id: [(*(part.tolist() for part in told[:3]), told.where) for told in some]
                for id, some in self._kept.items()}  # fmt: skip
        return {"logged": self.logged, "placeholders": sorted(self._placeholders), "kept": kept}

    def add(self, state: Mapping[str, Any]) -> None:
        """Take in what was kept of the next part of the log."""
        self.logged += state["logged"]
        self._placeholders.update(state["placeholders"])
        for id, some in state["kept"].items():
            for prompt, response, logprobs, where in some:
                self._keep(id, Told(np.array(prompt), np.array(response), np.array(logprobs), where))

    def _keep(self, policy: str, told: Told) -> None:
        """Those of the smallest hashes of their places, so that parts of a log can be drawn from one by one."""
        kept = self._kept.setdefault(policy, [])
        kept.append(told)
        if len(kept) > _TRAJECTORIES:
            del kept[max(range(len(kept)), key=lambda place: hash64(kept[place].where))]

    def compare(self) -> Compared:
        """Read what was kept with the checkpoints' weights."""
        if not self.logged:
            return Compared(0, 0, None, "the log has none")
        kept = {}
        for id, some in self._kept.items():
            # A response of a single token does not tell that its value is one.
            kept[id] = [t for t in some if len(t.logprobs) > 1 or float(t.logprobs[0]) not in self._placeholders]
        readers = [checkpoint for checkpoint in self.checkpoints if kept.get(checkpoint.id)]
        if not readers:
            told = "no trajectory is known to be sampled by a checkpoint that is here"
            if not self.checkpoints:
                told = "of a single checkpoint it is not known whether it sampled"
            if self._placeholders:
                told = "all tokens of a response have the same one, as placeholders have"
            return Compared(0, 0, None, told)
        off: list[tuple[str, np.ndarray]] = []
        read: list[str] = []
        for checkpoint in dict.fromkeys((readers[0], readers[-1])):
            why = _unreadable(checkpoint)
            if why is not None:
                return Compared(0, 0, None, why)
            try:
                off += _differences(checkpoint, kept[checkpoint.id])
            except TsaeError as error:
                return Compared(0, 0, None, f"{checkpoint.id}: {error.what}")
            except (RuntimeError, IndexError, ValueError) as error:  # of a model that cannot read these tokens
                return Compared(0, 0, None, f"{checkpoint.id}: {(str(error).splitlines() or ['?'])[0]}")
            read.append(checkpoint.id)
        by_temperature = np.stack([values for _, values in off])  # (n_trajectories, n_temperatures)
        at = int(by_temperature.max(axis=0).argmin())
        if by_temperature[:, 0].max() <= _MOST_OFF or by_temperature[:, at].max() > _MOST_OFF:
            at = 0
        differ = np.flatnonzero(by_temperature[:, at] > _MOST_OFF)
        note = (
            f"with the weights of {' and '.join(read)}: mean difference {by_temperature[:, at].mean():.3f} nats a token"
        )
        note += f" at temperature {_TEMPERATURES[at]:g}" * (at > 0)
        return Compared(len(off), len(differ), off[differ[0]][0] if len(differ) else None, note)


def _unreadable(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint's weights are not loaded for this; None where they may be."""
    from tsae.checkpoints.adapters import base_of

    try:
        size = 0
        for part in (checkpoint, *([base_of(checkpoint)] if _adapts(checkpoint) else [])):
            if is_hub_id(part.path):
                return f"{part.path} is not on this disk as a folder"
            folder = folder_of(part)
            files = [Path(folder)] if is_gguf(folder) else weight_files(folder)
            size += sum(file.stat().st_size for file in files)
    except TsaeError as error:
        return f"{checkpoint.id}: {error.what}"
    return (
        None if size <= _MOST_BYTES else f"{checkpoint.id} has {size / 2**30:.1f} GiB of weights, too many to load here"
    )


def _adapts(checkpoint: Checkpoint) -> bool:
    return not is_hub_id(checkpoint.path) and not is_gguf(checkpoint.path) and is_adapter(folder_of(checkpoint))


def _differences(checkpoint: Checkpoint, kept: Sequence[Told]) -> list[tuple[str, np.ndarray]]:
    """(place, (n_temperatures,) mean absolute difference a token) of every trajectory."""
    import torch

    from tsae.checkpoints.loading import ModelLoader

    model = ModelLoader().load(checkpoint)
    found = []
    for told in kept:
        n = len(told.response)
        ids = torch.from_numpy(np.concatenate([told.prompt, told.response]).astype(np.int64))[None]
        with torch.inference_mode():
            # The last position predicts what comes after the response.
            try:
                logits = model(input_ids=ids, logits_to_keep=n + 1).logits[0, -n - 1 : -1]
            except TypeError:  # an architecture that always gives all
                logits = model(input_ids=ids).logits[0, -n - 1 : -1]
            logits, sampled = logits.float(), ids[0, -n:, None]  # (n_response, vocabulary), (n_response, 1)
            off = [
                np.abs((logits / t).log_softmax(-1).gather(-1, sampled)[:, 0].numpy() - told.logprobs).mean()
                for t in _TEMPERATURES
            ]
        found.append((told.where, np.array(off)))
    return found
