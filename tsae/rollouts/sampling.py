"""Sampling rollouts from a checkpoint with Hugging Face generate: batched, seeded, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tsae.checkpoints.loading import ModelLoader, tokenizer_fingerprint
from tsae.checkpoints.series import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.parts import COLUMN
from tsae.rollouts.problems import Problem
from tsae.rollouts.spans import Spans
from tsae.rollouts.table import Rollouts, outcome_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Around = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], AbstractContextManager[None]]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True, where: str = "tokenizer"
) -> list[int]:
    """Token ids of a text.

    Raises:
        TsaeError: where the tokenizer refuses the text, as one without an unknown token does.
    """
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises no narrower class
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise TsaeError(
            f"{shown!r} cannot be tokenised ({error})", where=where, fix="Use texts in the tokenizer's alphabet."
        ) from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    prompt_format: Literal["auto", "plain", "chat"] = "auto",
    where: str = "prompt",
) -> list[int]:
    """Token ids of what the model reads before its response; `where` is named in error messages."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if prompt_format == "chat" and not has_template:
        raise TsaeError(
            "the tokenizer has no chat template",
            where="prompt_format",
            fix='Use prompt_format="plain" instead of "chat".',
        )
    if prompt_format == "plain" or not has_template:
        return tokenize(tokenizer, prompt, where=where)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    # The template writes its own special tokens.
    return tokenize(tokenizer, text, add_special_tokens=False, where=where)


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
        model: the checkpoint's, where it is loaded already.
        around: (model, prompt ids (B, T), attention mask (B, T)), both padded on the left -> a context in which that
            batch is generated, such as one that rewrites the residual stream.
        progress: show a bar.

    Returns:
        the responses in order of problems; token ids of a response end with its end-of-sequence token where the
        model gave one. Where a response has thinking, a column says which tokens are (`tsae.rollouts.parts`).
    """
    import torch
    from tqdm.auto import tqdm

    config = config or SamplingConfig()
    tokenizer = checkpoint.load_tokenizer()
    policy: Any = model if model is not None else (loader or ModelLoader(device=config.device)).load(checkpoint)
    eos = _end_tokens(policy, tokenizer, checkpoint.path)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    # A checkpoint may ship top_p, top_k or a repetition penalty; rollouts are samples of the policy itself.
    policy.generation_config = type(policy.generation_config)()
    prompts = [encode_prompt(tokenizer, p.prompt, config.prompt_format, f"problem {p.id}") for p in problems]
    _check_lengths(policy, prompts, problems, config.max_new_tokens)

    # Short prompts with short ones, so that little is padded.
    requests = [
        (i, s) for i in sorted(range(len(problems)), key=lambda i: len(prompts[i])) for s in range(config.n_samples)
    ]
    responses: dict[tuple[int, int], list[int]] = {}
    with tqdm(total=len(requests), desc=f"sampling {checkpoint.id}", unit="response", disable=not progress) as bar:
        for start in range(0, len(requests), config.batch_size):
            batch = requests[start : start + config.batch_size]
            width = max(len(prompts[i]) for i, _ in batch)
            ids = torch.full((len(batch), width), pad, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, (i, _) in enumerate(batch):
                ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            ids, mask = ids.to(config.device), mask.to(config.device)
            with (
                torch.random.fork_rng(devices=[config.device] if config.device != "cpu" else []),
                torch.no_grad(),
                nullcontext() if around is None else around(policy, ids, mask),
            ):
                torch.manual_seed(config.seed * 1_000_003 + start)
                try:
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
                except RuntimeError as error:
                    if "probability tensor" not in str(error):
                        raise
                    raise TsaeError(
                        "its next-token probabilities are not finite",
                        where=checkpoint.path,
                        fix="Check that checkpoint's weights.",
                    ) from error
            for key, row in zip(batch, output[:, width:].tolist(), strict=True):
                responses[key] = _until_end(row, eos)
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


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        raise TsaeError(
            "the model has no end-of-sequence token, so that no response would ever end",
            where=where,
            fix="Set eos_token in its tokenizer_config.json.",
        )
    return list(np.atleast_1d(found).tolist())


def _until_end(row: list[int], eos: list[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in eos:
            return row[: position + 1]
    return row


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
