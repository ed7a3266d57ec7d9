"""Use of experts: what the model's own experts were given, and a planted change of one router."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from support.builders import BOS, make_rollouts, save_model, save_series
from support.checkpoints import reweigh
from support.refusals import refuses
from tsae.activations.config import ReadingConfig
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.routers import RouterReader, _chosen
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import feature_diff
from tsae.errors import TsaeError
from tsae.features.expert_use import expert_use, experts
from tsae.features.feature_table import FeatureTable

RUN = "run-1"
RECENT = hasattr(transformers, "ZayaConfig")
"""Earlier versions also have routers of DeepSeek's kind that give scores alone."""


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "llama4"])
def test_choices_are_those_that_the_experts_were_given(architecture: str, tmp_path: Path) -> None:
    model: Any = ModelLoader().load(Checkpoint("x", str(save_model(tmp_path / "model", architecture))))
    if architecture == "deepseek_v3" and not RECENT:
        pytest.skip("this version's router gives scores alone")
    routers = RouterReader(model)
    assert list(routers.routers) == {"llama4": [1], "deepseek_v3": [1, 2]}.get(architecture, [0, 1, 2])
    given: dict[str, torch.Tensor] = {}

    def keep(name: str, inputs: Any) -> None:
        indices = [part for part in inputs if not part.is_floating_point()]
        if indices:
            given[name] = torch.zeros(len(indices[0]), 4, dtype=torch.bool).scatter_(1, indices[0], True)
        else:  # Llama 4 gives every expert every token, times its score, which is 0 for the others.
            given[name] = (inputs[0].reshape(4, -1, inputs[0].shape[-1]) != 0).any(-1).T

    for layer in routers.routers:
        block = model.model.layers[layer]
        expert = (block.mlp if hasattr(block, "mlp") else block.feed_forward).experts
        expert.register_forward_pre_hook(lambda _, inputs, name=str(layer): keep(name, inputs))
    ids = torch.tensor([[BOS, 3, 5, 7, 1, 2, 4]])
    found = routers.read(ids, torch.ones_like(ids))
    assert found.keys() == given.keys()
    for name, chosen in found.items():
        assert chosen.shape == (1, 7, 4)
        assert torch.equal(chosen[0], given[name])
        assert set(chosen.sum(-1).flatten().tolist()) == {1 if architecture == "llama4" else 2}


DBRX = {
    "d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 20, "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 16},
}  # fmt: skip
ZAYA = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.tensor([[BOS, 3, 5, 7, 1, 2, 4]])


