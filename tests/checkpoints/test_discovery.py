"""Finding checkpoints, adapters over one base, and what never happens: a network call for a path, or a pickle read."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tsae
from support.builders import ARCHITECTURES, make_rollouts, save_model, save_perturbed, save_series
from support.checkpoints import IDS, cached, edit, loads_of, save_adapter
from support.refusals import refuses
from support.servers import hub_here
from tsae.checkpoints.loading import Checkpoint, ModelLoader, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import load_tokenizer
from tsae.errors import TsaeError


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    """The oracle: what peft itself computes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(IDS).logits


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """base/ and out/checkpoint-5, out/checkpoint-10, as a LoRA run leaves them."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(llama, folder / "base")
    for step in (10, 5):
        save_adapter(folder / "base", folder / "out" / f"checkpoint-{step}", seed=step)
    return folder


# --- adapters


@pytest.fixture
def adapter(adapters: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(adapters / "out" / "checkpoint-5", tmp_path / "adapter"))


def test_adapters_share_a_base_that_is_loaded_once(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = loads_of(monkeypatch)
    series = CheckpointSeries.load(adapters / "out")
    assert [(c.id, c.step) for c in series] == [("base", 0), ("out-00005", 5), ("out-00010", 10)]
    assert series.base.path == str(adapters / "base")
    loader = ModelLoader()
    found = [loader.load(c)(IDS).logits for c in series]
    assert len(loads) == 1
    assert (found[1] - found[2]).abs().max() > 0.1


def test_an_adapter_alone_finds_its_base(adapters: Path) -> None:
    model = Checkpoint("a", str(adapters / "out" / "checkpoint-5")).load_model()
    assert torch.equal(model(IDS).logits, peft_logits(adapters / "base", adapters / "out" / "checkpoint-5"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("qwen2", "qwen3"))) for name in ARCHITECTURES],
)
def test_adapters_are_read_by_both_backends(architecture: str, tmp_path: Path) -> None:
    from tsae.checkpoints.bridge import TransformerLensReader
    from tsae.checkpoints.hooks import HuggingFaceReader

    base = save_model(tmp_path / "base", architecture)
    checkpoint = Checkpoint("a", str(save_adapter(base, tmp_path / "adapter")))
    site, mask = "blocks.1.hook_resid_post", torch.ones_like(IDS)
    found = HuggingFaceReader(checkpoint.load_model(), [site]).read(IDS, mask)[site]
    whole = HuggingFaceReader(Checkpoint("b", str(base)).load_model(), [site]).read(IDS, mask)[site]
    assert (found - whole).abs().max() > 0.01
    if architecture == "gpt2":  # The bridge reads the weights of its attention past the adapter.
        refuses("computes other logits through TransformerLens", TransformerLensReader, checkpoint, [site])
        return
    reader = TransformerLensReader(checkpoint, [site])
    torch.testing.assert_close(reader.read(IDS, mask)[site], found, atol=1e-5, rtol=0)
    torch.testing.assert_close(reader.logits(IDS, mask), peft_logits(base, tmp_path / "adapter"), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_another_base_names_both(adapters: Path, tmp_path: Path) -> None:
    """By its path, and by its weights where the folders have the same name."""
    other = save_model(tmp_path / "other", seed=3)
    same_name = save_perturbed(adapters / "base", tmp_path / "base")
    for wrong in (other, same_name):
        with pytest.raises(TsaeError, match="is an adapter of") as error:
            CheckpointSeries.load(wrong, adapters / "out")
        assert str(adapters / "base") in str(error.value)
        assert str(wrong) in str(error.value)
    records = [{"id": "base", "path": str(other)}, {"id": "a", "path": str(adapters / "out/checkpoint-5"), "run": "a"}]
    refuses("is an adapter of", lambda: CheckpointSeries.load(save_series(tmp_path, records)))
    copied = Path(shutil.copytree(adapters / "base", tmp_path / "copy" / "moved"))
    assert len(CheckpointSeries.load(copied, adapters / "out")) == 3  # The same weights under another name.


def test_names_of_a_base_that_is_elsewhere(adapter: Path, adapters: Path) -> None:
    for named, fits in (("/cluster/models/base", True), ("org/base", True), (None, True), ("org/other", False)):
        edit(adapter / "adapter_config.json", base_model_name_or_path=named)
        if fits:
            assert len(CheckpointSeries.load(adapters / "base", adapter)) == 2
        else:
            with pytest.raises(TsaeError, match=f"is an adapter of {named}, but the base of the series is"):
                CheckpointSeries.load(adapters / "base", adapter)
    for named, message in (
        (None, "does not say which model"),
        ("../base", r"is an adapter of \.\./base"),
        *((odd, "is not the name of a model") for odd in ("a\0b", "a" * 5000, 7)),
    ):
        edit(adapter / "adapter_config.json", base_model_name_or_path=named)
        refuses(message, CheckpointSeries.load, adapter)


def test_of_a_gguf_file_an_adapter_may_know_the_folder_only(adapter: Path, adapters: Path, tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "model.Q4.gguf").write_bytes(b"GGUF")
    for named, fits in ((tmp_path / "llm", True), ("/elsewhere/llm", True), (adapters / "base", False)):
        edit(adapter / "adapter_config.json", base_model_name_or_path=str(named))
        if fits:
            assert len(CheckpointSeries.load(tmp_path / "llm" / "model.Q4.gguf", adapter)) == 2
        else:
            refuses("but the base of the series is", CheckpointSeries.load, tmp_path / "llm" / "model.Q4.gguf", adapter)


def test_an_adapter_with_damaged_weights(adapter: Path) -> None:
    content = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(content[:-8])
    refuses("cannot be put on", lambda: Checkpoint("a", str(adapter)).load_model())
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(TsaeError, match=r"only pickled weights \(adapter_model\.bin\), which are never loaded"):
        Checkpoint("a", str(adapter)).load_model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "type PREFIX_TUNING, expected one of LORA"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changed its base"),
        ({"layer_replication": [[0, 2]]}, "uses layer_replication"),
    ],
)
def test_adapters_that_cannot_be_put_on_a_base(adapter: Path, changes: dict[str, Any], message: str) -> None:
    edit(adapter / "adapter_config.json", **changes)
    refuses(message, CheckpointSeries.load, adapter)


def test_a_folder_with_an_adapter_and_a_model_is_refused_unless_it_is_torchtunes(
    adapters: Path, tmp_path: Path
) -> None:
    both = Path(shutil.copytree(adapters / "base", tmp_path / "epoch_0"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapters / "out" / "checkpoint-5" / file, both)
    refuses("holds both an adapter", CheckpointSeries.load, both)
    (both / "adapter_model.pt").write_bytes(b"")
    found = CheckpointSeries.load(tmp_path)
    assert [(Path(c.path).name, c.step) for c in found] == [("base", 0), ("epoch_0", 1)]
    assert any("lora_A" in name for name in found.checkpoints[1].load_model().state_dict())


def test_an_adapter_has_its_own_tokenizer_or_its_bases(adapter: Path, adapters: Path) -> None:
    base = load_tokenizer(Checkpoint("base", str(adapters / "base")))
    assert load_tokenizer(Checkpoint("a", str(adapter))).get_vocab() == base.get_vocab()
    base.add_tokens(["x"])
    base.save_pretrained(adapter)
    assert "x" in load_tokenizer(Checkpoint("a", str(adapter))).get_vocab()


def test_the_scale_of_an_adapter_counts_in_its_fingerprint(adapter: Path, adapters: Path) -> None:
    before = weights_fingerprint(Checkpoint("a", str(adapter)))
    assert before == weights_fingerprint(Checkpoint("a", str(adapters / "out" / "checkpoint-5")))
    edit(adapter / "adapter_config.json", lora_alpha=16)
    assert weights_fingerprint(Checkpoint("a", str(adapter))) != before


# --- sources


def test_paths_one_by_one(llama: Path, tmp_path: Path) -> None:
    for name in ("base", "a/run/checkpoint-20", "b/run/checkpoint-20", "b/run/checkpoint-100", "final"):
        shutil.copytree(llama, tmp_path / name)
    given = [tmp_path / name for name in ("base", "b/run", "a/run/checkpoint-20", "final")]
    found = CheckpointSeries.load(*given)
    assert [(c.id, c.run, c.step) for c in found] == [
        ("base", None, 0),
        ("b-run-00020", "b-run", 20),
        ("b-run-00100", "b-run", 100),
        ("a-run-00020", "a-run", 20),
        ("final", "final", 0),
    ]
    assert found.notes == ()
    # A step of the run is not taken for its base in silence.
    alone = CheckpointSeries.load(tmp_path / "b/run/checkpoint-20", tmp_path / "b/run/checkpoint-100")
    assert [c.id for c in alone] == ["run-00020", "run-00100"]
    assert alone.notes[0].startswith("run-00020 (step 20) stands in for the base")
    other = CheckpointSeries.load(tmp_path / "a/run/checkpoint-20", tmp_path / "b/run/checkpoint-100")
    assert [c.id for c in other] == ["base", "run-00100"]
    refuses("come twice", CheckpointSeries.load, tmp_path / "base", tmp_path / "final", tmp_path / "final")
    refuses("no checkpoints given", CheckpointSeries.load)
    save_series(tmp_path, [{"id": "base", "path": "base"}])
    refuses(r"holds a series\.json", CheckpointSeries.load, tmp_path, tmp_path / "final")


def test_folders_of_verl(llama: Path, tmp_path: Path) -> None:
    for step in (50, 100):
        shutil.copytree(llama, tmp_path / f"maths/dapo/global_step_{step}/actor/huggingface")
    (tmp_path / "maths/dapo/global_step_150/actor").mkdir(parents=True)
    (tmp_path / "maths/dapo/global_step_150/actor/model_world_size_8_rank_0.pt").touch()
    given = [f"maths/dapo/global_step_{step}/actor/huggingface" for step in (50, 100)]
    for sources in ([llama, tmp_path / "maths"], [llama, *(tmp_path / place for place in given)]):
        series = CheckpointSeries.load(*sources)
        assert [(c.id, c.run, c.step) for c in series] == [
            ("base", None, 0), ("dapo-00050", "dapo", 50), ("dapo-00100", "dapo", 100)
        ]  # fmt: skip
        series[series.runs[0] + "-00100"].load_tokenizer()
    assert CheckpointSeries.load(llama, tmp_path).notes == (
        "left out, as their weights are FSDP shards: steps 150 of dapo.",
    )
    (lone,) = step = CheckpointSeries.load(tmp_path / given[0])
    assert (lone.id, lone.step) == ("dapo-00050", 50)  # and never "base", by which bands would be measured on it
    assert "stands in for the base" in step.notes[0]
    alone = CheckpointSeries.load(*(tmp_path / place for place in given))
    assert alone.base.step == 50
    assert "stands in for the base" in alone.notes[0]
    refuses("all as FSDP shards", CheckpointSeries.load, tmp_path / "maths/dapo/global_step_150")


def test_steps_in_the_revisions_of_a_repository(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ref(kind: str, name: str) -> dict[str, str]:
        return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": "c"}

    def commit(title: str, id: str) -> dict[str, Any]:
        return {"id": id, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": title, "message": ""}

    branches = [ref("heads", name) for name in ("main", "step_300", "step_20", "step-40-tokens2B")]
    titles = ["Model save", *(f"Training in progress, step {n}" for n in (100, 50, 50)), "initial commit"]
    with hub_here(monkeypatch, tmp_path / "cache") as hub:
        hub.add("org/model", llama)
        hub.listed["org/model"] = {
            "refs": {"branches": branches, "tags": [ref("tags", "v1-checkpoint-7")], "converts": []},
            "commits": [commit(title, f"{i}" * 40) for i, title in enumerate(titles)],
        }

        def found(source: str) -> list[tuple[Any, ...]]:
            series = CheckpointSeries.load(llama, source)
            assert series.base.path == str(llama)
            return [(c.id, c.run, c.step, c.revision) for c in list(series)[1:]]

        steps = [("model-00020", "model", 20, "step_20"), ("model-00300", "model", 300, "step_300")]
        assert found("org/model@step_*") == steps
        every = [("model-00007", "model", 7, "v1-checkpoint-7"), steps[0],
                 ("model-00040", "model", 40, "step-40-tokens2B"), steps[1]]  # fmt: skip
        assert found("org/model@*") == every
        last = [("model-00050", "model", 50, "2" * 40), ("model-00100", "model", 100, "1" * 40)]
        assert found("org/model@commits") == last
        assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing is fetched that is not asked for
        refuses(r"no branch or tag names a step; there are: main", CheckpointSeries.load, llama, "org/model@m*")
        refuses("does not list its revisions", CheckpointSeries.load, llama, "org/other@*")
        branches.append(ref("heads", "step20"))
        refuses("step20 and step_20 are both of step 20", CheckpointSeries.load, llama, "org/model@*")
        assert hub.refused == []


def test_a_series_of_adapters_is_written_and_read_back(adapters: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapters, tmp_path / "moved"))
    CheckpointSeries.load(folder / "base", folder / "out").save(folder)
    content = json.loads((folder / "series.json").read_text())
    assert [record["path"] for record in content["checkpoints"]] == ["base", "out/checkpoint-5", "out/checkpoint-10"]
    assert "base" not in content["checkpoints"][1]
    again = CheckpointSeries.load(folder)
    assert again["out-00005"].base == again.base
    assert torch.equal(
        again["out-00005"].load_model()(IDS).logits, peft_logits(adapters / "base", adapters / "out" / "checkpoint-5")
    )


def test_the_model_that_a_trainer_saves_in_the_end_is_left_out(llama: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(llama, tmp_path / "out"))
    for step in (10, 20):
        shutil.copytree(llama, out / f"checkpoint-{step}")
    found = CheckpointSeries.load(llama, out)
    assert [c.id for c in found] == ["base", "out-00010", "out-00020"]
    assert "itself is left out" in found.notes[0]


def test_the_folder_that_one_stands_in(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(llama, tmp_path / "out" / "checkpoint-7")
    shutil.copytree(llama, tmp_path / "out" / "checkpoint-9")
    monkeypatch.chdir(tmp_path / "out")
    assert [c.id for c in CheckpointSeries.load(".")] == ["out-00007", "out-00009"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/model", ("org/model", None, None, "model", 0)),
        ("org/model@step512", ("org/model", "step512", None, "model-00512", 512)),
        ("org/model@refs/pr/3", ("org/model", "refs/pr/3", None, "refs-pr-3", 0)),
        ("org/model/a/checkpoint-30", ("org/model", None, "a/checkpoint-30", "a-00030", 30)),
        ("org/model@v1.0/b", ("org/model", "v1.0", "b", "b", 0)),
    ],
)
def test_hugging_face_ids(source: str, expected: tuple[Any, ...], llama: Path) -> None:
    found = list(CheckpointSeries.load(llama, source))[1]
    assert (found.path, found.revision, found.subfolder, found.id, found.step) == expected


def test_revisions_of_one_repository(llama: Path) -> None:
    found = CheckpointSeries.load("org/model@step0", "org/model@step1", "org/model@step512")
    assert [(c.id, c.revision) for c in found] == [
        ("base", "step0"),
        ("model-00001", "step1"),
        ("model-00512", "step512"),
    ]


def test_a_mistyped_path_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in ("runs/grpo", "runs/grpo/checkpoint-10", "./grpo/out", "/no/where", "grpo", "a@b"):
        refuses("no such folder", CheckpointSeries.load, source)
    refuses("no such checkpoint", lambda: Checkpoint("a", "runs/grpo").load_model())


# --- no network, no pickles, no way out of a folder


def test_a_path_never_causes_a_network_call(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a connection to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(AssertionError, match="a connection"):
        socket.create_connection(("127.0.0.1", 9))
    loader = ModelLoader()
    for checkpoint in CheckpointSeries.load(adapters / "out"):
        loader.load(checkpoint)
        checkpoint.load_tokenizer()
        weights_fingerprint(checkpoint)


_OFFLINE = """
import socket, sys
asked = []
def refuse(*args, **kwargs):
    asked.append(args)
    raise ConnectionError("no network")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
