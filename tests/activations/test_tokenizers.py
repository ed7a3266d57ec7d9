"""Tokenizers and vocabularies are compared for the tokens at hand: what no text holds blocks nothing."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tsae
from support.builders import make_rollouts, save_model, save_perturbed
from support.checkpoints import IDS, edit, save_resized
from support.refusals import refuses
from tsae.activations.reading_plan import check_tokenizer
from tsae.checkpoints.drift import update_of, weight_drift
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.tokenizers import joined_facts, vocabulary_facts
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

N = 20
"""Tokens of the testbed's tokenizer."""


def changed(source: Path, folder: Path, change: Callable[[Any], object], rows: int = N) -> Path:
    """A checkpoint that moved a little, with another tokenizer and so many embeddings."""
    save_resized(source, folder, rows)
    tokenizer = Checkpoint("c", str(folder)).load_tokenizer()
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


def padded(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"pad_token": "<|PAD_TOKEN|>"})


def rollouts_of(checkpoint: Path, *, more: int | None = None) -> Rollouts:
    """Rollouts that note this checkpoint's tokenizer; the response of trajectory 4 may end with one more token."""
    made = make_rollouts(n_problems=4, n_samples=2)
    ids = made.table["response_ids"].to_pylist()
    if more is not None:
        made = made.with_column("response_ids", [[*one, more] if row == 4 else one for row, one in enumerate(ids)])
    return Rollouts(made.table, vocabulary_facts(Checkpoint("c", str(checkpoint)).load_tokenizer()))


def captured(to: Path, rollouts: Rollouts, *paths: Path, **options: Any) -> dict[str, np.ndarray]:
    config = tsae.CaptureConfig(**options)
    store = tsae.capture(tsae.CheckpointSeries.load(*paths), rollouts, to=to, config=config, progress=False)
    (site,) = store.sites
    return {id: np.concatenate([s.read(site, slice(None)) for s in store.shards(id)]) for id in store.readers}


SPARE: dict[str, tuple[Callable[[Any], object], int]] = {
    "a pad token": (padded, N + 1),
    "rows to a multiple of 64": (padded, 64),
    "two tokens": (lambda t: t.add_tokens(["<think>", "</think>"]), N + 2),
    "another pad and end": (lambda t: t.add_special_tokens({"pad_token": "<eos>", "eos_token": "<bos>"}), N),
    "another template": (lambda t: setattr(t, "chat_template", "{{ messages }}"), N),
}


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", SPARE)
def test_tokens_that_no_text_holds_change_nothing(name: str, llama: Path, tmp_path: Path) -> None:
    """Whether the log was tokenised with the base's tokenizer or the run's."""
    run, plain = changed(llama, tmp_path / "run", *SPARE[name]), save_perturbed(llama, tmp_path / "plain")
    right = captured(tmp_path / "right", rollouts_of(llama), llama, plain)
    for whose in (llama, run):
        found = captured(tmp_path / f"acts-{whose.name}", rollouts_of(whose), llama, run)
        assert all(np.array_equal(found[id], right[of]) for id, of in (("base", "base"), ("run", "plain")))
        series = tsae.CheckpointSeries.load(llama, run)
        for checkpoint in series:  # alone, as causal tests and pages meet it
            check_tokenizer(checkpoint, rollouts_of(whose))
    both = [rollouts_of(llama), rollouts_of(run)]
    together = Rollouts.concat(both)
    assert together.info == max((one.info for one in both), key=lambda info: len(info["vocabulary"]["added"]))
    check_tokenizer(series.base, together)


def test_a_token_that_means_something_else_is_named(llama: Path, tmp_path: Path) -> None:
    run = changed(llama, tmp_path / "run", padded, N + 1)
    used = rollouts_of(llama, more=N)
    for whose, said in (
        (used, r"trajectory 4 holds token id 20: no token to the .* trajectories, '<\|PAD_TOKEN\|>' to that of run"),
        (
            rollouts_of(run, more=N),
            r"trajectory 4 holds token id 20: '<\|PAD_TOKEN\|>' to .*, no token to that of base",
        ),
    ):
        refuses(said, captured, tmp_path / "acts", whose, llama, run)
    # Who does not read that trajectory can read the others.
    policies = ["run" if row == 4 else "base" for row in range(len(used))]
    own = rollouts_of(run, more=N).with_column("policy", policies)
    assert len(captured(tmp_path / "own", own, llama, run, plan="own")["run"]) == len(np.concatenate(own.tokens(4)))
    renamed = shutil.copytree(run, tmp_path / "renamed")  # a token of the vocabulary's middle, that texts hold
    text = (renamed / "tokenizer.json").read_text(encoding="utf-8")
    assert '"7"' in text
    (renamed / "tokenizer.json").write_text(text.replace('"7"', '"seven"'), encoding="utf-8")
    with pytest.raises(
        TsaeError, match=r"trajectory \d+ holds token id 7: '7' to the tokenizer .*, 'seven' to that of"
    ):
        captured(tmp_path / "acts", rollouts_of(llama), llama, renamed)
    with pytest.raises(TsaeError, match="is not the one that the trajectories were tokenised with"):
        check_tokenizer(Checkpoint("renamed", str(renamed)), rollouts_of(llama))  # nobody has the other one
    refuses("tokenised with different tokenizers", lambda: Rollouts.concat([rollouts_of(llama), rollouts_of(renamed)]))


