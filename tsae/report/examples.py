"""Examples: the trajectories on which a feature is most active, token by token."""

from __future__ import annotations

import numpy as np

from tsae.diff.result import FeatureDiff
from tsae.features.contexts import Context, top_contexts
from tsae.report.text import html_text, number

_BEFORE, _AFTER = 48, 24
"""Tokens shown before and after the strongest one; the prompt's start is cut first."""

_OUTCOMES = {"success": ("✓", "success"), "failure": ("✗", "failure"), "unknown": ("?", "outcome unknown")}


def feature_examples(diff: FeatureDiff, feature: int, n: int = 4) -> str:
    """HTML of the feature's top contexts; at most one a problem."""
    if diff.source is None:
        return ""
    contexts = top_contexts(diff.source, feature, n)
    if not contexts:
        return '<p class="quiet">Never active.</p>'
    strongest = max(float(context.activations.max()) for context in contexts)
    return f'<ol class="examples">{"".join(_example(diff, context, strongest) for context in contexts)}</ol>'


def _example(diff: FeatureDiff, context: Context, strongest: float) -> str:
    mark, word = _OUTCOMES.get(context.outcome, _OUTCOMES["unknown"])
    read = "" if context.reader == context.policy else f", read by {html_text(context.reader)}"
    head = (
        f'<span class="outcome {html_text(context.outcome)}">{mark} {word}</span> '
        f"sampled by {html_text(context.policy)}{read}; strongest {number(float(context.activations.max()))}"
    )
    tokens = _tokens(diff, context, strongest)
    return f'<li><div class="quiet">{head}</div><div class="tokens" dir="ltr">{tokens}</div></li>'


def _tokens(diff: FeatureDiff, context: Context, strongest: float) -> str:
    strings = diff.info.get("token_strings", {})
    peak = int(np.argmax(context.activations))
    start, stop = max(0, peak - _BEFORE), min(len(context.token_ids), peak + _AFTER)
    parts = ['<span class="cut">… </span>'] if start else []
    plain: list[str] = []

    def flush() -> None:
        if plain:
            parts.append("".join(plain))
            plain.clear()

    for i in range(start, stop):
        if i == context.n_prompt and i > start:
            flush()
            parts.append('<span class="turn" title="the response starts here">▸</span>')
        id = int(context.token_ids[i])
        # Without strings tokens are ids, which need a space between them.
        shown = html_text(strings[str(id)]) if str(id) in strings else f"#{id} "
        shown = shown.replace("\n", '<span class="break">⏎</span>\n')
        activation = float(context.activations[i])
        if activation > 0:
            flush()
            level = 1 + min(8, int(9 * activation / strongest)) if strongest > 0 else 1
            parts.append(f'<mark class="a{level}" title="{number(activation)}">{shown}</mark>')
        else:
            plain.append(shown)
    flush()
    if stop < len(context.token_ids):
        parts.append('<span class="cut"> …</span>')
    return "".join(parts)
