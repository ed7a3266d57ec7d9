"""Sparse matrices on disk: what is read is what a matrix in memory gives, whatever is asked for and at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import tsae.features.stored as stored
from support.planted import contrasts_of, feature_table, planted
from tsae.diff.config import DiffConfig
from tsae.diff.measure_diff import feature_diff
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.stored import MappedFile, StoredColumns, StoredRows, aligned, column_blocks, row_blocks
from tsae.features.sums import active_counts, grouped_sums, sums_by_code
