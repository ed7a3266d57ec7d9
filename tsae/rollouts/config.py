"""Configs of sampling, importing and banding. Imports nothing heavy: the CLI builds its options from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tsae.errors import TsaeError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled."""

    n_samples: int = 8
    """Responses per problem (the group size)."""
    temperature: float = 1.0
    """Softmax temperature; training rollouts use 1."""
    max_new_tokens: int = 512
    """Tokens after which a response is cut off (finish_reason "length")."""
    batch_size: int = 256
    """Responses generated at once."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """"chat" applies the tokenizer's chat template, "plain" does not; "auto" applies it where there is one."""
    seed: int = 0
    """The same seed, batch size and machine give the same responses."""
    device: str = "cpu"
    """A torch device."""

    def __post_init__(self) -> None:
        for name in ("n_samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="SamplingConfig")
        if not self.temperature > 0:
            raise TsaeError(f"temperature={self.temperature} is not positive", where="SamplingConfig")


@dataclass(frozen=True)
class ImportConfig:
    """Which column of the log holds what."""

    prompt: str = "prompt"
    """Text of the problem, before any chat template."""
    response: str = "response"
    """Text of the response."""
    problem_id: str = "problem_id"
    """Problem id; where the log has no such column, equal prompts are one problem."""
    policy: str = "policy"
    """What sampled the response; where the log has no such column, `default_policy`."""
    default_policy: str = "unknown"
    """Policy id for a log without a policy column."""
    correct: str = "correct"
    """true or false; where the log has no such column, `verifier` decides, or a reward above 0."""
    reward: str = "reward"
    """Reward; where the log has no such column, 1 for correct and 0 for incorrect."""
    answer: str = "answer"
    """Reference answer; only needed for a verifier."""
    level: str = "level"
    """The author's difficulty label, if any."""
    verifier: str | None = None
    """exact, last_number, or module:function, for logs that do not say what is correct."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """Whether the checkpoint's chat template is applied to prompts."""


@dataclass(frozen=True)
class BandCutoffs:
    """Where the bands end, in pass rate."""

    easy: float = 0.75
    """Easy: a pass rate of at least this."""
    hard: float = 0.25
    """Hard: a pass rate of at most this; medium lies between."""

    def __post_init__(self) -> None:
        if not 0 <= self.hard < self.easy <= 1:
            raise TsaeError(
                f"band cut-offs hard={self.hard}, easy={self.easy} are not in order",
                where="BandCutoffs",
                fix="Give 0 <= hard < easy <= 1.",
            )

    def band(self, pass_rate: np.ndarray) -> np.ndarray:
        """The band of every pass rate."""
        import numpy as np

        return np.select([pass_rate >= self.easy, pass_rate <= self.hard], ["easy", "hard"], "medium")


@dataclass(frozen=True)
class BandQuantiles:
    """Bands as shares of the problems, by one policy's pass rates."""

    easy: float = 1 / 3
    """Share of the problems, those of the highest pass rates, that are easy."""
    hard: float = 1 / 3
    """Share of the problems, those of the lowest pass rates, that are hard."""

    def __post_init__(self) -> None:
        if not (self.easy > 0 and self.hard > 0 and self.easy + self.hard < 1):
            raise TsaeError(
                f"shares easy={self.easy:g} and hard={self.hard:g} leave nothing for one of the bands",
                where="BandQuantiles",
                fix="Give shares above 0 that add up to less than 1.",
            )

    def cutoffs(self, pass_rate: np.ndarray) -> BandCutoffs:
        """The cut-offs that put about these shares of the problems into the bands.

        Problems of equal pass rates stay in one band, so that with few responses a problem the shares are exceeded.

        Raises:
            TsaeError: where so many pass rates are equal that no cut-offs tell easy from hard.
        """
        import numpy as np

        ordered = np.sort(pass_rate)
        hard = float(ordered[max(0, int(np.ceil(self.hard * len(ordered))) - 1)])
        easy = float(ordered[min(len(ordered) - 1, int(np.floor((1 - self.easy) * len(ordered) + 1e-9)))])
        if not hard < easy:
            raise TsaeError(
                f"{np.mean(ordered == hard):.0%} of the problems have the pass rate {hard:g}, which would be easy and "
                "hard at once",
                where="BandQuantiles",
                fix="Give smaller shares, sample more responses to a problem, or give cut-offs.",
            )
        return BandCutoffs(easy=easy, hard=hard)


@dataclass(frozen=True)
class DifficultyConfig:
    """How difficulty along a run is measured."""

    interval: Literal["wilson", "jeffreys"] = "wilson"
    """Interval of a problem's pass rate."""
    confidence: float = 0.95
    """Of all intervals."""
    k: tuple[int, ...] = ()
    """k of pass@k; by default powers of two up to the median number of responses to a problem."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Whose advantages tell how much weight single successes carry."""
    n_draws: int = 2000
    """Permutations of outcomes, and bootstrap draws of problems."""
    seed: int = 0
    """Of both."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise TsaeError(f"confidence={self.confidence} is not between 0 and 1", where="DifficultyConfig")
        if self.n_draws < 100:
            raise TsaeError(f"n_draws={self.n_draws} is less than 100", where="DifficultyConfig")
        if any(k < 1 for k in self.k):
            raise TsaeError(f"k={min(self.k)} is less than 1", where="DifficultyConfig")
