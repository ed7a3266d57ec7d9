"""Sample rollouts from a checkpoint: here or by a server, whole or in parts, and resumed where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tsae.base.part import Part
from tsae.base.progress import progress_bar
from tsae.base.remote.mirror import local
from tsae.checkpoints.loading import Checkpoint, ModelLoader, need_unchanged, tokenizer_fingerprint, weights_fingerprint
from tsae.checkpoints.tokenizers import text_limits, told_ends, vocabulary_facts
from tsae.errors import TsaeError
from tsae.rollouts.config import SamplingConfig, ServerConfig
from tsae.rollouts.problems import Problem
from tsae.rollouts.prompts import encode_prompt
from tsae.rollouts.responses.thinking import Spans
from tsae.rollouts.responses.token_parts import COLUMN
from tsae.rollouts.sampling.agreement import agreement
from tsae.rollouts.sampling.batches import Batches, Request, Response, cut_batches
from tsae.rollouts.sampling.generate import Around, Generator, check_lengths
from tsae.rollouts.sampling.server import Server
from tsae.rollouts.schema import outcome_name
from tsae.rollouts.table import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sample(
    checkpoint: Checkpoint,
    problems: Sequence[Problem],
    config: SamplingConfig | None = None,
    *,
    verify: Callable[[str, str], bool] | None = None,
    server: ServerConfig | None = None,
    pieces: str | Path | None = None,
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
        server: that samples instead of this machine. The first responses are read by the checkpoint itself
            (`tsae.rollouts.sampling.agreement`).
        pieces: folder for finished batches, or its URL, in which an interrupted sampling goes on; None keeps them in
            memory.
        loader: keeps the base of adapters loaded from one call to the next.
        model: the checkpoint's, if it is loaded already.
        around: (model, prompt ids (B, T), attention mask (B, T)), both padded on the left -> a context in which that
            batch is generated, such as one that rewrites the residual stream.
        progress: show a bar.

    Returns:
        the responses in order of problems; token ids of a response end with its end-of-sequence token if the model
        gave one. If a response has thinking, a column says which tokens are
        (`tsae.rollouts.responses.token_parts`). Of a server, `info["served"]` says by which model, whether ids are
        those that were sampled (`ids`: "sampled", or "of the text"), and of how many responses they cannot be
        (`other_lengths`).

    Raises:
        TsaeError: for prompts that do not fit, a model whose probabilities are not finite, a server that refuses or
            samples from something else, pieces of another sampling, or a checkpoint that is rewritten while it fills
            pieces.
    """
    sampling = _Sampling(checkpoint, problems, config or SamplingConfig(), server, pieces)
    sampling.run(Part(), loader=loader, model=model, around=around, progress=progress)
    return sampling.rollouts(verify)


def sample_part(
    checkpoint: Checkpoint,
    problems: Sequence[Problem],
    config: SamplingConfig | None = None,
    *,
    part: Part,
    pieces: str | Path,
    server: ServerConfig | None = None,
    loader: ModelLoader | None = None,
    progress: bool = True,
) -> int:
    """Sample one part of the batches; start the others wherever the folder can be reached, then `sample`.

    Args:
        checkpoint, problems, config, pieces, server, loader, progress: as for `sample`, the same in all parts.
        part: which batches.

    Returns:
        number of batches that other parts have still to sample.

    Raises:
        TsaeError: as `sample`.
    """
    sampling = _Sampling(checkpoint, problems, config or SamplingConfig(), server, pieces)
    sampling.run(part, loader=loader, model=None, around=None, progress=progress)
    return len(list(sampling.done.missing(len(sampling.batches))))


