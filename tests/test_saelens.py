"""Exported to sae_lens and read from it: codes are equal bit for bit, in both directions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE

SITE = "blocks.1.hook_resid_post"

# sae_lens imports a deprecated module of transformer_lens.
pytestmark = pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def sae() -> TemporalSAE:
    """Wide enough that matrix products are blocked; about 20 of 384 latents active."""
    generator = torch.Generator().manual_seed(0)
    config = SAEConfig(d_sae=384, k=20, groups=(0.25, 0.75), temporal_weight=0.7)
    sae = TemporalSAE(576, config, site=SITE, training={"norms": {"limit": 700.0}})
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


def test_plain_sae_lens_gives_the_same_bits(sae: TemporalSAE, x: torch.Tensor, tmp_path: Path) -> None:
    found = in_sae_lens_alone(sae.to_saelens(tmp_path / "exported"), x, tmp_path)
    assert found["ours"] == []
    assert found["class"] == "JumpReLUSAE"
    codes = sae.encode(x)
    assert 5 < float((codes > 0).sum(1).float().mean()) < 50
    assert torch.equal(found["codes"], codes)
    assert float((found["codes"] - codes).abs().max()) == 0.0
    assert torch.equal(found["x_hat"], sae.decode(codes))
    assert torch.equal(found["batched"], sae.encode(x[:300].reshape(3, 100, -1)))
    metadata = found["metadata"]
    assert (metadata["hook_name"], metadata["d_high"], metadata["temporal_weight"]) == (SITE, 96, 0.7)
    assert metadata["tsae"]["sae"]["k"] == 20


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
    assert (lens.cfg.d_high, lens.cfg.metadata.hook_name) == (96, SITE)
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


def test_our_architecture_is_not_the_one_that_sae_lens_calls_temporal() -> None:
    from sae_lens.registry import SAE_CLASS_REGISTRY

    from tsae.sae import saelens

    assert SAE_CLASS_REGISTRY["tsae_temporal"][0] is saelens.LensTemporalSAE
    assert SAE_CLASS_REGISTRY["temporal"][0] is not saelens.LensTemporalSAE


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
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == ["cfg.json", "sae_weights.safetensors"]
    again = sae.to_saelens(tmp_path / "again")
    for file in (tmp_path / "to").iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    with pytest.raises(TsaeError, match="unknown architecture 'temporal'"):
        sae.to_saelens(tmp_path / "other", architecture="temporal")  # type: ignore[arg-type]
