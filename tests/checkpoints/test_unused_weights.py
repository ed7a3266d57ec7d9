"""Every weight of a file is used, or a sentence says that it is not; and all that read weights agree on that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tsae
from support.builders import make_rollouts, save_model, save_perturbed
from support.checkpoints import IDS, edit, reweigh, save_adapter
from support.refusals import refuses
from tsae.attribution.settings import Optimiser
from tsae.attribution.start import checkpoints_of, start_of
from tsae.checkpoints.drift import update_of, weight_drift
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError

pytestmark = pytest.mark.slow(ci=True)

Weights = dict[str, torch.Tensor]


def replayed(series: CheckpointSeries) -> list[torch.Tensor]:
    """Weights that a replay begins with, and is compared with."""
    start = start_of(series, checkpoints_of(series, None), Optimiser(learning_rate=0.1, schedule="constant"))
    return [start.begin.weights, *(control().weights for control in start.controls.values())]


READERS: dict[str, Callable[[CheckpointSeries, Path], Any]] = {
    "capture": lambda series, to: tsae.capture(series, make_rollouts(n_problems=2), to=to, progress=False),
    "drift": lambda series, to: weight_drift(series, progress=False),
    "noise": lambda series, to: update_of(list(series)[1]),
    "replay": lambda series, to: replayed(series),
}


def changed(source: Path, folder: Path, change: Callable[[Weights], object], **config: Any) -> Path:
    """A copy of a checkpoint with other weights in its file and other words in its configuration."""
    edit(Path(shutil.copytree(source, folder)) / "config.json", **config)
    return reweigh(folder, change)


def logits(series: CheckpointSeries) -> list[torch.Tensor]:
    with torch.no_grad():
        return [checkpoint.load_model()(IDS).logits for checkpoint in series]


def prefixed(by: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.update({by + name: weights.pop(name)}) for name in list(weights)]


def of_lora(weights: Weights) -> None:
    """What a PeftModel's state dict holds."""
    for part, shape in (("A", (2, 16)), ("B", (16, 2))):
        weights[f"model.layers.0.self_attn.q_proj.lora_{part}.default.weight"] = torch.randn(shape)


REFUSED: dict[str, tuple[Callable[[Weights], object], dict[str, Any], str]] = {
    "biases": (
        lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(16)}),
        {},
        r"1 weights .* have no place .*first: model.layers.1.self_attn.q_proj.bias",
    ),
    "layers": (lambda w: None, {"num_hidden_layers": 2}, r"9 weights .* have no place .*first: model.layers.2\."),
    "lora": (of_lora, {}, r"2 weights .* have no place .*They are an adapter's: merge it"),
    "compiled": (prefixed("_orig_mod."), {}, r"30 weights are missing .*30 in the file have other names"),
    "norm": (lambda w: w.update({"model.embed_norm.weight": torch.ones(16)}), {}, "1 weights .* have no place"),
    "one number": (lambda w: w.update({"model.norm.weight": torch.ones(1)}), {}, r"norm.weight .* the shape \(1,\)"),
    "integers": (
        lambda w: w.update({"lm_head.weight": torch.ones(20, 16, dtype=torch.int8)}), {}, "whole numbers|stored as I8"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "both"), [*((name, False) for name in REFUSED), ("layers", True), ("lora", True)])
def test_weights_without_a_place_are_refused_by_all_that_read_them(
    name: str, both: bool, llama: Path, tmp_path: Path
) -> None:
    """In the run's checkpoint alone, and where the base has them too."""
    change, config, said = REFUSED[name]
    base = changed(llama, tmp_path / "base", change, **config) if both else llama
    run = changed(save_perturbed(llama, tmp_path / "moved"), tmp_path / "run" / "checkpoint-1", change, **config)
    series = CheckpointSeries.load(base, run.parent)
    for reader, read in READERS.items():
        # Between checkpoints drift has always compared names and shapes first.
        of_drift = r"are missing and|of the shape|" if reader == "drift" else ""
        refuses(of_drift + said, read, series, tmp_path / reader)


def test_value_heads_and_masks_are_left_out_by_all_that_read_weights(llama: Path, tmp_path: Path) -> None:
    def heads(weights: Weights) -> None:
        weights["v_head.summary.weight"], weights["score.weight"] = torch.ones(1, 16), torch.ones(1, 16)

    def masks(weights: Weights) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        weights["model.layers.0.attn.masked_bias"] = torch.tensor(-1e4)
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 3, 3, dtype=torch.uint8)

    moved = save_perturbed(llama, tmp_path / "moved")
    series = {
        name: CheckpointSeries.load(llama, changed(moved, tmp_path / name / "checkpoint-1", change).parent)
        for name, change in (("plain", lambda w: None), ("heads", heads), ("masks", masks))
    }
    assert series["masks"].notes == series["plain"].notes == ()
    assert series["heads"].notes == (
        "heads-00001: score.weight and 1 more weights are not part of its text model: left out.",
    )
    right = logits(series["plain"])
    for name in ("heads", "masks"):
        assert all(torch.equal(a, b) for a, b in zip(logits(series[name]), right, strict=True))
        drift, plain = (
            weight_drift(series[n], progress=False).drop(columns=["checkpoint", "run"]) for n in (name, "plain")
        )
        assert drift.equals(plain)
        ends = [update_of(list(series[n])[1]).norms for n in (name, "plain")]
        assert ends[0] == ends[1]
        assert all(torch.equal(a, b) for a, b in zip(*map(replayed, (series[name], series["plain"])), strict=True))


