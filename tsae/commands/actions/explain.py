"""`tsae explain`."""

from __future__ import annotations

import sys

import tsae
from tsae.commands.common import as_json, say_wrote
from tsae.commands.options.explain import Explain
from tsae.errors import TsaeError
from tsae.report.printed.explanations import explanation_text


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
