"""`tsae verify` and `tsae repair`."""

from __future__ import annotations

from collections.abc import Sequence

from tsae.base.untrusted import one_line
from tsae.commands.common import as_json
from tsae.commands.options.upkeep import Repair, Verify
from tsae.errors import TsaeError
from tsae.upkeep.mend import next_step, remedy, repair
from tsae.upkeep.verify import Finding, verify


def run_verify(options: Verify) -> None:
    with as_json(options.json) as write:
        findings = verify(options.paths)
        print(_table(findings))
        write({"artefacts": [{**found.as_dict(), "remedy": remedy(found)} for found in findings]})
    _all_intact(findings, "Repair it: tsae repair" if next_step(findings) else "See docs/reliability.md")


def run_repair(options: Repair) -> None:
    findings = repair(options.paths, dry_run=options.dry_run, trust=options.trust)
    print(_table(findings))
    if not options.dry_run:
        _all_intact(findings, "Nothing that is known makes the rest again: give the commands that made it")


def _all_intact(findings: Sequence[Finding], fix: str) -> None:
    """Raises TsaeError where something is not intact."""
    bad = [finding for finding in findings if not finding.ok]
    if bad:
        raise TsaeError(
            f"{len(bad)} of {len(findings)} artefacts are not intact", where=bad[0].artefact.path, fix=f"{fix}."
        )


def _table(findings: Sequence[Finding]) -> str:
    """One line an artefact; below one that is not intact what makes it again."""
    width = max(len(one_line(finding.artefact.shown)) for finding in findings)
    kinds = max(len(finding.artefact.kind.name) for finding in findings)
    lines = []
    for finding in findings:
        path, kind = one_line(finding.artefact.shown), finding.artefact.kind.name
        what = f": {one_line(finding.what)}" if finding.what else ""
        lines.append(f"{path:<{width}}  {kind:<{kinds}}  {finding.state}{what}")
        if remedy(finding):
            lines.append(f"{'':<{width}}  {'':<{kinds}}  -> {one_line(remedy(finding))}")
    return "\n".join(lines)
