"""Weight drift against dense numpy, LoRA against merged models, and what has no drift."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tsae
from support.builders import save_model, save_perturbed
from support.checkpoints import edit, reweigh, save_adapter
from support.refusals import refuses
from tsae.checkpoints import drift as module
from tsae.checkpoints.drift import drift_by, place, update_of, weight_drift
from tsae.checkpoints.lora import LoraUpdate, _alpha
from tsae.checkpoints.series import CheckpointSeries
from tsae.report.drift import drift_text


def measure(*sources: Path, **options: Any) -> Any:
    return weight_drift(CheckpointSeries.load(*sources), progress=False, **options)


def dense(base: Path, moved: Path) -> dict[str, dict[str, float]]:
    """The oracle: whole matrices in float64 numpy."""
    before, after = load_file(base / "model.safetensors"), load_file(moved / "model.safetensors")
    found = {}
    for name in before:
        a, b = before[name].double().numpy(), after[name].double().numpy()
        row = {"base_norm": np.sqrt((a**2).sum()), "update_norm": np.sqrt(((b - a) ** 2).sum())}
        row |= {"changed": (a != b).mean(), "n_weights": a.size}
        row["relative"] = row["update_norm"] / row["base_norm"]
        if a.ndim == 2:
            singular = np.linalg.svd(b - a, compute_uv=False)
            row["spectral"] = singular[0]
            row["stable_rank"] = (singular**2).sum() / singular[0] ** 2 if singular[0] else np.nan
        found[name] = row
    total = sum(row["update_norm"] ** 2 for row in found.values())
    return {name: {**row, "share": row["update_norm"] ** 2 / total} for name, row in found.items()}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A run that moved every weight, but for one matrix and the half of another."""
    folder = save_perturbed(llama, tmp_path_factory.mktemp("moved") / "run", amount=0.02)
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"
    before = load_file(llama / "model.safetensors")
    return reweigh(folder, lambda w: (w[up].copy_(before[up]), w[down][:8].copy_(before[down][:8])))


