"""Exported to sae_lens and read from it: codes are equal bit for bit, in both directions."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.refusals import refuses
from support.stores import D_IN, D_SAE, LENS_SITE, lens_config, randomized
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE

# sae_lens imports a deprecated module of transformer_lens.
pytestmark = pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def sae() -> TemporalSAE:
    """Wide enough that matrix products are blocked; about 20 of 384 latents active."""
    generator = torch.Generator().manual_seed(0)
    config = SAEConfig(d_sae=384, k=20, groups=(0.25, 0.75), temporal_weight=0.7)
    sae = TemporalSAE(576, config, site=LENS_SITE, training={"norms": {"limit": 700.0}})
    sae.initialize(10 * torch.randn(576, generator=generator), generator)
    with torch.no_grad():
        sae.W_enc.add_(0.01 * torch.randn(576, 384, generator=generator))
        sae.b_enc.add_(0.1 * torch.randn(384, generator=generator))
        sae.threshold.fill_(5.0)
    return sae.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def x(sae: TemporalSAE) -> torch.Tensor:
    return 3 * torch.randn(301, 576, generator=torch.Generator().manual_seed(1)) + sae.b_dec


def in_sae_lens_alone(folder: Path, x: torch.Tensor, tmp_path: Path, *, imports: str = "") -> dict[str, Any]:
    """Codes and reconstruction by sae_lens, in a process that is asked about tsae at its end."""
    save_file({"x": x}, tmp_path / "x.safetensors")
    program = f"""
import json, sys
{imports}
import torch
from safetensors.torch import load_file, save_file
from sae_lens import SAE
sae = SAE.load_from_disk({str(folder)!r})
x = load_file({str(tmp_path / "x.safetensors")!r})["x"]
with torch.no_grad():
    found = {{"codes": sae.encode(x), "x_hat": sae(x), "batched": sae.encode(x[:300].reshape(3, 100, -1))}}
    if hasattr(sae, "encode_high"):
        found["high"] = sae.encode_high(x).contiguous()
save_file(found, {str(tmp_path / "found.safetensors")!r})
ours = [name for name in sys.modules if name.split(".")[0] == "tsae"]
print(json.dumps({{"ours": ours, "class": type(sae).__name__, "metadata": sae.cfg.metadata.to_dict()}}))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), **load_file(tmp_path / "found.safetensors")}


@pytest.mark.slow(ci=True)
def test_plain_sae_lens_gives_the_same_bits(sae: TemporalSAE, x: torch.Tensor, tmp_path: Path) -> None:
    found = in_sae_lens_alone(sae.to_saelens(tmp_path / "exported"), x, tmp_path)
    assert found["ours"] == []
    assert found["class"] == "JumpReLUSAE"
    codes = sae.encode(x)
    assert 5 < float((codes > 0).sum(1).float().mean()) < 50
    assert torch.equal(found["codes"], codes)
    assert torch.equal(found["x_hat"], sae.decode(codes))
    assert torch.equal(found["batched"], sae.encode(x[:300].reshape(3, 100, -1)))
    metadata = found["metadata"]
    assert (metadata["hook_name"], metadata["d_high"], metadata["temporal_weight"]) == (LENS_SITE, 96, 0.7)
    assert metadata["tsae"]["sae"]["k"] == 20


@pytest.mark.slow(ci=True)
def test_sae_lens_with_our_architecture_gives_the_same_bits(sae: TemporalSAE, x: torch.Tensor, tmp_path: Path) -> None:
    folder = sae.to_saelens(tmp_path / "exported", architecture="tsae_temporal")
    found = in_sae_lens_alone(folder, x, tmp_path, imports="import tsae.sae.saelens")
    assert found["class"] == "LensTemporalSAE"
    assert torch.equal(found["codes"], sae.encode(x))
    assert torch.equal(found["high"], sae.encode_high(x))
    assert found["high"].shape == (301, 96)


