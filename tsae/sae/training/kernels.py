"""Triton kernels of a training step: what `tsae.sae.training.sparse_codes` computes with sparse codes, on a GPU.

Tensor cores multiply two dense matrices fast, but codes are 99.9 % zeros. These kernels read the rows of active codes
alone. Every sum is taken in float32, in one order, but for `similarities`, whose last bits may differ from run to run.

Codes come as entries: (nnz,) values, and where each stands. `ends` are the places where the entries of a row begin and
end (`sparse_codes.offsets`). All tensors are contiguous and on one GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 2048  # pre-activations that one program compares
_LATENTS, _WIDTH, _ENTRIES = 32, 128, 32  # of a tile of `by_latent`
_TILE = 1 << 14  # numbers of decoder rows that one program of `reconstruct` holds at once


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
        place = tl.arange(0, COLUMNS)
        word = tl.load(words + program * (COLUMNS // 32) + place // 32)
        above = (word >> (place % 32)) & 1
        index = program // n_blocks * n_columns + program % n_blocks * COLUMNS + place
        tl.store(found + start + tl.cumsum(above, 0) - 1, index, above == 1)


def above(products: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Ascending flat indices (int64) of the entries of (n, d_sae) products above their column's bound (d_sae,)."""
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
def _pulled(row, latent, columns, others, ends, matrix, by_row, by_column, out, AT_ONCE: tl.constexpr):
    entry = tl.program_id(0)
    which = tl.load(latent + entry)
    begin, end = tl.load(ends + which), tl.load(ends + which + 1)
    matrix += tl.load(row + entry) * by_row
    total = tl.zeros([AT_ONCE], tl.float32)
    for start in range(begin, end, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        column = tl.load(columns + other, other < end, 0)
        value = tl.load(others + other, other < end, 0.0)
        total += value * tl.load(matrix + column * by_column, other < end, 0.0)
    tl.store(out + entry, tl.sum(total, 0))


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


def pulled(
    row: torch.Tensor,
    latent: torch.Tensor,
    columns: torch.Tensor,
    others: torch.Tensor,
    ends: torch.Tensor,
    matrix: torch.Tensor,
) -> torch.Tensor:
    """(nnz,) the entries (row, latent) of M B, where B (m, n_latents) is sparse and M (n, m) dense, in any strides.

    Args:
        row, latent: (nnz,) of the entries wanted.
        columns, others, ends: B, as for `similarities`.
        matrix: M, float32.
    """
    out = matrix.new_empty(len(row))
    if len(row):
        _pulled[(len(row),)](row, latent, columns, others, ends, matrix, *matrix.stride(), out, AT_ONCE=64, num_warps=1)
    return out