@pytest.mark.parametrize("block", [1 << 24, 40])
def test_drift_is_that_of_dense_matrices(llama: Path, moved: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the blocks."""
    monkeypatch.setattr(module, "_BLOCK", block)
    table = measure(llama, moved)
    expected = dense(llama, moved)
    assert set(table.tensor) == set(expected)
    assert (table.checkpoint == "run").all()
    for row in table.to_dict("records"):
        for name, value in expected[row["tensor"]].items():
            assert row[name] == pytest.approx(value, rel=1e-6, nan_ok=True), (row["tensor"], name)
        assert ("spectral" in expected[row["tensor"]]) == np.isfinite(row["spectral"])
    by_name = table.set_index("tensor")
    unmoved = by_name.loc["model.layers.0.mlp.up_proj.weight"]
    assert unmoved.update_norm == unmoved.relative == unmoved.changed == 0
    assert by_name.changed["model.layers.2.mlp.down_proj.weight"] == pytest.approx(0.5)
    assert (table.rounding == 0).all()
    assert table.share.sum() == pytest.approx(1)


@pytest.mark.parametrize("kept", [True, False])
def test_lanczos_finds_the_largest_singular_value(tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide and a tall matrix, larger than what is decomposed directly; and one of rank one."""
    rng = np.random.default_rng(0)
    shapes = {"wide": (120, 3000), "tall": (3000, 120), "narrow": (40_000, 10), "rank1": (600, 600), "flat": (600, 600)}
    before = {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    after = {
        name: w + 0.1 * torch.from_numpy(rng.standard_normal(w.shape).astype(np.float32)) for name, w in before.items()
    }
    ones = torch.from_numpy(rng.standard_normal((600, 1)).astype(np.float32))
    after["rank1"] = before["rank1"] + ones @ ones.T
    orthogonal = torch.linalg.qr(torch.from_numpy(rng.standard_normal((600, 600)))).Q.float()
    after["flat"] = before["flat"] + orthogonal  # all singular values are 1
    for name, weights in (("base", before), ("run", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / name / "model.safetensors")
    table = measure(tmp_path / "base", tmp_path / "run").set_index("tensor")
    for name in shapes:
        singular = np.linalg.svd((after[name] - before[name]).double().numpy(), compute_uv=False)
        assert table.spectral[name] == pytest.approx(singular[0], rel=3e-3), name
        assert table.stable_rank[name] == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=6e-3), name
    assert table.stable_rank["rank1"] == pytest.approx(1, rel=1e-4)
    assert table.stable_rank["flat"] == pytest.approx(600, rel=1e-3)
    assert (
        measure(tmp_path / "base", tmp_path / "run", spectral=False)[["spectral", "stable_rank"]].isna().all(axis=None)
    )


LORA: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"use_rslora": True, "r": 4}),
    ("llama", {"alpha_pattern": {"q_proj": 32, "layers.1.mlp.up_proj": 1}, "rank_pattern": {"o_proj": 1}}),
    ("qwen2", {"bias": "all", "modules_to_save": ["lm_head"]}),
    ("qwen2", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    ("llama", {"use_dora": True}),
    ("gpt2", {}),
]


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize(("architecture", "options"), LORA, ids=[f"{a}-{'-'.join(o)}" for a, o in LORA])
def test_adapters_drift_as_the_merged_models_do(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = save_model(tmp_path / "base", architecture)
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base)
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    series = CheckpointSeries.load(base, adapter, tmp_path / "merged")
    table = weight_drift(series, progress=False)
    found, expected = (table[table.checkpoint == name].set_index("tensor") for name in ("adapter", "merged"))
    assert (expected.update_norm > 0).sum() >= 3
    common = expected.index
    if architecture == "gpt2":  # Its tied lm_head is adapted by itself; merging gives it weights of its own.
        common = common.drop("lm_head.weight", errors="ignore")
    for column in ("n_weights", "base_norm", "update_norm", "relative", "spectral"):
        np.testing.assert_allclose(
            found.loc[common, column].astype(float), expected.loc[common, column], rtol=1e-4, atol=1e-6
        )
    norms = update_of(series["adapter"]).norms  # to which noise is compared
    assert norms == pytest.approx(expected.update_norm[list(norms)].to_dict(), rel=1e-4)
    assert (expected.update_norm.drop(list(norms)) == 0).all()
    plain = found[found.changed.isna()]
    assert (plain.stable_rank <= 4 + 1e-6).all()
    if not options:
        assert len(plain) == (21 if architecture == "llama" else 12)


def test_a_tied_head_is_an_update_of_its_own(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "gemma3")
    assert "lm_head.weight" not in load_file(base / "model.safetensors")
    save_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    table = measure(base, tmp_path / "adapter").set_index("tensor")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    product = weights["base_model.model.lm_head.lora_B.weight"] @ weights["base_model.model.lm_head.lora_A.weight"]
    assert table.update_norm["lm_head.weight"] == pytest.approx(float(8 / 3 * product.norm()), rel=1e-5)
    assert table.base_norm["lm_head.weight"] == table.base_norm["model.embed_tokens.weight"]
    assert table.update_norm["model.embed_tokens.weight"] == 0


def test_rounding_is_told_from_training(llama: Path, tmp_path: Path) -> None:
    """A base stored more coarsely drifts by its rounding and by nothing else."""
    coarse = Path(shutil.copytree(llama, tmp_path / "coarse"))
    reweigh(coarse, lambda w: w.update({k: v.bfloat16() for k, v in w.items()}))
    table = measure(llama, coarse)
    assert (table.relative == table.rounding).all()
    assert table.rounding.between(1e-4, 4e-3).all()
    assert "rounding alone makes 100 % of the drift" in drift_text(table)
    assert (measure(coarse, llama).rounding == 0).all()
    same = Path(shutil.copytree(llama, tmp_path / "same"))
    table = measure(llama, same)
    assert (table[["update_norm", "relative", "share", "changed"]] == 0).all(axis=None)
    assert table.stable_rank.isna().all()


