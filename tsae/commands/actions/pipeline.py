"""`tsae run`, `tsae watch`, `tsae demo` and `tsae claims`."""

from __future__ import annotations

import webbrowser

from tsae.base.disk.made_by import record_command
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.plugins import find_function
from tsae.claims.evidence import attribution_in
from tsae.claims.run_claims import claims_of
from tsae.commands.common import as_json, say_wrote
from tsae.commands.options.pipeline import Claims, Demo, Run, Watch
from tsae.demo import demo
from tsae.errors import TsaeError
from tsae.report.printed.attribution import attribution_text
from tsae.report.printed.findings import print_findings
from tsae.report.story.findings import findings_content
from tsae.run import analyze_run
from tsae.watching import watch


def run_run(options: Run) -> None:
    with as_json(options.json) as write:
        diff = analyze_run(options.config)
        print_findings(diff)
        attribution, _ = attribution_in(options.config.to)
        if attribution is not None:
            print(f"\n{attribution_text(attribution, 3)}")
        print(f"\nReport: {(options.config.to / 'report.html').resolve()}")
        write(findings_content(diff))


def run_watch(options: Watch) -> None:
    for _ in watch(options.config, options.watching):
        pass


def run_demo(options: Demo) -> None:
    report = demo(options.config)
    if options.open and not webbrowser.open(report.resolve().as_uri()):
        raise TsaeError("no browser was found to open it", where=report, fix="Open that file yourself.")


def run_claims(options: Claims) -> None:
    fix = "Give module:function of a function (prompt, response) -> whether each step is right."
    check = None if options.check is None else find_function(options.check, takes=2, where="check", fix=fix)
    with as_json(options.json) as write:
        found = claims_of(options.run, options.only, check=check)
        print(found)
        if not options.only:
            with sole_writer(options.run):
                file = found.save(options.run)
                words = [] if options.check is None else ["--check", options.check]
                record_command(file, ["claims", str(options.run), *words])
                say_wrote(file)
        write(found.as_dict())
