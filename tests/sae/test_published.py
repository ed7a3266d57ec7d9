"""SAEs that others published: files that their libraries wrote, read here with the same codes.

`published/` holds tiny SAEs of random weights. The saving functions of dictionary-learning 0.1.0, eai-sparsify 1.3.3
and llamascopium 2.0.0b34 wrote them, and torch.save the state_dict of OpenAI's Autoencoder; expected.safetensors has
what these libraries compute from x. Other formats are written here, and read by sae_lens too.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import threading
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tsae
from support.checkpoints import edit
from support.refusals import refuses
from support.servers import Hub
from support.stores import LENS_SITE, lens_config, randomized
from tsae.cli import main
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.quality.evaluation import check_published_fve, named_measures, warn_where_short

PUBLISHED = Path(__file__).parent / "published"
D, S = 8, 12

# sae_lens imports a deprecated module of transformer_lens.
pytestmark = pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def x_of(d: int = D) -> torch.Tensor:
    return 0.3 + 2 * torch.randn(50, d, generator=torch.Generator().manual_seed(8))


def place_of(folder: Path) -> Path:
    """Of the SAE in one of `published`."""
    if folder.name == "sparsify":
        return folder / "layers.3"
    openai = folder / "resid_post_mlp_v5_32k" / "autoencoders" / "3.pt"
    return openai if folder.name.startswith("openai") else folder


# --- files of the libraries themselves


@pytest.mark.parametrize("folder", sorted(PUBLISHED.iterdir()), ids=lambda folder: folder.name)
def test_files_of_other_libraries_give_their_codes(folder: Path, tmp_path: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    sae = tsae.load_sae(place_of(folder))
    assert (sae.site, sae.d_model, sae.config.d_sae) == ("blocks.3.hook_resid_post", D, S)
    codes = sae.encode(expected["x"])
    assert bool((codes > 0).any())
    torch.testing.assert_close(codes, expected["codes"], atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(sae.decode(codes, expected["x"]), expected["x_hat"], atol=3e-6, rtol=1e-5)
    # Saved, it is in sae_lens's form, and computes the same.
    again = tsae.load_sae(sae.save(tmp_path / "saved"))
    assert again.fingerprint == sae.fingerprint
    assert torch.equal(again.encode(expected["x"]), codes)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("folder", sorted(PUBLISHED.iterdir()), ids=lambda folder: folder.name)
def test_damaged_files_are_refused_or_read(folder: Path, tmp_path: Path) -> None:
    """Whatever stands in them: other values, missing ones, flipped bits, cut ends. There is one error, ours."""
    rng = random.Random(folder.name)
    for number in range(60):
        copied = shutil.copytree(folder, tmp_path / str(number) / folder.name)
        files = [f for f in copied.rglob("*") if f.is_file() and f.name != "expected.safetensors"]
        file = rng.choice(sorted(files))
        if file.suffix == ".json":
            content = json.loads(file.read_text())
            holder = content.get("trainer", content)
            name = rng.choice(list(holder))
            holder[name] = rng.choice(["x", -1, 0, None, [], {}, 1e99, True, 10**12])
            file.write_text(json.dumps(content))
        else:
            data = bytearray(file.read_bytes())
            data = data[: rng.randrange(len(data))] if rng.random() < 0.3 else data
            for _ in range(rng.choice((0, 1, 4))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8) if data else 0
            file.write_bytes(data)
        try:
            sae = tsae.load_sae(place_of(copied))
            assert sae.encode(x_of(sae.d_model)).shape == (50, sae.config.d_sae)
        except TsaeError:
            pass


# --- formats that sae_lens reads too


def gemma_scope(folder: Path, d: int = D) -> Path:
    found = weights(W_enc=(d, S), W_dec=(S, d), b_enc=(S,), b_dec=(d,), threshold=(S,))
    folder.mkdir(parents=True)
    found["threshold"] = found["threshold"].abs()
    np.savez(folder / "params.npz", **{name: value.numpy() for name, value in found.items()})
    return folder


def gemma_scope_2(folder: Path) -> Path:
    found = weights(w_enc=(D, S), w_dec=(S, D), b_enc=(S,), b_dec=(D,), threshold=(S,))
    folder.mkdir(parents=True)
    save_file({**found, "threshold": found["threshold"].abs()}, folder / "params.safetensors")
    config = {"architecture": "jump_relu", "model_name": "gemma-v3-1b-it", "hf_hook_point_in": "model.layers.4.output"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen_scope(file: Path) -> Path:
    file.parent.mkdir(parents=True)
    torch.save(weights(W_enc=(S, D), W_dec=(D, S), b_enc=(S,), b_dec=(D,)), file)
    return file


def llama_scope(folder: Path, **changed: Any) -> Path:
    found = weights(**{"encoder.weight": (S, D), "decoder.weight": (D, S), "encoder.bias": (S,), "decoder.bias": (D,)})
    (folder / "checkpoints").mkdir(parents=True)
    save_file(found, folder / "checkpoints" / "final.safetensors")
    config = {
        "d_model": D, "d_sae": S, "hook_point_in": "blocks.4.hook_resid_post", "jump_relu_threshold": 0.5,
        "dataset_average_activation_norm": {"in": 4.0, "out": 4.0}, **changed,
    }  # fmt: skip
    (folder / "hyperparams.json").write_text(json.dumps(config))
    return folder


CASES = {
    "google/gemma-scope-2b-pt-res": (gemma_scope, "layer_4/width_16k/average_l0_71"),
    "google/gemma-scope-2-1b-it": (gemma_scope_2, "resid_post/layer_4_width_16k_l0_small"),
    "Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_5": (qwen_scope, "layer4.sae.pt"),
    "OpenMOSS/Llama3_1-8B-Base-LXR-8x": (llama_scope, "Llama3_1-8B-Base-L4R-8x"),
}


@pytest.mark.slow  # sae_lens is imported
@pytest.mark.parametrize("repository", list(CASES))
def test_from_the_hub_and_as_sae_lens_reads_it(repository: str, hub: Hub, tmp_path: Path) -> None:
    from sae_lens import SAE
    from sae_lens.loading import pretrained_sae_loaders as loaders

    write, below = CASES[repository]
    write(tmp_path / "files" / below)
    hub.add(repository, tmp_path / "files")
    hub.add(repository, tmp_path / "files", "another/")
    load = {
        gemma_scope: loaders.gemma_2_sae_huggingface_loader,
        gemma_scope_2: loaders.gemma_3_sae_huggingface_loader,
        qwen_scope: loaders.qwen_scope_sae_huggingface_loader,
        llama_scope: loaders.llama_scope_sae_huggingface_loader,
    }[write]
    overrides = {"d_in": D, "d_sae": S, "dtype": "float32"}
    config, state, _ = load(repository, below, "cpu", False, overrides)
    lens = SAE.from_dict(loaders.handle_config_defaulting(config))
    lens.process_state_dict_for_loading(state)
    lens.load_state_dict(state)
    if write is llama_scope:
        lens.fold_activation_norm_scaling_factor(D**0.5 / 4.0)
    sae = tsae.load_sae(f"{repository}/{below}")
    assert sae.site == "blocks.4.hook_resid_post"
    x = x_of()
    with torch.no_grad():
        codes, x_hat = lens.encode(x), lens(x)
    assert bool((codes > 0).any())
    torch.testing.assert_close(sae.encode(x), codes, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sae.decode(sae.encode(x), x), x_hat, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_from_sae_lens_own_list(hub: Hub, tmp_path: Path) -> None:
    """Its releases: ids, normalisation factors and promises are those of sae_lens's list."""
    from sae_lens import SAE

    lens = randomized(SAE.from_dict(lens_config("standard", d_in=D, d_sae=S)))
    lens.save_model(tmp_path / "lens")
    hub.add("jbloom/GPT2-Small-SAEs-Reformatted", tmp_path / "lens", "blocks.1.hook_resid_pre/")
    found = tsae.load_sae("saelens:gpt2-small-res-jb/blocks.1.hook_resid_pre")
    x = x_of()
    with torch.no_grad():
        assert torch.equal(found.encode(x), lens.encode(x))
    assert named_measures(found) == {"fve": 0.999, "l0": 10.0}
    for name, message in {
        "saelens:no-such/id": "no such release",
        "saelens:gpt2-small-res-jb/blocks.99": "gpt2-small-res-jb with blocks.0.hook_resid_pre",
        "saelens:gpt2-small-res-jb/blocks.2.hook_resid_pre": "cannot be loaded by sae_lens",
    }.items():
        refuses(message, tsae.load_sae, name)