class _Sampling:
    """Of one checkpoint: its batches, and those that are done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        problems: Sequence[Problem],
        config: SamplingConfig,
        server: ServerConfig | None,
        pieces: str | Path | None,
    ) -> None:
        if not problems:
            raise TsaeError("no problems given", where="sample", fix="Give at least one problem.")
        self.checkpoint, self.problems, self.config, self.server = checkpoint, problems, config, server
        self.tokenizer = checkpoint.load_tokenizer()
        self.prompts = [
            encode_prompt(self.tokenizer, p.prompt, config.prompt_format, f"problem {p.id}")
            if p.ids is None
            else [*p.ids]
            for p in problems
        ]
        self.batches = cut_batches([len(prompt) for prompt in self.prompts], config.n_samples, config.batch_size)
        folder = None if pieces is None else local(pieces)
        identity = {} if folder is None else self._identity()
        self.weights: str | None = identity.get("weights")
        self.done = Batches(folder, checkpoint.id, identity)

    def run(
        self,
        part: Part,
        *,
        loader: ModelLoader | None,
        model: PreTrainedModel | None,
        around: Around | None,
        progress: bool,
    ) -> None:
        """Generate the batches of a part that are not there yet."""
        mine = range(part.index, len(self.batches), part.n)
        with progress_bar(
            f"sampling {self.checkpoint.id}", "response", sum(len(self.batches[n]) for n in mine), shown=progress
        ) as bar:
            bar.update(sum(len(self.batches[n]) for n in mine if n in self.done))
            wanted = [(n, self.batches[n]) for n in mine if n not in self.done]
            if not wanted:
                return
            if self.server is not None:
                generated = self._served(wanted, loader)
            else:
                generated = self._generated(wanted, loader, model, around)
            for number, responses in generated:
                self.done.add(number, responses)
                bar.update(len(responses))

    def _generated(
        self,
        wanted: Sequence[tuple[int, Sequence[Request]]],
        loader: ModelLoader | None,
        model: PreTrainedModel | None,
        around: Around | None,
    ) -> Iterator[tuple[int, list[Response]]]:
        generator = Generator(self.checkpoint, self.tokenizer, self.config, loader=loader, model=model, around=around)
        context = getattr(generator.model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths(context, self.prompts, self.problems, self.config.max_new_tokens)
        for number, batch in wanted:
            seed = self.config.seed * 1_000_003 + number * self.config.batch_size
            responses = generator.generate([self.prompts[request.problem] for request in batch], seed)
            if self.weights is not None:
                need_unchanged(self.checkpoint, self.weights, loaded=True)  # before they are kept as of these weights
            yield number, responses

    def _served(
        self, wanted: Sequence[tuple[int, Sequence[Request]]], loader: ModelLoader | None
    ) -> Iterator[tuple[int, list[Response]]]:
        assert self.server is not None
        context, ends = text_limits(self.checkpoint)
        if self.tokenizer.eos_token_id is not None:
            ends |= {int(self.tokenizer.eos_token_id)}
        check_lengths(context, self.prompts, self.problems, self.config.max_new_tokens)
        server = Server(self.server, self.config, self.tokenizer, sorted(ends))
        unchecked = self.server.check
        for number, responses in server.generate(self.prompts, wanted, [problem.id for problem in self.problems]):
            # Those whose tokens are known; without any, the server's own settings cannot be seen.
            some = [(r, response) for r, response in zip(self.batches[number], responses, strict=True) if response.fits]
            if unchecked and some:
                some, unchecked = some[:: max(1, len(some) // unchecked)][:unchecked], 0
                policy = (loader or ModelLoader(device=self.config.device)).load(self.checkpoint)
                asked = [self.prompts[request.problem] for request, _ in some]
                found = agreement(policy, asked, [response for _, response in some], self.config.temperature)
                del policy
                found.check(server.url)
            yield number, responses

    def rollouts(self, verify: Callable[[str, str], bool] | None) -> Rollouts:
        """All responses, which are there."""
        responses: dict[Request, Response] = {}
        for number, batch in enumerate(self.batches):
            responses |= zip(batch, self.done.read(number, len(batch)), strict=True)
        spans, records = Spans(self.tokenizer), []
        for i, problem in enumerate(self.problems):
            for s in range(self.config.n_samples):
                response = responses[Request(i, s)]
                ids = list(response.ids)
                text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
                found = spans.of(np.asarray(self.prompts[i]), np.asarray(ids)).parts
                right = None if verify is None else bool(verify(text, problem.answer))
                records.append(
                    {
                        "problem_id": problem.id,
                        "policy": self.checkpoint.id,
                        "prompt": problem.prompt,
                        "response": text,
                        "answer": problem.answer,
                        "level": problem.level,
                        "prompt_ids": self.prompts[i],
                        "response_ids": ids,
                        "reward": None if right is None else float(right),
                        "outcome": outcome_name(right),
                        "finish_reason": response.finish_reason,
                        **({} if found is None else {COLUMN: found}),
                    }
                )
        info: dict[str, Any] = vocabulary_facts(self.tokenizer)
        if self.server is not None:
            every = responses.values()
            info["served"] = {
                "model": self.server.model,
                "ids": "sampled" if all(response.exact for response in every) else "of the text",
                "other_lengths": sum(not response.fits for response in every),
            }
        return Rollouts.from_records(records, info)

    def _identity(self) -> dict[str, Any]:
        """What responses depend on."""
        asked = json.dumps([asdict(problem) for problem in self.problems], sort_keys=True)
        return {
            "problems": hashlib.sha256(asked.encode()).hexdigest(),
            "weights": weights_fingerprint(self.checkpoint),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            # The fingerprint is of the vocabulary. A chat template, or merges, make other prompts of the same problems.
            "prompts": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest(),
            # No fingerprint is of generation_config.json, or of what the tokenizer calls the end.
            "ends": [*told_ends(self.checkpoint), self.tokenizer.eos_token_id],
            "config": asdict(self.config),
            "server": None if self.server is None else self.server.model or "the only model",
        }
