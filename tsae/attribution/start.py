"""Where a replay begins, and the checkpoints that it is compared with.

Of a run that trained an adapter (LoRA), the weights are the adapter's A and B; the base stays as it is. Before the
first step B is 0, so the model is the base whatever A is. A is drawn from the trainer's seed; where that draw is not
the one that the run's first checkpoint comes from, A of that checkpoint is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tsae.attribution.path import Control, Controls
from tsae.attribution.sample_gradients import TrainedWeights
from tsae.attribution.settings import Optimiser
from tsae.attribution.states import State, decayed
from tsae.base.array_files import read_torch_file
from tsae.base.files import read_object
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import ADAPTER_CONFIG, common_rows, folder_of, is_adapter
from tsae.errors import TsaeError, refuse

_DRAWN = 0.5
"""Distance of A after some steps from A of the seed, relative to its norm, below which it was drawn there. Two draws
are √2 apart."""


@dataclass(frozen=True)
class Start:
    """The model, and the weights that it began with."""

    trained: TrainedWeights
    begin: State
    """With the weights, and, where it is not the run's first step, the optimiser's running means."""
    controls: Controls
    notes: list[str]


def checkpoints_of(series: CheckpointSeries, run: str | None) -> list[Checkpoint]:
    """The later checkpoints of a run, by step.

    Raises:
        TsaeError: where several runs are there and none is named, or whole models and adapters.
    """
    runs = sorted({c.run for c in series if not c.is_base and c.run is not None})
    run = runs[0] if run is None and len(runs) == 1 else run
    mine = sorted((c for c in series if c.run == run and not c.is_base), key=lambda c: c.step)
    fix = "Name one of them." if runs else "Give the folder with the run's last checkpoint (checkpoint-N)."
    refuse(
        series.name,
        (run not in runs, f"has the runs {', '.join(runs) or 'none'}" + ("" if run is None else f"; no {run}"), fix),
        (
            len({is_adapter(folder_of(checkpoint)) for checkpoint in mine}) > 1,
            f"the run {run} has whole models and adapters",
            "Give checkpoints of one kind; merge_and_unload of peft makes whole models.",
        ),
    )
    return mine


def start_of(
    series: CheckpointSeries,
    mine: Sequence[Checkpoint],
    optimiser: Optimiser,
    *,
    after: int | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> Start:
    """Load what a replay begins with.

    Args:
        series: has the base.
        mine: later checkpoints of the run.
        optimiser: of the run: with its state, a checkpoint can restart a replay.
        after: begin at the checkpoint after this step; by default at the base.
        seed: of the trainer; None where it is not known.
        device: torch device.

    Raises:
        TsaeError: where an adapter has weights beside A and B, or checkpoints differ in the weights that they have.
    """
    whole = _whole_run(series, mine, optimiser, seed, device)
    begin = series.base.step if after is None else after
    if begin == 0:
        return whole
    at = next((c for c in (series.base, *mine) if c.step == begin), None)
    if at is None:
        what = f"no checkpoint after step {begin}; there are {', '.join(str(c.step) for c in (series.base, *mine))}"
        raise TsaeError(what, where="steps", fix="Begin after one of these.")
    weights = whole.begin.weights if at is series.base else whole.controls[begin]().weights
    state = _optimiser_state(at, whole.trained, weights, optimiser)
    if state is None:
        what = f"is a later step ({begin}), and no optimizer.pt beside it says what the optimiser knew there"
        fix = "Begin with the model that the training started from (--base), or keep optimizer.pt with checkpoints."
        raise TsaeError(what, where=at.path, fix=fix)
    later = {step: control for step, control in whole.controls.items() if step > begin}
    return Start(whole.trained, state, later, whole.notes)


def _whole_run(
    series: CheckpointSeries, mine: Sequence[Checkpoint], optimiser: Optimiser, seed: int | None, device: str
) -> Start:
    """From the base on; without what its optimiser knew, if the base is a later step."""
    loader = ModelLoader(device=device, dtype="float32")
    if is_adapter(folder_of(mine[0])):
        return _of_adapters(loader, mine, optimiser, seed)
    base = TrainedWeights(loader.load(series.base))
    later = {c.step: c for c in mine if c.step > series.base.step}
    notes: list[str] = []
    start, trained = base.vector(), base
    if base_shapes(_of_file(mine[0])) != base_shapes(base):
        start, trained = _in_vocabulary_of(loader, mine[0], series.base, base)
        notes.append(
            f"The run resized the vocabulary: tokens that {series.base.id} does not have are taken to have had the "
            f"weights of step {mine[0].step} before the first step."
        )
    return Start(trained, State.at(start), _controls(trained, later, optimiser), notes)


def base_shapes(trained: TrainedWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in trained.parameters.items()}


def _of_file(checkpoint: Checkpoint) -> TrainedWeights:
    loader = ModelLoader(dtype="float32")
    return TrainedWeights(loader.load(checkpoint), loader.added or None)


def _controls(trained: TrainedWeights, mine: dict[int, Checkpoint], optimiser: Optimiser) -> Controls:
    shapes = base_shapes(trained)

    def load(checkpoint: Checkpoint) -> Control:
        saved = _of_file(checkpoint)
        found = base_shapes(saved)
        name = next((n for n in {**shapes, **found} if shapes.get(n) != found.get(n)), None)
        if name is not None:
            here, there = (f"the shape {of[name]}" if name in of else "nothing" for of in (found, shapes))
            what = f"has {here} for the weight {name}, and the run began with {there}"
            fix = "Give checkpoints of one run and its base, all with the same vocabulary and layers."
            raise TsaeError(what, where=checkpoint.path, fix=fix)
        weights = saved.vector().to(trained.device)
        return Control(weights, _optimiser_state(checkpoint, trained, weights, optimiser))

    return {step: partial(load, checkpoint) for step, checkpoint in mine.items()}


def _optimiser_state(
    checkpoint: Checkpoint, trained: TrainedWeights, weights: torch.Tensor, optimiser: Optimiser
) -> State | None:
    """What optimizer.pt beside a checkpoint holds, if it is Adam's of these weights."""
    file = Path(folder_of(checkpoint)) / "optimizer.pt"
    if not file.is_file() or optimiser.name == "sgd":
        return None
    try:
        found = read_torch_file(file, refused="Remove it.", damaged="Remove it.")
        decays = dict(zip(trained.parameters, decayed(trained, optimiser), strict=True))
        names = sorted(decays, key=lambda name: not decays[name])  # torch's groups: first the weights that decay
        order = [i for group in found["param_groups"] for i in group["params"]]
        parts = dict(zip(names, (found["state"][i] for i in order), strict=True))
        shapes = base_shapes(trained)
        if any(tuple(part["exp_avg"].shape) != shapes[name] for name, part in parts.items()):
            return None
        first, second = ({n: p[key] for n, p in parts.items()} for key in ("exp_avg", "exp_avg_sq"))
        taken = int(next(iter(parts.values()))["step"])
    except (TsaeError, KeyError, TypeError, ValueError, AttributeError):
        return None  # Of another optimiser: the checkpoint is compared, and restarts nothing.
    return State(weights, trained.join(first), trained.join(second), checkpoint.step, taken)


