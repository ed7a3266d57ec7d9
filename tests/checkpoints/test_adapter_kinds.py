"""Every kind of adapter that peft has is read as peft reads it, and leaves no trace in its base or the next adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import make_rollouts, save_model
from support.checkpoints import IDS, edit
from tsae.checkpoints.adapters import _KINDS
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError

pytestmark = pytest.mark.slow(ci=True)

SOME = ["q_proj", "v_proj", "down_proj"]


def kinds() -> dict[str, Callable[[], Any]]:
    """Configurations by name."""
    import peft

    lora = partial(peft.LoraConfig, r=2, lora_alpha=8, target_modules=SOME, init_lora_weights=False)
    started = {"target_modules": SOME, "init_weights": False}
    square = {"target_modules": ["q_proj", "o_proj"], "init_weights": False}
    return {
        "lora": lora,
        "dora": partial(lora, use_dora=True),
        "bias": partial(lora, bias="all"),
        "saved": partial(lora, modules_to_save=["embed_tokens", "lm_head"]),
        "norms": partial(lora, modules_to_save=["input_layernorm", "norm"]),
        "tied": partial(lora, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        "tokens": partial(lora, trainable_token_indices=[1, 13]),
        "embedding": partial(lora, target_modules=["embed_tokens", "lm_head"]),
        "parameters": partial(lora, target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
        "ia3": partial(peft.IA3Config, target_modules=SOME, feedforward_modules=["down_proj"], init_ia3_weights=False),
        "ln": partial(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"]),
        "osf": partial(peft.OSFConfig, target_modules=["q_proj"], effective_rank=4),
        "ttokens": partial(peft.TrainableTokensConfig, token_indices=[3, 13], init_weights=False),
        "rslora": partial(lora, use_rslora=True),
        "bias-lora": partial(lora, bias="lora_only"),
        "lora-bias": partial(lora, lora_bias=True),
        "head": partial(lora, modules_to_save=["lm_head"]),
        "tied-embedding": partial(lora, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
        "adalora": partial(peft.AdaLoraConfig, target_modules=SOME, init_lora_weights=False, total_step=9),
        "boft": partial(peft.BOFTConfig, boft_block_size=4, **started),
        "c3a": partial(peft.C3AConfig, block_size=8, **started),
        "delora": partial(peft.DeloraConfig, r=2, **started),
        "fourier": partial(peft.FourierFTConfig, n_frequency=20, **started),
        "gralora": partial(peft.GraloraConfig, r=4, **started),
        "hra": partial(peft.HRAConfig, r=2, **started),
        "loha": partial(peft.LoHaConfig, r=2, **started),
        "lokr": partial(peft.LoKrConfig, r=2, **started),
        "miss": partial(peft.MissConfig, r=2, **started),
        "oft": partial(peft.OFTConfig, r=0, oft_block_size=4, **started),
        "randlora": partial(peft.RandLoraConfig, r=4, **square),
        "road": partial(peft.RoadConfig, group_size=4, **started),
        "vera": partial(peft.VeraConfig, r=4, **square),
        "waveft": partial(peft.WaveFTConfig, n_frequency=20, **started),
    }


MEANS = 9
"""So many kinds, the first of the dictionary, differ most in what they put where."""


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base and an adapter of every kind: of a model with biases, and of one whose head is tied."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    base = save_model(folder / "base", request.param)
    plain = AutoModelForCausalLM.from_pretrained(base)
    for seed, (name, config) in enumerate(kinds().items()):
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = get_peft_model(deepcopy(plain), config())
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn(parameter.shape))
            model.save_pretrained(folder / name)
    return {"base": base, **{name: folder / name for name in kinds()}}


def as_checkpoints(world: dict[str, Path]) -> dict[str, Checkpoint]:
    base = Checkpoint("base", str(world["base"]))
    return {"base": base, **{n: Checkpoint(n, str(p), run=n, base=base) for n, p in world.items() if n != "base"}}


def read(model: Any) -> torch.Tensor:
    """All that a reader could read: every layer's residual stream, and the logits."""
    with torch.no_grad():
        out = model(input_ids=IDS, output_hidden_states=True)
    return torch.cat([*(h.flatten() for h in out.hidden_states), out.logits.flatten()])


