"""The folder of one training: a run that was killed at any moment resumes from it and ends with the same bits.

On a GPU the last bits differ from run to run, killed or not: sparse products and `index_add` sum in any order there.

::

    folder/
      metrics.jsonl              appended while training; cut back to the checkpoint when a run resumes
      checkpoint/0000000500/     state after 500 steps: written as `partial`, flushed to disk, then renamed
        state.safetensors        weights, Adam's moments, counters
        state.json               what is trained, on what
      sae.safetensors, config.json, training.json
      manifest.json              written last: the training is finished, and checkpoint/ is removed

The old checkpoint is removed only after the new one has its name, so that one whole checkpoint always exists.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tsae.base.artefact import MANIFEST, file_hash, is_whole, read_manifest, read_record, write_record
from tsae.base.files import as_path, flush_to_disk, read_object, reading, write_text
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError, public
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.exchange.saelens_files import FORMAT
from tsae.sae.model import SAE, TemporalSAE

_FIRST_ROW = b'{"step": 0, "loss": '
"""How metrics.jsonl begins."""
_NOT_COMPARED = ("site", "device", "save_every_steps", "resume", "log_to")
"""Fields of TrainingConfig that do not change the result. (The site is among the inputs.)"""


class RunFolder:
    """Checkpoints, metrics and the result of one training.

    Args:
        path: the folder; made when the first thing is written.
        sae: config, defaults resolved.
        training: config.
        inputs: what the training reads, as JSON. A checkpoint must have equal configs and inputs to be resumed.
    """

    def __init__(self, path: str | Path, sae: SAEConfig, training: TrainingConfig, inputs: Mapping[str, Any]) -> None:
        self.path, self.checkpoints = as_path(path), as_path(path) / "checkpoint"
        # As the manifest has them, where passwords in addresses are hidden.
        self.sae, self.training, self.inputs = sae, training, public(dict(inputs))
        self.identity = _identity({"sae": asdict(sae), "training": asdict(training)}, self.inputs)

    @property
    def id(self) -> str | None:
        """Names this training in this folder, the same when it resumes; None with resume="never"."""
        if self.training.resume == "never":
            return None
        text = json.dumps([str(self.path.resolve()), self.identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def finished(self) -> bool:
        """Whether a training ended here; `claim` checks that it was this one."""
        return is_whole(self.path)

    @property
    def steps(self) -> int:
        """Steps before the latest checkpoint; 0 without one."""
        latest = self._latest()
        return int(latest.name) if latest else 0

    def claim(self) -> None:
        """Check that the folder is empty or holds this training; with resume="never", empty it.

        Raises:
            TsaeError: where it holds another training, naming what differs, or a damaged checkpoint.
        """
        if self.training.resume == "never":
            # Before the checkpoint, so that a kill in between leaves nothing that looks finished.
            (self.path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        latest = self._latest()
        file = self.path / MANIFEST if self.finished else latest and latest / "state.json"
        if file:
            found = _read_state(file)
            if not found["config"]:
                what = f"holds {found.get('kind')!s:.40}, which no training here wrote"
                raise TsaeError(what, where=self.path, fix=_OTHER_FOLDER)
            changes = list(_differences(_identity(found["config"], found["inputs"]), self.identity))
            if changes:
                shown = "; ".join(changes[:4]) + (f" and {len(changes) - 4} more" if len(changes) > 4 else "")
                raise TsaeError(f"holds another training ({shown})", where=self.path, fix=_OTHER_FOLDER)
        elif self.training.resume != "never":
            self._need_room()
        if self.finished:
            read_manifest(self.path, SAE, ["metrics.jsonl"], _ANEW)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        else:
            self._cut_metrics(self.steps)

    def _need_room(self) -> None:
        """Refuse a folder with files that this training would replace, and that no training wrote.

        A training that was killed before its first checkpoint leaves rows of metrics, and at its end the SAE, too.
        """
        config, metrics = self.path / "config.json", self.path / "metrics.jsonl"
        lies = [name for name in ("config.json", "sae.safetensors", "metrics.jsonl") if (self.path / name).exists()]
        if not lies:
            return
        own = metrics.is_file()
        if own:
            with metrics.open("rb") as stream:
                own = _FIRST_ROW.startswith(stream.read(len(_FIRST_ROW)))  # a full disk may cut it
        if config.is_file():
            own = own and read_object(config, _OTHER_FOLDER).get("format") == FORMAT
        if not own:
            what = f"holds {lies[0]}, which no training here wrote"
            raise TsaeError(what, where=self.path, fix="Give another folder.")

    def load(self) -> dict[str, torch.Tensor] | None:
        """The tensors of the latest checkpoint, if there is one.

        Raises:
            TsaeError: where they are damaged.
        """
        latest = self._latest()
        if latest is None:
            return None
        with reading(latest, _ANEW):
            file = latest / "state.safetensors"
            if _read_state(latest / "state.json").get("tensors") != {file.name: file_hash(file)}:
                raise TsaeError("is damaged: its bytes have changed since it was written", where=file, fix=_ANEW)
            return load_file(file)

    def save(self, steps: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the state after a number of steps. The checkpoint before stays until this one is whole.

        Args:
            steps: their number.
            tensors: of `Trainer.state`, and what else a rerun needs.

        Raises:
            TsaeError: where it cannot be written, for instance on a full disk. The checkpoint before is then untouched.
        """
        partial, whole = self.checkpoints / "partial", self.checkpoints / f"{steps:010d}"
        state = {
            "kind": SAE.name,
            "steps": steps,
            "config": {"sae": asdict(self.sae), "training": asdict(self.training)},
            "inputs": self.inputs,
        }
        with self._writing():
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                file = partial / "state.safetensors"
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, file)
                flush_to_disk(file)
                write_record(partial / "state.json", {**state, "tensors": {file.name: file_hash(file)}})
                for path in (partial / "state.json", partial, self.path):
                    flush_to_disk(path)
                flush_to_disk(self.path / "metrics.jsonl")
                partial.rename(whole)
                flush_to_disk(self.checkpoints)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        for other in self.checkpoints.iterdir():
            if other != whole:
                shutil.rmtree(other, ignore_errors=True)

    def last_row(self) -> dict[str, float]:
        """The last row of metrics.jsonl; empty where there is none."""
        file = self.path / "metrics.jsonl"
        with reading(file, _ANEW):
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            return dict(parse_json(lines[-1])) if lines else {}

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")

    def finish(self, model: TemporalSAE) -> None:
        """Write the SAE, with its manifest last, then remove the checkpoint."""
        with self._writing():
            config = {"sae": self.sae, "training": self.training}
            model._save(self.path, there=["metrics.jsonl"], config=config, inputs=self.inputs)
            for name in ("sae.safetensors", "config.json", "training.json", "metrics.jsonl", MANIFEST):
                flush_to_disk(self.path / name)
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def _latest(self) -> Path | None:
        """The newest checkpoint. A kill during removal may leave parts of an older one, never of this one."""
        whole = sorted(p for p in self.checkpoints.glob("*") if p.name.isdigit())
        return whole[-1] if whole else None

    def _cut_metrics(self, steps: int) -> None:
        """Keep the rows of the steps that the checkpoint has seen."""
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return
        with reading(file, _ANEW):
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            # A kill may have cut the last line.
            kept = list(takewhile(lambda line: line.endswith("\n") and parse_json(line)["step"] < steps, lines))
        with self._writing():
            write_text(file, "".join(kept))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            latest = self._latest()
            start = f"from the checkpoint after {int(latest.name)} steps" if latest else "from the beginning"
            fix = f"Make room, then run the same command again: it resumes {start}."
            raise TsaeError(f"cannot be written to ({error})", where=self.path, fix=fix) from error