def _of_adapters(loader: ModelLoader, mine: Sequence[Checkpoint], optimiser: Optimiser, seed: int | None) -> Start:
    trained = TrainedWeights(loader.load(mine[0]), loader.added)
    if loader.not_plain is not None:
        fix = "Attribute plain LoRA of linear layers, or merge the adapters of all steps (merge_and_unload)."
        raise TsaeError(f"the adapter has {loader.not_plain} beside A and B", where=mine[0].path, fix=fix)
    saved = dict(zip(trained.parameters, trained.vector().split(trained.sizes), strict=True))
    later = {c.step: c for c in mine if c.step > 0}
    if mine[0].step == 0:
        return Start(trained, State.at(trained.vector()), _controls(trained, later, optimiser), [])
    of_checkpoint = {name: part for name, part in saved.items() if ".lora_A." in name}
    drawn = None if seed is None else _drawn(mine[0], trained, seed)
    start, notes = of_checkpoint, []
    if drawn is not None and _apart(drawn, of_checkpoint) < _DRAWN:
        start = drawn
        notes.append(f"The adapter's A was drawn from the trainer's seed, {seed}.")
    elif mine[0].step > 1:
        notes.append(
            "The adapter before the first step is not there: it is taken to have had the A of step "
            f"{mine[0].step}, and B = 0."
        )
    return Start(trained, State.at(trained.join(start)), _controls(trained, later, optimiser), notes)


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    gap = sum(float((one[name].flatten() - part.flatten()).pow(2).sum()) for name, part in other.items())
    return (gap / max(sum(float(part.pow(2).sum()) for part in other.values()), 1e-30)) ** 0.5


def _drawn(checkpoint: Checkpoint, trained: TrainedWeights, seed: int) -> dict[str, torch.Tensor] | None:
    """A of a fresh adapter, as peft draws it after the trainer has set its seed; None without peft, or for what it does
    not make."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    folder = Path(folder_of(checkpoint))
    known = read_object(folder / ADAPTER_CONFIG, "Give the adapter's own configuration.")
    fields = LoraConfig.__dataclass_fields__
    given = {n: v for n, v in known.items() if n in fields and n not in ("auto_mapping", "peft_type", "inference_mode")}
    before = torch.get_rng_state()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(trained.model.config)
        for module in model.modules():  # peft asks for shapes; a number stands for each weight
            for name, weight in list(module.named_parameters(recurse=False)):
                flat = torch.zeros((), device="cpu").expand(weight.shape)
                setattr(module, name, torch.nn.Parameter(flat, requires_grad=False))
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft uses what transformers deprecates
            fresh = get_peft_model(model, LoraConfig(**given))
    except (TypeError, ValueError, RuntimeError, KeyError):
        return None
    finally:
        torch.set_rng_state(before)
    parts = {n.replace(".default", ""): p.detach() for n, p in fresh.named_parameters() if ".lora_A." in n}
    found = {}
    for name in (name for name in trained.parameters if ".lora_A." in name):
        plain = name.replace(".default", "")
        found[name] = next((p for n, p in parts.items() if n.endswith(plain) or plain.endswith(n)), torch.zeros(0))
        if found[name].shape != trained.parameters[name].shape:
            return None
    return found


def _in_vocabulary_of(
    loader: ModelLoader, later: Checkpoint, base: Checkpoint, own: TrainedWeights
) -> tuple[torch.Tensor, TrainedWeights]:
    """The weights of a base in the shapes that a run gave them, and the model with these shapes."""
    trained = TrainedWeights(loader.load(later))
    parts = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
    for name, tensor in ((name, parameter.detach()) for name, parameter in own.parameters.items()):
        shape = parts[name].shape if name in parts else tensor.shape
        n = common_rows(name, tensor.shape, shape)
        if tensor.shape == shape:
            parts[name] = tensor
        elif n is not None:
            parts[name][:n] = tensor[:n]
        else:
            what = f"has the shape {tuple(shape)} for the weight {name}, and {base.id} has {tuple(tensor.shape)}"
            fix = "Give checkpoints of one run and its base, all with the same layers."
            raise TsaeError(what, where=later.path, fix=fix)
    return trained.join(parts), trained
