"""Sparse matrices on disk: what is read is what a matrix in memory gives, in memory that a block bounds."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import tsae.features.sparse_matrices as stored
from support.damage import resealed
from support.planted import planted
from support.refusals import refuses
from tsae.causal.controls import FeatureScales
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import feature_diff
from tsae.errors import TsaeError
from tsae.features.contexts import annotate_tokens, responds_to, top_contexts, top_tokens
from tsae.features.feature_table import FeatureTable, write_codes
from tsae.features.sparse_matrices import (
    PickedColumns,
    StoredRows,
    column_blocks,
    grouped_sums,
    row_blocks,
    sums_by_code,
)
from tsae.report.examples import contexts, histograms

Tables = tuple[FeatureTable, FeatureTable]


def random_matrix(shape: tuple[int, int], density: float, seed: int) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    dense = rng.random(shape, dtype=np.float32) * (rng.random(shape) < density)
    return sp.csr_array(dense)


def on_disk(folder: Path, matrix: sp.csr_array, at_once: int) -> StoredRows:
    folder.mkdir()
    n, one = matrix.shape[0], np.zeros(1, dtype=np.int32)
    arrays = {"token_ids": np.zeros(n, np.int32), "outlier": np.zeros(n, bool), "row_offsets": np.array([0, n])}
    arrays |= {"reader": one, "trajectory": one}
    blocks = (block for _, block in row_blocks(matrix, at_once))
    return write_codes(folder, arrays, blocks, matrix.shape, matrix.nnz)


def same(a: sp.csr_array, b: sp.csr_array) -> bool:
    return bool(np.array_equal(a.toarray(), b.toarray()))


def keys(n: int, rng: np.random.Generator) -> Iterator[Any]:
    yield from (slice(None), slice(2, n - 1), slice(0, 0), slice(n, n + 5), slice(None, None, 3), slice(-3, None))
    yield from (np.zeros(0, dtype=int), np.arange(n), rng.random(n) < 0.4, np.zeros(n, dtype=bool))
    yield from (rng.integers(0, n, 12), np.sort(rng.integers(0, n, 12)), np.array([n - 1, 0]))


@pytest.mark.parametrize(("shape", "density"), [((37, 11), 0.3), ((5, 40), 0.05), ((9, 6), 0.0), ((50, 1), 1.0)])
@pytest.mark.parametrize("at_once", [1, 17, 10_000])
def test_rows_and_columns_are_those_of_scipy(
    shape: tuple[int, int], density: float, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_BLOCK", at_once)
    monkeypatch.setattr(stored, "_READ", at_once)
    monkeypatch.setattr(stored, "_GAP", at_once // 4)
    monkeypatch.setattr(stored, "_SPREAD", at_once // 5)
    matrix, rng = random_matrix(shape, density, at_once), np.random.default_rng(0)
    found = on_disk(tmp_path / "one", matrix, at_once)
    dense = matrix.toarray()
    assert (found.shape, found.nnz) == (matrix.shape, matrix.nnz)
    np.testing.assert_array_equal(found.toarray(), dense)
    for key in keys(shape[0], rng):
        np.testing.assert_array_equal(found[key].toarray(), dense[key])
    assert found.columns is not None
    for key in keys(shape[1], rng):
        for columns in (found.columns[:, key], found[:, key], PickedColumns.of(matrix).columns[:, key]):
            np.testing.assert_array_equal(columns.toarray(), dense[:, key])
            assert columns.has_sorted_indices or columns.format == "csr"
    for columns in (found.columns, sp.csc_array(matrix)):
        parts = list(column_blocks(columns, 3, at_once))
        assert [first for first, _ in parts] == np.cumsum([0, *(part.shape[1] for _, part in parts)])[:-1].tolist()
        np.testing.assert_array_equal(np.concatenate([part.toarray() for _, part in parts], axis=1), dense)
    picked, some = rng.permutation(shape[0])[:4], rng.permutation(shape[1])[:3]
    chosen = PickedColumns(found.columns, picked, some)
    np.testing.assert_array_equal(chosen.dense(np.arange(len(some))[::-1]), dense[picked][:, some[::-1]])
    for wrong in ([-1], [0, shape[0]]):
        with pytest.raises(IndexError):
            found[wrong]
    weight = rng.normal(size=len(picked))
    np.testing.assert_allclose(chosen.weighted(weight), weight @ dense[picked][:, some], atol=1e-12)


def test_what_scipy_has_and_a_matrix_on_disk_has_not(tmp_path: Path) -> None:
    found = on_disk(tmp_path / "one", random_matrix((5, 4), 0.5, 0), 10)
    with pytest.raises(AttributeError, match=r"no 'indices'.*those of \[:\], which reads all"):
        found.indices  # noqa: B018
    assert not hasattr(found, "sum")


def test_a_disk_that_writes_only_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a nearly full one may. Missing codes would read as zeros."""

    class Part(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    monkeypatch.setattr(stored, "open", lambda path, mode, buffering: Part(path, mode), raising=False)
    matrix = random_matrix((50, 6), 0.5, 0)
    found = on_disk(tmp_path / "one", matrix, 100)
    assert found.columns is not None
    np.testing.assert_array_equal(found.columns[:, np.arange(6)].toarray(), matrix.toarray())


@pytest.mark.parametrize("n_codes", [1, 5, 70_000])
def test_sums_by_code_against_a_loop(n_codes: int, tmp_path: Path) -> None:
    matrix, rng = random_matrix((300, 7), 0.3, 1), np.random.default_rng(1)
    code = rng.integers(0, min(n_codes, 6) + 1, 300)
    code[code == min(n_codes, 6)] = n_codes
    expected = np.zeros((n_codes + 1, 7))
    np.add.at(expected, code, matrix.toarray())
    for columns in (on_disk(tmp_path / "one", matrix, 50).columns, sp.csc_array(matrix)):
        assert columns is not None
        found = np.concatenate([sums for _, sums in sums_by_code(columns, code.astype(np.int32), n_codes)], axis=1)
        np.testing.assert_allclose(found, expected[:n_codes], atol=1e-12)


def test_a_pass_takes_no_more_memory_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_READ", 20_000)
    monkeypatch.setattr("tsae.features.sparse_matrices._VALUES", 20_000)
    matrix = random_matrix((60_000, 40), 0.5, 0)
    found, whole = on_disk(tmp_path / "one", matrix, 50_000), 8 * matrix.nnz
    group, ones = np.repeat(np.arange(600), 100), np.ones(60_000)

    def passes() -> None:
        for _ in row_blocks(found, 20_000):
            pass
        for _ in column_blocks(found.columns, 40, 20_000):  # type: ignore[arg-type]
            pass
        grouped_sums(found, np.arange(60_000), group, ones, 600)

    tracemalloc.start()
    try:
        passes()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * whole  # most of it is what is known of the rows, not of their codes
    assert whole > 9_000_000


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """A table in memory, and the same on disk."""
    table = planted(n_problems=24, n_samples=6).table
    return table, FeatureTable.load(table.save(tmp_path_factory.mktemp("table") / "features"))


QUICK = DiffConfig(n_bootstrap=100, n_permutations=200, threads=1)


@pytest.mark.slow
def test_a_diff_of_what_lies_on_disk_is_that_of_what_lies_in_memory(tables: Tables) -> None:
    """To the bit: both take the same steps."""
    diffs = [feature_diff(table, QUICK, progress=False) for table in tables]
    for name in ("shifts", "contrasts", "features", "confounds", "behaviours"):
        pd.testing.assert_frame_equal(*(getattr(diff, name) for diff in diffs), check_exact=True)


def test_all_that_reads_codes_finds_the_same(tables: Tables) -> None:
    memory, disk = tables
    assert isinstance(disk.codes, StoredRows)
    assert disk.codes.means
    for span in ("response", "all"):  # means of the response lie on disk, others are made
        assert same(memory.row_means(span)[:], disk.row_means(span)[:])
    for feature in (0, 7):
        for x, y in zip(memory.column(feature), disk.column(feature), strict=True):
            np.testing.assert_array_equal(x, y)
    found = [
        (
            histograms(table, "response")[0].tolist(),
            contexts(table, range(5), {}),
            [(c.trajectory, c.reader, c.activations.tolist()) for c in top_contexts(table, 3, reader="run")],
            FeatureScales.of(table, "run").mean.tolist(),
            top_tokens(table, [str(i) for i in range(50)]).to_dict(),
            responds_to(table, annotate_tokens(table, lambda _, t: ["x" if s < "5" else "y" for s in t],
                                               [str(i) for i in range(50)])).to_dict(),
        )
        for table in tables
    ]  # fmt: skip
    assert found[0] == found[1]


def test_means_on_disk_are_not_those_of_other_tokens(tables: Tables) -> None:
    """With other outliers the tokens that count are others."""
    memory, disk = tables
    outlier = np.random.default_rng(0).random(len(memory.token_ids)) < 0.3
    found, expected = (replace(table, outlier=outlier).row_means()[:] for table in (disk, memory))
    assert same(found, expected)
    assert not same(found, memory.row_means()[:])


def test_a_table_is_saved_into_its_own_folder(tables: Tables, tmp_path: Path) -> None:
    table, _ = tables
    loaded = FeatureTable.load(table.save(tmp_path / "features"))
    again = FeatureTable.load(loaded.save(tmp_path / "features"))
    assert same(again.codes[:], table.codes[:])
    assert same(loaded.codes[:], table.codes[:])  # the file that it reads is still there for it


@pytest.mark.parametrize("name", ["features.h5", "columns.h5", "means.h5"])
def test_damaged_files_are_refused_by_their_content_too(name: str, tables: Tables, tmp_path: Path) -> None:
    folder = tables[0].save(tmp_path / "features")
    whole = (folder / name).read_bytes()
    for content in (b"", whole[:100], b"no HDF5 at all"):
        (folder / name).write_bytes(content)
        resealed(folder)
        refuses("cannot be read", FeatureTable.load, folder)


FAULTS: dict[str, tuple[str, str, Callable[[np.ndarray], Any], str]] = {
    "offsets back": ("features.h5", "offsets", lambda o: np.r_[o[0], o[1:-1][::-1], o[-1]], "offsets go back"),
    "indices beyond": ("features.h5", "indices", lambda i: i + 10**6, "indices go from"),
    "indices before": ("features.h5", "indices", lambda i: i - 10**6, "indices go from -"),
    "columns beyond": ("columns.h5", "columns/indices", lambda i: i + 10**6, "columns/indices go from"),
    "means before": ("means.h5", "response/rows/indices", lambda i: i - 10**6, "response/rows/indices go from"),
}


def read_all(folder: Path) -> None:
    table = FeatureTable.load(folder)
    for matrix in (table.codes[:], table.codes[np.arange(0, table.codes.shape[0], 2)], table.row_means()[:]):
        matrix.toarray()
    table.columns[:, np.arange(table.n_features)].toarray()


@pytest.mark.parametrize("fault", FAULTS)
def test_indices_that_lead_beyond_a_matrix_are_refused(fault: str, tables: Tables, tmp_path: Path) -> None:
    """An index beyond the matrix would be written to memory that is not the matrix's."""
    name, dataset, change, message = FAULTS[fault]
    folder = tables[0].save(tmp_path / "features")
    with h5py.File(folder / name, "r+") as file:
        found = file[dataset][()]
        del file[dataset]
        file[dataset] = change(found)
    resealed(folder)
    with pytest.raises(TsaeError, match=message) as said:
        read_all(folder)
    assert str(folder) in str(said.value)


def test_a_file_that_is_cut_while_it_is_read(tables: Tables, tmp_path: Path) -> None:
    loaded = FeatureTable.load(tables[0].save(tmp_path / "features"))
    with (tmp_path / "features" / "features.h5").open("r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(TsaeError, match="has become shorter"):
        loaded.codes[:]
