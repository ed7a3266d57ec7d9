"""The playground of `tsae serve`: what base and run answer to one prompt, with their features, and with one changed.

Models are loaded at the first question, and stay: the base, and the run that was asked last. One question is answered
at a time. Answers are generated and edited as `tsae.intervene` does, and read as `tsae.capture` does.

Codes are those before the edit: an edit at a site changes nothing below it, so they depend on the tokens alone. One
answer is an example; it has no controls, and tests nothing.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import pairwise
from threading import Lock
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from tsae.base.filters import need_features
from tsae.base.untrusted import visible
from tsae.base.validation import Seed, Size, config
from tsae.causal.config import InterventionConfig
from tsae.causal.controls import FeatureScales
from tsae.causal.edits import FeatureEdit
from tsae.causal.intervene import check_model, levels
from tsae.checkpoints.hooks import HuggingFaceReader, rewritten
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import load_tokenizer, reading_limits, text_of, token_strings
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError, refuse
from tsae.features.encoded_shards import codes_of
from tsae.report.document import render_page
from tsae.report.story import facts
from tsae.report.story.statements import surviving
from tsae.report.text import shortened
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.generation import Around, Generator
from tsae.rollouts.problems import Problem, encode_prompt
from tsae.sae.model import TemporalSAE

LARGEST = 20_000
"""Characters of a prompt."""
_GREEDY = 1e-6
"""What stands for temperature 0: sampling then takes the likeliest token."""
_PROBLEMS, _NAMED, _TOP = 8, 40, 6
"""Problems of every band and features that the page offers; surviving and other features that it lists of an answer."""


@config
class Question:
    """What the page asks."""

    prompt: Annotated[str, Field(min_length=1, max_length=LARGEST)]
    """As it was typed. The text of one of the run's problems is read with the token ids that it had there."""
    run: str
    """Id of the checkpoint that answers beside the base."""
    feature: Size | None = None
    """Colours the tokens, and is edited."""
    edit: Literal["none", "ablate", "steer"] = "none"
    """What a second answer of the run does with the feature."""
    amount: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Of steering, in units of the feature's typical activation."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0 takes the likeliest token."""
    seed: Seed = 0
    """The same for all answers."""
    tokens: Annotated[int, Field(ge=1, le=1024)] = 128
    """New tokens at most."""


class _Opened(NamedTuple):
    """A loaded checkpoint."""

    model: Any
    tokenizer: Any
    strings: list[str]


