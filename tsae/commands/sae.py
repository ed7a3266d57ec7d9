"""`tsae train`, `tsae evaluate`, `tsae encode` and `tsae crosscoder`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tyro.conf import OmitArgPrefixes, arg

import tsae
from tsae.activations.config import LiveConfig, Subset
from tsae.base.mirror import published
from tsae.base.output_lock import output_lock
from tsae.base.part import Part, first_process
from tsae.base.validation import Daily, config
from tsae.commands.common import as_json, chosen_readers, load_series, print_part, say_wrote
from tsae.commands.spreading import Spread
from tsae.errors import TsaeError, refuse
from tsae.sae.config import SAEConfig, TrainingConfig


@config
class Live:
    """Activations straight from the checkpoints instead of a store: no disk, but a forward pass whenever they are
    needed."""

    series: Path | None = None
    """Folder of checkpoints, as for `tsae capture`."""
    rollouts: Path | None = None
    """Parquet file of rollouts, which the checkpoints read."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    config: Annotated[LiveConfig, arg(name="")] = field(default_factory=LiveConfig)


@config
class Train:
    """Train temporal SAEs on an activation store. Resumes an unfinished training.

    Fine-tune one with --start; train several in one pass with --seeds and --sites.

    On several processes: torchrun --nproc-per-node 2 -m tsae train …

    Without a store: tsae train --live.series SERIES --live.rollouts ROLLOUTS --site SITE …
    """

    to: Path
    """Folder for the SAE and its metrics; with --seeds or --sites, for one such folder each."""
    start: Daily[Path | None] = None
    """SAE to fine-tune instead of random weights, ours or of sae_lens. SAE options then default to its config."""
    init_from: Path | None = None
    """Published SAE from whose latents a T-SAE starts: a path, org/name on the Hugging Face Hub, or saelens:RELEASE/ID.
    It may be wider than --d-sae; the latents with the most energy are kept, and the lasting ones become high-level."""
    seeds: Daily[tuple[int, ...]] = ()
    """One SAE per seed of the initial weights, all trained on the same batches, which are read once."""
    sites: tuple[str, ...] = ()
    """TransformerLens names: SAEs for each site, one after another."""
    store: Daily[Path | None] = None
    """Folder that `tsae capture` wrote."""
    live: Live = field(default_factory=Live)
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer finds the tokens that end a step, for partner "step": those that contain step_text."""
    step_text: str | None = None
    """Text that ends a reasoning step; by default a newline."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=SAEConfig)
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)

    def execute(self) -> None:
        from tsae.sae.training.train import run_name

        store = _source(self, "tsae train", self.training.site).subset(self.subset)
        training, saes = _training(self, store), {}
        if not self.seeds and not self.sites:
            beginning: dict[str, Any] = {"start": self.start, "init_from": self.init_from}
            saes[self.to] = tsae.train(store, self.sae, **beginning, to=self.to, training=training)
        else:
            what, fix = "a start has one site, and no seed of initial weights", "Leave out --seeds and --sites, or it."
            refuse("--start", (self.start, what, fix))
            refuse("--init-from", (self.init_from, what, fix))
            seeds, sites = self.seeds or None, self.sites or None
            many = tsae.train_many(store, self.sae, sites=sites, seeds=seeds, to=self.to, training=training)
            saes |= {self.to / run_name(*key): sae for key, sae in many.items()}
        if not first_process():
            return
        for folder, sae in saes.items():
            say_wrote(folder, sae)
            norms = sae.training_info["norms"]
            print(f"left out {norms['outlier_share']:.2%} of tokens: norm about the centre above {norms['limit']:.3g}")
        cells = sae.training_info.get("mixture", ())
        for cell in cells if len({cell["tokens"] for cell in cells}) > 1 else ():
            labels = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in ("tokens", "weight"))
            print(f"{labels}: {cell['tokens']:,} tokens, each read {cell['weight']:.2f} times an epoch")