def test_from_the_hub_one_sae_is_fetched_and_what_is_not_there_is_said(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/many", llama_scope(tmp_path / "here"), "L4R-8x/")
    hub.add("org/many", tmp_path / "here", "L6R-8x/")
    found = tsae.load_sae("org/many/L4R-8x")
    assert found.fingerprint == tsae.load_sae(tmp_path / "here").fingerprint
    assert tsae.load_sae("org/many/L4R-8x@main").fingerprint == found.fingerprint
    assert not list((tmp_path / "cache").rglob("L6R-8x"))
    for name, message in {
        "org/none": r"org/none: is not a path here, and cannot be fetched from the Hub \(.*404",
        "org/many": r"org/many: the repository has no SAE there; SAEs lie in L4R-8x, L6R-8x\. Name its folder",
        "org/many/L5R": "has no SAE there; SAEs lie in L4R-8x",
    }.items():
        refuses(message, tsae.load_sae, name)
    # What is below a folder here is never asked for elsewhere.
    before = len(hub.tokens)
    refuses("holds no complete SAE", tsae.load_sae, tmp_path / "none")
    assert len(hub.tokens) == before


@pytest.mark.parametrize("answer", ["none", "hangs up", "an object"])
def test_a_hub_that_cannot_be_reached_is_said(answer: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                client = server.accept()[0]
                client.recv(65536)
                if answer == "an object":
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if answer == "none":
            server.close()
        else:
            threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", url)
        refuses("is not a path here, and cannot be fetched from the Hub", tsae.load_sae, "org/name")


@pytest.mark.parametrize("name", ["a" * 5000, "x/" + "a" * 300 + "/y/z"])
def test_what_is_no_path_is_said(name: str) -> None:
    with pytest.raises(TsaeError, match="is not a path") as found:
        tsae.load_sae(name)
    assert len(str(found.value)) < 800


# --- what is refused


def refused(place: Path, message: str) -> None:
    refuses(message, tsae.load_sae, place)


def test_sites_outside_the_residual_stream_and_transcoders_are_refused(tmp_path: Path) -> None:
    refused(gemma_scope(tmp_path / "gemma-scope-2b-pt-mlp" / "layer_4"), "reads hook_mlp; activations are captured")
    refused(gemma_scope(tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_4"), "is a transcoder: it predicts")
    refused(gemma_scope_2(tmp_path / "mlp_out" / "layer_4"), "reads hook_mlp_out")
    refused(gemma_scope_2(tmp_path / "transcoder_all" / "layer_4"), "is a transcoder")
    for change, message in (
        ({"transcode": True}, "is a transcoder"),
        ({"skip_connection": True}, "is a transcoder"),
        ({"activation": "groupmax"}, "selects latents by groupmax"),
    ):
        folder = shutil.copytree(PUBLISHED / "sparsify" / "layers.3", tmp_path / str(change) / "layers.3")
        edit(folder / "cfg.json", **change)
        refused(folder, message)
    shutil.copytree(PUBLISHED / "sparsify" / "layers.3", tmp_path / "layers.3.mlp")
    refused(tmp_path / "layers.3.mlp", r"reads hook_layers\.3\.mlp")
    for change, message in (
        ({"sae_type": "clt"}, "is a transcoder"),
        ({"hook_point_out": "blocks.3.hook_mlp_out"}, "is a transcoder"),
        ({"sae_type": "crosscoder"}, "is a crosscoder, which is not computed here"),
        ({"act_fn": "batchtopk"}, "chooses latents by the batch"),
        ({"norm_activation": "batch-wise"}, "normalised batch-wise, by a norm that its files do not hold"),
    ):
        folder = shutil.copytree(PUBLISHED / "llamascopium-relu-dataset-wise", tmp_path / str(change)[:20])
        edit(folder / "config.json", **change)
        refused(folder, message)
        shutil.rmtree(folder)
    folder = shutil.copytree(PUBLISHED / "dictionary_learning-BatchTopKSAE", tmp_path / "crosscoder")
    (folder / "config.json").write_text(json.dumps({"trainer": {"dict_class": "CrossCoder", "layer": 3}}))
    refused(folder, "is a CrossCoder")


def test_a_file_that_needs_pickle_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_5" / "layer4.sae.pt"
    file.parent.mkdir()
    for content, message in (
        ({"W_enc": torch.nn.Linear(2, 2)}, "it needs pickle, which may run code"),
        ([1, 2], "cannot be read"),
        ({"W_enc": torch.zeros(2, 2)}, "W_dec"),
    ):
        torch.save(content, file)
        refused(file, message)
    file.write_bytes(b"no file of torch")
    refused(file, "needs pickle|is not a file of torch.save")
    torch.save({"other": torch.zeros(2)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "is not a file of Qwen-Scope")
    np.savez(tmp_path / "params.npz", W_enc=np.array([object()]))
    refused(tmp_path, "params.npz: cannot be read")
    np.savez_compressed(tmp_path / "params.npz", W_enc=np.zeros((1000, 1000)))
    refused(tmp_path, r"unpacks to 8,000,128 bytes")


@pytest.mark.parametrize(
    ("write", "path", "site"),
    [
        (gemma_scope, "runs/layer_3/gemma-scope-2b-pt-res/layer_12/width_16k", "blocks.12.hook_resid_post"),
        (gemma_scope_2, "transcoder_study/gemma-scope-2-1b/resid_post/layer_4_width_16k", "blocks.4.hook_resid_post"),
        (gemma_scope_2, "resid_post_saes/gemma-scope-2-1b/attn_out/layer_4_width_16k", None),
        (gemma_scope_2, "attn_out/resid_post/layer_4_width_16k", "blocks.4.hook_resid_post"),
        (qwen_scope, "exp-L0_9/SAE-Res-Qwen3-1.7B-Base-W32K-L0_5/layer4.sae.pt", "blocks.4.hook_resid_post"),
    ],
)
def test_of_what_a_path_says_the_last_counts(write: Any, path: str, site: str | None, tmp_path: Path) -> None:
    place = write(tmp_path / path)
    if site is None:
        refused(place, "reads hook_attn_out")
    else:
        found = tsae.load_sae(place)
        assert (found.site, found.config.k) == (site, 5 if write is qwen_scope else 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d_model": 4096}, "names d_model 4096"),
        ({"d_model": True}, "d_model is True"),
        ({"dataset_average_activation_norm": {"in": 0}}, "is 0, expected a finite number above 0"),
        ({"dataset_average_activation_norm": {"in": float("inf")}}, "is inf"),
        ({"dataset_average_activation_norm": {"in": 1e-300}}, "finite"),
        ({"jump_relu_threshold": float("nan")}, "jump_relu_threshold is nan"),
        ({"jump_relu_threshold": 1e300}, "threshold .*finite"),
        ({"hook_point_in": ["blocks.4.hook_resid_post"]}, r"names the site \['blocks"),
    ],
)
def test_a_factor_of_normalisation_is_checked(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(llama_scope(tmp_path / "sae", **changed), message)


@pytest.mark.parametrize(
    ("folder", "changed", "message"),
    [
        ("llamascopium-relu-dataset-wise", {"use_decoder_bias": "false"}, "use_decoder_bias is 'false'"),
        ("llamascopium-relu-dataset-wise", {"d_model": 16}, "names d_model 16, its weights have 8"),
        ("llamascopium-topk-dataset-wise", {"top_k": 2.9}, r"top_k is 2\.9"),
        ("sparsify", {"k": True}, "k is True"),
        ("sparsify", {"transcode": "false"}, "transcode is 'false'"),
        ("dictionary_learning-AutoEncoderTopK", {"k": 11}, r"k is 11 in config\.json, and 3 in ae\.pt"),
        ("dictionary_learning-AutoEncoder", {"layer": 3.9}, r"layer is 3\.9"),
        ("dictionary_learning-AutoEncoder", {"submodule_name": "x\x1b[31m"}, "names the site"),
    ],
)
def test_config_values_are_not_rounded_or_guessed(
    folder: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = place_of(Path(shutil.copytree(PUBLISHED / folder, tmp_path / folder)))
    file = next(place.glob("c*.json"))
    content = json.loads(file.read_text())
    content.get("trainer", content).update(changed)
    file.write_text(json.dumps(content))
    refused(place, message)


@pytest.mark.parametrize(
    ("folder", "changed", "message"),
    [
        ("openai-relu", {"activation": "Identity"}, "its activation is 'Identity'"),
        ("openai-topk", {"activation_state_dict": {"k": 3, "postact_fn": "Identity"}}, "is 'TopK with Identity'"),
        ("openai-topk", {"activation_state_dict": {"k": 2.9, "postact_fn": "ReLU"}}, r"k is 2\.9"),
        ("openai-relu", {"latent_bias": torch.ones(())}, r"b_enc has shape \(\)"),
        ("openai-relu", {"latent_bias": torch.ones(S, dtype=torch.int64)}, r"b_enc holds torch\.int64"),
        ("openai-relu", {"pre_bias": torch.full((D,), float("inf"))}, "b_dec .*finite"),
        ("openai-relu", {"encoder.weight": torch.zeros(1).expand(S, D)}, "stands for more numbers than the file holds"),
        ("openai-relu", {"unused": [{"a": torch.zeros(1).expand(10**10)}]}, "stands for more numbers than the file"),
        ("openai-relu", {"encoder.weight": torch.empty(S, D, device="meta")}, "float32 on meta"),
        ("openai-relu", {"encoder.weight": torch.ones(S, D).to_sparse()}, "a tensor that is torch.sparse_coo"),
    ],
)
def test_a_torch_file_with_values_of_no_use_is_refused(
    folder: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = place_of(Path(shutil.copytree(PUBLISHED / folder, tmp_path / folder)))
    torch.save({**torch.load(place, weights_only=True), **changed}, place)
    refused(place, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1000, 10**12), r"its part W_enc\.npy has \d+ bytes, not 4,000,000,000,000,000"),
        ((10**30,), r"its part W_enc\.npy has \d+ bytes, not"),
    ],
)
def test_an_npz_that_names_larger_arrays_than_it_has_is_refused(
    shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as archive:
        archive.writestr("W_enc.npy", header.getvalue() + bytes(16))
    refused(tmp_path, message)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_npz_is_refused(compressed: bool, tmp_path: Path) -> None:
    (np.savez_compressed if compressed else np.savez)(tmp_path / "params.npz", W_enc=np.arange(999.0))
    data = bytearray((tmp_path / "params.npz").read_bytes())
    for damaged in (b"no archive", data[:-30], data[:300] + b"\xff" * 300 + data[600:]):
        (tmp_path / "params.npz").write_bytes(damaged)
        refused(tmp_path, r"params\.npz: cannot be read")


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"fve": "x", "l0": 5}, {"l0": 5.0}),
        ({"fve": float("nan"), "l0": True}, {}),
        ({"fve": 10**400, "other": 1}, {}),
        ([1], {}),
        (5, {}),
    ],
)
def test_of_a_promise_only_numbers_are_kept(told: Any, kept: dict[str, float], tmp_path: Path) -> None:
    folder = tsae.load_sae(gemma_scope(tmp_path / "sae"), site=LENS_SITE).save(tmp_path / "kept")
    config = json.loads((folder / "cfg.json").read_text())
    edit(folder / "cfg.json", metadata={**config["metadata"], "promised": told, "prepend_bos": False})
    found = tsae.load_sae(folder)
    assert named_measures(found) == kept
    with pytest.warns(UserWarning, match="this published SAE explains"):
        warn_where_short(found, SimpleNamespace(), 0.2, 3.0, 10)  # type: ignore[arg-type]


def test_what_the_files_do_not_say_is_asked_for(tmp_path: Path) -> None:
    refused(qwen_scope(tmp_path / "renamed" / "layer4.sae.pt"), "how many latents a token has")
    folder = gemma_scope(tmp_path / "renamed" / "here")
    refused(folder, r"does not say where its activations come from.*tsae export --site")
    assert tsae.load_sae(folder, site=LENS_SITE).site == LENS_SITE
    main(["export", "--sae", str(folder), "--site", LENS_SITE, "--to", str(tmp_path / "kept")])
    assert tsae.load_sae(tmp_path / "kept").site == LENS_SITE


# --- in the analysis


def test_a_published_sae_of_another_model_is_said_to_explain_little(store: Any, tmp_path: Path) -> None:
    """The same shapes, other weights."""
    folder = gemma_scope(tmp_path / "sae", d=16)
    kept = tsae.load_sae(folder, site=LENS_SITE).save(tmp_path / "kept")
    with pytest.warns(
        UserWarning, match=r"explains -?\d+\.\d\d of the variance of .* tokens at blocks\.1.*at least 0\.5"
    ):
        features = tsae.encode(kept, store, progress=False)
    fve = features.reader_info("base")["fve"]
    edit(
        kept / "cfg.json",
        metadata={**json.loads((kept / "cfg.json").read_text())["metadata"], "promised": {"fve": 0.9}},
    )
    with pytest.warns(UserWarning, match=r"its makers name FVE 0\.90"):
        tsae.encode(kept, store, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_published_fve(tsae.load_sae(kept), store)
    assert found is not None
    assert abs(found[0] - fve) < 0.2


def test_codes_that_are_never_stored_are_held_to_the_promise_too(
    series: Any, rollouts: Any, store: Any, tmp_path: Path
) -> None:
    kept = tsae.load_sae(gemma_scope(tmp_path / "sae", d=16), site=LENS_SITE)
    live = tsae.LiveSource(series, rollouts, LENS_SITE)
    with pytest.warns(UserWarning, match=r"explains -?\d+\.\d\d of the variance of .* at blocks\.1"):
        tsae.encode(kept, live, to=tmp_path / "features", progress=False)


@pytest.mark.slow
def test_one_that_keeps_its_promise_is_encoded_without_a_word(store: Any, tmp_path: Path) -> None:
    trained = tsae.train(
        store.subset(readers="base"), SAEConfig(d_sae=64, k=8, groups=(1.0,), temporal_weight=0.0),
        training=TrainingConfig(tokens=16_000, batch_tokens=200, site=LENS_SITE), progress=False,
    )  # fmt: skip
    weights = {"threshold": trained.threshold.expand(64).clone()}
    weights |= {name: value.detach() for name, value in trained.named_parameters()}
    save_file({n: v.contiguous() for n, v in weights.items()}, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(lens_config("jumprelu", d_in=16, d_sae=64)))
    found = check_published_fve(tsae.load_sae(tmp_path), store)
    assert found is not None
    assert found[0] > 0.5
    tsae.encode(tmp_path, store, progress=False)
    assert check_published_fve(trained, store) is None


@pytest.mark.slow(ci=True)
def test_tokens_that_are_normalised_one_by_one_are_reconstructed_in_their_units(store: Any, tmp_path: Path) -> None:
    """Everywhere: in features, evaluation and where the reconstruction is spliced in."""
    from sae_lens import SAE

    lens = randomized(SAE.from_dict(lens_config("jumprelu", d_in=16, d_sae=40, normalize_activations="layer_norm")))
    lens.save_model(tmp_path / "lens")
    sae = tsae.load_sae(tmp_path / "lens")
    x = x_of(16)
    with torch.no_grad():
        x_hat = lens(x)
    codes = sae.encode(x)
    torch.testing.assert_close(codes, lens.encode(x).detach() * x.std(1, keepdim=True), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sae.decode(codes, x), x_hat, atol=1e-5, rtol=1e-4)
    refuses("normalises every token", sae.decode, codes)
    refuses("normalises every token", tsae.train, store, start=sae, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = tsae.encode(sae, store, progress=False)
    tokens = torch.cat([torch.from_numpy(s.read(LENS_SITE, slice(None))) for s in store.shards() if s.reader == "base"])
    ids = np.concatenate([s.token_ids for s in store.shards() if s.reader == "base"])
    counted = tokens[torch.from_numpy(~np.isin(ids, list(store.special_ids)))]
    with torch.no_grad():
        error = (counted - lens(counted)).pow(2).sum()
    fve = 1 - float(error / (counted - counted.mean(0)).pow(2).sum())
    assert features.reader_info("base")["fve"] == pytest.approx(fve, abs=1e-4)
    assert tsae.evaluate(sae, store.subset(readers="base"), held_out=None).fve == pytest.approx(fve, abs=0.05)
