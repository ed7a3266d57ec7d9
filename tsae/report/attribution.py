"""Which samples did it: the words, the figure, the section of the page, and what `tsae attribute` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, log10
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tsae.attribution.attribution import Attribution
from tsae.diff.feature_diff import FeatureDiff
from tsae.report.figures.layout import finish, label_rows, panels, tiles
from tsae.report.story.statements import Statement
from tsae.report.tables import Cell, Table, table_text
from tsae.report.text import capitalised, count, figure_text, percent, shortened, visible
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
    unit: str
    """Of the numbers, with a space before it; empty for activations."""
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
    label = found.info.get("bands")
    of = [f"Bands are the {label}."] if label else []
    return (*MEANING, *of, *([TRAINED_ON] if measured else []))


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
    """What is said of a target."""
    row = found.targets.set_index("target").loc[name]
    unit = " nats" if _RIGHT in name or name.startswith(_LIKELY) else ""
    groups = found.table(name)
    lone = groups.kind == "lone success"
    return Moved(
        name,
        shown_name(found, name),
        f"{amount(row.before, sign=False)} → {amount(row.after, sign=False)}{unit} ({amount(row.realised)})",
        unit,
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


def signal(found: Attribution, name: str) -> pd.DataFrame:
    """Where in the text the shares in a target are, by band and fifth of the entropy; empty if not measured."""
    table = found.entropy[found.entropy.target == name]
    known = list(dict.fromkeys(table.band))
    bands = [*[band for band in BANDS if band in known], *[band for band in known if band not in BANDS]]
    wide = table.pivot_table(index="band", columns="fifth", values="share", aggfunc="sum")
    return wide.reindex(index=bands, columns=range(1, 6))


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


def pushing(
    found: Attribution, features: Iterable[int], n: int = 2
) -> list[tuple[int, str, list[tuple[Read, list[Piece]]]]]:
    """Of these features, those that are targets: their change, and the n samples with the largest shares either way."""
    names = {feature: f"{_FEATURE}{feature}" for feature in features if not found.info["gate"]}
    chosen = {feature: name for feature, name in names.items() if name in set(found.targets.target)}
    rows = {feature: found.of_target(name, n).trajectory for feature, name in chosen.items()}
    return [
        (
            feature,
            moved(found, name).change,
            [(one := _read(found, int(row), name), _pieces(one)) for row in rows[feature]],
        )
        for feature, name in chosen.items()
    ]


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
        share = f"share {amount(row.share)}{one.unit}{_other_run(row, one.unit)}"
        told.append(f"{capitalised(str(row.band))} samples ({row.n:,}): {share}.")
    told.append(
        "The log has no bands, so that samples cannot be told apart by difficulty." if one.bands.empty else ONE_RUN
    )
    return Statement(heading, tuple(told), "samples")


def _other_run(row: Any, unit: str) -> str:
    """“; in a run without them +0.2 nats, with them alone +0.4 nats (replayed)”, as far as they are known."""
    known = {"in a run without them": row.without, "with them alone": row.alone}
    parts = [f"{what} {amount(value)}{unit}" for what, value in known.items() if np.isfinite(value)]
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


_MAX_TARGETS, _ROW, _SMALL = 6, 24, 1e-3
_COLUMNS = ("share", "without", "alone")


def attribution_figure(found: Attribution) -> go.Figure | None:
    """A column for each of the first targets: what bands did above, where in the text below, as heat maps."""
    names = [name for name in told_targets(found, 2) if len(moved(found, name).bands)]
    if not names or found.info["gate"]:
        return None
    # Where one target alone has tokens, a second row of panels would be half empty.
    names.sort(key=lambda name: signal(found, name).empty)
    mixed = len(signal(found, names[0])) and signal(found, names[-1]).empty
    names = names[: _MAX_TARGETS // 2 if mixed else _MAX_TARGETS]
    every = [moved(found, name).bands for name in names]
    bands = list(every[0].band)
    tokens = [signal(found, name) for name in names]
    heads = ["<b>bands</b>", *(["<b>tokens</b>"] if any(map(len, tokens)) else [])]
    figure, cells, height = panels(
        [f"<b>{figure_text(shown_name(found, name), 40)}</b>" for name in names],
        3,
        panel=[_ROW * len(bands)] * len(heads),
        gap=52,
        horizontal=0.02,
        heads=heads,
        beside=True,
        align="left",
        least=250,
        shared_yaxes=True,
    )
    for place, (name, table) in enumerate(zip(names, every, strict=True)):
        grids = [(table[list(_COLUMNS)].to_numpy(dtype=float), list(_COLUMNS), "{}")]
        if len(tokens[place]):
            of_tokens = tokens[place].reindex(bands).to_numpy()
            grids.append((of_tokens, [str(fifth) for fifth in range(1, 6)], "share of tokens in fifth {}"))
        for p, (values, columns, what) in enumerate(grids):
            cell = cells[len(heads) * place + p]
            limit = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
            hover = [
                [
                    f"{figure_text(shown_name(found, name))}<br>{figure_text(band)} samples, {what.format(column)}: "
                    f"{amount(values[i, j])}"
                    for j, column in enumerate(columns)
                ]
                for i, band in enumerate(bands)
            ]
            text = [[_tile(v, limit) for v in line] for line in values]
            figure.add_trace(tiles(values, list(range(len(columns))), text, hover, limit), **cell)
            figure.update_xaxes(tickvals=list(range(len(columns))), ticktext=columns, ticks="", showgrid=False, **cell)
            label_rows(figure, [figure_text(band, 18) for band in bands], edge=0.5, **cell)
    return finish(figure, height=height + 100, left=100, top=56)


def _tile(value: float, limit: float) -> str:
    """With the decimals that two digits of the largest of its panel need; hovering tells more."""
    if np.isnan(value):
        return ""
    decimals = max(0, 1 - floor(log10(limit)))
    text = f"{value:+.1e}" if limit < _SMALL else f"{value:+.{decimals}f}"
    return text.replace("-", "−") if abs(value) > limit / 100 else "0"


_MAX_GROUPS, _SAMPLES = 20, 10
_PROMPT, _TOKENS, _NAME = 2000, 400, 40
"""Characters of a prompt, tokens of a response, characters of a token, and of a name."""
_MARKS = 9
"""Shades of tokens."""
_STRANGE = "Features here are of another SAE than those of the diff: their numbers do not mean the features above."


class Piece(NamedTuple):
    """A stretch of a response."""

    text: str
    shade: int = 0
    """1 to 9 by the size of its share; 0 where that is small."""
    against: bool = False
    """Whether it lowered the target."""
    share: str = ""


def attributed(found: Attribution, diff: FeatureDiff) -> dict[str, Any]:
    """All that the section shows but its figure; where `gate` says why, belief, recipe and notes alone are shown.

    bands are targets, each with the rows of its bands; samples are to be read, each with its prompt and its response.
    """
    sae, own = found.info.get("sae"), (diff.info.get("sae") or {}).get("weights")
    same_sae = sae is not None and sae == own
    named = any(name.startswith("feature ") for name in found.targets.target)
    strange = [Said(_STRANGE, warns=True)] if named and None not in (sae, own) and not same_sae else []
    described = {f"feature {i}": (int(i), str(diff.features.responds_to[i])) for i in diff.features.index if same_sae}
    gate = str(found.info["gate"])
    every = [] if gate else [moved(found, name) for name in told_targets(found)]
    samples = [] if gate else to_read(found, _SAMPLES)
    return {
        "gate": gate,
        "lead": lead(found),
        "meaning": meaning(found),
        "bands": [(_target(one, described), one, [_row(r.band, r) for r in one.bands.itertuples()]) for one in every],
        "lone": _lone(every),
        "signal": _signal(found, every),
        "samples": [(one, shortened(one.prompt, _PROMPT), _pieces(one)) for one in samples],
        "others": [(one, _others(one.others.head(_MAX_GROUPS))) for one in every if len(one.others)],
        "belief": (strange if not gate else []) + belief(found),
        "steps": _steps(found.steps),
        "recipe": str(found.info["recipe"]),
        "notes": list(found.info["notes"]),
    }


def _target(one: Moved, described: Mapping[str, tuple[int, str]]) -> Cell:
    """A feature of the diff links to its card."""
    if one.target in described:
        feature, responds_to = described[one.target]
        return Cell(f" “{responds_to}”", tone="isolated", feature=feature)
    return Cell(shortened(one.name, 2 * _NAME), tone="isolated")


def _row(name: str, row: Any) -> list[str | Cell]:
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
    rows: list[list[str | Cell]] = []
    for one in every:
        rows += [
            [Cell(one.name, tone="isolated"), Cell(str(band), tone="isolated"), *map(amount, line)]
            for band, line in signal(found, one.target).iterrows()
        ]
    head = ["target", "samples", *(f"fifth {fifth}" for fifth in range(1, 6))]
    return Table("Shares of tokens by fifth of the policy's entropy", head, rows, 2) if rows else None


def _steps(table: pd.DataFrame) -> Table | None:
    rows: list[list[str | Cell]] = [
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


def _pieces(one: Read) -> list[Piece]:
    """At most _TOKENS tokens around the one with the largest share; those that carry much of it have a shade."""
    table = one.tokens
    if table.empty:
        return [Piece(shortened(one.response, _PROMPT))]
    size = table.share.abs().to_numpy()
    largest, first = float(size.max()), max(0, min(int(size.argmax()) - _TOKENS // 2, len(table) - _TOKENS))
    shades = np.ceil(_MARKS * size / largest - 0.5) if largest > 0 else np.zeros(len(size))
    found = [Piece("…")] if first else []
    for row, shade in list(zip(table.itertuples(), shades.astype(int), strict=True))[first : first + _TOKENS]:
        text = shortened(str(row.token), _TOKEN)
        if shade == 0 and found and found[-1].shade == 0:
            found[-1] = Piece(found[-1].text + text)
        else:
            found.append(Piece(text, int(shade), row.share < 0, amount(row.share)))
    return [*found, Piece("…")] if first + _TOKENS < len(table) else found


_LINE, _WIDTH = 90, 118
"""Characters of a response, and of a line."""


def attribution_text(found: Attribution, n: int = 10) -> str:
    """The three bands by target, lone successes, where the signal sits, n samples to read, and how far to believe it.

    Where the gate is closed, the reason stands in the place of all of these but the last.
    """
    gate = str(found.info["gate"])
    lines = [visible(lead(found)), *_wrapped(f"settings: {found.info['recipe']}")]
    lines += ["", *_wrapped(gate, "")] if gate else [*_answer(found, n)]
    lines += ["", "How far to believe it"]
    for said in belief(found):
        lines += _wrapped(f"{'beware: ' if said.warns else ''}{said.text}")
    return "\n".join([*lines, *(line for note in found.info["notes"] for line in _wrapped(f"note: {note}"))])


def _answer(found: Attribution, n: int) -> Iterator[str]:
    for sentence in meaning(found):
        yield from _wrapped(sentence)
    every = [moved(found, name) for name in told_targets(found)]
    bands: list[list[str | Cell]] = []
    for one in every:
        if len(one.bands):
            flag = f" (beware: {one.unexplained} unexplained by shares)" if one.flagged else ""
            bands.append([f"{one.name}: {one.change}{flag}"])
            bands += [_row(f"  {row.band} samples", row) for row in one.bands.itertuples()]
    table = Table("Easy, medium and hard samples", ["", *_CELLS], bands) if bands else None
    for text in map(table_text, (table, _lone(every), _signal(found, every))):
        yield from ("", *text.splitlines()) if text else ()
    yield from _wrapped(FIFTHS)
    samples = to_read(found, n)
    if samples:
        yield from ("", "Samples to read, with the tokens that carry their share")
    for sample in samples:
        yield from _sample(sample)


def _sample(one: Read) -> Iterator[str]:
    yield from _wrapped(f"row {one.trajectory}, {one.about}: share {one.share}")
    if one.response:
        yield f"      {shortened(visible(one.response).replace(chr(10), '⏎'), _LINE)}"
    if one.carried:
        yield from _wrapped(f"carried by {one.carried}", "      ")


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    shown = visible(text).replace("\n", "⏎")
    return textwrap.wrap(shown, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
