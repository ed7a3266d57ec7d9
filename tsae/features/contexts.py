"""What a feature responds to and promotes: top contexts, classes of tokens, top tokens, logit effects.

An annotator is a plain function (prompt, response tokens) -> one class per response token.

The logit effect is taken along the direct path alone: what a unit of activation, written into the residual stream, adds
to the logits if no later block acts on it,

    effect = W_dec · diag(g) · W_U   (n_features, vocabulary), minus its mean over the vocabulary,

with g the weight of the final norm. The norm also divides by the length of the stream, which scales all logits of a
token alike and is left out: only ratios mean something. Features far below the last block mostly act through later
blocks, so this is a hint at what a feature does and not a test of it (`tsae.intervene` is one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import einsum, reduce

from tsae.activations.shard import rows_mask
from tsae.base.filters import find_function
from tsae.checkpoints.hooks import decoder_blocks
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.tokenizers import text_of
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable, masked_sums
from tsae.features.sparse_matrices import no_code, sums_by_code
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Context:
    """One trajectory, as one reader read it, with a feature's activation on every token."""

    reader: str
    trajectory: int
    """Row id into the rollouts."""
    token_ids: np.ndarray
    """(n,) of prompt and response."""
    activations: np.ndarray
    """(n,) of the feature; 0 on tokens that do not count: special tokens, outliers, and those of the response that the
    policy did not sample."""
    n_prompt: int
    """Tokens of the prompt, which come first."""
    outcome: str
    policy: str
    problem_id: str


class Peaks(NamedTuple):
    """The strongest token of a feature in every row where it is active, in the order of the rows."""

    row: np.ndarray
    token: np.ndarray
    value: np.ndarray


def top_contexts(features: FeatureTable, feature: int, n: int = 8, *, reader: str | None = None) -> list[Context]:
    """The trajectories with the feature's largest activations, at most one a problem.

    Args:
        features: the table.
        feature: its index.
        n: how many.
        reader: only what this reader read.

    Raises:
        TsaeError: where there is no such feature or reader, or none are asked for.
    """
    features.need([feature])
    if n < 1:
        raise TsaeError(f"n={n} contexts are none", where=features.origin, fix="Ask for at least one.")
    counted = features.span_mask("all")
    tokens, values = features.column(feature)
    keep = counted[tokens]
    if reader is not None:
        keep &= features.reader[features.rows_of(tokens)] == features.readers.index(features.reader_info(reader)["id"])
    tokens, values = tokens[keep], values[keep]
    problems = features.rollouts.table["problem_id"].to_pylist()
    found: list[Context] = []
    seen: set[str] = set()
    for token in tokens[np.lexsort((tokens, -values))]:
        row = int(features.rows_of(token))
        problem = problems[features.trajectory[row]]
        if problem not in seen:
            seen.add(problem)
            found.append(context(features, feature, row))
            if len(found) == n:
                break
    return found


def context(features: FeatureTable, feature: int, row: int) -> Context:
    """A row of the table with one feature's activations."""
    span = slice(int(features.row_offsets[row]), int(features.row_offsets[row + 1]))
    trajectory = int(features.trajectory[row])
    record = features.rollouts.table.select(["outcome", "policy", "problem_id"]).slice(trajectory, 1).to_pylist()[0]
    ids = features.token_ids[span]
    # Outliers have no codes.
    counted = rows_mask(
        ids, np.array([0, len(ids)]), features.rollouts, np.array([trajectory]), "all", features.info["special_ids"]
    )
    return Context(
        reader=features.readers[features.reader[row]],
        trajectory=trajectory,
        token_ids=ids,
        activations=features.codes[span][:, [feature]].toarray()[:, 0] * counted,
        n_prompt=int(features.rollouts.lengths("prompt_ids")[trajectory]),
        **record,
    )


def peaks_of(source: FeatureTable, counted: np.ndarray, feature: int) -> Peaks:
    """Where a feature is strongest, over the (n_tokens,) counted tokens."""
    token, value = source.column(feature)
    keep = counted[token] & (value > 0)
    token, value = token[keep].astype(np.int64), value[keep]
    row = source.rows_of(token)
    starts = np.flatnonzero(np.r_[True, np.diff(row) != 0][: len(row)])
    if not len(starts):
        return Peaks(row, token, value)
    best = np.maximum.reduceat(value, starts)
    run = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(row)]))
    # The first token that reaches the maximum.
    at = np.flatnonzero(value == best[run])
    at = at[np.unique(run[at], return_index=True)[1]]
    return Peaks(row[starts], token[at], best)


Annotator = Callable[[str, Sequence[str]], Sequence[str]]
"""(prompt text, response tokens as strings) -> class of each response token."""


def find_annotator(name: str) -> Annotator:
    """Import the annotator that ``module:function`` names."""
    fix = "Give module:function of a function (prompt, response tokens) -> one class per token."
    return find_function(name, takes=2, where="annotator", fix=fix)


