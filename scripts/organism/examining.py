"""What the claims study measures on a model of the testbed and on the batches of its training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from organism.arms import Batch, answer, token_statistics
from organism.mixed import prompt_ids
from tsae.rollouts.problems import Problem
from tsae.testbed.annotate import TokenLabel, annotate, describe_response
from tsae.testbed.chains import generate_problems, parse_prompt
from tsae.testbed.tokenizer import TOKEN_IDS, split_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEVELS: dict[str, tuple[int, int]] = {"easy": (1, 1), "medium": (4, 6), "long": (7, 9), "hard": (10, 14)}
LENGTHS = tuple(range(1, 15))
_PLANTED_AFTER = 1
"""Step (from 0) that carries the planted slip; what comes after is examined."""


def measure(model: PreTrainedModel, problems: Sequence[Problem], samples: int, seed: int) -> dict[str, float]:
    """Accuracy and behaviour on problems; see `behaviour`."""
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    batch = answer(model.eval(), problems, generator, samples=samples)
    model.train(was_training)
    return behaviour(batch)


def behaviour(batch: Batch) -> dict[str, float]:
    """Means over responses.

    accuracy        right final answers
    direct          responses without a scratchpad
    skipped         required steps that no valid step carries out
    flawless        right, with all steps and without a wrong token: globally valid
    coherent        written results that follow from their own operands: locally valid; NaN without any
    length          tokens
    top_answer      share of the most frequent final answer: how much answers repeat over problems
    accuracy_direct, accuracy_scratchpad  right answers among these; NaN without any
    """
    facts = [describe_response(p.prompt, text) for p, text in zip(batch.problems, batch.texts, strict=True)]
    results = [label.correct is True for labels in labels_of(batch) for label in labels if label.role == "result"]
    direct = np.array([fact.style == "direct" for fact in facts])
    right = batch.right
    answers = Counter(fact.answer for fact in facts)
    return {
        "accuracy": float(right.mean()),
        "direct": float(direct.mean()),
        "skipped": float(np.mean([fact.skipped_share for fact in facts])),
        "flawless": float(
            np.mean([fact.correct and not fact.n_steps_skipped and fact.first_wrong is None for fact in facts])
        ),
        "coherent": float(np.mean(results)) if results else float("nan"),
        "length": float(np.mean([fact.n_tokens for fact in facts])),
        "top_answer": max(answers.values()) / len(facts),
        "accuracy_direct": float(right[direct].mean()) if direct.any() else float("nan"),
        "accuracy_scratchpad": float(right[~direct].mean()) if (~direct).any() else float("nan"),
    }


def labels_of(batch: Batch) -> list[list[TokenLabel]]:
    """Ground truth of every token of every response."""
    return [annotate(p.prompt, split_tokens(text)) for p, text in zip(batch.problems, batch.texts, strict=True)]


def of_step(batch: Batch, samples: int) -> dict[str, float]:
    """What a training step shows: behaviour, groups with one success, and entropy by role.

    lone, others            successes that are their group's only one, and all other successes
    lone_direct, others_direct, lone_flawed, others_flawed
                            of these, the direct answers, and those with a wrong or missing step
    entropy/ROLE            nats, mean over the tokens of a role
    """
    found = {name: value for name, value in behaviour(batch).items() if not name.startswith("accuracy_")}
    found["reward"] = float(batch.rewards.mean())
    group = np.arange(len(batch.right)) // samples
    lone = batch.right & (np.bincount(group, weights=batch.right)[group] == 1)
    facts = [describe_response(p.prompt, text) for p, text in zip(batch.problems, batch.texts, strict=True)]
    direct = np.array([fact.style == "direct" for fact in facts])
    flawed = np.array([fact.n_steps_skipped > 0 or fact.first_wrong is not None for fact in facts])
    for name, some in (("lone", lone), ("others", batch.right & ~lone)):
        found |= {name: float(some.sum()), f"{name}_direct": float((some & direct).sum())}
        found[f"{name}_flawed"] = float((some & flawed).sum())
    entropies: dict[str, list[float]] = {}
    for labels, values in zip(labels_of(batch), batch.entropy, strict=True):
        for label, value in zip(labels, values, strict=True):
            entropies.setdefault(label.role, []).append(float(value))
    return found | {f"entropy/{role}": float(np.mean(values)) for role, values in sorted(entropies.items())}


def by_length(model: PreTrainedModel, n: int, samples: int, seed: int) -> list[float]:
    """Accuracy on chains of 1 to 14 operations."""
    return [measure(model, generate_problems((k, k), n, seed), samples, seed)["accuracy"] for k in LENGTHS]


def successes(model: PreTrainedModel, problems: Sequence[Problem], samples: int, seed: int) -> dict[str, list[int]]:
    """Right and flawless responses to each problem, for pass@k."""
    batch = answer(model.eval(), problems, torch.Generator().manual_seed(seed), samples=samples)
    facts = [describe_response(p.prompt, text) for p, text in zip(batch.problems, batch.texts, strict=True)]
    flawless = np.array([f.correct and not f.n_steps_skipped and f.first_wrong is None for f in facts])
    return {
        "right": batch.right.reshape(-1, samples).sum(1).tolist(),
        "flawless": flawless.reshape(-1, samples).sum(1).tolist(),
    }


def distance(model: PreTrainedModel, base: PreTrainedModel, problems: Sequence[Problem], seed: int) -> float:
    """KL divergence from the base in nats a response, estimated on the model's own responses."""
    batch = answer(model.eval(), problems, torch.Generator().manual_seed(seed), samples=8)
    own, then = token_statistics(model, batch)[0], token_statistics(base, batch)[0]
    return float(np.mean([float((a - b).sum()) for a, b in zip(own, then, strict=True)]))


