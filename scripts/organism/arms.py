"""Arms of the claims study: GRPO runs on the testbed that differ from plain GRPO in one thing each.

1. A step asks 8 problems, and each is answered 16 times at temperature 1.
2. A = (r − mean) / (std + 1e-4) within the group, as in TRL; an arm may change it, response by response or token by
   token.
3. One step of Adam on   1 / (tokens of the batch) Σ_t −min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t) + β (e^d_t − d_t − 1),
   with d_t = log π_base(y_t) − log π(y_t). This is TRL's loss "dapo" with its estimate of the KL divergence.

The same seed gives the same run on the same machine with one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from organism.groups import sample_groups
from organism.mixed import prompt_ids
from tsae.rl.config import CurriculumConfig
from tsae.rl.curriculum import Curriculum
from tsae.rollouts.problems import Problem
from tsae.rollouts.rewards import group_advantages
from tsae.testbed.annotate import annotate
from tsae.testbed.backward import reformulate_chains
from tsae.testbed.chains import Split, generate_problems, parse_prompt
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS, PAD, TOKEN_IDS, VOCABULARY, split_tokens
from tsae.testbed.verifier import verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS, SAMPLES = 8, 16
"""Problems of a step, and responses to each."""
EASY, MEDIUM, LONG, HARD = (1, 1), (4, 6), (7, 9), (10, 14)
"""Operations of the levels. LONG chains are what the base solves now and then: the hard end of a mixture that works."""
EPSILON, CLIP_NORM, LEARNING_RATE = 0.2, 1.0, 1e-4
_TOKENS_AT_ONCE = 2048
_TOP = 0.2
"""Share of the tokens that count as choice points."""
_GUESSED = 0.1
"""Of ten digits."""
_PER_LENGTH = 60
"""Problems of each number of operations, where a curriculum draws."""
_BACKWARD = (3, 9)
"""Fewest and most operations of a backward reformulation."""

TokenCredit = Callable[[Sequence[dict[str, Any]], dict[str, torch.Tensor], int], torch.Tensor]
"""A rule of `tsae.rl.trl.AdvantageRule`."""
ProblemSource = Callable[[tuple[int, int], int, int, Split], list[Problem]]
"""From operations, number, seed and split to problems."""


@dataclass(frozen=True)
class Arm:
    """How a run differs from plain GRPO."""

    kinds: tuple[tuple[int, int], ...]
    """Operations of its problems; every kind has an equal share."""
    start: str = "base"
    """The model that it starts from: a base, or "near" or "far" (`scripts/claims_study.py`)."""
    reward: Literal["right", "random", "steps", "direct"] = "right"
    """1 for a right answer; or by chance; or the share of the expert's steps that the response has at their place; or
    1 for a right answer without a scratchpad."""
    advantages: Literal["group", "mean", "no lone"] = "group"
    """As in TRL; or not divided by the deviation; or 0 in a group with one success."""
    tokens: Literal["all", "top", "rest"] = "all"
    """Tokens with a gradient: all; the fifth of a batch with the highest entropy; or all others."""
    beta: float = 0.0
    """Weight of the KL penalty against the base."""
    reuses: int = 1
    """Optimiser steps on one batch, each with clipped ratios."""
    pool: int | None = None
    """Problems of each kind, asked again and again; None: fresh ones."""
    adaptive: bool = False
    """Problems of 1 to 14 operations, drawn by the current pass rate."""
    backward: bool = False
    """Half of the problems are backward reformulations of the others."""
    credit: Literal["", "features", "shuffled"] = ""
    """Credit on tokens, from features or from shuffled ones."""
    steps: int = 50
    """Batches."""


@dataclass
class Batch:
    """Responses to the problems of a step, groups beside each other."""

    problems: list[Problem]
    """(n,) of each response."""
    responses: list[list[int]]
    """(n,) token ids."""
    rewards: np.ndarray
    """(n,)"""
    right: np.ndarray
    """(n,) bool: the final answer is right, whatever the reward says."""
    entropy: list[np.ndarray] = field(default_factory=list)
    """(n,) nats of the policy at each token; empty where it was not asked for."""

    @property
    def texts(self) -> list[str]:
        return [text_of(ids) for ids in self.responses]


def text_of(ids: Sequence[int]) -> str:
    """The characters of a response."""
    return "".join(VOCABULARY[token] for token in ids)


def run_arm(
    arm: Arm,
    seed: int,
    model: PreTrainedModel,
    base: PreTrainedModel,
    after: Callable[[int, PreTrainedModel, Batch], None],
    credit: TokenCredit | None = None,
    generate: ProblemSource = generate_problems,
    draws: Draws | None = None,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Train a model in place.

    Args:
        arm: what to do.
        seed: of problems and sampling.
        model: to train.
        base: that a KL penalty pulls towards.
        after: called after every step with its number (the first is 1), the model and the batch.
        credit: of an arm with `Arm.credit`.
        generate: gives the problems of a kind, of another task than chains.
        draws: the problems of every step, where the arm does not say them.
        learning_rate: of Adam.
    """
    model.requires_grad_(True)
    parameters = list(model.parameters())
    optimiser = torch.optim.Adam(parameters, lr=learning_rate)
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    drawn = draws or _Draws(arm, seed, generate)
    for number in range(1, arm.steps + 1):
        asked = drawn.next()
        batch = answer(model, asked, generator, arm.reward, chance)
        drawn.learn(batch)
        old, batch.entropy = token_statistics(model, batch)
        advantages = token_advantages(arm, batch, credit)
        reference = token_statistics(base, batch)[0] if arm.beta else None
        for _ in range(arm.reuses):
            _optimise(model, parameters, optimiser, batch, advantages, old, reference, arm.beta)
        after(number, model, batch)


