"""The measured table: estimates by hand, and sampling from a tiny model."""

from __future__ import annotations

import math

import pytest
from organism.corpus import CorpusConfig, Document, sample_document
from organism.measuring import mean_interval, measure, sample_responses, summarise, to_markdown, wilson
from organism.pretraining import BaseConfig, ModelConfig, llama_config, pad_batch, train_base

from tsae.testbed import describe_response, generate_problems, make_tokenizer

TINY = BaseConfig(model=ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=16), steps=3, batch=8, warmup=1)


def test_wilson_interval_by_its_formula() -> None:
    k, n, z = 7, 20, 1.959963984540054
    p = k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    estimate = wilson(k, n)
    assert estimate.value == p
    assert estimate.low == pytest.approx(centre - half)
    assert estimate.high == pytest.approx(centre + half)


def test_mean_interval_by_hand() -> None:
    estimate = mean_interval([1.0, 3.0])  # standard deviation sqrt(2), standard error 1
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2.0, 2 - 1.96, 2 + 1.96))


def test_summary_of_three_responses() -> None:
    prompt = "3+5*2-7?"
    texts = ["#9<eos>", "#8<eos>", "3+5=8;8*2=6;6-7=9;#9<eos>", "3+5=8;8*2=6;6"]
    row = summarise("base", "x", 1, [describe_response(prompt, text) for text in texts])
    assert row.accuracy.value == row.direct.value == row.unanswered * 2 == 0.5
    assert row.flawless.value == 0.25
    assert row.skipped.value == pytest.approx((1 + 1 + 0 + 1 / 3) / 4)
    assert row.length.value == (3 + 3 + 21 + 13) / 4
    assert row.accuracy_direct is not None
    assert row.accuracy_scratchpad is not None
    assert row.accuracy_direct.value == row.accuracy_scratchpad.value == 0.5
    assert "| base | x | 4 (1) | .50 (" in to_markdown([row])


def test_corpus_keeps_its_mixture() -> None:
    import random

    rng = random.Random(0)
    config = CorpusConfig()
    facts = []
    n_slips = n_steps = 0
    for _ in range(4000):
        document = sample_document(config, rng)
        fact = describe_response(document.prompt, document.response)
        facts.append(fact)
        if fact.style == "direct":
            assert fact.correct
        else:
            from tsae.testbed import annotate

            results = [x for x in annotate(document.prompt, document.response) if x.role == "result"]
            n_steps += len(results)
            n_slips += sum(x.correct is False for x in results)
            assert fact.n_steps_skipped == 0
    n = len(facts)
    assert sum(f.style == "direct" for f in facts) / n == pytest.approx(0.5, abs=0.03)
    assert sum(f.n_steps_required == 1 for f in facts) / n == pytest.approx(0.25 * 0.98, abs=0.03)
    assert sum(f.n_steps_required > 6 for f in facts) / n == pytest.approx(0.02, abs=0.01)
    assert n_slips / n_steps == pytest.approx(0.06, abs=0.01)


def test_only_response_tokens_and_the_end_have_loss() -> None:
    ids, targets = pad_batch([Document("1+1?", "#2"), Document("1+1+1?", "#3")])
    tokenizer = make_tokenizer()
    assert tokenizer.decode(ids[0]) == "<bos>1+1?#2<eos><pad><pad>"
    assert tokenizer.decode(targets[0][targets[0] != -100]) == "#2<eos>"
    assert tokenizer.decode(ids[1]) == "<bos>1+1+1?#3<eos>"


def test_default_model_has_the_stated_size() -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(ModelConfig()))
    assert sum(parameter.numel() for parameter in model.parameters()) == 334_368


def test_training_is_reproducible_and_sampling_too() -> None:
    import torch

    losses: list[float] = []
    first = train_base(TINY, 0, lambda _, loss: losses.append(loss))
    second = train_base(TINY, 0)
    other = train_base(TINY, 1)
    assert len(losses) == TINY.steps
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    prompts = [problem.prompt for problem in generate_problems("medium", 5, seed=0)]
    texts = sample_responses(first, make_tokenizer(), prompts, seed=0, batch=2, max_tokens=6)
    assert texts == sample_responses(second, make_tokenizer(), prompts, seed=0, batch=2, max_tokens=6)
    row = measure("tiny", first, make_tokenizer(), generate_problems("easy", 4, seed=0), n_responses=6, seed=0)
    assert (row.n_problems, row.n_responses, row.level) == (4, 6, "easy")