PROMPT_CLASS, SPECIAL_CLASS, RARE = "prompt", "special", "rare tokens"
_MIN_TOKENS = 20  # A class with fewer tokens cannot be what a feature responds to.


@dataclass(frozen=True)
class TokenClasses:
    """A class for every token of a FeatureTable."""

    names: list[str]
    code: np.ndarray
    """(n_tokens,) index into names."""


def annotate_tokens(features: FeatureTable, annotator: Annotator, token_strings: Sequence[str]) -> TokenClasses:
    """Apply an annotator to every trajectory. Prompt tokens have a class of their own, special tokens and outliers too.

    Args:
        features: the table.
        annotator: called once a trajectory.
        token_strings: text of every token id.
    """
    names: dict[str, int] = {PROMPT_CLASS: 0, SPECIAL_CLASS: 1}
    by_trajectory: dict[int, np.ndarray] = {}
    prompts = features.rollouts.table["prompt"].to_pylist()
    prompt_lengths = features.rollouts.lengths("prompt_ids")
    code = np.zeros(len(features.token_ids), dtype=np.int32)
    for row, trajectory in enumerate(features.trajectory.tolist()):
        start, stop = features.row_offsets[row] + prompt_lengths[trajectory], features.row_offsets[row + 1]
        if trajectory not in by_trajectory:
            tokens = [text_of(token_strings, i) for i in features.token_ids[start:stop]]
            classes = annotator(prompts[trajectory] or "", tokens)
            if len(classes) != len(tokens):
                what = f"gave {len(classes)} classes for the {len(tokens)} response tokens of trajectory {trajectory}"
                raise TsaeError(what, where="annotator", fix="Give one class per response token.")
            by_trajectory[trajectory] = np.array([names.setdefault(c, len(names)) for c in classes], dtype=np.int32)
        code[start:stop] = by_trajectory[trajectory]
    code[~features.span_mask("all")] = 1
    return TokenClasses(list(names), code)


def responds_to(features: FeatureTable, classes: TokenClasses, among: np.ndarray | None = None) -> pd.DataFrame:
    """For every feature the class of tokens that its activation singles out, among all tokens or those of a mask.

    share is the part of the feature's activation that falls on a class, and lift is share divided by the class's part
    of all tokens. The class has the largest share · log(lift) among classes with at least 20 tokens: its contribution
    to the Kullback–Leibler divergence between where the feature is active and where tokens are. So a rare class with a
    slightly higher lift does not win over the common one that carries the activation. Special tokens do not count. This
    describes the feature; it does not test what the feature does.

    Returns:
        indexed by feature: responds_to, lift, share, n_tokens (on which it is active). A feature that is active only
        on smaller classes responds to "rare tokens".
    """
    counted = classes.code != classes.names.index(SPECIAL_CLASS)
    counted = counted if among is None else counted & among
    n_classes = len(classes.names)
    code = np.where(counted, classes.code, np.int32(n_classes))
    sums = np.empty((n_classes, features.n_features))
    for some, found in sums_by_code(features.columns, code, n_classes):
        sums[:, some] = found
    sizes = np.bincount(classes.code[counted], minlength=n_classes).astype(float)
    total = reduce(sums, "token_class feature -> feature", "sum")
    shares = sums / np.where(total > 0, total, 1)
    lifts = shares / np.maximum(sizes / sizes.sum(), 1e-12)[:, None]
    score = np.where(sizes[:, None] >= _MIN_TOKENS, shares * np.log(np.maximum(lifts, 1e-12)), -np.inf)
    best = score.argmax(0)
    column = np.arange(features.n_features)
    # Active, but on no class that is large enough.
    rare = (total > 0) & ((shares[best, column] == 0) | (sizes[best] < _MIN_TOKENS))
    return pd.DataFrame(
        {
            "responds_to": np.select(
                [total == 0, rare], ["never active", RARE], np.array(classes.names, dtype=object)[best]
            ),
            "lift": np.where(rare, 0.0, lifts[best, column]),
            "share": np.where(rare, 0.0, shares[best, column]),
            "n_tokens": masked_sums(features, counted)[0],
        },
        index=pd.RangeIndex(features.n_features, name="feature"),
    )