def test_rows_are_put_together_as_one_tensor(llama: Path, moved: Path) -> None:
    table = measure(llama, moved)
    before, after = load_file(llama / "model.safetensors"), load_file(moved / "model.safetensors")

    def relative(chosen: Any) -> float:
        a, b = (np.concatenate([w[n].double().numpy().ravel() for n in before if chosen(n)]) for w in (before, after))
        return float(np.linalg.norm(b - a) / np.linalg.norm(a))

    whole = drift_by(table, [])
    assert whole.relative.tolist() == pytest.approx([relative(lambda n: True)])
    assert whole.share.tolist() == pytest.approx([1.0])
    layers = drift_by(table, ["layer"]).set_index("layer")
    assert list(layers.index[layers.index.notna()]) == [0, 1, 2]
    assert layers.relative[1] == pytest.approx(relative(lambda n: ".1." in n))
    assert layers.relative[layers.index.isna()].iloc[0] == pytest.approx(relative(lambda n: "layers" not in n))
    modules = drift_by(table, ["module"]).set_index("module")
    assert modules.relative["mlp.up_proj"] == pytest.approx(relative(lambda n: "up_proj" in n))
    assert modules.n_weights.sum() == sum(w.numel() for w in before.values())


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("model.layers.12.self_attn.q_proj.weight", (12, "self_attn.q_proj")),
        ("model.layers.0.self_attn.q_proj.bias", (0, "self_attn.q_proj.bias")),
        ("model.layers.3.mlp.experts.17.up_proj.weight", (3, "mlp.experts.*.up_proj")),
        ("transformer.h.5.attn.c_attn.weight", (5, "attn.c_attn")),
        ("model.language_model.embed_tokens.weight", (None, "embed_tokens")),
        ("transformer.wte.weight", (None, "wte")),
        ("model.norm.weight", (None, "norm")),
        ("lm_head.weight", (None, "lm_head")),
    ],
)
def test_names_of_tensors(tensor: str, expected: tuple[int | None, str]) -> None:
    assert place(tensor) == expected


def test_what_has_no_drift_is_refused(llama: Path, moved: Path, tmp_path: Path) -> None:
    def changed(name: str, weights: dict[str, torch.Tensor]) -> Path:
        folder = Path(shutil.copytree(moved, tmp_path / name))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    weights, lost = load_file(moved / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": ({k: v for k, v in weights.items() if k != lost}, rf"1 are missing and 0 new \(first: {lost}\)"),
        "shape": ({**weights, lost: weights[lost][:-1].contiguous()}, rf"{lost} is stored as F32 of the shape"),
        "nan": ({**weights, lost: weights[lost] * torch.nan}, f"{lost} holds values that are not finite"),
    }
    for name, (content, message) in cases.items():
        folder = changed(name, content)
        refuses(message, measure, llama, folder)
    cut = changed("cut", weights) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    refuses("cannot be read", measure, llama, cut.parent)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuses("quantised", measure, llama, tmp_path / "model.gguf")


