"""Configs refuse what their fields cannot hold, in one sentence that names the field and the value."""

from __future__ import annotations

import math
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from support.refusals import refuses
from tsae.base.validation import Confidence, Count, Seed, UserPath, config
from tsae.errors import TsaeError


@config
class Inner:
    k: Count = 3


@config
class Outer:
    n: Count
    mode: Literal["mean", "sum"] = "mean"
    scale: float = 1.0
    limit: Annotated[float, Field(allow_inf_nan=True)] = math.inf
    confidence: Confidence = 0.95
    seed: Seed = 0
    to: UserPath | None = None
    layers: tuple[Count, ...] = ()
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.n > 100 and self.mode == "sum":
            raise TsaeError(f"n={self.n} with mode sum", where="Outer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "Outer: n=0 must be at least 1."),
        ({"n": 2.5}, "Outer: n=2.5: input should be a valid integer, got a number with a fractional part."),
        ({"n": 1, "mode": "max"}, "Outer: mode='max' must be one of 'mean' or 'sum'."),
        ({"n": 1, "scale": math.nan}, "Outer: scale=nan is not finite."),
        ({"n": 1, "confidence": 1}, "Outer: confidence=1 must be at most 0.999999."),
        ({"n": 1, "seed": -1}, "Outer: seed=-1 must be at least 0."),
        ({"n": 1, "layers": (2, 0)}, "Outer: layers.1=0 must be at least 1."),
        ({"n": 1, "inner": {"k": 0}}, "Outer: inner.k=0 must be at least 1."),
        ({"n": 1, "size": 1}, "Outer: size is not a field."),
        ({}, "Outer: n is missing."),
        ({"n": 101, "mode": "sum"}, "Outer: n=101 with mode sum."),
    ],
)
def test_each_wrong_value_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TsaeError) as refused:
        Outer(**values)
    assert str(refused.value) == message


def test_a_config_is_a_dataclass_that_takes_numbers_of_numpy_and_paths_as_text() -> None:
    made = Outer(n=np.int64(4), scale=np.float32(2), to="file:///tmp/a%20b")  # type: ignore[arg-type]
    assert (type(made.n), made.to) == (int, Path("/tmp/a b"))
    assert asdict(replace(made, n=5))["n"] == 5
    refuses("n=0 must be at least 1", replace, made, n=0)
    with pytest.raises(AttributeError):
        made.n = 3  # type: ignore[misc]
