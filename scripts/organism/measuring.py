"""Accuracy and behaviour of a checkpoint on the testbed's levels, with 95 % intervals.

Responses are sampled at temperature 1, as in training. Shares have Wilson intervals and means normal ones, both of
independent responses: where several answer one problem (on "easy"), the intervals are a little too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from organism.pages import markdown
from tsae.rollouts.problems import Problem
from tsae.testbed.annotate import ResponseFacts, describe_response
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """One checkpoint on one level."""

    checkpoint: str
    level: str
    n_problems: int
    n_responses: int
    accuracy: Estimate
    """Share of responses that the verifier accepts (Wilson)."""
    direct: Estimate
    """Share of responses without a single complete step (Wilson)."""
    skipped: Estimate
    """Mean over responses of the share of required steps that no valid step carries out (normal)."""
    length: Estimate
    """Mean response length in tokens, with <eos> (normal)."""
    flawless: Estimate
    """Share of responses with every required step written, no wrong token and a right answer (Wilson): the successes
    that are neither guesses nor lucky slips."""
    unanswered: float
    """Share of responses that end without an answer."""
    accuracy_direct: Estimate | None
    """Accuracy among direct responses (Wilson); None if there are none."""
    accuracy_scratchpad: Estimate | None
    """Accuracy among scratchpads (Wilson); None if there are none."""


def sample_responses(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    seed: int,
    batch: int = 256,
    max_tokens: int = MAX_RESPONSE_TOKENS,
) -> list[str]:
    """One response per prompt, sampled at temperature 1; texts keep ``<eos>``, so that a cut response shows.

    The model is in evaluation mode. The seed is set as that of torch's generator.
    """
    import torch

    torch.manual_seed(seed)
    responses: list[str] = []
    for start in range(0, len(prompts), batch):
        encoded = tokenizer(
            list(prompts[start : start + batch]), return_tensors="pt", padding=True, padding_side="left"
        )
        with torch.inference_mode():
            # top_k=0: generate's default of 50 exceeds the vocabulary anyway, but sampling shall be plain.
            ids = model.generate(
                **encoded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens
            )
        new = ids[:, encoded["input_ids"].shape[1] :]  # (n_prompts, longest response)
        responses += tokenizer.batch_decode(new, skip_special_tokens=False)
    return responses


def summarise(checkpoint: str, level: str, n_problems: int, facts: Sequence[ResponseFacts]) -> Measurement:
    """The measurement of a set of described responses."""
    by_style = {style: [f for f in facts if f.style == style] for style in ("direct", "scratchpad")}
    return Measurement(
        checkpoint=checkpoint,
        level=level,
        n_problems=n_problems,
        n_responses=len(facts),
        accuracy=wilson(sum(f.correct for f in facts), len(facts)),
        direct=wilson(len(by_style["direct"]), len(facts)),
        skipped=mean_interval([f.skipped_share for f in facts]),
        length=mean_interval([float(f.n_tokens) for f in facts]),
        flawless=wilson(sum(_is_flawless(f) for f in facts), len(facts)),
        unanswered=sum(f.answer is None for f in facts) / len(facts),
        accuracy_direct=_accuracy(by_style["direct"]),
        accuracy_scratchpad=_accuracy(by_style["scratchpad"]),
    )


def measure(
    checkpoint: str,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    n_responses: int,
    seed: int,
) -> Measurement:
    """Sample responses to problems of one level, which are asked again from the start where they are few."""
    asked = [problems[index % len(problems)] for index in range(n_responses)]
    responses = sample_responses(model, tokenizer, [problem.prompt for problem in asked], seed)
    facts = [describe_response(problem.prompt, text) for problem, text in zip(asked, responses, strict=True)]
    return summarise(checkpoint, str(problems[0].level), min(len(problems), n_responses), facts)


def wilson(successes: int, n: int) -> Estimate:
    """A share with its 95 % Wilson score interval."""
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high))


def mean_interval(values: Sequence[float]) -> Estimate:
    """A mean with its 95 % normal interval: mean ± 1.96 standard errors."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    half = 1.96 * float(array.std(ddof=1)) / len(array) ** 0.5 if len(array) > 1 else float("nan")
    return Estimate(mean, mean - half, mean + half)


def to_records(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as JSON-ready dictionaries."""
    return [asdict(measurement) for measurement in measurements]


def to_markdown(measurements: Sequence[Measurement]) -> str:
    """One Markdown table row per checkpoint and level; intervals in brackets."""
    estimates = {
        "accuracy": "accuracy", "direct": "direct answers", "skipped": "skipped computation", "length": "tokens",
        "flawless": "flawless", "accuracy_direct": "accuracy if direct",
        "accuracy_scratchpad": "accuracy if scratchpad",
    }  # fmt: skip
    rows = [
        [m.checkpoint, m.level, f"{m.n_responses} ({m.n_problems})"]
        + [_cell(getattr(m, name), 1 if name == "length" else 2) for name in estimates]
        for m in measurements
    ]
    return markdown(["checkpoint", "level", "responses (problems)", *estimates.values()], rows)


def _is_flawless(facts: ResponseFacts) -> bool:
    return facts.correct and facts.n_steps_skipped == 0 and facts.first_wrong is None


def _accuracy(facts: Sequence[ResponseFacts]) -> Estimate | None:
    return wilson(sum(f.correct for f in facts), len(facts)) if facts else None


def _cell(estimate: Estimate | None, digits: int = 2) -> str:
    if estimate is None:
        return "–"

    def show(value: float) -> str:
        return f"{value:.{digits}f}".removeprefix("0")  # shares as .52

    return f"{show(estimate.value)} ({show(estimate.low)}–{show(estimate.high)})"
