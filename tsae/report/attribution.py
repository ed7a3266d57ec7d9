"""Which samples did it: the words, the section of the page, and what `tsae attribute` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, log10
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsae.attribution.attribution import Attribution
from tsae.base.statistics import too_few
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.story import facts
from tsae.report.story.statements import Statement
from tsae.report.tables import DASH, Cell, Table, table_text
from tsae.report.text import capitalised, count, listed, number, percent, shortened, visible
from tsae.rollouts.schema import BANDS

MEANING = (
    "Share: what these samples did in this run. Shares of all samples add up to the change.",
    "Without them, alone: the change in a run without these samples, or with these only. They do not add up. Replayed: "
    "the run's updates are taken again on its logged responses. Simulated: estimated from gradients.",
    "A preference: the mean log-probability of a token in right responses minus that in wrong ones, in nats; or in "
    "responses that show a behaviour minus those that do not. A feature: its mean activation.",
)
TRAINED_ON = "(trained on): measured on problems of the log, which the run was trained on."
FIFTHS = (
    "All sampled tokens in five equal parts by the entropy of the policy: in fifth 1 it was surest of the next token, "
    "in fifth 5 least sure. Measured on prompt groups drawn at random and brought to all, so that fifths need not add "
    "up to the shares above."
)
ONE_RUN = "These numbers have no intervals: they are of one run with one seed, and another seed may differ."
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
    realised: float
    unexplained: str
    """What shares leave of the change, in per cent."""
    flagged: bool
    """Whether that is much."""
    bands: pd.DataFrame
    """Rows of `Attribution.bands`."""
    thirds: pd.DataFrame
    """Shares by band, and third of the run."""
    lone: pd.DataFrame
    """Rows of `Attribution.groups` on lone successes."""
    others: pd.DataFrame
    """Rows of `Attribution.table` on other kinds of samples, the largest effects first."""


@dataclass(frozen=True)
class Read:
    """A sample to read."""

    trajectory: int
    problem: str
    """Its prompt; else its id."""
    band: str
    step: int
    outcome: str
    advantage: float
    share: float
    """In `target`."""
    target: str
    """The target that it moved most, for readers; with its unit."""
    prompt: str
    response: str
    """Empty where the text is not known."""
    tokens: pd.DataFrame
    """Rows of `Attribution.tokens` on that target, in order."""
    carried: str
    """The tokens with the largest shares."""

    @property
    def about(self) -> str:
        parts = (f"step {self.step}", self.band, self.outcome, f"advantage {amount(self.advantage)}")
        return ", ".join(part for part in parts if part)

    @property
    def shown(self) -> str:
        return amount(self.share)


@dataclass(frozen=True)
class Said:
    """A sentence on how far to believe it."""

    text: str
    warns: bool = False


def lead(found: Attribution) -> str:
    """The question, with its numbers."""
    first, last = found.steps.step.iloc[[0, -1]]
    return (
        f"Which of {count(len(found.facts), 'sample')} of {found.info['run']}, steps {first} to {last}, moved "
        f"{count(len(found.targets), 'target')}?"
    )


def meaning(found: Attribution) -> tuple[str, ...]:
    """What the numbers are."""
    measured = found.info["trained_on"] and any(_RIGHT in name for name in found.targets.target)
    label = found.info.get("bands")
    of = [f"Bands are the {label}."] if label else []
    return (*MEANING, *of, *([TRAINED_ON] if measured else []))


def amount(value: float, *, sign: bool = True, digits: int = 2) -> str:
    """Two significant digits, with a true minus. Shares of single samples may be of any size."""
    if not np.isfinite(value):
        return DASH
    return f"{value:{'+' if sign else ''}.{digits}g}".replace("-", "−") if abs(value) > _NOTHING else "0"


def shown_name(found: Attribution, target: str) -> str:
    """A target's name for readers."""
    if _RIGHT in target:
        band = target.partition(f"{_RIGHT}, ")[2]
        trained = " (trained on)" * bool(found.info["trained_on"])
        return f"preference for right answers{f', {band} problems' * bool(band)}{trained}"
    if target.startswith(_LIKELY):
        return f"preference for {facts.behaviour_name(target.removeprefix(_LIKELY).replace(' ', '_'))}"
    return target


