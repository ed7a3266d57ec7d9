"""The command line: one subcommand per stage, whose options are the stage's own config."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from tsae.activations.config import CaptureConfig, LiveConfig, Subset
from tsae.commands import Bands, Behaviours, Causal, Difficulty, Drift, Influence, Reinforcement
from tsae.commands import load_series as _series
from tsae.commands import say_wrote as _wrote
from tsae.demo import DemoConfig
from tsae.diff.config import DiffConfig
from tsae.errors import TsaeError
from tsae.helptext import join_lines
from tsae.rollouts.config import ImportConfig, SamplingConfig
from tsae.run import RunConfig
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.store_commands import StoreCommand

if TYPE_CHECKING:
    from tsae.activations.source import Source
    from tsae.activations.store import ActivationStore
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.sae.model import TemporalSAE
    from tsae.sae.separation import Separation


@dataclass(frozen=True)
class Sample:
    """Sample rollouts of problems from checkpoints, check their answers, and set advantages."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, .gguf files, Hugging Face ids (org/model@revision/subfolder)."""
    problems: Path
    """JSON lines of id, prompt, answer and, optionally, level."""
    to: Path
    """Parquet file to write."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    checkpoints: tuple[str, ...] = ()
    """Ids to sample from; by default the base and the last step of every run."""
    sampling: OmitArgPrefixes[SamplingConfig] = field(default_factory=SamplingConfig)

    def run(self) -> None:
        import tsae
        from tsae.checkpoints.loading import ModelLoader
        from tsae.rollouts.checking import find_verifier
        from tsae.rollouts.problems import read_problems

        series = _series(*self.series)
        chosen = [series[id] for id in self.checkpoints] if self.checkpoints else list(series.final())
        problems, verify = read_problems(self.problems), find_verifier(self.verifier)
        loader = ModelLoader(device=self.sampling.device)
        parts = [tsae.sample(c, problems, self.sampling, verify=verify, loader=loader) for c in chosen]
        rollouts = tsae.Rollouts.concat(parts).with_advantages()
        _wrote(rollouts.write(self.to), rollouts)


@dataclass(frozen=True)
class Import:
    """Read a trainer's rollout log, tokenise it where it has text alone, and say what was read and assumed.

    Logs of TRL (log_completions), verl (rollout_data_dir), open-instruct (save_traces), NeMo-RL (train_data_step*),
    prime-rl (traces, token exports) and open-r1 (generations) are known by their names and columns; of any other JSON
    lines or Parquet the columns are named below.
    """

    log: Positional[Path]
    """The .jsonl or .parquet file, or the folder that the trainer fills with them, which is read whole."""
    to: Path
    """Parquet file to write."""
    checkpoint: Path | None = None
    """Folder, .gguf file or series: tokenizer, chat template, ids of policies. By default what lies beside the log."""
    config: OmitArgPrefixes[ImportConfig] = field(default_factory=ImportConfig)

    def run(self) -> None:
        from tsae.rollouts.importing import import_log

        print(import_log(self.log, self.to, self.checkpoint, self.config))
        _wrote(self.to)


@dataclass(frozen=True)
class RolloutsCommand:
    """Sample rollouts, import a log, measure difficulty and how it moved, or what responses do."""

    command: OmitArgPrefixes[
        Annotated[Sample, subcommand("sample", prefix_name=False)]
        | Annotated[Import, subcommand("import", prefix_name=False)]
        | Annotated[Bands, subcommand("bands", prefix_name=False)]
        | Annotated[Difficulty, subcommand("difficulty", prefix_name=False)]
        | Annotated[Behaviours, subcommand("behaviours", prefix_name=False)]
    ]

    def run(self) -> None:
        self.command.run()


@dataclass(frozen=True)
class Capture:
    """Record residual-stream activations while checkpoints read trajectories; a capture that was killed goes on.

    On several processes: torchrun --nproc-per-node 2 -m tsae capture …
    """

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, .gguf files, Hugging Face ids (org/model@revision/subfolder)."""
    rollouts: Path
    """Parquet file."""
    to: Path
    """Folder of the activation store."""
    sites: tuple[str, ...] = ()
    """TransformerLens names such as blocks.14.hook_resid_post; by default the output of the middle block."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    config: OmitArgPrefixes[CaptureConfig] = field(default_factory=CaptureConfig)

    def run(self) -> None:
        import tsae
        from tsae.distributed import first_process

        series = _series(*self.series)
        series = series.select(self.checkpoints) if self.checkpoints else series.final()
        rollouts = tsae.Rollouts.read(self.rollouts)
        store = tsae.capture(series, rollouts, list(self.sites), to=self.to, config=self.config)
        if first_process():
            _wrote(store.path, store)


@dataclass(frozen=True)
class Live:
    """Activations straight from the checkpoints in place of a store: no disk, a forward pass in every epoch."""

    series: Path | None = None
    """Folder of checkpoints, as of `tsae capture`."""
    rollouts: Path | None = None
    """Parquet file."""
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
        import tsae
        from tsae.distributed import first_process
        from tsae.sae.many import run_name

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
            _wrote(folder, sae)
            norms = sae.training_info["norms"]
            print(f"left out {norms['outlier_share']:.2%} of tokens: norm above {norms['limit']:.3g}")
        cells = sae.training_info.get("mixture", ())
        for cell in cells if len({cell["tokens"] for cell in cells}) > 1 else ():
            labels = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in ("tokens", "weight"))
            print(f"{labels}: {cell['tokens']:,} tokens, each read {cell['weight']:.2f} times an epoch")

    def _source(self) -> Source:
        import tsae

        live = self.live
        if self.store is not None and live == Live():
            return tsae.ActivationStore(self.store)
        if self.store is not None or live.series is None or live.rollouts is None:
            raise TsaeError(
                "a training reads a store, or live models given by both --live.series and --live.rollouts",
                where="tsae train",
                fix="Give --store alone, or both of these without --store.",
            )
        series = _series(live.series)
        series = series.select(live.checkpoints) if live.checkpoints else series.final()
        return tsae.LiveSource(series, tsae.Rollouts.read(live.rollouts), self.training.site, config=live.config)

    def _training(self, store: Source) -> TrainingConfig:
        """With the step ends that the tokenizer knows, where one is given."""
        from tsae.checkpoints.loading import tokenizer_fingerprint

        if self.tokenizer is None and self.step_text is None:
            return self.training
        if self.tokenizer is None or self.training.partner != "step" or self.training.step_ends:
            raise TsaeError(
                "--tokenizer and --step-text say together what ends a step of --partner step without --step-ends",
                where="tsae train",
                fix="Give --partner step with --tokenizer or with --step-ends, or none of these.",
            )
        checkpoint = _series(self.tokenizer).base
        found, expected = tokenizer_fingerprint(checkpoint.load_tokenizer()), store.manifest.get("tokenizer")
        if expected not in (found, None):
            raise TsaeError(
                f"its tokenizer ({found}) is not that of the store ({expected})",
                where=checkpoint.path,
                fix="Give a checkpoint that the store was captured from.",
            )
        return replace(self.training, step_ends=checkpoint.tokens_with(self.step_text or "\n"))


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
    span: Literal["response", "prompt", "all"] = "all"
    """Which tokens count; special tokens never do."""
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
    """File to write all numbers to."""

    def run(self) -> None:
        import tsae
        from tsae.provenance import write_json
        from tsae.sae.stability import stability

        sae, store = tsae.TemporalSAE.load(self.sae), tsae.ActivationStore(self.store).subset(self.subset)
        series = _series(*self.series) if self.series else None
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
        print(found)
        if self.baseline is not None:
            separated = self._separation(sae, store, series)
            content["separation"] = separated.as_dict()
            print(f"\n{separated}")
        if self.seeds:
            stable = stability(sae, [other for other in self.seeds if other.resolve() != self.sae.resolve()])
            content["stability"] = stable.summary()
            print(f"\n{stable}")
            _wrote(stable.save(self.sae))
        if self.json is not None:
            _wrote(write_json(self.json, content))

    def _separation(self, sae: TemporalSAE, store: ActivationStore, series: CheckpointSeries | None) -> Separation:
        from tsae.checkpoints.loading import token_strings
        from tsae.features.annotations import find_annotator
        from tsae.sae.separation import separation

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
        import tsae

        sae = tsae.TemporalSAE.load(self.sae)
        _wrote(sae.to_saelens(self.to, architecture=self.architecture), f"{sae} as {self.architecture}")


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
        import tsae

        sae, store = tsae.TemporalSAE.load(self.sae), tsae.ActivationStore(self.store).subset(self.subset)
        _wrote(self.to, tsae.encode(sae, store, to=self.to))


@dataclass(frozen=True)
class Diff:
    """Compare every checkpoint with the base, and successes with failures; print the findings."""

    features: Path
    """Folder that `tsae encode` wrote."""
    to: Path
    """Folder of the diff."""
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer names the tokens; without it they are shown by id."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, such as
    tsae.features.mathematics:math_classes."""
    families: bool = False
    """Group features by the FAMILIES of the annotator's module and test their shifts."""
    store: Path | None = None
    """The store that was encoded: set plain directions and a probe beside the best features."""
    compare: Path | None = None
    """Folder of another diff of the same SAE: say which effects both found."""
    markdown: Path | None = None
    """File to write the clearest total shifts to, as a Markdown table."""
    stability: Path | None = None
    """The SAE's folder, where `tsae evaluate --seeds` ran after `tsae encode`; else found beside the features."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def run(self) -> None:
        import tsae
        from tsae.checkpoints.loading import token_strings
        from tsae.diff.baselines import baselines
        from tsae.diff.families import find_families
        from tsae.features.annotations import find_annotator
        from tsae.report.terminal import baseline_text, print_findings

        strings = None if self.tokenizer is None else token_strings(_series(self.tokenizer).base.load_tokenizer())
        annotator = None if self.annotator is None else find_annotator(self.annotator)
        features = tsae.FeatureTable.load(self.features)
        families = find_families(self.annotator) if self.families else None
        other = None if self.compare is None else tsae.FeatureDiff.load(self.compare)
        diff = tsae.feature_diff(
            features,
            self.config,
            annotator=annotator,
            families=families,
            token_strings=strings,
            stability=self.stability,
        )
        print_findings(diff)
        if self.store is not None:
            found = baselines(features, self.store, self.config)
            print(f"\n{baseline_text(found)}")
        _wrote(diff.save(self.to), diff)
        if self.store is not None:
            found.to_parquet(self.to / "baselines.parquet")
        if other is not None:
            print(f"\nAgainst {self.compare}: {diff.compare(other).agreement.value_counts().to_dict()}")
        if self.markdown is not None:
            self.markdown.write_text(diff.to_markdown(), encoding="utf-8")
            _wrote(self.markdown)


@dataclass(frozen=True)
class Report:
    """Write a diff as one self-contained HTML file that opens with no network."""

    diff: Path
    """Folder that `tsae diff` wrote."""
    to: Path
    """The .html file to write."""
    features: Path | None = None
    """Folder that `tsae encode` wrote, for examples."""
    title: str | None = None
    """Title of the page."""
    causal: tuple[Path, ...] = ()
    """Folders that `tsae causal` wrote, with features of this diff: the report says what was tested."""

    def run(self) -> None:
        import tsae

        features = None if self.features is None else tsae.FeatureTable.load(self.features)
        diff = tsae.FeatureDiff.load(self.diff, features=features)
        for folder in self.causal:
            diff = tsae.Intervention.load(folder).mark(diff)
        _wrote(diff.to_html(self.to, title=self.title))


@dataclass(frozen=True)
class Run:
    """The whole pipeline on what a trainer left: from the checkpoints and the rollout log of a run to a report.

    Every stage is a folder and says what it decided; the same command goes on where it was interrupted.
    """

    config: Annotated[RunConfig, arg(name="")]

    def run(self) -> None:
        from tsae.report.terminal import print_findings
        from tsae.run import analyze_run

        print_findings(analyze_run(self.config))
        print(f"\nReport: {(self.config.to / 'report.html').resolve()}")


@dataclass(frozen=True)
class Demo:
    """The whole pipeline on the shipped arithmetic checkpoints: a findings table and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)

    def run(self) -> None:
        from tsae.demo import demo

        demo(self.config)


