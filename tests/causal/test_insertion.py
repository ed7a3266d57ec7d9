"""Top tokens inserted into other contexts: a model whose residual stream knows the token, and whether a mark came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import tsae
from support.builders import BOS, D_MODEL, EOS, model_config
from support.refusals import fails, refuses
from support.results import answer
from tsae.causal.config import InsertionConfig
from tsae.causal.insertion import COLUMNS, insertion, last_activations
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.cli import main
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig
from tsae.sae.model import TemporalSAE

SITE = "blocks.0.hook_resid_post"
MARK, TOKEN, OTHER = 10, 3, 5  # Token ids.
IS_TOKEN, IS_MARK, IS_ELSE, MARKED, IS_FIRST = 0, 1, 2, 3, 4  # Directions of the residual stream.
BY_TOKEN, BY_BOTH, EVERYWHERE, SILENT, IN_PROMPT = 0, 1, 2, 3, 4  # Latents.


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tsae.CheckpointSeries:
    """Block 0 attends to everything alike and writes the share of marks so far; nothing else is added."""
    from transformers import AutoModelForCausalLM

    from tsae.testbed import make_tokenizer

    model = AutoModelForCausalLM.from_config(model_config("llama"))
    with torch.no_grad():
        for block in model.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.v_proj, block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight.zero_()
        embedding = torch.zeros_like(model.model.embed_tokens.weight)
        embedding[:, IS_ELSE] = 1.0
        embedding[[TOKEN, MARK, BOS], IS_ELSE] = 0.0
        embedding[TOKEN, IS_TOKEN] = embedding[MARK, IS_MARK] = embedding[BOS, IS_FIRST] = 1.0
        model.model.embed_tokens.weight.copy_(embedding)
        attention = model.model.layers[0].self_attn
        attention.v_proj.weight[0, IS_MARK] = 1.0
        attention.o_proj.weight[MARKED, 0] = 1.0  # The first head reads the first value.
    folder = tmp_path_factory.mktemp("marked") / "model"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return tsae.CheckpointSeries((tsae.Checkpoint("base", str(folder)),))


@pytest.fixture(scope="module")
def sae() -> TemporalSAE:
    """Latents of the token alone, of the token after a mark, of everything, of nothing, of the first token."""
    sae = TemporalSAE(D_MODEL, SAEConfig(d_sae=D_MODEL, k=4), site=SITE)
    with torch.no_grad():
        sae.W_enc.zero_()
        sae.b_enc.zero_()
        sae.W_enc[IS_TOKEN, BY_TOKEN], sae.b_enc[BY_TOKEN] = 10.0, -5.0
        # 100 for the token; the share of marks, 1/20 or more of a norm of 4, is worth 2 or more.
        sae.W_enc[IS_TOKEN, BY_BOTH], sae.W_enc[MARKED, BY_BOTH], sae.b_enc[BY_BOTH] = 100.0, 10.0, -101.0
        sae.b_enc[EVERYWHERE] = 1.0
        sae.b_enc[SILENT] = -1.0
        # The first token of every text is special, and fires even the token's feature.
        sae.W_enc[IS_FIRST, BY_TOKEN] = 10.0
        sae.threshold.fill_(0.1)
    return sae.eval()


@pytest.fixture(scope="module")
def features(
    series: tsae.CheckpointSeries, sae: TemporalSAE, tmp_path_factory: pytest.TempPathFactory
) -> tsae.FeatureTable:
    """Every other problem's responses begin with a mark, and have the token soon after it or not at all."""
    from tsae.checkpoints.tokenizers import tokenizer_fingerprint

    rng, records = np.random.default_rng(0), []
    for problem in range(40):
        for sample in range(3):
            filler = rng.choice([OTHER, 6, 7, 8], 9).tolist()
            body = [MARK, TOKEN, *filler, TOKEN] if problem % 2 else [*filler, *([TOKEN] if sample else [])]
            texts = {"prompt": "p", "prompt_ids": [BOS, 6, 7], "response_ids": [*body, EOS]}
            records.append(answer(f"p{problem}", "base", problem % 2 == 1, **texts))
    rollouts = Rollouts.from_records(records, {"tokenizer": tokenizer_fingerprint(series.base.load_tokenizer())})
    folder = tmp_path_factory.mktemp("table")
    store = tsae.capture(series, rollouts, [SITE], to=folder / "acts", progress=False)
    sae.save(folder / "sae")
    return tsae.encode(sae, store, to=folder / "features", progress=False)


@pytest.fixture(scope="module")
def found(series: tsae.CheckpointSeries, sae: TemporalSAE, features: tsae.FeatureTable) -> pd.DataFrame:
    chosen = [BY_TOKEN, BY_BOTH, EVERYWHERE, SILENT]
    return insertion(series.base, sae, features, chosen, progress=False).set_index("feature")


