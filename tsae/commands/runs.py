"""`tsae run`, `tsae watch`, `tsae demo`, `tsae claims`, and `tsae verify` of what they wrote."""

from __future__ import annotations

import shlex
import webbrowser
from dataclasses import field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tsae.base.filters import find_function
from tsae.base.output_lock import output_lock
from tsae.base.validation import Daily, config
from tsae.commands.common import as_json, say_wrote
from tsae.config import DemoConfig, RunConfig, WatchConfig
from tsae.errors import TsaeError


@config
class Run:
    """Run the whole pipeline on a training run: from its checkpoints and rollout log to a report.

    Every stage writes a folder and prints what it chose. Run the same command again to resume.
    """

    config: Annotated[RunConfig, arg(name="")]
    all: Daily[bool] = False
    """Print every table. By default the verdicts are printed, which fit one screen; the page has all of it."""
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.doctor import check

        with as_json(self.json) as write:
            check(self.config)  # before what is imported for the work
            from tsae.claims.evidence import attribution_in
            from tsae.report.story.findings import findings_content
            from tsae.report.terminal import print_run
            from tsae.run import analyze_checked

            diff = analyze_checked(self.config)
            print_run(diff, attribution_in(self.config.to)[0], self.config.to / "report.html", everything=self.all)
            write(findings_content(diff))


@config
class Doctor:
    """Say in seconds what a training run has for an analysis, what it lacks, and what to add. Computes nothing.

    Takes the options of `tsae run`. Exit status 2 if something is missing.
    """

    run: Annotated[RunConfig, arg(name="")]
    json: Daily[Path | None] = None
    """File for the findings as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.doctor import examine

        found = []
        with as_json(self.json) as write:
            for finding in examine(self.run):
                found.append(finding)
                print(*finding.lines(), sep="\n", flush=True)
            write({"findings": [dict(zip(finding._fields[:4], finding, strict=False)) for finding in found]})
        if missing := [finding.subject for finding in found if finding.state == "missing"]:
            raise TsaeError(f"the run lacks {', '.join(missing)}", where=self.run.path, fix="Add what is named above.")


@config
class Watch:
    """Follow a running training: analyse its new checkpoints and log steps, and write the page anew.

    The folder --to is that of `tsae run`, and so are the options. Every update prints one line. If the command is
    interrupted, give it again to resume. Samples are not attributed meanwhile.
    """

    config: Annotated[RunConfig, arg(name="")]
    watching: Annotated[WatchConfig, arg(name="")] = field(default_factory=WatchConfig)

    def execute(self) -> None:
        from tsae.watching import watch

        for _ in watch(self.config, self.watching):
            pass


_NEXT = {
    "tsae doctor {}": "what the run has, and what it lacks",
    "tsae run {} --to mixed-analysis --sample 8": "what changed, and which samples did that",
    "tsae attribute {} --to samples --top 20": "the second question alone, with more samples",
}
"""What to do with the run that `tsae demo --as-run` wrote."""


@config
class Demo:
    """Run the whole pipeline on the shipped arithmetic checkpoints: a table of findings and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)
    open: Daily[bool] = False
    """Open the report in the browser."""
    all: Daily[bool] = False
    """Print every table. By default only the verdicts are printed, on one screen; the page has everything."""
    as_run: Daily[Path | None] = None
    """Instead, write a small training run as TRL leaves it, on which you can try the other commands: a short run on
    easy, medium and hard problems. It has a log, settings and the last two checkpoints. The folder must be new or
    empty."""

    def execute(self) -> None:
        if self.as_run is not None:
            from tsae.testbed import as_run

            run = as_run(self.as_run)
            print(f"{run}: 32 steps of GRPO on easy, medium and hard problems, as TRL leaves them.\n\nGive next:")
            commands = {command.format(shlex.quote(str(run))): what for command, what in _NEXT.items()}
            for command, what in commands.items():
                print(f"  {command:<{max(map(len, commands))}}  # {what}")
            return
        from tsae.demo import demo

        report = demo(self.config, everything=self.all)
        if self.open and not webbrowser.open(report.resolve().as_uri()):
            raise TsaeError("no browser was found to open it", where=report, fix="Open that file yourself.")


@config
class Claims:
    """Ask a run what it shows of the literature's claims about sample difficulty.

    Every claim gets a verdict with its effects and intervals, or a line on what the run lacks and how to add it. The
    result is kept as claims.json in the run's folder, where `tsae report` and `tsae serve` find it.
    """

    run: Positional[Path]
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote."""
    only: tuple[str, ...] = ()
    """Letters of the claims to test; by default all. Some alone are not kept in the folder."""
    check: str | None = None
    """module:function (prompt, response) -> whether each step of the response is right, for the claims on steps, such
    as tsae.testbed.classes:right_steps."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.claims.run_claims import claims_of

        fix = "Give module:function of a function (prompt, response) -> whether each step is right."
        check = None if self.check is None else find_function(self.check, takes=2, where="check", fix=fix)
        with as_json(self.json) as write:
            found = claims_of(self.run, self.only, check=check)
            print(found)
            if not self.only:
                with output_lock(self.run):
                    say_wrote(found.save(self.run))
            write(found.as_dict())


@config
class Verify:
    """Check everything that tsae wrote: is it as it was written, is it complete, does it rest on what is there now?

    Prints a table, and for what is not intact the command that makes it again. Exit status 2 if anything is not intact.
    """

    paths: Positional[tuple[Path, ...]] = (Path(),)
    """Files or folders: a store, an SAE, features, a diff, rollouts, …, or the folder of a whole `tsae run` or
    `tsae demo`."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.base.untrusted import one_line
        from tsae.verify import verify

        with as_json(self.json) as write:
            findings = verify(self.paths)
            width, kinds = (
                max(len(one_line(text)) for text in each)
                for each in zip(*((f.shown, f.kind) for f in findings), strict=True)
            )
            for found in findings:
                what = f": {one_line(found.what)}" if found.what else ""
                print(f"{one_line(found.shown):<{width}}  {one_line(found.kind):<{kinds}}  {found.state}{what}")
                if found.command:
                    there = found.run is not None and found.kind != "store" and found.state != "missing"
                    first = "remove it, then: " * there  # a run reads the stages that are there
                    print(f"{'':<{width}}  {'':<{kinds}}  -> {first}{one_line(found.command)}")
            write({"artefacts": [found.as_dict() for found in findings]})
        bad = [found for found in findings if not found.ok]
        if bad:
            what = f"{len(bad)} of {len(findings)} artefacts are not intact"
            fix = "Do what is named above, the first one first; see docs/reliability.md."
            raise TsaeError(what, where=bad[0].path, fix=fix)
