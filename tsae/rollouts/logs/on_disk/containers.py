"""Log files that are neither JSON lines nor a table: slime's ``.pt``, Inspect's ``.eval``, rLLM's ``.json``.

No code in a file is run: ``.pt`` files are loaded as tensors and plain containers only, and pickles are refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsae.base.disk.torch_file import cause, read_torch_file
from tsae.base.untrusted import check_zip, parse_json, weighs_within
from tsae.errors import TsaeError
from tsae.rollouts.logs.on_disk.packed import unpacked

_LARGEST_SAMPLE = 1 << 28
"""Bytes of one sample of an Inspect log, unpacked."""
_LEAST = 1_000_000
"""Values that a small file may stand for too."""


def read_torch(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file that slime saved with ``torch.save``, each with the ``rollout_id`` of the file.

    The file is one object, and stays in memory while it is read.

    Raises:
        TsaeError: if it holds more than tensors and plain containers, or no samples.
    """
    found = read_torch_file(
        path,
        refused="Save its samples again without other objects: images and arrays as tensors, lists or nothing.",
        damaged="Copy the file again, or leave it out.",
    )
    # A list that is in many places takes a byte or more in the file for each.
    if not weighs_within(found, max(_LEAST, path.stat().st_size)):
        raise TsaeError(
            "stands for more values than it has bytes: its lists hold each other",
            where=path,
            fix="Leave it out, and ask where it is from.",
        )
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        columns = f"; its keys are {', '.join(map(str, found))}" if isinstance(found, dict) else ""
        raise TsaeError(
            f"has no list of samples{columns}",
            where=path,
            fix="Give what slime saves with --save-debug-rollout-data or --dump-details (rollout_data/).",
        )
    for sample in samples:
        # A sample's own rollout_id numbers rollouts, not steps, and is None by default.
        yield {**sample, "rollout_id": found.get("rollout_id")}


def read_json(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """The one object of a JSON file.

    Raises:
        TsaeError: if it is no object, or has more than `most` bytes.
    """
    try:
        with unpacked(path) as (file, _):
            whole = file.read(most + 1)
        if len(whole) > most:
            raise TsaeError(
                f"has more than {most >> 20} MiB", where=path, fix="Give JSON lines, one trajectory a line."
            )
        found = parse_json(whole.decode("utf-8-sig"), names_once=True)
    except (OSError, ValueError, RecursionError) as error:
        raise TsaeError(
            f"not a file of JSON in UTF-8 ({error})", where=path, fix="Correct or delete that file."
        ) from error
    if not isinstance(found, dict):
        raise TsaeError(
            f"a JSON {type(found).__name__}, expected an object",
            where=path,
            fix="Write it as JSON lines (.jsonl), a trajectory a line.",
        )
    yield found


def read_inspect(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of an Inspect log, each with the ``model`` and ``task`` of the log, one in memory at a time.

    Raises:
        TsaeError: if inspect_ai is not installed, or cannot read the file.
    """
    try:
        from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
    except ImportError as error:
        raise TsaeError(
            "logs of Inspect are read by inspect_ai, which is not installed",
            where=path,
            fix="pip install 'tsae[inspect]'.",
        ) from error
    try:
        check_zip(path, most=_LARGEST_SAMPLE)
        log = read_eval_log(str(path), header_only=True)
        head = {"model": log.eval.model, "task": log.eval.task}
        # A run that was stopped has fewer samples than the header says; summaries exist only for these.
        for summary in read_eval_log_sample_summaries(str(path)):
            sample = read_eval_log_sample(str(path), summary.id, summary.epoch, resolve_attachments=True)
            yield head | sample.model_dump(
                mode="json", include={"id", "epoch", "input", "target", "messages", "output", "scores", "error"}
            )
    except (OSError, RuntimeError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise TsaeError(
            f"inspect_ai does not read it ({cause(error)})", where=path, fix="Copy the file again, or leave it out."
        ) from error


def refuse_pickle(path: Path) -> Iterator[dict[str, Any]]:
    """Refuse a pickle."""
    raise TsaeError(
        "is a pickle, which can run code where it is opened, and is never read",
        where=path,
        fix="Load it where you trust it and write JSON lines or Parquet, with token ids where it has them "
        "(prompt_ids, response_ids).",
    )
