"""`tsae train`, `tsae evaluate`, `tsae encode` and `tsae crosscoder`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

import tsae
from tsae.activations.reading_plan import check_tokenizer
from tsae.activations.store import Source
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.part import Part
from tsae.base.remote.mirror import published
from tsae.base.torchrun import first_process
from tsae.checkpoints.loading import token_strings
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.commands.options.sae import Crosscoder, Encode, Evaluate, Live, Train
from tsae.errors import TsaeError
from tsae.features.annotations import find_annotator
from tsae.features.encode import encode_part
from tsae.sae.config import TrainingConfig
from tsae.sae.crosscoder.changes import crosscoder_changes
from tsae.sae.crosscoder.published_crosscoder import read_published
from tsae.sae.fitting.finetuning import starting_config
from tsae.sae.fitting.train_many import run_name
from tsae.sae.quality.stability import Stability


def start_as_default(args: Sequence[str]) -> Train | None:
    """The config of the SAE that --start names, for defaults in place of SAEConfig's; None without --start."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--store", type=Path)
    found, _ = parser.parse_known_args(args)
    if found.start is None or found.store is None:
        return None
    config = starting_config(tsae.TemporalSAE.load(found.start), tsae.ActivationStore(found.store))
    return Train(store=tyro.MISSING, to=tyro.MISSING, sae=config)


def run_train(options: Train) -> None:
    store = _source(options, "tsae train", options.training.site).subset(options.subset)
    training, saes = _training(options, store), {}
    if not options.seeds and not options.sites:
        beginning: dict[str, Any] = {"start": options.start, "init_from": options.init_from}
        saes[options.to] = tsae.train(store, options.sae, **beginning, to=options.to, training=training)
    elif options.start is not None or options.init_from is not None:
        raise TsaeError(
            "a start has one site, and no seed of initial weights",
            where="--init-from" if options.start is None else "--start",
            fix="Leave out --seeds and --sites, or the start.",
        )
    else:
        seeds, sites = options.seeds or None, options.sites or None
        many = tsae.train_many(store, options.sae, sites=sites, seeds=seeds, to=options.to, training=training)
        saes |= {options.to / run_name(*key): sae for key, sae in many.items()}
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


def _source(options: Train | Encode, command: str, site: str | None) -> Source:
    live = options.live
    if options.store is not None and live == Live():
        return tsae.ActivationStore(options.store)
    if options.store is not None or live.series is None or live.rollouts is None:
        what = "activations come from a store, or from live models given by both --live.series and --live.rollouts"
        raise TsaeError(what, where=command, fix="Give --store alone, or both of these without --store.")
    series = load_series(live.series)
    series = series.select(live.checkpoints) if live.checkpoints else series.final()
    return tsae.LiveSource(series, tsae.Rollouts.read(live.rollouts), site, config=live.config)


def _training(options: Train, store: Source) -> TrainingConfig:
    """With the step ends that the tokenizer knows, where one is given."""
    training = options.training
    if options.tokenizer is None and options.step_text is None:
        return training
    if options.tokenizer is None or training.partner != "step" or training.step_ends:
        raise TsaeError(
            "--tokenizer and --step-text say together what ends a step of --partner step without --step-ends",
            where="tsae train",
            fix="Give --partner step with --tokenizer or with --step-ends, or none of these.",
        )
    checkpoint = load_series(options.tokenizer).base
    check_tokenizer(checkpoint, store.rollouts)
    return replace(training, step_ends=checkpoint.tokens_with(options.step_text or "\n"))


def run_evaluate(options: Evaluate) -> None:
    sae, store = tsae.TemporalSAE.load(options.sae), tsae.ActivationStore(options.store).subset(options.subset)
    series = load_series(*options.series) if options.series else None
    found = tsae.evaluate(
        sae,
        store,
        span=options.span,
        held_out=None if options.all_problems else True,
        max_norm=options.max_norm,
        series=series,
    )
    content: dict[str, Any] = {"evaluation": found.as_dict()}
    if store.selection.as_dict():
        content["subset"] = store.selection.as_dict()
    stable = None
    with as_json(options.json) as write:
        print(found)
        if options.baseline is not None:
            separated = tsae.separation(
                {"SAE": sae, "baseline": options.baseline},
                store,
                annotator=None if options.annotator is None else find_annotator(options.annotator),
                token_strings=None if series is None else token_strings(series.base.load_tokenizer()),
            )
            content["separation"] = separated.as_dict()
            print(f"\n{separated}")
        if options.seeds:
            others = [other for other in options.seeds if other.resolve() != options.sae.resolve()]
            stable = tsae.stability(sae, others)
            content["stability"] = stable.summary()
            print(f"\n{stable}")
        write(content)
        if stable is not None and options.sae.is_dir():
            _keep(stable, options.sae)
        elif stable is not None:
            print(f"{options.sae} is no folder, so that stability.json is not kept")


def _keep(stable: Stability, folder: Path) -> None:
    """Write stability.json into the SAE's folder. If the SAE lies at a URL, upload it there as well."""
    with sole_writer(folder):
        file = stable.save(folder)
        try:
            published(folder)
        except TsaeError:
            file.unlink(missing_ok=True)  # else the copy would hold a file that is not at the URL
            raise
        say_wrote(file)


def run_encode(options: Encode) -> None:
    site = None if options.store is not None else tsae.TemporalSAE.load(options.sae).site
    store = _source(options, "tsae encode", site).subset(options.subset)
    if options.part is not None:
        part = Part.of(options.part)
        missing = encode_part(options.sae, store, to=options.to, part=part, device=options.device)
        rest = f"other parts have {missing} shards still to encode" if missing else "so are all others"
        print(f"part {part} is done; {rest}. The same command without --part joins them.")
        return
    say_wrote(options.to, tsae.encode(options.sae, store, to=options.to, device=options.device))


def run_crosscoder(options: Crosscoder) -> None:
    store = tsae.ActivationStore(options.store).subset(replace(options.subset, readers=()))
    pair = tsae.Pair(store, options.reader)
    with as_json(options.json) as write:
        if options.published is None:
            found = tsae.Crosscoder.from_sae(tsae.train(pair, options.sae, to=options.to, training=options.training))
        else:
            site = options.training.site or pair.sites[0]
            found = read_published(options.published, site=site, compared=pair.compared)
            if (options.to / "run.json").is_file() or (options.to / "checkpoint").is_dir():
                raise TsaeError("holds a training", where=f"--to {options.to}", fix="Give another folder.")
            found.save(options.to)
        if not first_process():
            return
        changes = crosscoder_changes(
            found, pair, span=options.training.span, held_out=None if options.all_problems else True
        )
        print(changes)
        say_wrote(options.to, found)
        write({"compared": changes.compared, "fve": changes.fve, "latents": changes.table()})
