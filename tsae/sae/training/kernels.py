"""Triton kernels of a training step: what `tsae.sae.training.sparse_codes` computes with sparse codes, on a GPU.

Tensor cores multiply two dense matrices fast, but codes are 99.9 % zeros. These kernels read the rows of active codes
alone. Every sum is taken in float32, in one order, but for `similarities`, whose last bits may differ from run to run.

Codes come as entries: (nnz,) values, and where each stands. `ends` are the places where the entries of a row begin and
end (`sparse_codes.offsets`). All tensors are contiguous and on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl

_Function = TypeVar("_Function", bound=Callable[..., Any])

_COLUMNS = 4096  # pre-activations that one program compares
_LATENTS, _WIDTH, _ENTRIES = 16, 256, 16  # of a tile of `by_latent`
_TILE = 1 << 14  # numbers of decoder rows that one program of `reconstruct` holds at once


def _on_its_device(function: _Function) -> _Function:
    """Run kernels on the GPU of the first tensor. Triton takes the current one, whatever the tensors lie on."""

    @wraps(function)
    def run(first: Any, *others: Any, **options: Any) -> Any:
        device = (first if isinstance(first, torch.Tensor) else first[0][0]).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # on a CPU Triton interprets
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
def _list(words, ends, found, n_columns, n_blocks, COLUMNS: tl.constexpr):
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
        index = program // n_blocks * n_columns + program % n_blocks * COLUMNS + lane * 32
        for bit in tl.static_range(32):
            above = (word >> bit) & 1
            tl.store(found + place, index + bit, above == 1)
            place += above


@_on_its_device
def above(products: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Flat ascending int64 indices of the products (n, d_sae) above the bound of their column (d_sae,)."""
    n_rows, n_columns = products.shape
    n_blocks = triton.cdiv(n_columns, _COLUMNS)
    words = torch.empty(n_rows * n_blocks * (_COLUMNS // 32), dtype=torch.int32, device=products.device)
    counts = torch.empty(n_rows * n_blocks, dtype=torch.int32, device=products.device)
    _mark[(n_rows * n_blocks,)](products, least, words, counts, n_columns, n_blocks, COLUMNS=_COLUMNS)
    ends = counts.cumsum(0)
    found = torch.empty(int(ends[-1]), dtype=torch.int64, device=products.device)
    _list[(n_rows * n_blocks,)](words, ends, found, n_columns, n_blocks, COLUMNS=_COLUMNS)
    return found


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

    Returns:
        (n, g) squared norms of the residuals; the gradient by values (nnz,), and by what the groups decode to
        (n · g, d), in the precision of rows; the last residual (n, d), or nothing (0,).
    """
    (n, d), n_groups = x.shape, len(weights)
    width = triton.next_power_of_2(d)
    errors = x.new_empty(n, n_groups)
    by_value, gradient = torch.empty_like(values), rows.new_empty(n * n_groups, d)
    held, residual = x.new_empty(n * n_groups, d), x.new_empty((n, d) if keep else 0)
    _reconstruct[(n,)](
        x, bias, rows, values, latent, ends, weights, by_value, gradient, held, errors, residual, d,
        GROUPS=n_groups, D=width, E=max(1, _TILE // width), KEEP=keep, num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip
    return errors, by_value, gradient, residual


@triton.jit
def _by_latent(
    values, place, ends, source, out, d, n_latents, by_row, by_column,
    LATENTS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    latent = tl.program_id(0) * LATENTS + tl.arange(0, LATENTS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < d
    low, high = tl.load(ends + latent, latent < n_latents, 0), tl.load(ends + latent + 1, latent < n_latents, 0)
    begin = tl.load(ends + tl.program_id(0) * LATENTS)
    end = tl.load(ends + tl.minimum(tl.program_id(0) * LATENTS + LATENTS, n_latents))
    total = tl.zeros([LATENTS, WIDTH], tl.float32)
    for start in range(begin, end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        active = entry < end
        value, row = tl.load(values + entry, active, 0.0), tl.load(place + entry, active, 0)
        read = tl.load(source + row[:, None] * d + column[None, :], active[:, None] & inside[None, :], 0.0)
        mine = (entry[None, :] >= low[:, None]) & (entry[None, :] < high[:, None])
        total = tl.dot(tl.where(mine, value[None, :], 0.0).to(read.dtype), read, total, input_precision="ieee")
    where = out + latent.to(tl.int64)[:, None] * by_row + column.to(tl.int64)[None, :] * by_column
    tl.store(where, total, (latent < n_latents)[:, None] & inside[None, :])


@_on_its_device
def by_latent(
    values: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, *, across: bool = False
) -> torch.Tensor:
    """Of every latent Σ value · row of source, over its entries.

    Args:
        values: (nnz,) float32, sorted by latent; rounded to the precision of source.
        place: (nnz,) the entry's row of source.
        ends: (n_latents + 1,) of a latent's entries.
        source: (n, d) bfloat16 or float32.
        across: give (d, n_latents).

    Returns:
        (n_latents, d) float32.
    """
    if source.device.type == "cpu":
        source = source.float()  # Triton's interpreter does not multiply bfloat16
    d, n_latents = source.shape[1], len(ends) - 1
    out = torch.empty((d, n_latents) if across else (n_latents, d), dtype=torch.float32, device=source.device)
    # The columns of source are the slower index: those that programs of one time read fit into the cache.
    _by_latent[(triton.cdiv(n_latents, _LATENTS), triton.cdiv(d, _WIDTH))](
        values, place, ends, source, out, d, n_latents, *(out.stride()[::-1] if across else out.stride()),
        LATENTS=_LATENTS, WIDTH=_WIDTH, ENTRIES=_ENTRIES, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _similarities(row, latent, values, columns, others, ends, out, n_columns, AT_ONCE: tl.constexpr):
    entry = tl.program_id(0)
    which, value = tl.load(latent + entry), tl.load(values + entry)
    begin, end = tl.load(ends + which), tl.load(ends + which + 1)
    out += tl.load(row + entry) * n_columns
    for start in range(begin, end, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        column = tl.load(columns + other, other < end, 0)
        tl.atomic_add(out + column, value * tl.load(others + other, other < end, 0.0), other < end, sem="relaxed")


@triton.jit
def _pulled(
    row, latent, columns, others, ends, matrix, by_row, by_column, of_row, of_column, diagonal, less, out,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    which, mine = tl.load(latent + entry), tl.load(row + entry)
    begin, end = tl.load(ends + which), tl.load(ends + which + 1)
    matrix += mine * by_row
    share = tl.load(of_row + mine)
    total = tl.zeros([AT_ONCE], tl.float32)
    for start in range(begin, end, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        column = tl.load(columns + other, other < end, 0)
        value = tl.load(others + other, other < end, 0.0)
        weight = tl.load(matrix + column * by_column, other < end, 0.0)
        weight *= share + tl.load(of_column + column, other < end, 0.0)
        total += value * tl.where(column == mine + diagonal, weight - less, weight)
    tl.store(out + entry, tl.sum(total, 0))


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


@_on_its_device
def similarities(
    row: torch.Tensor,
    latent: torch.Tensor,
    values: torch.Tensor,
    columns: torch.Tensor,
    others: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Add A Bᵀ to out (n, m), where A (n, n_latents) and B (m, n_latents) are sparse.

    Args:
        row, latent, values: (nnz,) entries of A.
        columns, others: rows and values of the entries of B, sorted by latent.
        ends: (n_latents + 1,) of a latent's entries of B.
        out: float32.
    """
    if len(row):
        _similarities[(len(row),)](
            row, latent, values, columns, others, ends, out, out.shape[1], AT_ONCE=64, num_warps=1
        )
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
    row: torch.Tensor,
    latent: torch.Tensor,
    columns: torch.Tensor,
    others: torch.Tensor,
    ends: torch.Tensor,
    matrix: torch.Tensor,
    of_row: torch.Tensor,
    of_column: torch.Tensor,
    diagonal: int,
    less: float,
) -> torch.Tensor:
    """(nnz,) the entries (row, latent) of W B, where B (m, n_latents) is sparse and W (n, m) dense.

    W = M · (of_row + of_column), less a number on a diagonal.

    Args:
        row, latent: (nnz,) of the entries wanted.
        columns, others, ends: B, as for `similarities`.
        matrix: M, float32, in any strides.
        of_row, of_column: (n,) and (m,).
        diagonal: column less row.
        less: what is subtracted there.
    """
    out = matrix.new_empty(len(row))
    if len(row):
        _pulled[(len(row),)](
            row, latent, columns, others, ends, matrix, *matrix.stride(), of_row, of_column, diagonal, less, out,
            AT_ONCE=64, num_warps=1,
        )  # fmt: skip
    return out


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
    weights, gradient, mean, square, along, clip, rate, beta1, beta2, eps, correction1, correction2, width, n,
    UNIT: tl.constexpr, D: tl.constexpr,
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


@_on_its_device
def update(
    parameters: list[tuple[torch.Tensor, ...]],
    unit: int,
    rate: float,
    step: int,
    betas: tuple[float, float],
    eps: float,
    most: float,
) -> None:
    """Adam's step for all parameters, with the gradient clipped to a norm, and one parameter's rows kept at norm 1.

    Args:
        parameters: each with its gradient and Adam's two moments, all float32. Only the gradient stays as it is.
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
    for i, (weights, gradient, mean, square) in enumerate(parameters):
        one = i == unit
        stride, block = (d, width) if one else (4096, 4096)
        _adam[(triton.cdiv(weights.numel(), stride),)](
            weights, gradient, mean, square, along, clip, rate, *betas, eps, 1 - betas[0] ** step, 1 - betas[1] ** step,
            stride, weights.numel(), UNIT=one, D=block, num_warps=n_warps if one else 8,
        )  # fmt: skip