def restored(
    model: PreTrainedModel, base: PreTrainedModel, problems: Sequence[Problem], samples: int, seed: int
) -> dict[str, float]:
    """Accuracy with one layer's weights of the base put back into the run, and with one of the run's put into the base:
    "restored/0", "damaged/0", …"""
    found = {}
    theirs = base.state_dict()
    for layer in range(int(model.config.num_hidden_layers)):
        for name, receiver, giver in (("restored", model, theirs), ("damaged", base, model.state_dict())):
            before = {key: value.clone() for key, value in receiver.state_dict().items()}
            own = {key: giver[key] if f".layers.{layer}." in key else value for key, value in before.items()}
            receiver.load_state_dict(own)
            found[f"{name}/{layer}"] = measure(receiver, problems, samples, seed)["accuracy"]
            receiver.load_state_dict(before)
    return found


@torch.no_grad()
def sparsity(model: PreTrainedModel, n: int, seed: int) -> list[float]:
    """Hoyer sparsity of the last hidden state at the prompt's last token: mean over chains of 1 to 14 operations each.

    (√d − ‖x‖₁ / ‖x‖₂) / (√d − 1), Hoyer 2004: 0 if all entries are equal, 1 if only one is not 0.
    """
    found = []
    for k in LENGTHS:
        ids = torch.tensor([prompt_ids(problem) for problem in generate_problems((k, k), n, seed)])
        x = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1].double()  # (n, d_model)
        root = x.shape[-1] ** 0.5
        found.append(float(((root - x.norm(p=1, dim=-1) / x.norm(dim=-1)) / (root - 1)).mean()))
    return found


def natural_slips(batch: Batch) -> dict[str, float]:
    """Share of written results that do not follow from their own operands, after an earlier such error and without one,
    at the same place in the scratchpad. Copying is left out: after an omitted step all that follows looks miscopied."""
    after: dict[tuple[int, bool], list[bool]] = {}
    for labels in labels_of(batch):
        slipped = False
        for place, label in enumerate(label for label in labels if label.role == "result"):
            wrong = label.correct is False
            after.setdefault((place, slipped), []).append(wrong)
            slipped |= wrong
    both = [place for place, slipped in after if slipped and (place, False) in after]
    weights = np.array([min(len(after[place, True]), len(after[place, False])) for place in both], dtype=float)
    rates = {s: np.array([np.mean(after[place, s]) for place in both]) for s in (True, False)}
    if not weights.sum():
        return {}
    mean = {s: float((rates[s] * weights).sum() / weights.sum()) for s in (True, False)}
    return {"natural_after_error": mean[True], "natural_without": mean[False]}


@torch.no_grad()
def planted_slips(model: PreTrainedModel, problems: Sequence[Problem], seed: int) -> dict[str, float]:
    """Probability that a later step errs, exact from the model's distributions, after a planted slip and without it."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {"planted_after_error": [], "planted_without": []}
    for problem in problems:
        chain = parse_prompt(problem.prompt)
        for name in found:
            value, text, begins = chain.digits[0], "", []
            for place, (operator, digit) in enumerate(zip(chain.operators, chain.digits[1:], strict=True)):
                begins.append(len(text))
                result = {"+": value + digit, "-": value - digit, "*": value * digit}[operator] % 10
                if name == "planted_after_error" and place == _PLANTED_AFTER:
                    result = (result + int(rng.integers(1, 10))) % 10
                text += f"{value}{operator}{digit}={result};"
                value = result
            ids = torch.tensor([prompt_ids(problem) + [TOKEN_IDS[character] for character in text]])
            log = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits, dim=-1)
            chosen = log.gather(-1, ids[:, 1:, None])[0, len(prompt_ids(problem)) - 1 :, 0]
            for begin, end in zip(
                begins[_PLANTED_AFTER + 1 :], [*begins[_PLANTED_AFTER + 2 :], len(text)], strict=True
            ):
                found[name].append(1 - float(chosen[begin:end].sum().exp()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def rounded(value: Any) -> Any:
    """The same with floats of five significant digits; NaN becomes None."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return None if np.isnan(value) else float(f"{value:.5g}")
    return value
