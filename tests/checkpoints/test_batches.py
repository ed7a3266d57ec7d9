"""What a text gives does not depend on its batch: it is read and continued as alone, beside any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tsae
from support.builders import ARCHITECTURES, BATCHED, BOS, MIXTURES, N_LAYERS, VOCABULARY, random_sae, save_model
from support.grpo_loop import sample_gradients
from tsae.activations.forward_batches import pad
from tsae.attribution.sample_gradients import TrainedWeights, padded
from tsae.attribution.targets import FeatureMeans
from tsae.causal.insertion import last_activations
from tsae.checkpoints.hooks import HuggingFaceReader
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.tokenizers import load_tokenizer, tokenizer_fingerprint
from tsae.diff.reinforcement import response_logprobs
from tsae.rollouts.generation import Generator
from tsae.sae.quality.splice import loss_recovered

SITES = [f"blocks.{layer}.hook_resid_post" for layer in range(N_LAYERS)]
TEXTS = [[BOS, *np.random.default_rng(n).integers(0, 16, n - 1).tolist()] for n in (6, 12, 16, 17, 40)]
"""Around the 16 tokens at which factors and bases change, before, during and after their continuation."""


def as_loaded(path: Path) -> Any:
    """The model as transformers loads it. It must read nothing: what reads is a copy."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def as_alone(fresh: Any, text: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """By site (T, d_model), and (T, vocabulary) logits, of a text in a model that has read nothing."""
    ids, model = torch.tensor([text]), deepcopy(fresh)
    reader = HuggingFaceReader(model, SITES)
    found = reader.read(ids, torch.ones_like(ids))
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=torch.arange(len(text))[None], use_cache=False).logits[0]
    return {site: hidden[0] for site, hidden in found.items()}, logits


def answers(path: Path, model: Any, prompts: list[list[int]]) -> tuple[list[Any], torch.Tensor]:
    """Likeliest tokens, and (n_prompts, steps, vocabulary) their logits."""
    seen: list[torch.Tensor] = []

    @contextmanager
    def watched(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Iterator[None]:
        steps: list[torch.Tensor] = []
        handle = model.register_forward_hook(lambda _m, _i, output: steps.append(output.logits[:, -1].clone()))
        yield
        handle.remove()
        seen.append(torch.stack(steps, 1))

    config = tsae.SamplingConfig(max_new_tokens=8, temperature=1e-4)
    checkpoint = Checkpoint(id="base", path=str(path))
    generator = Generator(checkpoint, load_tokenizer(checkpoint), config, model=model, around=watched)
    generator.ends = [VOCABULARY]  # never sampled, so that all responses have the same length
    found = generator.generate(prompts, 0)
    return [list(response.ids) for response in found], torch.cat(seen)


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES + BATCHED)
def test_a_text_beside_a_longer_one_is_read_and_continued_as_alone(architecture: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / architecture, architecture)
    model = Checkpoint(id="base", path=str(path)).load_model()
    reader, fresh = HuggingFaceReader(model, SITES), as_loaded(path)
    ids, mask = pad([np.array(text) for text in TEXTS])
    left = torch.stack([row.roll(int((1 - real).sum())) for row, real in zip(ids, mask, strict=True)])
    expected_of = [as_alone(fresh, text) for text in TEXTS]
    for given, real in ((ids, mask), (left, mask.flip(1))):
        found, predicted = reader.read_and_predict(given, real)
        for row, (text, (alone, logits)) in enumerate(zip(TEXTS, expected_of, strict=True)):
            for site in SITES:
                torch.testing.assert_close(found[site][row][real[row].bool()], alone[site], atol=5e-5, rtol=0, msg=site)
            log_p = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(text)[1:, None])[:, 0]
            torch.testing.assert_close(predicted.logprob[row][real[row].bool()][1:], log_p, atol=1e-4, rtol=0)
    prompts = [TEXTS[0], TEXTS[1], TEXTS[4]]
    tokens, logits = answers(path, model, prompts)
    for row, prompt in enumerate(prompts):
        own, expected = answers(path, deepcopy(fresh), [prompt])
        assert tokens[row] == own[0]
        torch.testing.assert_close(logits[row], expected[0], atol=5e-5, rtol=0)


def stages(folder: Path, batch_tokens: int) -> dict[str, np.ndarray]:
    """What every stage that runs a model gives for a model's texts, read in batches of so many tokens."""
    series = tsae.CheckpointSeries.load(folder / "model")
    base, to = series.base, folder / str(batch_tokens)
    records = [
        {"problem_id": "p", "policy": base.id, "prompt_ids": text[:3], "response_ids": text[3:]}
        | {"reward": float(n % 2), "advantage": float(n % 2) - 0.5, "outcome": ("failure", "success")[n % 2]}
        for n, text in enumerate([*TEXTS, *TEXTS[:2]])
    ]
    rollouts = tsae.Rollouts.from_records(records, {"tokenizer": tokenizer_fingerprint(load_tokenizer(base))})
    sae = random_sae(site=SITES[1], d_sae=32)
    config = tsae.CaptureConfig(batch_tokens=batch_tokens)
    store = tsae.capture(series, rollouts, sites=[SITES[1]], to=to, config=config)
    (shard,) = store.shards()
    ends = zip(shard.trajectory.tolist(), shard.offsets, shard.offsets[1:], strict=False)
    found = {f"captured {row}": shard.read(SITES[1], slice(begin, end)) for row, begin, end in ends}
    found["logprobs"] = response_logprobs(rollouts, np.arange(7), series, batch_tokens=batch_tokens)
    spliced = loss_recovered(sae, store, base, list(range(7)), batch_tokens=batch_tokens)
    found["splice"] = np.array([spliced.loss, spliced.loss_spliced, spliced.loss_ablated, spliced.kl])
    derived = tsae.InfluenceConfig(batch_tokens=batch_tokens)
    found["influence"] = tsae.influence(base, rollouts, sae, [3], config=derived, progress=False).table.total.to_numpy()
    trained = TrainedWeights(base.load_model(), ["model.layers.0.mlp.down_proj.weight"])
    target = FeatureMeans(sae, [3], rollouts, [], batch_tokens=batch_tokens)
    found["means"], found["gradient"] = target.values(trained), target.gradients(trained).numpy()
    for rows, ids, mask, response in padded(rollouts, np.arange(7), batch_tokens, "cpu"):
        gradients = sample_gradients(trained, ids, mask, response[:, 1:].float())
        found |= {f"gradient of {row}": each.numpy() for row, each in zip(rows, gradients, strict=True)}
    reader = HuggingFaceReader(trained.model, [SITES[1]])
    found["last"] = last_activations(reader, sae, [np.array(text) for text in TEXTS], 3, batch_tokens)
    return found


def test_every_stage_reads_texts_of_phi3_as_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "phi3")
    alone, together = stages(tmp_path, 1), stages(tmp_path, 10_000)
    assert len(alone) == 20
    for name, expected in alone.items():
        np.testing.assert_allclose(together[name], expected, atol=2e-5, rtol=1e-4, err_msg=name)
    own = as_alone(as_loaded(tmp_path / "model"), TEXTS[0])[0][SITES[1]]
    np.testing.assert_allclose(together["captured 0"], own, atol=5e-5)