def top_tokens(
    features: FeatureTable, token_strings: Sequence[str], n: int = 5, among: np.ndarray | None = None
) -> pd.DataFrame:
    """For every feature the tokens that carry most of its activation, among all tokens or those of a mask.

    Returns:
        indexed by feature: top_tokens (the strings, most activation first), top_token_share (share of the feature's
        summed activation on the first one; near 1 means that the feature may be lexical).
    """
    mask = features.span_mask("all") if among is None else among
    ids, number = id_codes(features.token_ids, mask)
    code = no_code(len(mask), max(len(ids), 1))
    for _, tokens, _ in features.row_blocks():
        code[tokens][mask[tokens]] = number[features.token_ids[tokens][mask[tokens]]]
    strings = [text_of(token_strings, i) for i in ids]
    names, share = [], []
    for _, sums in sums_by_code(features.columns, code, max(len(ids), 1)):
        sums = np.ascontiguousarray(sums.T)  # (features, ids)
        column, total = np.arange(len(sums)), sums.sum(1)
        best, of_id = np.zeros((n, len(column))), np.zeros((n, len(column)), dtype=int)
        for place in range(n):  # faster than a partition, and of equal sums the first id comes first
            of_id[place] = sums.argmax(1)
            best[place] = sums[column, of_id[place]]
            sums[column, of_id[place]] = 0
        names += [
            [strings[i] for i, value in zip(*each, strict=True) if value > 0]
            for each in zip(of_id.T.tolist(), best.T.tolist(), strict=True)
        ]
        share.append(np.divide(best[0], total, out=np.zeros(len(total)), where=total > 0))
    table = {"top_tokens": names, "top_token_share": np.concatenate(share)}
    return pd.DataFrame(table, index=pd.RangeIndex(features.n_features, name="feature"))


def id_codes(token_ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The (n,) ids that occur on tokens of a mask, and the int32 index of every id up to the largest among them.

    Other ids have −1.
    """
    occurs = np.zeros(int(token_ids.max(initial=0)) + 1, dtype=bool)
    occurs[token_ids[mask]] = True
    ids = np.flatnonzero(occurs)
    number = np.full(len(occurs), -1, dtype=np.int32)
    number[ids] = np.arange(len(ids))
    return ids, number


_CHUNK = 1 << 25
"""Effects computed at once: 128 MiB in float32."""


@torch.no_grad()
def logit_effects(
    sae: TemporalSAE, checkpoint: Checkpoint | PreTrainedModel, strings: Sequence[str], *, n: int = 8
) -> pd.DataFrame:
    """The tokens that every feature promotes and suppresses most.

    Args:
        sae: gives the decoder directions.
        checkpoint: gives the final norm and the unembedding; or its loaded model.
        strings: text of every token id; ids beyond them pad the vocabulary and are left out.
        n: tokens on either side.

    Returns:
        indexed by feature: promotes and suppresses (lists of up to n tokens, strongest first), promotes_by and
        suppresses_by (their effects on the logit per unit of activation, relative to the mean over the vocabulary).

    Raises:
        TsaeError: where the model's unembedding does not read a residual stream of the SAE's width.
    """
    model = checkpoint.load_model(dtype="float32") if isinstance(checkpoint, Checkpoint) else checkpoint
    head = model.get_output_embeddings()
    if head is None or head.weight.shape[1] != sae.d_model:
        what = f"{type(model).__name__} has no unembedding that reads {sae.d_model} dimensions"
        fix = "Give a checkpoint of the series that the SAE was trained on."
        raise TsaeError(what, where=model.config._name_or_path, fix=fix)
    unembedding = head.weight[: len(strings)].float()  # (vocabulary, d_model)
    unembedding = unembedding - reduce(unembedding, "token d_model -> d_model", "mean")
    unembedding = unembedding * final_norm_weight(model, sae.d_model)
    n = min(n, len(unembedding))
    columns: dict[str, list[list[object]]] = {
        name: [] for name in ("promotes", "promotes_by", "suppresses", "suppresses_by")
    }
    for block in sae.W_dec.float().to(unembedding.device).split(max(1, _CHUNK // len(unembedding))):
        effect = einsum(block, unembedding, "feature d_model, token d_model -> feature token")
        for side, sign in (("promotes", 1), ("suppresses", -1)):
            values, ids = (sign * effect).topk(n, dim=1)
            kept = [(r, v[: sum(x > 0 for x in v)]) for r, v in zip(ids.tolist(), values.tolist(), strict=True)]
            columns[side] += [[strings[i] for i in row[: len(found)]] for row, found in kept]
            columns[f"{side}_by"] += [[sign * x for x in found] for _, found in kept]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(sae.W_dec), name="feature"))


def final_norm_weight(model: PreTrainedModel, d_model: int) -> torch.Tensor:
    """(d_model,) weight of the final norm; ones where the model has none.

    It is measured on a vector of ±1 with mean 0, to which a norm only applies its weight and bias.
    """
    blocks = decoder_blocks(model)
    owner = next(m for m in model.modules() if any(child is blocks for child in m.children()))
    norms = [m for m in owner.children() if "norm" in type(m).__name__.lower()]
    if not norms:
        return torch.ones(d_model)
    weight = next(norms[-1].parameters(), torch.ones(d_model))
    signs = torch.ones(d_model, device=weight.device, dtype=weight.dtype)
    signs[1::2] = -1
    return ((norms[-1](signs) - norms[-1](-signs)) / 2 * signs).float()
