"""The TransformerLens backend: read residual streams through `TransformerBridge`, and rewrite them.

The bridge wraps a Hugging Face model *in place* and runs it in eager attention. So the reader loads a model of its own,
and checks once that the bridge computes the same logits. It passes positions and the true attention mask: left padding
without them is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tsae.checkpoints.hooks import Predictions, body_output, positions, predictions
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.sites import check_sites
from tsae.errors import TsaeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Intervention = Callable[[torch.Tensor], torch.Tensor]
"""(B, T, d_model) -> (B, T, d_model): what replaces the residual stream."""


class TransformerLensReader:
    """Reads, and on request rewrites, residual streams through a TransformerBridge."""

    def __init__(
        self, checkpoint: Checkpoint, sites: Sequence[str], *, device: str = "cpu", dtype: str = "auto"
    ) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        model = checkpoint.load_model(device=device, dtype=dtype, attention="eager")
        ids = torch.arange(4, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
        expected = model(input_ids=ids).logits
        # The path only serves to look up a configuration: the model is given, and texts come as token ids.
        self.bridge: Any = TransformerBridge.boot_transformers(
            checkpoint.path,
            hf_model=model,
            tokenizer=_stand_in_tokenizer(),
            device=torch.device(device),
            dtype=next(model.parameters()).dtype,
        )
        self.device = torch.device(device)
        self.sites = check_sites(sites, int(self.bridge.cfg.n_layers), checkpoint.path)
        # Where the bridge takes weights out of their modules, as in GPT-2's attention, adapters are lost.
        error = (self.logits(ids, torch.ones_like(ids)) - expected).abs().max() / expected.abs().max()
        if not error < (1e-3 if expected.dtype == torch.float32 else 0.05):
            what = f"computes other logits through TransformerLens than by itself (error {float(error):.1%})"
            fix = "Use the Hugging Face backend, or merge the adapter into its base first."
            raise TsaeError(what, where=checkpoint.path, fix=fix)

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `HuggingFaceReader.read`: for every site (B, T, d_model)."""
        found: dict[str, torch.Tensor] = {}

        # hook.name is the bridge's own name ("blocks.0.hook_in"), not the alias in the site's name.
        def keep(value: torch.Tensor, hook: Any, name: str) -> None:
            found[name] = value.detach().clone()

        hooks = [(s.name, partial(keep, name=s.name)) for s in self.sites]
        self._run(input_ids, attention_mask, hooks, logits_to_keep=1)
        return {site.name: found[site.name] for site in self.sites}

    def read_and_predict(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], Predictions]:
        """As `HuggingFaceReader.read_and_predict`."""
        with body_output(self.model) as outputs:
            found = self.read(input_ids, attention_mask)
        return found, predictions(self.model, outputs[-1], input_ids, attention_mask)

    @torch.no_grad()
    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        interventions: dict[str, Intervention] | None = None,
    ) -> torch.Tensor:
        """Next-token logits (B, T, vocabulary), with the residual stream rewritten at the given sites."""
        check_sites(list(interventions or {}) or [self.sites[0].name], int(self.bridge.cfg.n_layers), "interventions")
        hooks = [(name, lambda value, hook, f=f: f(value)) for name, f in (interventions or {}).items()]
        return self._run(input_ids, attention_mask, hooks)

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model inside the bridge: its generate goes through the bridge's hooks."""
        model: PreTrainedModel = self.bridge.original_model
        return model

    @contextmanager
    def rewritten(self, site: str, change: Intervention) -> Iterator[None]:
        """As `tsae.checkpoints.hooks.rewritten`, for passes of the bridge and of `model`."""
        check_sites([site], int(self.bridge.cfg.n_layers), "rewritten")
        with self.bridge.hooks(fwd_hooks=[(site, lambda value, hook: change(value))]):
            yield

    def _run(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, hooks: list[tuple[str, Any]], **options: Any
    ) -> Any:
        mask = attention_mask.to(self.device)
        options |= {"attention_mask": mask, "position_ids": positions(mask)}
        return self.bridge.run_with_hooks(input_ids.to(self.device), fwd_hooks=hooks, **options)


def _stand_in_tokenizer() -> Any:
    """A tokenizer to boot the bridge with, which encodes "a" (not every tokenizer can) and adds special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    # No bos_token: with one, TransformerLens would load a tokenizer anew by name.
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<unk>", pad_token="<unk>")
