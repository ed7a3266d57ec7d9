"""Configs of sampling, importing, bands and difficulty. Imports nothing heavy: the CLI makes its options of them."""

from __future__ import annotations

import json
import re
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from tyro.conf import UseAppendAction, arg

from tsae.base.validation import Confidence, Count, Daily, Draws, Positive, Seed, Size, UserPath, config
from tsae.errors import TsaeError, refuse
from tsae.rollouts.known_logs import LogFormat

if TYPE_CHECKING:
    import numpy as np


_Many = Annotated[int, Field(ge=1, le=10_000_000)]


@config
class SamplingConfig:
    """How responses are sampled."""

    n_samples: Daily[_Many] = 8
    """Responses per problem (the group size)."""
    temperature: Daily[Positive] = 1.0
    """Softmax temperature; training rollouts use 1."""
    max_new_tokens: Daily[_Many] = 512
    """Tokens after which a response is cut off (finish_reason "length")."""
    batch_size: _Many = 256
    """Responses generated at once."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """"chat" applies the tokenizer's chat template, "plain" does not; "auto" applies it where there is one."""
    seed: Daily[Seed] = 0
    """The same seed, batch size and machine give the same responses."""
    device: Daily[str] = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""


KEY = "TSAE_SERVER_KEY"
"""Environment variable with a server's key."""


@config
class EndpointConfig:
    """A server with the completions of the OpenAI API, and how to ask it."""

    url: Daily[str] = ""
    """Its address, such as http://localhost:8000/v1. A key is taken from $TSAE_SERVER_KEY and written nowhere."""
    model: Daily[str | None] = None
    """The checkpoint's name there; needed if the server serves several."""
    concurrency: Count = 64
    """Requests at a time."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 6
    """How often a request is sent again that met an overloaded, failing or silent server, with longer and longer
    waits."""
    first_wait: Positive = 1.0
    """Seconds before a request is sent again; doubled every time, up to a minute."""
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Seconds that a server may take for one response, a day at most."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = self.url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
        except ValueError:  # such as a port that is not a number
            known = False
        if self.url and (not known or {"?", "#"} & set(self.url)):  # A query may hold a key.
            what = f"{re.split('[?#]', self.url)[0]!r} is not an address alone, or has a query or a part after #"
            fix = f"Give one such as http://localhost:8000/v1. A key goes into ${KEY}."
            raise TsaeError(what, where=f"{type(self).__name__}.url", fix=fix)


@config
class ServerConfig(EndpointConfig):
    """An inference server that samples instead of this machine. It must offer completions as the OpenAI API does."""

    check: Size = 16
    """Responses that the checkpoint reads itself, on the device, to see whether they are its own; 0 for none."""


Unfit = Literal["empty", "unscored", "too-long", "multi-turn", "errored", "repeated", "cut"]


@config
class ColumnNames:
    """Which column of a log holds what: all there is in a plain log, extras in a trainer's."""

    prompt: str = "prompt"
    """Text of the problem before any chat template, or the messages of a conversation."""
    response: str = "response"
    """Text of the response."""
    problem_id: str = "problem_id"
    """Problem id; without it, trajectories with the same prompt and answer belong to one problem, and with "prompt"
    those with the same prompt."""
    answer: str = "answer"
    """Reference answer; only needed for a verifier."""
    correct: str = "correct"
    """Whether the response is right: true or false."""
    reward: str = "reward"
    """Reward; without it, 1 for correct and 0 for incorrect."""
    advantage: str = "advantage"
    """Advantage that the trainer used."""
    policy: str = "policy"
    """Who sampled the response; without it, the run and step."""
    step: str = "step"
    """Optimiser steps of the policy that sampled the response."""
    finish_reason: str = "finish_reason"
    """Why the response ended: stop or length."""
    level: str = "level"
    """The author's difficulty label, if any."""
    prompt_ids: str = "prompt_ids"
    """Token ids of the prompt; with them nothing is tokenised again."""
    response_ids: str = "response_ids"
    """Token ids of the response, with its end token."""
    response_mask: str = "response_mask"
    """For several turns: 1 for every token id of the response that the policy sampled, 0 for the others."""

    @property
    def by_prompt(self) -> bool:
        """Whether equal prompts are one problem, whatever ids the log has."""
        return self.problem_id in ("prompt", self.prompt)


_COLUMN_HELP = (
    f"The column NAME of the log holds FIELD: {', '.join(field.name for field in fields(ColumnNames))}. Needed where "
    "no known trainer wrote the log."
)


