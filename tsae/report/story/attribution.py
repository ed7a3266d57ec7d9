"""Which samples did that, in words: what bands of samples did, where in the text, and how far to believe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.report.story.statements import Statement
from tsae.report.text import capitalised, count, percent, shortened
from tsae.rollouts.schema import BANDS

OTHER_RUNS = "Without them, alone: the change in a run without these samples, or with these only."
MEANING = (
    "Share: what these samples did in this run. Shares of all samples add up to the change.",
    f"{OTHER_RUNS} They do not add up. Replayed: the run's updates are taken again on its logged responses. Simulated: "
    "estimated from gradients.",
    "Accuracy: the mean log-probability of a token in right responses minus that in wrong ones, in nats. A behaviour: "
    "the same of responses that show it minus those that do not. A feature: its mean activation.",
)
TRAINED_ON = "(trained on): measured on problems of the log, which the run was trained on."
FIFTHS = (
    "All sampled tokens in five equal parts by the entropy of the policy: in fifth 1 it was surest of the next token, "
    "in fifth 5 least sure."
)
ONE_RUN = "This is one run with one seed. Another seed may differ."
_RIGHT, _LIKELY, _FEATURE = "right − wrong", "log-likelihood, ", "feature "
_NOTHING = 1e-12
"""Rounding error."""
_CARRIERS, _TOKEN = 5, 40
"""Tokens of a sample that are named, and characters of one."""


@dataclass(frozen=True)
class Moved:
    """What bands of samples did to one target."""

    target: str
    name: str
    """For readers."""
    change: str
    """From what to what, and by how much."""
    unexplained: str
    """What shares leave of the change, in per cent."""
    flagged: bool
    """Whether that is much."""
    bands: pd.DataFrame
    """Rows of `Attribution.bands`."""
    lone: pd.DataFrame
    """Rows of `Attribution.groups` on lone successes."""
    others: pd.DataFrame
    """Rows of `Attribution.table` on other kinds of samples, the largest effects first."""


@dataclass(frozen=True)
class Grid:
    """Shares of tokens in one target."""

    bands: list[str]
    share: np.ndarray
    """(bands, 5): by fifth of the policy's entropy."""


@dataclass(frozen=True)
class Read:
    """A sample to read."""

    trajectory: int
    about: str
    """Step, problem, band, outcome and advantage."""
    share: str
    """In which target, and how large."""
    prompt: str
    response: str
    """Empty where the text is not known."""
    tokens: pd.DataFrame
    """Rows of `Attribution.tokens` on that target, in order."""
    carried: str
    """The tokens with the largest shares."""


@dataclass(frozen=True)
class Said:
    """A sentence on how far to believe it."""

    text: str
    warns: bool = False


def lead(found: Attribution) -> str:
    """The question, with its numbers."""
    first, last = found.info["checkpoints"][0] + 1, found.info["checkpoints"][-1]
    return (
        f"Which of {count(len(found.facts), 'sample')} of {found.info['run']}, steps {first} to {last}, moved "
        f"{count(len(found.targets), 'target')}?"
    )


def meaning(found: Attribution) -> tuple[str, ...]:
    """What the numbers are."""
    measured = found.info["trained_on"] and any(_RIGHT in name for name in found.targets.target)
    return (*MEANING, *([TRAINED_ON] if measured else []))


def amount(value: float, *, sign: bool = True) -> str:
    """Three significant digits, with a true minus. Shares of single samples may be of any size."""
    if not np.isfinite(value):
        return "–"
    return f"{value:{'+' if sign else ''}.3g}".replace("-", "−") if abs(value) > _NOTHING else "0"


def shown_name(found: Attribution, target: str) -> str:
    """A target's name for readers."""
    if _RIGHT in target:
        band = target.partition(f"{_RIGHT}, ")[2]
        return f"accuracy{f', {band} problems' * bool(band)}{' (trained on)' * bool(found.info['trained_on'])}"
    return f"behaviour, {target.removeprefix(_LIKELY)}" if target.startswith(_LIKELY) else target


