"""The path of a training through the space of weights: checkpoints, and straight lines between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import torch

from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.checkpoints.loading import ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.weight_files import is_adapter
from tsae.errors import TsaeError


class TrainingPath:
    """Weights after every step.

    Args:
        trained: the model and which of its weights the run trained.
        knots: (P,) weights by the number of steps that were finished; two or more.
    """

    def __init__(self, trained: TrainedWeights, knots: Mapping[int, torch.Tensor]) -> None:
        if len(knots) < 2:
            raise TsaeError(
                f"{len(knots)} checkpoint makes no path",
                where="TrainingPath",
                fix="Give the run's first weights and at least one later checkpoint.",
            )
        self.trained, self.knots = trained, dict(sorted(knots.items()))
        self.steps = list(self.knots)

    @classmethod
    def of(cls, series: CheckpointSeries, run: str | None = None, *, device: str = "cpu") -> TrainingPath:
        """The base and the checkpoints of one run, whole models.

        A base that is itself a later step stands at that step.

        Args:
            series: has them.
            run: its name; by default the only one.
            device: torch device.

        Raises:
            TsaeError: where several runs are there and none is named, steps are missing, or checkpoints are adapters.
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
            raise TsaeError(
                f"has the runs {', '.join(runs) or 'none'}" + ("" if run is None else f"; no {run}"),
                where=series.name,
                fix="Name one of them.",
            )
        adapter = next((c for c in series if c.run == run and is_adapter(Path(c.path))), None)
        if adapter is not None:
            raise TsaeError(
                "is an adapter (LoRA), and only whole models are attributed from checkpoints",
                where=adapter.path,
                fix="Record the samples' gradients while training (docs/attribution.md).",
            )
        loader = ModelLoader(device=device, dtype="float32", attention="eager")
        knots = {}
        for checkpoint in series:
            if checkpoint.is_base or checkpoint.run == run:
                trained = TrainedWeights(loader.load(checkpoint))
                knots[checkpoint.step] = trained.vector()
        return cls(TrainedWeights(loader.load(series.base)), knots)

    def between(self, first: int, last: int) -> TrainingPath:
        """The stretch from one checkpoint to a later one, with steps counted from 0.

        Raises:
            TsaeError: where there is no checkpoint at an end.
        """
        for step in (first, last):
            if step not in self.knots:
                raise TsaeError(
                    f"no checkpoint after step {step}; there are {', '.join(map(str, self.steps))}",
                    where="steps",
                    fix="Give two of these, the earlier first.",
                )
        knots = {step - first: weights for step, weights in self.knots.items() if first <= step <= last}
        return TrainingPath(self.trained, knots)

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
