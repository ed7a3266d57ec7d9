"""Responses generated here, with Hugging Face generate: batched and seeded.

Prompts of a batch are padded on the left. Some models read padding (RWKV, RecurrentGemma), count positions from it
(Llama 4), or recompute what they hold by the length of the batch (LongRoPE). They get prompts of equal length only.

`agreement` tests whether responses are samples of a checkpoint, by its own forward pass over some of them. If a token
was sampled from p = softmax(logits / temperature), then log p(token) has the mean −H(p) and the variance Σ p log² p −
H². Summed over tokens, (log p(token) + H) / √variance is standard normal: another model, another temperature, top-p or
a repetition penalty move it away from 0. If the server gave log-probabilities, they are compared with the checkpoint's
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsae.checkpoints.hooks import hooked
from tsae.checkpoints.loading import Checkpoint, ModelLoader, depends_on_length, rotate_rows_alone
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.problems import Problem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Around = Callable[[Any, Any, Any], AbstractContextManager[None]]
"""(model, prompt ids (B, T), attention mask (B, T)) -> a context in which that batch is generated."""


class Request(NamedTuple):
    """One response that is wanted."""

    problem: int
    """Place among the problems."""
    number: int
    """Which of the problem's samples."""


@dataclass(frozen=True)
class Response:
    """What a policy answered."""

    ids: tuple[int, ...]
    """Token ids, with the end-of-sequence token if there is one."""
    finish_reason: str
    """stop or length."""
    logprobs: tuple[float, ...] | None = None
    """Of each token, in nats at temperature 1, where a server gave them."""
    exact: bool = True
    """Whether `ids` are the tokens that were sampled, and not those of the text that they make."""
    fits: bool = True
    """Whether they are as many as were sampled."""


