"""Attribution while training, on trainings that are really run: against attribution after the run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.builders import make_rollouts
from support.grpo_loop import replay_of, sample_gradients
from support.refusals import refuses
from tsae.attribution.forward_passes import Run
from tsae.attribution.guard import Guard, Recorder, worst
from tsae.attribution.loss import PolicyLoss
from tsae.attribution.order import plan_updates
from tsae.attribution.sample_gradients import BatchGradients, TrainedWeights, log_probabilities
from tsae.attribution.settings import Optimiser, RunSettings
from tsae.attribution.shares import Shares, shares
from tsae.attribution.states import State
from tsae.attribution.targets import NextToken
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

LENGTH = 16


# --- gradients out of the backward pass


def batch(n: int = 5, width: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and a weight of every token after the first, of texts of several lengths."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 17, (n, width), generator=random)
    mask = (torch.arange(width) < (torch.arange(n) % 4 + width - 3)[:, None]).long()
    return ids * mask, mask, torch.randn(n, width - 1, generator=random) * mask[:, 1:]


def backward(trained: TrainedWeights, held: BatchGradients, *, parts: int) -> None:
    """The loop's own passes, in micro-batches."""
    trained.model.requires_grad_(True)
    for ids, mask, weight in zip(*(each.tensor_split(parts) for each in batch()), strict=True):
        with held.micro_batch(len(ids)):
            (log_probabilities(trained.model, ids, mask) * weight).sum().backward()


def check_gradients(trained: TrainedWeights, dtype: torch.dtype, off: float) -> BatchGradients:
    """Products and weighted sums, against gradients of single samples, up to a part of their size."""
    single, by = sample_gradients(trained, *batch()), torch.tensor([0.0, 1.0, -2.0, 0.0, 0.5])
    for n in (1, 2):  # One direction goes another way than several.
        held = BatchGradients(trained, dtype=dtype, n_directions=n)
        backward(trained, held, parts=n)
        directions = torch.randn(n, len(trained), generator=torch.Generator().manual_seed(1))
        found = held.products(directions) - single @ directions.T
        assert (found.abs() < off * single.norm(dim=1)[:, None]).all()
        found = trained.join(held.weighted_sum(by)) - by @ single
        assert found.abs().max() < off * single.norm(dim=1).max()
    return held


def test_products_and_sums_are_those_of_single_gradients(any_model: Path) -> None:
    """Of every architecture, whose layers are small, so that gradients are kept; and of the loop's own pass."""
    trained = TrainedWeights(Checkpoint(id="base", path=str(any_model)).load_model())
    check_gradients(trained, torch.float32, 1e-4)
    trained.model.zero_grad()
    backward(trained, BatchGradients(trained), parts=2)
    own = trained.join({name: p.grad for name, p in trained.parameters.items() if p.grad is not None})
    torch.testing.assert_close(own, sample_gradients(trained, *batch()).sum(0), rtol=1e-4, atol=1e-4)


