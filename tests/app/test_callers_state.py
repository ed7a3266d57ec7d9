"""Settings of torch, numpy and pandas are the caller's: they change no number of ours, and stay as they are."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tsae
from support.builders import D_MODEL
from tsae.base.usual_state import in_usual_state, usual_state
from tsae.cli import main

pytestmark = pytest.mark.slow(ci=True)

SITE = "blocks.1.hook_resid_post"


def numbers(series: Any, rollouts: Any, to: Path) -> dict[str, Any]:
    """What the public functions compute, as bytes."""
    store = tsae.capture(series, rollouts, [SITE], to=to / "acts", progress=False)
    config, training = tsae.SAEConfig(d_sae=32, k=4), tsae.TrainingConfig(tokens=2_000, batch_tokens=128)
    sae = tsae.train(store, config, training=training, to=to / "sae", progress=False)
    crosscoder = tsae.train(tsae.Pair(store, "easy-10"), config, training=training, progress=False)
    features = tsae.encode(sae, store, to=to / "features", progress=False)
    chosen = [int(features.codes[:].indices[0])]
    sampling = tsae.SamplingConfig(max_new_tokens=4, n_samples=2)
    problems = [tsae.Problem("p", "1+1?", "2"), tsae.Problem("q", "1+2+3?", "6")]
    loaded = tsae.load_sae(to / "sae")
    x = torch.arange(D_MODEL, dtype=torch.float32, device="cpu")
    groups = rollouts.where(policy="base").with_advantages()
    diff = tsae.feature_diff(features, progress=False)
    diff.to_html(to / "report.html")
    found = {
        "activations": [shard.raw(SITE).tobytes() for shard in store.shards()],
        "sae": sae.fingerprint,
        "crosscoder": crosscoder.fingerprint,
        "codes": features.codes[:].data.tobytes(),
        "decoded": loaded.decode(loaded.encode(x)).tolist(),
        "evaluated": repr(tsae.evaluate(sae, store)),
        "sampled": tsae.sample(series.base, problems, sampling, progress=False).table["response_ids"].to_pylist(),
        "influence": tsae.influence(series.base, groups, sae, chosen, progress=False).table.total.tolist(),
        "drift": repr(tsae.weight_drift(series)),
        "diff": diff.table().to_csv(),
    }
    assert all(p.dtype == torch.float32 and not p.is_inference() for p in [*sae.parameters(), *loaded.parameters()])
    return found


@contextmanager
def given_back(give: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    give(value)
    try:
        yield
    finally:
        give(back)


def dtype(value: torch.dtype) -> AbstractContextManager[None]:
    return given_back(torch.set_default_dtype, value, torch.float32)


def pandas_options() -> AbstractContextManager[None]:
    if int(pd.__version__.split(".")[0]) < 3:
        return pd.option_context("mode.copy_on_write", True, "future.infer_string", True)
    return pd.option_context("mode.string_storage", "python")


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: dtype(torch.float64),
    "bfloat16": lambda: dtype(torch.bfloat16),
    "float16": lambda: dtype(torch.float16),
    "meta": lambda: given_back(torch.set_default_device, "meta", None),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: given_back(torch.use_deterministic_algorithms, True, False),
    "products": lambda: given_back(torch.set_float32_matmul_precision, "medium", "highest"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "numpy": lambda: np.errstate(all="raise"),
    "pandas": pandas_options,
}
TOGETHER = {
    "one": ("no gradients", "float64", "autocast", "products", "numpy", "pandas"),
    "other": ("inference", "bfloat16", "meta", "deterministic", "anomalies"),
}


def state() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "products": torch.get_float32_matmul_precision(),
        "numpy": np.geterr(),
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),  # noqa: NPY002
        "pandas": [pd.get_option("mode.string_storage"), pd.get_option("display.max_rows")],
    }


@pytest.fixture(scope="module")
def plain(series: Any, rollouts: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return numbers(series, rollouts, tmp_path_factory.mktemp("plain"))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("names", [*TOGETHER.values(), *(pytest.param((n,), marks=pytest.mark.slow) for n in STATES)])
def test_numbers_are_the_same_in_any_state(
    names: tuple[str, ...], plain: Any, series: Any, rollouts: Any, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(STATES[name]())
        before = state()
        found = numbers(series, rollouts, tmp_path)
        assert state() == before
        with pytest.raises(tsae.TsaeError):
            tsae.capture(series, rollouts, ["nowhere"], to=tmp_path / "no")
        assert state() == before
        with pytest.raises(SystemExit):
            main(["evaluate", "--sae", "nowhere", "--store", "nowhere"])
        assert state() | {"random": before["random"]} == before  # tyro draws from it
    assert found == plain


def test_an_sae_under_a_callers_training_leaves_gradients_to_the_caller() -> None:
    sae = tsae.TemporalSAE(D_MODEL, tsae.SAEConfig(d_sae=32, k=4))
    codes = torch.ones(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert sae.decode(codes).requires_grad
        assert sae.decode(codes).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert not sae.decode(codes).requires_grad
    with torch.inference_mode():
        assert sae.decode(codes).is_inference()


def test_every_public_function_runs_in_the_usual_state_and_takes_switches_by_name() -> None:
    """A bar is shown unless the caller says otherwise; `watch` prints what it does."""
    for name in tsae.__all__:
        found = getattr(tsae, name)
        if isinstance(found, FunctionType):
            assert pickle.dumps(found), name  # which finds it by its name
            assert found.__module__ == "tsae", name
            switches = [p for p in signature(found).parameters.values() if str(p.annotation) == "bool"]
            assert {p.kind for p in switches} <= {Parameter.KEYWORD_ONLY}, name
            assert all(p.default is (name != "watch") for p in switches if p.name == "progress"), name


def test_a_generator_leaves_the_caller_alone_between_two_values() -> None:
    @partial(in_usual_state, "steps")
    def steps() -> Iterator[torch.dtype]:
        try:
            yield torch.get_default_dtype()
            yield torch.get_default_dtype()
        finally:
            ended.append(True)

    ended: list[bool] = []
    with dtype(torch.float64), torch.no_grad():
        for found in steps():
            assert found == torch.float32
            assert torch.get_default_dtype() == torch.float64
            assert not torch.is_grad_enabled()
        next(running := steps())
        running.close()
    assert ended == [True, True]


def test_threads_share_the_settings_of_the_process() -> None:
    """The first call sets the default dtype aside, and the last one to end gives it back."""
    begun, end = threading.Event(), threading.Event()

    @usual_state()
    def first() -> torch.dtype:
        begun.set()
        assert end.wait(60)
        return torch.get_default_dtype()

    with dtype(torch.bfloat16), ThreadPoolExecutor(1) as pool:
        running = pool.submit(first)
        assert begun.wait(60)
        with usual_state(), usual_state():
            end.set()
            assert running.result() == torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.bfloat16


def test_a_live_source_reads_its_models_in_the_usual_state(series: Any, rollouts: Any) -> None:
    def read() -> bytes:
        windows = tsae.LiveSource(series, rollouts, SITE).windows(SITE)
        return b"".join(batch.x.numpy().tobytes() for batch in windows.epoch(0, 128))

    right = read()
    for name in ("autocast", "products", "meta"):
        with STATES[name]():
            assert read() == right, name
