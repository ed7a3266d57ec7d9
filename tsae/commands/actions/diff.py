"""`tsae diff`, `tsae reinforcement`, `tsae explain`, `tsae report` and `tsae serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

import tsae
from tsae.activations.reading_plan import check_tokenizer
from tsae.attribution.attribution import Attribution
from tsae.base.files import reading, write_text
from tsae.base.seal import read_whole, write_whole
from tsae.base.table_export import write_table
from tsae.causal.insertion import insert_discoveries
from tsae.causal.intervention import folders_of_tests
from tsae.checkpoints.loading import Checkpoint, token_strings
from tsae.claims.evidence import NAMES, attribution_in, inputs_of
from tsae.claims.run_claims import FILE as CLAIMS
from tsae.claims.run_claims import Claims, claims_in
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.commands.options.diff import Diff, Explain, Reinforcement, Report, Serve
from tsae.diff.controls.baselines import baselines
from tsae.diff.explaining.explanations import FILE as EXPLANATIONS
from tsae.diff.explaining.explanations import Explanations
from tsae.diff.families import find_families
from tsae.errors import TsaeError
from tsae.features.annotations import find_annotator
from tsae.features.logits import logit_effects
from tsae.report.printed.explanations import explanation_text
from tsae.report.printed.findings import baseline_text, insertion_text, print_findings
from tsae.report.printed.reinforcement import prediction_text, reinforcement_text
from tsae.report.serving import HOST, ServedRun, server
from tsae.report.story.findings import findings_content
from tsae.report.story.noise import NOT_RUN, noise_lines

_PUSHED = "reinforcement.json"
"""In the folder of `tsae reinforcement --to`, says of which rollouts the tables are."""


def run_diff(options: Diff) -> None:
    _check(options)
    features = tsae.FeatureTable.load(options.features)
    base = None if options.tokenizer is None else load_series(options.tokenizer).base
    strings = None if base is None else _strings(features, base)
    logits = None
    if options.sae is not None and base is not None and strings is not None:
        sae = tsae.TemporalSAE.load(options.sae)
        features.need_sae(sae.fingerprint, sae.config.d_sae)
        logits = logit_effects(sae, base, strings)
    series = load_series(*options.series) if options.series else None
    annotator = None if options.annotator is None else find_annotator(options.annotator)
    families = find_families(options.annotator) if options.families else None
    other = None if options.compare is None else tsae.FeatureDiff.load(options.compare)
    diff = tsae.feature_diff(
        features,
        options.config,
        annotator=annotator,
        families=families,
        token_strings=strings,
        stability=options.stability,
        logits=logits,
        steps=options.steps,
    )
    if series is not None and options.sae is not None:
        capturing = tsae.CaptureConfig(device=options.device)
        noise = tsae.noise_null(series, options.sae, features, options.config, capturing=capturing, scratch=options.to)
        diff = diff.with_noise(noise)
    with as_json(options.json) as write:
        content = findings_content(diff)
        print_findings(diff)
        if options.config.noise_draws:
            lines = noise_lines(diff.info["noise"]) if series is not None else [NOT_RUN]
            print("\n" + "\n".join(lines))
        content["noise"] = diff.info.get("noise")
        if options.store is not None:
            content["baselines"] = found = baselines(features, options.store, options.config)
            diff = replace(diff, baselines=found)
            print(f"\n{baseline_text(found)}")
        if options.sae is not None and series is not None and options.insertion:
            content["insertion"] = inserted = insert_discoveries(diff, series, options.sae, features, options.insertion)
            diff = replace(diff, insertion=inserted)
            print(f"\n{insertion_text(inserted, strings)}")
        say_wrote(diff.save(options.to), diff)
        if other is not None:
            content["agreement"] = diff.compare(other).agreement.value_counts().to_dict()
            print(f"\nAgainst {options.compare}: {content['agreement']}")
        if options.markdown is not None:
            write_text(options.markdown, diff.to_markdown())
            say_wrote(options.markdown)
        write(content)


def _strings(features: tsae.FeatureTable, base: Checkpoint) -> list[str]:
    """The texts of the vocabulary.

    Raises:
        TsaeError: where the tokenizer is not that of the features' tokens.
    """
    return token_strings(check_tokenizer(base, features.rollouts))


def _check(options: Diff) -> None:
    """Which options need which others.

    Raises:
        TsaeError: where one is missing.
    """
    if options.insertion and not (options.series and options.sae):
        raise TsaeError("runs the models", where="--insertion", fix="Give --series and --sae.")
    if options.sae is not None and options.tokenizer is None and not options.series:
        what = "needs checkpoints: one whose unembedding is read, or those that read with noise"
        raise TsaeError(what, where="--sae", fix="Give --tokenizer, or --series.")
    if options.series and options.sae is None:
        raise TsaeError("names checkpoints, of which nothing is read", where="--series", fix="Give --sae too.")


def run_reinforcement(options: Reinforcement) -> None:
    series = load_series(*options.series) if options.series else None
    found = tsae.reinforcement(
        options.features, options.config, policy=options.policy, series=series, device=options.device
    )
    tables = {"reinforcement": found.table, "groups": found.groups}
    with as_json(options.json) as write:
        print(reinforcement_text(found))
        if options.diff is not None:
            tables["predicted"] = found.compare(tsae.FeatureDiff.load(options.diff))
            print(f"\n{prediction_text(tables['predicted'])}")
        if options.to is not None:
            # An earlier call may have written predictions, of another diff.
            writers: dict[str, Callable[[Path], object] | None] = {"predicted.parquet": None}
            writers |= {f"{name}.parquet": partial(write_table, table=table) for name, table in tables.items()}
            say_wrote(write_whole(options.to, _PUSHED, found.made_from, writers))
        write(tables)


def run_explain(options: Explain) -> None:
    server = options.server if options.server.url else None
    if server is None and options.server != type(options.server)():
        raise TsaeError("is missing", where="--server.url", fix="Give the server's address.")
    features = tsae.FeatureTable.load(options.features or options.diff.parent / "features")
    diff = tsae.FeatureDiff.load(options.diff, features=features)
    assert options.to is not None
    with as_json(options.json) as write:
        found = tsae.explain(
            diff, options.config, server=server, to=options.to, say=lambda text: print(text, file=sys.stderr)
        )
        print(explanation_text(found))
        say_wrote(options.to, found)
        write({**found.info, "explanations": found.table})


def run_report(options: Report) -> None:
    features = None if options.features is None else tsae.FeatureTable.load(options.features)
    diff = tsae.FeatureDiff.load(options.diff, features=features)
    for folder in options.causal:
        diff = tsae.Intervention.load(folder).mark(diff)
    if options.reinforcement is not None:
        folder = options.reinforcement
        fix = "Make it again with `tsae reinforcement --diff`."
        needed = (_PUSHED, "reinforcement.parquet", "predicted.parquet")
        known = read_whole(folder, needed, fix, "Make it with `tsae reinforcement --diff`.")
        for name, of in inputs_of(diff).items():
            if known.get(name) not in (None, of):
                raise TsaeError(f"is of other {NAMES[name]} than the diff", where=folder, fix=fix)
        with reading(folder, fix):
            tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in ("reinforcement", "predicted")}
        diff = replace(diff, **tables)
    if options.explanations is not None:
        diff = Explanations.load(options.explanations).mark(diff)
    else:
        diff = _labelled(diff, options.diff.parent / "explanations")
    folder = options.diff.parent
    attribution = _attribution_in(folder) if options.attribution is None else Attribution.load(options.attribution)
    claims = claims_in(options.diff.parent, diff)
    say_wrote(diff.to_html(options.to, title=options.title, attribution=attribution, claims=claims))


def _labelled(diff: tsae.FeatureDiff, folder: Path) -> tsae.FeatureDiff:
    """The diff with the labels in a folder, if there are any."""
    return Explanations.load(folder).mark(diff) if (folder / EXPLANATIONS).is_file() else diff


def _attribution_in(folder: Path) -> Attribution | None:
    """The attribution in the folder of a run. If it is of another log, it is left out, with a message."""
    found, why = attribution_in(folder)
    if why:
        print(f"{folder / 'attribution'} is not shown: the page needs {why}.", file=sys.stderr)
    return found


def files_of_page(folder: Path) -> list[Path]:
    """What the page of a run rests on: of each piece the file that is written last. Some may be missing."""
    names = (
        "diff/diff.json",
        "features/run.json",
        f"explanations/{EXPLANATIONS}",
        "attribution/attribution.json",
        CLAIMS,
    )
    return [*(folder / name for name in names), *(test / "causal.json" for test in folders_of_tests(folder))]


def run_serve(options: Serve) -> None:
    folder = options.run
    for name in ("diff/diff.json", "features/run.json"):
        if not (folder / name).is_file():
            fix = "Give the folder that `tsae run`, `tsae watch` or `tsae demo` wrote, once it is done."
            raise TsaeError(f"holds no {name}", where=folder, fix=fix)

    def read() -> tuple[tsae.FeatureDiff, Attribution | None, Claims | None]:
        diff = tsae.FeatureDiff.load(folder / "diff", features=tsae.FeatureTable.load(folder / "features"))
        for test in folders_of_tests(folder):
            if (test / "causal.json").is_file():
                diff = tsae.Intervention.load(test).mark(diff)
        labelled = _labelled(diff, folder / "explanations")
        return labelled, _attribution_in(folder), claims_in(folder, diff)

    with server(ServedRun(read, lambda: files_of_page(folder), options.title), options.port) as found:
        print(f"serving {folder} at http://{HOST}:{found.server_port}/ (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            found.serve_forever()