@config
class Evaluate:
    """Measure a temporal SAE: reconstruction by reader, band and span, L0, alive, smoothness.

    With the checkpoints also the loss that its reconstruction recovers, with a baseline temporal separation, with
    other seeds the stability of its latents.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE (see `tsae encode`)."""
    store: Path
    """Folder that `tsae capture` wrote."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    span: Literal["response", "thinking", "answer", "prompt", "all"] = "all"
    """Tokens that count. Special tokens never count, nor response tokens that the policy did not sample."""
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """Leave out tokens whose norm about the centre exceeds this multiple of the median. By default the limit that
    training stored counts, or 10 times the median if it stored none."""
    all_problems: bool = False
    """Measure on all problems, not only on those held out of training."""
    series: tuple[str, ...] = ()
    """The readers' checkpoints, as for capture: measures loss and KL with the reconstruction spliced in."""
    baseline: Path | None = None
    """Another SAE, such as a plain Matryoshka of the same data: probes how far each separates trajectory from token."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, to probe as well; needs
    --series."""
    seeds: tuple[Path, ...] = ()
    """SAEs of the same training with other seeds: matches latents into stability.json, which `tsae encode` copies."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.checkpoints.tokenizers import token_strings
        from tsae.features.contexts import find_annotator

        sae, store = tsae.TemporalSAE.load(self.sae), tsae.ActivationStore(self.store).subset(self.subset)
        series = load_series(*self.series) if self.series else None
        held_out = None if self.all_problems else True
        found = tsae.evaluate(sae, store, span=self.span, held_out=held_out, max_norm=self.max_norm, series=series)
        content: dict[str, Any] = {"evaluation": found.as_dict()}
        if store.selection.as_dict():
            content["subset"] = store.selection.as_dict()
        with as_json(self.json) as write:
            print(found)
            if self.baseline is not None:
                annotator = None if self.annotator is None else find_annotator(self.annotator)
                strings = None if series is None else token_strings(series.base.load_tokenizer())
                separated = tsae.separation(
                    {"SAE": sae, "baseline": self.baseline}, store, annotator=annotator, token_strings=strings
                )
                content["separation"] = separated.as_dict()
                print(f"\n{separated}")
            stable = None
            if self.seeds:
                others = [other for other in self.seeds if other.resolve() != self.sae.resolve()]
                stable = tsae.stability(sae, others)
                content["stability"] = stable.summary()
                print(f"\n{stable}")
            write(content)
            if stable is not None and self.sae.is_dir():
                _keep(stable, self.sae)
            elif stable is not None:
                print(f"{self.sae} is not a folder, so that stability.json is not kept")


@config
class Encode:
    """Turn activations into sparse feature codes. Resumes an unfinished encoding.

    Without a store: tsae encode --sae SAE --live.series SERIES --live.rollouts ROLLOUTS --to FEATURES. Activations are
    encoded as the checkpoints compute them, and never stored.

    In parts that know nothing of each other: --parts 8 --workers 2 on this machine, --parts 8 --executor slurm on a
    cluster, or --part 2/8 wherever you start it.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE: a path, org/name or org/name/folder on the Hugging Face Hub,
    or saelens:RELEASE/ID of sae_lens's list."""
    to: Path
    """Folder of the feature table."""
    store: Daily[Path | None] = None
    """Folder that `tsae capture` wrote."""
    live: Live = field(default_factory=Live)
    device: Daily[str] = "cpu"
    """Torch device of the SAE: cpu, cuda, cuda:1, …; --live.device is that of the checkpoints."""
    part: str | None = None
    """Encode only a part of the shards, such as 2/7. When all parts are done, the same command without this
    joins them."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)

    def execute(self) -> None:
        from tsae.features.encode import encode_part

        site = None if self.store is not None else tsae.TemporalSAE.load(self.sae).site
        store = _source(self, "tsae encode", site).subset(self.subset)
        if self.part is not None:
            missing = encode_part(self.sae, store, to=self.to, part=Part.of(self.part), device=self.device)
            print_part(self.part, missing, "shards still to encode")
            return
        say_wrote(self.to, tsae.encode(self.sae, store, to=self.to, device=self.device))


@config
class Crosscoder:
    """Train a crosscoder of the base and another checkpoint, and say which latents are new, lost or shared.

    A second opinion beside `tsae diff`: it asks for directions that one checkpoint lacks, not for features whose use
    changed. Latent scaling tells artefacts from changes. Resumes an unfinished training.

    Of a published crosscoder of dictionary_learning: --published FOLDER.
    """

    store: Path
    """Folder that `tsae capture` wrote."""
    reader: str
    """Id of the checkpoint that is compared with the base, such as hard-150."""
    to: Path
    """Folder for the crosscoder."""
    published: Daily[Path | None] = None
    """Crosscoder of dictionary_learning (model_final.pt, ae.pt or model.safetensors) in place of a training; its first
    model is the base. It is written to --to in the form of tsae."""
    all_problems: bool = False
    """Judge on all problems, not only on those held out of training."""
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=lambda: SAEConfig(groups=(1.0,), temporal_weight=0.0))
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)

    def execute(self) -> None:
        from tsae.sae.crosscoder import crosscoder_changes, read_published

        store = tsae.ActivationStore(self.store).subset(replace(self.subset, readers=()))
        pair = tsae.Pair(store, self.reader)
        with as_json(self.json) as write:
            if self.published is None:
                found = tsae.Crosscoder.from_sae(tsae.train(pair, self.sae, to=self.to, training=self.training))
            else:
                site = self.training.site or pair.sites[0]
                found = read_published(self.published, site=site, compared=pair.compared)
                training = (self.to / "metrics.jsonl").is_file() or (self.to / "checkpoint").is_dir()
                refuse(f"--to {self.to}", (training, "holds a training", "Give another folder."))
                found.save(self.to)
            if not first_process():
                return
            held_out = None if self.all_problems else True
            changes = crosscoder_changes(found, pair, span=self.training.span, held_out=held_out)
            print(changes)
            say_wrote(self.to, found)
            write({"compared": changes.compared, "fve": changes.fve, "latents": changes.table()})


def start_as_default(args: Sequence[str]) -> Train | None:
    """The config of the SAE that --start names, for defaults in place of SAEConfig's; None without --start."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--start", "--store", "--to"):
        parser.add_argument(name, type=Path)
    found, _ = parser.parse_known_args(args)
    if None in (found.start, found.store, found.to):
        return None
    from tsae.sae.training.finetuning import starting_config

    config = starting_config(tsae.TemporalSAE.load(found.start), tsae.ActivationStore(found.store))
    return Train(to=found.to, sae=config)


