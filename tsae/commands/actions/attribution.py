"""`tsae attribute`."""

from __future__ import annotations

import tsae
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.commands.options.attribution import Attribute
from tsae.errors import TsaeError
from tsae.report.printed.attribution import attribution_text


def run_attribute(options: Attribute) -> None:
    series, rollouts = load_series(*(options.series or (options.run,))), tsae.Rollouts.read(options.rollouts)
    found = tsae.attribute(
        series,
        rollouts,
        options.to,
        recipe=options.settings or options.run,
        sae=None if options.sae is None else tsae.TemporalSAE.load(options.sae),
        run=options.name,
        first_token=None if options.first_token is None else _token_id(series.base, options.first_token),
        config=options.config,
    )
    with as_json(options.json) as write:
        print(attribution_text(found, rollouts, options.top))
        say_wrote(options.to)
        write({"targets": found.targets, "groups": found.groups, "problems": found.problems, "info": found.info})


def _token_id(base: Checkpoint, text: str) -> int:
    ids: list[int] = base.load_tokenizer().encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise TsaeError(f"{text!r} is {len(ids)} tokens, expected one", where="--first-token")
    return ids[0]
