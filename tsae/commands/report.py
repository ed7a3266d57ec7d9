"""`tsae report`, `tsae serve`, `tsae export` and `tsae push`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, TypeAlias

from tyro.conf import Positional, arg

import tsae
from tsae.base.artefact import MANIFEST, Kind, manifest_of, read_artefact, write_artefact
from tsae.base.files import new_folder, reading
from tsae.base.filters import need_features
from tsae.base.validation import config
from tsae.commands.common import load_series, say_wrote
from tsae.commands.diff import REINFORCEMENT
from tsae.errors import TsaeError, refuse
from tsae.sae.config import PushConfig

ExportFormat = Literal["saelens", "delphi", "neuronpedia", "safetensors", "gguf"]


@config
class Report:
    """Write a diff as one self-contained HTML file that opens with no network.

    The page also shows the claims that `tsae claims` has saved beside the diff.
    """

    run: Positional[Path | None] = None
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote: the page shows everything in it."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote, in place of RUN."""
    to: Path | None = None
    """The .html file to write; by default report.html in RUN. Only a page of tsae is replaced."""
    features: Path | None = None
    """Folder that `tsae encode` wrote, for examples."""
    title: str | None = None
    """Title of the page; by default the run's."""
    causal: tuple[Path, ...] = ()
    """Folders that `tsae causal` wrote, with features of this diff: the report shows what was tested. By default
    those in the folder causal beside the diff."""
    reinforcement: Path | None = None
    """Folder that `tsae reinforcement --diff` wrote: predicted beside realised shifts."""
    attribution: Path | None = None
    """Folder that `tsae attribute` wrote: the report shows which samples did that. By default the folder attribution
    beside the diff, if there is one."""
    explanations: Path | None = None
    """Folder that `tsae explain` wrote: the report shows its labels. By default the folder explanations beside the
    diff, if there is one."""

    def __post_init__(self) -> None:
        if self.run is not None:
            for name, path in (("diff", "diff"), ("to", "report.html"), ("features", "features")):
                object.__setattr__(self, name, getattr(self, name) or self.run / path)
        for name in ("diff", "to"):
            refuse(f"--{name}", (getattr(self, name) is None, "is missing", "Give it, or the folder of a run."))

    def execute(self) -> None:
        import pandas as pd

        from tsae.claims.evidence import NAMES, inputs_of

        assert self.diff is not None
        assert self.to is not None
        features = None if self.features is None else tsae.FeatureTable.load(self.features)
        diff = tsae.FeatureDiff.load(self.diff, features=features)
        if self.reinforcement is not None:
            folder = self.reinforcement
            fix = REINFORCEMENT.fix
            known = read_artefact(folder, REINFORCEMENT, ["reinforcement.parquet", "predicted.parquet"])
            refuse(folder, *((known.get(name) not in (None, of), f"is of other {NAMES[name]} than the diff", fix)
                             for name, of in inputs_of(diff).items()))  # fmt: skip
            with reading(folder, fix):
                tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in ("reinforcement", "predicted")}
            diff = replace(diff, **tables)
        diff, attribution, claims = _with_results(
            diff, self.diff.parent, tests=self.causal or None, labels=self.explanations, attribution=self.attribution
        )
        say_wrote(diff.to_html(self.to, title=self.title, attribution=attribution, claims=claims))


@config
class Serve:
    """Show the report of a run in the browser, with examples of every active feature, and a playground.

    Examples are looked up when a card is opened, also for runs that are too large for one file. In the playground base
    and run answer your prompts, with features ablated or steered. The server listens on this machine alone. Reload the
    page for a diff that has changed, as while `tsae watch` runs. Ctrl-C ends it.
    """

    run: Positional[Path]
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote, or any folder with a diff and its features."""
    port: int = 8765
    """Port of 127.0.0.1; 0 for a free one."""
    title: str | None = None
    """Title of the page; by default the run's."""
    series: tuple[str, ...] = ()
    """The checkpoints for the playground, with the base first; by default where the run found them."""
    device: str = "cpu"
    """A torch device, for the playground."""

    def execute(self) -> None:
        from tsae.causal.intervention import folders_of_tests
        from tsae.report.playground import Playground
        from tsae.report.serving import HOST, ServedRun, server
        from tsae.stages import checkpoints_of

        folder = self.run
        fix = "Give the folder that `tsae run`, `tsae watch` or `tsae demo` wrote, once it is done."
        needed = ("diff/manifest.json", "features/manifest.json")
        refuse(folder, *((not (folder / name).is_file(), f"holds no {name}", fix) for name in needed))

        def read() -> _Results:
            diff = tsae.FeatureDiff.load(folder / "diff", features=tsae.FeatureTable.load(folder / "features"))
            finished = [test for test in folders_of_tests(folder) if (test / "causal.json").is_file()]
            return _with_results(diff, folder, tests=finished)

        def play(diff: tsae.FeatureDiff) -> Playground:
            series = load_series(*self.series) if self.series else checkpoints_of(folder, diff.info["readers"])
            return Playground(series, folder / "sae", diff, self.device)

        with server(ServedRun(read, lambda: files_of_page(folder), self.title, play), self.port) as found:
            print(f"serving {folder} at http://{HOST}:{found.server_port}/ (Ctrl-C ends it)", flush=True)
            with suppress(KeyboardInterrupt):
                found.serve_forever()