def test_two_sets_of_weights_in_a_folder(llama: Path, tmp_path: Path) -> None:
    """A whole file beside shards: nothing says which of them is the older one."""
    from transformers import AutoModelForCausalLM

    shards = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(save_perturbed(llama, tmp_path / "moved"), shards)
    (shards / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "moved").save_pretrained(shards, max_shard_size="20KB")
    series = CheckpointSeries.load(llama, tmp_path / "run")
    right = logits(series)
    assert series.notes == ()
    shutil.copy(llama / "model.safetensors", shards / "model-00009-of-00009.safetensors")
    (shards / "pytorch_model.bin").write_bytes(b"of an earlier save")
    assert CheckpointSeries.load(llama, tmp_path / "run").notes == (
        "run-00001: beside the weights that are read lie others, which are not: model-00009-of-00009.safetensors, "
        "pytorch_model.bin.",
    )
    assert all(torch.equal(a, b) for a, b in zip(logits(series), right, strict=True))
    index = shards / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**names, "lm_head.weight": "model-00009-of-00009.safetensors"})
    for reader in ("capture", "noise", "replay"):
        with pytest.raises(TsaeError, match=r"holds .* twice: in model-00001.* and model-00009-of-00009.safetensors"):
            READERS[reader](series, tmp_path / "out")
    edit(index, weight_map=names)
    shutil.copy(llama / "model.safetensors", shards)
    for read in READERS.values():
        with pytest.raises(TsaeError, match=r"holds weights twice: model.safetensors, and the files that .*index.json"):
            read(series, tmp_path / "out")
    for file in shards.glob("model-*"):  # merged into one file, whose index was forgotten
        file.unlink()
    assert torch.equal(logits(CheckpointSeries.load(llama, tmp_path / "run"))[1], right[0])


def test_a_head_that_was_trained_by_itself_is_not_tied_again(tmp_path: Path) -> None:
    """config.json still says that it is tied. Loaded on one device or spread over several."""
    base = save_model(tmp_path / "base", "gemma3")
    head = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    for name, value in (("same", head.clone()), ("other", head + 1)):
        run = changed(base, tmp_path / name / "checkpoint-1", lambda w, v=value: w.update({"lm_head.weight": v}))
        series = CheckpointSeries.load(base, run.parent)
        model = list(series)[1].load_model()
        assert torch.equal(model.lm_head.weight, value)
        drift = weight_drift(series, progress=False).set_index("tensor").update_norm
        np.testing.assert_allclose(drift["lm_head.weight"], 0 if name == "same" else np.sqrt(head.numel()), rtol=1e-5)
        found = {}
        for device in ("cpu", "auto"):
            config = tsae.CaptureConfig(device=device, token_statistics=True)
            store = tsae.capture(series, make_rollouts(n_problems=2), config=config, to=run / device, progress=False)
            (shard,) = store.shards(store.readers[1])
            found[device] = shard.logprob
        np.testing.assert_allclose(found["cpu"], found["auto"], atol=1e-5)
        assert set(update_of(list(series)[1]).norms.values()) == {0.0}  # of the head no activation depends


def test_several_adapters_in_a_folder(llama: Path, tmp_path: Path) -> None:
    """peft saves the one named "default" into the folder itself, and others into folders in it."""
    adapter = save_adapter(llama, tmp_path / "run" / "checkpoint-1")
    right = logits(CheckpointSeries.load(llama, tmp_path / "run"))
    save_adapter(llama, adapter / "reference", seed=7)
    series = CheckpointSeries.load(llama, tmp_path / "run")
    assert series.notes == (
        "run-00001: beside the weights that are read lie others, which are not: reference/adapter_model.safetensors.",
    )
    assert all(torch.equal(a, b) for a, b in zip(logits(series), right, strict=True))
    for file in adapter.glob("adapter_*"):
        file.unlink()
    with pytest.raises(TsaeError, match=r"checkpoint-1 \(holds no config\.json, and adapters in folders \(ref"):
        CheckpointSeries.load(llama, tmp_path / "run")
    assert not torch.equal(logits(CheckpointSeries.load(llama, adapter / "reference"))[1], right[1])


def test_an_adapter_whose_weights_find_no_place_is_refused_by_all(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "run" / "checkpoint-1", target_modules=["q_proj", "v_proj"])
    series, file = CheckpointSeries.load(llama, tmp_path / "run"), adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    cases = [
        {k: v for k, v in weights.items() if ".layers.1.self_attn.v_proj." not in k},
        {
            **weights,
            **{k.replace("v_proj", "o_proj"): torch.ones(v.shape) for k, v in weights.items() if "layers.1" in k},
        },
        {k.replace("layers.2", "layers.3"): v for k, v in weights.items()},
        {**weights, name: torch.ones(1, 3)},
        {**weights, "base_model.model.model.layers.1.self_attn.v_proj.bias": torch.ones(8)},
    ]
    said = r"does not fit|cannot be put on|have no place|has an update of|has the shape|of shape"
    for case in cases:
        save_file(case, file)
        for read in READERS.values():
            refuses(said, read, series, tmp_path / "out")
        assert not (tmp_path / "out").exists()  # refused before the base has read anything
    save_file(weights, file)
    for reader, read in READERS.items():
        read(series, tmp_path / reader)