def answer(
    model: PreTrainedModel,
    asked: Sequence[Problem],
    generator: torch.Generator,
    reward: Literal["right", "random", "steps", "direct"] = "right",
    chance: random.Random | None = None,
    samples: int = SAMPLES,
) -> Batch:
    """Sample responses and reward them."""
    responses = sample_groups(model, [prompt_ids(p) for p in asked], samples, generator, MAX_RESPONSE_TOKENS)
    problems = [problem for problem in asked for _ in range(samples)]
    texts = [text_of(ids) for ids in responses]
    right = np.array([verify(text, problem.answer) for text, problem in zip(texts, problems, strict=True)])
    rewards = right.astype(float)
    if reward == "random":
        assert chance is not None
        rewards = np.array([float(chance.random() < 0.5) for _ in texts])
    elif reward == "steps":
        rewards = np.array([expert_similarity(p.prompt, text) for p, text in zip(problems, texts, strict=True)])
    elif reward == "direct":
        rewards *= np.array([text.startswith("#") for text in texts])
    return Batch(problems, responses, rewards, right)


def expert_similarity(prompt: str, text: str) -> float:
    """Share of the expert's steps (the right scratchpad and the answer) that a response has at their place, 0 to 1."""
    chain = parse_prompt(prompt)
    befores = (chain.digits[0], *chain.results)
    expert = [
        f"{before}{operator}{digit}={result}"
        for before, operator, digit, result in zip(
            befores[:-1], chain.operators, chain.digits[1:], chain.results, strict=True
        )
    ]
    expert.append(f"#{chain.answer}<eos>")
    written = text.split(";")
    return sum(a == b for a, b in zip(written, expert, strict=False)) / len(expert)


def token_advantages(arm: Arm, batch: Batch, credit: TokenCredit | None) -> list[np.ndarray]:
    """(n,) an array per response: the advantage of each of its tokens."""
    group = np.arange(len(batch.rewards)) // SAMPLES
    kind: Literal["grpo", "dr_grpo"] = "dr_grpo" if arm.advantages == "mean" else "grpo"
    advantages = group_advantages(batch.rewards, group, kind)
    if arm.advantages == "no lone":
        advantages[np.bincount(group, weights=batch.rewards)[group] == 1] = 0.0
    if credit is None:
        spread = [np.full(len(ids), value) for ids, value in zip(batch.responses, advantages, strict=True)]
    else:
        rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in batch.problems]
        shaped = credit(rows, as_trl(batch, advantages), SAMPLES).numpy()
        spread = [shaped[i, : len(ids)].astype(float) for i, ids in enumerate(batch.responses)]
    if arm.tokens != "all":
        limit = np.quantile(np.concatenate(batch.entropy), 1 - _TOP)
        for values, entropy in zip(spread, batch.entropy, strict=True):
            values[(entropy < limit) if arm.tokens == "top" else (entropy >= limit)] = 0.0
    return spread


