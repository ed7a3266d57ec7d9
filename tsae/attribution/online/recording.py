"""What a recorder leaves on disk, and how attribution reads it after the run.

samples.jsonl          a line a sample: step, prompt_ids, response_ids, advantage, reward, problem_id, weight, …
weights-000010.safetensors   the trained weights after so many steps, by name; only those of the adapter with LoRA
training_args.json     settings in the words of TRL's GRPOConfig, for `read_recipe`
checksums.json         of the weights and the settings

Every line of samples.jsonl ends with a checksum of itself and of all lines before it ("sum"), so that a line that is
changed, lost or moved is found, wherever the training ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tsae.attribution.gradients.path import TrainingPath
from tsae.attribution.gradients.sample_gradients import TrainedWeights
from tsae.base.disk.tensors import tensors_replacing
from tsae.base.files import as_path, reading, write_json
from tsae.base.seal import check_seal, seal, sealed_names
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

SAMPLES, SETTINGS = "samples.jsonl", "training_args.json"
_SUM = ', "sum": "'
_FIX = "Record the training again, or remove what is damaged."
_NEEDED = ("problem_id", "advantage", "prompt_ids", "response_ids")


class RecordingFolder:
    """Writes while a training runs.

    Args:
        path: a folder; it must not hold another recording.
        settings: of the trainer, in the words of TRL's GRPOConfig.
        every: steps between the weights that are kept; the first and the last are kept too.

    Raises:
        TsaeError: where the folder holds a recording, or `every` is less than 1.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, every: int = 10) -> None:
        self.path, self.every = as_path(path), every
        if every < 1:
            raise TsaeError(f"every={every} is less than 1", where="RecordingFolder")
        if (self.path / SAMPLES).exists():
            raise TsaeError("holds a recording already", where=self.path, fix="Give another folder, or remove it.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / SETTINGS, dict(settings))
        seal(self.path, [SETTINGS])
        self._sum = ""
        (self.path / SAMPLES).touch()

    def keep_weights(self, trained: TrainedWeights, step: int) -> None:
        """Write the present weights."""
        name = _weights_name(step)
        with tensors_replacing(self.path / name, trained.parameters) as partial:
            # The seal is written first, so that a kill leaves no weights without a checksum.
            seal(self.path, coming={name: partial})

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
            if not np.isfinite([float(fact["advantage"]), weight]).all():
                what = f"a sample has the advantage {fact['advantage']} and the weight {weight}"
                raise TsaeError(what, where="Recorder.samples", fix="Give finite numbers.")
            line = json.dumps({"step": step, "weight": weight, **fact}, default=_plain)
            self._sum = _next_sum(self._sum, line)
            lines.append(f'{line[:-1]}{_SUM}{self._sum}"}}\n')
        with (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _next_sum(before: str, line: str) -> str:
    return hashlib.sha256(f"{before}{line}".encode()).hexdigest()[:16]


def _samples(file: Path) -> Iterator[dict[str, Any]]:
    """The samples in a file, each line compared with its checksum.

    Raises:
        TsaeError: at the first line that is not the one that was written there. A last line that has no end is left
            out: the training was stopped while it was written.
    """
    last = ""
    with file.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            text, _, end = line.rpartition(_SUM)
            text = f"{text}}}"
            last = _next_sum(last, text)
            if end != f'{last}"}}\n':
                raise TsaeError(f"line {number} is damaged, or lines before it are missing", where=file, fix=_FIX)
            yield json.loads(text)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value.item()


def check_recording(path: Path, weights: Sequence[Path]) -> None:
    """Compare weights and settings with their checksums.

    Raises:
        TsaeError: where one is damaged, or missing before the last. A training that was stopped may lack its last.
            Where a name is none that a recorder gives, is a link or a folder, or the first weights are missing.
    """
    odd = [file for file in weights if not _is_weights(file)]
    if odd:
        what = f"is no file of weights that a recorder wrote, expected a name such as {_weights_name(10)}, and no link"
        raise TsaeError(what, where=odd[0], fix="Remove it from the recording.")
    if weights and path / _weights_name(0) not in weights:
        raise TsaeError(f"holds no {_weights_name(0)}, the weights that it began with", where=path, fix=_FIX)
    check_seal(path, _FIX, [file.name for file in weights], others=False)
    names = sealed_names(path)
    last = max((name for name in names if name.startswith("weights-")), default="")
    check_seal(path, _FIX, [name for name in names if name != last or (path / last).is_file()], others=False)


def _weights_name(step: int) -> str:
    return f"weights-{step:06d}.safetensors"


def _is_weights(file: Path) -> bool:
    """Whether it has the one name that weights of its step have, and is a file of this folder."""
    step = file.stem.removeprefix("weights-")
    named = step.isascii() and step.isdecimal() and len(step) < 19 and file.name == _weights_name(int(step))
    return named and file.is_file() and not file.is_symlink()


def check_samples(path: Path) -> None:
    """Compare all of a recording with its checksums.

    Raises:
        TsaeError: where something is damaged or missing.
    """
    check_recording(path, sorted(path.glob("weights-*.safetensors")))
    with reading(path / SAMPLES, _FIX):
        for _ in _samples(path / SAMPLES):
            pass


def read_recording(path: str | Path, trained: TrainedWeights) -> tuple[TrainingPath, Rollouts]:
    """The path and the samples of a recorded run, as `build_gradients` takes them; settings are for `read_recipe`.

    Args:
        path: folder of the recording.
        trained: the model, with the weights that the recorder followed.

    Raises:
        TsaeError: where the folder holds no recording, that of other weights, or a damaged one.
    """
    path = as_path(path)
    if not (path / SAMPLES).is_file():
        raise TsaeError(f"holds no {SAMPLES}", where=path, fix="Give the folder that a recorder wrote.")
    knots = {}
    files = sorted(path.glob("weights-*.safetensors"))
    check_recording(path, files)
    for file in files:
        with reading(file, _FIX):
            found = load_file(file)
        if found.keys() != trained.parameters.keys():
            odd = sorted(found.keys() ^ trained.parameters.keys())[0]
            raise TsaeError(f"{odd!r} is either not there or not among the trained weights", where=file)
        for name, parameter in trained.parameters.items():
            if found[name].shape != parameter.shape:
                what = f"{name} has the shape {tuple(found[name].shape)}, and {tuple(parameter.shape)} in the model"
                raise TsaeError(what, where=file, fix="Give the model that was recorded.")
            if not found[name].isfinite().all():
                raise TsaeError(f"the weights {name!r} are not finite", where=file, fix=_FIX)
        knots[int(file.stem.removeprefix("weights-"))] = trained.join(found)
    records = []
    told = {"policy": "run", "prompt": "", "response": "", "outcome": "unknown"}
    with reading(path / SAMPLES, _FIX):
        for sample in _samples(path / SAMPLES):
            # A down-weighted sample acted as one with a smaller advantage.
            records.append({**told, **sample, "advantage": sample["advantage"] * sample["weight"]})
        if max(knots, default=0) > max((record["step"] for record in records), default=0):
            raise ValueError(f"its last samples are missing; there are weights of step {max(knots)}")
    return TrainingPath(trained, knots), Rollouts.from_records(records)