def moved(found: Attribution, name: str) -> Moved:
    """What is told of a target."""
    row = found.targets.set_index("target").loc[name]
    unit = " nats" if _RIGHT in name or name.startswith(_LIKELY) else ""
    groups = found.table(name)
    lone = groups.kind == "lone success"
    return Moved(
        name,
        shown_name(found, name),
        f"{amount(row.before, sign=False)} → {amount(row.after, sign=False)}{unit} ({amount(row.realised)})",
        f"{percent(abs(row.remainder))} %",
        bool(row.flagged),
        found.bands[found.bands.target == name],
        groups[lone],
        groups[~lone & (groups.kind != "band")],
    )


def told_targets(found: Attribution, n: int = 4) -> list[str]:
    """Accuracy on each band, then the n behaviours and the n features that moved most."""
    names = [str(name) for name in found.targets.target]
    bands = [f", {band}" for band in BANDS]
    accuracy = sorted(
        (name for name in names if _RIGHT in name),
        key=lambda name: next((i for i, band in enumerate(bands) if name.endswith(band)), len(bands)),
    )
    rest = [name for name in most_moved(found) if name not in accuracy]
    return [*accuracy, *rest[:n], *[name for name in names if name.startswith(_FEATURE)][:n]]


def most_moved(found: Attribution) -> list[str]:
    """Accuracies and behaviours, those first that changed most for their size, the larger of their two values.

    Features are not among them. They stand in the order in which they were found: those that moved furthest in standard
    deviations come first.
    """
    table = found.targets[~found.targets.target.str.startswith(_FEATURE)]
    size = np.maximum(table.before.abs(), table.after.abs()).clip(lower=1e-30)
    order = (table.realised.abs() / size).sort_values(ascending=False, kind="stable").index
    return [str(name) for name in table.target[order]]


def signal(found: Attribution, name: str) -> Grid | None:
    """Where in the text the shares in a target are; None where that was not measured."""
    table = found.entropy[found.entropy.target == name]
    if table.empty:
        return None
    wide = table.pivot_table(index="band", columns="fifth", values="share", aggfunc="sum")
    known = list(dict.fromkeys(table.band))
    bands = [*[band for band in BANDS if band in known], *[band for band in known if band not in BANDS]]
    return Grid(bands, wide.reindex(index=bands, columns=range(1, 6)).to_numpy())


