"""Features for other tools: delphi's cache of activations, and Neuronpedia's export.

delphi (EleutherAI/delphi, `LatentDataset`)::

    latents/
      layers.14/                  the hook point
        0_2047.safetensors        features 0 to 2047
          locations (n, 3)        sequence, place in it, feature − 0; uint16, or uint32 where that is too small
          activations (n,)        float32 (delphi itself writes half; its loader takes both)
          tokens (n_sequences, context)  uint32, the same in every file
        2048_4095.safetensors
        config.json

Trajectories stand one after another, cut into sequences of equal length, as delphi cuts documents; the last incomplete
sequence is left out. Only tokens that count have activations: no special tokens, no outliers.

Neuronpedia, in the form that its importer reads::

    MODEL/SOURCE/
      features/batch-0.jsonl.gz        one line a feature (the table Neuron)
      activations/batch-0.jsonl.gz     one line a context (Activation), for the features of batch 0
      explanations/batch-0.jsonl.gz    one line a label (Explanation)

A batch has 1,024 features. Fields are those of Neuronpedia's own export script; the model, the source set and the
source must be known to the instance that imports them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import save_file

from tsae.base.files import write_json
from tsae.errors import refuse
from tsae.features.contexts import peaks_of
from tsae.features.feature_table import FeatureTable
from tsae.sae.model import TemporalSAE

_SMALLEST = 1e-5  # delphi leaves out what is not larger
_SPLITS = 5  # files, at most


def write_delphi(
    features: FeatureTable,
    to: Path,
    *,
    hookpoint: str,
    model_name: str,
    reader: str | None = None,
    context: int = 256,
) -> Path:
    """Write a cache.

    Args:
        features: the table.
        to: an empty folder.
        hookpoint: delphi's name of the site (`tsae.checkpoints.hooks`).
        model_name: from which delphi loads the tokenizer.
        reader: whose activations; by default the base's.
        context: tokens of a sequence.

    Raises:
        TsaeError: where that reader read less than one sequence.
    """
    refuse("delphi", (context < 1, f"context={context} is less than 1", "Give the tokens of a sequence."))
    rows = features.rows(reader=reader or features.readers[0])
    read = [np.arange(*features.row_offsets[row : row + 2]) for row in rows]
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *read])
    n = len(tokens) // context
    few = f"has {len(tokens)} tokens of that reader, fewer than one sequence of {context}"
    refuse(features.origin, (not n, few, "Give a smaller context."))
    tokens = tokens[: n * context]
    place = np.full(len(features.token_ids), -1, dtype=np.int64)
    place[tokens] = np.arange(len(tokens))
    place[~features.span_mask("all")] = -1
    ids = features.token_ids[tokens].reshape(n, context).astype(np.uint32)
    folder = to / hookpoint
    folder.mkdir(parents=True)
    bounds = np.linspace(0, features.n_features, min(_SPLITS, features.n_features) + 1).astype(int)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        block = features.columns[:, np.arange(start, stop)]
        feature = np.repeat(np.arange(stop - start), np.diff(block.indptr))
        at = place[block.indices]
        keep = (at >= 0) & (block.data > _SMALLEST)
        at, feature, values = at[keep], feature[keep], block.data[keep]
        order = np.lexsort((feature, at))
        locations = np.stack([at[order] // context, at[order] % context, feature[order]], axis=1)
        small = locations.max(initial=0) < 2**16
        locations = locations.astype(np.uint16 if small else np.uint32)
        arrays = {"locations": locations, "activations": values[order].astype(np.float32), "tokens": ids}
        save_file(arrays, folder / f"{start}_{stop - 1}.safetensors")
    settings = {"dataset_repo": "", "dataset_split": "", "dataset_name": "", "dataset_column": "", "batch_size": 1}
    known = {"ctx_len": context, "cache_ctx_len": context, "n_tokens": n * context, "n_splits": len(bounds) - 1}
    write_json(folder / "config.json", {**settings, **known, "model_name": model_name})
    return to


BATCH = 1024
_LOGITS: dict[str, tuple[str, type]] = {
    "promotes": ("pos_str", str), "promotes_by": ("pos_values", float),
    "suppresses": ("neg_str", str), "suppresses_by": ("neg_values", float),
}  # fmt: skip
"""Columns of a diff's features: Neuronpedia's field, and the kind of its entries."""
_BINS, _TOP, _PER_BIN, _BAR = 5, 10, 2, 30
_BEFORE, _AFTER = 64, 32
"""Tokens of a context around its strongest one."""
_LISTS = (
    "topkCosSimIndices", "topkCosSimValues", "neuron_alignment_indices", "neuron_alignment_l1",
    "neuron_alignment_values", "correlated_neurons_indices", "correlated_neurons_l1", "correlated_neurons_pearson",
    "logits_hist_data_bar_heights", "logits_hist_data_bar_values", "decoder_weights_dist",
)  # fmt: skip


@dataclass(frozen=True)
class Neuronpedia:
    """What an instance of Neuronpedia calls things.

    Raises:
        TsaeError: where an id of model or source could not be the name of a folder.
    """

    model: str
    """Its id of the model."""
    source: str
    """Its id of the SAE, such as 14-tsae-4k."""
    creator: str
    """Its id of the user who owns what is imported."""

    def __post_init__(self) -> None:
        fix = "Use letters, digits, dots, hyphens and underscores."
        for name in (self.model, self.source):
            odd = not re.fullmatch(r"\w[\w.-]*", name)
            refuse("Neuronpedia", (odd, f"{name!r} is not an id: it names a folder", fix))

    @property
    def source_set(self) -> str:
        """The id without the layer."""
        return self.source.split("-", 1)[-1]


def write_neuronpedia(
    features: FeatureTable,
    sae: TemporalSAE,
    to: Path,
    names: Neuronpedia,
    strings: Mapping[str, str],
    *,
    chosen: Sequence[int] = (),
    described: pd.DataFrame | None = None,
    labels: Mapping[int, str] | None = None,
    labeller: str = "",
) -> Path:
    """Write an export.

    Args:
        features: the table.
        sae: gives the decoder's directions.
        to: an empty folder.
        names: see `Neuronpedia`.
        strings: text of token ids, by id as text.
        chosen: features; by default all.
        described: indexed by feature, with promotes, promotes_by, suppresses, suppresses_by where known.
        labels: by feature.
        labeller: who made the labels.

    Raises:
        TsaeError: where the features are of another SAE, or one that is chosen is not there.
    """
    features.need_sae(sae.fingerprint, sae.config.d_sae)
    folder = to / names.model / names.source
    every = features.need(chosen) or list(range(features.n_features))
    counted = features.span_mask("all")
    n_counted = int(counted.sum())
    for batch, start in enumerate(range(0, len(every), BATCH)):
        part = every[start : start + BATCH]
        neurons = (_neuron(features, sae, f, names, counted, n_counted, described) for f in part)
        _write(folder / "features" / f"batch-{batch}.jsonl.gz", neurons)
        contexts = (record for f in part for record in _activations(features, f, names, counted, strings))
        _write(folder / "activations" / f"batch-{batch}.jsonl.gz", contexts)
        explained = (_explanation(f, labels[f], names, labeller) for f in part if f in labels) if labels else iter(())
        _write(folder / "explanations" / f"batch-{batch}.jsonl.gz", explained)
    return to


def _neuron(
    features: FeatureTable,
    sae: TemporalSAE,
    feature: int,
    names: Neuronpedia,
    counted: np.ndarray,
    n_counted: int,
    described: pd.DataFrame | None,
) -> dict[str, Any]:
    tokens, values = features.column(feature)
    values = values[counted[tokens]]
    heights, edges = np.histogram(values, bins=_BAR) if len(values) else (np.zeros(0), np.zeros(1))
    known = described is not None and set(described) >= _LOGITS.keys() and feature in described.index
    row: Any = described.loc[feature] if described is not None and known else dict.fromkeys(_LOGITS)
    # A feature whose logits are not known has none of the four.
    known = all(isinstance(row[name], list | tuple | np.ndarray) for name in _LOGITS)
    logits = {name: [kind(one) for one in row[of]] if known else [] for of, (name, kind) in _LOGITS.items()}
    return {
        **_place(names, feature),
        "creatorId": names.creator,
        "sourceSetName": names.source_set,
        "maxActApprox": float(values.max(initial=0)),
        "frac_nonzero": len(values) / max(n_counted, 1),
        "freq_hist_data_bar_heights": heights.tolist(),
        "freq_hist_data_bar_values": ((edges[1:] + edges[:-1]) / 2).tolist(),
        **logits,
        **{name: [] for name in _LISTS},
        "vector": sae.W_dec[feature].tolist(),
        "vectorLabel": None,
        "hookName": sae.site,
        "vectorDefaultSteerStrength": float(values.mean()) if len(values) else None,
        "hasVector": True,
    }


def _activations(
    features: FeatureTable, feature: int, names: Neuronpedia, counted: np.ndarray, strings: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The strongest contexts, then some from equal steps of activation; one a row."""
    peaks = peaks_of(features, counted, feature)
    top = float(peaks.value.max(initial=0))
    order = np.argsort(-peaks.value, kind="stable")
    step = np.minimum((peaks.value / max(top, 1e-30) * _BINS).astype(int), _BINS - 1)
    chosen = [(i, 0.0, top, 1.0) for i in order[:_TOP].tolist()]
    for number in range(_BINS - 1, -1, -1):
        inside = [i for i in order[_TOP:].tolist() if step[i] == number][:_PER_BIN]
        share = float(np.mean(step == number)) if inside else 0.0
        chosen += [(i, number * top / _BINS, (number + 1) * top / _BINS, share) for i in inside]
    for i, low, high, share in chosen:
        row, token = int(peaks.row[i]), int(peaks.token[i])
        start = max(int(features.row_offsets[row]), token - _BEFORE)
        stop = min(int(features.row_offsets[row + 1]), token + _AFTER + 1)
        values = features.codes[start:stop][:, [feature]].toarray()[:, 0] * counted[start:stop]
        trajectory = int(features.trajectory[row])
        reader = features.readers[features.reader[row]]
        yield {
            "id": _id(names, feature, row, token),
            **_place(names, feature),
            "creatorId": names.creator,
            "dataSource": f"trajectory {trajectory} as {reader} reads it",
            "tokens": [strings.get(str(int(t)), f"#{int(t)}") for t in features.token_ids[start:stop]],
            "values": values.tolist(),
            "maxValue": float(values.max()),
            "minValue": float(values.min()),
            "maxValueTokenIndex": int(values.argmax()),
            "dfaValues": [],
            "dfaMaxValue": None,
            "dfaTargetIndex": None,
            "binMin": low,
            "binMax": high,
            "binContains": share,
        }


def _explanation(feature: int, label: str, names: Neuronpedia, labeller: str) -> dict[str, Any]:
    return {
        "id": _id(names, feature, label),
        **_place(names, feature),
        "authorId": names.creator,
        "description": label,
        "embedding": None,
        "typeName": None,
        "explanationModelName": None,
        "notes": f"label by {labeller}" if labeller else None,
        **dict.fromkeys(("umap_x", "umap_y", "umap_cluster", "umap_log_feature_sparsity"), 0),
    }


def _place(names: Neuronpedia, feature: int) -> dict[str, str]:
    return {"modelId": names.model, "layer": names.source, "index": str(feature)}


def _id(names: Neuronpedia, *parts: object) -> str:
    """An id that a second export gives again."""
    text = json.dumps([names.model, names.source, *map(str, parts)])
    return "t" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


def _write(file: Path, records: Iterator[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, compresslevel=5) as packed:
        for record in records:
            packed.write((json.dumps(record, allow_nan=False) + "\n").encode())
