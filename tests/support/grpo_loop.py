"""A GRPO training in plain torch, a sample at a time: the oracle of replays, shares and effects."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, get_scheduler

from support.builders import make_rollouts
from tsae.attribution.certificates import logged_facts
from tsae.attribution.forward_passes import Run
from tsae.attribution.loss import PolicyLoss
from tsae.attribution.order import plan_updates
from tsae.attribution.path import Replayed, replay
from tsae.attribution.sample_gradients import TrainedWeights, log_probabilities
from tsae.attribution.settings import Batching, Optimiser, RunSettings
from tsae.attribution.states import State, States
from tsae.rollouts.table import Rollouts
from tsae.testbed import make_tokenizer

Logs = dict[int, torch.Tensor]
CASES: dict[str, tuple[str, RunSettings]] = {
    "as TRL does": ("llama", RunSettings(
        Optimiser("adamw", 1e-3, "linear", warmup=1, n_steps=5, weight_decay=0.3, max_grad_norm=0.1, decay_all=False,
                  eps=1e-4),
        PolicyLoss(), Batching(2, 2),
    )),
    "KL": ("llama", RunSettings(
        Optimiser("adamw", 1e-3, "cosine", n_steps=9, decay_all=False, eps=1e-4), PolicyLoss("grpo", beta=0.1),
        Batching(2, 4, 2),
    )),
    "sequence": ("llama", RunSettings(
        Optimiser("adamw", 1e-3, "constant", eps=1e-4),
        PolicyLoss("bnpo", level="sequence", top_entropy_quantile=0.317, mask_truncated=True, epsilon=0.002),
        Batching(1, 2),
    )),
    "SGD": ("qwen2", RunSettings(
        Optimiser("sgd", 1e-2, "constant", momentum=0.9, weight_decay=0.2, decay_all=False, max_grad_norm=0.5),
        PolicyLoss("dr_grpo", 16, epsilon_high=0.28, temperature=0.7), Batching(1, 2),
    )),
    # Tied embeddings, and positions that are learned.
    "Adam": ("gpt2", RunSettings(
        Optimiser("adam", 1e-3, "constant", weight_decay=0.2, decay_all=False, max_grad_norm=0.5, eps=1e-4),
        PolicyLoss("dr_grpo", 16, beta=0.1), Batching(1, 2),
    )),
    "LoRA": ("llama", RunSettings(
        Optimiser("adamw", 3e-3, "constant", max_grad_norm=0.5, eps=1e-4), PolicyLoss("dr_grpo", 16, beta=0.1), seed=5
    )),
}  # fmt: skip
"""Architectures and trainings of two or three generations. Where gradients are as small as rounding, Adam divides noise
by noise: eps is above that."""
ADAPTER = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def make_log(settings: RunSettings, n_generations: int, tokenizer: str | None = None, **columns: Any) -> Rollouts:
    """Generations of three problems with four random responses each, in random micro-batches; the fifth is cut off."""
    log = make_rollouts(n_problems=3 * n_generations, n_samples=4, tokenizer=tokenizer, **columns).with_advantages()
    rng, batching, of = np.random.default_rng(0), settings.batching, np.arange(len(log)) // 12
    parts = [rng.permutation(np.arange(12) % batching.parts) for _ in range(n_generations)]
    log = log.with_column("step", 1 + of * int(batching.updates)).with_column("generation", of)
    log = log.with_column("finish_reason", ["length" if row % 12 == 4 else "stop" for row in range(len(log))])
    return log.with_column("micro_batch", [[int(part)] * batching.iterations for part in np.concatenate(parts)])


class GrpoLoop:
    """A training on a log; `run` fills what comes after the arguments.

    Args:
        base: folder of the model.
        log: of `make_log`.
        settings: of the training.
        adapter: words of peft's LoraConfig, where an adapter is trained.
    """

    weights: list[torch.Tensor]
    """(P,) before the first step, and after each."""
    norms: list[float]
    """Of the gradients, before clipping."""
    old: Logs
    """Log-probabilities of responses at their generation's start, by row; and of the reference."""
    ref: Logs
    advantage: Logs
    """(T,) by row; without a KL penalty in the rewards (1,), those of the log."""

    def __init__(
        self, base: Path, log: Rollouts, settings: RunSettings, adapter: Mapping[str, Any] | None = None
    ) -> None:
        self.base, self.log, self.settings = base, log, settings
        self.model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
        self.as_trl = settings.autocast != "float32" or self.model.config.model_type == "gpt2"
        if adapter is not None:
            from peft import LoraConfig, get_peft_model

            with warnings.catch_warnings(), torch.random.fork_rng():
                warnings.simplefilter("ignore")  # peft uses what transformers deprecates
                torch.manual_seed(settings.seed or 0)
                self.model = get_peft_model(self.model, LoraConfig(**adapter))
        self.model.eval()
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.leaves = [p for p in self.model.parameters() if p.requires_grad]

    def vector(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(P,); None counts as zeros."""
        return torch.cat([
            torch.zeros(leaf.numel()) if t is None else t.detach().flatten()
            for t, leaf in zip(tensors, self.leaves, strict=True)
        ])  # fmt: skip

    @torch.no_grad()
    def put(self, weights: torch.Tensor) -> None:
        for leaf, part in zip(self.leaves, weights.split([leaf.numel() for leaf in self.leaves]), strict=True):
            leaf.copy_(part.view_as(leaf))

    def updates(self) -> Iterator[tuple[int, np.ndarray, list[list[int]], bool]]:
        """Steps, with the rows of their generation, their micro-batches, and whether they are its first."""
        batching, step, number = self.settings.batching, 0, self.log.frame.micro_batch
        for rows in self.log.frame.groupby("generation").indices.values():
            for i in range(batching.iterations):
                for low in range(0, batching.parts, batching.accumulation):
                    step += 1
                    own = range(low, low + batching.accumulation)
                    parts = [[int(row) for row in rows if number[row][i] == part] for part in own]
                    yield step, rows, parts, i == low == 0

    def logs(self, rows: Sequence[int], generation: np.ndarray) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """(T,) log-probability and entropy of every response token: a row at a time; or in one batch, prompts padded on
        the left and responses on the right."""
        texts = {row: self.log.tokens(row) for row in rows}
        before = {row: len(prompt) for row, (prompt, _) in texts.items()}
        if not self.as_trl:
            logits = [self.model(torch.from_numpy(np.concatenate(texts[row])[None].astype(np.int64))) for row in rows]
            found = dict(zip(rows, (one.logits[0] for one in logits), strict=True))
        else:
            whole = [self.log.tokens(int(row)) for row in generation]
            left, right = (max(len(text[side]) for text in whole) for side in (0, 1))
            ids = torch.zeros(2, len(rows), left + right, dtype=torch.long)
            for i, (prompt, response) in enumerate(texts.values()):
                own = slice(left - len(prompt), left + len(response))
                ids[0, i, own] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
                ids[1, i, own] = 1
            before = dict.fromkeys(rows, left)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.autocast == "bfloat16"):
                found = dict(zip(rows, self.model(input_ids=ids[0], attention_mask=ids[1]).logits, strict=True))
        every = {
            row: torch.log_softmax(
                one[before[row] - 1 :][: len(texts[row][1])].float() / self.settings.loss.temperature, -1
            )
            for row, one in found.items()
        }
        picked = {row: torch.from_numpy(response.astype(np.int64))[:, None] for row, (_, response) in texts.items()}
        return {row: (one.gather(-1, picked[row])[:, 0], -(one.exp() * one).sum(-1)) for row, one in every.items()}

    def summands(
        self, generation: np.ndarray, parts: list[list[int]], old: Logs, ref: Logs
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """(T,) of the policy term and of the KL term by row, normalised as TRL does."""
        loss, batching, found = self.settings.loss, self.settings.batching, {}
        cut = (self.log.frame.finish_reason == "length").to_numpy() & loss.mask_truncated
        size = np.where(cut, 0, self.log.n_sampled)
        for part in parts:
            seen = self.logs(part, generation)
            entropy = torch.cat([seen[row][1].detach() for row in part if not cut[row]])
            least = torch.quantile(entropy, 1 - loss.top_entropy_quantile)
            by = {
                "dapo": lambda row: size[generation].sum() / batching.parts,
                "grpo": lambda row, part=part: len(part) * size[row],
                "bnpo": lambda row, part=part: size[part].sum(),
                "dr_grpo": lambda row, part=part: len(part) * loss.max_completion_length,
            }[loss.kind]
            for row in [row for row in part if not cut[row]]:
                log, advantage = seen[row][0], self.advantage[row]
                moved = log - old[row]
                ratio = (moved if loss.level == "token" else moved.mean().expand_as(moved)).exp()
                clipped = ratio.clamp(1 - loss.epsilon, 1 + (loss.epsilon_high or loss.epsilon))
                policy = -torch.minimum(ratio * advantage, clipped * advantage)
                policy = torch.where(seen[row][1].detach() >= least, policy, 0.0)
                kl = loss.beta * ((ref[row] - log).exp() - (ref[row] - log) - 1) if loss.beta else 0 * log
                found[row] = policy / (by(row) * batching.accumulation), kl / (by(row) * batching.accumulation)
        return found

    def penalised(self, rows: np.ndarray) -> Logs:
        """(T,) advantages with a KL penalty in the rewards, response by response: of the reward less the sum of its
        tokens' penalties (verl), or of the reward, less what a token and those after it are charged (OpenRLHF)."""
        penalty, frame = self.settings.reward_kl, self.log.frame
        assert penalty is not None
        found = {}
        for _, group in frame.loc[rows].groupby("problem_id"):
            kl = {row: penalty.beta * (self.old[row] - self.ref[row]) for row in group.index}
            if penalty.kl == "k2":
                kl = {row: penalty.beta * (self.old[row] - self.ref[row]) ** 2 / 2 for row in group.index}
            total = [float(frame.reward[row]) - (0.0 if penalty.to_go else float(kl[row].sum())) for row in group.index]
            for row, reward in zip(group.index, total, strict=True):
                advantage = (reward - np.mean(total)) / (np.std(total, ddof=1) + 1e-6)
                later = [float(kl[row][t:].sum()) * penalty.to_go for t in range(len(kl[row]))]
                found[row] = torch.tensor([advantage - charged for charged in later])
        return found

    def optimiser(self) -> tuple[Any, Any]:
        """torch's, with the parameter groups of transformers' Trainer, and its schedule."""
        o, whose = self.settings.optimiser, self.model
        decay = self.names if o.decay_all else Trainer.get_decay_parameter_names(None, whose)  # type: ignore[arg-type]
        groups = [
            {"params": [p for n, p in whose.named_parameters() if p.requires_grad and (n in decay) == does],
             "weight_decay": o.weight_decay * does}
            for does in (True, False)
        ]  # fmt: skip
        if o.name == "sgd":
            made: Any = torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum)
        else:
            kind = torch.optim.AdamW if o.name == "adamw" else torch.optim.Adam
            made = kind(groups, lr=o.learning_rate, betas=o.betas, eps=o.eps)
        name = "constant_with_warmup" if o.schedule == "constant" else o.schedule
        return made, get_scheduler(name, made, o.warmup, o.n_steps)

    def run(
        self, kept: np.ndarray | None = None, old: Logs | None = None, to: Path | None = None, save: Sequence[int] = ()
    ) -> GrpoLoop:
        """Train.

        Args:
            kept: (n,) rows whose summands count.
            old: log-probabilities that ratios are against; by default those of the generation's start.
            to: folder for checkpoints with optimizer.pt, after the steps `save`.
        """
        loss, limit = self.settings.loss, self.settings.optimiser.max_grad_norm
        (made, schedule), reference = self.optimiser(), self.vector(self.leaves)
        self.advantage = dict(enumerate(torch.tensor(self.log.frame.advantage.to_numpy(np.float32))[:, None]))
        self.weights, self.norms, self.old, self.ref = [reference], [], {}, {}
        for step, rows, parts, first in self.updates():
            if first:
                self.old |= self._logs_at(self.weights[-1], rows)
                self.ref |= self._logs_at(reference, rows) if self.settings.needs_ref else {}
                self.advantage |= self.penalised(rows) if self.settings.reward_kl else {}
                self.put(self.weights[-1])
            made.zero_grad()
            of_rows = self.summands(rows, parts, old or self.old, self.ref)
            summed = [(policy + kl).sum() for row, (policy, kl) in of_rows.items() if kept is None or kept[row]]
            torch.stack(summed).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(self.leaves, limit or float("inf"))
            self.norms.append(float(norm))
            made.step()
            schedule.step()
            self.weights.append(self.vector(self.leaves))
            if loss.sync_ref and step % loss.sync_ref[1] == 0:
                reference = loss.sync_ref[0] * self.weights[-1] + (1 - loss.sync_ref[0]) * reference
            if to is not None and step in save:
                self.model.save_pretrained(to / f"checkpoint-{step}")
                make_tokenizer().save_pretrained(to / f"checkpoint-{step}")
                torch.save(made.state_dict(), to / f"checkpoint-{step}" / "optimizer.pt")
        return self

    @torch.no_grad()
    def _logs_at(self, weights: torch.Tensor, rows: np.ndarray) -> Logs:
        self.put(weights)
        return {row: log for row, (log, _) in self.logs(rows.tolist(), rows).items()}


