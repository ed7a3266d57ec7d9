"""Difficulty-adaptive sampling: problems drawn by the current model's pass rate.

Every problem has a Beta estimate of its pass rate, (a, b), which starts at `CurriculumConfig.prior`. A group with s
successes of n updates it with forgetting γ, because the model moves: a ← γ a + s, b ← γ b + n − s. There are many
problems and few tries. So the recent pass rate of a problem's level, kept in the same way, counts as `level_responses`
further responses. A problem's weight is what its rewards can teach,

    E[(p − g) (1 − p)], or 0 where that is negative,     p ~ Beta(a, b)

p (1 − p) is the variance of its rewards. A share g of the responses is right by guessing, and a lucky guess teaches
nothing. With g > 0, problems that the model only guesses wait; without it their lucky groups would be drawn as often as
useful ones. A share `explore` of the draws is uniform, which finds out when they come within reach. A problem whose
group agreed rests for as many batches as its groups have agreed in a row. A problem with reformulations in the set is
admitted when the mean estimate of these reaches `admit_above`.

TRL's data loader asks for a batch before the last one is scored: estimates are one batch old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tsae.errors import TsaeError, refuse
from tsae.rl.config import CurriculumConfig

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class _Group:
    """One group of responses."""

    step: int
    problem: int
    successes: int
    n: int
    estimate: float
    """Expected pass rate before it."""


class Curriculum:
    """Estimates of pass rates, and the choice of the problems to draw next.

    Args:
        problem_ids: of all problems that may be drawn.
        group_size: responses per problem, G.
        config: defaults of `CurriculumConfig`.
        levels: name of a problem's level by its id, such as "hard"; for the log, the figure and pooled estimates.
            Problems whose level is missing have the level "all".
        parents: id of the original problem by the id of its reformulation.

    Raises:
        TsaeError: where an id is not a text or comes twice, there are no problems, or parents form a circle.
    """

    def __init__(
        self,
        problem_ids: Sequence[str],
        group_size: int,
        config: CurriculumConfig | None = None,
        *,
        levels: Mapping[str, str] | None = None,
        parents: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.group_size = config or CurriculumConfig(), group_size
        self.ids = list(problem_ids)
        self.index = {problem: number for number, problem in enumerate(self.ids)}
        odd = next((problem for problem in self.ids if not isinstance(problem, str)), "")
        what = f"the problem id {odd!r} is a {type(odd).__name__}, expected a text"
        refuse(
            "Curriculum",
            (not isinstance(odd, str), what, "Give the ids of read_problems."),
            (not self.ids, "no problems", "Give at least one."),
            (len(self.index) < len(self.ids), "problem ids come twice", "Make ids unique."),
        )
        known = {problem: level for problem, level in (levels or {}).items() if not pd.isna(level)}
        self._has_levels = bool(known)
        names = [known.get(problem, "all") for problem in self.ids]
        self.level, self.level_names = pd.factorize(np.array(names, dtype=object))
        try:
            TopologicalSorter({child: [parent] for child, parent in (parents or {}).items()}).prepare()
        except CycleError as error:  # None of them would ever be admitted.
            what = f"{error.args[1][0]!r} is a reformulation of itself, by its parents"
            raise TsaeError(what, where="Curriculum", fix="Correct parents.") from error
        children: dict[int, list[int]] = {}
        for child, parent in (parents or {}).items():
            if child in self.index and parent in self.index:
                children.setdefault(self.index[parent], []).append(self.index[child])
        self.children = {parent: np.array(found) for parent, found in children.items()}
        self.successes = np.full(len(self.ids), float(self.config.prior[0]))
        self.failures = np.full(len(self.ids), float(self.config.prior[1]))
        self.of_level = np.tile(np.array(self.config.prior, dtype=float), (len(self.level_names), 1))
        self.in_agreement = np.zeros(len(self.ids), dtype=np.int64)
        self.rest_until = np.zeros(len(self.ids), dtype=np.int64)
        self.step = 0
        self.groups: list[_Group] = []
        self._rng = np.random.default_rng(self.config.seed)

    def estimates(self) -> np.ndarray:
        """(n_problems,) expected pass rates."""
        a, b = self._pooled()
        return a / (a + b)

    def _pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Each problem's (a, b), with the evidence from its level."""
        rate = (self.of_level[:, 0] / self.of_level.sum(1))[self.level]
        share = self.config.level_responses if self._has_levels else 0.0
        return self.successes + share * rate, self.failures + share * (1 - rate)

    def weights(self) -> np.ndarray:
        """(n_problems,) chances to be drawn next, which add up to 1."""
        a, b = self._pooled()
        guess, total = self.config.guess, a + b
        rate, square = a / total, a * (a + 1) / (total * (total + 1))
        teaches = np.clip((1 + guess) * rate - square - guess, 0, 1)
        admitted = self.admitted()
        wanted = teaches * admitted * (self.rest_until <= self.step)
        if wanted.sum() <= 0:
            wanted = admitted.astype(float)
        explore = self.config.explore
        return (1 - explore) * wanted / wanted.sum() + explore * admitted / admitted.sum()

    def admitted(self) -> np.ndarray:
        """(n_problems,) bool: problems without reformulations, and those whose reformulations are solved."""
        estimates, admitted = self.estimates(), np.ones(len(self.ids), dtype=bool)
        for parent, found in self.children.items():
            admitted[parent] = estimates[found].mean() >= self.config.admit_above
        return admitted

    def draw(self, n: int) -> list[int]:
        """Indices of n problems, all different where there are enough."""
        weights = self.weights()
        replace = int((weights > 0).sum()) < n
        return [int(i) for i in self._rng.choice(len(self.ids), size=n, replace=replace, p=weights)]

    def update(self, problem_ids: Sequence[str], rewards: Sequence[float]) -> None:
        """Take in one batch.

        Args:
            problem_ids: (n,) of the responses.
            rewards: (n,) of the one reward function that says what is right; above `success_above` is a success. A
                sum with other rewards would count well-formed wrong answers as successes.

        Raises:
            TsaeError: where a reward is not finite or a problem unknown.
        """
        values = np.asarray(rewards, dtype=float)
        unknown = [one for one in problem_ids if not isinstance(one, str) or one not in self.index]
        refuse(
            "Curriculum.update",
            (not np.isfinite(values).all(), "a reward is not finite", "Verify every response."),
            (unknown, f"unknown problem {next(iter(unknown), None)!r}", None),
        )
        estimates = self.estimates()
        frame = pd.DataFrame({"id": list(problem_ids), "success": values > self.config.success_above})
        keep = self.config.forgetting
        for problem_id, found in frame.groupby("id", sort=False).success:
            number, s, n = self.index[str(problem_id)], int(found.sum()), len(found)
            self.groups.append(_Group(self.step, number, s, n, float(estimates[number])))
            self.successes[number] = keep * self.successes[number] + s
            self.failures[number] = keep * self.failures[number] + n - s
            level = self.of_level[self.level[number]]
            level[:] = keep * level + (s, n - s)
            self.in_agreement[number] = self.in_agreement[number] + 1 if s in (0, n) else 0
            self.rest_until[number] = self.step + 1 + self.in_agreement[number]
        self.step += 1

    def history(self) -> pd.DataFrame:
        """One row per group: step, problem_id, level, successes, n, estimate (before it), mixed (both outcomes)."""
        table = pd.DataFrame(self.groups, columns=["step", "problem", "successes", "n", "estimate"])
        table.insert(1, "problem_id", [self.ids[i] for i in table.problem])
        table.insert(2, "level", [str(self.level_names[self.level[i]]) for i in table.problem])
        table["mixed"] = (table.successes > 0) & (table.successes < table.n)
        return table.drop(columns="problem")

    def plot(self, window: int = 10) -> go.Figure:
        """Figure of what was drawn: share of the draws by level above, pass rate and mixed groups below."""
        return draw_history(self.history(), window)

    def check(self, dataset: Any) -> None:
        """Check that a TRL data set has these problems.

        Raises:
            TsaeError: where the column problem_id is missing or an id is unknown.
        """
        there = "problem_id" in dataset.column_names
        ids = list(dataset["problem_id"]) if there else []
        refuse(
            "train_dataset",
            (not there, "has no column problem_id", "Add the ids of the curriculum."),
            (
                len(set(ids)) < len(ids) or set(ids) != set(self.ids),
                f"has {len(set(ids))} problems in {len(ids)} rows, the curriculum {len(self.ids)}; "
                f"{len(set(ids) & set(self.ids))} ids are the same",
                "Make both of the same problems, one row a problem.",
            ),
        )


