"""Forward passes of logged rows as the trainer took them, and the gradient of the loss of one optimiser step.

Two layouts give the same numbers up to rounding. Right-padded batches of similar length are cheaper. The trainer's own
(prompts padded on the left, responses on the right, both to the longest of the generation, positions counted with the
padding) rounds as the trainer did: it is taken under bfloat16 autocast, and for models whose positions are learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tsae.attribution.log_fit import advantages_of
from tsae.attribution.loss import BatchTokens
from tsae.attribution.order import Plan, Update
from tsae.attribution.sample_gradients import TrainedWeights, keep_logits, padded
from tsae.attribution.settings import RunSettings
from tsae.attribution.states import State
from tsae.checkpoints.hooks import positions
from tsae.errors import TsaeError
from tsae.rollouts.rewards import group_names
from tsae.rollouts.table import Rollouts

Logs = dict[int, torch.Tensor]
"""(n,) log-probabilities in nats of a row's sampled tokens, by row of the rollouts; on the CPU."""
OLD, REF, SAMPLER = "old_logprobs", "ref_logprobs", "sampler_logprobs"
"""Columns of a log that has log-probabilities."""


@dataclass(frozen=True)
class Run:
    """What is replayed."""

    trained: TrainedWeights
    rollouts: Rollouts
    """With advantages."""
    settings: RunSettings
    plan: Plan
    begin: State
    """The optimiser before the first update."""
    batch_tokens: int = 4096
    """Tokens of a forward pass, with padding."""
    special: tuple[int, ...] = ()
    """Token ids that decode to nothing; a log of texts loses them."""

    @property
    def last(self) -> int:
        """Steps that are finished at the end."""
        return self.plan.updates[-1].step

    def update(self, step: int) -> Update:
        """The update that made a step."""
        return self.plan.updates[step - self.begin.step - 1]

    @property
    def exact(self) -> bool:
        """Whether rows are laid out as the trainer did."""
        config: Any = self.trained.model.config.get_text_config()
        rotary = any(
            getattr(config, name, None) is not None for name in ("rope_theta", "rope_parameters", "rotary_pct")
        )
        return self.settings.autocast != "float32" or not rotary