def name_columns(
    column: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FIELD=NAME", help=_COLUMN_HELP)] = (),
) -> ColumnNames:
    """Parse column names from "FIELD=NAME"; a TsaeError for other texts and for a field that is named twice."""
    known, named = [field.name for field in fields(ColumnNames)], dict[str, str]()
    for item in column:
        name, equals, value = item.partition("=")
        if name not in known or not equals or not value or name in named:
            wrong = "is named a second time" if name in named else f"is none of {', '.join(known)}"
            what = f"{name!r} {wrong}" if equals and value else f"{item!r} is not of the form FIELD=NAME"
            raise TsaeError(what, where="--column", fix="Say, for example, --column response=output.")
        named[name] = value
    return ColumnNames(**named)


@config
class ImportConfig:
    """How a rollout log is read."""

    format: LogFormat = "auto"
    """The trainer that wrote the log. "auto" finds it by names and columns, and asks if several fit."""
    run: str | None = None
    """Policies are named after this run (RUN-00050); by default after the log's folder."""
    rewards: tuple[str, ...] = ()
    """Reward columns to add up; by default the trainer's own total, or all that the log has."""
    outcome: str | None = None
    """Reward column that says what is right; needed if a log has several and none is known to say it."""
    success_above: float = 0.0
    """A reward above this is a success."""
    verifier: str | None = None
    """exact, last_number, math (needs tsae[verify]), or module:function: checks answers, whatever the log says."""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """For text prompts: "chat" applies the chat template, "plain" does not, "auto" does what the trainer did."""
    template_arguments: str = "{}"
    """Arguments of the run for its chat template, as JSON: '{"enable_thinking": false}'. By default those of the
    trainer's own config, if it lies beside the log (verl's .hydra/config.yaml)."""
    system_prompt: str | None = None
    """The run's system message, if the log has only the questions."""
    pad_ids: tuple[int, ...] | None = None
    """Token ids that pad prompts and responses, and are left out at their edges; by default found in the first rows.
    Give -1 for none."""
    max_response_tokens: Count | None = None
    """The run's limit, in tokens. If a log has only text, a shorter response counts as ended by its end token."""
    subset: Literal["train/effective", "train/all", "eval/effective", "eval/all"] = "train/effective"
    """Which of prime-rl's traces: "effective" ones reached the trainer; "all" includes filtered ones."""
    skip: tuple[Unfit, ...] = ()
    """Kinds of rows to leave out and count; otherwise the first such row stops the import. empty: no response.
    unscored: no reward. too-long: for the model's context. multi-turn: several turns without a mask of the sampled
    tokens. errored: a failed rollout. repeated: by a resume (the last counts), in ms-swift also one batch at several
    steps (the first counts). cut: half a line at a file's end, where a run still writes or was killed."""
    strict: bool = False
    """Refuse a log that contradicts itself: what the second look prints is then an error, and nothing is written."""
    merge_prompts: bool = False
    """A problem id with several prompts is one problem; by default every prompt is a problem of its own."""
    copies: Literal["auto", "drop", "keep"] = "auto"
    """What to do with trajectories that repeat others word for word, in groups of equal parts. "drop" counts them once.
    "keep" counts all of them. "auto" counts them once if chance hardly explains them."""
    noisy_rewards: bool = False
    """Allow different rewards for equal responses to a problem in one step, as a judge gives them."""
    columns: Annotated[ColumnNames, arg(name="", constructor=name_columns)] = field(default_factory=ColumnNames)
    """Which column holds what."""
    keep_columns: tuple[str, ...] = ()
    """Further columns of the log to keep as extra/NAME: numbers, flags or texts; anything else becomes JSON. With
    extra/required_steps, `tsae rollouts behaviours` finds which steps a response skips."""

    def __post_init__(self) -> None:
        try:
            arguments = json.loads(self.template_arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            what = f"template_arguments={self.template_arguments[:200]!r} is not a JSON object"
            raise TsaeError(what, where="ImportConfig", fix="""Give one, such as '{"enable_thinking": false}'.""")


@config
class BandCutoffs:
    """Where the bands end, in pass rate."""

    easy: float = 0.75
    """Easy: a pass rate of at least this."""
    hard: float = 0.25
    """Hard: a pass rate of at most this; medium lies between."""

    def __post_init__(self) -> None:
        if not 0 <= self.hard < self.easy <= 1:
            what = f"band cut-offs hard={self.hard}, easy={self.easy} are not in order"
            raise TsaeError(what, where="BandCutoffs", fix="Give 0 <= hard < easy <= 1.")

    def band(self, pass_rate: np.ndarray) -> np.ndarray:
        """The band of every pass rate."""
        import numpy as np

        return np.select([pass_rate >= self.easy, pass_rate <= self.hard], ["easy", "hard"], "medium")

    def cutoffs(self, pass_rate: np.ndarray) -> BandCutoffs:
        """Itself, whatever the pass rates; see `BandQuantiles.cutoffs`."""
        return self


@config
class BandQuantiles:
    """Bands by shares of the problems, with one policy's pass rates."""

    easy: float = 1 / 3
    """Share of the problems that are easy, those with the highest pass rates."""
    hard: float = 1 / 3
    """Share of the problems that are hard, those with the lowest pass rates."""

    def __post_init__(self) -> None:
        if not (self.easy > 0 and self.hard > 0 and self.easy + self.hard < 1):
            what = f"shares easy={self.easy:g} and hard={self.hard:g} leave nothing for one of the bands"
            raise TsaeError(what, where="BandQuantiles", fix="Give shares above 0 that add up to less than 1.")

    def cutoffs(self, pass_rate: np.ndarray) -> BandCutoffs:
        """The cut-offs that put about these shares of the problems into the bands.

        Problems with equal pass rates stay in one band, so with few responses a problem the bands exceed the shares.

        Raises:
            TsaeError: where so many pass rates are equal that no cut-offs separate easy from hard.
        """
        import numpy as np

        ordered = np.sort(pass_rate)
        # 0.07 · 100 is 7.000000000000001.
        hard = float(ordered[max(0, int(np.ceil(self.hard * len(ordered) - 1e-9)) - 1)])
        easy = float(ordered[min(len(ordered) - 1, int(np.floor((1 - self.easy) * len(ordered) + 1e-9)))])
        if not hard < easy:
            raise TsaeError(
                f"{np.mean(ordered == hard):.0%} of the problems have the pass rate {hard:g}, which would be easy and "
                "hard at once",
                where="BandQuantiles",
                fix="Give smaller shares, sample more responses to a problem, or give cut-offs.",
            )
        return BandCutoffs(easy=easy, hard=hard)


BandsBy = Literal["auto", "own", "difficulty", "level"]
"""Whose bands: the policies' own pass rates, another model's, or the data set's levels; "auto" as they are at hand."""


@config
class BandSource:
    """Bands from elsewhere: how hard another model found the problems, or how hard their data set calls them."""

    difficulty: UserPath | None = None
    """File of the data set, one row a problem: Parquet, JSON lines or another table, also at a URL such as
    hf://datasets/org/name/train.parquet. Problems are matched by id, else by the text of the prompt."""
    difficulty_column: str | None = None
    """Its column with another model's pass rates: from 0 to 1, or such as 3/8. a.b is field b of column a."""
    difficulty_model: str | None = None
    """Name of that model, for labels; by default the column's."""
    difficulty_failures_of: Count | None = None
    """The column counts failures among so many responses, as Skywork-OR1's model_difficulty does among 16."""
    bands_column: str | None = None
    """Column with the data set's levels, of the file if it has this column, else of the log. Levels are easy, medium
    and hard, or a number each, from the easiest."""
    bands_levels: tuple[str, ...] = ()
    """Which levels are in which band, such as easy=1,2 medium=3 hard=4,5; by default about a third of the problems in
    each."""

    def __post_init__(self) -> None:
        given, needed = self.difficulty is not None, "Give difficulty_column (--difficulty-column), or bands_column."
        refuse(
            "BandSource",
            (given and not (self.difficulty_column or self.bands_column), "difficulty has no column", needed),
            (self.difficulty_column and not given, "difficulty_column needs a file", "Give difficulty (--difficulty)."),
            (self.bands_levels and not self.bands_column, "bands_levels needs a column", "Give bands_column."),
        )
        self.named_levels  # noqa: B018

    @property
    def kinds(self) -> tuple[BandsBy, ...]:
        """What bands it gives, those that are contrasted by default first."""
        asked: tuple[tuple[BandsBy, object], ...] = (
            ("difficulty", self.difficulty_column),
            ("level", self.bands_column),
        )
        return tuple(kind for kind, column in asked if column)

    @property
    def named_levels(self) -> dict[str, list[str]]:
        """Levels by band, from `bands_levels`."""
        found = {}
        for item in self.bands_levels:
            band, _, names = item.partition("=")
            if band not in ("easy", "medium", "hard") or not names or band in found:
                raise TsaeError(f"{item!r} is not BAND=LEVEL,LEVEL", where="--bands-levels", fix="Say easy=1,2 hard=5.")
            found[band] = [name.strip() for name in names.split(",")]
        return found


@config
class DifficultyConfig:
    """How difficulty along a run is measured."""

    interval: Literal["wilson", "jeffreys"] = "wilson"
    """Interval of a problem's pass rate."""
    confidence: Confidence = 0.95
    """Confidence level of all intervals."""
    k: tuple[Count, ...] = ()
    """k of pass@k; by default powers of two up to the median number of responses to a problem."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantages that measure how much weight single successes carry."""
    n_draws: Draws = 2000
    """Permutations of outcomes."""
    seed: Seed = 0
    """Seed of the permutations."""
