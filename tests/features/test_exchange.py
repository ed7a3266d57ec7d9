"""Features for delphi and Neuronpedia, and features as steering vectors: read back as these tools read them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gguf import GGUFReader
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from support.builders import EOS, feature_table, make_rollouts, random_sae, save_model
from support.refusals import refuses
from tsae import FeatureTable, TemporalSAE
from tsae.base.files import new_folder
from tsae.checkpoints.hooks import HuggingFaceReader, decoder_blocks, site_names
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.features import exchange
from tsae.features.exchange import Neuronpedia, write_delphi, write_neuronpedia
from tsae.sae.exchange.saelens_files import write_folder
from tsae.sae.model import load_sae
from tsae.sae.saebench import saebench_sae
from tsae.sae.steering import SteeringVector

SITE = "blocks.1.hook_resid_post"
N = 7
FIELDS: dict[str, dict[str, Any]] = {
    # The columns of Neuronpedia's tables that its exports have, and their types.
    "features": {
        "modelId": str, "layer": str, "index": str, "creatorId": str, "sourceSetName": str, "maxActApprox": float,
        "frac_nonzero": float, "hasVector": bool, "vector": [float], "vectorLabel": None, "hookName": str,
        "vectorDefaultSteerStrength": float, "pos_str": [str], "pos_values": [float], "neg_str": [str],
        "neg_values": [float], "freq_hist_data_bar_heights": [float], "freq_hist_data_bar_values": [float],
        "logits_hist_data_bar_heights": [float], "logits_hist_data_bar_values": [float], "topkCosSimIndices": [int],
        "topkCosSimValues": [float], "neuron_alignment_indices": [int], "neuron_alignment_values": [float],
        "neuron_alignment_l1": [float], "correlated_neurons_indices": [int], "correlated_neurons_pearson": [float],
        "correlated_neurons_l1": [float], "decoder_weights_dist": [float],
    },
    "activations": {
        "id": str, "modelId": str, "layer": str, "index": str, "creatorId": str, "dataSource": str, "tokens": [str],
        "values": [float], "maxValue": float, "minValue": float, "maxValueTokenIndex": int, "dfaValues": [float],
        "dfaMaxValue": None, "dfaTargetIndex": None, "binMin": float, "binMax": float, "binContains": float,
    },
    "explanations": {
        "id": str, "modelId": str, "layer": str, "index": str, "authorId": str, "description": str, "embedding": None,
        "typeName": None, "explanationModelName": None, "notes": str, "umap_x": float, "umap_y": float,
        "umap_cluster": int, "umap_log_feature_sparsity": float,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def sae() -> TemporalSAE:
    return random_sae(site=SITE, d_sae=N, k=2)


@pytest.fixture(scope="module")
def features(sae: TemporalSAE, tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    rollouts = make_rollouts(n_problems=6, n_samples=2)
    rows = np.arange(12)
    n = sum(len(ids) for row in rows for ids in rollouts.tokens(int(row)))
    rng = np.random.default_rng(0)
    codes = rng.random((2 * n, N)) * (rng.random((2 * n, N)) < 0.3)
    codes[:, 5] = 0
    table = feature_table(rollouts, codes, [("base", rows), ("run", rows)])
    table.info["sae"] |= {"weights": sae.fingerprint, "site": SITE}
    return FeatureTable.load(table.save(tmp_path_factory.mktemp("features")))


def test_delphis_loader_finds_every_activation(features: FeatureTable, tmp_path: Path) -> None:
    """Read as `TensorBuffer.load` does: the name of the file gives the first feature."""
    to = write_delphi(features, tmp_path, hookpoint="layers.1", model_name="m", reader="run", context=8)
    rows = features.rows(reader="run")
    tokens = np.concatenate([np.arange(*features.row_offsets[row : row + 2]) for row in rows])
    tokens = tokens[: len(tokens) // 8 * 8]
    dense = features.codes[tokens].toarray() * features.span_mask("all")[tokens][:, None]
    found = np.zeros((len(tokens) // 8, 8, N), dtype=np.float32)
    files = sorted((to / "layers.1").glob("*.safetensors"))
    assert [file.stem for file in files] == ["0_0", "1_1", "2_3", "4_4", "5_6"]
    for file in files:
        data = load_file(file)
        assert data["locations"].dtype == np.uint16
        sequence, place, feature = data["locations"].astype(np.int64).T
        found[sequence, place, feature + int(file.stem.split("_")[0])] = data["activations"]
        np.testing.assert_array_equal(data["tokens"].ravel(), features.token_ids[tokens])
    np.testing.assert_array_equal(found.reshape(-1, N), dense)
    assert np.any(features.token_ids[tokens] == EOS)
    config = json.loads((to / "layers.1" / "config.json").read_text())
    assert (config["model_name"], config["cache_ctx_len"], config["n_splits"]) == ("m", 8, 5)
    with pytest.raises(TsaeError, match=r"fewer than one sequence of 9999.*smaller context"):
        write_delphi(features, tmp_path / "other", hookpoint="layers.1", model_name="m", context=9999)


def lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def test_neuronpedias_files_have_its_columns(
    features: FeatureTable, sae: TemporalSAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Neuronpedia("tiny", "1-tsae-4k", "user")
    strings = {str(i): f" t{i}" for i in range(20)}
    hostile = '"\n<script>'
    write_neuronpedia(features, sae, tmp_path, names, strings, labels={2: hostile}, labeller="rules")
    folder = tmp_path / "tiny" / "1-tsae-4k"
    for kind, fields in FIELDS.items():
        records = lines(folder / kind / "batch-0.jsonl.gz")
        assert records
        for record in records:
            assert set(record) == set(fields)
            for name, wanted in fields.items():
                value, of = record[name], wanted[0] if isinstance(wanted, list) else wanted
                for one in value if isinstance(wanted, list) else [value]:
                    number = isinstance(one, int | float) and of in (float, int)
                    assert (one is None) if of is None else number or isinstance(one, of) or one is None, name
    neurons = lines(folder / "features" / "batch-0.jsonl.gz")
    assert [record["index"] for record in neurons] == [str(i) for i in range(N)]
    np.testing.assert_allclose(neurons[3]["vector"], sae.W_dec[3], rtol=1e-6)
    counted = features.codes[:].toarray()[features.span_mask("all")]
    for i, record in enumerate(neurons):
        assert record["maxActApprox"] == pytest.approx(counted[:, i].max())
        assert record["frac_nonzero"] == pytest.approx((counted[:, i] > 0).mean())
        assert sum(record["freq_hist_data_bar_heights"]) == (counted[:, i] > 0).sum()
    contexts = lines(folder / "activations" / "batch-0.jsonl.gz")
    assert len({record["id"] for record in contexts}) == len(contexts)
    assert {record["index"] for record in contexts} == {"0", "1", "2", "3", "4", "6"}
    for record in contexts:
        assert record["values"][record["maxValueTokenIndex"]] == record["maxValue"] == max(record["values"])
        assert len(record["values"]) == len(record["tokens"])
    best = max(record["maxValue"] for record in contexts if record["index"] == "0")
    assert best == pytest.approx(counted[:, 0].max())
    (label,) = lines(folder / "explanations" / "batch-0.jsonl.gz")
    assert (label["index"], label["description"]) == ("2", hostile)
    assert {value for name, value in label.items() if name.startswith("umap_")} == {0}
    assert all(record["hasVector"] for record in neurons)
    assert {record["sourceSetName"] for record in neurons} == {"tsae-4k"}
    monkeypatch.setattr(exchange, "_BEFORE", 1)
    monkeypatch.setattr(exchange, "_AFTER", 1)
    monkeypatch.setattr(exchange, "_TOP", 2)
    write_neuronpedia(features, sae, tmp_path / "short", names, strings)
    contexts = lines(tmp_path / "short" / "tiny" / "1-tsae-4k" / "activations" / "batch-0.jsonl.gz")
    assert max(len(record["tokens"]) for record in contexts) == 3
    # After the two strongest come steps of activation: between which values, and which share of the peaks is there.
    top = max(record["maxValue"] for record in contexts if record["index"] == "0")
    binned = [record for record in contexts if record["index"] == "0" and record["binContains"] < 1]
    assert len(binned) > 5
    for record in binned:
        assert record["binMin"] <= record["maxValue"] <= record["binMax"]
        assert record["binMax"] - record["binMin"] == pytest.approx(top / exchange._BINS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_model(tmp_path_factory.mktemp("model")))


def test_a_steering_vector_that_does_not_fit_is_refused(model: Any) -> None:
    for odd in (torch.zeros(1, 16), torch.zeros(()), torch.zeros(16, dtype=torch.int64), torch.full((16,), torch.nan)):
        refuses(r"expected .d_model,. finite numbers", SteeringVector, odd, SITE)
    width = model.config.hidden_size
    for vector, strength in ((torch.zeros(width + 1), 1.0), (torch.zeros(width), float("nan"))):
        with pytest.raises(TsaeError, match="Give a vector of this model, and a finite strength"):
            SteeringVector(vector, SITE).attach(model, strength)


def test_a_steering_vector_is_added_and_taken_away(sae: TemporalSAE, model: Any, tmp_path: Path) -> None:
    vector = SteeringVector.load(SteeringVector.of(sae, 4, scale=2.5).save(tmp_path / "v.safetensors"))
    torch.testing.assert_close(vector.vector, 2.5 * sae.W_dec[4])
    assert (vector.site, vector.info["feature"]) == (SITE, 4)
    ids, mask = torch.tensor([[17, 3, 4, 5]]), torch.ones(1, 4, dtype=torch.long)
    read = HuggingFaceReader(model, [SITE])
    before = read.read(ids, mask)[SITE]
    handle = vector.attach(model, strength=-2)
    steered = read.read(ids, mask)[SITE]
    handle.remove()
    torch.testing.assert_close(steered, before - 5 * sae.W_dec[4])
    torch.testing.assert_close(read.read(ids, mask)[SITE], before)
    refuses("no feature 7; there are 0 to 6", SteeringVector.of, sae, 7)
    (tmp_path / "v.safetensors").write_bytes(b"nonsense")
    refuses("Export it again", SteeringVector.load, tmp_path / "v.safetensors")


def test_a_hook_steers_blocks_as_vllm_has_them(sae: TemporalSAE, model: Any) -> None:
    """Blocks of vLLM give (change, residual stream), whose sum goes on."""

    class Block(torch.nn.Module):
        def forward(self, change: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return 2 * change, residual + change

    inside = torch.nn.Module()
    inside.config, inside.layers = model.config, torch.nn.ModuleList([Block(), Block(), Block()])
    change, residual = torch.randn(2, 5, 16)
    plain = inside.layers[1](change, residual)
    vector = SteeringVector.of(sae, 2)
    vector.attach(inside, 3.0)
    found = inside.layers[1](change, residual)
    torch.testing.assert_close(sum(found), sum(plain) + 3 * vector.vector)


def test_llama_cpp_reads_a_control_vector(sae: TemporalSAE, tmp_path: Path) -> None:
    reader = GGUFReader(SteeringVector.of(sae, 3, 2.0).to_gguf(tmp_path / "v.gguf", "llama"))
    (tensor,) = reader.tensors
    assert tensor.name == "direction.1"
    np.testing.assert_allclose(tensor.data, 2 * sae.W_dec[3])
    assert str(tensor.tensor_type.name) == "F32"
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.model_hint"].contents() == "llama"
    first = SteeringVector(torch.ones(16), "blocks.0.hook_resid_post")
    refuses(r"llama\.cpp cannot steer blocks\.0", first.to_gguf, tmp_path / "w.gguf")
    assert not list(tmp_path.glob("w.gguf*"))


def test_sites_have_their_names_in_other_tools(model: Any) -> None:
    names = site_names(SITE, model)
    blocks = decoder_blocks(model)
    assert eval(names["nnsight"].removesuffix(".output"), {"model": model}) is blocks[1]
    assert model.base_model.get_submodule(names["delphi"]) is blocks[1]
    assert names == site_names(SITE)
    assert site_names("blocks.14.hook_resid_pre") == {
        "transformer_lens": "blocks.14.hook_resid_pre",
        "circuit_tracer": "hook_resid_pre",
        "nnsight": "model.model.layers[14].input",
        "delphi": "layers.13",
        "llama.cpp": "direction.13",
    }
    assert "delphi" not in site_names("blocks.0.hook_resid_pre")


def test_saebench_gets_what_it_reads(sae: TemporalSAE) -> None:
    bench = saebench_sae(sae, "pythia-70m-deduped").to(dtype=torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    assert (bench.dtype, bench.W_dec.shape, bench.W_enc.shape) == (torch.float64, (N, 16), (16, N))
    torch.testing.assert_close(bench(x), bench.decode(bench.encode(x)))
    torch.testing.assert_close(bench.encode(x), sae.encode(x))
    assert (bench.cfg.hook_layer, bench.cfg.hook_name, bench.cfg.metadata.hook_name) == (1, SITE, SITE)
    bench.cfg.dtype = "bfloat16"
    assert json.loads(json.dumps(bench.cfg.to_dict()))["metadata"]["model_name"] == "pythia-70m-deduped"
    sae.float()


TOLD = {"hook_name": SITE, "context_size": 64, "prepend_bos": False, "dataset_path": "some/texts"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "topk", "k": 3}, "topk"),
        ({"architecture": "jumprelu", "threshold": 0.25}, "jumprelu"),
        ({"architecture": "standard", "apply_b_dec_to_input": False}, "standard"),
    ],
)
def test_saebench_is_told_what_a_published_sae_is(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    lens = published(tmp_path / "lens", **changes)
    cfg = saebench_sae(lens, "pythia-70m-deduped").cfg
    assert (cfg.architecture, cfg.apply_b_dec_to_input) == (said, changes.get("apply_b_dec_to_input", True))
    assert (cfg.context_size, cfg.prepend_bos, cfg.dataset_path) == (64, False, "some/texts")
    assert (cfg.metadata.context_size, cfg.metadata.prepend_bos, cfg.d_in, cfg.d_sae) == (64, False, 16, 8)
    assert saebench_sae(lens, "pythia-70m-deduped", context_size=32).cfg.context_size == 32
    lens.training_info["sae_lens"] |= {"context_size": "64", "prepend_bos": "no", "dataset_path": None}
    cfg = saebench_sae(lens, "pythia-70m-deduped").cfg
    assert (cfg.context_size, cfg.prepend_bos, cfg.dataset_path) == (128, True, "")


def test_an_sae_that_normalises_tokens_is_not_given_to_saebench(tmp_path: Path) -> None:
    lens = published(tmp_path, architecture="topk", k=3, normalize_activations="layer_norm")
    refuses(r"normalises every token \(layer_norm\), and SAEBench decodes codes without", saebench_sae, lens, "gpt2")


def published(folder: Path, *, threshold: float | None = None, **fields: Any) -> TemporalSAE:
    """An SAE of 8 latents as sae_lens saves it."""
    weights = {"W_enc": torch.randn(16, 8), "W_dec": torch.randn(8, 16), "b_enc": torch.zeros(8)}
    weights |= {"b_dec": torch.zeros(16)} | ({} if threshold is None else {"threshold": torch.full((8,), threshold)})
    metadata = {"sae_lens_version": "6.0.0", **TOLD}
    return load_sae(write_folder(folder, {"d_in": 16, "d_sae": 8, "metadata": metadata, **fields}, weights))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    to = tmp_path / "to"

    def failing() -> None:
        with new_folder(to) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert not list(tmp_path.iterdir())
    # What is beside it, under any name, is somebody else's; a link is not written through.
    (tmp_path / "to.tmp").mkdir()
    (tmp_path / "to.tmp" / "thesis.txt").write_text("x")
    with new_folder(to) as folder:
        (folder / "whole").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to", "to.tmp"]
    assert (tmp_path / "to.tmp" / "thesis.txt").is_file()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(TsaeError, match="link: is a link"), new_folder(tmp_path / "link"):
        raise AssertionError


def test_codes_of_another_sae_or_of_none_are_not_exported(
    features: FeatureTable, sae: TemporalSAE, tmp_path: Path
) -> None:
    names = Neuronpedia("m", "14-s", "u")
    told = features.info["sae"]
    for change in ({"weights": "other"}, {"n_experts": N}):
        other = replace(features, info={**features.info, "sae": {**told, **change}})
        refuses("was encoded with another SAE", write_neuronpedia, other, sae, tmp_path, names, {})
    refuses("no feature 7; there are 0 to 6", write_neuronpedia, features, sae, tmp_path, names, {}, chosen=[7])
    n = int((features.reader == 0).sum())
    alone = replace(
        features, row_offsets=features.row_offsets[: n + 1], reader=features.reader[:n],
        trajectory=features.trajectory[:n],
    )  # fmt: skip
    with pytest.raises(TsaeError, match="fewer than one sequence"):
        write_delphi(alone, tmp_path, hookpoint="layers.1", model_name="m", reader="run")
    # Each feature once, and no logits where some of them are not known.
    described = pd.DataFrame({name: [None] * N for name in ("promotes", "promotes_by", "suppresses", "suppresses_by")})
    write_neuronpedia(features, sae, tmp_path, names, {}, chosen=[2, 2], described=described)
    (neuron,) = lines(tmp_path / "m" / "14-s" / "features" / "batch-0.jsonl.gz")
    assert neuron["pos_str"] == []


def test_an_export_killed_before_its_command_is_known_may_be_made_again(
    sae: TemporalSAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae.save(tmp_path / "sae")
    command = ["export", "--sae", str(tmp_path / "sae"), "--to", str(tmp_path / "out")]
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("tsae.commands.report.say_wrote", killed)
        with pytest.raises(SystemExit):
            main(command)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written
    main(command)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written


def test_the_command_exports_and_refuses_folders_with_something_in_them(
    features: FeatureTable, sae: TemporalSAE, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sae.save(tmp_path / "sae")
    given = ["export", "--sae", str(tmp_path / "sae"), "--features", features.origin]

    def export(to: str, *more: str) -> list[str]:
        main([*given, "--to", str(tmp_path / to), *more])
        found = sorted(str(path.relative_to(tmp_path / to)) for path in (tmp_path / to).rglob("*") if path.is_file())
        assert found.count("manifest.json") == 1
        return [name for name in found if name != "manifest.json"]

    assert export("delphi", "--format", "delphi", "--model", "m", "--context", "8")[-1] == "layers.1/config.json"
    assert len(export("np", "--format", "neuronpedia", "--model", "m", "--creator", "u", "--choose", "2")) == 3
    assert export("gguf", "--format", "gguf", "--choose", "2", "3") == ["feature-2.gguf", "feature-3.gguf"]
    export("vectors", "--format", "safetensors", "--choose", "2")
    # The same command may replace its own output, and no other folder.
    assert export("vectors", "--format", "safetensors", "--choose", "3") == ["feature-3.safetensors"]
    tokens, values = features.column(3)
    typical = values[features.span_mask("response")[tokens]].mean()
    for to in ("delphi", "np", "gguf"):
        export(to, "--format", "saelens")
        assert export(to, "--format", "saelens") == ["cfg.json", "sae_weights.safetensors"]
    found = SteeringVector.load(tmp_path / "vectors" / "feature-3.safetensors")
    (tmp_path / "np" / "notes.txt").write_text("x")
    for to, name in (("delphi", "notes/config.json"), ("gguf", "a/b/c/features/batch-0.jsonl.gz")):
        (tmp_path / to / name).parent.mkdir(parents=True)
        (tmp_path / to / name).write_text("x")
    assert found.info["scale"] == pytest.approx(typical)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for to, words, said in (
        ("mine", [], "mine: is not empty. Give another folder"),
        ("np", [], "np: is an export, and holds notes.txt, which no export wrote. Move that away"),
        ("delphi", [], "delphi: is an export, and holds notes/config.json, which no export wrote"),
        ("gguf", [], "gguf: is an export, and holds a/b/c/features/batch-0.jsonl.gz, which no export wrote"),
        ("new", ["--format", "neuronpedia"], "--model, --creator are missing"),
        ("new", ["--format", "gguf"], "no features are named. Name them with --choose"),
        ("new", ["--format", "safetensors", "--choose", "7"], "--choose: no feature 7; there are 0 to 6"),
        ("new", ["--format", "delphi", "--model", "m", "--context", "0"], "context=0 is less than 1"),
        ("new", ["--format", "neuronpedia", "--model", "../m", "--creator", "u"], "'../m' is not an id"),
    ):
        with pytest.raises(SystemExit):
            export(to, *words)
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "np" / "notes.txt").read_text() == "x"
