"""Commands on SAEs: train, evaluate, export, encode."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, arg

import tsae
from tsae.activations.config import LiveConfig, Subset
from tsae.checkpoints.loading import token_strings, tokenizer_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig

if TYPE_CHECKING:
    from tsae.activations.source import Source
    from tsae.activations.store import ActivationStore
    from tsae.sae.model import TemporalSAE
    from tsae.sae.quality.separation import Separation


@dataclass(frozen=True)
class Live:
    """Activations straight from the checkpoints in place of a store: no disk, a forward pass in every epoch."""

    series: Path | None = None
    """Folder of checkpoints, as of `tsae capture`."""
    rollouts: Path | None = None
    """Parquet file of rollouts, which the checkpoints read."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    config: Annotated[LiveConfig, arg(name="")] = field(default_factory=LiveConfig)


@dataclass(frozen=True)
class Train:
    """Train temporal SAEs on an activation store; a run that was killed goes on.

    Fine-tune one with --start; train several in one pass with --seeds and --sites.

    On several processes: torchrun --nproc-per-node 2 -m tsae train …

    Without a store: tsae train --live.series SERIES --live.rollouts ROLLOUTS --site SITE …
    """

    to: Path
    """Folder for the SAE and its metrics; with --seeds or --sites, for one such folder each."""
    start: Path | None = None
    """SAE to fine-tune in place of random weights, ours or of sae_lens; SAE options then default to its own."""
    seeds: tuple[int, ...] = ()
    """One SAE per seed of the initial weights, all from the same batches, which are read once."""
    sites: tuple[str, ...] = ()
    """TransformerLens names: SAEs for each, one site after another."""
    store: Path | None = None
    """Folder that `tsae capture` wrote."""
    live: Live = field(default_factory=Live)
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer says which tokens end a step, for partner "step": those that contain step_text."""
    step_text: str | None = None
    """Text that ends a reasoning step; by default a newline."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=SAEConfig)
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)

    def run(self) -> None:
        from tsae.base.distributed import first_process
        from tsae.sae.fitting.train_many import run_name

        store = self._source().subset(self.subset)
        training, saes = self._training(store), {}
        if not self.seeds and not self.sites:
            saes[self.to] = tsae.train(store, self.sae, start=self.start, to=self.to, training=training)
        elif self.start is not None:
            raise TsaeError(
                "a start has one site, and no seed of initial weights",
                where="--start",
                fix="Leave out --seeds and --sites, or --start.",
            )
        else:
            seeds, sites = self.seeds or None, self.sites or None
            many = tsae.train_many(store, self.sae, sites=sites, seeds=seeds, to=self.to, training=training)
            saes |= {self.to / run_name(*key): sae for key, sae in many.items()}
        if not first_process():
            return
        for folder, sae in saes.items():
            say_wrote(folder, sae)
            norms = sae.training_info["norms"]
            print(f"left out {norms['outlier_share']:.2%} of tokens: norm above {norms['limit']:.3g}")
        cells = sae.training_info.get("mixture", ())
        for cell in cells if len({cell["tokens"] for cell in cells}) > 1 else ():
            labels = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in ("tokens", "weight"))
            print(f"{labels}: {cell['tokens']:,} tokens, each read {cell['weight']:.2f} times an epoch")

    def _source(self) -> Source:
        live = self.live
        if self.store is not None and live == Live():
            return tsae.ActivationStore(self.store)
        if self.store is not None or live.series is None or live.rollouts is None:
            raise TsaeError(
                "a training reads a store, or live models given by both --live.series and --live.rollouts",
                where="tsae train",
                fix="Give --store alone, or both of these without --store.",
            )
        series = load_series(live.series)
        series = series.select(live.checkpoints) if live.checkpoints else series.final()
        return tsae.LiveSource(series, tsae.Rollouts.read(live.rollouts), self.training.site, config=live.config)

    def _training(self, store: Source) -> TrainingConfig:
        """With the step ends that the tokenizer knows, where one is given."""
        if self.tokenizer is None and self.step_text is None:
            return self.training
        if self.tokenizer is None or self.training.partner != "step" or self.training.step_ends:
            raise TsaeError(
                "--tokenizer and --step-text say together what ends a step of --partner step without --step-ends",
                where="tsae train",
                fix="Give --partner step with --tokenizer or with --step-ends, or none of these.",
            )
        checkpoint = load_series(self.tokenizer).base
        found, expected = tokenizer_fingerprint(checkpoint.load_tokenizer()), store.manifest.get("tokenizer")
        if expected not in (found, None):
            raise TsaeError(
                f"its tokenizer ({found}) is not that of the store ({expected})",
                where=checkpoint.path,
                fix="Give a checkpoint that the store was captured from.",
            )
        return replace(self.training, step_ends=checkpoint.tokens_with(self.step_text or "\n"))