@pytest.fixture(scope="module")
def right(world: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The oracle: transformers and peft alone, from the files."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(world["base"])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        return {"base": read(plain)} | {
            name: read(PeftModel.from_pretrained(deepcopy(plain), world[name]).base_model.model) for name in kinds()
        }


def test_an_adapter_is_read_as_peft_reads_it_and_leaves_its_base_as_it_was(
    world: dict[str, Path], right: dict[str, torch.Tensor]
) -> None:
    """The base keeps its modules, its parameters and their bits: what comes after an adapter cannot depend on it."""
    checkpoints, loader = as_checkpoints(world), ModelLoader()
    base = loader.load(checkpoints["base"])
    modules, before = list(base.modules()), {n: (p, p.clone()) for n, p in base.named_parameters()}
    random = torch.random.get_rng_state()
    for name, checkpoint in checkpoints.items():
        found = read(loader.load(checkpoint))
        assert torch.equal(found, right[name]), name
        assert name == "base" or not torch.equal(found, right["base"]), name
        assert loader.load(checkpoints["base"]) is base
        assert all(a is b for a, b in zip(modules, base.modules(), strict=True)), name
        now = dict(base.named_parameters())
        assert all(now[n] is p and torch.equal(p, bits) for n, (p, bits) in before.items()), name
    assert torch.equal(random, torch.random.get_rng_state())
    assert {c().peft_type.value for c in kinds().values()} == set(_KINDS)


def walk(world: dict[str, Path], right: dict[str, torch.Tensor], names: list[str]) -> None:
    """Load them so that every one comes once right after every other one, and compare with the files."""
    checkpoints, loader = as_checkpoints(world), ModelLoader()
    path = [name for i, first in enumerate(names) for second in [None, *names[i + 1 :]] for name in (first, second)]
    before = ""
    for name in filter(None, [*path, names[0]]):
        assert torch.equal(read(loader.load(checkpoints[name])), right[name]), f"{name} after {before}"
        before = name


def test_adapters_are_read_alike_in_every_order(world: dict[str, Path], right: dict[str, torch.Tensor]) -> None:
    walk(world, right, ["base", *list(kinds())[1:MEANS]])


@pytest.mark.slow
def test_all_kinds_of_adapters_are_read_alike_in_every_order(
    world: dict[str, Path], right: dict[str, torch.Tensor]
) -> None:
    walk(world, right, list(world))


def test_a_store_of_several_adapters_holds_what_a_store_of_one_holds(world: dict[str, Path], tmp_path: Path) -> None:
    rollouts = make_rollouts(("base",), n_problems=2, n_samples=1)
    site = "blocks.1.hook_resid_post"

    def captured(*names: str, **options: Any) -> dict[str, np.ndarray]:
        series = CheckpointSeries.load(world["base"], *(world[name] for name in names))
        to = tmp_path / "-".join([*names, *options])
        config = tsae.CaptureConfig(**options)
        store = tsae.capture(series, rollouts, sites=[site], config=config, to=to, progress=False)
        found = {id: np.concatenate([s.read(site, slice(None)) for s in store.shards(id)]) for id in store.readers}
        assert all(id == "base" or np.abs(values - found["base"]).max() > 0.01 for id, values in found.items())
        return found

    names = ["saved", "tokens", "norms", "lora"]
    alone, spread = {name: captured(name) for name in names}, captured(*names, device="auto")
    for order in (names, names[::-1]):
        for id, values in captured(*order).items():
            assert np.array_equal(values, alone[names[0] if id == "base" else id][id]), (order, id)
            np.testing.assert_allclose(spread[id], values, atol=1e-5)


def test_a_setting_that_peft_would_ignore_is_refused(world: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    adapter = Path(shutil.copytree(world["lora"], tmp_path / "adapter"))
    edit(adapter / "adapter_config.json", use_what_comes_next=True)
    with pytest.raises(TsaeError, match="has the setting use_what_comes_next, which the installed peft does not know"):
        Checkpoint("a", str(adapter)).load_model()