def _source(options: Train | Encode, command: str, site: str | None) -> tsae.ActivationStore | tsae.LiveSource:
    live = options.live
    if options.store is not None and live == Live():
        return tsae.ActivationStore(options.store)
    if options.store is not None or live.series is None or live.rollouts is None:
        what = "activations come from a store, or from live models given by both --live.series and --live.rollouts"
        raise TsaeError(what, where=command, fix="Give --store alone, or both of these without --store.")
    series = chosen_readers(load_series(live.series), live.checkpoints)
    return tsae.LiveSource(series, tsae.Rollouts.read(live.rollouts), site, config=live.config)


def _training(options: Train, store: tsae.ActivationStore | tsae.LiveSource) -> TrainingConfig:
    """With the step ends that the tokenizer knows, where one is given."""
    training = options.training
    if options.tokenizer is None and options.step_text is None:
        return training
    what = "--tokenizer and --step-text name together what ends a step of --partner step without --step-ends"
    fix = "Give --partner step with --tokenizer or with --step-ends, or none of these."
    refuse("tsae train", (training.partner != "step" or training.step_ends or options.tokenizer is None, what, fix))
    assert options.tokenizer is not None
    from tsae.activations.reading_plan import check_tokenizer

    checkpoint = load_series(options.tokenizer).base
    check_tokenizer(checkpoint, store.rollouts)
    return replace(training, step_ends=checkpoint.tokens_with(options.step_text or "\n"))


def _keep(stable: tsae.Stability, folder: Path) -> None:
    """Write stability.json into the SAE's folder. If the SAE lies at a URL, upload it there as well."""
    with output_lock(folder):
        file = stable.save(folder)
        try:
            published(folder)
        except TsaeError:
            file.unlink(missing_ok=True)  # else the copy would hold a file that is not at the URL
            raise
        say_wrote(file)
