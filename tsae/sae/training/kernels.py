"""Triton kernels of a training step: what `tsae.sae.training.sparse_codes` computes with sparse codes, on a GPU.

Tensor cores multiply two dense matrices fast, but codes are 99.9 % zeros. These kernels read the rows of active codes
alone. Every sum is taken in float32, and in one order but in `similarities` and `exponentials`, whose last bits may
differ from run to run.

Codes come as entries: (nnz,) values, and where each stands. `ends` are the places where the entries of a row begin and
end (`sparse_codes.offsets`). All tensors are contiguous and on one GPU. But for `above` by default, nothing here lets
the CPU wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
import triton.language as tl

_Function = TypeVar("_Function", bound=Callable[..., Any])

_COLUMNS = 4096  # pre-activations that one program compares
_AT_ONCE = 1024  # codes that one program of `largest` compares
_LATENTS, _WIDTH, _ENTRIES = 16, 256, 16  # of a tile of `by_latent`
_TILE = 1 << 14  # numbers of decoder rows that one program of `reconstruct` holds at once


def _on_its_device(function: _Function) -> _Function:
    """Run kernels on the GPU of the first tensor. Triton takes the current one, whatever the tensors lie on."""

    @wraps(function)
    def run(first: Any, *others: Any, **options: Any) -> Any:
        tensor = first
        while not isinstance(tensor, torch.Tensor):
            tensor = tensor[0]
        on = torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
        with on:  # on a CPU Triton interprets
            return function(first, *others, **options)

    return cast(_Function, run)


@triton.jit
def _mark(products, least, words, counts, n_columns, n_blocks, COLUMNS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, block = program // n_blocks, program % n_blocks
    bit = tl.arange(0, 32)
    column = block * COLUMNS + tl.arange(0, COLUMNS // 32)[:, None] * 32 + bit[None, :]
    inside = column < n_columns
    value = tl.load(products + row * n_columns + column, inside, float("-inf"))
    above = (value > tl.load(least + column, inside, float("inf"))).to(tl.int32)
    word = tl.sum(above << bit[None, :], 1)
    tl.store(words + program * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32), word)
    tl.store(counts + program, tl.sum(tl.sum(above, 1), 0))


@triton.jit
def _list(
    products, bias, words, ends, found, values, most, n_columns, n_blocks, COLUMNS: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + program)
    start = tl.load(ends + program - 1, program > 0, 0)
    if end > start:
        lane = tl.arange(0, COLUMNS // 32)
        word = tl.load(words + program * (COLUMNS // 32) + lane)
        count = word - ((word >> 1) & 0x55555555)  # of its bits, first in pairs, then in fours, bytes and all
        count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
        count = (((count + (count >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
        place = start + tl.cumsum(count, 0) - count
        column = program % n_blocks * COLUMNS + lane * 32
        row = program // n_blocks * n_columns
        for bit in tl.static_range(32):
            above = (word >> bit) & 1
            kept = (above == 1) & (place < most)
            value = tl.load(products + row + column + bit, kept, 0.0)
            if BIASED:
                value += tl.load(bias + column + bit, kept, 0.0)
            tl.store(found + place, row + column + bit, kept)
            tl.store(values + place, value, kept)
            place += above


@_on_its_device
def above(
    products: torch.Tensor, least: torch.Tensor, bias: torch.Tensor | None = None, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The products (n, d_sae) above the bound of their column (d_sae,).

    Args:
        products: float32.
        least: the bounds.
        bias: (d_sae,) added to what is found.
        most: how many are listed. By default all, for whose number the CPU waits.

    Returns:
        flat ascending int64 indices, values, and the number (1,) of all that lie above. Where these are fewer than
        `most`, the last values are −∞.
    """
    n_rows, n_columns = products.shape
    n_blocks = triton.cdiv(n_columns, _COLUMNS)
    words = torch.empty(n_rows * n_blocks * (_COLUMNS // 32), dtype=torch.int32, device=products.device)
    counts = torch.empty(n_rows * n_blocks, dtype=torch.int32, device=products.device)
    _mark[(n_rows * n_blocks,)](products, least, words, counts, n_columns, n_blocks, COLUMNS=_COLUMNS)
    ends = counts.cumsum(0)
    most = int(ends[-1]) if most is None else most
    found = torch.empty(most, dtype=torch.int64, device=products.device)
    values = torch.full((most,), -torch.inf, device=products.device)
    _list[(n_rows * n_blocks,)](
        products, bias, words, ends, found, values, most, n_columns, n_blocks, COLUMNS=_COLUMNS, BIASED=bias is not None
    )
    return found, values, ends[-1:]


@triton.jit
def _count(values, limit, counts, n, AT_ONCE: tl.constexpr):
    program = tl.program_id(0)
    place = program * AT_ONCE + tl.arange(0, AT_ONCE)
    value, bound = tl.load(values + place, place < n, float("-inf")), tl.load(limit)
    tl.store(counts + 2 * program, tl.sum((value > bound).to(tl.int32), 0))
    tl.store(counts + 2 * program + 1, tl.sum((value == bound).to(tl.int32), 0))


@triton.jit
def _keep(
    found, values, limit, counts, kept, token, latent, n, n_wanted, width, first, n_programs, AT_ONCE: tl.constexpr
):
    program = tl.program_id(0)
    place = program * AT_ONCE + tl.arange(0, AT_ONCE)
    value, bound = tl.load(values + place, place < n, float("-inf")), tl.load(limit)
    above, tied = (value > bound).to(tl.int64), (value == bound).to(tl.int64)
    before = tl.load(counts + 2 * program - 2, program > 0, 0)
    tied_before = tl.load(counts + 2 * program - 1, program > 0, 0)
    left = n_wanted - tl.load(counts + 2 * n_programs - 2)
    rank = tied_before + tl.cumsum(tied, 0) - tied  # of equal values at the limit, the first ones are kept
    to = before + tl.cumsum(above, 0) - above + tl.minimum(rank, left)
    wanted = (above == 1) | ((tied == 1) & (rank < left))
    index = tl.load(found + place, wanted, 0)
    tl.store(kept + to, value, wanted)
    tl.store(token + to, index // width + first, wanted)
    tl.store(latent + to, index % width, wanted)


@_on_its_device
def largest(
    values: torch.Tensor,
    found: torch.Tensor,
    limit: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    width: int,
    first: int,
) -> None:
    """Write the len(out[0]) largest values, where they stand and how they are numbered, in their order.

    Args:
        values: (n,).
        found: (n,) token · width + latent of each.
        limit: () the least value that is written; of equal ones, the first.
        out: values, tokens and latents.
        width: number of latents.
        first: added to the tokens.
    """
    programs = triton.cdiv(len(values), _AT_ONCE)
    counts = torch.empty(programs, 2, dtype=torch.int64, device=values.device)
    _count[(programs,)](values, limit, counts, len(values), AT_ONCE=_AT_ONCE)
    _keep[(programs,)](
        found, values, limit, counts.cumsum(0), *out, len(values), len(out[0]), width, first, programs,
        AT_ONCE=_AT_ONCE,
    )  # fmt: skip


@triton.jit
def _reconstruct(
    x, bias, rows, values, latent, ends, weights, by_value, gradient, held, errors, residual, d,
    GROUPS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    inside = column < d
    left = tl.load(x + token * d + column, inside, 0.0) - tl.load(bias + column, inside, 0.0)
    by_group = left
    for group in tl.static_range(GROUPS):
        segment = token * GROUPS + group
        begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
        for start in range(begin, end, E):
            entry = start + tl.arange(0, E)
            active = entry < end
            which = tl.load(latent + entry, active, 0)
            value = tl.load(values + entry, active, 0.0)
            row = tl.load(rows + which[:, None] * d + column[None, :], active[:, None] & inside[None, :], 0.0)
            left -= tl.sum(row.to(tl.float32) * value[:, None], 0)
        tl.store(errors + segment, tl.sum(left * left, 0))
        by_group = left * (-2 * tl.load(weights + group))
        if group < GROUPS - 1:
            tl.store(held + segment * d + column, by_group, inside)
    if KEEP:
        tl.store(residual + token * d + column, left, inside)
    for before in tl.static_range(GROUPS):  # the last group first: a group's codes are in the errors from it on
        segment = token * GROUPS + (GROUPS - 1 - before)
        if before:
            by_group += tl.load(held + segment * d + column, inside, 0.0)
        tl.store(gradient + segment * d + column, by_group.to(gradient.dtype.element_ty), inside)
        begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
        for start in range(begin, end, E):
            entry = start + tl.arange(0, E)
            active = entry < end
            which = tl.load(latent + entry, active, 0)
            row = tl.load(rows + which[:, None] * d + column[None, :], active[:, None] & inside[None, :], 0.0)
            tl.store(by_value + entry, tl.sum(row.to(tl.float32) * by_group[None, :], 1), active)


@_on_its_device
def reconstruct(
    x: torch.Tensor,
    bias: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    latent: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    keep: bool,
    n_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Errors of x − bias − Σ value · row, after each of g groups of latents, and the gradient of their weighted sum.

    Args:
        x: (n, d).
        bias: (d,).
        rows: (n_latents, d), in the precision in which they are read.
        values, latent: (nnz,), sorted by token, and within it by group.
        ends: (n · g + 1,) of a token's entries in a group.
        weights: (g,) float32.
        keep: whether the last residual is wanted.
        n_tokens: n or more, where entries of further tokens follow, whose gradients are 0.

    Returns:
        (n, g) squared norms of the residuals; the gradient by values (nnz,), and by what the groups decode to
        (n_tokens · g, d), in the precision of rows; the last residual (n, d), or nothing (0,).
    """
    (n, d), n_groups = x.shape, len(weights)
    width = triton.next_power_of_2(d)
    errors = x.new_empty(n, n_groups)
    by_value = torch.empty_like(values) if n_tokens == n else torch.zeros_like(values)
    gradient = rows.new_empty(n_tokens * n_groups, d)
    gradient[n * n_groups :].zero_()
    held, residual = x.new_empty(n * n_groups, d), x.new_empty((n, d) if keep else 0)
    _reconstruct[(n,)](
        x, bias, rows, values, latent, ends, weights, by_value, gradient, held, errors, residual, d,
        GROUPS=n_groups, D=width, E=max(1, _TILE // width), KEEP=keep, num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip
    return errors, by_value, gradient, residual


@triton.jit
def _by_latent(
    values, place, ends, source, out, sums, d, n_latents, by_row, by_column,
    LATENTS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    latent = tl.program_id(0) * LATENTS + tl.arange(0, LATENTS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < d
    low, high = tl.load(ends + latent, latent < n_latents, 0), tl.load(ends + latent + 1, latent < n_latents, 0)
    begin = tl.load(ends + tl.program_id(0) * LATENTS)
    end = tl.load(ends + tl.minimum(tl.program_id(0) * LATENTS + LATENTS, n_latents))
    total, alone = tl.zeros([LATENTS, WIDTH], tl.float32), tl.zeros([LATENTS], tl.float32)
    for start in range(begin, end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        active = entry < end
        value, row = tl.load(values + entry, active, 0.0), tl.load(place + entry, active, 0)
        read = tl.load(source + row[:, None] * d + column[None, :], active[:, None] & inside[None, :], 0.0)
        mine = (entry[None, :] >= low[:, None]) & (entry[None, :] < high[:, None])
        weight = tl.where(mine, value[None, :], 0.0)
        alone += tl.sum(weight, 1)
        total = tl.dot(weight.to(read.dtype), read, total, input_precision="ieee")
    where = out + latent.to(tl.int64)[:, None] * by_row + column.to(tl.int64)[None, :] * by_column
    tl.store(where, total, (latent < n_latents)[:, None] & inside[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums + latent, alone, latent < n_latents)


@_on_its_device
def by_latent(
    values: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, *, across: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every latent Σ value · row of source and Σ value, over its entries.

    Args:
        values: (nnz,) float32, sorted by latent; rounded to the precision of source.
        place: (nnz,) the entry's row of source.
        ends: (n_latents + 1,) of a latent's entries.
        source: (n, d) bfloat16 or float32.
        across: give (d, n_latents).

    Returns:
        (n_latents, d) and (n_latents,) float32.
    """
    if source.device.type == "cpu":
        source = source.float()  # Triton's interpreter does not multiply bfloat16
    d, n_latents = source.shape[1], len(ends) - 1
    out = torch.empty((d, n_latents) if across else (n_latents, d), dtype=torch.float32, device=source.device)
    sums = torch.empty(n_latents, dtype=torch.float32, device=source.device)
    # The columns of source are the slower index: those that programs of one time read fit into the cache.
    _by_latent[(triton.cdiv(n_latents, _LATENTS), triton.cdiv(d, _WIDTH))](
        values, place, ends, source, out, sums, d, n_latents, *(out.stride()[::-1] if across else out.stride()),
        LATENTS=_LATENTS, WIDTH=_WIDTH, ENTRIES=_ENTRIES, num_stages=3,
    )  # fmt: skip
    return out, sums


@triton.jit
def _unit(values, latent, ends, unit, norm, n_latents, AT_ONCE: tl.constexpr):
    token = tl.program_id(0)
    begin, end = tl.load(ends + token), tl.load(ends + token + 1)
    square = tl.zeros([AT_ONCE], tl.float32)
    for start in range(begin, end, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        inside = (entry < end) & (tl.load(latent + entry, entry < end, 0) < n_latents)
        value = tl.load(values + entry, inside, 0.0)
        square += value * value
    length = tl.sqrt(tl.maximum(tl.sum(square, 0), 1e-24))
    tl.store(norm + token, length)
    for start in range(begin, end, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        inside = (entry < end) & (tl.load(latent + entry, entry < end, 0) < n_latents)
        tl.store(unit + entry, tl.load(values + entry, inside, 0.0) / length, entry < end)


@triton.jit
def _across_unit(gradient, unit, norm, ends, out, AT_ONCE: tl.constexpr):
    token = tl.program_id(0)
    begin, end, length = tl.load(ends + token), tl.load(ends + token + 1), tl.load(norm + token)
    along = tl.zeros([AT_ONCE], tl.float32)
    for start in range(begin, end, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        along += tl.load(gradient + entry, entry < end, 0.0) * tl.load(unit + entry, entry < end, 0.0)
    part = tl.sum(along, 0)
    for start in range(begin, end, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        slope, mine = tl.load(gradient + entry, entry < end, 0.0), tl.load(unit + entry, entry < end, 0.0)
        tl.store(out + entry, (slope - part * mine) / length, entry < end)


@_on_its_device
def unit(values: torch.Tensor, latent: torch.Tensor, ends: torch.Tensor, n_latents: int) -> tuple[torch.Tensor, ...]:
    """(nnz,) values over the norm of their token's values at the first latents, 0 at others; (n,) the norms.

    Args:
        values, latent: (nnz,).
        ends: (n + 1,) of a token's entries.
        n_latents: that count.
    """
    found, norm = torch.empty_like(values), values.new_empty(len(ends) - 1)
    _unit[(len(norm),)](values, latent, ends, found, norm, n_latents, AT_ONCE=64, num_warps=1)
    return found, norm


@_on_its_device
def across_unit(gradient: torch.Tensor, found: torch.Tensor, norm: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(nnz,) the gradient by values, from that by what `unit` found."""
    out = torch.empty_like(gradient)
    _across_unit[(len(norm),)](gradient, found, norm, ends, out, AT_ONCE=64, num_warps=1)
    return out


class Contrasted(NamedTuple):
    """Sparse codes sorted by latent, and pairs of their tokens."""

    values: torch.Tensor
    """(nnz,)"""
    tokens: torch.Tensor
    entries: torch.Tensor
    """(nnz,) their numbers, sorted by token."""
    ends: torch.Tensor
    """(more than n_latents,) of a latent's codes."""
    n_latents: int
    """That are compared: the first ones."""
    pairs: torch.Tensor
    """(2, N) numbers of the pairs, sorted by their token on a side."""
    ends_of_tokens: torch.Tensor
    """(2, n + 1) of a token's pairs."""

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        token: torch.Tensor,
        n_tokens: int,
        order: torch.Tensor,
        ends: torch.Tensor,
        n_latents: int,
        pairs: torch.Tensor,
    ) -> Contrasted:
        """From codes sorted by token, the order that sorts them by latent, and pairs (N, 2)."""
        tokens, numbers = pairs.T.sort(dim=1, stable=True)
        every = torch.arange(n_tokens + 1, device=token.device).expand(2, -1).contiguous()
        ends_of_tokens = torch.searchsorted(tokens.contiguous(), every)
        return cls(values[order], token[order], order, ends, n_latents, numbers.contiguous(), ends_of_tokens)


@triton.jit
def _similarities(
    mine, my_tokens, my_ends, my_pairs, my_pairs_of, others, tokens, ends, pairs, pairs_of, out, n_columns, scale,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    latent = tl.program_id(0)
    begin, end = tl.load(my_ends + latent), tl.load(my_ends + latent + 1)
    low, high = tl.load(ends + latent), tl.load(ends + latent + 1)
    across, down = tl.cdiv(high - low, COLUMNS), tl.cdiv(end - begin, ROWS)
    # Codes of a latent are sorted by token: programs of one time write to neighbouring rows, which the cache holds.
    for tile in range(down * tl.program_id(1) // SPLIT * across, down * (tl.program_id(1) + 1) // SPLIT * across):
        entry = begin + tile // across * ROWS + tl.arange(0, ROWS)[:, None]
        other = low + tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        product = tl.load(mine + entry, entry < end, 0.0) * scale * tl.load(others + other, other < high, 0.0)
        token, theirs = tl.load(my_tokens + entry, entry < end, 0), tl.load(tokens + other, other < high, 0)
        first, last = tl.load(my_pairs_of + token, entry < end, 0), tl.load(my_pairs_of + token + 1, entry < end, 0)
        start, stop = tl.load(pairs_of + theirs, other < high, 0), tl.load(pairs_of + theirs + 1, other < high, 0)
        for i in range(tl.max(last - first)):  # of the pairs that a token is in, mostly one
            row = tl.load(my_pairs + first + i, first + i < last, 0)
            for j in range(tl.max(stop - start)):
                column = tl.load(pairs + start + j, start + j < stop, 0)
                there = (first + i < last) & (start + j < stop)
                tl.atomic_add(out + row * n_columns + column, product, there, sem="relaxed")


@triton.jit
def _pulled(
    my_tokens, my_entries, my_ends, my_pairs, my_pairs_of, others, tokens, ends, pairs, pairs_of,
    matrix, by_row, by_column, of_row, of_column, diagonal, less, out,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    latent = tl.program_id(0)
    begin, end = tl.load(my_ends + latent), tl.load(my_ends + latent + 1)
    low, high = tl.load(ends + latent), tl.load(ends + latent + 1)
    down = tl.cdiv(end - begin, ROWS)
    for tile in range(down * tl.program_id(1) // SPLIT, down * (tl.program_id(1) + 1) // SPLIT):
        entry = begin + tile * ROWS + tl.arange(0, ROWS)[:, None]
        token = tl.load(my_tokens + entry, entry < end, 0)
        first, last = tl.load(my_pairs_of + token, entry < end, 0), tl.load(my_pairs_of + token + 1, entry < end, 0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(tl.max(last - first)):
            row = tl.load(my_pairs + first + i, first + i < last, 0)
            share = tl.load(of_row + row, first + i < last, 0.0)
            for block in range(low, high, COLUMNS):
                other = block + tl.arange(0, COLUMNS)[None, :]
                value, theirs = tl.load(others + other, other < high, 0.0), tl.load(tokens + other, other < high, 0)
                start = tl.load(pairs_of + theirs, other < high, 0)
                stop = tl.load(pairs_of + theirs + 1, other < high, 0)
                for j in range(tl.max(stop - start)):
                    column = tl.load(pairs + start + j, start + j < stop, 0)
                    there = (first + i < last) & (start + j < stop)
                    weight = tl.load(matrix + row * by_row + column * by_column, there, 0.0)
                    weight *= share + tl.load(of_column + column, start + j < stop, 0.0)
                    weight = tl.where(column == row + diagonal, weight - less, weight)
                    total += tl.where(there, value * weight, 0.0)
        number = tl.load(my_entries + entry, entry < end, 0)
        found = tl.load(out + number, entry < end, 0.0) + tl.sum(total, 1, keep_dims=True)
        tl.store(out + number, found, entry < end)


@triton.jit
def _exponentials(
    logits, groups, others, by_row, by_column, shift, n_rows, n_columns, diagonal,
    KINDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    place = logits + row.to(tl.int64)[:, None] * n_columns + column[None, :]
    kept = inside
    for kind in tl.static_range(KINDS):
        mine = tl.load(groups + row * KINDS + kind, row < n_rows, 0)
        theirs = tl.load(others + column * KINDS + kind, column < n_columns, 0)
        kept &= mine[:, None] != theirs[None, :]
    kept |= inside & (row[:, None] + diagonal == column[None, :])
    value = tl.where(kept, tl.exp(tl.load(place, inside, 0.0) - shift), 0.0)
    tl.store(place, value, inside)
    tl.atomic_add(by_row + row, tl.sum(value, 1), row < n_rows, sem="relaxed")
    tl.atomic_add(by_column + column, tl.sum(value, 0), column < n_columns, sem="relaxed")


_COMPARED: dict[str, int] = {"SPLIT": 16, "ROWS": 16, "COLUMNS": 64, "num_warps": 4}
"""Programs a latent, and codes of it on the two sides that one compares at once."""


@_on_its_device
def similarities(own: Contrasted, every: Contrasted, scale: float) -> torch.Tensor:
    """(N, N of every) inner products of own tokens on side 1 and every token on side 0, times the scale."""
    out = own.values.new_zeros(own.pairs.shape[1], every.pairs.shape[1])
    _similarities[(own.n_latents, _COMPARED["SPLIT"])](
        own.values, own.tokens, own.ends, own.pairs[1], own.ends_of_tokens[1],
        every.values, every.tokens, every.ends, every.pairs[0], every.ends_of_tokens[0],
        out, out.shape[1], scale, **_COMPARED,
    )  # fmt: skip
    return out


@_on_its_device
def exponentials(
    logits: torch.Tensor, groups: torch.Tensor, others: torch.Tensor, diagonal: int, shift: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits (n, m) into exp(logits − shift), 0 where a row and a column are of one group off the diagonal.

    Args:
        logits: float32.
        groups, others: (n, kinds) and (m, kinds) of rows and columns, int64.
        diagonal: column less row, where groups do not count.
        shift: subtracted.

    Returns:
        the sums of rows (n,) and of columns (m,).
    """
    (n, m), kinds = logits.shape, groups.shape[1]
    by_row, by_column = logits.new_zeros(n), logits.new_zeros(m)
    _exponentials[(triton.cdiv(n, 32), triton.cdiv(m, 256))](
        logits, groups, others, by_row, by_column, shift, n, m, diagonal, KINDS=kinds, ROWS=32, COLUMNS=256
    )
    return by_row, by_column


@_on_its_device
def pulled(
    matrix: torch.Tensor,
    of_row: torch.Tensor,
    of_column: torch.Tensor,
    diagonal: int,
    less: float,
    own: Contrasted,
    every: Contrasted,
    side: int,
    total: torch.Tensor,
) -> None:
    """Add to own codes' gradient that of their tokens on one side: W B, where B are every token's codes on the other.

    W = M · (of_row + of_column), less a number on a diagonal.

    Args:
        matrix: M (n own pairs, n of every), float32, in any strides.
        of_row, of_column: of the pairs.
        diagonal: column less row.
        less: what is subtracted there.
        own, every: may be one.
        side: of own.
        total: (nnz of own,).
    """
    _pulled[(own.n_latents, _COMPARED["SPLIT"])](
        own.tokens, own.entries, own.ends, own.pairs[side], own.ends_of_tokens[side],
        every.values, every.tokens, every.ends, every.pairs[1 - side], every.ends_of_tokens[1 - side],
        matrix, *matrix.stride(), of_row, of_column, diagonal, less, total, **_COMPARED,
    )  # fmt: skip


@triton.jit
def _along_rows(rows, gradient, along, squares, d, D: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    row = tl.load(rows + number * d + column, column < d, 0.0)
    slope = tl.load(gradient + number * d + column, column < d, 0.0)
    part = tl.sum(row * slope, 0)
    tl.store(along + number, part)
    tl.store(squares + number, tl.sum(slope * slope, 0) - part * part * (2 - tl.sum(row * row, 0)))


@triton.jit
def _adam(
    weights, gradient, mean, square, rounded, along, clip, rate, beta1, beta2, eps, correction1, correction2, width, n,
    UNIT: tl.constexpr, ROUND: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    place = number * width + column
    inside = (column < width) & (place < n)
    weight, slope = tl.load(weights + place, inside, 0.0), tl.load(gradient + place, inside, 0.0)
    if UNIT:
        slope -= tl.load(along + number) * weight
    slope *= tl.load(clip)
    first, second = tl.load(mean + place, inside, 0.0), tl.load(square + place, inside, 0.0)
    first += (1 - beta1) * (slope - first)
    second = beta2 * second + (1 - beta2) * slope * slope
    weight -= rate / correction1 * first / (tl.sqrt(second) / tl.sqrt(correction2) + eps)
    if UNIT:
        weight /= tl.maximum(tl.sqrt(tl.sum(weight * weight, 0)), 1e-8)
    tl.store(mean + place, first, inside)
    tl.store(square + place, second, inside)
    tl.store(weights + place, weight, inside)
    if ROUND:
        tl.store(rounded + place, weight.to(tl.bfloat16), inside)


@_on_its_device
def update(
    parameters: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]],
    unit: int,
    rate: float,
    step: int,
    betas: tuple[float, float],
    eps: float,
    most: float,
) -> None:
    """Adam's step for all parameters, with the gradient clipped to a norm, and one parameter's rows kept at norm 1.

    Args:
        parameters: each with its gradient and Adam's two moments, all float32, and its bfloat16 copy, if it has one.
            Only the gradient stays as it is.
        unit: number of the one (n, d) whose rows have norm 1; its gradient along them is removed.
        rate: the learning rate.
        step: this step's number, from 1 on.
        betas, eps: Adam's.
        most: norm of the gradient of all parameters.
    """
    rows, slopes = parameters[unit][:2]
    d, width = rows.shape[1], triton.next_power_of_2(rows.shape[1])
    along, squares = rows.new_empty(len(rows)), rows.new_empty(len(rows))
    n_warps = min(16, max(4, width // 512))
    _along_rows[(len(rows),)](rows, slopes, along, squares, d, D=width, num_warps=n_warps)
    norms = [torch.linalg.vector_norm(each[1]).square() for i, each in enumerate(parameters) if i != unit]
    clip = (most / (torch.stack([squares.sum(), *norms]).sum().sqrt() + 1e-6)).clamp_max(1)
    for i, (weights, gradient, mean, square, rounded) in enumerate(parameters):
        one = i == unit
        stride, block = (d, width) if one else (4096, 4096)
        _adam[(triton.cdiv(weights.numel(), stride),)](
            weights, gradient, mean, square, rounded, along, clip, rate, *betas, eps, 1 - betas[0] ** step,
            1 - betas[1] ** step, stride, weights.numel(), UNIT=one, ROUND=rounded is not None, D=block,
            num_warps=n_warps if one else 8,
        )  # fmt: skip
