"""Which reward means success."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tsae
from support.logs import refused
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.rewards import outcome_reward

BASE = tsae.testbed.series_path() / "base"


@pytest.mark.parametrize("name", ["accuracy_reward", "Correctness", "answer_correct", "acc", "math/acc"])
def test_the_reward_that_is_named_for_it(name: str) -> None:
    assert outcome_reward(("format_reward", name, "length")) == name


def test_what_was_asked_for_goes_first_and_one_reward_needs_no_name() -> None:
    assert outcome_reward(("accuracy", "format"), "format") == "format"
    assert outcome_reward(("quality",)) == "quality"


@pytest.mark.parametrize(
    "names", [("quality", "format"), ("accuracy", "correct"), ("incorrect_penalty", "format"), ("account", "format")]
)
def test_several_rewards_are_never_added_up(names: tuple[str, ...]) -> None:
    with pytest.raises(TsaeError, match=rf"log: has the rewards {', '.join(names)}, and does not say.*--outcome"):
        outcome_reward(names, where="log")


def test_a_reward_that_is_not_there() -> None:
    refused("has no reward 'accuracy'; there are format, length", outcome_reward, ("format", "length"), "accuracy")
    refused("has no reward", outcome_reward, ())


def test_an_import_goes_by_the_same_rule(tmp_path: Path) -> None:
    source = pq.read_table(tsae.testbed.series_path() / "logs/hard/completions/completions_00025.parquet")
    place = source.column_names.index("correct")
    named = source.rename_columns(["accuracy_reward" if n == "correct" else n for n in source.column_names])
    pq.write_table(
        named.add_column(place + 1, "format_reward", pa.array(np.ones(len(named)))),
        tmp_path / "completions_00025.parquet",
    )
    found = tsae.Rollouts.read(tmp_path / "completions_00025.parquet", BASE, ImportConfig(format="trl"))
    np.testing.assert_array_equal(found.frame.outcome == "success", np.asarray(source["correct"]) > 0)
    (told,) = [note for note in found.info["log"]["notes"] if note.startswith("success: ")]
    assert told.startswith("success: accuracy_reward, of accuracy_reward, format_reward the one named for it, is above")