def as_trl(batch: Batch, advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """The batch as TRL's trainer holds it: prompts padded on the left, responses on the right."""
    prompts = [prompt_ids(problem) for problem in batch.problems]
    pad, wide, long = TOKEN_IDS[PAD], max(map(len, prompts)), max(map(len, batch.responses))
    return {
        "prompt_ids": torch.tensor([[pad] * (wide - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (wide - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids + [pad] * (long - len(ids)) for ids in batch.responses]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (long - len(ids)) for ids in batch.responses]),
        "advantages": torch.from_numpy(advantages).float(),
    }


@torch.no_grad()
def token_statistics(model: PreTrainedModel, batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probability of each response token, and the entropy where it was drawn, in nats: an array per response."""
    log, entropy = [np.zeros(0)] * len(batch.responses), [np.zeros(0)] * len(batch.responses)
    for some, ids in _parts(batch):
        every = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits, dim=-1)
        chosen = every.gather(-1, ids[:, 1:, None])[..., 0]
        spread = -(every.exp() * every).sum(-1)
        for row, i in enumerate(some):
            own = _own(batch, i)
            log[i], entropy[i] = chosen[row, own].numpy(), spread[row, own].numpy()
    return log, entropy


def _optimise(
    model: PreTrainedModel,
    parameters: list[torch.nn.Parameter],
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    advantages: list[np.ndarray],
    old: list[np.ndarray],
    reference: list[np.ndarray] | None,
    beta: float,
) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    n_tokens = sum(map(len, batch.responses))
    silent = {i for i, values in enumerate(advantages) if not values.any() and reference is None}
    for some, ids in _parts(batch, silent):
        every = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits, dim=-1)
        log = every.gather(-1, ids[:, 1:, None])[..., 0]
        loss = log.new_zeros(())
        for row, i in enumerate(some):
            own, advantage = log[row, _own(batch, i)], torch.from_numpy(advantages[i]).float()
            ratio = (own - torch.from_numpy(old[i])).exp()
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum()
            if reference is not None:
                distance = torch.from_numpy(reference[i]) - own
                loss = loss + beta * (distance.exp() - distance - 1).sum()
        (loss / n_tokens).backward()
    torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    optimiser.step()


def _parts(batch: Batch, without: set[int] = frozenset()) -> list[tuple[list[int], torch.Tensor]]:  # type: ignore[assignment]
    """Some of the responses at a time, with padded token ids of prompt and response (n, T); like lengths together."""
    lengths = {i: len(prompt_ids(batch.problems[i])) + len(ids) for i, ids in enumerate(batch.responses)}
    left, found = sorted(lengths.keys() - without, key=lambda i: (lengths[i], i)), []
    while left:
        longest = lengths[left[-1]]
        n = max(1, _TOKENS_AT_ONCE // longest)
        left, some = left[:-n], left[-n:]
        ids = torch.full((len(some), longest), TOKEN_IDS[PAD])
        for row, i in enumerate(some):
            ids[row, : lengths[i]] = torch.tensor([*prompt_ids(batch.problems[i]), *batch.responses[i]])
        found.append((some, ids))
    return found


def _own(batch: Batch, i: int) -> slice:
    """Where a response's tokens stand among the predictions."""
    begin = len(prompt_ids(batch.problems[i]))
    return slice(begin - 1, begin - 1 + len(batch.responses[i]))


class Draws(Protocol):
    """The problems of every step."""

    def next(self) -> list[Problem]:
        """Those of the next step."""
        ...

    def learn(self, batch: Batch) -> None:
        """Take in the responses to them."""
        ...


class _Draws:
    """What an arm says."""

    def __init__(self, arm: Arm, seed: int, generate: ProblemSource) -> None:
        self.arm, self.rng, self.curriculum = arm, random.Random(seed), None
        if arm.adaptive:
            pool = [p for n in range(1, 15) for p in generate_problems((n, n), _PER_LENGTH, seed, "train")]
            self.by_id = {problem.id: problem for problem in pool}
            levels = {problem.id: f"{parse_prompt(problem.prompt).n_ops:02d} operations" for problem in pool}
            config = CurriculumConfig(seed=seed, guess=_GUESSED)
            self.curriculum = Curriculum(list(levels), SAMPLES, config, levels=levels)
            return
        kinds = len(arm.kinds)
        n = arm.pool or max(1, arm.steps * PROMPTS // kinds + kinds)
        found = [generate(kind, min(n, 300) if kind == EASY else n, seed, "train") for kind in arm.kinds]
        if arm.backward:
            made = [item.problem for item in reformulate_chains(found[0], kind="backward", n_ops=_BACKWARD)]
            found.append(self.rng.sample(made, n))
        self.kinds = found
        self.waiting: list[list[Problem]] = [[] for _ in found]

    def next(self) -> list[Problem]:
        if self.curriculum is not None:
            return [self.by_id[self.curriculum.ids[i]] for i in self.curriculum.draw(PROMPTS)]
        asked = []
        first = self.rng.randrange(len(self.kinds))  # so that none of three kinds always has two of eight
        for place in range(PROMPTS):
            kind = (first + place) % len(self.kinds)
            if not self.waiting[kind]:
                self.waiting[kind] = self.rng.sample(self.kinds[kind], len(self.kinds[kind]))
            asked.append(self.waiting[kind].pop())
        return asked

    def learn(self, batch: Batch) -> None:
        if self.curriculum is not None:
            self.curriculum.update([problem.id for problem in batch.problems], batch.right.astype(float).tolist())


def roles_of(prompt: str, text: str) -> list[str]:
    """The role of each response token (`tsae.testbed.annotate`)."""
    return [label.role for label in annotate(prompt, split_tokens(text))]
