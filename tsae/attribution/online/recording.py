"""What a recorder leaves on disk, and how attribution reads it after the run.

samples.jsonl          a line a sample: step, prompt_ids, response_ids, advantage, reward, problem_id, weight, …
weights-000010.safetensors   the trained weights after so many steps, by name; only those of the adapter with LoRA
training_args.json     settings in the words of TRL's GRPOConfig, for `read_recipe`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.base.files import reading, write_json
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

SAMPLES, SETTINGS = "samples.jsonl", "training_args.json"
_FIX = "Record the training again, or remove what is damaged."
_NEEDED = ("problem_id", "advantage", "prompt_ids", "response_ids")


class RecordingFolder:
    """Writes while a training runs.

    Args:
        path: a folder; it must not hold another recording.
        settings: of the trainer, in the words of TRL's GRPOConfig.
        every: steps between the weights that are kept; the first and the last are kept too.

    Raises:
        TsaeError: where the folder holds a recording.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, every: int = 10) -> None:
        self.path, self.every = Path(path), every
        if (self.path / SAMPLES).exists():
            raise TsaeError("holds a recording already", where=self.path, fix="Give another folder, or remove it.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / SETTINGS, dict(settings))
        (self.path / SAMPLES).touch()

    def keep_weights(self, trained: TrainedWeights, step: int) -> None:
        """Write the present weights."""
        partial = self.path / "weights.tmp"
        save_file({name: p.detach().cpu().contiguous() for name, p in trained.parameters.items()}, partial)
        partial.replace(self.path / f"weights-{step:06d}.safetensors")

    def add(self, step: int, facts: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> None:
        """Append the samples of a step.

        Raises:
            TsaeError: where what a later reading needs is missing.
        """
        lines = []
        for fact, weight in zip(facts, weights, strict=True):
            missing = [name for name in _NEEDED if name not in fact]
            if missing:
                raise TsaeError(f"a sample has no {missing[0]}", where="Recorder.samples", fix="Add it to the facts.")
            lines.append(json.dumps({"step": step, "weight": weight, **fact}, default=_plain) + "\n")
        with (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value.item()


def read_recording(path: str | Path, trained: TrainedWeights) -> tuple[TrainingPath, Rollouts]:
    """The path and the samples of a recorded run, as `build_gradients` takes them; settings are for `read_recipe`.

    Args:
        path: folder of the recording.
        trained: the model, with the weights that the recorder followed.

    Raises:
        TsaeError: where the folder holds no recording, or that of other weights.
    """
    path = Path(path)
    if not (path / SAMPLES).is_file():
        raise TsaeError(f"holds no {SAMPLES}", where=path, fix="Give the folder that a recorder wrote.")
    knots = {}
    for file in sorted(path.glob("weights-*.safetensors")):
        with reading(file, _FIX):
            found = load_file(file)
        if found.keys() != trained.parameters.keys():
            odd = sorted(found.keys() ^ trained.parameters.keys())[0]
            raise TsaeError(f"{odd!r} is either not there or not among the trained weights", where=file)
        knots[int(file.stem.removeprefix("weights-"))] = trained.join(found)
    records = []
    told = {"policy": "run", "prompt": "", "response": "", "outcome": "unknown"}
    with reading(path / SAMPLES, _FIX), (path / SAMPLES).open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            # A down-weighted sample acted as one with a smaller advantage.
            records.append({**told, **sample, "advantage": sample["advantage"] * sample["weight"]})
    return TrainingPath(trained, knots), Rollouts.from_records(records)