def test_sae_lens_reads_our_own_folder(sae: TemporalSAE, x: torch.Tensor, tmp_path: Path) -> None:
    from sae_lens import SAE

    from tsae.sae import saelens

    lens = SAE.load_from_disk(sae.save(tmp_path / "sae"), converter=saelens.disk_loader)
    assert isinstance(lens, saelens.LensTemporalSAE)
    assert lens.cfg.architecture() == "tsae_temporal"
    assert (lens.cfg.d_high, lens.cfg.metadata.hook_name) == (96, LENS_SITE)
    with torch.no_grad():
        assert torch.equal(lens.encode(x), sae.encode(x))
        assert torch.equal(lens.encode_high(x[:300].reshape(3, 100, -1)).reshape(300, -1), sae.encode_high(x[:300]))
        high = sae.encode_high(x)
        assert torch.equal(lens.decode_high(high), high @ sae.W_dec[:96] + sae.b_dec)
    # Saved by sae_lens and loaded again by it, it is still ours.
    lens.save_model(tmp_path / "again")
    again = SAE.load_from_disk(tmp_path / "again")
    assert isinstance(again, saelens.LensTemporalSAE)
    assert again.cfg.d_high == 96
    with torch.no_grad():
        assert torch.equal(again.encode(x), sae.encode(x))
    half = SAE.load_from_disk(tmp_path / "sae", converter=saelens.disk_loader, dtype="bfloat16")
    assert half.W_enc.dtype == torch.bfloat16


