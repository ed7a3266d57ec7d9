"""What runs on a GPU gives what the CPU gives. `scripts/gpu_suite.sh` runs these where there is a GPU.

Where there is none, a stand-in shows at least that no tensor meets one of the other device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from organism.mixed import MixedConfig, train
from safetensors.torch import load_file, save_file

import tsae
from support.builders import make_rollouts, save_base_and_run
from support.stand_in import stand_in_gpu
from tsae.causal.edits import FeatureEdit
from tsae.checkpoints.hooks import rewritten
from tsae.checkpoints.loading import Checkpoint
from tsae.rollouts.importing import import_log
from tsae.rollouts.problems import Problem
from tsae.rollouts.table import Rollouts
from tsae.sae.training.loss import temporal_loss

pytestmark = [pytest.mark.gpu, pytest.mark.slow(ci=True)]
SITE = "blocks.1.hook_resid_post"


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with stand_in_gpu():
        yield


@pytest.fixture(scope="module")
def world(llama: Path, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("world")
    series = tsae.CheckpointSeries.load(save_base_and_run(folder, llama))
    rollouts = make_rollouts(n_problems=24, n_samples=6, tokenizer=fingerprint)
    return {"folder": folder, "series": series, "rollouts": rollouts}


def loss(device: str, precision: Any = "float32") -> dict[str, torch.Tensor]:
    """Terms and gradients of one batch, with dead latents and pairs of several trajectories."""
    generator = torch.Generator().manual_seed(0)
    sae = tsae.TemporalSAE(64, tsae.SAEConfig(d_sae=512, k=8))
    sae.initialize(torch.randn(64, generator=generator), generator)
    sae = sae.to(device)
    x = (torch.randn(256, 64, generator=generator) * 2).to(device)
    current = torch.arange(256)[torch.arange(256) % 16 > 0]
    pairs = torch.stack([current - 1, current], dim=1).to(device)
    dead = (torch.arange(512) % 7 == 0).to(device)
    trajectory = (torch.arange(256) // 32).to(device)
    terms = temporal_loss(sae, x, pairs, dead, trajectory, precision=precision)
    terms.total.backward()
    found = {name: parameter.grad.cpu() for name, parameter in sae.named_parameters() if parameter.grad is not None}
    names = ("total", "reconstruction", "temporal", "aux")
    return found | {name: getattr(terms, name).detach().cpu() for name in names}


def test_the_loss_and_its_gradient() -> None:
    ours, theirs = loss("cuda"), loss("cpu")
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-3, atol=1e-5, msg=name)


def test_bfloat16() -> None:
    ours, theirs = loss("cuda", "bfloat16"), loss("cpu", "bfloat16")
    assert ours["total"].item() == pytest.approx(theirs["total"].item(), rel=1e-2)
    for name in ("W_enc", "W_dec"):
        cosine = torch.nn.functional.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), dim=0)
        assert cosine > 0.98, name


def test_capture_training_and_encoding(world: dict[str, Any]) -> None:
    stores = {}
    for name, device in (("there", "cuda"), ("here", "cpu")):
        config = tsae.CaptureConfig(device=device, token_statistics=True)
        stores[name] = tsae.capture(
            world["series"], world["rollouts"], [SITE], to=world["folder"] / name, config=config, progress=False
        )
    for mine, theirs in zip(*(store.shards() for store in stores.values()), strict=True):
        np.testing.assert_allclose(mine.read(SITE, slice(None)), theirs.read(SITE, slice(None)), atol=1e-3)
        np.testing.assert_allclose(mine.norms(SITE), theirs.norms(SITE), rtol=1e-4)
        own = np.linalg.norm(mine.read(SITE, slice(None)), axis=1)
        np.testing.assert_allclose(mine.norms(SITE), own, rtol=1e-5)
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        for name in ("entropy", "logprob"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), atol=1e-3, equal_nan=True)
    store, training = stores["here"], tsae.TrainingConfig(tokens=8_000, batch_tokens=200, device="cuda")
    sae = tsae.train(store, tsae.SAEConfig(d_sae=64, k=4), training=training, progress=False)
    assert tsae.evaluate(sae.to("cpu"), store).as_dict() is not None
    on_cpu = tsae.encode(sae, store, device="cpu", progress=False)
    here = on_cpu.codes[:].toarray()
    live = tsae.LiveSource(world["series"], world["rollouts"], SITE, config=tsae.LiveConfig(device="cuda"))
    for source in (store, live):
        on_gpu = tsae.encode(sae, source, device="cuda", progress=False)
        there = on_gpu.codes[:].toarray()
        for mine, theirs in zip(on_gpu.info["readers"], on_cpu.info["readers"], strict=True):
            assert mine["n_tokens"] == theirs["n_tokens"]
            assert [mine[name] for name in ("fve", "l0")] == pytest.approx([theirs["fve"], theirs["l0"]], rel=1e-2)
        # Last bits differ, and a code at the threshold may be there on one device alone.
        sure = np.abs(np.maximum(there, here) - sae.threshold.item()) > 1e-2
        assert sure.mean() > 0.99
        np.testing.assert_allclose(there[sure], here[sure], atol=5e-3)


def test_sampling(llama: Path) -> None:
    problems = [Problem(f"p{i}", f"{i}+1?", "1") for i in range(4)]
    cold = tsae.SamplingConfig(n_samples=1, max_new_tokens=8, temperature=1e-4)
    found = [
        tsae.sample(Checkpoint("base", str(llama)), problems, config, progress=False).table["response_ids"].to_pylist()
        for config in (cold, tsae.SamplingConfig(**{**cold.__dict__, "device": "cuda"}))
    ]
    assert found[0] == found[1]


def test_what_a_gpu_cannot_store_is_said_with_its_trajectory(world: dict[str, Any], tmp_path: Path) -> None:
    broken = save_base_and_run(tmp_path / "series", Path(world["series"].base.path))
    file = broken / "base" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    config, to = tsae.CaptureConfig(device="cuda"), tmp_path / "store"
    with pytest.raises(tsae.TsaeError, match=r"are not finite while reader base reads trajectory \d+ \(problem"):
        tsae.capture(
            tsae.CheckpointSeries.load(broken), world["rollouts"], [SITE], to=to, config=config, progress=False
        )
    assert not list(to.glob("base/*"))


@pytest.mark.parametrize("mode", ["ablate", "steer"])
def test_generation_with_edited_features(llama: Path, mode: Any) -> None:
    checkpoint, found = Checkpoint("base", str(llama)), {}
    ids = torch.tensor([[18, 16, 3, 10, 4], [16, 5, 11, 6, 12]])
    for device in ("cuda", "cpu"):
        model, generator = checkpoint.load_model(device=device), torch.Generator().manual_seed(0)
        sae = tsae.TemporalSAE(16, tsae.SAEConfig(d_sae=64, k=4), site=SITE)
        sae.initialize(torch.zeros(16), generator)
        edit = FeatureEdit(sae.to(device), (1, 5, 9), mode, (2.0, 1.0, 3.0))
        around = edit.hook(lambda model: partial(rewritten, model), "all", ())
        prompt, mask = ids.to(device), (ids != 18).long().to(device)
        with torch.no_grad(), around(model, prompt, mask):
            made = model.generate(
                input_ids=prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=18,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        found[device] = made.sequences.cpu(), torch.stack(made.logits).cpu()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=1e-3, rtol=1e-3)


def test_attribution(tmp_path: Path) -> None:
    config = MixedConfig(per_band=1, steps=2, groups=3, samples=4, learning_rate=1e-3)
    run = train(config, tsae.testbed.series().base, tmp_path / "run", progress=False)
    import_log(run, tmp_path / "log.parquet", progress=False)
    log = Rollouts.read(tmp_path / "log.parquet")
    found = {}
    # The stand-in does not follow tensors into forward derivatives, which tokens need.
    tokens = 4 * torch.cuda.is_available()
    for device in ("cuda", "cpu"):
        few = tsae.AttributionConfig(n_fixed=8, shown=tokens // 4, tokens_of=tokens, device=device)
        series = tsae.CheckpointSeries.load(run)
        found[device] = tsae.attribute(series, log, tmp_path / device, first_token=5, config=few, progress=False)
    for name in ("samples", "groups", "targets"):
        there, here = (getattr(found[device], name) for device in ("cuda", "cpu"))
        pd.testing.assert_frame_equal(there, here, rtol=1e-2, atol=1e-4)
