"""Checkpoints: what hooks read is what the Hugging Face modules compute, whatever the backend and the padding."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.builders import (
    ARCHITECTURES,
    BOS,
    EOS,
    MIXTURES,
    N_LAYERS,
    flip_middle,
    save_model,
    save_perturbed,
    save_series,
)
from support.checkpoints import edit
from support.refusals import refuses
from tsae.checkpoints.hooks import HuggingFaceReader, decoder_blocks, positions
from tsae.checkpoints.loading import Checkpoint, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.sites import Site
from tsae.checkpoints.tokenizers import load_tokenizer, tokenizer_fingerprint
from tsae.errors import TsaeError

SITES = [f"blocks.{layer}.hook_resid_{point}" for layer in range(N_LAYERS) for point in ("pre", "post")]
TEXTS = [[BOS, 3, 10, 5, 13], [BOS, 1, 12, 2, 11, 9, 13, 1, 12, 2, 14, 2, 15, EOS], [BOS, 7, 13, 16, 7, EOS], [BOS, 4]]


def checkpoint(path: Path, id: str = "base") -> Checkpoint:
    return Checkpoint(id=id, path=str(path))


def load_model(path: Path, **options: Any) -> Any:
    return checkpoint(path).load_model(**options)


def padded(texts: list[list[int]], side: str, fill: int = 18) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(text) for text in texts) + 2
    ids, mask = torch.full((len(texts), width), fill), torch.zeros((len(texts), width), dtype=torch.long)
    for row, text in enumerate(texts):
        where = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, where] = torch.tensor(text)
        mask[row, where] = 1
    return ids, mask


def final_norm(model: Any) -> torch.nn.Module:
    return model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm


def module_outputs(model: Any, text: list[int]) -> dict[str, torch.Tensor]:
    """The oracle: Hugging Face's hidden states, and a plain hook for the last block, whose entry there is normed."""
    last = model.transformer.h[-1] if hasattr(model, "transformer") else model.model.layers[-1]
    kept: list[torch.Tensor] = []
    handle = last.register_forward_hook(lambda m, i, out: kept.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    handle.remove()
    torch.testing.assert_close(final_norm(model)(kept[0]), hidden[-1])
    posts = [*hidden[1:-1], kept[0]]
    found = {f"blocks.{i}.hook_resid_pre": hidden[i][0] for i in range(len(posts))}
    return found | {f"blocks.{i}.hook_resid_post": post[0] for i, post in enumerate(posts)}


@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES)
def test_one_text_alone_is_read_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path / architecture, architecture))
    reader = HuggingFaceReader(model, SITES)
    for text in TEXTS:
        found = reader.read(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long))
        expected = module_outputs(model, text)
        assert found.keys() == expected.keys()
        for site in SITES:
            assert torch.equal(found[site][0], expected[site]), site