from tsae import CheckpointSeries, TsaeError
from tsae.checkpoints.loading import ModelLoader
series, loader = CheckpointSeries.load(*sys.argv[1:]), ModelLoader()
for checkpoint in series:
    try:
        model, tokenizer = loader.load(checkpoint), checkpoint.load_tokenizer()
        print(checkpoint.id, model.config.num_hidden_layers, len(tokenizer), len(asked))
    except TsaeError as error:
        print(len(asked) > 0, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_cached_repositories_need_no_network(adapter: Path, adapters: Path, tmp_path: Path, offline: str) -> None:
    """With and without HF_HUB_OFFLINE: what is in the cache is not even asked about."""
    edit(adapter / "adapter_config.json", base_model_name_or_path="org/tiny")
    for file in (adapters / "base").glob("tokenizer*"):
        shutil.copy(file, adapter)
    only_config = tmp_path / "config-only"
    only_config.mkdir()
    shutil.copy(adapters / "base" / "config.json", only_config)
    models = {"main": {"": adapters / "base"}, "later": {"checkpoint-8": adapters / "base"}, "half": {"": only_config}}
    cached(tmp_path / "hub", "org/tiny", models)
    cached(tmp_path / "hub", "org/tiny-lora", {"main": {"": adapter}})
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE, "org/tiny", "org/tiny@later/checkpoint-8", "org/tiny-lora", "org/tiny@half",
         "org/nothing"],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": offline},
        capture_output=True, text=True, timeout=900, cwd=tmp_path,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:3] == ["base 3 20 0", "later-00008 3 20 0", "tiny-lora 3 20 0"], done.stderr[-2000:]
    # Only what is missing makes it ask, where it may.
    assert lines[3].startswith(f"{offline == '0'} org/tiny@half: no weights in safetensors are in the cache")
    assert lines[4].startswith(f"{offline == '0'} org/nothing: neither a folder here nor in the Hugging Face cache")


