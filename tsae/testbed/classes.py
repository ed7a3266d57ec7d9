"""Token classes of the testbed for `tsae.feature_diff`: role, style and slips, from the ground-truth annotation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tsae.rollouts.table import Rollouts
from tsae.testbed.annotate import TokenLabel, annotate, describe_response
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
    frame = rollouts.frame
    facts = [describe_response(p, r) for p, r in zip(frame.prompt, frame.response, strict=True)]
    rollouts = rollouts.with_column("direct_answer", np.array([float(f.style == "direct") for f in facts]))
    rollouts = rollouts.with_column("skipped_steps", np.array([f.skipped_share for f in facts]))
    return Rollouts(rollouts.table, {**rollouts.info, "behaviours": list(BEHAVIOURS)}, rollouts.origin)