_ANEW = 'To train anew in this folder, set resume="never" (--resume never).'
_OTHER_FOLDER = f"Give another folder. {_ANEW}"


def _identity(config: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The configs and inputs that two runs of one training share, as JSON gives them back."""
    training = {k: v for k, v in config["training"].items() if k not in _NOT_COMPARED}
    identity = {"sae": config["sae"], "training": training, "inputs": inputs}
    return dict(json.loads(json.dumps(identity)))


def _differences(found: Any, now: Any, name: str = "") -> Iterator[str]:
    """'training.seed was 0, is 1' for every leaf that differs."""
    if isinstance(found, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*found, *now]):
            yield from _differences(found.get(key, "absent"), now.get(key, "absent"), f"{name}.{key}" if name else key)
    elif found != now:
        yield f"{name} was {_short(found)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).strip('"')
    return text if len(text) <= 40 else text[:39] + "…"


def _read_state(file: Path) -> dict[str, Any]:
    """The manifest, or the state of a checkpoint; its config is None where no training wrote it."""
    content = read_record(file, _ANEW)
    with reading(file, _ANEW):
        if content["kind"] != SAE.name or content["config"] is None:
            return {**content, "config": None}
        dict(content["config"]["training"]), content["config"]["sae"], content["inputs"]  # what `_identity` reads
    return content