def untrained(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_router_that_gives_scores_alone_is_refused() -> None:
    routers = RouterReader(untrained(transformers.DbrxConfig(**DBRX)))
    refuses("block 0, DbrxRouter, returns scores, not choices", routers.read, IDS, torch.ones_like(IDS))


@pytest.mark.skipif(not RECENT, reason="this version of transformers lacks the model")
@pytest.mark.parametrize("skip", [False, True])
def test_a_router_within_a_router_is_none_and_a_skipping_token_has_no_expert(skip: bool) -> None:
    model = untrained(transformers.ZayaConfig(**ZAYA))
    routers = RouterReader(model)
    given = []
    for router in routers.routers.values():
        router.balancing_biases[-1] = 1.0 if skip else -1.0  # of the choice to skip
        router.register_forward_hook(lambda _, __, output: given.append(output[2]))
    found = routers.read(IDS, torch.ones_like(IDS))
    for chosen, indices in zip(found.values(), given, strict=True):
        assert (chosen.sum(-1) == (0 if skip else 1)).all()
        assert skip or torch.equal(chosen[0].int().argmax(-1), indices[:, 0])


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ((torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.long)), "not 2 of 4 experts"),
        ((torch.rand(3, 4), torch.full((3, 2), 4)), "not 2 of 4 experts"),
        ((torch.zeros(3, 2, dtype=torch.long),), "no scores"),
        ((), "no scores"),
        ((torch.rand(3, 4),), "scores, not choices"),
    ],
)
def test_what_is_no_choice_is_said(parts: tuple[torch.Tensor, ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        _chosen(parts, 2, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("architecture", ["mixtral", "llama4"])
def test_nan_is_refused_but_for_padding(architecture: str, tmp_path: Path) -> None:
    model: Any = ModelLoader().load(Checkpoint("x", str(save_model(tmp_path / "model", architecture))))
    routers, real = RouterReader(model), torch.ones_like(IDS)
    next(iter(routers.routers.values())).register_forward_pre_hook(
        lambda _, given: (torch.cat([given[0].reshape(7, -1)[:-1], torch.full((1, given[0].shape[-1]), torch.nan)]),)
    )
    refuses(r"model: the router of block \d, \w+, gives NaN or infinity", routers.read, IDS, real)
    real[0, -1] = 0
    first = next(iter(routers.routers))
    model.model.layers[first].register_forward_hook(lambda _, __, output: _finite(output))
    assert routers.read(IDS, real)[str(first)][0, :-1].any(-1).all()


def _finite(output: Any) -> Any:
    return tuple(map(_finite, output)) if isinstance(output, tuple) else output.nan_to_num()


def router_input(folder: Path) -> torch.Tensor:
    """(d_model,) what the router of block 1 is given on average. An expert with weights along that is chosen often."""
    model: Any = ModelLoader().load(Checkpoint("x", str(folder)))
    given: list[torch.Tensor] = []
    RouterReader(model).routers[1].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    ids = torch.arange(17)[None]
    model(input_ids=ids)
    return given[0].reshape(17, -1).mean(0)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointSeries, Any]:
    """A base, a run whose router of block 1 prefers expert 2, and a copy of the base; rollouts of the base."""
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder / "base", "mixtral")
    for name in (RUN, "copy-1"):
        shutil.copytree(folder / "base", folder / name)
    name, preferred = "model.layers.1.block_sparse_moe.gate.weight", 5 * router_input(folder / "base")
    reweigh(folder / RUN, lambda w: w[name if name in w else "model.layers.1.mlp.gate.weight"][2].copy_(preferred))
    records = [{"id": "base", "path": "base"}]
    records += [{"id": id, "path": id, "run": id[:-2], "step": 1} for id in (RUN, "copy-1")]
    series = CheckpointSeries.load(save_series(folder, records))
    return series, make_rollouts(("base",), n_problems=20, n_samples=3)


def test_a_changed_router_is_found_and_nothing_before_it(changed: Any) -> None:
    series, rollouts = changed
    table = expert_use(series, rollouts, config=ReadingConfig(batch_tokens=64), progress=False)
    assert table.codes.shape[1] == 12
    assert np.array_equal(np.unique(np.diff(table.codes.indptr)), [6])  # two of four experts in three blocks
    diff = feature_diff(table, DiffConfig(n_bootstrap=200, n_permutations=200), progress=False)
    shifts = diff.table(kind="shift", part="same_trajectories", band="all", outcome="all").join(
        experts(diff.info), on="feature"
    )
    mine = shifts[shifts.checkpoint == RUN].set_index(["layer", "expert"])
    assert mine.loc[(1, 2)].moved
    assert (mine.loc[0].difference == 0).all()
    assert (shifts[shifts.checkpoint == "copy-1"].difference == 0).all()
    # By hand: the share of response tokens that the expert gets, over trajectories, then over problems.
    share: dict[str, dict[str, list[float]]] = {"base": {}, RUN: {}}
    special, frame = set(table.info["special_ids"]), rollouts.frame
    for row in range(table.n_rows):
        reader, trajectory = table.readers[table.reader[row]], int(table.trajectory[row])
        prompt, response = rollouts.tokens(trajectory)
        tokens = np.arange(table.row_offsets[row], table.row_offsets[row + 1])[len(prompt) :]
        counted = tokens[[int(id) not in special for id in response]]
        if reader in share:
            one = table.codes[counted][:, [6]].toarray().mean()
            share[reader].setdefault(frame.problem_id[trajectory], []).append(float(one))
    expected = {reader: np.mean([np.mean(of) for of in problems.values()]) for reader, problems in share.items()}
    assert mine.loc[(1, 2)]["mean"] == pytest.approx(expected[RUN], abs=1e-6)
    assert mine.loc[(1, 2)].reference == pytest.approx(expected["base"], abs=1e-6)


def test_layers_are_chosen_and_tables_saved(changed: Any, tmp_path: Path) -> None:
    series, rollouts = changed
    table = expert_use(series.select([RUN]), rollouts, layers=[1], progress=False)
    again = FeatureTable.load(table.save(tmp_path / "features"))
    assert (again.codes[:] != table.codes).nnz == 0
    assert experts(again.info).to_dict("list") == {"layer": [1] * 4, "expert": [0, 1, 2, 3]}
    # As an SAE's weights do, they say whose features these are.
    other = expert_use(series.select([RUN]), rollouts, layers=[0], progress=False)
    assert isinstance(again.info["sae"]["weights"], str)
    assert again.info["sae"]["weights"] != other.info["sae"]["weights"]
    refuses(r"routers in the blocks .*0, 1, 2.*, not in 7", expert_use, series, rollouts, layers=[7], progress=False)
    # As numpy counts them.
    assert experts(expert_use(series.select([RUN]), rollouts, layers=np.array([1]), progress=False).info).layer[0] == 1


@pytest.mark.parametrize("layers", [1, [], "1", [1.0], [True], ["1"], [1, 1], np.ones((1, 1)), {1: 2}])
def test_layers_that_are_no_list_of_blocks_are_refused(layers: Any, changed: Any) -> None:
    with pytest.raises(TsaeError, match=r"expert_use: layers=.* is not a list .* such as layers=\[1, 3\]"):
        expert_use(*changed, layers=layers, progress=False)


def test_a_dense_model_is_refused(series: CheckpointSeries, rollouts: Any) -> None:
    refuses("not a mixture of experts", expert_use, series, rollouts, progress=False)
    refuses("these features are not experts", experts, {"sae": {}})
