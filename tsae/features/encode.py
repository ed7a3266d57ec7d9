"""Encoding: the SAE's codes of every token, and its reconstruction of every reader.

Activations come from a store, or straight from the models that read (`LiveSource`), and are then never stored. A shard
is encoded at a time, and kept on disk (`tsae.features.encoded_shards`), so that an interrupted encoding resumes, and
parts of it may run anywhere. When all shards are encoded, they are joined. The result does not depend on parts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from tsae.activations.catalogue import READER_INFO
from tsae.activations.live import LiveSource
from tsae.activations.shard import Shard
from tsae.activations.store import ActivationStore, Source
from tsae.activations.token_statistics import with_entropy
from tsae.base.artefact import is_whole
from tsae.base.files import as_path
from tsae.base.memory import give_back
from tsae.base.mirror import local, refreshed
from tsae.base.output_lock import output_lock
from tsae.base.part import Part
from tsae.base.progress import progress_bar
from tsae.errors import TsaeError
from tsae.features.encoded_shards import EncodedShards, Piece, encode_shard, reconstructed
from tsae.features.feature_table import FeatureTable
from tsae.sae.model import TemporalSAE, check_fits
from tsae.sae.quality.evaluation import check_published_fve, warn_where_short
from tsae.sae.quality.stability import Stability

# Dense codes at once. A CPU gives larger arrays back to the system after every step; a GPU needs more to be busy.
_DENSE, _DENSE_ON_GPU = 1 << 22, 1 << 28
_FEWEST = 64  # tokens at once


def encode(
    sae: TemporalSAE | str | Path,
    store: Source | str | Path,
    *,
    to: str | Path | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
    kept: str | Path | None = None,
    check: bool = True,
    progress: bool = True,
) -> FeatureTable:
    """Compute sparse codes of every token in a store, or in a subset of it; or of every token that models read now.

    Tokens beyond the norm limit of the SAE's training get no codes: the SAE never saw such tokens, and one of them may
    outweigh a thousand others in a mean. `FeatureTable.outlier` marks them; outlier_share is their share of a reader's
    tokens. If the store has token statistics, the table's rollouts have the behaviour entropy.

    Args:
        sae: the SAE or its folder; the folder's stability.json, if there is one, becomes part of the table.
        store: the store or its folder; or a `LiveSource`, whose activations are encoded as they are computed, and never
            stored. Codes are then those of a store, but for the last bits: batches of forward passes are others.
        to: folder to save the table in; None keeps it in memory. An interrupted encoding is completed.
        batch_tokens: tokens encoded at once; by default as many as make 4 million dense codes, 256 million on a GPU.
        device: torch device; by default the SAE's.
        kept: folder in which the codes of every shard are kept for the next encoding by this SAE, of a store that has
            some of the shards; those of other shards are removed from it. Only with `to`, and not with a `LiveSource`.
        check: warn, with the numbers, where a published SAE explains less than its makers say
            (`tsae.sae.quality.evaluation.check_published_fve`).
        progress: show a bar.

    Raises:
        TsaeError: where the SAE was made for another site or d_model, stability.json for another SAE, the folder
            holds pieces of another encoding, or models do not read, as `tsae.capture` says.
    """
    folder, (sae, store, batch_tokens) = sae, _opened(sae, store, batch_tokens, device)
    stability = None if isinstance(folder, TemporalSAE) else Stability.beside(folder, sae.fingerprint)
    if check and isinstance(store, ActivationStore):
        check_published_fve(sae, store)
    if to is None:
        total = sum(_n_tokens(store, shard) for shard in store.shards())
        with progress_bar("encode", "token", total, shown=progress) as bar:
            found = [encode_shard(sae, store, shard, batch_tokens, bar) for shard in store.shards()]
        table = _joined(sae, store, (piece for piece, _ in found), stability)
        return replace(table, codes=sp.csr_array(sp.vstack([codes for _, codes in found], format="csr")))
    to = local(to)
    with output_lock(to):
        encoded = _encode_missing(sae, store, to, Part(), batch_tokens, progress, kept)
        nnz = sum(piece.nnz for piece in encoded.pieces())
        made = {"config": sae.config, "inputs": _inputs(sae, store)}
        _joined(sae, store, encoded.pieces(), stability).save_with(encoded.codes(), nnz, to, **made)
        encoded.remove()
    table = FeatureTable.load(to)
    if check and not isinstance(store, ActivationStore):
        base = table.reader_info(table.readers[0])
        if base["fve"] is not None:
            warn_where_short(sae, store, base["fve"], base["l0"], base["n_tokens"])
    return table


def encode_part(
    sae: TemporalSAE | str | Path,
    store: Source | str | Path,
    *,
    to: str | Path,
    part: Part,
    batch_tokens: int | None = None,
    device: str | None = None,
    progress: bool = True,
) -> int:
    """Encode one part of the shards; start the others wherever the folders can be reached, then `encode`.

    Args:
        sae, store, to, batch_tokens, device, progress: as for `encode`, the same in all parts.
        part: which shards.

    Returns:
        number of shards that other parts have still to encode.

    Raises:
        TsaeError: as `encode`.
    """
    sae, store, batch_tokens = _opened(sae, store, batch_tokens, device)
    pieces = _encode_missing(sae, store, local(to), part, batch_tokens, progress)
    refreshed(pieces.path)
    return sum(number not in pieces for number in range(len(pieces.names)))


def _opened(
    sae: TemporalSAE | str | Path, store: Source | str | Path, batch_tokens: int | None, device: str | None
) -> tuple[TemporalSAE, Source, int]:
    """The SAE and the store, which fit together, and how many tokens are encoded at once."""
    sae = TemporalSAE.of(sae, device=device)
    store = store if isinstance(store, Source) else ActivationStore(store)
    check_fits(sae, store)
    return sae, store, batch_tokens or tokens_at_once(sae)


def encoded(folder: Path) -> bool:
    """Whether an encoding has ended. If its pieces are still there, it was killed before it removed them."""
    return is_whole(folder) and not (folder / "pieces").is_dir()


def tokens_at_once(sae: TemporalSAE) -> int:
    """How many tokens are encoded together by default, on the SAE's device."""
    dense = _DENSE if sae.W_dec.device.type == "cpu" else _DENSE_ON_GPU
    return max(_FEWEST, dense // sae.config.d_sae)


def _device(sae: TemporalSAE) -> str:
    """The kind of device that computes codes. GPUs of two kinds differ in the last bits."""
    device = sae.W_dec.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _inputs(sae: TemporalSAE, store: Source) -> dict[str, Any]:
    labels = store.rollouts.labels_fingerprint
    inputs = {"rollouts": store.manifest["rollouts"], "labels": labels, "site": sae.site, "sae": sae.fingerprint}
    return inputs | ({"subset": store.selection.as_dict()} if store.selection.as_dict() else {})


def _identity(sae: TemporalSAE, store: Source, batch_tokens: int) -> dict[str, Any]:
    """All that the codes of a shard depend on. If a value differs, an encoded shard belongs to another encoding."""
    shards = [[record["id"], record["shards"]] for record in store.manifest["readers"]]
    if isinstance(store, LiveSource):
        shards += [[record["weights"] for record in store.manifest["readers"]], store.manifest["config"]]
    digest = hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()
    settings = {"batch_tokens": batch_tokens, "device": _device(sae), "norm_limit": _limit(sae)}
    return _inputs(sae, store) | {"shards": digest} | settings


def _limit(sae: TemporalSAE) -> Any:
    """The settings that decide which tokens are outliers. The SAE's fingerprint does not include them."""
    return [sae.norm_limit, zlib.crc32(json.dumps(sae.norm_centre).encode())] if sae.norm_centre else sae.norm_limit


def _n_tokens(store: Source, shard: Shard) -> int:
    return int(np.diff(shard.offsets)[store.rows[shard.trajectory]].sum())


def _encode_missing(
    sae: TemporalSAE,
    store: Source,
    to: Path,
    part: Part,
    batch_tokens: int,
    progress: bool,
    kept: str | Path | None = None,
) -> EncodedShards:
    """Encode the shards of a part that are not encoded yet; gives those of all parts."""
    # A part reads its own shards alone: comparing checksums of the others would take as long as its work.
    shards = list(store.outlines())
    if kept is None:
        names = [f"{number:06d}" for number in range(len(shards))]
        encoded = EncodedShards(to / "pieces", names, _identity(sae, store, batch_tokens))
    else:
        encoded = EncodedShards(as_path(kept), [_content(sae, store, shard, batch_tokens) for shard in shards])
    mine = [(number, shard) for number, shard in enumerate(shards) if number % part.n == part.index]
    sizes = [_n_tokens(store, shard) for _, shard in mine]
    with progress_bar("encode", "token", sum(sizes), shown=progress) as bar:
        for (number, shard), size in zip(mine, sizes, strict=True):
            if number in encoded:
                bar.update(size)
            else:
                piece, codes = encode_shard(sae, store, shard.checked(), batch_tokens, bar)
                encoded.add(number, piece, codes)
                del piece, codes
                give_back()
    return encoded


def _content(sae: TemporalSAE, store: Source, shard: Shard, batch_tokens: int) -> str:
    """Hash of what the codes of a whole shard depend on, and what is summed up with them."""
    weights = store.reader_info(shard.reader)["weights"]
    device, dtype = _device(sae), store.manifest["dtype"]
    settings = [sae.fingerprint, _limit(sae), sae.site, batch_tokens, device, weights, dtype]
    digest = hashlib.sha256(json.dumps(settings).encode())
    counted = shard.token_span(store.rollouts, "all", store.special_ids)
    for array in (shard.token_ids, shard.offsets, counted, store.rows[shard.trajectory]):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _joined(sae: TemporalSAE, store: Source, pieces: Iterable[Piece], stability: Stability | None) -> FeatureTable:
    """The table of all pieces, which come in the order of the store's shards; without their codes."""
    shards = list(store.outlines())
    quality = np.zeros((len(store.readers), 5 + sae.d_model))
    n_tokens = sum(_n_tokens(store, shard) for shard in shards)
    token_ids, outlier = np.empty(n_tokens, dtype=np.int32), np.empty(n_tokens, dtype=bool)
    lengths, trajectory, reader, place = [np.zeros(1, dtype=np.int64)], [], [], 0
    for shard, piece in zip(shards, pieces, strict=True):
        tokens, owner = slice(place, place := place + len(piece.token_ids)), store.readers.index(shard.reader)
        token_ids[tokens], outlier[tokens] = piece.token_ids, piece.outlier
        lengths.append(piece.lengths)
        trajectory.append(shard.trajectory[store.rows[shard.trajectory]])
        quality[owner] += piece.quality
        reader.append(np.full(len(piece.lengths), owner, dtype=np.int32))
    if not n_tokens:
        raise TsaeError("no trajectory was read by these readers", where=store.path, fix="Choose a larger part.")
    records = []
    for id, found in zip(store.readers, quality, strict=True):
        info = store.reader_info(id)
        facts = {name: info[name] for name in READER_INFO} | {"weights": info.get("weights")}
        records.append({**facts, **reconstructed(found)})
    nothing = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int32), np.zeros(len(token_ids) + 1, dtype=np.int32)
    return FeatureTable(
        codes=sp.csr_array(nothing, shape=(len(token_ids), sae.config.d_sae)),
        token_ids=token_ids,
        row_offsets=np.concatenate(lengths).cumsum(),
        reader=np.concatenate(reader),
        trajectory=np.concatenate(trajectory),
        rollouts=with_entropy(store) if isinstance(store, ActivationStore) else store.rollouts,
        info={
            "sae": {
                **asdict(sae.config),
                "d_high": sae.config.d_high,
                "d_model": sae.d_model,
                "site": sae.site,
                "weights": sae.fingerprint,
            },
            "readers": records,
            "special_ids": sorted(store.special_ids),
            "token_strings": store.manifest.get("token_strings", {}),
        },
        outlier=outlier,
        stability=stability,
    )
