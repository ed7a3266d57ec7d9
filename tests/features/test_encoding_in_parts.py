"""Encoding shard by shard: parts, interruptions and orders give the same bytes as one process does."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tsae
from support.builders import digests
from support.damage import flip
from support.refusals import refuses
from support.stand_in import stand_in_gpu
from tsae.activations.store import ActivationStore
from tsae.base import part as parts
from tsae.base.mirror import removed
from tsae.base.part import Part
from tsae.errors import TsaeError
from tsae.features import encode as encoding
from tsae.features.encode import encode, encode_part
from tsae.sae.model import TemporalSAE

pytestmark = pytest.mark.slow(ci=True)


@pytest.fixture(scope="module")
def shards(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """A store of many small shards, read by two readers."""
    from support.builders import make_rollouts, save_perturbed

    folder = tmp_path_factory.mktemp("shards")
    save_perturbed(llama, folder / "run" / "checkpoint-1")
    series = tsae.CheckpointSeries.load(llama, folder / "run")
    rollouts = make_rollouts(n_problems=6, n_samples=4, tokenizer=fingerprint)
    config = tsae.CaptureConfig(shard_tokens=60)
    return tsae.capture(
        series, rollouts, ["blocks.1.hook_resid_post"], to=folder / "acts", config=config, progress=False
    )


@pytest.fixture(scope="module")
def sae(shards: ActivationStore) -> TemporalSAE:
    training = tsae.TrainingConfig(tokens=2000, batch_tokens=100)
    return tsae.train(shards, tsae.SAEConfig(d_sae=32, k=4), training=training, progress=False)


def test_bytes_do_not_depend_on_parts(sae: TemporalSAE, shards: ActivationStore, tmp_path: Path) -> None:
    n = sum(1 for _ in shards.shards())
    assert n > 7
    encode(sae, shards, to=tmp_path / "one", progress=False)
    left = []
    for index in (6, 0, 3, 1, 5, 4, 2):
        left.append(encode_part(sae, shards, to=tmp_path / "seven", part=Part(index, 7), progress=False))
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    # A part that was started twice does nothing.
    assert encode_part(sae, shards, to=tmp_path / "seven", part=Part(2, 7), progress=False) == 0
    encode(sae, shards, to=tmp_path / "seven", progress=False)
    assert digests(tmp_path / "seven") == digests(tmp_path / "one")
    in_memory = encode(sae, shards, progress=False)
    saved = tsae.FeatureTable.load(tmp_path / "seven")
    assert (in_memory.codes[:] != saved.codes[:]).nnz == 0
    assert json.loads(json.dumps(in_memory.info)) == saved.info
    for name in ("token_ids", "row_offsets", "reader", "trajectory", "outlier"):
        np.testing.assert_array_equal(getattr(in_memory, name), getattr(saved, name))


def test_what_was_finished_is_not_encoded_again(
    sae: TemporalSAE, shards: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = encoding.encode_shard, []

    def dies(sae: Any, store: Any, shard: Any, *rest: Any) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(shard.path)
        return real(sae, store, shard, *rest)

    monkeypatch.setattr(encoding, "encode_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        encode(sae, shards, to=tmp_path / "features", progress=False)
    assert not (tmp_path / "features" / "features.json").exists()
    again = []
    monkeypatch.setattr(encoding, "encode_shard", lambda *a: again.append(a[2].path) or real(*a))
    encode(sae, shards, to=tmp_path / "features", progress=False)
    assert len(again) == sum(1 for _ in shards.shards()) - 3
    assert not set(again) & set(seen)
    assert not (tmp_path / "features" / "pieces").exists()


@pytest.mark.parametrize(
    "full", ["numpy.savez", "tsae.features.sparse_matrices._write", "tsae.features.feature_table.write_rows"]
)
def test_a_full_disk_is_said_and_the_same_command_goes_on(
    full: str, sae: TemporalSAE, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    encode(sae, shards, to=tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(full, no_room)
        with pytest.raises(TsaeError, match=r"cannot be written to \(.*No space left on device\). Make room") as said:
            encode(sae, shards, to=tmp_path / "full", progress=False)
    assert "\n" not in str(said.value)
    assert not (tmp_path / "full" / "features.json").exists()
    encode(sae, shards, to=tmp_path / "full", progress=False)
    assert digests(tmp_path / "full") == digests(tmp_path / "whole")


def test_pieces_of_another_encoding_and_damaged_ones_are_refused(
    sae: TemporalSAE, shards: ActivationStore, tmp_path: Path
) -> None:
    encode_part(sae, shards, to=tmp_path, part=Part(0, 2), progress=False)
    limited, other = copy.deepcopy(sae), TemporalSAE(sae.d_model, sae.config, site=sae.site)
    assert sae.norm_limit is not None
    limited.training_info = {**sae.training_info, "norms": {"limit": sae.norm_limit / 2}}
    assert limited.fingerprint == sae.fingerprint
    elsewhere = ActivationStore(shutil.copytree(shards.path, tmp_path / "other"))
    elsewhere.manifest["readers"][1]["shards"][0]["hash"] = "0" * 64  # read by other checkpoints, or cut elsewhere
    for by, store, batch_tokens, differing in (
        (sae, shards, 100, "batch_tokens"),
        (other, shards, None, "norm_limit, sae"),
        (limited, shards, None, "norm_limit"),
        (sae, elsewhere, None, "shards"),
    ):
        with pytest.raises(TsaeError, match=f"pieces of another encoding: {differing} differ"):
            encode(by, store, to=tmp_path, batch_tokens=batch_tokens, progress=False)
    piece = tmp_path / "pieces" / "000002.npz"
    piece.write_bytes(piece.read_bytes()[:-40])
    refuses(r"000002\.npz: was damaged", encode, sae, shards, to=tmp_path, progress=False)
    (tmp_path / "pieces" / "encoding.json").unlink()
    refuses(r"holds pieces, but no encoding\.json", encode, sae, shards, to=tmp_path, progress=False)


def test_a_piece_of_another_sae_is_refused(sae: TemporalSAE, shards: ActivationStore, tmp_path: Path) -> None:
    """Parts ran on two machines, one of them with an earlier SAE, and were copied into one folder."""
    other = TemporalSAE(sae.d_model, sae.config, site=sae.site)
    encode_part(sae, shards, to=tmp_path / "here", part=Part(0, 2), progress=False)
    encode_part(other, shards, to=tmp_path / "there", part=Part(1, 2), progress=False)
    refuses("its encoding did not finish", tsae.FeatureTable.load, tmp_path / "here")
    shutil.copy(tmp_path / "there" / "pieces" / "000001.npz", tmp_path / "here" / "pieces")
    with pytest.raises(TsaeError, match=r"000001\.npz: is a piece of another encoding\. Remove it") as refused:
        encode(sae, shards, to=tmp_path / "here", progress=False)
    assert "\n" not in str(refused.value)
    (tmp_path / "here" / "pieces" / "000001.npz").unlink()
    encode(sae, shards, to=tmp_path / "here", progress=False)
    encode(sae, shards, to=tmp_path / "one", progress=False)
    assert digests(tmp_path / "here") == digests(tmp_path / "one")


def test_a_kill_while_pieces_are_removed(
    sae: TemporalSAE, shards: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file was the last to go, the same call goes on: what says of what they are goes after all pieces."""
    encode(sae, shards, to=tmp_path / "whole", progress=False)
    n = sum(1 for _ in shards.shards())
    for last in (0, 1, n, n + 1):
        gone = 0

        def killed(path: Path, last: int = last) -> None:
            nonlocal gone
            if gone == last:
                raise KeyboardInterrupt
            gone += 1
            removed(path)

        with monkeypatch.context() as patch:
            patch.setattr(parts, "removed", killed)
            with pytest.raises(KeyboardInterrupt) if last <= n else nullcontext():
                encode(sae, shards, to=tmp_path / str(last), progress=False)
        assert (tmp_path / str(last) / "pieces" / "encoding.json").is_file() == (last <= n)
        encode(sae, shards, to=tmp_path / str(last), progress=False)
        assert digests(tmp_path / str(last)) == digests(tmp_path / "whole")


