"""Use of experts as features: a mixture of experts' own sparse code of every token, ready for `tsae.feature_diff`.

A feature is a (layer, expert); it is 1 on the tokens that the router sends there. Its mean over tokens is the share of
tokens that the expert gets, so that a diff says by how much training moved that share, by band and outcome, with its
intervals, controls and nulls. No dictionary is trained, and nothing is left unexplained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.catalogue import READER_INFO
from tsae.activations.config import ReadingConfig
from tsae.activations.forward_batches import OutOfMemory, read_batches
from tsae.activations.reading_plan import open_base
from tsae.base.progress import progress_bar
from tsae.checkpoints.routers import RouterReader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError, refuse
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.table import Rollouts


def expert_use(
    series: CheckpointSeries,
    rollouts: Rollouts,
    *,
    layers: Sequence[int] | None = None,
    config: ReadingConfig | None = None,
    progress: bool = True,
) -> FeatureTable:
    """Read which experts every reader chooses for every token.

    Args:
        series: the readers, mixtures of experts of one architecture.
        rollouts: what they read.
        layers: blocks whose routers are read, each once; by default all. A token has 8 bytes for every expert that it
            goes to.
        config: how they read; the backend is Hugging Face's. Defaults of `ReadingConfig`.
        progress: show a bar.

    Returns:
        a table of len(layers) · n_experts features, layer after layer; `experts` names them.

    Raises:
        TsaeError: where a model is not a mixture of experts, `layers` is not a list of blocks, or as `tsae.capture`.
    """
    layers = None if layers is None else _blocks(layers)
    config = replace(config or ReadingConfig(), backend="huggingface")
    base = open_base(series, rollouts, [], config, config.device)
    first = RouterReader(base.model, layers)
    codes, token_ids, lengths, reader, trajectory, records = [], [], [], [], [], []
    n_experts = 0
    of_each = rollouts.lengths("prompt_ids") + rollouts.lengths("response_ids")
    total = sum(int(of_each[rows].sum()) for rows in base.plan.values())
    with progress_bar("experts", "token", total, shown=progress) as bar:
        for number, (checkpoint, info) in enumerate(zip(series, base.readers, strict=True)):
            load = checkpoint.load_model if base.loader is None else partial(base.loader.load, checkpoint)
            routers = first if number == 0 else RouterReader(load(), layers)
            rows = base.plan[checkpoint.id]
            texts = [np.concatenate(rollouts.tokens(int(row))) for row in rows]
            found = _read(routers, texts, config.batch_tokens, str(checkpoint.path), bar)
            n_experts = n_experts or found[0].shape[1] // len(routers.routers)
            codes += found
            token_ids += texts
            lengths += [len(text) for text in texts]
            reader.append(np.full(len(rows), number, dtype=np.int32))
            trajectory.append(rows)
            each = sum(piece.nnz for piece in found) / max(1, sum(map(len, texts)))
            facts = {"n_tokens": sum(map(len, texts)), "fve": 1.0, "l0": each, "outlier_share": 0.0}
            records.append({**{name: info[name] for name in READER_INFO}, **facts})
    # As the fingerprint of an SAE: tables of other experts are not compared with this one.
    known = {"d_high": 0, "site": "routers", "layers": list(first.routers), "n_experts": n_experts}
    text = json.dumps([base.readers[0]["weights"], list(first.routers), n_experts])
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    if len({piece.shape[1] for piece in codes}) > 1:
        raise TsaeError("the checkpoints have different numbers of experts", where="expert_use", fix="Use one model's.")
    return FeatureTable(
        codes=sp.csr_array(sp.vstack(codes, format="csr")),
        token_ids=np.concatenate(token_ids).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        reader=np.concatenate(reader),
        trajectory=np.concatenate(trajectory),
        rollouts=rollouts,
        info={
            "sae": {"weights": fingerprint, **known},
            "readers": records,
            **{name: base.facts[name] for name in ("special_ids", "token_strings")},
        },
    )


def experts(info: dict[str, Any]) -> pd.DataFrame:
    """Layer and expert of every feature, indexed by feature: join it to a diff's tables.

    Args:
        info: of the table, or of the diff that was drawn from it.

    Raises:
        TsaeError: where that is not of experts.
    """
    sae = info["sae"]
    if "n_experts" not in sae:
        raise TsaeError("these features are not experts", where="experts", fix="Make the table with tsae.expert_use.")
    layers, n = sae["layers"], sae["n_experts"]
    index = pd.RangeIndex(len(layers) * n, name="feature")
    return pd.DataFrame({"layer": np.repeat(layers, n), "expert": np.tile(np.arange(n), len(layers))}, index=index)


def _blocks(layers: Any) -> list[int]:
    """The blocks that were asked for, as plain numbers.

    Raises:
        TsaeError: where that is not a list of blocks.
    """
    found = list(layers) if isinstance(layers, Sequence | np.ndarray | range) and not isinstance(layers, str) else []
    known = [isinstance(layer, int | np.integer) and not isinstance(layer, bool) for layer in found]
    odd = not found or not all(known) or len(set(found)) < len(found)
    what = f"layers={layers!r} is not a list of different whole numbers, or it is empty"
    refuse("expert_use", (odd, what, "Give a list of blocks, such as layers=[1, 3], or leave it out for all."))
    return [int(layer) for layer in found]


def _read(
    routers: RouterReader, texts: Sequence[np.ndarray], batch_tokens: int, where: str, bar: Any
) -> list[sp.csr_array]:
    """(n_tokens, n_layers · n_experts) of every text."""
    while True:
        found: list[Any] = [None] * len(texts)
        before = bar.n
        try:
            for batch in read_batches(routers, texts, batch_tokens):
                parts = [[value for _, value in batch.each(str(layer))] for layer in routers.routers]
                for t, *of in zip(batch.texts.tolist(), *parts, strict=True):
                    dense = np.concatenate([value.cpu().numpy() for value in of], axis=1)
                    found[t] = sp.csr_array(dense.astype(np.float32))
                bar.update(sum(batch.lengths))
            return found
        except OutOfMemory as short:
            if len(short.texts) == 1:
                what = f"a trajectory of {len(texts[int(short.texts[0])])} tokens does not fit into memory by itself"
                raise TsaeError(what, where=where, fix="Leave it out, or use a device with more memory.") from short
        batch_tokens = max(1, batch_tokens // 2)
        bar.update(before - bar.n)
