"""Arms for the hard end of the cure: what could carry a policy to chains that its base fails, by features alone?

All draw hard chains and their backward reformulations by the current pass rate (`reformulation+adaptive` of
`scripts/run_remedies.py`), except the arms that ask hard chains only. They differ in who earns what:

- *credit*: token weights from the base's features, on chains of at most 9 operations (`tsae.rl.credit`).
- *relearned*: every 10 steps credit is learned again, on the last 20 batches and on features of the policy as it is, so
  that it applies where the policy succeeds now and then. Successes that look like failures earn less.
- *slips*: the oracle's rule with features in place of the annotation. The first token with a score as low as successes
  rarely have is the slip. A success is credited up to it, and a failure is blamed for it alone, at all lengths.
- *path*: on problems that are mostly failed, a success counts only if its gradient goes along the path: the mean
  gradient, over the last steps, of problems that are mostly solved.

Two more settings: *choices*, only the fifth of the tokens with the highest entropy has a gradient; and the learning
rate.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from run_remedies import GUESSED, LONGEST, SITE, n_ops_of, oracle, problems_of

from organism.arms import (
    HARD,
    LEARNING_RATE,
    PROMPTS,
    SAMPLES,
    Arm,
    Batch,
    TokenCredit,
    answer,
    as_trl,
    run_arm,
)
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.errors import TsaeError
from tsae.rl.config import CurriculumConfig, ShapingConfig
from tsae.rl.credit import Credit
from tsae.rl.credit_fitting import ResponseTokens, credit_from_tokens
from tsae.rl.curriculum import Curriculum
from tsae.rl.shaping import rebalanced
from tsae.rl.trl import FeatureCredit
from tsae.rollouts.problems import Problem
from tsae.testbed import series
from tsae.testbed.annotate import annotate, describe_response
from tsae.testbed.chains import generate_problems
from tsae.testbed.tokenizer import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT, AGAIN = 20, 10
"""Batches that credit is learned again from, and steps between."""
SOLVED, FAILED = 0.5, 0.25
"""Pass rates from which a problem shows the path, and below which its successes are doubted."""
RARE = 0.05
"""Share of successes on mostly solved problems whose lowest score is a slip."""
_MEMORY = 0.8
"""Share of the path that is kept at each step."""


@dataclass(frozen=True)
class HardArm:
    """A run, as it differs from GRPO with adaptive draws of reformulations."""

    adaptive: bool = True
    """Draws by the pass rate; else fresh hard chains."""
    rule: Literal["", "oracle", "credit", "relearned", "slips", "path"] = ""
    """Who earns what."""
    plausible: bool = False
    """Successes that look like failures earn less."""
    shuffled: bool = False
    """Features exchange their entries: the control."""
    choices: bool = False
    """Gradient at choice points only."""
    learning_rate: float = LEARNING_RATE
    """Of Adam."""


def train(arm: HardArm, seed: int, steps: int, reference: Path) -> tuple[PreTrainedModel, dict[str, list[Any]]]:
    """Train from the shipped base.

    Returns:
        the model; and by step the mean number of operations and the share of right answers, and what a rule tells.
    """
    model = series().base.load_model(dtype="float32")
    base = series().base.load_model(dtype="float32")
    rule = rule_of(arm, seed, reference, model)
    told: dict[str, list[Any]] = defaultdict(list)

    def after(number: int, _: PreTrainedModel, batch: Batch) -> None:
        operations = np.mean([n_ops_of(problem.prompt) for problem in batch.problems])
        told["operations"].append(round(float(operations), 2))
        told["right"].append(round(float(batch.right.mean()), 3))
        if isinstance(rule, Relearned):
            rule.learn(number, batch)
        if isinstance(rule, Relearned | AlongPath | FirstSlip):
            for name, value in rule.tells.items():
                told[name].append(value)

    settings = Arm((HARD,), tokens="top" if arm.choices else "all", steps=steps)
    draws = Reformulated(seed, steps) if arm.adaptive else None
    run_arm(settings, seed, model, base, after, rule, draws=draws, learning_rate=arm.learning_rate)
    return model.eval(), told


def rule_of(arm: HardArm, seed: int, reference: Path, model: PreTrainedModel) -> TokenCredit | None:
    """The advantages of an arm."""
    if not arm.rule:
        return None
    if arm.rule == "oracle":
        return oracle
    if arm.rule == "path":
        return AlongPath(model)
    credit = Credit.load(reference / "credit")
    if arm.shuffled:
        credit = credit.shuffled(seed)
    if arm.rule == "slips":
        return FirstSlip(series().base, reference / "sae", credit)
    shaping = ShapingConfig(strength=2.0, plausibility=arm.plausible)
    known: dict[str, Any] = {"applies": lambda row: n_ops_of(row["prompt"]) <= LONGEST}
    if arm.rule == "credit":
        return FeatureCredit(series().base, reference / "sae", credit, shaping, **known)
    return Relearned(model, seed if arm.shuffled else None, series().base, reference / "sae", credit, shaping, **known)


class Reformulated:
    """Hard chains and their backward reformulations, drawn by the current pass rate."""

    def __init__(self, seed: int, steps: int) -> None:
        pool = problems_of("reformulation+adaptive", steps * PROMPTS, seed)
        self.by_id = {problem.id: problem for problem in pool}
        levels = {problem.id: f"{n_ops_of(problem.prompt):02d} operations" for problem in pool}
        self.curriculum = Curriculum(list(levels), SAMPLES, CurriculumConfig(seed=seed, guess=GUESSED), levels=levels)

    def next(self) -> list[Problem]:
        return [self.by_id[self.curriculum.ids[i]] for i in self.curriculum.draw(PROMPTS)]

    def learn(self, batch: Batch) -> None:
        self.curriculum.update([problem.id for problem in batch.problems], batch.right.astype(float).tolist())


class FirstSlip(FeatureCredit):
    """The oracle's rule (`run_remedies.oracle`). In place of the first wrong token, the first whose score is too low.

    Too low is what `RARE` of the successes reach on problems that the policy mostly solves: of the last `KEPT` steps
    that have some. Nothing but scores and rewards decides it. Until it is known, advantages stay as they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lowest: list[torch.Tensor] = []
        self.tells: dict[str, Any] = {}

    def __call__(self, rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        advantages, mask = batch["advantages"], batch["completion_mask"].bool()
        scores = self.scores(batch).masked_fill(~mask, torch.inf)
        rate = (advantages > 0).float().view(-1, group_size).mean(1).repeat_interleave(group_size)
        sure = (advantages > 0) & (rate >= SOLVED)
        if sure.any():
            self.lowest = [*self.lowest, scores[sure].amin(1)][-KEPT:]
        if not self.lowest:
            return advantages.unsqueeze(1) * mask
        limit = torch.cat(self.lowest).quantile(RARE)
        slip = scores < limit
        before = (slip.cumsum(1) == 0) & mask
        first = slip & (slip.cumsum(1) == 1)
        self.tells = {
            "slips": [round(float(slip[some].any(1).float().mean()), 3) for some in (advantages > 0, advantages < 0)]
        }
        weights = torch.where((advantages > 0).unsqueeze(1), before, first)
        return advantages.unsqueeze(1) * weights


class Relearned(FeatureCredit):
    """Credit from features, learned again on what the policy writes, as the policy reads it.

    Args:
        model: the policy.
        shuffle: seed of the control, or None.
    """

    def __init__(self, model: PreTrainedModel, shuffle: int | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model, self.shuffle = model, shuffle
        self.kept: list[Batch] = []
        self.tells: dict[str, Any] = {}

    def learn(self, number: int, batch: Batch) -> None:
        """Take in a batch, and learn again where it is time."""
        self.kept = [*self.kept, batch][-KEPT:]
        self.tells = {}
        if number < KEPT or number % AGAIN:
            return
        policy = copy.deepcopy(self.model).eval()
        policy.requires_grad_(False)
        reader = HuggingFaceReader(policy, [SITE])
        try:
            credit = credit_from_tokens(self._tokens(reader), self.credit.info["sae"])
        except TsaeError as error:
            self.tells = {"relearned": error.what}
            return
        self.tells = {"relearned": repr(credit)}
        if credit.significant:
            self.credit = credit if self.shuffle is None else credit.shuffled(self.shuffle)
            self.reader = reader
            self.applies = None

    @torch.no_grad()
    def _tokens(self, reader: HuggingFaceReader) -> ResponseTokens:
        """Tokens of the kept batches; the groups of a step are problems of their own, as the policy moves."""
        codes, states, ids, row, found = [], [], [], [], []
        for number, batch in enumerate(self.kept):
            held = as_trl(batch, np.zeros(len(batch.rewards)))
            every = torch.cat([held["prompt_ids"], held["completion_ids"]], dim=1)
            mask = torch.cat([held["prompt_mask"], held["completion_mask"]], dim=1)
            start = held["prompt_ids"].shape[1]
            x = reader.read(every, mask)[self.sae.site][:, start - 1 :].float()
            read = self.sae.encode(x).masked_fill(self.sae.outliers(x)[..., None], 0)  # (n, T + 1, d_sae)
            written = held["completion_mask"].bool()
            codes.append(sp.csr_array(read[:, 1:][written].numpy()))
            states.append(sp.csr_array(read[:, :-1][written].numpy()))
            ids.append(held["completion_ids"][written].numpy())
            row.append(written.nonzero()[:, 0].numpy() + number * len(batch.rewards))
            group = number * PROMPTS + np.arange(len(batch.rewards)) // SAMPLES
            found.append(pd.DataFrame({"success": batch.right, "problem_id": group}))
        frame = pd.concat(found, ignore_index=True)
        frame["code"] = pd.factorize(frame.problem_id)[0]
        frame["pass_rate"] = frame.groupby("code").success.transform("mean")
        frame["centred"] = frame.success - frame.pass_rate
        now, before = (sp.csr_array(sp.vstack(part)) for part in (codes, states))
        return ResponseTokens(now, before, np.concatenate(ids), np.concatenate(row), frame)


class AlongPath:
    """Successes on problems that are mostly failed count as far as their gradients go along the path."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.path: torch.Tensor | None = None
        self.tells: dict[str, Any] = {}

    def __call__(self, rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        advantages, mask = batch["advantages"], batch["completion_mask"]
        group = torch.arange(len(advantages)) // group_size
        rate = (advantages > 0).float().view(-1, group_size).mean(1)[group]
        solved = ((rate >= SOLVED) & (advantages != 0)).nonzero()[:, 0]
        if len(solved):
            now = self.gradient(batch, solved, advantages)
            self.path = now if self.path is None else _MEMORY * self.path + (1 - _MEMORY) * now
        factor = torch.ones_like(advantages)
        doubted = ((rate < FAILED) & (advantages > 0)).nonzero()[:, 0]
        if self.path is not None and len(doubted):
            along = torch.stack([self.gradient(batch, i[None], advantages) @ self.path for i in doubted])
            factor[doubted] = (along > 0).float()
        self.tells = {"doubted": len(doubted), "dropped": int((factor == 0).sum())}
        return rebalanced(advantages, factor, group).unsqueeze(1) * mask

    def gradient(self, batch: dict[str, torch.Tensor], some: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Gradient of Σ A log π over some responses, one flat vector."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)[some]
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)[some]
        places, start = (mask.cumsum(1) - 1).clamp_min(0), batch["prompt_ids"].shape[1]
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        log = torch.log_softmax(logits[:, start - 1 : -1], dim=-1).gather(-1, ids[:, start:, None])[..., 0]
        gain = (log * mask[:, start:] * advantages[some, None]).sum()
        found = torch.autograd.grad(gain, [p for p in self.model.parameters() if p.requires_grad])
        return torch.cat([part.flatten() for part in found])


def locate_slips(model: PreTrainedModel, reference: Path, seed: int) -> dict[str, dict[str, int]]:
    """Where *slips* sees the slip of a failure, and where the annotation has its first wrong token, by length.

    Args:
        model: writes the responses: 40 problems a length, 16 responses each.
        reference: folder with SAE and credit; the limit is that of the model's successes on 5 to 8 operations.
        seed: of problems and sampling.

    Returns:
        by length: failures; of these "there", "before", "after" and "none" (no slip is seen); and how many first wrong
        tokens are operators.
    """
    rule = FirstSlip(series().base, reference / "sae", Credit.load(reference / "credit"))
    generator = torch.Generator().manual_seed(seed)

    def look(ops: int, n: int) -> tuple[Batch, torch.Tensor]:
        batch = answer(model, generate_problems((ops, ops), n, seed), generator)
        held = as_trl(batch, np.zeros(len(batch.rewards)))
        return batch, rule.scores(held).masked_fill(~held["completion_mask"].bool(), torch.inf)

    sure = [scores[torch.from_numpy(batch.right)].amin(1) for batch, scores in (look(ops, 20) for ops in (5, 6, 7, 8))]
    limit = torch.cat(sure).quantile(RARE)
    found = {}
    for ops in (9, 10, 11, 12):
        batch, scores = look(ops, 40)
        counts = dict.fromkeys(("failures", "there", "before", "after", "none", "operators"), 0)
        for i in np.flatnonzero(~batch.right):
            roles = annotate(batch.problems[i].prompt, [VOCABULARY[token] for token in batch.responses[i]])
            wrong = next((place for place, label in enumerate(roles) if label.correct is False), None)
            if wrong is None:
                continue
            slips = (scores[i] < limit).nonzero()[:, 0].tolist()
            where = "none" if not slips else "there" if slips[0] == wrong else "before" if slips[0] < wrong else "after"
            counts["failures"] += 1
            counts[where] += 1
            counts["operators"] += roles[wrong].role == "operator"
        found[str(ops)] = counts
    return found


def evaluate(model: PreTrainedModel, problems: dict[str, list[Problem]], samples: int, seed: int) -> dict[str, Any]:
    """By level: responses, accuracy, flawless; of all, flawless by number of operations as [flawless, responses]."""
    measured: dict[str, Any] = {}
    lengths: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    generator = torch.Generator().manual_seed(seed)
    for level, some in problems.items():
        batch = answer(model, some, generator, samples=samples)
        facts = [describe_response(p.prompt, text) for p, text in zip(batch.problems, batch.texts, strict=True)]
        flawless = [fact.correct and not fact.n_steps_skipped and fact.first_wrong is None for fact in facts]
        for fact, well in zip(facts, flawless, strict=True):
            lengths[fact.n_steps_required][0] += well
            lengths[fact.n_steps_required][1] += 1
        measured[level] = {
            "responses": len(facts),
            "accuracy": float(batch.right.mean()),
            "flawless": float(np.mean(flawless)),
            "direct": float(np.mean([fact.style == "direct" for fact in facts])),
        }
    return {"levels": measured, "lengths": {str(n): lengths[n] for n in sorted(lengths)}}


LEVELS: dict[str, tuple[int, int]] = {"easy": (1, 1), "medium": (4, 6), "long": (7, 9), "hard": HARD}
_PROBLEMS = {"easy": 300, "medium": 250, "long": 150, "hard": 500}


def problem_sets(development: bool, share: float = 1.0) -> dict[str, list[Problem]]:
    """Problems to evaluate on: those of `scripts/run_remedies.py`, or for choices others of the same kind."""
    found = {}
    for level, ops in LEVELS.items():
        n, asked = max(4, round(share * _PROBLEMS[level])), level if level in ("easy", "medium", "hard") else ops
        test = generate_problems(asked, n, 0)
        if not development:
            found[level] = test
            continue
        taken = {problem.id for problem in test} if level != "easy" else set()
        found[level] = [p for p in generate_problems(asked, n, 77) if p.id not in taken]
    return found
