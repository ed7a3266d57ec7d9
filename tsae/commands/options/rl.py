"""Options of the commands for training: reformulate, credit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from tsae.errors import TsaeError
from tsae.rl.config import CreditConfig, ShapingConfig


@dataclass(frozen=True)
class Reformulate:
    """Turn problems with known answers into easier ones: the answer is given, one quantity is hidden and asked for.

    Chains of the testbed are reformulated exactly, word problems by the rules of tsae.rl.word_problems.
    """

    problems: Positional[Path]
    """JSON lines of id, prompt, answer, or of question and answer as in GSM8K, whose worked solutions are used."""
    to: Path
    """The .jsonl file to write; `tsae rollouts sample` reads it."""
    kind: Literal["auto", "backward", "operand", "number"] = "auto"
    """Of chains: "backward", the last operations undone from the answer, as ordinary chains; "operand", one digit
    hidden, in a form that the testbed's base never saw. "number": of word problems. "auto": backward for chains, else
    number."""
    n_ops: tuple[int, int] = (1, 9)
    """Fewest and most operations of "backward"."""
    ambiguous: Literal["drop", "accept"] = "drop"
    """Leave out operands that the answer does not settle, or accept all their answers."""
    evaluation: bool = False
    """Keep the testbed's evaluation chains; never train on these."""
    show: int = 0
    """Print this many reformulations, evenly spread, and as many of the numbers left out."""


@dataclass(frozen=True)
class Fit:
    """Learn from a reference's rollouts which features, in which tokens, go with success, to score tokens."""

    features: Path
    """Folder that `tsae encode` wrote of rollouts with outcomes that the reference sampled and read."""
    to: Path
    """Folder of the credit."""
    config: OmitArgPrefixes[CreditConfig] = field(default_factory=CreditConfig)


@dataclass(frozen=True)
class Weights:
    """Write scores, weights and advantages of every response token as Parquet for any trainer, one row per trajectory.

    Scores are multiplied by 1 - the reference's probability of the token, as in training with TRL. Give --store or
    --series for these probabilities.
    """

    credit: Path
    """Folder that `tsae credit fit` wrote."""
    features: Path
    """Folder that `tsae encode` wrote of the trajectories, read by the reference, with advantages."""
    to: Path
    """The .parquet file."""
    store: Path | None = None
    """Folder that `tsae capture --token-statistics` wrote, from which the features were encoded. It has the reference's
    probabilities."""
    series: tuple[str, ...] = ()
    """Or a folder of checkpoints, or several checkpoints, the base first: the reference reads the trajectories
    again."""
    device: str = "cpu"
    """Torch device for --series."""
    batch_tokens: int = 16384
    """Tokens in a forward pass of --series, with padding."""
    config: OmitArgPrefixes[ShapingConfig] = field(default_factory=ShapingConfig)

    def __post_init__(self) -> None:
        if (self.store is None) == (not self.series):
            raise TsaeError(
                "the reference's probabilities of the tokens come from a store or from the reference itself",
                where="tsae credit weights",
                fix="Give --store or --series, one of them.",
            )


@dataclass(frozen=True)
class CreditCommand:
    """Learn credit for single tokens from features, and write it for trainers."""

    command: OmitArgPrefixes[
        Annotated[Fit, subcommand("fit", prefix_name=False)]
        | Annotated[Weights, subcommand("weights", prefix_name=False)]
    ]
