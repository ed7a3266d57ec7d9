"""Entry: one trajectory as its log has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig, Unfit
from tsae.rollouts.logs.on_disk.log_files import LogFile


@dataclass(slots=True)
class Entry:
    """One trajectory as its log has it; None where the log does not say."""

    where: str
    """File and line, for error messages."""
    number: int = 0
    """Of the line or row in its file."""
    prompt: str | list[dict[str, Any]] | None = None
    """Text, or the messages of a conversation."""
    prompt_is: Literal["question", "verbatim", "stripped", "perhaps stripped", "rendered", "perhaps rendered"] = (
        "question"
    )
    """What a text is. question: the chat template is still to be applied. verbatim: exactly what the model read.
    stripped: that without its special tokens. perhaps stripped: one of the last two; the template shows which.
    rendered: with all special tokens written out, so that the tokenizer adds none. perhaps rendered: so if it has any,
    and otherwise perhaps stripped."""
    prompt_ids: np.ndarray | None = None
    """(n_prompt,) integers."""
    response: str | None = None
    response_ids: np.ndarray | None = None
    """(n_response,) integers, with the end token where the model gave one."""
    sampled: np.ndarray | None = None
    """(n_response,) bool: which of these the policy sampled, if others wrote tokens between them; None for all."""
    masked: frozenset[str] = frozenset()
    """Of prompt and response, those whose padding a mask of the log has shown; it is left out here."""
    response_rendered: bool = False
    """Special tokens are written out in the text: a response without an end token was cut off."""
    response_length: int | None = None
    """Number of sampled tokens, if a log of text counts them."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By name; None if a function did not score this trajectory."""
    reward: float | None = None
    """The trainer's own total; by default the only reward."""
    unscored: bool | None = None
    """Whether the log has rewards, but none for this trajectory; by default whether there are rewards and no total."""
    correct: bool | None = None
    """If the log says so outright."""
    decides: str | None = None
    """Name of the reward that says what is right, if the format knows it."""
    answer: str = ""
    level: str | None = None
    problem_id: str | None = None
    policy: str | None = None
    step: int | None = None
    """The trainer's step in which it was logged."""
    updates: int | None = None
    """Optimiser steps of the weights that sampled it."""
    advantage: float | None = None
    advantage_varies: bool = False
    """The tokens have several advantages, of which `advantage` is the mean."""
    group: str | None = None
    """The log's own name of the group in which the advantage was computed; of one problem and step."""
    logprobs: np.ndarray | None = None
    """(n_response,) log-probabilities of `response_ids` when they were sampled, in nats."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages, if the log says them."""
    finish_reason: Literal["stop", "length"] | None = None
    cut_without_end: bool = False
    """Its trainer counts responses without an end token as cut off."""
    key: str | None = None
    """Unique among the entries of a log, if the log has such an id."""
    apart: str = ""
    """What distinguishes it from another entry of equal text that was sampled as other tokens."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Columns that are kept as they are, by name."""
    training: dict[str, Any] = field(default_factory=dict)
    """How the training used it: columns of `TRAINING`, by name."""
    summed: bool = False
    """The reward is the sum of all rewards in the log: without one of them it is another quantity."""
    assumed: str | None = None
    """What its parser assumed, to be counted and printed: "were sampled by …"."""

    def __post_init__(self) -> None:
        if len(self.rewards) == 1 and self.reward is None:
            (self.reward,) = self.rewards.values()
        if self.unscored is None:
            self.unscored = bool(self.rewards) and self.reward is None


class Unusable(TsaeError):
    """A trajectory that cannot be imported; `ImportConfig.skip` leaves out those of its kind."""

    def __init__(self, kind: Unfit, what: str, *, where: str, fix: str | None = None) -> None:
        self.kind = kind
        skip = f"leave such rows out with --skip {kind}"
        super().__init__(what, where=where, fix=f"{fix}, or {skip}" if fix else skip.capitalize())


Parser = Callable[[LogFile, ImportConfig], Iterator[Entry | Unusable]]
"""(file, config) -> its trajectories, in order."""


def total(rewards: Mapping[str, float | None]) -> float | None:
    """The sum of the rewards that are known; None if none is."""
    known = [value for value in rewards.values() if value is not None]
    return sum(known) if known else None