Command = (
    Annotated[Demo, subcommand("demo", prefix_name=False)]
    | Annotated[Run, subcommand("run", prefix_name=False)]
    | Annotated[RolloutsCommand, subcommand("rollouts", prefix_name=False)]
    | Annotated[Drift, subcommand("drift", prefix_name=False)]
    | Annotated[Capture, subcommand("capture", prefix_name=False)]
    | Annotated[StoreCommand, subcommand("store", prefix_name=False)]
    | Annotated[Train, subcommand("train", prefix_name=False)]
    | Annotated[Evaluate, subcommand("evaluate", prefix_name=False)]
    | Annotated[Export, subcommand("export", prefix_name=False)]
    | Annotated[Encode, subcommand("encode", prefix_name=False)]
    | Annotated[Diff, subcommand("diff", prefix_name=False)]
    | Annotated[Causal, subcommand("causal", prefix_name=False)]
    | Annotated[Reinforcement, subcommand("reinforcement", prefix_name=False)]
    | Annotated[Influence, subcommand("influence", prefix_name=False)]
    | Annotated[Report, subcommand("report", prefix_name=False)]
)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script; a `TsaeError` is printed in one paragraph and exits with status 2."""
    try:
        # Parsing makes the configs, whose checks raise TsaeError too.
        args = sys.argv[1:] if args is None else args
        if "-h" in args or "--help" in args:
            join_lines(Command)
        start = _start_as_default(args)
        given: dict[str, Any] = {} if start is None else {"default": start}
        command: Any = tyro.cli(Command, prog="tsae", description=_DESCRIPTION, args=args, **given)
        command.run()
    except TsaeError as error:
        print(f"tsae: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("tsae: interrupted; the same command goes on from what is on disk", file=sys.stderr)
        raise SystemExit(130) from None


_DESCRIPTION = """What changed inside a language model trained with verifiable rewards, and which samples did that?

The stages, in order: rollouts, capture, train, encode, diff, report. Each reads what the one before wrote. `tsae run`
runs them all on the folder of a training run, `tsae demo` on shipped checkpoints. `tsae drift` needs none of them;
`tsae causal` tests what a diff found."""


def _start_as_default(args: Sequence[str]) -> Train | None:
    """`tsae train --start SAE`: the start's own config in place of SAEConfig's defaults, in --help too."""
    if list(args[:1]) != ["train"]:
        return None
    options = ArgumentParser(prog="tsae train", add_help=False, allow_abbrev=False)
    options.add_argument("--start", type=Path)
    options.add_argument("--store", type=Path)
    found, _ = options.parse_known_args(args)
    if found.start is None or found.store is None:
        return None
    import tsae
    from tsae.sae.finetuning import starting_config

    config = starting_config(tsae.TemporalSAE.load(found.start), tsae.ActivationStore(found.store))
    return Train(store=tyro.MISSING, to=tyro.MISSING, sae=config)
