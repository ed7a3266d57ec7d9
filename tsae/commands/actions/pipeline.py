"""`tsae run`, `tsae watch` and `tsae demo`."""

from __future__ import annotations

import webbrowser

from tsae.commands.common import as_json
from tsae.commands.options.pipeline import Demo, Run, Watch
from tsae.demo import demo
from tsae.errors import TsaeError
from tsae.report.printed.findings import print_findings
from tsae.report.story.findings import findings_content
from tsae.run import analyze_run
from tsae.watching import watch


def run_run(options: Run) -> None:
    with as_json(options.json) as write:
        diff = analyze_run(options.config)
        print_findings(diff)
        print(f"\nReport: {(options.config.to / 'report.html').resolve()}")
        write(findings_content(diff))


def run_watch(options: Watch) -> None:
    for _ in watch(options.config, options.watching):
        pass


def run_demo(options: Demo) -> None:
    report = demo(options.config)
    if options.open and not webbrowser.open(report.resolve().as_uri()):
        raise TsaeError("no browser was found to open it", where=report, fix="Open that file yourself.")
