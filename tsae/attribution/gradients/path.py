"""The path of a training through the space of weights: checkpoints, and straight lines between them.

Of a run that trained an adapter (LoRA), the weights are the adapter's A and B; the base stays as it is. Before the
first step B is 0, so the model is the base whatever A is, and the gradient of A is 0: the first step does not move A.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

import torch

from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.loading import ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import common_rows, folder_of, is_adapter
from tsae.errors import TsaeError


class TrainingPath:
    """Weights after every step.

    Args:
        trained: the model and which of its weights the run trained.
        knots: (P,) weights by the number of steps that were finished; two or more. They are kept on the CPU, where
            stored gradients are, wherever the model is.
        notes: what had to be assumed.
    """

    def __init__(self, trained: TrainedWeights, knots: Mapping[int, torch.Tensor], notes: Sequence[str] = ()) -> None:
        if len(knots) < 2:
            raise TsaeError(
                f"{len(knots)} checkpoint makes no path",
                where="TrainingPath",
                fix="Give the run's first weights and at least one later checkpoint.",
            )
        self.trained, self.knots = trained, {step: weights.cpu() for step, weights in sorted(knots.items())}
        self.steps, self.notes = list(self.knots), list(notes)

    @classmethod
    def of(cls, series: CheckpointSeries, run: str | None = None, *, device: str = "cpu") -> TrainingPath:
        """The base and the checkpoints of one run: whole models, or adapters on the base.

        A base that is itself a later step stands at that step. Of adapters one that was saved before the first step is
        the path's beginning; else it has the A of the first one, and B = 0. Where the run resized the vocabulary,
        tokens that the base lacks begin with the weights of the run's first checkpoint.

        Args:
            series: has them.
            run: its name; by default the only one.
            device: torch device.

        Raises:
            TsaeError: where several runs are there and none is named, steps are missing or there twice, an adapter has
                weights beside A and B, or checkpoints differ in the weights that they have.
        """
        runs = sorted({c.run for c in series if not c.is_base and c.run is not None})
        if run is None and len(runs) == 1:
            run = runs[0]
        if not runs:
            raise TsaeError(
                f"holds the base alone ({series.base.id}), expected later checkpoints of a run",
                where=series.name,
                fix="Give the folder with the run's checkpoint-N folders, or have the trainer save them (save_steps).",
            )
        if run not in runs:
            what = f"has the runs {', '.join(runs) or 'none'}" + ("" if run is None else f"; no {run}")
            raise TsaeError(what, where=series.name, fix="Name one of them.")
        loader = ModelLoader(device=device, dtype="float32", attention="eager")
        mine = [checkpoint for checkpoint in series if checkpoint.run == run and not checkpoint.is_base]
        twice = next((c for i, c in enumerate(mine) if c.step in [other.step for other in mine[:i]]), None)
        if twice is not None:
            what = f"the run {run} has two checkpoints after step {twice.step}, one of them {twice.id}"
            raise TsaeError(what, where=series.name, fix="Leave one of them out.")
        kinds = {is_adapter(folder_of(checkpoint)) for checkpoint in mine}
        if len(kinds) > 1:
            raise TsaeError(
                f"the run {run} has whole models and adapters",
                where=series.name,
                fix="Give checkpoints of one kind; merge_and_unload of peft makes whole models.",
            )
        if kinds == {True}:
            return cls._of_adapters(loader, mine)
        knots, whole = {}, _Alike()
        for checkpoint in mine:
            trained = TrainedWeights(loader.load(checkpoint))
            whole.check(trained, checkpoint)
            knots[checkpoint.step] = trained.vector()
        base = TrainedWeights(loader.load(series.base))
        if [p.shape for p in base.parameters.values()] == [p.shape for p in trained.parameters.values()]:
            whole.check(base, series.base)
            return cls(base, {series.base.step: base.vector(), **knots})
        start, cut = _in_vocabulary_of(trained, base, knots[min(knots)])
        whole.check(base, series.base, apart=cut)
        assumed = (
            f"The run resized the vocabulary: tokens that {series.base.id} does not have are taken to have had the "
            f"weights of step {min(knots)} before the first step."
        )
        return cls(trained, {series.base.step: start, **knots}, [assumed])

    @classmethod
    def _of_adapters(cls, loader: ModelLoader, mine: Sequence[Checkpoint]) -> TrainingPath:
        knots: dict[int, torch.Tensor] = {}
        trained, alike = None, _Alike()
        for checkpoint in sorted(mine, key=lambda c: -c.step):  # the first stays loaded
            model = loader.load(checkpoint)
            if loader.not_plain is not None:
                raise TsaeError(
                    f"the adapter has {loader.not_plain} beside A and B",
                    where=checkpoint.path,
                    fix="Attribute plain LoRA of linear layers, or merge the adapters of all steps (merge_and_unload).",
                )
            trained = TrainedWeights(model, loader.added)
            alike.check(trained, checkpoint)
            knots[checkpoint.step] = trained.vector()
        assert trained is not None
        if min(knots) == 0:
            return cls(trained, knots)
        first = min(knots)
        parts = dict(zip(trained.parameters, knots[first].split(trained.sizes), strict=True))
        start = trained.join({name: part for name, part in parts.items() if ".lora_A." in name})
        assumed = (
            f"The adapter before the first step is not there: it is taken to have had the A of step {first}, and B = 0."
            + (" The first step leaves A as it was, so this is exact." if first == 1 else "")
        )
        return cls(trained, {0: start, **knots}, [assumed])

    def between(self, first: int, last: int) -> TrainingPath:
        """The stretch from one checkpoint to a later one, with steps counted from 0.

        Raises:
            TsaeError: where there is no checkpoint at an end.
        """
        for step in (first, last):
            if step not in self.knots:
                what = f"no checkpoint after step {step}; there are {', '.join(map(str, self.steps))}"
                raise TsaeError(what, where="steps", fix="Give two of these, the earlier first.")
        knots = {step - first: weights for step, weights in self.knots.items() if first <= step <= last}
        return TrainingPath(self.trained, knots, self.notes if first == 0 else ())

    def fingerprint(self, step: int) -> str:
        """Hash of the weights that the checkpoint after a step has, of those that were trained."""
        return hashlib.sha256(self.knots[step].numpy().tobytes()).hexdigest()[:16]

    @property
    def last(self) -> int:
        return self.steps[-1]

    def weights(self, after: float) -> torch.Tensor:
        """(P,) weights when so many steps are finished; between checkpoints on the straight line."""
        low = self.steps[max(0, min(bisect_right(self.steps, after), len(self.steps) - 1) - 1)]
        high = self.steps[self.steps.index(low) + 1]
        return torch.lerp(self.knots[low], self.knots[high], (after - low) / (high - low))

    def put(self, after: float) -> None:
        """Give the model these weights."""
        self.trained.put(self.weights(after))


def _in_vocabulary_of(
    trained: TrainedWeights, base: TrainedWeights, later: torch.Tensor
) -> tuple[torch.Tensor, list[str]]:
    """The weights of a base in the shapes that a run gave them, and the names of those with another vocabulary."""
    parts, cut = dict(zip(trained.parameters, later.split(trained.sizes), strict=True)), []
    for name, own in base.parameters.items():
        shape = trained.parameters[name].shape if name in trained.parameters else own.shape
        if own.shape == shape:
            parts[name] = own.detach()
        elif (n := common_rows(name, own.shape, shape)) is not None:
            parts[name] = parts[name].view(shape).clone()
            parts[name][:n] = own.detach()[:n]
            cut.append(name)
    return trained.join(parts), cut


class _Alike:
    """Refuses checkpoints that do not have the same weights as the first: between them there is no line."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, ...]] = {}
        self._of = ""

    def check(self, trained: TrainedWeights, checkpoint: Checkpoint, apart: Collection[str] = ()) -> None:
        """Raise a TsaeError where the names or shapes of the weights differ, but for those `apart`."""
        found = {name: tuple(parameter.shape) for name, parameter in trained.parameters.items()}
        if not self._first:
            self._first, self._of = found, checkpoint.id
        both = [n for n in {**self._first, **found} if n not in apart]
        name = next((n for n in both if self._first.get(n) != found.get(n)), None)
        if name is not None:
            here, there = (f"the shape {of[name]}" if name in of else "nothing" for of in (found, self._first))
            raise TsaeError(
                f"has {here} for the weight {name}, and {self._of} has {there}",
                where=checkpoint.path,
                fix="Give checkpoints of one run and its base, all with the same vocabulary and layers.",
            )