class Generator:
    """A checkpoint that answers.

    Args:
        checkpoint: the policy.
        tokenizer: its tokenizer.
        config: how it samples.
        loader: keeps the base of adapters loaded from one call to the next.
        model: the checkpoint's, if it is loaded already.
        around: (model, prompt ids (B, T), attention mask (B, T)), both padded on the left -> a context in which that
            batch is generated.

    Raises:
        TsaeError: where the model has no end-of-sequence token.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
        config: SamplingConfig,
        *,
        loader: ModelLoader | None = None,
        model: PreTrainedModel | None = None,
        around: Around | None = None,
    ) -> None:
        self.config, self.where, self.around = config, checkpoint.path, around
        self.model: Any = model if model is not None else (loader or ModelLoader(device=config.device)).load(checkpoint)
        self.ends = end_tokens(self.model, tokenizer, checkpoint.path)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.ends[0]

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Response]:
        """One response to each prompt of a batch, given as token ids.

        Raises:
            TsaeError: where the model's probabilities are not finite.
        """
        try:
            rows = self._generate(prompts, seed)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            what = "its next-token probabilities are not finite"
            raise TsaeError(what, where=self.where, fix="Check that checkpoint's weights.") from error
        found = []
        for row in rows:
            end = next((position + 1 for position, token in enumerate(row) if token in self.ends), len(row))
            found.append(Response(tuple(row[:end]), "stop" if row[end - 1] in self.ends else "length"))
        return found

    def _generate(self, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        """New token ids, padded to equal length."""
        import torch

        device, found = self.config.device, list[list[int]]()
        mixed = len(set(map(len, prompts))) == 1 or self._padding_is_neutral
        with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
            torch.manual_seed(seed)
            for _, together in groupby(prompts, key=lambda prompt: mixed or len(prompt)):
                ids, mask = self._padded(list(together))
                with nullcontext() if self.around is None else self.around(self.model, ids, mask):
                    output = self._continued(
                        ids,
                        mask,
                        do_sample=True,
                        temperature=self.config.temperature,
                        top_k=0,
                        top_p=1.0,
                        max_new_tokens=self.config.max_new_tokens,
                    )
                found += output[:, ids.shape[1] :].tolist()
        return found

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) ids and mask."""
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return ids.to(self.config.device), mask.to(self.config.device)

    def _continued(self, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        import torch

        # It may be a model that the caller loaded.
        with torch.no_grad(), hooked(*rotate_rows_alone(self.model)), _as_it_is(self.model):
            return self.model.generate(
                input_ids=ids, attention_mask=mask, pad_token_id=self.pad, eos_token_id=self.ends, **options
            )

    @cached_property
    def _padding_is_neutral(self) -> bool:
        """Whether a padded prompt is continued as without padding."""
        import torch

        config = self.model.config.get_text_config()
        if depends_on_length(self.model) or config.model_type.startswith("llama4"):
            return False  # beyond the few tokens that are tried here
        short, long = ([token % config.vocab_size for token in range(4, n)] for n in (8, 17))
        options: dict[str, Any] = {
            "max_new_tokens": 3,
            "min_new_tokens": 3,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        alone, beside = (
            torch.stack(self._continued(*self._padded(prompts), do_sample=False, **options).logits, 1)[0].float()
            for prompts in ([short], [short, long])
        )  # (3, vocabulary)
        error = float((alone - beside).abs().max() / alone.std())
        return error < (1e-3 if self.model.dtype == torch.float32 else 0.05)


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """While it is open, ignore top_p, top_k or a repetition penalty of a checkpoint: we sample from the policy itself.

    Its configuration is put back: whoever uses the loaded model next reads there what ends a response.
    """
    own, model.generation_config = model.generation_config, type(model.generation_config)()
    try:
        yield
    finally:
        model.generation_config = own


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """Ids of the tokens that end a response.

    Raises:
        TsaeError: where there are none.
    """
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        what = "the model has no end-of-sequence token, so that no response would ever end"
        raise TsaeError(what, where=where, fix="Set eos_token in its tokenizer_config.json.")
    return list(np.atleast_1d(found).tolist())


def check_lengths(context: int | None, prompts: list[list[int]], problems: Sequence[Problem], new: int) -> None:
    """Refuse prompts that leave no room for `new` tokens in the model's context."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if context is not None and len(prompts[longest]) + new > context:
        raise TsaeError(
            f"problem {problems[longest].id} has {len(prompts[longest])} prompt tokens, which with "
            f"max_new_tokens={new} exceeds the model's context of {context}",
            where="sample",
            fix="Lower max_new_tokens, or leave that problem out.",
        )


_LARGEST_Z, _LEAST_EXCESS = 5.0, 0.02
"""Both must be exceeded: over many tokens a difference of rounding is certain, too."""
_LARGEST_DIFFERENCE = 0.1
"""Nats; bfloat16 on one side makes .01 to .03."""


@dataclass(frozen=True)
class Agreement:
    """How likely responses are as samples of a checkpoint."""

    n_responses: int
    n_tokens: int
    excess: float
    """Nats per token that the tokens are likelier than the checkpoint's own samples; negative where less likely."""
    z: float
    """The same in standard errors."""
    difference: float | None
    """Mean absolute difference, in nats, of the server's log-probabilities and the checkpoint's; None without any."""

    def __str__(self) -> str:
        logprobs = "" if self.difference is None else f"; log-probabilities differ by {self.difference:.3f} nats"
        return (
            f"{self.n_tokens} tokens of {self.n_responses} responses are {self.excess:+.3f} nats likelier than the "
            f"checkpoint's own samples (z {self.z:+.1f}){logprobs}"
        )

    def check(self, where: str) -> None:
        """Refuse responses of another policy.

        Raises:
            TsaeError: where tokens are likelier or less likely than they could be by chance, or log-probabilities
                differ.
        """
        fix = (
            "Let the server serve this checkpoint, without top_p, top_k, min_p and penalties (vLLM: "
            "--generation-config vllm), or name the checkpoint that it serves (--checkpoints)."
        )
        what = ""
        if self.difference is not None and self.difference > _LARGEST_DIFFERENCE:
            what = "its log-probabilities are not this checkpoint's"
        if abs(self.z) > _LARGEST_Z and abs(self.excess) > _LEAST_EXCESS:
            what = "its responses are not samples of this checkpoint"
        if what:
            raise TsaeError(f"{what}: {self}", where=where, fix=fix)


def response_logits(
    model: PreTrainedModel, prompt: Sequence[int] | np.ndarray, response: Sequence[int] | np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """((n, vocabulary) float32 logits that predict the n tokens of a response, (n, 1) their ids)."""
    import torch

    n = len(response)
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]], device=model.device)
    with torch.no_grad():
        # The last position predicts what comes after the response.
        try:
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits
        except TypeError:  # an architecture that always gives all
            logits = model(input_ids=ids, use_cache=False).logits
    return logits[0, -n - 1 : -1].float(), ids[0, -n:, None]


def agreement(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[Response], temperature: float
) -> Agreement:
    """Read responses, one after another, with the checkpoint that should have sampled them.

    Args:
        model: the checkpoint's.
        prompts: token ids.
        responses: to them; those whose tokens are not known exactly count as far as their texts' tokens go.
        temperature: at which they were sampled.
    """
    import torch

    total, variance, n = 0.0, 0.0, 0
    differences: list[np.ndarray] = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits, sampled = response_logits(model, prompt, response.ids)
        log_p = (logits / temperature).log_softmax(-1).double()
        p = log_p.exp()
        mean = torch.special.xlogy(p, p).sum(-1)
        each = log_p.gather(-1, sampled)[:, 0]
        square = torch.where(p > 0, p * log_p.square(), 0.0).sum(-1)
        total += float((each - mean).sum())
        variance += float((square - mean.square()).clamp(min=0).sum())
        n += len(response.ids)
        if response.logprobs is not None and len(response.logprobs) == len(response.ids):
            given = torch.tensor(response.logprobs, dtype=torch.float64, device=each.device)
            plain = logits.log_softmax(-1).double().gather(-1, sampled)[:, 0]
            # Servers give them before the temperature or after it.
            nearest = min(((given - ours).abs() for ours in (plain, each)), key=lambda found: float(found.mean()))
            differences.append(nearest.cpu().numpy())
    return Agreement(
        n_responses=len(responses),
        n_tokens=n,
        excess=total / max(n, 1),
        z=total / max(variance, 1e-12) ** 0.5,
        difference=float(np.concatenate(differences).mean()) if differences else None,
    )
