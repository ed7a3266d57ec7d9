"""Sample rollouts from a checkpoint with Hugging Face generate: batched, seeded, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.loading import ModelLoader, tokenizer_fingerprint
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.problems import Problem
from tsae.rollouts.prompts import encode_prompt
from tsae.rollouts.responses.thinking import Spans
from tsae.rollouts.responses.token_parts import COLUMN
from tsae.rollouts.schema import outcome_name
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Around = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], AbstractContextManager[None]]


def sample(
    checkpoint: Checkpoint,
    problems: Sequence[Problem],
    config: SamplingConfig | None = None,
    *,
    verify: Callable[[str, str], bool] | None = None,
    loader: ModelLoader | None = None,
    model: PreTrainedModel | None = None,
    around: Around | None = None,
    progress: bool = True,
) -> Rollouts:
    """Sample responses of a checkpoint to problems.

    Args:
        checkpoint: the policy.
        problems: every one gets `config.n_samples` responses.
        config: defaults of `SamplingConfig`.
        verify: (response text, reference answer) -> right or not; without it outcomes are unknown and rewards null.
        loader: keeps the base of adapters loaded from one call to the next.
        model: the checkpoint's, if it is loaded already.
        around: (model, prompt ids (B, T), attention mask (B, T)), both padded on the left -> a context in which that
            batch is generated, such as one that rewrites the residual stream.
        progress: show a bar.

    Returns:
        the responses in order of problems; token ids of a response end with its end-of-sequence token if the model
        gave one. If a response has thinking, a column says which tokens are
        (`tsae.rollouts.responses.token_parts`).
    """
    from tqdm.auto import tqdm

    config = config or SamplingConfig()
    tokenizer = checkpoint.load_tokenizer()
    policy: Any = model if model is not None else (loader or ModelLoader(device=config.device)).load(checkpoint)
    eos = _end_tokens(policy, tokenizer, checkpoint.path)
    # A checkpoint may ship top_p, top_k or a repetition penalty; rollouts are samples of the policy itself.
    policy.generation_config = type(policy.generation_config)()
    prompts = [encode_prompt(tokenizer, p.prompt, config.prompt_format, f"problem {p.id}") for p in problems]
    _check_lengths(policy, prompts, problems, config.max_new_tokens)

    # Short prompts with short ones, to pad little.
    requests = [
        (i, s) for i in sorted(range(len(problems)), key=lambda i: len(prompts[i])) for s in range(config.n_samples)
    ]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    responses: dict[tuple[int, int], list[int]] = {}
    with tqdm(total=len(requests), desc=f"sampling {checkpoint.id}", unit="response", disable=not progress) as bar:
        for start in range(0, len(requests), config.batch_size):
            batch = requests[start : start + config.batch_size]
            asked = [prompts[i] for i, _ in batch]
            try:
                generated = _generate(policy, asked, config, config.seed * 1_000_003 + start, pad, eos, around)
            except RuntimeError as error:
                if "probability tensor" not in str(error):
                    raise
                what = "its next-token probabilities are not finite"
                raise TsaeError(what, where=checkpoint.path, fix="Check that checkpoint's weights.") from error
            for key, row in zip(batch, generated, strict=True):
                end = next((position + 1 for position, token in enumerate(row) if token in eos), len(row))
                responses[key] = row[:end]
            bar.update(len(batch))

    spans, records = Spans(tokenizer), []
    for i, problem in enumerate(problems):
        for s in range(config.n_samples):
            response_ids = responses[i, s]
            text = tokenizer.decode(response_ids, skip_special_tokens=True)
            found = spans.of(np.asarray(prompts[i]), np.asarray(response_ids)).parts
            right = None if verify is None else bool(verify(text, problem.answer))
            records.append(
                {
                    "problem_id": problem.id,
                    "policy": checkpoint.id,
                    "prompt": problem.prompt,
                    "response": text,
                    "answer": problem.answer,
                    "level": problem.level,
                    "prompt_ids": prompts[i],
                    "response_ids": response_ids,
                    "reward": None if right is None else float(right),
                    "outcome": outcome_name(right),
                    "finish_reason": "stop" if response_ids[-1] in eos else "length",
                    **({} if found is None else {COLUMN: found}),
                }
            )
    return Rollouts.from_records(records, {"tokenizer": tokenizer_fingerprint(tokenizer)})


def _generate(
    policy: Any,
    prompts: Sequence[list[int]],
    config: SamplingConfig,
    seed: int,
    pad: int,
    eos: list[int],
    around: Around | None,
) -> list[list[int]]:
    """New token ids of one batch, padded to equal length."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]).to(config.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(config.device)
    with (
        torch.random.fork_rng(devices=[config.device] if config.device != "cpu" else []),
        torch.no_grad(),
        nullcontext() if around is None else around(policy, ids, mask),
    ):
        torch.manual_seed(seed)
        output = policy.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=config.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=eos,
        )
    found: list[list[int]] = output[:, width:].tolist()
    return found


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        what = "the model has no end-of-sequence token, so that no response would ever end"
        raise TsaeError(what, where=where, fix="Set eos_token in its tokenizer_config.json.")
    return list(np.atleast_1d(found).tolist())


def _check_lengths(model: Any, prompts: list[list[int]], problems: Sequence[Problem], new: int) -> None:
    if not problems:
        raise TsaeError("no problems given", where="sample", fix="Give at least one problem.")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if context is not None and len(prompts[longest]) + new > context:
        raise TsaeError(
            f"problem {problems[longest].id} has {len(prompts[longest])} prompt tokens, which with "
            f"max_new_tokens={new} exceeds the model's context of {context}",
            where="sample",
            fix="Lower max_new_tokens, or leave that problem out.",
        )