def moved(found: Attribution, name: str) -> Moved:
    """What is said of a target."""
    row = found.targets.set_index("target").loc[name]
    groups = found.table(name)
    lone = groups.kind == "lone success"
    ends = " → ".join(amount(value, sign=False, digits=3) for value in (row.before, row.after))
    return Moved(
        name,
        shown_name(found, name),
        f"{'mean activation ' * name.startswith(_FEATURE)}{ends}{_unit(name)} ({amount(row.realised)})",
        float(row.realised),
        f"{percent(abs(row.remainder))} %",
        bool(row.flagged),
        found.bands[found.bands.target == name],
        by_thirds(found, name),
        groups[lone],
        groups[~lone & (groups.kind != "band")],
    )


def _unit(target: str) -> str:
    return " nats" if target.startswith((_RIGHT, _LIKELY)) else ""


def by_thirds(found: Attribution, target: str) -> pd.DataFrame:
    """Shares in a target by band, and third of the run's steps: three columns."""
    mine = found.samples[found.samples.target == target].merge(found.facts[["trajectory", "band"]], on="trajectory")
    steps = np.unique(found.samples.step)
    third = np.searchsorted(steps, mine.step.to_numpy()) * 3 // max(len(steps), 1)
    shares = mine.groupby(["band", third]).share.sum().unstack()
    return shares.reindex(columns=range(3)).fillna(0.0) if len(steps) > 2 else shares.reindex(columns=range(3))


def main_targets(found: Attribution) -> list[str]:
    """Right answers over all problems (by band where that is not known), two behaviours and the features."""
    names = [str(name) for name in found.targets.target]
    right = [_RIGHT] if _RIGHT in names else _by_band(found)
    behaviours = [name for name in most_moved(found) if name.startswith(_LIKELY)]
    return [*right, *behaviours[:2], *(name for name in names if name.startswith(_FEATURE))]


def told_targets(found: Attribution) -> list[str]:
    """The main targets, then right answers on each band."""
    main = main_targets(found)
    return [*main, *(name for name in _by_band(found) if name not in main)]


def _by_band(found: Attribution) -> list[str]:
    """Right answers on each band, in the order of bands."""
    return _in_order(found.targets.target[found.targets.target.str.startswith(f"{_RIGHT}, ")], f"{_RIGHT}, ")