def test_a_part_compares_its_own_shards_with_their_checksums(
    sae: TemporalSAE, shards: ActivationStore, tmp_path: Path
) -> None:
    store = ActivationStore(shutil.copytree(shards.path, tmp_path / "acts"))
    damaged = next(shard for number, shard in enumerate(store.outlines()) if number == 1).path
    flip(damaged, -2000)
    encode_part(sae, store, to=tmp_path / "features", part=Part(0, 2), progress=False)
    with pytest.raises(TsaeError, match=rf"{damaged.name}: its bytes have changed"):
        encode_part(sae, store, to=tmp_path / "features", part=Part(1, 2), progress=False)


def test_pieces_of_another_kind_of_gpu_are_refused(shards: ActivationStore, sae: TemporalSAE, tmp_path: Path) -> None:
    """Their codes differ in the last bits."""
    for device, where in (("cpu", nullcontext()), ("cuda", stand_in_gpu())):
        with where:
            assert encode_part(sae, shards, to=tmp_path / device, part=Part(0, 2), device=device, progress=False) > 0
            encode_part(sae, shards, to=tmp_path / device, part=Part(1, 2), device=device, progress=False)
    with (
        stand_in_gpu(),
        mock.patch("torch.cuda.get_device_name", return_value="another"),
        pytest.raises(TsaeError, match="pieces of another encoding"),
    ):
        encode(sae, shards, to=tmp_path / "cuda", device="cuda", progress=False)