def test_added_tokens_in_another_order(llama: Path, tmp_path: Path) -> None:
    first = changed(llama, tmp_path / "first", lambda t: t.add_tokens(["<a>", "<b>"]), N + 2)
    second = changed(llama, tmp_path / "second", lambda t: t.add_tokens(["<b>", "<a>"]), N + 2)
    captured(tmp_path / "acts", rollouts_of(first), first, second)
    with pytest.raises(TsaeError, match=r"trajectory 4 holds token id 21: '<b>' to .*, '<a>' to that of second"):
        captured(tmp_path / "used", rollouts_of(first, more=N + 1), first, second)
    refuses("tokenised with different tokenizers", lambda: Rollouts.concat([rollouts_of(first), rollouts_of(second)]))


@pytest.mark.parametrize(
    "noted", [None, 5, {}, {"ids": "x", "hash": 1, "added": {}}, {"ids": 1, "hash": "", "added": 3}]
)
def test_what_a_file_notes_of_its_tokenizer_may_be_nonsense(noted: Any, llama: Path) -> None:
    rollouts = rollouts_of(llama)
    odd = Rollouts(rollouts.table, {"tokenizer": "0123456789abcdef", "vocabulary": noted})
    with pytest.raises(TsaeError, match="is not the one that the trajectories were tokenised with"):
        check_tokenizer(Checkpoint("base", str(llama)), odd)
    assert joined_facts([odd.info, rollouts.info]) is None


def test_resized_embeddings_drift_by_the_tokens_that_both_have(llama: Path, tmp_path: Path) -> None:
    plain = save_perturbed(llama, tmp_path / "plain")
    right = weight_drift(tsae.CheckpointSeries.load(llama, plain), progress=False).drop(columns=["checkpoint", "run"])
    norms = update_of(tsae.CheckpointSeries.load(llama, plain)["plain"]).norms
    series = tsae.CheckpointSeries.load(llama, changed(llama, tmp_path / "more", padded, 64))
    (note,) = series.notes
    assert note.startswith(
        "the embeddings of more (64) are not as many as those of the base (20): weights are compared"
    )
    assert weight_drift(series, progress=False).drop(columns=["checkpoint", "run"]).equals(right)
    assert update_of(series["more"]).norms == pytest.approx(norms)
    series = tsae.CheckpointSeries.load(llama, changed(llama, tmp_path / "fewer", lambda t: None, N - 1))
    found = weight_drift(series, progress=False).set_index("tensor").loc["lm_head.weight"]
    a, b = (load_file(path / "model.safetensors")["lm_head.weight"][: N - 1] for path in (llama, plain))
    assert (found.n_weights, found.base_norm) == (a.numel(), pytest.approx(float(a.norm())))
    assert found.update_norm == pytest.approx(float((a - b).norm()))
    assert found.spectral == pytest.approx(float(torch.linalg.matrix_norm(a - b, 2)), rel=1e-4)


SAVED = (["embed_tokens", "lm_head"], ["lm_head"])


@pytest.mark.parametrize("options", [*({"modules_to_save": some} for some in SAVED), {"trainable_token_indices": [N]}])
def test_an_adapter_that_trained_a_new_token(options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """Its run had resized the vocabulary, and peft writes embeddings and heads several times."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.random.fork_rng(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        grown = AutoModelForCausalLM.from_pretrained(llama)
        grown.resize_token_embeddings(N + 1, mean_resizing=False)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        model = get_peft_model(grown, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
        model.save_pretrained(tmp_path / "run")
        right, merged = model(IDS).logits, model.merge_and_unload().state_dict()
    series = tsae.CheckpointSeries.load(llama, tmp_path / "run")
    before, adapted = series.base.load_model()(IDS).logits, list(series)[1]
    loader = ModelLoader()
    assert torch.equal(loader.load(adapted)(IDS).logits, right)
    assert torch.equal(loader.load(series.base)(IDS).logits, before)
    if "modules_to_save" in options:
        moved = weight_drift(series, progress=False).set_index("tensor").update_norm
        own = load_file(llama / "model.safetensors")["lm_head.weight"]
        assert moved["lm_head.weight"] == pytest.approx(float((merged["lm_head.weight"][:N] - own).norm()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_an_adapter_of_a_resized_base(architecture: str, tmp_path: Path) -> None:
    """peft saves embeddings and head with the adapter, and the base on the disk has the old ones."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base, run = save_model(tmp_path / "base", architecture), tmp_path / "run" / "checkpoint-1"
    with warnings.catch_warnings(), torch.random.fork_rng(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        grown = AutoModelForCausalLM.from_pretrained(base)
        grown.resize_token_embeddings(64)
        grown.save_pretrained(tmp_path / "grown")
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(grown, config).save_pretrained(run)
        edit(run / "adapter_config.json", base_model_name_or_path=str(base))
        oracle = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "grown"), run)
        right = oracle(IDS).logits
    series = tsae.CheckpointSeries.load(base, run.parent)
    adapted = list(series)[1]
    before, random = series.base.load_model()(IDS).logits, torch.random.get_rng_state()
    loader = ModelLoader()
    assert torch.equal(loader.load(adapted)(IDS).logits, right)
    assert torch.equal(loader.load(series.base)(IDS).logits, before)
    assert torch.equal(random, torch.random.get_rng_state())
    moved = weight_drift(series, progress=False).set_index("tensor").update_norm
    assert {name for name, norm in update_of(adapted).norms.items() if norm > 0} == set(moved[moved > 0].index)
    assert all("q_proj" in name or "v_proj" in name for name in moved[moved > 0].index)
