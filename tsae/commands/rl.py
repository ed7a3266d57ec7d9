"""`tsae reformulate` and `tsae credit`: fit and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from tyro.conf import OmitArgPrefixes, Positional, subcommand

import tsae
from tsae.base.validation import Count, Size, config
from tsae.commands.common import load_series, say_wrote
from tsae.errors import refuse
from tsae.rl.config import CreditConfig, ShapingConfig


@config
class Reformulate:
    """Turn problems with known answers into easier ones: the answer is given, one quantity is hidden and asked for.

    Chains of the testbed are reformulated exactly, word problems by the rules of tsae.rl.reformulation.
    """

    problems: Positional[Path]
    """JSON lines of id, prompt, answer, or of question and answer as in GSM8K, whose worked solutions are used."""
    to: Path
    """The .jsonl file to write; `tsae rollouts sample` reads it."""
    kind: Literal["auto", "backward", "operand", "number"] = "auto"
    """"backward": chains, with the last operations undone from the answer. "operand": chains with one hidden digit, in
    a form that the testbed's base never saw. "number": word problems. "auto": backward for chains, else number."""
    n_ops: tuple[int, int] = (1, 9)
    """Fewest and most operations of "backward"."""
    ambiguous: Literal["drop", "accept"] = "drop"
    """Leave out operands that the answer does not settle, or accept all their answers."""
    evaluation: bool = False
    """Keep the testbed's evaluation chains; never train on these."""
    show: Size = 0
    """Print this many reformulations, evenly spread, and as many of the numbers left out."""

    def execute(self) -> None:
        from tsae.rl.reformulation import read_word_problems, reformulate_words, write_reformulations
        from tsae.testbed.backward import is_chain, reformulate_chains

        problems, solutions = read_word_problems(self.problems)
        kind = self.kind if self.kind != "auto" else "backward" if is_chain(problems[0]) else "number"
        if kind == "number":
            made, left_out = reformulate_words(problems, solutions)
            reasons = Counter(item.reason for item in left_out)
            print(f"left out: {', '.join(f'{n:,} {reason}' for reason, n in reasons.most_common()) or 'nothing'}")
            for item in _spread(left_out, self.show):
                print(f"  {item.problem_id} {item.text!r}: {item.reason}")
        else:
            split: Literal["train"] | None = None if self.evaluation else "train"
            made = reformulate_chains(problems, kind=kind, ambiguous=self.ambiguous, n_ops=self.n_ops, split=split)
        refuse(self.problems, (not made, "no problem could be reformulated", "See the reasons above."))
        for reformulation in _spread(made, self.show):
            print(f"\n{reformulation.problem.prompt}\n  {' or '.join(reformulation.accepted)}")
        write_reformulations(made, self.to)
        parents = len({item.parent for item in made})
        say_wrote(self.to, f"{len(made):,} reformulations of {parents:,} of {len(problems):,} problems")


@config
class Fit:
    """Learn from a reference's rollouts which features, in which tokens, go with success. This scores tokens."""

    features: Path
    """Folder that `tsae encode` wrote of rollouts with outcomes that the reference sampled and read."""
    to: Path
    """Folder of the credit."""
    config: OmitArgPrefixes[CreditConfig] = field(default_factory=CreditConfig)

    def execute(self) -> None:
        from tsae.rl.credit_fitting import fit_credit

        credit = fit_credit(self.features, self.config)
        say_wrote(credit.save(self.to), credit)


@config
class Weights:
    """Write scores, weights and advantages of every response token as Parquet for any trainer, one row per trajectory.

    Scores are multiplied by 1 - the reference's probability of the token, as in training with TRL. For these
    probabilities, give --store or --series.
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
    batch_tokens: Count = 16384
    """Tokens in a forward pass of --series, with padding."""
    config: OmitArgPrefixes[ShapingConfig] = field(default_factory=ShapingConfig)

    def __post_init__(self) -> None:
        what = "the reference's probabilities of the tokens come from a store or from the reference itself"
        one = (self.store is None) != (not self.series)
        refuse("tsae credit weights", (not one, what, "Give --store or --series, one of them."))

    def execute(self) -> None:
        from tsae.rl.credit import Credit
        from tsae.rl.exporting import read_logprob, stored_logprob, write_credit

        credit, features = Credit.load(self.credit), tsae.FeatureTable.load(self.features)
        if not credit.significant:
            print(f"note: {credit.info['note']}")
        reader = credit.info["reader"]
        if self.store is not None:
            logprob = stored_logprob(features, reader, self.store)
        else:
            reference = load_series(*self.series)[reader]
            logprob = read_logprob(features, reference, device=self.device, batch_tokens=self.batch_tokens)
        say_wrote(write_credit(credit, features, self.to, self.config, logprob=logprob))


@config
class CreditCommand:
    """Learn credit for single tokens from features, and write it for trainers."""

    command: OmitArgPrefixes[
        Annotated[Fit, subcommand("fit", prefix_name=False)]
        | Annotated[Weights, subcommand("weights", prefix_name=False)]
    ]


T = TypeVar("T")


def _spread(items: Sequence[T], n: int) -> list[T]:
    """At most n of the items, evenly spread."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]
