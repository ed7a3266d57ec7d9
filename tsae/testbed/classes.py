"""Token classes of the testbed for `tsae.feature_diff`: role, style and slips, from the ground-truth annotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tsae.rollouts.table import Rollouts
from tsae.testbed.annotate import ResponseFacts, TokenLabel, annotate, describe_response
from tsae.testbed.tokenizer import split_tokens

BEHAVIOURS = ("direct_answer", "skipped_steps")
"""Columns that `with_behaviours` adds: 1 for a response without a scratchpad step; share of required steps skipped."""

FAMILIES = {
    "direct-answer": ("answer marker, direct", "answer, direct"),
    "basic-computation": ("equals, scratchpad", "result, scratchpad", "slipped result, scratchpad"),
    "deliberation": tuple(
        f"{fault}{role}, scratchpad" for fault in ("", "slipped ") for role in ("operand", "operator", "separator")
    ),
}
"""For `tsae.diff.descriptions`: answering without a scratchpad, computing a result, and writing the next step."""


def token_classes(prompt: str, response: Sequence[str]) -> list[str]:
    """An annotator: one class per response token, such as "slipped result, scratchpad" or "answer, direct".

    A wrong token within the scratchpad is a class of its own; right and wrong final answers are one.
    """
    return [_name(label) for label in annotate(prompt, response)]


def _name(label: TokenLabel) -> str:
    fault = "slipped " if label.correct is False and label.role != "answer" else ""
    return f"{fault}{label.role.replace('_', ' ')}, {label.style}"


def right_steps(prompt: str, response: str) -> list[bool]:
    """Whether each step of a response is right, given what it wrote before (`tsae.claims`): what it copies and computes
    there. A response that answers at once has no steps."""
    judged: dict[int, bool] = {}
    for label in annotate(prompt, split_tokens(response)):
        if label.step is not None and label.correct is not None:
            judged[label.step] = judged.get(label.step, True) and label.correct
    return [judged[step] for step in sorted(judged)]


def with_behaviours(rollouts: Rollouts) -> Rollouts:
    """Add what each response did (`BEHAVIOURS`), and name the columns as behaviours."""
    facts = _facts(rollouts)
    values = [float(f.style == "direct") for f in facts], [f.skipped_share for f in facts]
    return _named(rollouts, dict(zip(BEHAVIOURS, values, strict=True)))


def with_styles(rollouts: Rollouts) -> Rollouts:
    """Say of each response which it is: direct (an answer alone), scratchpad (steps that the problem asks for, and then
    one answer), or broken; and name the columns as behaviours."""
    text = rollouts.frame.response
    direct = text.str.fullmatch(r"#\d").to_numpy()
    stepwise = text.str.fullmatch(r"[^#]+#\d").to_numpy() & [f.n_steps_valid > 0 for f in _facts(rollouts)]
    return _named(rollouts, {"direct": direct, "scratchpad": stepwise, "broken": ~direct & ~stepwise})


def _facts(rollouts: Rollouts) -> list[ResponseFacts]:
    frame = rollouts.frame
    return [describe_response(p, r) for p, r in zip(frame.prompt, frame.response, strict=True)]


def _named(rollouts: Rollouts, behaviours: Mapping[str, Sequence[float] | np.ndarray]) -> Rollouts:
    for name, values in behaviours.items():
        rollouts = rollouts.with_column(name, np.asarray(values, dtype=float))
    return Rollouts(rollouts.table, {**rollouts.info, "behaviours": list(behaviours)}, rollouts.origin)