def run_of(loop: GrpoLoop, *, batch_tokens: int = 4096, log: Rollouts | None = None) -> Run:
    """The same training as a run to be replayed, from its first weights."""
    trained = TrainedWeights(deepcopy(loop.model).requires_grad_(False), loop.names)
    trained.put(loop.weights[0])
    log = log or loop.log
    plan = plan_updates(log, loop.settings, checkpoints={}, vocabulary=None)
    return Run(trained, log, loop.settings, plan, State.at(loop.weights[0]), batch_tokens)


def replay_of(run: Run, folder: Path, *, budget: int = 10**9, **given: Any) -> Replayed:
    """Replayed without controls and facts, unless given."""
    states = States(folder, len(run.plan.updates), len(run.trained), budget)
    facts = given.pop("facts", logged_facts({}))
    return replay(run, states, given.pop("controls", {}), facts, progress=False, **given)


def apart(found: torch.Tensor, loop: GrpoLoop, step: int = -1) -> float:
    """Distance from the loop's weights after a step, as a part of the way there."""
    return float((found - loop.weights[step]).norm() / (loop.weights[step] - loop.weights[0]).norm())


def sample_gradients(
    trained: TrainedWeights, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """(B, P) of every sample's Σ_t weight_t log π(token t), without its padding; weight is (B, T − 1)."""
    found, leaves = [], {name: p.requires_grad_() for name, p in trained.parameters.items()}
    for row, kept, by in zip(ids, mask, weight, strict=True):
        n = int(kept.sum())
        log = log_probabilities(trained.model, row[None, :n], kept[None, :n])
        grads = torch.autograd.grad((log[0] * by[: n - 1]).sum(), list(leaves.values()), allow_unused=True)
        found.append(trained.join({name: g for name, g in zip(leaves, grads, strict=True) if g is not None}))
    trained.model.requires_grad_(False)
    return torch.stack(found)