def start_as_default(args: Sequence[str]) -> Train | None:
    """`tsae train --start SAE`: the start's own config in place of SAEConfig's defaults, in --help too."""
    if list(args[:1]) != ["train"]:
        return None
    options = ArgumentParser(prog="tsae train", add_help=False, allow_abbrev=False)
    options.add_argument("--start", type=Path)
    options.add_argument("--store", type=Path)
    found, _ = options.parse_known_args(args)
    if found.start is None or found.store is None:
        return None
    from tsae.sae.fitting.finetuning import starting_config

    config = starting_config(tsae.TemporalSAE.load(found.start), tsae.ActivationStore(found.store))
    return Train(store=tyro.MISSING, to=tyro.MISSING, sae=config)


@dataclass(frozen=True)
class Evaluate:
    """Measure a temporal SAE: reconstruction by reader, band and span, L0, alive, smoothness.

    With the checkpoints also the loss that its reconstruction recovers, with a baseline temporal separation, with
    other seeds the stability of its latents.
    """

    sae: Path
    """Folder that `tsae train` wrote, or one of sae_lens."""
    store: Path
    """Folder that `tsae capture` wrote."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    span: Literal["response", "thinking", "answer", "prompt", "all"] = "all"
    """Which tokens count; special tokens never do, nor tokens of a response that the policy did not sample."""
    max_norm: float | None = None
    """Tokens whose norm exceeds this multiple of the median are left out; by default those beyond the limit that
    training stored, or 10 times the median where it stored none."""
    all_problems: bool = False
    """Measure on all problems, not only on those that training held out."""
    series: tuple[str, ...] = ()
    """The readers' checkpoints, as for capture: measure loss and KL with the reconstruction spliced in."""
    baseline: Path | None = None
    """Another SAE, such as a plain Matryoshka of the same data: probe how far each separates trajectory from token."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, to probe too; needs series."""
    seeds: tuple[Path, ...] = ()
    """The same training with other seeds: match latents into stability.json, which `tsae encode` takes along."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""

    def run(self) -> None:
        from tsae.sae.quality.stability import stability

        sae, store = tsae.TemporalSAE.load(self.sae), tsae.ActivationStore(self.store).subset(self.subset)
        series = load_series(*self.series) if self.series else None
        held_out = None if self.all_problems else True
        found = tsae.evaluate(
            sae,
            store,
            span=self.span,
            held_out=held_out,
            max_norm=self.max_norm,
            series=series,
        )
        content: dict[str, Any] = {"evaluation": found.as_dict()}
        if store.selection.as_dict():
            content["subset"] = store.selection.as_dict()
        with as_json(self.json) as write:
            print(found)
            if self.baseline is not None:
                separated = self._separation(sae, store, series)
                content["separation"] = separated.as_dict()
                print(f"\n{separated}")
            if self.seeds:
                stable = stability(sae, [other for other in self.seeds if other.resolve() != self.sae.resolve()])
                content["stability"] = stable.summary()
                print(f"\n{stable}")
                say_wrote(stable.save(self.sae))
            write(content)

    def _separation(self, sae: TemporalSAE, store: ActivationStore, series: CheckpointSeries | None) -> Separation:
        from tsae.features.annotations import find_annotator
        from tsae.sae.quality.separation import separation

        assert self.baseline is not None
        strings = None if series is None else token_strings(series.base.load_tokenizer())
        annotator = None if self.annotator is None else find_annotator(self.annotator)
        return separation(
            {"SAE": sae, "baseline": self.baseline},
            store,
            annotator=annotator,
            token_strings=strings,
        )


@dataclass(frozen=True)
class Export:
    """Write a temporal SAE as sae_lens reads SAEs: it gives the same codes there, bit for bit."""

    sae: Path
    """Folder that `tsae train` wrote."""
    to: Path
    """Folder for cfg.json and sae_weights.safetensors."""
    architecture: Literal["jumprelu", "tsae_temporal"] = "jumprelu"
    """jumprelu for plain sae_lens; tsae_temporal, with encode_high, after `import tsae.sae.saelens`."""

    def run(self) -> None:
        sae = tsae.TemporalSAE.load(self.sae)
        say_wrote(sae.to_saelens(self.to, architecture=self.architecture), f"{sae} as {self.architecture}")


@dataclass(frozen=True)
class Encode:
    """Turn a store into sparse feature codes."""

    sae: Path
    """Folder that `tsae train` wrote."""
    store: Path
    """Folder that `tsae capture` wrote."""
    to: Path
    """Folder of the feature table."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)

    def run(self) -> None:
        sae, store = tsae.TemporalSAE.load(self.sae), tsae.ActivationStore(self.store).subset(self.subset)
        say_wrote(self.to, tsae.encode(sae, store, to=self.to))