class Playground:
    """Answers the questions of one page.

    Args:
        series: has the base and at least one of the runs.
        sae: or its folder; the one of the diff's features.
        diff: of the run, with its features.
        device: a torch device.

    Raises:
        TsaeError: where the SAE, the base's tokenizer or all runs are missing, or the SAE is another one.
    """

    def __init__(self, series: CheckpointSeries, sae: Any, diff: FeatureDiff, device: str = "cpu") -> None:
        self.series, self.diff, self.device = series, diff, device
        assert diff.source is not None
        self.features = diff.source
        self.sae = TemporalSAE.of(sae, device=device)
        self.features.need_sae(self.sae.fingerprint, self.sae.config.d_sae)
        load_tokenizer(series.base)
        there = {checkpoint.id for checkpoint in series}
        self.runs = [run for run in diff.final_checkpoints if run in there]
        refuse("the playground", (not self.runs, "no checkpoint of a run is at hand", "Name them with --series."))
        table = self.features.rollouts.frame.drop_duplicates("problem_id")
        # A browser's text field has one kind of line break.
        problems = self.features.rollouts.problems()
        self._prompts = {visible(problem.prompt.replace("\r\n", "\n")): problem for problem in problems}
        self._bands = dict(zip(table.problem_id, table.band.fillna(""), strict=True))
        moved = {run: facts.main_shift(diff, run) for run in self.runs}
        left = {run: surviving(table[table.moved]) for run, table in moved.items()}
        self._survivors = {run: facts.strongest(of, diff.q, len(of)).feature.tolist() for run, of in left.items()}
        self._busy, self._opened = Lock(), dict[str, _Opened]()

    def page(self) -> bytes:
        """The page's HTML."""
        # The run, the feature and the kind of problem that show most come first.
        runs = sorted(self.runs, key=lambda run: -len(self._survivors[run]))
        offered: dict[str, list[str]] = {"medium": []}
        for text, problem in self._prompts.items():
            of_band = offered.setdefault(self._bands[problem.id], [])
            if len(of_band) < _PROBLEMS and 0 < len(text) <= LARGEST:
                of_band.append(text)
        survivors = facts.in_turn([self._survivors[run] for run in runs], _NAMED)
        named = facts.in_turn([facts.moved_features(self.diff, _NAMED)], _NAMED, survivors)
        page = render_page(
            "playground.html", "Playground", {}, connect="'self'", scripts=["card.js", "playground.js"],
            base=self.series.base.id, runs=runs, largest=LARGEST, n_features=self.features.n_features,
            problems=[(band, text, shortened(text, 60)) for band, texts in offered.items() for text in texts],
            named=[(feature, self._name(feature)) for feature in named],
        )  # fmt: skip
        return "".join(page).encode("utf-8", "replace")

    def answer(self, asked: Question) -> dict[str, Any]:
        """Answers of the base, of the run, and of the run with the edit if there is one; and the features in them.

        Raises:
            TsaeError: for a run, a feature or a prompt that cannot be; and while another question is answered.
        """
        there = ", ".join(self.runs)
        unknown = f"no checkpoint {asked.run!r} is at hand; there are {there}"
        what = "an edit needs a feature"
        refuse(
            None,
            (asked.run not in self.runs, unknown, "Choose one of these."),
            (asked.edit != "none" and asked.feature is None, what, "Give its number, or choose no edit."),
        )
        need_features([] if asked.feature is None else [asked.feature], self.features.n_features, "the SAE")
        around = None if asked.edit == "none" else self._edit(asked)
        if not self._busy.acquire(blocking=False):
            raise TsaeError("another question is being answered", fix="Ask again when that is done.")
        try:
            answers = [self._answered(asked, who, None) for who in (self.series.base.id, asked.run)]
            answers += [] if around is None else [self._answered(asked, asked.run, around)]
        finally:
            self._busy.release()
        survivors, listed = self._survivors[asked.run], {f for answer in answers for f, _ in answer["top"]}
        problem = self._problem(asked)
        return {
            "answers": answers,
            "features": {f: [self._name(f), f in survivors] for f in sorted(listed)},
            "reference": "" if problem is None else shortened(visible(problem.answer), 80),
        }

    def _answered(self, asked: Question, who: str, around: Around | None) -> dict[str, Any]:
        """One answer: its tokens, prompt included, each with its codes; and its strongest features."""
        prompt = self._prompt_ids(asked)
        opened, checkpoint = self._open(who), self.series[who]
        context = reading_limits(checkpoint)[0] or len(prompt) + asked.tokens
        what = f"the prompt has {len(prompt)} tokens, and {who} reads {context} in all"
        refuse(None, (len(prompt) >= context, what, "Shorten the prompt."))
        sampling = SamplingConfig(
            n_samples=1, batch_size=1, device=self.device, temperature=max(asked.temperature, _GREEDY),
            max_new_tokens=min(asked.tokens, context - len(prompt)),
        )  # fmt: skip
        generator = Generator(checkpoint, opened.tokenizer, sampling, model=opened.model, around=around)
        (response,) = generator.generate([prompt], asked.seed)
        ids = torch.tensor([[*prompt, *response.ids]])
        read = HuggingFaceReader(opened.model, [self.sae.site]).read(ids, torch.ones_like(ids))
        codes = codes_of(self.sae, read[self.sae.site][0].float().to(self.device)).sparse
        special = set(self.features.info["special_ids"])
        pairs = list(zip(codes.indices.tolist(), codes.data.astype(float).round(3).tolist(), strict=True))
        spans = zip(ids[0].tolist(), pairwise(codes.indptr.tolist()), strict=True)
        rows = [[] if id in special else pairs[start:stop] for id, (start, stop) in spans]
        counted = [i for i in range(len(prompt), len(rows)) if ids[0, i].item() not in special]
        mean = np.asarray(codes[counted].sum(0)).ravel() / max(len(counted), 1)
        return {
            "who": visible(who),
            "edited": around is not None,
            "ended": response.finish_reason == "stop",
            "n_prompt": len(prompt),
            "tokens": [visible(text_of(opened.strings, id)) for id in ids[0].tolist()],
            "codes": rows,
            "top": self._top(mean, self._survivors[asked.run]),
        }

    def _top(self, mean: np.ndarray, survivors: list[int]) -> list[tuple[int, float]]:
        """The strongest features of an answer, in units of their typical activation, survivors first."""
        typical = self._scales.typical
        size = np.divide(mean, typical, out=np.zeros_like(typical, dtype=float), where=typical > 0)
        order = [int(feature) for feature in np.argsort(-size, kind="stable") if size[feature] > 0]
        found = [feature for feature in order if feature in survivors][:_TOP]
        found += [feature for feature in order if feature not in survivors][:_TOP]
        return [(feature, round(float(size[feature]), 3)) for feature in found]

    def _prompt_ids(self, asked: Question) -> list[int]:
        problem = self._problem(asked)
        if problem is not None and problem.ids:
            return [*problem.ids]
        # The run's own, for both: its chat template is the one of the training.
        return encode_prompt(self._open(asked.run).tokenizer, asked.prompt, where="the prompt")

    def _problem(self, asked: Question) -> Problem | None:
        """The problem of the run whose prompt was asked."""
        return self._prompts.get(visible(asked.prompt))

    def _edit(self, asked: Question) -> Around:
        """What generates with the feature changed."""
        assert asked.feature is not None
        assert asked.edit != "none"
        settings, chosen = InterventionConfig(mode=asked.edit, amount=asked.amount), (asked.feature,)
        silent = asked.edit == "steer" and not self._scales.typical[asked.feature] > 0
        what = f"feature {asked.feature} is active on no response token of the run, so that it has no typical strength"
        refuse(None, (silent, what, "Choose another feature."))
        edit = FeatureEdit(self.sae, chosen, settings.mode, levels(chosen, self._scales, settings))
        special = tuple(self.features.info["special_ids"])
        return edit.hook(lambda model: partial(rewritten, model), settings.tokens, special)

    @cached_property
    def _scales(self) -> FeatureScales:
        return FeatureScales.of(self.features, self.series.base.id)

    def _open(self, who: str) -> _Opened:
        """A checkpoint, loaded once; another run takes its place."""
        if who not in self._opened:
            base, checkpoint = self.series.base.id, self.series[who]
            # Before the next takes up memory.
            self._opened = {id: one for id, one in self._opened.items() if base in (id, who)}
            model, tokenizer = checkpoint.load_model(device=self.device), load_tokenizer(checkpoint)
            check_model(model, self.sae, checkpoint, self.features)
            self._opened[who] = _Opened(model, tokenizer, token_strings(tokenizer))
        return self._opened[who]

    def _name(self, feature: int) -> str:
        """A feature's label where it passed its test; else what it responds to."""
        return shortened(visible(facts.responds(self.diff.features.loc[feature])), 80)