def to_read(found: Attribution, n: int = 10) -> list[Read]:
    """Samples to read, each with the tokens that carry its share in the target that it moved most.

    Where no tokens are known, those with the largest shares in the target that changed most for its size.
    """
    if found.tokens.empty:
        name = next(iter(most_moved(found)), found.targets.target.iloc[0])
        return [_read(found, int(row), name) for row in found.of_target(name, n // 2).trajectory]
    shown = list(dict.fromkeys(found.tokens.trajectory.astype(int)))[:n]
    known = found.tokens.groupby("trajectory").target.agg(set)
    most = {row: next(name for name in found.of_sample(row).target if name in known[row]) for row in shown}
    return [_read(found, row, name) for row, name in most.items()]


def _read(found: Attribution, trajectory: int, target: str) -> Read:
    facts = found.facts.set_index("trajectory").loc[trajectory]
    mine = found.of_sample(trajectory).set_index("target").loc[target]
    table = found.tokens[(found.tokens.trajectory == trajectory) & (found.tokens.target == target)]
    tokens = table.groupby("position", as_index=False).agg({"token_id": "first", "token": "first", "share": "sum"})
    most = tokens[tokens.share.abs() > _NOTHING].sort_values("share", key=abs, ascending=False, kind="stable")
    carriers = [
        f"“{shortened(str(row.token), _TOKEN)}” {amount(row.share)} (token {row.position + 1})"
        for row in most.head(_CARRIERS).itertuples()
    ]
    parts = [str(facts.problem_id), facts.band, facts.outcome, f"advantage {amount(facts.advantage)}"]
    texts = {name: "" if pd.isna(facts[name]) else str(facts[name]) for name in ("prompt", "response")}
    return Read(
        trajectory,
        f"step {int(mine.step)}, {', '.join(str(part) for part in parts if not pd.isna(part))}",
        f"{amount(mine.share)} of {shown_name(found, target)} ({percent(mine.part)} % of its change)",
        texts["prompt"],
        texts["response"] or "".join(tokens.token.astype(str)),
        tokens,
        ", ".join(carriers),
    )


def statement(found: Attribution) -> Statement:
    """The finding: what each band did to the accuracy or behaviour that changed most for its size."""
    heading = "Which samples did that"
    if found.info["gate"]:
        return Statement(heading, (str(found.info["gate"]),), "samples")
    names = most_moved(found) or [str(name) for name in found.targets.target[:1]]
    if not names:
        return Statement(heading, ("No target moved.",), "samples")
    one = moved(found, names[0])
    told = [f"{capitalised(one.name)}: {one.change}."]
    for row in one.bands.itertuples():
        told.append(f"{capitalised(str(row.band))} samples ({row.n:,}): share {amount(row.share)}{_other_run(row)}.")
    told.append(
        "The log has no bands, so that samples cannot be told apart by difficulty."
        if one.bands.empty
        else f"{OTHER_RUNS} {ONE_RUN}"
    )
    return Statement(heading, tuple(told), "samples")


def _other_run(row: Any) -> str:
    """“; without them +0.2, alone +0.4 (replayed)”, as far as they are known."""
    known = {"without them": row.without, "alone": row.alone}
    parts = [f"{what} {amount(value)}" for what, value in known.items() if np.isfinite(value)]
    return f"; {', '.join(parts)} ({row.how})" if parts else ""


_NEAR = 0.1
"""Distance from a checkpoint, as a part of the way, up to which shares of samples can be trusted too."""
_CALIBRATED = {
    True: "Replays of the testbed that were as near gave the right shares and effects.",
    False: "On the testbed, effects of bands kept their signs at such a distance, and shares of single samples did not "
    "always.",
}
"""By whether the distance is at most `_NEAR`; docs/attribution.md has the table."""


def belief(found: Attribution) -> list[Said]:
    """How far to believe it: how near the replay is to the run, what shares leave, and what one run cannot say."""
    said = [*_replayed(found)]
    if not found.info["gate"]:
        ways = found.groups.groupby("how", sort=False).kind.agg(lambda kinds: ", ".join(dict.fromkeys(kinds)))
        other = "Runs without some samples, or with these alone, are"
        said += [Said(f"{other} {how} for: {kinds}.") for how, kinds in ways.items() if how]
        said += _remainders(found)
        said.append(Said("The share of one sample is a large force against others as large."))
    return [*said, Said(ONE_RUN)]


def _replayed(found: Attribution) -> list[Said]:
    """Certificates: what the run itself says of its replay."""
    replay, steps, said = found.info["replay"], found.steps, []
    if replay:
        good, within = f"Replayed to step {replay['to']} of {replay['steps']}", replay["within"]
        good += "" if within is None else f" within {_part(within)} of what the run logged and saved"
        said.append(Said(f"{good}.", replay["departs"] is not None))
        if replay["departs"] is not None:
            cause = f"Likely cause: {replay['cause'].rstrip('.')}."
            said.append(Said(f"From step {replay['departs']} on it departs from the run. {cause}", True))
    if (error := found.info["path_error"]) is not None:
        near = error <= _NEAR
        said.append(
            Said(f"It is off the run's checkpoints by {_part(error)} of the way at most. {_CALIBRATED[near]}", not near)
        )
    norms, lengths = ((steps[name] - steps[f"logged_{name}"]).abs().dropna() for name in ("grad_norm", "mean_length"))
    norms = (norms / steps.logged_grad_norm.where(steps.logged_grad_norm > 0)).dropna()
    for what, off, shown in (
        ("gradient norms", norms, _part(norms.max())),
        ("mean response lengths", lengths, f"{amount(lengths.max(), sign=False)} tokens"),
    ):
        if len(off):
            of = count(len(off), "step")
            said.append(Said(f"The replay's {what} differ from the logged ones by {shown} at most ({of})."))
    return said


def _remainders(found: Attribution) -> list[Said]:
    """What shares leave of the changes."""
    targets = found.targets
    if targets.remainder.isna().all():
        return []
    worst = targets.loc[targets.remainder.abs().idxmax()]
    text = (
        f"Shares leave {percent(targets.remainder.abs().median())} % of a change unexplained (median), "
        f"{percent(abs(worst.remainder))} % at most ({shown_name(found, worst.target)})."
    )
    return [Said(text, bool(targets.flagged.any()))]


def _part(value: float) -> str:
    return f"{amount(100 * value, sign=False)} %"