def test_an_adapter_with_other_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    cases = [
        ({**weights, "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(2, 16)},
         "which is not a LoRA weight"),
        ({k: v for k, v in weights.items() if k != name.format("B")}, "its update of .* does not fit"),
        ({**weights, name.format("A"): torch.zeros(3, 17)}, r"its update of .* does not fit .* \(32, 16\)"),
        ({**weights, name.format("A"): torch.zeros(2, 16)}, "its update of .* does not fit"),
    ]  # fmt: skip
    for content, message in cases:
        save_file(content, file)
        refuses(message, measure, llama, adapter)
    save_file(weights, file)
    for alpha in ("x", None, {}):
        edit(adapter / "adapter_config.json", lora_alpha=alpha)
        refuses("usable lora_alpha", measure, llama, adapter)
    edit(adapter / "adapter_config.json", lora_alpha=1, alpha_pattern={"(": 2})
    refuses("usable lora_alpha", measure, llama, adapter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True, "target_modules": ["embed_tokens"]}, "update of model.embed_tokens.weight does not fit"),
        ({"lora_bias": True}, "lora_B.bias, which is not a LoRA weight"),
    ],
)
def test_an_update_that_is_not_computed_is_not_laid_to_the_base(
    options: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    refuses(message, lambda: measure(llama, save_adapter(llama, tmp_path / "adapter", **options)))


def test_the_shipped_runs_drift_further_with_every_step() -> None:
    series = tsae.testbed.series()
    table = drift_by(tsae.weight_drift(series, spectral=False, progress=False), []).set_index("checkpoint")
    for run in series.runs:
        steps = [table.relative[c.id] for c in series if c.run == run]
        assert steps == sorted(steps)
        assert 0.005 < steps[0] < steps[-1] < 0.2
    assert json.dumps(table.share.round(6).unique().tolist()) == "[1.0]"


def test_the_page_and_the_text_show_the_last_step_of_every_run(tmp_path: Path) -> None:
    from tsae.report.drift import drift_figure, last_of_runs, write_drift

    series = tsae.testbed.series().select(["easy-025", "easy-150", "hard-150"])
    table = weight_drift(series, progress=False)
    assert last_of_runs(table) == ["easy-150", "hard-150"]
    figure = drift_figure(table, last_of_runs(table))
    assert [trace.type for trace in figure.data] == ["heatmap"] * 2
    heat = figure.data[1]
    at = list(heat.y).index("layer 1"), list(heat.x).index("mlp.up_proj")
    row = table[(table.checkpoint == "hard-150") & (table.tensor == "model.layers.1.mlp.up_proj.weight")].iloc[0]
    assert heat.z[at[0]][at[1]] == pytest.approx(row.relative)
    assert set(heat.z[list(heat.y).index("embed_tokens")]) == {
        table[(table.checkpoint == "hard-150") & (table.module == "embed_tokens")].relative.iloc[0]
    }
    text = drift_text(table)
    assert f"{100 * row.relative:.3g} %" not in text.splitlines()[1]
    assert "easy-025" in text.split("By module")[0]
    assert "easy-025" not in text.split("By module")[1]
    assert "rounding" not in text
    page = write_drift(table, tmp_path / "drift.html").read_text(encoding="utf-8")
    assert "334,368 weights" in page


@pytest.mark.parametrize(
    "parts",
    [
        {"A": torch.ones(4), "B": torch.ones(3, 4)},
        {"A": torch.ones(2, 5), "B": torch.ones(3, 4)},
        {"A": torch.ones(2, 5)},
        {"A": torch.ones(2, 5), "B": torch.ones(3, 2), "magnitude": torch.ones(1)},
        {"A": torch.ones(2, 6), "B": torch.ones(3, 2)},
        {"whole": torch.ones(3, 1)},
    ],
)
def test_parts_of_an_adapter_that_do_not_fit_are_refused(parts: dict[str, torch.Tensor]) -> None:
    """One magnitude would be stretched over all rows."""
    assert not LoraUpdate("w", **parts).fits((3, 5))
    assert LoraUpdate("w", A=torch.ones(2, 5), B=torch.ones(3, 2)).fits((3, 5))


def test_an_alpha_is_a_number_and_its_pattern_ends() -> None:
    assert _alpha({"lora_alpha": 8, "alpha_pattern": {r"layers\..*": 4}}, "layers.0.mlp") == 4
    for config in (
        {"lora_alpha": "nan"},
        {"lora_alpha": 8, "alpha_pattern": {"([a-z_.0-9]+)+!": 4}},
        {"lora_alpha": 8, "alpha_pattern": {"(a*b*)*!": 4}},
    ):
        refuses("alpha", _alpha, config, "model.layers.0.self_attn.q_proj" * 3)