def wide_model() -> Any:
    """A Llama whose linear layers are wider than its texts are long, as most are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 20}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager")).eval()


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_gradients_of_wide_layers_are_kept_as_x_and_delta(dtype: torch.dtype, off: float) -> None:
    held = check_gradients(TrainedWeights(wide_model()), dtype, off)
    assert len(held._parts[0].factors) == 9  # Projections, the head and the embedding.


def test_activations_are_freed_after_the_backward_pass() -> None:
    """By their own reference counts: a loop must not wait until Python looks for circles of references."""
    trained, seen = TrainedWeights(wide_model()), []
    hooks = [m.register_forward_hook(lambda *a: seen.append(weakref.ref(a[-1]))) for m in held_modules(trained)]
    was = gc.isenabled()
    gc.disable()
    try:
        backward(trained, BatchGradients(trained), parts=2)
        alive = sum(each() is not None for each in seen)
    finally:
        if was:
            gc.enable()
    for hook in hooks:
        hook.remove()
    assert len(seen) > 20
    assert alive == 0


def held_modules(trained: TrainedWeights) -> list[torch.nn.Module]:
    return [m for m in trained.model.modules() if len(list(m.parameters(recurse=False)))]


def test_what_is_no_batch_is_refused() -> None:
    held = BatchGradients(TrainedWeights(wide_model()))
    with pytest.raises(TsaeError, match="no gradient came back"), held.micro_batch(5):
        pass
    ids, mask, _ = batch()
    with pytest.raises(TsaeError, match="gives 5 samples, expected 4"), held.micro_batch(4):
        log_probabilities(held.trained.model, ids, mask).sum().backward()


# --- a training


@pytest.fixture(scope="module")
def log(fingerprint: str) -> Rollouts:
    """Six steps of two problems with three responses each."""
    table = make_rollouts(n_problems=12, tokenizer=fingerprint).with_advantages()
    return table.with_column("step", np.arange(len(table)) // 6 + 1)


def the_targets(log: Rollouts) -> NextToken:
    prompts = [log.tokens(row)[0] for row in range(0, len(log), 3)]
    return NextToken(prompts, ["one", "two"] * (len(prompts) // 2), token=int(log.tokens(0)[1][0]), what="begins")


# Where gradients are as small as rounding, Adam divides noise by noise: eps is above that.
MADE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Optimiser]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2), Optimiser("sgd", 1e-2, "constant", max_grad_norm=0.05)),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.99), eps=1e-5),
        Optimiser("adam", 1e-3, "constant", betas=(0.0, 0.99), eps=1e-5, max_grad_norm=0.05),
    ),
    "momentum": (lambda p: torch.optim.Adam(p, lr=1e-3), Optimiser("adam", 1e-3, "constant", max_grad_norm=0.05)),
}


def by_step(log: Rollouts) -> dict[int, np.ndarray]:
    return {step: np.flatnonzero(log.frame.step == step) for step in log.frame.step.unique().tolist()}


def padded(log: Rollouts, rows: np.ndarray, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and mask of rows, and the weight of every token after the first in a batch of n."""
    texts = [log.tokens(int(row)) for row in rows]
    width = max(len(prompt) + len(response) for prompt, response in texts)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    weight = torch.zeros(len(rows), width - 1)
    for i, (row, (prompt, response)) in enumerate(zip(rows, texts, strict=True)):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        mask[i, :end] = 1
        weight[i, len(prompt) - 1 : end - 1] = log.frame.advantage[row] / (LENGTH * n)
    return ids, mask, weight


def train(
    folder: Path,
    log: Rollouts,
    kind: str,
    *,
    record: dict[str, int] | None = None,
    weights: np.ndarray | None = None,
    guard: Callable[[Any, int], None] | None = None,
) -> tuple[TrainedWeights, Any]:
    """In plain torch, with two micro-batches a step; and what is recorded of the targets, with these options."""
    trained = TrainedWeights(Checkpoint(id="base", path=str(folder)).load_model().requires_grad_(True))
    parameters = list(trained.parameters.values())
    optimiser = MADE[kind][0](parameters)
    recorder = None if record is None else Recorder(trained, optimiser, the_targets(log), **record)
    for step, rows in by_step(log).items():
        optimiser.zero_grad(set_to_none=False)
        for some in np.array_split(rows, 2):
            ids, mask, weight = padded(log, some, len(rows))
            if weights is not None:
                weight = weight * torch.tensor(weights[some], dtype=torch.float32)[:, None]
            facts = [{name: log.frame[name][row] for name in ("problem_id", "advantage")} for row in some]
            with contextlib.nullcontext() if recorder is None else recorder.samples(facts):
                (-(log_probabilities(trained.model, ids, mask) * weight).sum()).backward()
        if guard is not None:
            guard(recorder, step)
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimiser.step()
    if recorder is not None:
        recorder.close()
    return trained, recorder


def the_exact_shares(llama: Path, log: Rollouts, kind: str, folder: Path) -> Shares:
    """Those of attribution after the run, at every step; `test_shares` has them by hand."""
    trained = TrainedWeights(Checkpoint(id="base", path=str(llama)).load_model())
    settings = RunSettings(MADE[kind][1], PolicyLoss("dr_grpo", LENGTH, epsilon=None))
    plan = plan_updates(log, settings, checkpoints={}, vocabulary=None)
    path = replay_of(Run(trained, log, settings, plan, State.at(trained.vector())), folder)
    return shares(path, the_targets(log), points=100, progress=False)