def test_positions_count_real_tokens(tmp_path: Path) -> None:
    ids, mask = padded(TEXTS, "left")
    assert positions(mask)[0].tolist() == [0] * 11 + [0, 1, 2, 3, 4]
    assert positions(padded(TEXTS, "right")[1])[0].tolist() == [0, 1, 2, 3, 4] + [4] * 11
    # What the tests above would miss if nothing depended on positions: GPT-2 with its default ones is far off.
    model = load_model(save_model(tmp_path / "gpt2", "gpt2"))
    with torch.no_grad():
        default = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
    expected = module_outputs(model, TEXTS[0])["blocks.0.hook_resid_post"]
    assert (default[0][mask[0].bool()] - expected).abs().max() > 0.1


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bridge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(reader through the bridge, an untouched Hugging Face model)."""
    from tsae.checkpoints.bridge import TransformerLensReader

    path = save_model(tmp_path_factory.mktemp("bridge") / request.param, request.param)
    return TransformerLensReader(checkpoint(path), SITES), load_model(path)


def test_the_bridge_reads_one_text_alone_bit_for_bit(bridge: Any) -> None:
    """As Hugging Face computes it in eager attention, which the bridge runs in.

    GPT-2's product of queries, keys and values the bridge takes apart, so that its sums are in another order.
    """
    reader, model = bridge
    exact = model.config.model_type != "gpt2"
    eager = load_model(Path(model.config._name_or_path), attention="eager")
    for text in TEXTS:
        found = reader.read(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long))
        for site, expected in module_outputs(eager, text).items():
            torch.testing.assert_close(found[site][0], expected, atol=0 if exact else 1e-5, rtol=0, msg=site)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_bridge_reads_the_same(bridge: Any, side: str) -> None:
    reader, model = bridge
    ids, mask = padded(TEXTS, side)
    found = reader.read(ids, mask)
    hooks = HuggingFaceReader(model, SITES).read(ids, mask)
    assert list(found) == SITES
    for row, text in enumerate(TEXTS):
        real = mask[row].bool()
        for site, expected in module_outputs(model, text).items():
            torch.testing.assert_close(found[site][row][real], expected, atol=1e-5, rtol=0, msg=site)
            torch.testing.assert_close(found[site][row][real], hooks[site][row][real], atol=1e-5, rtol=0, msg=site)


def test_the_bridge_gives_the_models_logits_and_rewrites_them(bridge: Any) -> None:
    reader, model = bridge
    ids, mask = padded(TEXTS, "left")
    plain = reader.logits(ids, mask)
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([text])).logits[0]
        torch.testing.assert_close(plain[row][mask[row].bool()], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(reader.logits(ids, mask, {site: lambda value: value for site in SITES}), plain)
    for site in SITES:
        moved = reader.logits(ids, mask, {site: lambda value: value + 1.0 * torch.arange(value.shape[-1])})
        assert (moved - plain)[mask.bool()].abs().max() > 1e-3, site
    # Replacing what leaves the last block by zero leaves the unembedding of a normed zero, the same at every token.
    zeroed = reader.logits(ids, mask, {SITES[-1]: torch.zeros_like})[mask.bool()]
    with torch.no_grad():
        expected = model.lm_head(final_norm(model)(torch.zeros(1, model.config.get_text_config().hidden_size)))
    torch.testing.assert_close(zeroed, expected.expand_as(zeroed), atol=1e-5, rtol=1e-5)
    assert torch.equal(reader.logits(ids, mask), plain)  # no intervention outlives its call


@pytest.mark.slow
def test_a_gguf_model_can_be_trained_and_saved(smollm2: Checkpoint, tmp_path: Path) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    model = smollm2.load_model(dtype="bfloat16")
    validate_quantization_for_training(model)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_both_backends_agree_on_smollm2(smollm2: Checkpoint) -> None:
    """Every fifth layer and the last of a real model: alone bit for bit, padded up to rounding."""
    from tsae.checkpoints.bridge import TransformerLensReader

    model, tokenizer = smollm2.load_model(), load_tokenizer(smollm2)
    layers = [*range(0, len(decoder_blocks(model)), 5), len(decoder_blocks(model)) - 1]
    sites = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    texts = [list(tokenizer(t)["input_ids"]) for t in ("Natalia sold 48 clips in May.", "How many? 48 / 2 = 24 clips.")]
    reader, bridged = HuggingFaceReader(model, sites), TransformerLensReader(smollm2, sites)
    ids, mask = padded(texts, "right", fill=0)
    a, b = reader.read(ids, mask), bridged.read(ids, mask)
    for row, text in enumerate(texts):
        expected, real = module_outputs(model, text), mask[row].bool()
        alone = reader.read(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long))
        for site in sites:
            assert torch.equal(alone[site][0], expected[site]), site
            for values in (a, b):
                # Relative to the token's norm, which is in the thousands for the first.
                error = (values[site][row][real] - expected[site]).norm(dim=1) / expected[site].norm(dim=1)
                assert error.max() < 1e-5, site


def test_models_whose_weights_are_elsewhere_are_read(llama: Path) -> None:
    """accelerate's hooks bring every module's weights when it runs, also where the pass is stopped early."""
    from accelerate import cpu_offload

    model, text = load_model(llama), torch.tensor([TEXTS[1]])
    site = "blocks.1.hook_resid_post"
    expected = HuggingFaceReader(model, [site]).read(text, torch.ones_like(text))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    reader = HuggingFaceReader(model, [site])
    for _ in range(2):
        assert torch.equal(reader.read(text, torch.ones_like(text))[site], expected[site])
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_is_spread_over_the_devices_there_are(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils

    from tsae.checkpoints.hooks import spread

    model = load_model(llama)
    spread(model)
    assert model.hf_device_map
    monkeypatch.setattr(accelerate.utils, "get_balanced_memory", lambda *_, **__: {"cpu": 1000})
    refuses("does not fit into the memory of all devices together", lambda: spread(load_model(llama)))


def test_layers_above_the_last_site_are_skipped(llama: Path) -> None:
    model = load_model(llama)
    ran: list[int] = []
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda m, i, o, number=number: ran.append(number))
    reader = HuggingFaceReader(model, ["blocks.1.hook_resid_pre", "blocks.0.hook_resid_post"])
    text = torch.tensor([TEXTS[1]])
    early = reader.read(text, torch.ones_like(text))
    assert ran == [0]
    late = reader.read(text, torch.ones_like(text), stop_early=False)
    assert ran == [0, 0, 1, 2]
    assert all(torch.equal(early[site], late[site]) for site in early)
    assert not any(block._forward_pre_hooks for block in model.model.layers)  # hooks are taken off again


@pytest.mark.parametrize(
    "name", ["blocks.1.hook_mlp_out", "blocks.-1.hook_resid_post", "hook_embed", "blocks.1.hook_resid_post "]
)
def test_other_site_names_are_refused(name: str) -> None:
    refuses("unknown site", Site.parse, name)


def test_sites_beyond_the_model_are_refused(llama: Path) -> None:
    model = load_model(llama)
    with pytest.raises(TsaeError, match=r"blocks\.3\.hook_resid_post does not exist: the model has blocks 0 to 2"):
        HuggingFaceReader(model, ["blocks.3.hook_resid_post"])
    refuses("no sites given", HuggingFaceReader, model, [])
    assert Site.parse("blocks.12.hook_resid_pre").name == "blocks.12.hook_resid_pre"


def test_loading_leaves_the_weights_alone(llama: Path) -> None:
    from safetensors.torch import load_file

    model = load_model(llama)
    saved = load_file(llama / "model.safetensors")
    state = model.state_dict()
    assert saved.keys() <= state.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert load_model(llama, dtype="bfloat16").dtype == torch.bfloat16


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def test_a_directory_without_a_usable_tokenizer_is_refused(copy: Path) -> None:
    file = copy / "tokenizer.json"
    whole = file.read_text()
    file.unlink()
    refuses(rf"{copy}.* holds no tokenizer.*Copy the tokenizer files", load_tokenizer, checkpoint(copy))
    for found, content in (
        ("encodes text to nothing", re.sub('"behavior": *"[A-Za-z]+"', '"behavior": "Removed"', whole)),
        ("cannot load its tokenizer", "{"),
        ("the id 1,000,000,000", re.sub('"7": *[0-9]+', f'"7": {10**9}', whole)),
    ):
        file.write_text(content)
        refuses(found, load_tokenizer, checkpoint(copy))


def test_a_damaged_configuration_is_refused(copy: Path) -> None:
    """Transformers and tokenizers raise classes of their own, some of them bare exceptions."""
    for file, changed in (
        ("config.json", {"hidden_size": "x"}), ("config.json", {"hidden_size": []}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}), ("tokenizer.json", {"added_tokens": 1}),
    ):  # fmt: skip
        whole = (copy / file).read_text()
        edit(copy / file, **changed)
        refuses("cannot load its tokenizer", load_tokenizer, checkpoint(copy))
        if file == "config.json":
            refuses("cannot be loaded", load_model, copy)
        (copy / file).write_text(whole)
    load_tokenizer(checkpoint(copy))


@pytest.mark.parametrize("keep", [100, 1000, -8])
def test_truncated_weights_are_refused(copy: Path, keep: int) -> None:
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(TsaeError, match="cannot be read") as error:
        load_model(copy)
    assert str(copy) in str(error.value)


def test_weights_that_lack_tensors_or_do_not_fit_are_refused(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != lost}, copy / "model.safetensors", metadata={"format": "pt"})
    refuses(rf"1 weights are missing \(first: {lost}\)", load_model, copy)
    # None of these is stretched, turned or cut to fit.
    for shape in ((32, 15), (16, 32), (1, 16), (32,)):
        odd = {**weights, lost: torch.ones(shape)}
        save_file(odd, copy / "model.safetensors", metadata={"format": "pt"})
        said = rf"{lost} has the shape {re.escape(str(shape))} in the file and \(32, 16\) in the model"
        refuses(said, load_model, copy)


def test_other_loading_errors(llama: Path, tmp_path: Path) -> None:
    refuses("no such checkpoint", load_model, tmp_path / "missing")
    refuses(r"holds no config\.json", load_model, tmp_path)
    refuses("no such checkpoint", load_model, tmp_path / "model.gguf")
    refuses("dtype 'float8' is none of", load_model, llama, dtype="float8")


def test_fingerprints_tell_weights_and_tokenizers_apart(llama: Path, tmp_path: Path) -> None:
    from tsae.testbed import make_tokenizer

    same = save_perturbed(llama, tmp_path / "same", amount=0.0)
    moved = save_perturbed(llama, tmp_path / "moved")
    assert weights_fingerprint(checkpoint(same)) == weights_fingerprint(checkpoint(same))
    assert weights_fingerprint(checkpoint(moved)) != weights_fingerprint(checkpoint(same))
    tokenizer = make_tokenizer()
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(load_tokenizer(checkpoint(llama)))
    tokenizer.add_tokens(["x"])
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(make_tokenizer())


def test_every_byte_of_the_weights_counts_in_their_fingerprint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", d_model=256)
    before = weights_fingerprint(checkpoint(folder))
    flip_middle(folder / "model.safetensors")
    assert weights_fingerprint(checkpoint(folder)) != before


def test_what_the_weights_compute_counts_in_their_fingerprint(tmp_path: Path) -> None:
    model = checkpoint(save_model(tmp_path / "model"))
    file = tmp_path / "model" / "config.json"
    before = weights_fingerprint(model)
    edit(file, _name_or_path="elsewhere", transformers_version="9.9")
    assert weights_fingerprint(model) == before  # saved again by another version, from another folder
    edit(file, rms_norm_eps=0.5)
    assert weights_fingerprint(model) != before
    file.write_text("{")
    refuses(r"config\.json", weights_fingerprint, model)


BASE = {"id": "base", "path": "base", "run": None}
RUN = {"id": "easy-10", "path": "easy-10", "run": "easy", "step": 10}


def test_a_series_is_read_from_its_file(series_folder: Path) -> None:
    found = CheckpointSeries.load(series_folder)
    assert [c.id for c in found] == ["base", "easy-10"]
    assert found.base.path == str((series_folder / "base").resolve())
    assert found["easy-10"].step == 10
    assert found.name == "tiny"
    with pytest.raises(TsaeError, match="no checkpoint 'hard'; there are base, easy-10"):
        found["hard"]


def test_the_base_comes_first_whatever_the_file_says(tmp_path: Path) -> None:
    later = {**RUN, "id": "easy-20", "path": "easy-20", "step": 20}
    for name in ("base", "easy-10", "easy-20"):
        (tmp_path / name).mkdir()
    found = CheckpointSeries.load(save_series(tmp_path, [RUN, later, BASE]))
    assert [c.id for c in found] == ["base", "easy-10", "easy-20"]
    assert [c.id for c in found.select(["easy-20"])] == ["base", "easy-20"]
    assert [c.id for c in found.final()] == ["base", "easy-20"]


def test_a_series_is_written_and_read_back(tmp_path: Path) -> None:
    for name in ("base", "easy-10"):
        (tmp_path / name).mkdir()
    first = CheckpointSeries.load(save_series(tmp_path, [BASE, {**RUN, "trained_on": "easy"}]))
    first.save(tmp_path)
    content = json.loads((tmp_path / "series.json").read_text())
    assert [record["path"] for record in content["checkpoints"]] == ["base", "easy-10"]
    assert CheckpointSeries.load(tmp_path) == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a series"),
        ("[]", "is not a series"),
        ('{"checkpoints": {"base": 1}}', "is not a series"),
        ('{"checkpoints": [{"path": "base"}]}', "is not a series"),
        ('{"checkpoints": [{"id": 1, "path": "base"}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": null}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "base", "step": "ten"}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "base", "step": 1' + "0" * 400 + "}]}", "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "a\\u0000"}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "' + "a" * 5000 + '"}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "base", "subfolder": 5}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "base", "run": ["a"]}]}', "is not a series"),
        (b"\xff\xfe{}", "is not a series"),
        ('{"checkpoints": []}', "found 0 base checkpoints"),
        ('{"checkpoints": [{"id": "../up", "path": "base"}]}', "is not a series"),
        ('{"checkpoints": [{"id": "base", "path": "../elsewhere"}]}', "leaves the folder"),
        ('{"checkpoints": [{"id": "a", "path": "a"}, {"id": "b", "path": "b"}]}', r"found 2 base checkpoints \(a, b\)"),
        ('{"checkpoints": [{"id": "a", "path": "a"}, {"id": "a", "path": "b", "run": "r"}]}', "come twice: a"),
        (
            '{"checkpoints": [{"id": "a", "path": "a"}, {"id": "b", "path": "b", "run": "r"}, '
            '{"id": "c", "path": "c", "run": "r"}]}',
            "b and c are both step 0 of the run r",
        ),
    ],
)
def test_bad_series_files_are_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "series.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(message, CheckpointSeries.load, tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "inside" / "base").symlink_to(tmp_path / "outside")
    refuses("leaves the folder", lambda: CheckpointSeries.load(save_series(tmp_path / "inside", [BASE])))


def test_trainer_folders_are_understood(llama: Path, tmp_path: Path) -> None:
    for step in (100, 20, 3):
        shutil.copytree(llama, tmp_path / "out" / f"checkpoint-{step}")
    (tmp_path / "out" / "completions").mkdir()
    found = CheckpointSeries.load(tmp_path / "out")
    assert [(c.id, c.run, c.step) for c in found] == [
        ("out-00003", None, 3),
        ("out-00020", "out", 20),
        ("out-00100", "out", 100),
    ]
    assert "stands in for the base" in found.notes[0]
    named = CheckpointSeries.load("org/model", tmp_path / "out")
    assert named.base.path == "org/model"
    assert len(named) == 4
    assert named.notes == ()
    # One that is not all there is left out. Of a run without any other, the model above it counts.
    weights = tmp_path / "out" / "checkpoint-100" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = CheckpointSeries.load("org/model", tmp_path / "out")
    assert [c.step for c in found] == [0, 3, 20]
    assert found.notes == ("left out, as not complete: checkpoint-100 (model.safetensors is not all there).",)
    for step in (20, 3):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    refuses(r"no checkpoint is complete: checkpoint-100 \(model\.saf", CheckpointSeries.load, tmp_path / "out")
    shutil.copytree(llama, tmp_path / "out", dirs_exist_ok=True)
    for place in (tmp_path, tmp_path / "out"):
        found = CheckpointSeries.load("org/model", place)
        assert [(c.run, c.path) for c in found] == [(None, "org/model"), ("out", str((tmp_path / "out").resolve()))]
    assert "none of its checkpoints can be read: checkpoint-100 (model.safe" in found.notes[0]


def test_folders_of_several_runs_are_understood(llama: Path, tmp_path: Path) -> None:
    for run in ("easy", "hard"):
        for step in (0, 10):
            shutil.copytree(llama, tmp_path / run / f"checkpoint-{step}")
    found = CheckpointSeries.load(tmp_path)
    assert found.base.step == 0
    assert found.runs[-1] == "hard"
    assert found.last("hard").step == 10
    refuses("no run 'medium'", found.last, "medium")


def test_a_single_checkpoint_is_a_series(llama: Path, tmp_path: Path) -> None:
    assert [c.id for c in CheckpointSeries.load(llama)] == ["base"]
    refuses(r"no series\.json and no checkpoints", CheckpointSeries.load, tmp_path)
    refuses("no such folder", CheckpointSeries.load, tmp_path / "missing")
    refuses("no such folder", CheckpointSeries.load, "~nobody-of-this-name/x")
    refuses("cannot be read", CheckpointSeries.load, "a" * 5000)
    shutil.copytree(llama, tmp_path / "runs" / "checkpoint-5")
    with pytest.raises(TsaeError, match="no checkpoint is complete"):
        CheckpointSeries.load(tmp_path / "runs", without={(tmp_path / "runs" / "checkpoint-5").resolve()})


def test_tokens_are_found_by_their_text(llama: Path, tmp_path: Path) -> None:
    found = checkpoint(llama)
    tokenizer = found.load_tokenizer()
    assert found.tokens_with(";") == (tokenizer.convert_tokens_to_ids(";"),)
    # Special tokens aside: <bos> contains an s, no other token does.
    for text in ("s", "\n", ""):
        refuses("has no token whose text contains", found.tokens_with, text)
