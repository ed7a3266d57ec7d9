"""Claims on what a model answers: success by band (a, b, k, n), and what responses do along a training (c, d, j)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import hypergeom

from tsae.base.statistics import FEWEST, change_interval
from tsae.claims.evidence import SAMPLE, Evidence, Missing, by_problem, need, success_rates
from tsae.claims.judging import (
    CLAIMS,
    CONFIDENCE,
    REPLAYED,
    Judgement,
    Part,
    between,
    left_out,
    part,
    those_that_can,
    within,
)
from tsae.rollouts.behaviours import measures, with_behaviours
from tsae.rollouts.config import BandCutoffs
from tsae.rollouts.difficulty import estimate
from tsae.rollouts.logs.entry import hash64
from tsae.rollouts.rewards import group_names
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_SMALL = 0.1
"""Share of a log below which a band counts as hardly trained on."""
_LARGE_K = 8
"""Smallest k that counts as large."""
_SAME = f"`{SAMPLE}`, which lets the base and every checkpoint answer the same problems"


def inverted_u(run: Evidence) -> Judgement:
    """a: paired by problem between runs that were trained on bands; in one run, gain by the band of the problem."""
    claim = CLAIMS["a"]
    on = {c: band for c in run.diff.final_checkpoints if (band := run.trained_on(c)) is not None}
    trained = set(on.values())
    if "medium" in trained and len(trained) > 1:
        gain = {c: run.success(c) for c in on}
        parts = [
            within(f"{c} (medium) gained more than {other} ({band}).", gain[c], gain[other], _SAME)
            for c in on
            for other, band in on.items()
            if on[c] == "medium" and band != "medium"
        ]
        lacking = next((band for band in BANDS if band not in trained), None)
        told = f"No run was trained on {lacking} problems alone." if lacking else ""
        return Judgement(claim, tuple(parts), caveat=told, whole=not lacking)
    run.need_bands(*BANDS)
    try:
        shares = run.training_bands
    except Missing:
        shares = None
    if shares is not None:
        told = ", ".join(f"{band} {100 * share:.0f} %" for band, share in shares.items())
        mixture = f"a training on problems of all bands, or one on each (of this one's responses: {told})"
        add = "a training on such a mixture, or one a band, all in one series.json (trained_on)"
        need(shares.min() >= _SMALL, mixture, add)
    parts = []
    for c in run.diff.final_checkpoints:
        gains = {band: (run.success(c, band) - run.success(run.diff.base, band)).dropna() for band in BANDS}
        told = f"{c} gained more on medium problems than on {{}} ones."
        parts += [between(told.format(band), gains["medium"], gains[band], _SAME) for band in ("easy", "hard")]
    caveat = "Gains on problems of a band stand in for gains by training on it: easy problems, which the base solves, "
    return Judgement(claim, tuple(parts), caveat=f"{caveat}cannot gain much.")


def hard_harms(run: Evidence) -> Judgement:
    """b: success on easy and medium problems, base − checkpoint, of runs that were trained on hard ones."""
    found = run.trained_mostly_on("hard")
    run.need_bands()
    makers = [
        partial(within, f"{c} solves fewer {band} problems than the base.", run.success(run.diff.base, band),
                run.success(c, band), f"problems of that band, and {_SAME}")
        for c in found
        for band in ("easy", "medium")
    ]  # fmt: skip
    parts, left = those_that_can(makers)
    return Judgement(CLAIMS["b"], parts, caveat=left.strip(), whole=not left)


def difficulty_drifts(run: Evidence) -> Judgement:
    """k: problems that change band beyond chance, between the halves of a log or from the base to a checkpoint.

    A problem's value is 1 if its band changed, 0 if not, − the chance of a change if both sides solve it equally
    often: then its successes fall on the sides as the hypergeometric distribution has it.
    """
    caveat = "Whether an adaptive curriculum beats a static one cannot be tested on one run: it needs both."
    try:
        outline = run.outline
        middle = (outline.step.min() + outline.step.max()) / 2
        sides = [outline[outline.step <= middle], outline[outline.step > middle]]
        parts = [_drift("Between the halves of the log", *map(_counts, sides))]
    except Missing:
        if not run.fresh:
            raise
        frame, base = run.answers.frame, run.diff.base
        parts = [
            _drift(f"Between the base and {c}", *(_counts(frame[frame.policy == who]) for who in (base, c)))
            for c in run.diff.final_checkpoints
        ]
    return Judgement(CLAIMS["k"], tuple(parts), caveat=caveat, whole=False)


def base_overtakes(run: Evidence) -> Judgement:
    """n: pass@k for the largest k that base and checkpoint have responses for, of checkpoints that lead at pass@1."""
    parts: list[Part] = []
    reasons: list[Missing] = []
    sizes, behind = [], []
    frame, base = run.answers.frame, run.diff.base
    for c in run.diff.final_checkpoints:
        of_base, of_c = (_counts(frame[frame.policy == who]) for who in (base, c))
        n = pd.concat([of_base.n, of_c.n], axis=1, join="inner").min(axis=1).sort_values(ascending=False)
        k = int(n.iloc[FEWEST - 1]) if len(n) >= FEWEST else 0
        if k < _LARGE_K:
            few = f"{_LARGE_K} responses or more of the base and of {c} to {FEWEST} problems or more (there are {k})"
            reasons.append(Missing(few, "`tsae run … --sample 64 --to OTHER`"))
            continue
        if not within("ahead", _pass_at(of_c, 1), _pass_at(of_base, 1), _SAME).holds:
            behind.append(c)
            continue
        sizes.append(k)
        parts.append(within(f"At pass@{k} the base is ahead of {c}.", _pass_at(of_base, k), _pass_at(of_c, k), _SAME))
    if not parts and reasons:
        raise reasons[0]
    ahead = f"a checkpoint that is clearly ahead at pass@1 ({', '.join(behind)}: none)"
    need(parts, ahead, "a training that gains")
    told = f"Not ahead at pass@1, so that there is nothing to overtake: {', '.join(behind)}. " if behind else ""
    small = f"k is {min(sizes)} here; the claim is on k in the hundreds." if min(sizes) < 100 else ""
    left = left_out(reasons)
    return Judgement(CLAIMS["n"], tuple(parts), caveat=(left + told + small).strip(), whole=not left)


def _drift(between_what: str, before: pd.DataFrame, after: pd.DataFrame) -> Part:
    """More problems change band than by chance."""
    both = before.add_suffix("_a").join(after.add_suffix("_b"), how="inner")
    both = both[(both.n_a > 1) & (both.n_b > 1)]
    values = np.array([_excess(int(r.n_a), int(r.right_a), int(r.n_b), int(r.right_b)) for r in both.itertuples()])
    statement = f"{between_what} more problems change band than by chance."
    return part(
        statement, values, "a log that asks its problems again (two epochs or more), with several responses each"
    )


def _excess(n_a: int, right_a: int, n_b: int, right_b: int) -> float:
    """1 if the band changed, else 0; − the probability of that if both sides had one pass rate."""
    band, solved = BandCutoffs().band, right_a + right_b
    dealt = np.arange(max(0, solved - n_b), min(n_a, solved) + 1)
    chance = hypergeom.pmf(dealt, n_a + n_b, solved, n_a)
    moved = band(dealt / n_a) != band((solved - dealt) / n_b)
    return float(moved[right_a - dealt[0]]) - float(chance[moved].sum())


def _counts(frame: pd.DataFrame) -> pd.DataFrame:
    """Responses of known outcome and successes of every problem: n, right."""
    known = frame[frame.outcome != "unknown"]
    grouped = (known.outcome == "success").groupby(known.problem_id)
    return pd.DataFrame({"n": grouped.size(), "right": grouped.sum()})


def _pass_at(counts: pd.DataFrame, k: int) -> pd.Series:
    return pd.Series(estimate(counts.n.to_numpy(), counts.right.to_numpy(), k), index=counts.index)


_GROUP = 4
"""Fewest responses of a group in which a success can be called lone."""
_BLOCKS = 6
"""Parts into which the steps of a log are cut."""
_FEWEST_STEPS = 4
_WINS, _ALONE, _BETTER = 0.8, 0.95, 0.1
"""Share from which on a format has won; share from which on there was no other to begin with; lead in success that
would decide."""
_LONGER = "a longer log, with every step (`tsae rollouts formats` says what to switch on)"
_SIGNS = (
    {"skipped_steps": "more steps are skipped", "direct_answer": "answers come directly more often"},
    {"repeated_answer": "answers are repeated more often"},
)
"""What stands for skipped computation and for repetition: the first that a run has."""
Place = tuple[float, Any]
"""A step, and what was answered there: a policy, or rows of a log."""


def lone_successes(run: Evidence) -> Judgement:
    """c: lone successes of a group against successes of groups with several, by problem."""
    outline = run.outline
    outline = outline[outline.outcome != "unknown"]
    right, group = outline.outcome == "success", pd.Series(_groups(outline), index=outline.index)
    size, successes = group.map(group.value_counts()), right.groupby(group).transform("sum")
    lone = outline.index[right & (successes == 1) & (size >= _GROUP)]
    others = outline.index[right & (successes > 1) & (size >= _GROUP)]
    need(
        len(lone) and len(others),
        f"groups of {_GROUP} responses or more with one success, and others with several (there are {len(lone)} lone "
        f"successes and {len(others)} others)",
        _LONGER,
    )
    frames = [_described(run.logged(rows)).frame for rows in (lone, others)]
    for frame in frames:
        frame["shorter"] = _shorter(frame, outline, group)
    said = {
        "direct_answer": "Lone successes answer directly more often than other successes.",
        "skipped_steps": "Lone successes skip more steps than other successes.",
        "shorter": "Lone successes are shorter than the median of their group more often than other successes.",
    }
    parts, left = those_that_can(
        [
            partial(between, told, by_problem(frames[0], name), by_problem(frames[1], name), _LONGER)
            for name, told in said.items()
            if all(name in frame for frame in frames)
        ]
    )
    return Judgement(
        CLAIMS["c"],
        parts,
        caveat=f"{left}Whether this does the damage needs trainings without lone successes, or without dividing by the "
        "deviation (TRL: scale_rewards=False).",
        whole=False,
    )


def behaviour_first(run: Evidence) -> Judgement:
    """d: at the last checkpoint, or block of log steps, before accuracy fell: had behaviour moved already?"""
    found: list[Part] = []
    caveats: list[str] = []
    reasons: list[Missing] = []
    rollouts = run.at_steps
    for name, path in run.steps(rollouts) if run.fresh else ():
        accuracy = {policy: run.success(policy, of=rollouts) for _, policy in path}
        try:
            before = _before_the_fall(path, partial(_fell, accuracy), name)
            start, then = (_described(rollouts.where(policy=policy)) for policy in (path[0][1], before[1]))
            parts, left = _moved(start, then, f"At step {before[0]} of {name}, before accuracy fell", within)
        except Missing as reason:
            reasons.append(reason)
            continue
        found += parts
        caveats += [left] if left else []
    if not found and not reasons:
        outline = run.outline
        blocks = _blocks(outline)
        before = _before_the_fall(blocks, partial(_fell_in_log, outline), "the log")
        start, then = (_described(run.logged(rows)) for rows in (blocks[0][1], before[1]))
        parts, left = _moved(start, then, f"From step {before[0]:g}, before accuracy fell", between)
        found, caveats = list(parts), [left] if left else []
    if not found:
        raise reasons[0]
    told = "".join(dict.fromkeys([*caveats, *(left_out([reason]) for reason in reasons)])).strip()
    return Judgement(CLAIMS["d"], tuple(found), caveat=told, whole=not told)


def one_format_wins(run: Evidence) -> Judgement:
    """j: the top format at the end of the first epoch, and how successful it was at the start.

    Which format is on top is seen in one half of the last problems, and how many have it is counted in the other: among
    formats that are as common, the top one of the very responses that are counted would lead by chance.
    """
    outline = run.outline
    asked = outline.drop_duplicates(["problem_id", "step"]).sort_values("step")
    again = asked[asked.problem_id.duplicated()]
    epoch = outline if again.empty else outline[outline.step < again.step.min()]
    steps = np.sort(epoch.step.unique())
    enough = len(steps) >= _FEWEST_STEPS
    need(enough, f"{_FEWEST_STEPS} steps or more of the first epoch (there are {len(steps)})", _LONGER)
    quarter = len(steps) // 4
    rows = [epoch.index[np.isin(epoch.step, some)] for some in (steps[:quarter], steps[-quarter:])]
    start, end = (_described(run.logged(some)).frame for some in rows)
    shares = pd.crosstab(end.problem_id, end.format, normalize="index")
    seen = sorted(shares.index, key=hash64)[::2]
    winner = str(shares.loc[seen].mean().idxmax())
    shares = shares.drop(index=seen)
    before = (start.format == winner).groupby(start.problem_id).mean()
    share = f"“{winner}” has {100 * before.mean():.0f} % of the first steps"
    varied = before.mean() < _ALONE or before.empty
    need(varied, f"responses in several formats to begin with ({share})", "a base that answers in several formats")
    right = [success_rates(start[side]) for side in (start.format != winner, start.format == winner)]
    last = f"in step {steps[-1]:g}" if quarter == 1 else f"in steps {steps[-quarter]:g} to {steps[-1]:g}"
    most = f"More than {100 * _WINS:.0f} % of responses {last} have the format “{winner}”."
    lead = f"At the start it was not by {100 * _BETTER:.0f} points more successful than the others."
    several = "a base that answers a problem in several formats"
    parts = (
        part(most, shares[winner].to_numpy(), _LONGER, margin=_WINS, same=1.0),
        between(f"It has a larger share {last} than at the start.", shares[winner], before, _LONGER),
        within(lead, right[0], right[1], several, margin=-_BETTER),
    )
    told = "No problem is asked twice in this log: all of it counts as the first epoch. " if again.empty else ""
    told += f"The format was chosen on {len(seen)} other problems of these steps."
    return Judgement(CLAIMS["j"], parts, caveat=told)


def _before_the_fall(path: Sequence[Place], fell: Callable[[Place, Place], bool], name: str) -> Place:
    """The place before the first one whose accuracy is clearly below that of the first place of all.

    Raises:
        Missing: where accuracy does not fall, or there is no place between.
    """
    fallen = next((previous for previous, place in pairwise(path) if fell(path[0], place)), None)
    if fallen is None:
        raise Missing(f"a fall of accuracy ({name}: it does not clearly fall)", "a training in which it does")
    early = f"checkpoints before accuracy falls ({name}: it has fallen at the first one after the start)"
    need(
        fallen is not path[0], early, "more frequent checkpoints (save_steps), of which all are read (`--checkpoints`)"
    )
    return fallen


def _fell(accuracy: Mapping[str, pd.Series], start: Place, then: Place) -> bool:
    """Whether accuracy fell within problems; of too few of them it is not known to."""
    differences = (accuracy[start[1]] - accuracy[then[1]]).dropna().to_numpy()
    return change_interval(differences, CONFIDENCE)[0] > 0


def _fell_in_log(outline: pd.DataFrame, start: Place, then: Place) -> bool:
    """The same, over other problems."""
    try:
        first, last = (success_rates(outline.loc[rows]) for _, rows in (start, then))
        return between("", first, last, _LONGER).holds is True
    except Missing:
        return False


def _moved(start: Rollouts, then: Rollouts, when: str, compare: Callable[..., Part]) -> tuple[tuple[Part, ...], str]:
    """Shorter responses, skipped computation and repetition at a place against the start."""
    tables = [measures(side).assign(problem_id=side.frame.problem_id) for side in (start, then)]
    first, second = ({name: by_problem(table, name) for name in table if name != "problem_id"} for table in tables)
    wanted = [(f"{when}, responses are shorter.", first["response_length"], second["response_length"])]
    for signs in _SIGNS:
        if (name := next((name for name in signs if name in first and name in second), None)) is not None:
            wanted.append((f"{when}, {signs[name]}.", second[name], first[name]))
    return those_that_can([partial(compare, *one, _LONGER) for one in wanted])


def _blocks(outline: pd.DataFrame) -> list[Place]:
    """(first step, rows) of consecutive parts of a log."""
    steps = np.sort(outline.step.unique())
    need(len(steps) >= _FEWEST_STEPS, f"{_FEWEST_STEPS} steps of a log or more (there are {len(steps)})", _LONGER)
    parts = np.array_split(steps, min(_BLOCKS, len(steps)))
    return [(float(some[0]), outline.index[np.isin(outline.step, some)]) for some in parts]


def _shorter(frame: pd.DataFrame, outline: pd.DataFrame, group: pd.Series) -> np.ndarray:
    """(n,) 1 for a response that is shorter than the median of its group, else 0."""
    median = outline.response_length.groupby(group).median()
    return (frame.response_length.to_numpy() < median[_groups(frame)].to_numpy()).astype(float)


def _groups(frame: pd.DataFrame) -> np.ndarray:
    """(n,) names of groups. Steps are numbers of one type, although a part of a log may lack some."""
    return group_names(frame.assign(step=frame.step.astype(float)))


def _described(rollouts: Rollouts) -> Rollouts:
    need(rollouts.frame.response.notna().all(), "the texts of the responses", "a log with texts")
    return with_behaviours(rollouts)


_RIGHT, _DIRECT = "right − wrong", "log-likelihood, direct answer"
_CAVEAT = (
    "From a mixed run that was replayed with the samples of one band alone: one run, so nothing is decided. Changes of "
    "the mean log-probability of a token in {what}, in nats."
)
_AGAIN = "`tsae attribute … --to ANALYSIS/attribution` of a run on all three bands, with a log of every step"


def inverted_u_replayed(run: Evidence) -> Judgement:
    """a: right − wrong over all bands, by medium samples alone − by easy or hard ones alone."""
    of = _alone(run, _RIGHT).mean()
    parts = [
        Part(f"Medium samples alone raise right responses more than {band} ones.", (of["medium"] - of[band],), REPLAYED)
        for band in ("easy", "hard")
    ]
    return _judged("a", parts, "right responses minus that in wrong ones")


def hard_harms_replayed(run: Evidence) -> Judgement:
    """b: right − wrong on easy and on medium problems falls by hard samples alone."""
    table = _alone(run, _RIGHT)
    parts = [
        Part(f"Hard samples alone lower right responses to {band} problems.", (-table["hard"][name],), REPLAYED)
        for name in table.index
        for band in ("easy", "medium")
        if name == f"{_RIGHT}, {band}"
    ]
    return _judged("b", parts, "right responses minus that in wrong ones")


def easy_direct_replayed(run: Evidence) -> Judgement:
    """e: direct answers become likelier by easy samples alone."""
    value = _alone(run, _DIRECT)["easy"].mean()
    part = Part("Easy samples alone make direct answers likelier.", (value,), REPLAYED)
    return _judged("e", [part], "direct answers minus that in other responses")


def _alone(run: Evidence, target: str) -> pd.DataFrame:
    """Change with a band's samples alone: a row a target whose name has this in it, a column a band."""
    found = run.attribution
    table = found.bands[found.bands.target.str.contains(target) & (found.bands.how == "replayed")]
    wide = table.pivot_table(index="target", columns="band", values="alone", sort=False).reindex(columns=BANDS)
    known = not found.info["gate"] and len(wide) and wide.notna().all(axis=None)
    need(known, f"replays with easy, medium and hard samples alone ({target})", _AGAIN)
    return wide


def _judged(key: str, parts: list[Part], what: str) -> Judgement:
    need(parts, "replays with one band alone, with accuracy on each band", _AGAIN)
    return Judgement(CLAIMS[key], tuple(parts), caveat=_CAVEAT.format(what=what), whole=False)