def recorded(llama: Path, log: Rollouts, kind: str) -> Recorder:
    return train(llama, log, kind, record={"refresh": 1, "n_steps": 6})[1]


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.slow), "adam"])
def test_without_momentum_shares_are_exact(kind: str, llama: Path, log: Rollouts, tmp_path: Path) -> None:
    recorder = recorded(llama, log, kind)
    exact = the_exact_shares(llama, log, kind, tmp_path)
    expected = exact.shares
    frame, names = recorder.frame, recorder.targets.names
    assert frame.step.tolist() == log.frame.step.tolist()
    for what in ("share", "now"):
        online = frame[[f"{what}: {name}" for name in names]].to_numpy()
        assert np.abs(online).max() > 1e-4
        np.testing.assert_allclose(online, expected, rtol=2e-3, atol=1e-4 * np.abs(expected).max())
    assert list(recorder.values) == list(range(7))
    np.testing.assert_allclose(recorder.values[6] - recorder.values[0], exact.realised, atol=1e-6)
    assert (frame.weight == 1).all()
    assert frame.columns.tolist()[:3] == ["step", "problem_id", "advantage"]


def test_with_momentum_what_comes_later_is_taken_as_it_is_now(llama: Path, log: Rollouts, tmp_path: Path) -> None:
    recorder, expected = recorded(llama, log, "momentum"), the_exact_shares(llama, log, "momentum", tmp_path).shares
    frame = recorder.frame
    column = frame["share: begins (one)"].to_numpy()
    assert np.corrcoef(column, expected[:, 0])[0, 1] > 0.8
    # The last step has nothing after it.
    last = (frame.step == 6).to_numpy()
    np.testing.assert_allclose(column[last], expected[last, 0], rtol=2e-3, atol=1e-4 * np.abs(column).max())
    np.testing.assert_allclose(column[last], frame["now: begins (one)"][last])
    # In the first step of six, Adam's weights of a gradient sum to this, with its corrections.
    first = (frame.step == 1).to_numpy()
    factor = sum(0.9**d * 0.1 / (1 - 0.9 ** (1 + d)) for d in range(6))
    np.testing.assert_allclose(column[first], frame["now: begins (one)"][first] * factor, rtol=1e-5)


def test_recording_changes_nothing_and_follows_where_targets_head(llama: Path, log: Rollouts) -> None:
    plain, _ = train(llama, log, "momentum")
    heading: list[np.ndarray] = []
    watched, recorder = train(
        llama, log, "momentum", record={"refresh": 4, "n_steps": 6}, guard=lambda r, _: heading.append(r.heading)
    )
    assert torch.equal(plain.vector(), watched.vector())
    assert list(recorder.values) == [0, 4]
    np.testing.assert_array_equal(heading[0], recorder.values[0])
    # At a refresh only what momentum still carries lies between value and heading.
    now = recorder.frame.groupby("step")[[f"now: {n}" for n in recorder.targets.names]].sum().to_numpy()
    share = recorder.frame.groupby("step")[[f"share: {n}" for n in recorder.targets.names]].sum().to_numpy()
    still = sum((share - now)[t] * 0.9 ** (3 - t) for t in range(4))
    np.testing.assert_allclose(heading[4] - recorder.values[4], still, rtol=1e-4)


# --- the guard


def test_a_weight_is_a_factor_of_the_advantage(llama: Path, log: Rollouts) -> None:
    weights = np.random.default_rng(0).choice([0.0, 0.5, 1.0], len(log))
    expected, _ = train(llama, log, "momentum", weights=weights)
    steps = by_step(log)
    found, recorder = train(
        llama,
        log,
        "momentum",
        record={},
        guard=lambda recorder, step: recorder.down_weight(weights[steps[step]]),
    )
    assert recorder.frame.weight.tolist() == weights.tolist()
    assert (recorder.frame["now: begins (one)"][weights == 0] == 0).all()
    start = TrainedWeights(Checkpoint(id="base", path=str(llama)).load_model()).vector()
    assert (found.vector() - expected.vector()).norm() < 1e-3 * (expected.vector() - start).norm()