@pytest.mark.slow(ci=True)  # starts a process
def test_exporting_imports_no_sae_lens_and_refuses_other_architectures(sae: TemporalSAE, tmp_path: Path) -> None:
    sae.save(tmp_path / "sae")
    program = f"""
import sys
from tsae.cli import main
main(["export", "--sae", {str(tmp_path / "sae")!r}, "--to", {str(tmp_path / "to")!r}])
assert "sae_lens" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"wrote {tmp_path / 'to'}")
    names = ["cfg.json", "sae_weights.safetensors"]
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == sorted([*names, "manifest.json"])
    again = sae.to_saelens(tmp_path / "again")
    for name in names:
        assert (tmp_path / "to" / name).read_bytes() == (again / name).read_bytes()
    refuses("unknown architecture 'temporal'", sae.to_saelens, tmp_path / "other", architecture="temporal")


# --- SAEs of sae_lens, read here

OURS = {"sae_lens_version": "6.54.0", "hook_name": LENS_SITE}


def tokens(n: int = 200) -> torch.Tensor:
    return torch.randn(n, D_IN, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("jumprelu", {}),
        ("jumprelu", {"apply_b_dec_to_input": False}),
        ("gated", {}),
        ("topk", {"k": 7}),
        ("standard", {}),
    ],
)
def test_codes_of_sae_lens_are_computed_here_with_the_same_bits(
    architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    from sae_lens import SAE

    from tsae.sae.model import ForeignSAE

    lens = randomized(SAE.from_dict(lens_config(architecture, **more)))
    lens.save_model(tmp_path / "lens")
    found = TemporalSAE.load(tmp_path / "lens")
    assert isinstance(found, ForeignSAE)
    x = tokens()
    with torch.no_grad():
        codes, x_hat = lens.encode(x), lens(x)
    if architecture == "gated":  # two products of other factors, here one
        torch.testing.assert_close(found.encode(x), codes, atol=1e-5, rtol=1e-5)
        codes, x_hat = found.encode(x), found.decode(codes)
    assert torch.equal(found.encode(x), codes)
    assert torch.equal(found.decode(found.encode(x)), x_hat)
    assert 1 < float((codes > 0).sum(1).float().mean()) < D_SAE
    assert (found.site, found.config.d_high, found.config.d_sae) == (LENS_SITE, D_SAE, D_SAE)
    assert found.training_info["sae_lens"]["model_name"] == "tiny"
    # There and back.
    again = TemporalSAE.load(found.save(tmp_path / "again"))
    assert torch.equal(again.encode(x), codes)
    with torch.no_grad():
        assert torch.equal(SAE.load_from_disk(tmp_path / "again").encode(x), codes)


@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk", "topk"])
@pytest.mark.parametrize("rescale", [False, True])
def test_what_a_training_of_sae_lens_leaves_is_read(architecture: str, rescale: bool, tmp_path: Path) -> None:
    """Its checkpoint, and the SAE for inference that it is saved as, which is jumprelu or topk."""
    from sae_lens import SAE, TrainingSAE

    config = lens_config(architecture, k=6, rescale_acts_by_decoder_norm=rescale)
    if architecture == "matryoshka_batchtopk":
        config["matryoshka_widths"] = [40, D_SAE]
    training = randomized(TrainingSAE.from_dict(config))
    training.save_model(tmp_path / "checkpoint")
    training.save_inference_model(tmp_path / "inference")
    lens = SAE.load_from_disk(tmp_path / "inference")
    x = tokens()
    with torch.no_grad():
        codes, x_hat = lens.encode(x), lens(x)
    inference, checkpoint = (TemporalSAE.load(tmp_path / name) for name in ("inference", "checkpoint"))
    if architecture == "topk" and rescale:
        # The flag stays in the config: norms, by then 1 but for rounding, are folded once more.
        torch.testing.assert_close(inference.encode(x), codes, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(inference.encode(x), codes)
    torch.testing.assert_close(checkpoint.encode(x), codes, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(checkpoint.decode(checkpoint.encode(x)), x_hat, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["jumprelu", "tsae_temporal"])
def test_a_tsae_comes_back_as_what_it_was(sae: TemporalSAE, x: torch.Tensor, architecture: Any, tmp_path: Path) -> None:
    found = TemporalSAE.load(sae.to_saelens(tmp_path / "exported", architecture=architecture))
    unlimited = copy.deepcopy(sae)
    unlimited.training_info = {}
    assert TemporalSAE.load(unlimited.to_saelens(tmp_path / "unlimited")).norm_limit is None
    assert type(found) is TemporalSAE
    assert found.norm_limit == sae.norm_limit == 700  # else outliers would have codes
    assert (found.config, found.site) == (sae.config, sae.site)
    assert torch.equal(found.encode(x), sae.encode(x))
    assert found.threshold.shape == ()


def test_a_tsae_that_sae_lens_changed_keeps_its_groups(sae: TemporalSAE, x: torch.Tensor, tmp_path: Path) -> None:
    from sae_lens import SAE

    lens = SAE.load_from_disk(sae.to_saelens(tmp_path / "exported"))
    with torch.no_grad():
        lens.W_dec[:] *= torch.linspace(0.5, 2, 384)[:, None]
        lens.fold_W_dec_norm()
    lens.save_model(tmp_path / "folded")
    found = TemporalSAE.load(tmp_path / "folded")
    assert found.config.d_high == 96
    with torch.no_grad():
        assert torch.equal(found.encode(x), lens.encode(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize_activations": "expected_average_only_in"}, "fold_activation_norm_scaling_factor"),
        ({"normalize_activations": ["none"]}, r"normalised by \['none'\]"),
        ({"reshape_activations": "hook_z"}, "reads attention heads"),
        ({"architecture": "matching_pursuit"}, "'matching_pursuit' cannot be computed here"),
        ({"architecture": "skip_transcoder"}, "is a transcoder"),
        ({"metadata": {**OURS, "hook_name": "blocks.1.hook_mlp_out"}}, "captured between blocks"),
        ({"metadata": {**OURS, "hook_name": None}}, "does not say where its activations come from"),
        ({"metadata": {**OURS, "hook_head_index": 2}}, "attention heads"),
        ({"metadata": {**OURS, "hook_name": "x\x1b[31m"}}, "names the site 'x.x1b"),
        ({"metadata": {**OURS, "hook_name": "x" * 300}}, "names the site 'xxx"),
        ({"metadata": [1]}, "cannot be read"),
        ({"metadata": {**OURS, "tsae": 5}}, "does not fit the config"),
        ({"metadata": {**OURS, "tsae": {"sae": {"d_sae": 160, "k": 2.5}}}}, r"k=2\.5"),
        ({"metadata": {**OURS, "tsae": {"sae": {"d_sae": 10**14, "k": 2}}}}, "names 10+ latents"),
        ({"d_sae": 12}, "does not fit the config"),
        ({"d_in": 10**15}, r"does not fit the config \(W_enc has shape \(48, 160\), expected \(10+, 160\)\)"),
        ({"d_in": -1}, "d_in is -1"),
        ({"d_in": 48.0}, r"d_in is 48\.0"),
        ({"d_sae": True}, "d_sae is True"),
        ({"architecture": "topk"}, "k is None"),
        ({"architecture": "topk", "k": 161}, "k is 161, of 160 latents"),
        ({"apply_b_dec_to_input": "false"}, "apply_b_dec_to_input is 'false'"),
    ],
)
def test_what_cannot_be_computed_here_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    weights = {
        "W_enc": torch.zeros(D_IN, D_SAE),
        "W_dec": torch.zeros(D_SAE, D_IN),
        "b_enc": torch.zeros(D_SAE),
        "b_dec": torch.zeros(D_IN),
        "threshold": torch.zeros(D_SAE),
    }
    save_file(weights, tmp_path / "sae_weights.safetensors")
    config = {**lens_config("jumprelu"), **change}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    refuses(message, TemporalSAE.load, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "name", "value", "message"),
    [
        ("jumprelu", "W_enc", float("inf"), "W_enc .*finite"),
        ("jumprelu", "threshold", -float("inf"), "threshold .*finite"),
        ("jumprelu", "W_dec", 1e300, "W_dec .*finite"),  # too large for float32
        ("gated", "r_mag", 200.0, "W_enc .*finite"),  # its exponential is
        ("gated", "b_gate", torch.zeros(1), r"b_gate has shape \(1,\)"),
        ("topk", "W_enc", torch.zeros(D_IN, D_SAE, dtype=torch.int64), r"W_enc holds torch\.int64"),
        ("jumprelu", "topk_threshold", torch.ones(()), "Unexpected key.*topk_threshold"),
    ],
)
def test_weights_that_cannot_be_right_are_refused(
    architecture: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    shapes = {"W_enc": (D_IN, D_SAE), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)}
    shapes |= {"b_enc": (D_SAE,)} if architecture != "gated" else dict.fromkeys(("r_mag", "b_gate", "b_mag"), (D_SAE,))
    shapes |= {"threshold": (D_SAE,)} if architecture == "jumprelu" else {}
    weights = {key: torch.ones(shape, dtype=torch.float64) for key, shape in shapes.items()}
    if isinstance(value, float):
        weights[name].view(-1)[5] = value
    else:
        weights[name] = value
    save_file(weights, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(lens_config(architecture, k=3)))
    refuses(message, TemporalSAE.load, tmp_path)


def test_a_latent_may_never_be_active(tmp_path: Path) -> None:
    folder = save_jumprelu(tmp_path, D_IN)
    weights = load_file(folder / "sae_weights.safetensors")
    weights["threshold"][3] = float("inf")
    save_file(weights, folder / "sae_weights.safetensors")
    assert float(TemporalSAE.load(folder).threshold[3]) == float("inf")


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("topk", {"k": 7}),
        ("jumprelu", {"apply_b_dec_to_input": False}),
        ("jumprelu", {"normalize_activations": "layer_norm"}),
    ],
)
def test_what_a_config_says_is_computed_counts_also_where_its_metadata_name_a_tsae(
    architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    from sae_lens import SAE

    from tsae.sae import saelens

    config = lens_config(architecture, **more)
    lens = randomized(SAE.from_dict(config))
    lens.save_model(tmp_path)
    plain = TemporalSAE.load(tmp_path)
    written = json.loads((tmp_path / "cfg.json").read_text())
    written["metadata"]["tsae"] = {"sae": {"d_sae": D_SAE, "k": 5, "groups": [0.25, 0.75]}}
    (tmp_path / "cfg.json").write_text(json.dumps(written))
    found = TemporalSAE.load(tmp_path)
    assert torch.equal(found.encode(tokens()), plain.encode(tokens()))
    assert found.config.d_high == D_SAE // 4
    refuses(r"is a published SAE, not a T-SAE\. Load it with sae_lens itself", saelens.disk_loader, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_fn_str": "tanh-relu"}, "its activation function is 'tanh-relu'"),
        ({"activation_fn_kwargs": 5, "activation_fn_str": "topk"}, r"cfg\.json: cannot be read"),
        ({"activation_fn_kwargs": {"k": 2.9}, "activation_fn_str": "topk"}, r"k is 2\.9"),
        ({"architecture": ["standard"]}, "cannot be read"),
        ({"hook_point": ["a"]}, r"names the site \['a'\]"),
        ({"sae_lens_version": "zz"}, "cannot be read"),
    ],
)
def test_values_of_no_use_in_configs_before_version_6_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from sae_lens import SAE

    randomized(SAE.from_dict(lens_config("standard"))).save_model(tmp_path)
    (tmp_path / "cfg.json").write_text(json.dumps({"hook_point": LENS_SITE, "d_in": D_IN, "d_sae": D_SAE, **change}))
    refuses(message, TemporalSAE.load, tmp_path)


def test_configs_before_version_6_are_converted_by_sae_lens(tmp_path: Path) -> None:
    """As gpt2-small-res-jb has them, and a top-k SAE of that time."""
    from sae_lens import SAE

    for more in ({}, {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 7}, "normalize_activations": None}):
        architecture = "topk" if more else "standard"
        lens = randomized(SAE.from_dict(lens_config(architecture, **({"k": 7} if more else {}))))
        lens.save_model(tmp_path)
        old = {
            "hook_point": LENS_SITE,
            "d_in": D_IN,
            "d_sae": D_SAE,
            "dtype": "torch.float32",
            "prepend_bos": True,
            **more,
        }
        (tmp_path / "cfg.json").write_text(json.dumps(old))
        found = TemporalSAE.load(tmp_path)
        assert found.site == LENS_SITE
        with torch.no_grad():
            assert torch.equal(found.encode(tokens()), lens.encode(tokens()))


def test_an_sae_of_sae_lens_goes_through_the_analysis(store: Any, tmp_path: Path) -> None:
    import tsae

    save_jumprelu(tmp_path / "wide", D_IN)
    refuses("has d_model 16, the SAE expects 48", tsae.evaluate, tmp_path / "wide", store)
    folder = save_jumprelu(tmp_path / "lens", 16)
    found = tsae.evaluate(folder, store, held_out=None)
    assert found.fve_high == found.fve
    assert 0 < found.l0 < 40
    with pytest.warns(UserWarning, match="this published SAE explains"):
        features = tsae.encode(folder, store, to=tmp_path / "features", progress=False)
    assert features.info["sae"]["architecture"] == "jumprelu"
    assert features.codes.shape[1] == 40
    for reader in features.readers:
        assert features.reader_info(reader)["l0"] > 0


def save_jumprelu(folder: Path, d_in: int) -> Path:
    from sae_lens import SAE

    lens = randomized(SAE.from_dict({**lens_config("jumprelu"), "d_in": d_in, "d_sae": 40}))
    lens.save_model(folder)
    return folder