@config
class Export:
    """Write an SAE, its features or steering vectors in the form of another tool.

    saelens: the SAE as plain sae_lens loads it, with the same codes bit for bit. safetensors and gguf: features as
    steering vectors, gguf for llama.cpp. delphi: a cache of activations. neuronpedia: features, activations and labels.
    """

    sae: Path
    """Folder that `tsae train` wrote, or a published SAE: a path, org/name on the Hugging Face Hub, or
    saelens:RELEASE/ID. Written as saelens, every command reads it without a network."""
    to: Path
    """Folder to write, new or empty."""
    format: ExportFormat = "saelens"
    """The form to write."""
    architecture: Literal["jumprelu", "tsae_temporal"] = "jumprelu"
    """saelens: jumprelu for plain sae_lens; tsae_temporal, with encode_high, after `import tsae.sae.saelens`."""
    site: str | None = None
    """Site of its activations, such as blocks.14.hook_resid_post, if the files of a published SAE do not name it."""
    features: Path | None = None
    """Folder that `tsae encode` wrote. For steering vectors it gives their scale: a feature's typical activation."""
    choose: tuple[int, ...] = ()
    """Features by number; for neuronpedia by default all."""
    diff: Path | None = None
    """neuronpedia: folder that `tsae diff` wrote. It has the texts of tokens, and the next tokens that each
    feature promotes."""
    explanations: Path | None = None
    """neuronpedia: folder that `tsae explain` wrote."""
    reader: str | None = None
    """delphi: whose activations; by default the base's."""
    context: int = 256
    """delphi: tokens of a sequence."""
    model: str = ""
    """The other tool's name of the model. delphi: a name or path of its tokenizer. neuronpedia: its id. gguf: the
    architecture of llama.cpp, such as qwen2."""
    source: str = "tsae"
    """neuronpedia: its id of the SAE, such as 14-tsae-4k."""
    creator: str = ""
    """neuronpedia: its id of the user who owns what is imported."""

    def execute(self) -> None:
        from tsae.features.feature_table import FeatureTable
        from tsae.sae.model import TemporalSAE

        sae = TemporalSAE.load(self.sae, site=self.site)
        features = None if self.features is None else FeatureTable.load(self.features)
        if features is not None:
            features.need_sae(sae.fingerprint, sae.config.d_sae)
        self = replace(self, choose=tuple(dict.fromkeys(self.choose)))
        with new_folder(self.to, replace=_exported(self.to)) as folder:
            what = _written(self, sae, features, folder)
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            write_artefact(folder, EXPORT, None, there=files, config=self.format, to=self.to)
        say_wrote(self.to, what)


@config
class Push:
    """Push an SAE to the Hugging Face Hub, with a card; of a run also its features and its page.

    Shows what would be pushed, and asks. --to-folder writes just that into a folder, and pushes nothing.

    Anybody then loads it: tsae run RUN --sae org/name, or tsae.load_sae("org/name").
    """

    repo: Positional[str]
    """Name on the Hub: org/name."""
    source: Positional[Path]
    """Folder of an SAE (`tsae train`), or of a whole run (`tsae run`, `tsae demo`)."""
    config: Annotated[PushConfig, arg(name="")] = field(default_factory=PushConfig)
    to_folder: Path | None = None
    """Folder for exactly what would be pushed: model, dataset and space. Nothing is pushed."""
    yes: bool = False
    """Push without asking."""

    def execute(self) -> None:
        from tsae.report.hub import prepare, upload

        if self.to_folder is not None:
            for one in prepare(self.repo, self.source, self.to_folder, self.config):
                say_wrote(one.folder, one)
            return
        with TemporaryDirectory(prefix="tsae-push-") as folder:
            found = prepare(self.repo, self.source, Path(folder) / "files", self.config)
            for one in found:
                print(one)
            if not self.yes and not _agreed(self):
                print("nothing was pushed")
                return
            for address in upload(found, private=self.config.private):
                print(f"pushed {address}")


_Results: TypeAlias = "tuple[tsae.FeatureDiff, tsae.Attribution | None, tsae.Claims | None]"


def _with_results(
    diff: tsae.FeatureDiff,
    folder: Path,
    *,
    tests: Sequence[Path] | None,
    labels: Path | None = None,
    attribution: Path | None = None,
) -> _Results:
    """The diff with its causal tests and labels, the attribution and the claims: those named, or beside the diff.

    An attribution beside the diff that is of another log is left out, with a message.
    """
    from tsae.causal.intervention import folders_of_tests
    from tsae.claims.evidence import attribution_in
    from tsae.claims.run_claims import claims_in
    from tsae.diff.explain import labelled

    for test in folders_of_tests(folder) if tests is None else tests:
        diff = tsae.Intervention.load(test).mark(diff)
    diff = labelled(diff, folder / "explanations") if labels is None else tsae.Explanations.load(labels).mark(diff)
    found, why = attribution_in(folder) if attribution is None else (tsae.Attribution.load(attribution), "")
    if why:
        print(f"{folder / 'attribution'} is not shown: the page needs {why}.", file=sys.stderr)
    return diff, found, claims_in(folder, diff)