def _in_order(names: Iterable[str], prefix: str = "") -> list[str]:
    """Names of bands behind a prefix in the order of bands, then the others as they come."""
    places = {f"{prefix}{band}": place for place, band in enumerate(BANDS)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def most_moved(found: Attribution) -> list[str]:
    """Right answers and behaviours, those first that changed most for their size, the larger of their two values.

    Features are not among them, nor is a band's right answers where all problems' are.
    """
    names = found.targets.target
    table = found.targets[~names.str.startswith((_FEATURE, f"{_RIGHT}, ") if (names == _RIGHT).any() else _FEATURE)]
    size = np.maximum(table.before.abs(), table.after.abs()).clip(lower=1e-30)
    order = (table.realised.abs() / size).sort_values(ascending=False, kind="stable").index
    return [str(name) for name in table.target[order]]


def signal(found: Attribution, name: str) -> pd.DataFrame:
    """Where in the text the shares in a target are, by band and fifth of the entropy; empty if not measured."""
    table = found.entropy[found.entropy.target == name]
    wide = table.pivot_table(index="band", columns="fifth", values="share", aggfunc="sum")
    return wide.reindex(index=_in_order(dict.fromkeys(table.band)), columns=range(1, 6))


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
    known = found.facts.set_index("trajectory").loc[trajectory]
    mine = found.of_sample(trajectory).set_index("target").loc[target]
    table = found.tokens[(found.tokens.trajectory == trajectory) & (found.tokens.target == target)]
    tokens = table.groupby("position", as_index=False).agg({"token_id": "first", "token": "first", "share": "sum"})
    most = tokens[tokens.share.abs() > _NOTHING].sort_values("share", key=abs, ascending=False, kind="stable")
    carriers = [
        f"“{shortened(str(row.token), _TOKEN)}” {amount(row.share)} (token {row.position + 1})"
        for row in most.head(_CARRIERS).itertuples()
    ]
    texts = {name: "" if pd.isna(known[name]) else str(known[name]) for name in ("prompt", "response")}
    return Read(
        trajectory,
        " ".join(texts["prompt"].split()) or str(known.problem_id),
        "" if pd.isna(known.band) else str(known.band),
        int(mine.step),
        {"success": "✓ right", "failure": "✗ wrong"}.get(str(known.outcome), "not known"),
        float(known.advantage),
        float(mine.share),
        f"{shown_name(found, target)}{' (nats)' * bool(_unit(target))}",
        texts["prompt"],
        texts["response"] or "".join(tokens.token.astype(str)),
        tokens,
        ", ".join(carriers),
    )


def statement(found: Attribution) -> Statement:
    """The finding: what bands did to the right answers and to the behaviour that moved most; or why that is not known.

    Where neither is known, what they did to the first feature.
    """
    heading = "Which samples did that"
    if found.info["gate"]:
        return Statement(heading, (str(found.info["gate"]),), "samples")
    names = most_moved(found)
    chosen = [next((n for n in names if (_RIGHT in n) is right), None) for right in (True, False)]
    known = [name for name in chosen if name] or [str(name) for name in found.targets.target[:1]]
    if not known:
        return Statement(heading, ("No target moved.",), "samples")
    told = [*filter(None, [found.info.get("about")]), *(said.text for said in _replayed(found) if said.warns)]
    told += [sentence for name in known for sentence in _sentences(moved(found, name))]
    bands = found.facts.band.dropna().unique()
    if found.bands.empty and len(bands) < 2:
        why = f"All samples are of the band {bands[0]}" if len(bands) else "The log has no bands"
        told.append(f"{why}, so that samples cannot be divided by difficulty.")
    error = found.info["path_error"]
    replay = (
        "" if error is None else f" The replay ends off the run's checkpoints by {_part(error)} of what training moved."
    )
    return Statement(heading, (*told, ONE_RUN + replay), "samples")


def _sentences(one: Moved) -> Iterator[str]:
    """What moved and what bands did of it, those that did most first; then what would be without each."""
    rose = {1: "rose", -1: "fell", 0: "did not change"}[int(np.sign(one.realised))]
    shares = one.bands.sort_values("share", ascending=one.realised < 0, kind="stable")
    largest = _largest(one)
    did = listed([f"{row.band} samples {_fixed(row.share, largest)}" for row in shares.itertuples()])
    name = f"the {one.name}" if one.target.startswith((_RIGHT, _LIKELY)) else one.name
    flag = f" Shares leave {one.unexplained} of the change unexplained." * one.flagged
    yield f"{capitalised(name)} {rose}: {one.change}." + f" Shares, which add up to it: {did}." * bool(did) + flag
    known = shares[shares.without.notna()]
    if len(known):
        first, *others = (f"{row.band} samples {{}}{_fixed(row.without, largest)}" for row in known.itertuples())
        runs = listed(
            [f"In a run without {first.format('it changes by ')}", *(f"without {o.format('by ')}" for o in others)]
        )
        gone = one.realised - known.without
        against = known.band[
            (gone * known.share < 0) & (np.minimum(gone.abs(), known.share.abs()) > 0.1 * abs(one.realised))
        ]
        told = f" For {listed(list(against))} samples both have opposite signs: samples act through each other, and a "
        told += "run without some of them is not the run less their share."
        yield f"{runs} ({', '.join(dict.fromkeys(known.how))}).{told if len(against) else ''}"


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
        targets = found.targets
        if targets.remainder.notna().any():
            worst = targets.loc[targets.remainder.abs().idxmax()]
            text = (
                f"Shares leave {percent(targets.remainder.abs().median())} % of a change unexplained (median), "
                f"{percent(abs(worst.remainder))} % at most ({shown_name(found, worst.target)})."
            )
            said.append(Said(text, bool(targets.flagged.any())))
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


def _part(value: float) -> str:
    return f"{amount(100 * value, sign=False)} %"


_MAX_GROUPS, _SAMPLES = 20, 10
_PROMPT, _TOKENS, _NAME = 2000, 400, 40
"""Characters of a prompt, tokens of a response, characters of a token, and of a name."""
_MARKS, _MOST_LEVELS = 9, 6
"""Shades of tokens, and levels of a data set that are shown."""
_STRANGE = "Features here are of another SAE than those of the diff: their numbers do not mean the features above."


def attributed(found: Attribution, diff: FeatureDiff) -> dict[str, Any]:
    """All that the section shows; where `gate` says why, belief, recipe and notes alone are shown.

    main and others are targets, each with the rows of its bands; samples are to be read, each with its prompt and its
    response.
    """
    believed = belief(found)
    run = {"steps": _steps(found.steps), "recipe": str(found.info["recipe"]), "notes": found.info["notes"]}
    if gate := str(found.info["gate"]):
        return {"gate": gate, "belief": believed, **run}
    sae, own = found.info.get("sae"), (diff.info.get("sae") or {}).get("weights")
    same_sae = sae is not None and sae == own
    named = any(name.startswith("feature ") for name in found.targets.target)
    strange = [Said(_STRANGE, warns=True)] if named and None not in (sae, own) and not same_sae else []
    described = {f"feature {i}": (int(i), str(diff.names[i])) for i in diff.features.index if same_sae}
    every, main = [moved(found, name) for name in told_targets(found)], set(main_targets(found))
    blocks: dict[bool, list[Block]] = {True: [], False: []}
    for one in every:
        if len(one.bands):
            name = _target(one.target, one.name, described)
            block = Block(name, one.change, one.unexplained if one.flagged else "", _bands(one))
            blocks[one.target in main].append(block)
    samples = to_read(found, _SAMPLES)
    return {
        "gate": "",
        "lead": lead(found),
        "told": statement(found).sentences,
        "meaning": meaning(found),
        "head": _HEAD,
        "main": blocks[True],
        "others": blocks[False],
        "along_head": ["in the log", "samples", *_thirds(found), "first to last third"],
        "along": list(_along(found, described)),
        "levels": _levels(found),
        "lone": _lone(every),
        "signal": _signal(found, every),
        "to_read": _to_read(samples),
        "samples": [(one, shortened(one.prompt, _PROMPT), _pieces(one)) for one in samples],
        "kinds": [(one, _others(one.others.head(_MAX_GROUPS))) for one in every if len(one.others)],
        "belief": strange + believed,
        **run,
    }


Row = list[str | Cell]


class Block(NamedTuple):
    """Rows of a table about one thing."""

    name: str | Cell
    small: str
    warns: str
    """What shares leave unexplained, where that is much."""
    rows: list[Row]


_HEAD = ("what moved", "samples", "number", "share", "first third", "second", "last", "without them", "alone", "how")


def _bands(one: Moved) -> list[Row]:
    """A row each band: its name, samples, share, shares by third, changes of other runs, and how these were found."""
    largest = _largest(one)
    rows: list[Row] = []
    for row in one.bands.itertuples():
        thirds = one.thirds.loc[row.band] if row.band in one.thirds.index else [np.nan] * 3
        shown = [_tinted(value, largest) for value in (row.share, *thirds, row.without, row.alone)]
        name = Cell(shortened(str(row.band), _NAME), tone="isolated")
        rows.append([name, f"{row.n:,}", *shown, str(row.how) or "not computed"])
    return rows


def _largest(one: Moved) -> float:
    numbers = one.bands[["share", "without", "alone"]].to_numpy(dtype=float)
    return float(np.nanmax(np.abs(numbers), initial=0.0))


def _fixed(value: float, largest: float) -> str:
    """With the decimals that two digits of the largest need."""
    if not np.isfinite(value) or largest <= _NOTHING:
        return amount(value)
    text = f"{value:+.{max(0, 1 - floor(log10(largest)))}f}"
    return text.replace("-", "−") if float(text) else "0"


def _tinted(value: float, largest: float) -> Cell:
    """A number with a shade by its size."""
    shade = 0 if not np.isfinite(value) or largest <= 0 else int(np.ceil(_MARKS * abs(value) / largest - 0.5))
    return Cell(_fixed(value, largest), shade=min(shade, _MARKS), against=value < 0)


def _thirds(found: Attribution) -> list[str]:
    return [str(third) for third in dict.fromkeys(found.along.third)]


def _along(found: Attribution, described: Mapping[str, tuple[int, str]]) -> Iterator[Block]:
    """What the log's responses show by band and third: right answers, lengths, and the main behaviours and features."""
    table, main = found.along, main_targets(found)
    bands = [band for band in BANDS if band in set(table.band)] or ["all"]
    behaviours = [name.removeprefix(_LIKELY).replace(" ", "_") for name in main if name.startswith(_LIKELY)]
    features = [name for name in main if name.startswith(_FEATURE)]
    for measure in ("accuracy", *behaviours, "response_length", *features) if len(_thirds(found)) == 3 else ():
        mine = table[table.measure == measure]
        rows = [[band, *_levels_of(of, measure)] for band in bands if len(of := mine[mine.band == band]) == 3]
        if rows and measure in features:
            yield Block(_target(measure, measure, described), "mean activation, read by the first weights", "", rows)
        elif rows:
            name = "right answers" if measure == "accuracy" else facts.behaviour_name(measure)
            yield Block(name, "", "", rows)


def _levels_of(rows: pd.DataFrame, measure: str) -> Row:
    """What a measure is in each third, and its change with its interval."""
    length = measure == "response_length"
    share = not length and not measure.startswith(_FEATURE)
    unit = " tokens" if length else " points" if share else ""

    def change(value: float) -> str:
        return number(100 * value if share else value, sign=True)

    levels: Row = [f"{percent(value)} %" if share else number(value) + unit for value in rows["mean"]]
    last = rows.iloc[-1]
    if pd.isna(last.change_low):
        return [*levels, Cell(small=too_few(0 if pd.isna(last.n_paired) else int(last.n_paired)), quiet=True)]
    return [*levels, Cell(change(last.change) + unit, f"[{change(last.change_low)}, {change(last.change_high)}]")]


def _levels(found: Attribution) -> Table | None:
    """The data set's levels beside the bands: how many samples both have, and shares of the levels."""
    known = found.facts[found.facts.level.notna() & found.facts.band.notna()]
    if not 2 <= known.level.nunique() <= _MOST_LEVELS or (known.level == known.band).all():
        return None
    both = pd.crosstab(known.level, known.band)
    bands = _in_order(both)
    names = main_targets(found)[:3]
    shares = found.samples.merge(known[["trajectory", "level"]]).groupby(["target", "level"]).share.sum()
    rows: list[Row] = [
        [
            Cell(f"level {shortened(str(level), _NAME)}", tone="isolated"),
            *(f"{both.loc[level, band]:,}" for band in bands),
            *(amount(shares[name, level]) for name in names),
        ]
        for level in _in_order(both.index)
    ]
    head = [
        "the data set's level",
        *(f"{band} samples" for band in bands),
        *(f"share of {shown_name(found, name)}" for name in names),
    ]
    return Table("The data set's levels beside the bands", head, rows)


_READ = ["row of the log", "problem", "samples", "step", "response", "outcome", "advantage", "share"]


def _cells(one: Read) -> list[str]:
    texts = (shortened(" ".join(text.split()), _NAME) for text in (one.problem, one.response))
    problem, response = texts
    return [f"{one.trajectory}", problem, one.band or DASH, f"{one.step}", response, one.outcome,
            amount(one.advantage), one.shown]  # fmt: skip


def _to_read(samples: list[Read]) -> Table | None:
    """A row each; texts of the log keep their own direction of writing."""
    rows = [[Cell(cell, tone="isolated") if place in (1, 4) else cell for place, cell in enumerate(_cells(one))]
            for one in samples]  # fmt: skip
    if not rows:
        return None
    caption = f"{len(rows)} samples to read first: the largest shares of the {samples[0].target}"
    if odd := sum(one.advantage * {"✓": 1, "✗": -1}.get(one.outcome[:1], 0) < 0 for one in samples):
        caption += f"; the advantage of {odd} is against the outcome, as where another part of the reward outweighs it"
    return Table(caption, _READ, rows, 6)


def pushed(found: Attribution | None, diff: FeatureDiff, n: int = 3) -> dict[str, dict[str, Any]]:
    """For the cards of features that were attributed: what bands did, and n samples that raised and lowered each."""
    if found is None or found.info["gate"] or found.info.get("sae") != (diff.info.get("sae") or {}).get("weights"):
        return {}
    names = [name for name in main_targets(found) if name.startswith(_FEATURE)]
    every = {name: [_read(found, int(row), name) for row in found.of_target(name, n).trajectory] for name in names}
    return {
        name.removeprefix(_FEATURE): {
            "told": visible(" ".join(_sentences(moved(found, name)))),
            "head": _READ,
            "rows": [[visible(cell) for cell in _cells(one)] for one in samples],
        }
        for name, samples in every.items()
    }


def _target(target: str, name: str, described: Mapping[str, tuple[int, str]]) -> Cell:
    """A feature of the diff links to its card."""
    if target in described:
        feature, responds_to = described[target]
        return Cell(f" “{responds_to}”", tone="isolated", feature=feature)
    return Cell(shortened(name, 2 * _NAME), tone="isolated")


def _row(name: str, row: Any) -> Row:
    return [
        Cell(shortened(str(name), _NAME), tone="isolated"),
        f"{row.n:,}",
        *(amount(value) for value in (row.share, row.without, row.alone)),
        str(row.how),
    ]


_CELLS = ["samples", "share", "without them", "alone", "how"]


def _lone(every: list[Moved]) -> Table | None:
    rows = [_row(one.name, row) for one in every for row in one.lone.itertuples()]
    return Table("Lone successes: the only right response of their group", ["target", *_CELLS], rows) if rows else None


def _others(table: pd.DataFrame) -> Table:
    return Table("By effect", ["kind", *_CELLS], [_row(row.group, row) for row in table.itertuples()])


def _signal(found: Attribution, every: list[Moved]) -> Table | None:
    rows: list[Row] = []
    for one in every:
        rows += [
            [Cell(one.name, tone="isolated"), Cell(str(band), tone="isolated"), *map(amount, line)]
            for band, line in signal(found, one.target).iterrows()
        ]
    head = ["target", "samples", *(f"fifth {fifth}" for fifth in range(1, 6))]
    return Table("Shares of tokens by fifth of the policy's entropy", head, rows, 2) if rows else None


def _steps(table: pd.DataFrame) -> Table | None:
    rows: list[Row] = [
        [
            f"{row.step}",
            f"{row.n:,}",
            *(amount(v, sign=False) for v in (row.grad_norm, row.logged_grad_norm)),
            *(amount(v, sign=False) for v in (row.mean_length, row.logged_mean_length)),
            "–" if pd.isna(row.distance) else f"{amount(100 * row.distance, sign=False)} %",
        ]
        for row in table.head(_TOKENS).itertuples()
    ]
    head = ["step", "samples", "gradient norm", "logged", "mean length (tokens)", "logged", "distance to checkpoint"]
    return Table("The replay beside what the run logged and saved", head, rows) if rows else None


def _pieces(one: Read) -> list[Cell]:
    """At most _TOKENS tokens around the one with the largest share; those that carry much of it have a shade."""
    table = one.tokens
    if table.empty:
        return [Cell(shortened(one.response, _PROMPT))]
    size = table.share.abs().to_numpy()
    largest, first = float(size.max()), max(0, min(int(size.argmax()) - _TOKENS // 2, len(table) - _TOKENS))
    shades = np.ceil(_MARKS * size / largest - 0.5) if largest > 0 else np.zeros(len(size))
    found = [Cell("…")] if first else []
    for row, shade in list(zip(table.itertuples(), shades.astype(int), strict=True))[first : first + _TOKENS]:
        text = shortened(str(row.token), _TOKEN)
        if shade == 0 and found and found[-1].shade == 0:
            found[-1] = Cell(found[-1].text + text)
        else:
            found.append(Cell(text, amount(row.share), shade=int(shade), against=row.share < 0))
    return [*found, Cell("…")] if first + _TOKENS < len(table) else found


_WIDTH = 118
"""Characters of a line."""


def attribution_text(found: Attribution, n: int = 10) -> str:
    """The finding, the table of bands, n samples to read, what the log shows, and how far to believe it.

    Where the gate is closed, the reason stands in the place of all of these but the last.
    """
    gate = str(found.info["gate"])
    lines = [visible(lead(found)), *(line for one in statement(found).sentences for line in _wrapped(one))]
    lines += [] if gate else _answer(found, n)
    lines += ["", "How far to believe it"]
    for said in belief(found):
        lines += _wrapped(f"{'beware: ' if said.warns else ''}{said.text}")
    lines += _wrapped(f"settings: {found.info['recipe']}")
    return "\n".join([*lines, *(line for note in found.info["notes"] for line in _wrapped(f"note: {note}"))])


def _answer(found: Attribution, n: int) -> Iterator[str]:
    every = [moved(found, name) for name in told_targets(found)]
    bands: list[Row] = []
    for one in every:
        if len(one.bands):
            flag = f" (beware: {one.unexplained} unexplained by shares)" if one.flagged else ""
            bands += [[f"{one.name}: {one.change}{flag}"], *_bands(one)]
    along = [row for block in _along(found, {}) for row in ([block.name], *block.rows)]
    table = Table("What easy, medium and hard samples did", ["", *_HEAD[2:]], bands) if bands else None
    yield from ("", *table_text(table).splitlines())
    for sentence in meaning(found):
        yield from _wrapped(sentence)
    samples = to_read(found, n)
    yield from ("", *table_text(_to_read(samples)).splitlines())
    for sample in samples:
        if sample.carried:
            yield from _wrapped(f"row {sample.trajectory} is carried by {sample.carried}")
    thirds = Table("In the log, by thirds of the run", ["", *_thirds(found), "first to last third"], along)
    for text in map(table_text, (thirds if along else None, _levels(found), _lone(every), _signal(found, every))):
        yield from ("", *text.splitlines()) if text else ()
    yield from _wrapped(FIFTHS)


def _wrapped(text: str) -> list[str]:
    shown = visible(text).replace("\n", "⏎")
    return textwrap.wrap(shown, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