def test_a_token_detector_and_a_feature_of_context_are_told_apart(found: pd.DataFrame) -> None:
    token, both = found.loc[BY_TOKEN], found.loc[BY_BOTH]
    assert token.verdict == "token-driven"
    assert token.top_ids == both.top_ids == [TOKEN]
    assert (token.inserted, token.inserted_rate, token.control, token.natural_rate) == (5, 1, 0, 1)
    assert token.kept == token.kept_low == token.kept_high == 1
    assert both.verdict == "context-dependent"
    assert both.kept_high < 0.5
    assert 0.4 < both.natural_rate < 0.9  # On its own the token looks like half of the matter.
    # Trajectories of the other half; those without a token before it, where the mark follows the prompt, too.
    assert token.n_contexts == 60
    assert found.loc[EVERYWHERE].verdict == "fires on every token"
    assert found.loc[SILENT].verdict == "never active"
    assert found.loc[[EVERYWHERE, SILENT], "kept"].isna().all()


def test_the_control_token_is_as_frequent(found: pd.DataFrame, features: tsae.FeatureTable) -> None:
    (control,) = found.loc[BY_TOKEN].control_ids
    assert control not in (TOKEN, BOS, EOS)
    # The mark comes once in half of the trajectories, the fillers two or more times in each; the token in between.
    counts = np.bincount(features.token_ids)
    others = [MARK, OTHER, 6, 7, 8]
    assert control == min(others, key=lambda i: abs(np.log(counts[i] / counts[TOKEN])))


def test_the_token_that_stood_there_gives_what_the_table_says(
    series: tsae.CheckpointSeries, sae: TemporalSAE, features: tsae.FeatureTable
) -> None:
    """Cut texts are read as whole ones were."""
    reading = HuggingFaceReader(series.base.load_model(), [SITE])
    rng = np.random.default_rng(0)
    rows = rng.integers(0, features.n_rows, 300)
    places = [int(rng.integers(features.row_offsets[r] + 1, features.row_offsets[r + 1])) for r in rows]
    texts = [features.token_ids[features.row_offsets[r] : p + 1] for r, p in zip(rows, places, strict=True)]
    for feature in (BY_TOKEN, BY_BOTH):
        read = last_activations(reading, sae, texts, feature, 64)
        np.testing.assert_allclose(read, features.codes[:, [feature]].toarray().ravel()[places], atol=1e-4)
        assert (read > 0).any()


def test_the_same_seed_draws_the_same(
    series: tsae.CheckpointSeries, sae: TemporalSAE, features: tsae.FeatureTable, found: pd.DataFrame
) -> None:
    again = insertion(series.base, sae, features, [BY_BOTH], progress=False)
    assert list(again.columns) == list(COLUMNS)
    assert again.iloc[0].kept == found.loc[BY_BOTH].kept
    few = insertion(series.base, sae, features, [BY_TOKEN], InsertionConfig(n_contexts=8), progress=False).iloc[0]
    assert few.n_contexts == 8


def test_bad_input(series: tsae.CheckpointSeries, sae: TemporalSAE, features: tsae.FeatureTable) -> None:
    other, stranger = TemporalSAE(D_MODEL, sae.config, site=SITE), tsae.Checkpoint("other", series.base.path)
    for checkpoint, by, chosen, said in (
        (series.base, sae, 99, "no feature 99"),
        (series.base, other, 0, "another SAE"),
        (stranger, sae, 0, "no reader 'other'"),
    ):
        refuses(said, insertion, checkpoint, by, features, [chosen], progress=False)
    refuses("n_contexts=0", InsertionConfig, n_contexts=0)
    scarce = insertion(series.base, sae, features, [BY_TOKEN], InsertionConfig(min_problems=30), progress=False)
    assert "30 are needed" in scarce.verdict[0]
    assert scarce.kept.isna().all()


def test_command_line(
    series: tsae.CheckpointSeries, features: tsae.FeatureTable, sae: TemporalSAE, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Success is made to be the token, so that there is something to find."""
    right = features.row_means()[:, [BY_TOKEN]].toarray().ravel() > 0
    dealt = features.rollouts.with_column("outcome", ["success" if r else "failure" for r in right])
    folder = replace(features, rollouts=dealt).save(tmp_path / "dealt")
    sae.save(tmp_path / "sae")
    args = ["diff", "--features", str(folder), "--to", str(tmp_path / "diff"), "--insertion", "2"]
    assert "--series and --sae" in fails(capsys, *args).err
    model = series.base.path
    main([*args, "--series", model, "--sae", str(tmp_path / "sae"), "--tokenizer", model])
    printed = capsys.readouterr().out
    assert "token-driven" in printed
    assert "'3'" in printed
    table = pd.read_parquet(tmp_path / "diff" / "insertion.parquet")
    assert table.set_index("feature").verdict[BY_TOKEN] == "token-driven"