def test_what_is_predicted_is_what_is_recorded(llama: Path, log: Rollouts) -> None:
    """Before the step and after it, where no clipping comes between: the target's gradient alone is older."""
    seen = []
    _, recorder = train(
        llama,
        log,
        "sgd",
        record={"refresh": 100},
        guard=lambda recorder, step: (
            torch.nn.utils.clip_grad_norm_(list(recorder.trained.parameters.values()), 0.05),
            seen.append(recorder.predicted() * recorder._gradient_norm() / recorder._norm),
        ),
    )
    recorded = recorder.frame[[f"share: {name}" for name in recorder.targets.names]].to_numpy()
    np.testing.assert_allclose(np.concatenate(seen), recorded, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_the_guard_holds_a_target_that_would_rise(llama: Path, log: Rollouts) -> None:
    def ends(bound: float | None, weight: float = 0.0) -> tuple[np.ndarray, Any]:
        guards: list[Guard] = []

        def judge(recorder: Recorder, step: int) -> None:
            if bound is None:
                return
            if not guards:
                place = recorder.values[0][0] + bound
                guards.append(Guard(recorder, "begins (one)", harmful="rises", bound=place, weight=weight))
            listed = guards[0]()
            assert (listed.effect > 0).all() if len(listed) else True

        _, recorder = train(llama, log, "sgd", record={"refresh": 1}, guard=judge)
        return np.array(list(recorder.values.values()))[:, 0] - recorder.values[0][0], guards[0] if guards else None

    free, _ = ends(None)
    top = free.max()
    assert top > 0
    held, guard = ends(top / 3)
    assert held.max() < top / 2
    assert set(guard.listed.columns) >= {"step", "place", "effect", "problem_id", "advantage"}
    assert 0 < len(guard.listed) < len(log) / 2
    only_listed, guard = ends(top / 3, weight=1.0)
    assert len(guard.listed)
    np.testing.assert_array_equal(only_listed, free)
    _, guard = ends(2 * top + 1)
    assert guard.listed.empty


def test_as_few_as_are_enough_are_listed() -> None:
    harm = np.array([1.0, -5.0, 3.0, 2.0])
    assert worst(harm, 0).tolist() == []
    assert worst(harm, 3.0).tolist() == [2]
    assert worst(harm, 3.1).tolist() == [2, 3]
    assert worst(harm, 100).tolist() == [2, 3, 0]


def test_what_cannot_be_recorded_is_refused(llama: Path, log: Rollouts) -> None:
    trained = TrainedWeights(Checkpoint(id="base", path=str(llama)).load_model())
    parameters, targets = list(trained.parameters.values()), the_targets(log)
    refuses("the optimiser is RMSprop, expected", Recorder, trained, torch.optim.RMSprop(parameters), targets)
    with pytest.raises(TsaeError, match="the optimiser is Adam with amsgrad, expected"):
        Recorder(trained, torch.optim.Adam(parameters, amsgrad=True), targets)
    refuses("does not train 'model", Recorder, trained, torch.optim.SGD(parameters[3:], lr=1.0), targets)
    recorder = Recorder(trained, torch.optim.SGD(parameters, lr=1.0), targets)
    refuses(r"no target 'x'.*begins \(one\)", Guard, recorder, "x", harmful="rises", bound=0)
    for odd in ({"harmful": "raises", "bound": 0}, {"harmful": "rises", "bound": float("nan")}):
        refuses("must be rises or falls", Guard, recorder, "begins (one)", **odd)
    refuses("refresh=0 is less than 1", Recorder, trained, torch.optim.SGD(parameters, lr=1.0), targets, refresh=0)
    with pytest.raises(TsaeError, match="the fact 'step', which"), recorder.samples([{"step": 1}]):
        raise AssertionError
    refuses("weight=2", Guard, recorder, "begins (one)", harmful="rises", bound=0, weight=2)
