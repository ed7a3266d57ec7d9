"""`tsae reformulate` and `tsae credit`: fit, weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeVar

import tsae
from tsae.commands.common import load_series, say_wrote
from tsae.commands.options.rl import Fit, Reformulate, Weights
from tsae.errors import TsaeError
from tsae.rl.credit import Credit
from tsae.rl.credit_fitting import fit_credit
from tsae.rl.exporting import read_logprob, stored_logprob, write_credit
from tsae.rl.reformulation import write_reformulations
from tsae.rl.word_problems import read_word_problems, reformulate_words
from tsae.testbed.backward import is_chain, reformulate_chains

T = TypeVar("T")


def run_reformulate(options: Reformulate) -> None:
    problems, solutions = read_word_problems(options.problems)
    kind = options.kind if options.kind != "auto" else "backward" if is_chain(problems[0]) else "number"
    if kind == "number":
        made, left_out = reformulate_words(problems, solutions)
        reasons = Counter(item.reason for item in left_out)
        print(f"left out: {', '.join(f'{n:,} {reason}' for reason, n in reasons.most_common()) or 'nothing'}")
        for item in _spread(left_out, options.show):
            print(f"  {item.problem_id} {item.text!r}: {item.reason}")
    else:
        split: Literal["train"] | None = None if options.evaluation else "train"
        made = reformulate_chains(problems, kind=kind, ambiguous=options.ambiguous, n_ops=options.n_ops, split=split)
    if not made:
        raise TsaeError("no problem could be reformulated", where=options.problems, fix="See the reasons above.")
    for reformulation in _spread(made, options.show):
        print(f"\n{reformulation.problem.prompt}\n  {' or '.join(reformulation.accepted)}")
    write_reformulations(made, options.to)
    parents = len({item.parent for item in made})
    say_wrote(options.to, f"{len(made):,} reformulations of {parents:,} of {len(problems):,} problems")


def _spread(items: Sequence[T], n: int) -> list[T]:
    """At most n of the items, evenly spread."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def run_fit(options: Fit) -> None:
    credit = fit_credit(options.features, options.config)
    say_wrote(credit.save(options.to), credit)


def run_weights(options: Weights) -> None:
    credit, features = Credit.load(options.credit), tsae.FeatureTable.load(options.features)
    if not credit.significant:
        print(f"note: {credit.info['note']}")
    reader = credit.info["reader"]
    if options.store is not None:
        logprob = stored_logprob(features, reader, options.store)
    else:
        reference = load_series(*options.series)[reader]
        logprob = read_logprob(features, reference, device=options.device, batch_tokens=options.batch_tokens)
    say_wrote(write_credit(credit, features, options.to, options.config, logprob=logprob))