def test_what_lies_beside_the_weights_is_not_taken_for_them(llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(llama, tmp_path / "model"))
    (path / "model.safetensors").unlink()
    nothing = r"holds no weights; expected model\.safetensors"
    for file, said in (
        *((name, nothing) for name in ("tokenizer.json", "optimizer.pt", "training_args.bin", "rng_state_0.pth")),
        ("pytorch_model.bin", r"only pickled weights \(pytorch_model\.bin\)"),
    ):
        (path / file).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
        refuses(f"{path}.*{said}", Checkpoint("a", str(path)).load_model)


def test_shards_are_files_of_the_same_folder(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = Path(shutil.copytree(llama, tmp_path / "model"))
    (path / "model.safetensors").unlink()
    whole = Checkpoint("a", str(llama)).load_model()
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(path, max_shard_size="20KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert len(set(content["weight_map"].values())) > 1
    assert torch.equal(Checkpoint("a", str(path)).load_model()(IDS).logits, whole(IDS).logits)
    shutil.copy(llama / "model.safetensors", tmp_path / "outside.safetensors")
    for name, message in (
        ("../outside.safetensors", "safetensors files of the same folder"),
        ("pytorch_model.bin", "safetensors files of the same folder"),
        ("lost.safetensors", r"lacks 1 of \d+ weight files \(first: lost\.safetensors\)"),
    ):
        changed = {**content["weight_map"], "lm_head.weight": name}
        index.write_text(json.dumps({**content, "weight_map": changed}))
        refuses(message, Checkpoint("a", str(path)).load_model)


def test_a_subfolder_stays_in_its_folder(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "inside" / "model")
    assert Checkpoint("a", str(tmp_path / "inside"), subfolder="model").load_model() is not None
    for below in ("../outside", str(llama)):
        refuses("no such checkpoint", Checkpoint("a", str(tmp_path / "inside"), subfolder=below).load_model)


def test_sampling_leaves_a_loaded_model_as_it_was(adapters: Path, tmp_path: Path) -> None:
    """What ends a response stands in its generation_config.json, and counts in the second sampling as in the first."""
    folder = Path(shutil.copytree(adapters, tmp_path / "ends"))
    (folder / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(10)], "top_k": 1}))
    edit(folder / "out" / "checkpoint-5" / "adapter_config.json", base_model_name_or_path=str(folder / "base"))
    series = CheckpointSeries.load(folder / "base", folder / "out" / "checkpoint-5")
    problems = tsae.testbed.generate_problems("medium", 6, 0)
    config, loader = tsae.SamplingConfig(n_samples=4, max_new_tokens=8), ModelLoader()
    for checkpoint in (series.base, *series):
        alone = tsae.sample(checkpoint, problems, config, progress=False)
        assert tsae.sample(checkpoint, problems, config, loader=loader, progress=False).table.equals(alone.table)
        assert (alone.frame.finish_reason == "stop").mean() > 0.8
    assert loader.load(series.base).generation_config.eos_token_id == [*range(10)]