def files_of_page(folder: Path) -> list[Path]:
    """What the page of a run rests on: of each piece the file that is written last. Some may be missing."""
    from tsae.causal.intervention import folders_of_tests
    from tsae.claims.run_claims import FILE as CLAIMS
    from tsae.diff.explain import FILE as EXPLANATIONS

    names = ["diff/manifest.json", "features/manifest.json", f"explanations/{EXPLANATIONS}"]
    names += ["attribution/attribution.json", CLAIMS]
    return [*(folder / name for name in names), *(test / "causal.json" for test in folders_of_tests(folder))]


EXPORT = Kind("export", 1, "", "Make it with `tsae export`.")


def _exported(to: Path) -> bool:
    """Whether a folder is an export, which may be replaced.

    Raises:
        TsaeError: where somebody has put something else into it.
    """
    before = manifest_of(to)
    if before is None or before["kind"] != EXPORT.name:
        return False
    inside = {path.relative_to(to).as_posix(): path for path in sorted(to.rglob("*")) if not path.is_dir()}
    if strange := [name for name in inside if name not in (*before["files"], MANIFEST)]:
        what = f"is an export, and holds {strange[0]}, which no export wrote"
        raise TsaeError(what, where=to, fix="Move that away, or give another folder.")
    return True


def _written(options: Export, sae: tsae.TemporalSAE, features: tsae.FeatureTable | None, folder: Path) -> str:
    """Write into the folder; what it is."""
    from tsae.checkpoints.hooks import site_names
    from tsae.features.exchange import Neuronpedia, write_delphi, write_neuronpedia
    from tsae.sae.steering import SteeringVector

    need_features(options.choose, sae.config.d_sae, "--choose")
    if options.format == "saelens":
        sae.to_saelens(folder, architecture=options.architecture)
        return f"{sae} as {options.architecture}"
    if options.format in ("safetensors", "gguf"):
        refuse("tsae export", (not options.choose, "no features are named", "Name them with --choose."))
        for feature in options.choose:
            vector = SteeringVector.of(sae, feature, _typical(features, feature))
            file = folder / f"feature-{feature}.{options.format}"
            if options.format == "gguf":
                vector.to_gguf(file, options.model)
            else:
                vector.save(file)
        scale = "of unit activation" if features is None else "scaled to the features' typical activation"
        return f"{len(options.choose)} steering vectors at {sae.site}, {scale}"
    needed = {"--features": features, "--model": options.model}
    needed |= {"--creator": options.creator} if options.format == "neuronpedia" else {}
    missing = [name for name, given in needed.items() if not given]
    what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    refuse(f"tsae export --format {options.format}", (missing, what, None))
    assert features is not None
    if options.format == "delphi":
        hookpoint = site_names(sae.site).get("delphi")
        refuse(options.sae, (hookpoint is None, f"delphi has no hook point for {sae.site}", None))
        write_delphi(
            features, folder, hookpoint=str(hookpoint), model_name=options.model, reader=options.reader,
            context=options.context,
        )  # fmt: skip
        return f"activations of {features.n_features:,} features at {hookpoint}"
    diff = None if options.diff is None else tsae.FeatureDiff.load(options.diff, features=features)
    found = None if options.explanations is None else tsae.Explanations.load(options.explanations)
    others = found is not None and found.info["sae"] != sae.fingerprint
    refuse(options.explanations, (others, "labels features of another SAE", "Explain this one's."))
    names = Neuronpedia(options.model, options.source, options.creator)
    write_neuronpedia(
        features, sae, folder, names, {} if diff is None else diff.info.get("token_strings", {}),
        chosen=options.choose, described=None if diff is None else diff.features,
        labels=None if found is None else found.labels, labeller="" if found is None else found.info["labeller"],
    )  # fmt: skip
    return f"{len(options.choose) or features.n_features:,} features as {options.model}/{options.source}"


def _typical(features: tsae.FeatureTable | None, feature: int) -> float:
    """Mean activation of a feature where it is active in responses; 1 without features or where it never is."""
    if features is None:
        return 1.0
    tokens, values = features.column(feature)
    values = values[features.span_mask("response")[tokens]]
    return float(values.mean()) if len(values) else 1.0


def _agreed(options: Push) -> bool:
    from huggingface_hub import constants

    fix = "Look at it with --to-folder, then push with --yes."
    refuse("tsae push", (not sys.stdin.isatty(), "nobody is there to be asked, and nothing was pushed", fix))
    seen = "for you and your organisation" if options.config.private else "for everybody to see"
    return input(f"Push this to {constants.ENDPOINT}, {seen}? [y/N] ").strip().lower() in ("y", "yes")