class CurriculumSampler:
    """Takes the place of TRL's RepeatSampler: chooses rows one batch at a time.

    Args:
        curriculum: its `draw` chooses.
        dataset: a data set with the column problem_id.
        group_size: repeats of each row within a batch.
        groups: problems in a batch.
        repeats: repeats of each batch; TRL needs them to reuse generations.
        batches: number of batches; None for as many draws as there are problems.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        dataset: Any,
        *,
        group_size: int,
        groups: int,
        repeats: int = 1,
        batches: int | None = None,
    ) -> None:
        row_of = {problem: row for row, problem in enumerate(dataset["problem_id"])}
        self.rows = [row_of[problem] for problem in curriculum.ids]
        self.curriculum, self.group_size, self.groups, self.repeats = curriculum, group_size, groups, repeats
        self.batches = batches or max(1, len(self.rows) // groups)

    def __len__(self) -> int:
        return self.batches * self.groups * self.group_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.batches):
            drawn = [self.rows[number] for number in self.curriculum.draw(self.groups)]
            for _ in range(self.repeats):
                for row in drawn:
                    yield from [row] * self.group_size


def draw_history(history: pd.DataFrame, window: int = 10) -> go.Figure:
    """The figure of `Curriculum.plot`, from a table of `Curriculum.history`; lines are means of `window` steps."""
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    counts = history.groupby(["step", "level"]).size().unstack(fill_value=0)
    shares = counts.div(counts.sum(axis=1), axis=0).rolling(window, min_periods=1).mean()
    # Levels are in order, and may be many.
    colours = sample_colorscale("Viridis", len(shares.columns), low=0.95, high=0.05)
    for level, colour in zip(shares.columns, colours, strict=True):
        look = {"stackgroup": "levels", "fillcolor": colour, "line": {"color": "white", "width": 0.5}}
        figure.add_trace(go.Scatter(x=shares.index, y=shares[level], name=str(level), **look), row=1, col=1)
    by_step = history.groupby("step").agg(s=("successes", "sum"), n=("n", "sum"), mixed=("mixed", "mean"))
    lines = {"pass rate": by_step.s / by_step.n, "groups with both outcomes": by_step.mixed}
    for name, line in lines.items():
        smooth = line.rolling(window, min_periods=1).mean()
        figure.add_trace(go.Scatter(x=smooth.index, y=smooth, name=name, mode="lines"), row=2, col=1)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title_text="share of draws", row=1, col=1)
    figure.update_yaxes(title_text="of the drawn", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    return figure