def test_quantised_weights_are_said_and_refused_in_words(tmp_path: Path) -> None:
    save_model(tmp_path / "plain")
    for method, words in (("bitsandbytes", {"load_in_4bit": True}), ("awq", {"bits": 4, "version": "gemm"})):
        folder = save_model(tmp_path / method)
        edit(folder / "config.json", quantization_config={"quant_method": method, **words})
        series = CheckpointSeries.load(tmp_path / "plain", folder)
        assert f"({method}, 4 bits)" in series.notes[-1]
        assert "hold the rounding too" in series.notes[-1]
        installed = importlib.util.find_spec("bitsandbytes" if method == "bitsandbytes" else "gptqmodel")
        if installed is None:
            with pytest.raises(TsaeError, match=rf"quantised \({method}, 4 bits\) and cannot be loaded.*Install what"):
                ModelLoader().load(Checkpoint("x", str(folder)))
    assert CheckpointSeries.load(tmp_path / "plain", save_model(tmp_path / "other")).notes == ()


def test_placeholders_of_images_are_refused(tmp_path: Path) -> None:
    rollouts = make_rollouts(("base",), n_problems=2)
    used = rollouts.tokens(0)[1][0]
    for id in (int(used), 16_000):
        folder = save_model(tmp_path / f"sees-{id}")
        edit(folder / "config.json", image_token_id=id)
        series = CheckpointSeries.load(save_series(tmp_path / f"sees-{id}", [{"id": "base", "path": "."}]))
        if id == used:
            with pytest.raises(TsaeError, match=rf"token {id}, which stands for image input; images, video and sound"):
                tsae.capture(series, rollouts, to=tmp_path / "acts", progress=False)
        else:
            tsae.capture(series, rollouts, to=tmp_path / "acts", progress=False)
