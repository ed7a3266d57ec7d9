"""Are the logged log-probabilities those of the checkpoint that sampled? A few trajectories go through the model.

1. Up to 4 trajectories of the first and up to 4 of the last checkpoint of the series that sampled and whose weights lie
   on this disk: at most 128 tokens of a response, in the precision of the file.
2. The mean absolute difference a token is compared: in a sum the errors of a shifted row cancel. More than 0.1 nats is
   a difference. Engines that sample in bfloat16 differ from the trainer's forward pass by 0.01 to 0.03, weights a few
   updates apart by hardly more: this finds other weights, prompts or templates and shifted tokens, but not a policy
   that is one update off.
3. Log-probabilities may be those of the softmax at the sampling temperature. If temperature 1 does not fit, one
   temperature from 0.2 to 1.5 that fits every trajectory is assumed, and named.
4. If all tokens of a response have the same value, that is a placeholder, and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf, is_hub_id, weight_files
from tsae.errors import TsaeError
from tsae.rollouts.logs.checks.check import Check
from tsae.rollouts.logs.entries.hashes import place_hash

_TRAJECTORIES = 4
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


class LogProbs:
    """Keeps a few trajectories of every checkpoint, and compares them at the end."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.checkpoints = list(checkpoints)
        self.logged = 0
        self._kept: dict[str, list[Told]] = {checkpoint.id: [] for checkpoint in checkpoints}
        self._placeholders: set[float] = set()
        """Values that all tokens of some response have."""

    def put(self, policy: str, prompt: np.ndarray, response: np.ndarray, logprobs: np.ndarray, where: str) -> None:
        """Take a trajectory that has log-probabilities."""
        self.logged += 1
        if len(logprobs) > 1 and np.ptp(logprobs) == 0:
            self._placeholders.add(float(logprobs[0]))
        elif policy in self._kept and len(prompt) <= _PROMPT and len(logprobs) == len(response):
            self._keep(policy, Told(prompt, response[:_TOKENS], logprobs[:_TOKENS], where))

    def state(self) -> dict[str, Any]:
        """What was kept, for JSON."""
        kept = {
            id: [(*(part.tolist() for part in told[:3]), told.where) for told in some]
            for id, some in self._kept.items()
        }
        return {"logged": self.logged, "placeholders": sorted(self._placeholders), "kept": kept}

    def add(self, state: Mapping[str, Any]) -> None:
        """Add what was kept of the next part of the log."""
        self.logged += state["logged"]
        self._placeholders.update(state["placeholders"])
        for id, some in state["kept"].items():
            for prompt, response, logprobs, where in some:
                self._keep(id, Told(np.array(prompt), np.array(response), np.array(logprobs), where))

    def _keep(self, policy: str, told: Told) -> None:
        """Keep those whose places have the smallest hashes, so that parts of a log can be read one by one."""
        kept = self._kept[policy]
        kept.append(told)
        if len(kept) > _TRAJECTORIES:
            del kept[max(range(len(kept)), key=lambda place: place_hash(kept[place].where))]

    def check(self) -> Check:
        """Compare what was kept with the checkpoints' weights."""
        if not self.logged:
            return _not_compared("the log has none")
        kept = {}
        for id, some in self._kept.items():
            # A single token is a placeholder if it has a placeholder's value.
            kept[id] = [t for t in some if len(t.logprobs) > 1 or float(t.logprobs[0]) not in self._placeholders]
        sampled = [checkpoint for checkpoint in self.checkpoints if kept[checkpoint.id]]
        if not sampled:
            told = "no trajectory is known to be sampled by a checkpoint that is here"
            if not self.checkpoints:
                told = "of a single checkpoint it is not known whether it sampled"
            if self._placeholders:
                told = "all tokens of a response have the same one, as placeholders have"
            return _not_compared(told)
        off: list[tuple[str, np.ndarray]] = []
        ends = list(dict.fromkeys((sampled[0], sampled[-1])))
        for checkpoint in ends:
            try:
                if why := _unreadable(checkpoint):
                    return _not_compared(why)
                off += _differences(checkpoint, kept[checkpoint.id])
            except TsaeError as error:
                return _not_compared(f"{checkpoint.id}: {error.what}")
            except (RuntimeError, IndexError, ValueError) as error:  # of a model that cannot read these tokens
                return _not_compared(f"{checkpoint.id}: {(str(error).splitlines() or ['?'])[0]}")
        by_temperature = np.stack([values for _, values in off])  # (n_trajectories, n_temperatures)
        at = int(by_temperature.max(axis=0).argmin())
        if by_temperature[:, 0].max() <= _MOST_OFF or by_temperature[:, at].max() > _MOST_OFF:
            at = 0
        differ = np.flatnonzero(by_temperature[:, at] > _MOST_OFF)
        names = " and ".join(checkpoint.id for checkpoint in ends)
        note = f"with the weights of {names}: mean difference {by_temperature[:, at].mean():.3f} nats a token"
        note += f" at temperature {_TEMPERATURES[at]:g}" * (at > 0)
        if len(differ):
            note += (
                "; other weights sampled them, or another prompt was read, or fewer tokens were allowed (top-p, top-k)"
            )
        first = off[differ[0]][0] if len(differ) else None
        return Check(
            *("log-probabilities", "trajectories", len(off), len(differ)),
            example=first,
            disagrees=len(differ) > 0,
            note=note,
        )


def _not_compared(why: str) -> Check:
    return Check("log-probabilities", "trajectories", 0, 0, note=why)


def _unreadable(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint's weights are not loaded for this; None if they may be.

    Raises:
        TsaeError: if its files are not there.
    """
    size = 0
    for part in (checkpoint, *([base_of(checkpoint)] if _adapts(checkpoint) else [])):
        if is_hub_id(part.path):
            return f"{part.path} is not on this disk as a folder"
        folder = folder_of(part)
        files = [Path(folder)] if is_gguf(folder) else weight_files(folder)
        size += sum(file.stat().st_size for file in files)
    if size <= _MOST_BYTES:
        return None
    return f"{checkpoint.id} has {size / 2**30:.1f} GiB of weights, too many to load here"


def _adapts(checkpoint: Checkpoint) -> bool:
    return not is_hub_id(checkpoint.path) and not is_gguf(checkpoint.path) and is_adapter(folder_of(checkpoint))


def _differences(checkpoint: Checkpoint, kept: Sequence[Told]) -> list[tuple[str, np.ndarray]]:
    """(place, (n_temperatures,) mean absolute difference a token) of every trajectory."""
    import torch

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
