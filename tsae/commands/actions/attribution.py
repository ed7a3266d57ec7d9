"""`tsae attribute`."""

from __future__ import annotations

import tsae
from tsae.attribution.problems import other_problems
from tsae.attribution.training.read.find import find_settings
from tsae.checkpoints.loading import Checkpoint
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.commands.options.attribution import Attribute
from tsae.errors import TsaeError
from tsae.report.printed.attribution import attribution_text


def run_attribute(options: Attribute) -> None:
    if options.top < 1:
        raise TsaeError(f"is {options.top}, expected at least 1", where="--top")
    series = load_series(*(options.series or (options.run,)))
    first_token = None if options.first_token is None else _token_id(series.base, options.first_token)
    log = tsae.Rollouts.read(options.rollouts or options.run, series)
    found = tsae.attribute(
        series,
        log,
        options.to,
        settings=find_settings(series, options.name, options.settings, version=options.trainer_version),
        sae=options.sae,
        run=options.name,
        first_token=first_token,
        problems=None if options.problems is None else other_problems(options.problems, log, series.base.id),
        config=options.config,
    )
    with as_json(options.json) as write:
        print(attribution_text(found, options.top))
        say_wrote(options.to)
        told = [] if found.info["gate"] else list(found.targets.target)
        names = ["targets", "steps", *(["bands", "groups", "entropy", "tokens"] if told else [])]
        samples = {name: found.of_target(name, options.top) for name in told}
        write({**{name: getattr(found, name) for name in names}, "samples": samples, "info": found.info})


def _token_id(base: Checkpoint, text: str) -> int:
    ids: list[int] = base.load_tokenizer().encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise TsaeError(
            f"{text!r} is {len(ids)} tokens, expected one",
            where="--first-token",
            fix="Give the text of a single token of this tokenizer.",
        )
    return ids[0]