@dataclass
class Known:
    """What is fixed while a generation is used: log-probabilities when it was sampled, and of the reference; advantages
    of tokens, where those of a response differ."""

    old: Logs = field(default_factory=dict)
    ref: Logs = field(default_factory=dict)
    advantage: Logs = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Rows of one forward pass; L tokens with padding."""

    rows: np.ndarray
    ids: torch.Tensor
    mask: torch.Tensor
    response: torch.Tensor
    """(B, L) tokens that the policy sampled."""
    positions: torch.Tensor
    """(B, L)."""

    @cached_property
    def scored(self) -> int:
        """S: tokens from the first one on that a policy sampled. Only their log-probabilities are computed: of a large
        vocabulary they cost as much as many layers."""
        first = int(self.response.any(0).int().argmax())
        return self.response.shape[1] - max(1, first)

    @property
    def scored_ids(self) -> torch.Tensor:
        """(B, S) ids."""
        return self.ids[:, -self.scored :]

    @property
    def counted(self) -> torch.Tensor:
        """(B, S) the response."""
        return self.response[:, -self.scored :]

    def by_row(self, values: torch.Tensor) -> Logs:
        """(n,) numbers of a row's sampled tokens, from (B, S)."""
        rows = zip(self.rows.tolist(), values.detach(), self.counted, strict=True)
        return {row: of[counted].cpu() for row, of, counted in rows}

    def spread(self, logs: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """(B, S) numbers of the sampled tokens at their places; 0 elsewhere, and for rows that have none."""
        found = torch.zeros_like(like)
        for i, row in enumerate(self.rows.tolist()):
            if row in logs:
                found[i, self.counted[i]] = logs[row].to(found)
        return found


def chunks(run: Run, rows: np.ndarray, generation: np.ndarray) -> Iterator[Chunk]:
    """The rows of a micro-batch in forward passes of limited size.

    Args:
        run: has them.
        rows: of the rollouts.
        generation: all rows that were sampled with them, by which the trainer padded.
    """
    device = str(run.trained.device)
    if not run.exact:
        for some, ids, mask, response in padded(run.rollouts, rows, run.batch_tokens, device):
            yield Chunk(some, ids, mask, response, positions(mask))
        return
    before = int(run.rollouts.lengths("prompt_ids")[generation].max())
    after = int(run.rollouts.lengths("response_ids")[generation].max())
    n = max(1, run.batch_tokens // (before + after))
    for low in range(0, len(rows), n):
        some = rows[low : low + n]
        ids = torch.zeros(len(some), before + after, dtype=torch.long)
        mask, response = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(some.tolist()):
            prompt, answer = run.rollouts.tokens(row)
            own = slice(before - len(prompt), before + len(answer))
            ids[i, own] = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
            mask[i, own] = 1
            response[i, before : before + len(answer)] = torch.from_numpy(run.rollouts.sampled(row))
        # Counted as the model does without being given any, but for every sample: learned ones have gradients.
        places = torch.arange(before + after, device=device).expand(len(some), -1)
        yield Chunk(some, ids.to(device), mask.to(device), response.to(device), places)


def inputs_of(run: Run, chunk: Chunk) -> dict[str, Any]:
    """What the model is called with."""
    given = {"input_ids": chunk.ids, "attention_mask": chunk.mask, "position_ids": chunk.positions, "use_cache": False}
    return given | keep_logits(run.trained.model, chunk.scored)


def log_softmax(run: Run, chunk: Chunk, logits: torch.Tensor) -> torch.Tensor:
    """(B, S, vocabulary) log-probabilities of the last S tokens, in nats.

    Args:
        run: has the temperature.
        chunk: says S.
        logits: (B, S + 1 or more, vocabulary), of the last places of the texts.
    """
    predicting = logits[:, -chunk.scored - 1 : -1]
    return torch.log_softmax(predicting.float() / run.settings.loss.temperature, dim=-1)


def every_log(run: Run, chunk: Chunk) -> torch.Tensor:
    """(B, S, vocabulary) log-probabilities in nats."""
    amp = (
        torch.autocast(chunk.ids.device.type, torch.bfloat16) if run.settings.autocast == "bfloat16" else nullcontext()
    )
    with amp:
        logits = run.trained.model(**inputs_of(run, chunk)).logits
    return log_softmax(run, chunk, logits)


def forward(run: Run, chunk: Chunk) -> torch.Tensor:
    """(B, S) log-probability of every scored token in nats."""
    return every_log(run, chunk).gather(-1, chunk.scored_ids[..., None])[..., 0]


@torch.no_grad()
def entropies_of(run: Run, rows: np.ndarray, generation: np.ndarray) -> Logs:
    """Entropies in nats of the distributions that tokens were drawn from, at the weights that the model has."""
    found: Logs = {}
    for chunk in chunks(run, rows, generation):
        every = every_log(run, chunk)
        found |= chunk.by_row(-(every.exp() * every).sum(-1))
    return found


@torch.no_grad()
def log_probabilities_of(run: Run, rows: np.ndarray, generation: np.ndarray) -> Logs:
    """Log-probabilities of responses at the weights that the model has."""
    found: Logs = {}
    for chunk in chunks(run, rows, generation):
        found |= chunk.by_row(forward(run, chunk))
    return found


def logged(rollouts: Rollouts, name: str, rows: np.ndarray) -> Logs | None:
    """Log-probabilities that the log itself has; None where it has not, or not of all rows."""
    if name not in rollouts.table.column_names:
        return None
    found: Logs = {}
    for row, values in zip(rows.tolist(), rollouts.table[name].take(rows).to_pylist(), strict=True):
        if values is None:
            return None
        sampled = rollouts.sampled(row)
        given = np.asarray(values, dtype=np.float32)
        if len(given) not in (len(sampled), int(sampled.sum())):
            what = f"{name} of row {row} has {len(given)} numbers, and the response {len(sampled)} tokens"
            raise TsaeError(what, where=rollouts.origin, fix="Import the log anew, or leave this column out.")
        found[row] = torch.from_numpy(given if len(given) == int(sampled.sum()) else given[sampled])
    return found


@dataclass(frozen=True)
class Rows:
    """The rows of an optimiser step, and what the loss needs of each beside the model."""

    update: Update
    rows: np.ndarray
    weight: Mapping[int, float]
    """w_i of each row."""
    advantage: Mapping[int, float]
    counted: Mapping[int, torch.Tensor]
    """Which of a row's sampled tokens count, where not all do (the entropy quantile)."""


def rows_of(run: Run, update: Update) -> Rows:
    """What the loss of a step needs; entropies are computed at the weights that the model has."""
    loss, generation = run.settings.loss, run.plan.generations[update.generation]
    rows = np.concatenate(update.parts)
    n_tokens = _counted(run, rows)
    edges = np.cumsum([0, *map(len, update.parts)])
    places = [np.arange(low, high) for low, high in itertools.pairwise(edges)]
    weight = loss.weights(
        n_tokens, places, tokens_of_generation=int(_counted(run, generation).sum()), rows_of_generation=len(generation)
    )
    advantage = run.rollouts.frame.advantage.to_numpy(dtype=float)[rows]
    weight = np.where(n_tokens > 0, weight, 0.0)
    kept: dict[int, torch.Tensor] = {}
    if loss.top_entropy_quantile < 1:
        for part in update.parts:
            kept |= _high_entropy(run, part, generation)
    return Rows(
        update,
        rows,
        dict(zip(rows.tolist(), weight.tolist(), strict=True)),
        dict(zip(rows.tolist(), advantage.tolist(), strict=True)),
        kept,
    )


def _counted(run: Run, rows: np.ndarray) -> np.ndarray:
    """(n,) tokens of each row that count in the loss."""
    n: np.ndarray = run.rollouts.n_sampled[rows]
    if run.settings.loss.mask_truncated:
        n = np.where((run.rollouts.frame.finish_reason == "length").to_numpy()[rows], 0, n)
    return n


def _high_entropy(run: Run, part: np.ndarray, generation: np.ndarray) -> dict[int, torch.Tensor]:
    found = entropies_of(run, part[_counted(run, part) > 0], generation)
    if not found:
        return {}
    flat = torch.cat(list(found.values()))
    keep = run.settings.loss.entropy_kept(flat[None], torch.ones_like(flat[None], dtype=torch.bool))[0]
    return dict(zip(found, keep.split([len(one) for one in found.values()]), strict=True))


def used(run: Run, step: Rows, kept: np.ndarray | None = None) -> np.ndarray:
    """The rows of a step that have a gradient: those with an advantage, or all where there is a KL term."""
    rows = step.rows if kept is None else step.rows[kept[step.rows]]
    acts = [
        step.weight[row] != 0 and (step.advantage[row] != 0 or run.settings.loss.beta != 0) for row in rows.tolist()
    ]
    return np.asarray(rows[np.array(acts, dtype=bool)])


def summands(run: Run, step: Rows, known: Known, chunk: Chunk, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) of the loss's policy term and of its KL term, normalised; `log` as `forward` gives it."""
    rows, loss = chunk.rows.tolist(), run.settings.loss
    detached, mask = log.detach(), chunk.counted
    kept = chunk.spread({row: one.float() for row, one in step.counted.items()}, detached) > 0 if step.counted else None
    advantage, weight = (
        torch.tensor([of[row] for row in rows], dtype=torch.float32, device=log.device)
        for of in (step.advantage, step.weight)
    )
    advantage = advantage[:, None]
    if known.advantage:
        advantage = chunk.spread(known.advantage, detached)
    # Where the trainer compares with the log-probabilities of now, the ratio is 1 and its gradient that of log π.
    old = chunk.spread(known.old, detached) if any(row in known.old for row in rows) else None
    ref = chunk.spread(known.ref, detached) if loss.needs_ref else None
    sampled = logged(run.rollouts, SAMPLER, chunk.rows) if loss.needs_sampler else None
    sampler = None if sampled is None else chunk.spread(sampled, detached)
    policy, kl = loss.summands(BatchTokens(log, mask, advantage, old, ref, sampler, kept))
    return policy * weight[:, None], torch.zeros_like(policy) if kl is None else kl * weight[:, None]


def gradient_of(run: Run, step: Rows, known: Known, kept: np.ndarray | None = None) -> tuple[torch.Tensor, Logs]:
    """Compute the gradient of a step's loss. The model keeps its weights.

    Args:
        run: has the rows.
        step: of them.
        known: log-probabilities that do not change with the weights.
        kept: (n_trajectories,) rows that take part; the others' summands are taken away, and no other changes.

    Returns:
        (P,) gradient, and log-probabilities of the rows that were used at the step's beginning.
    """
    logs: Logs = {}
    run.trained.model.zero_grad()
    with run.trained.differentiable() as leaves:
        for chunk in chunks_of(run, step, kept):
            log = forward(run, chunk)
            policy, kl = summands(run, step, known, chunk, log)
            (policy + kl).sum().backward()
            logs |= chunk.by_row(log)
        gradient = run.trained.join({n: p.grad for n, p in leaves.items() if p.grad is not None})
    run.trained.model.zero_grad()
    return gradient, logs


def chunks_of(run: Run, step: Rows, kept: np.ndarray | None = None) -> Iterator[Chunk]:
    """Forward passes of the rows of a step that have a gradient, micro-batch by micro-batch."""
    generation, among = run.plan.generations[step.update.generation], used(run, step, kept)
    for part in step.update.parts:
        if len(rows := part[np.isin(part, among)]):
            yield from chunks(run, rows, generation)


def known_at(run: Run, update: Update, reference: torch.Tensor | None) -> Known:
    """What a generation's rows have when it is sampled; the model has the weights of that moment, and has them again
    afterwards. Log-probabilities that the log has are taken from there.

    Args:
        run: has the rows.
        update: the first that uses the generation.
        reference: (P,) weights of the reference; None without a KL term.
    """
    rows = run.plan.generations[update.generation]
    known, loss = Known(), run.settings.loss
    if loss.needs_sampler and logged(run.rollouts, SAMPLER, rows) is None:
        what = "the loss weighs tokens by the log-probabilities that the sampler gave them, which the log does not hold"
        fix = run.settings.facts.get("sampler_fix") or "Log them: tsae.rl.TsaeCallback(trainer), one line."
        raise TsaeError(what, where=run.rollouts.origin, fix=fix)
    if needs_old(run):
        column = SAMPLER if loss.ratio_to == "sampler" else OLD
        known.old = logged(run.rollouts, column, rows) or log_probabilities_of(run, rows, rows)
    if run.settings.needs_ref:
        found = logged(run.rollouts, REF, rows)
        if found is None:
            assert reference is not None
            now = run.trained.vector()
            run.trained.put(reference)
            found = log_probabilities_of(run, rows, rows)
            run.trained.put(now)
        known.ref = found
    return known


def with_reward_kl(run: Run, known: Known, generation: np.ndarray) -> Run:
    """The run with the advantages of a generation, where its rewards have a KL penalty and the log lacks advantages.

    Advantages are constants of an update, in the trainer as here: no gradient and no share has a term for what other
    weights would make of them. Replays without some samples use those of the run, too.

    Args:
        run: its model has the weights that sampled the generation.
        known: log-probabilities of the generation; gets advantages of tokens.
        generation: rows of the rollouts.
    """
    penalty = run.settings.reward_kl
    if penalty is None:
        return run
    frame = run.rollouts.frame
    old = known.old or log_probabilities_of(run, generation, generation)
    kl = [penalty.of(old[row], known.ref[row]) for row in generation.tolist()]
    reward = frame.reward.to_numpy(dtype=float)[generation]
    if not penalty.to_go:
        reward = reward - np.array([float(of_tokens.sum()) for of_tokens in kl])
    found = advantages_of(run.settings, reward, group_names(frame)[generation])
    if penalty.to_go:
        of_tokens = [float(a) - of.flip(0).cumsum(0).flip(0) for a, of in zip(found, kl, strict=True)]
        known.advantage = dict(zip(generation.tolist(), of_tokens, strict=True))
        found = np.array([float(of.mean()) if len(of) else 0.0 for of in of_tokens])
    every = frame.advantage.to_numpy(dtype=float, copy=True)
    every[generation] = found
    return replace(run, rollouts=run.rollouts.with_column("advantage", every))


def needs_old(run: Run) -> bool:
    """Whether ratios are against log-probabilities of an earlier moment. Else the trainer compares with those of now,
    and the ratio is 1."""
    batching, loss = run.settings.batching, run.settings.loss
    return batching.accumulation % (batching.parts * batching.iterations) != 0 or loss.ratio_to == "sampler"
