"""`tsae causal` and `tsae influence`."""

from __future__ import annotations

from tsae.commands.options.causal import Causal, Influence

import tsae
from tsae.base.plugins import find_function
from tsae.causal.controls import mean_difference
from tsae.commands.common import as_json, load_series, own_rollouts, say_wrote
from tsae.errors import TsaeError
from tsae.report.printed.findings import behaviour_text
from tsae.report.printed.reinforcement import influence_text
from tsae.rollouts.problems import Problem, read_problems
from tsae.rollouts.rewards import find_verifier


def run_causal(options: Causal) -> None:
    family = opposed_features(options)
    verify = find_verifier(options.verifier)
    fix = "Give module:function for your own Rollouts -> Rollouts."
    describe = None if options.describe is None else find_function(options.describe, takes=1, where="describe", fix=fix)
    problems: list[Problem] | tsae.Rollouts | None = None
    if options.problems is not None:
        as_lines = options.problems.suffix == ".jsonl"
        problems = read_problems(options.problems) if as_lines else tsae.Rollouts.read(options.problems)
    sae, direction = tsae.TemporalSAE.load(options.sae), None
    if options.store is not None:
        up, down = (options.raised, options.lowered) if options.donor is None else (options.donor, options.checkpoint)
        if up is None or down is None:
            raise TsaeError("gives a direction only with --raised and --lowered", where="--store")
        direction = mean_difference(tsae.ActivationStore(options.store), sae.site, up, down, sae=sae)
    series = load_series(*options.series)
    found = tsae.intervene(
        series[options.checkpoint],
        sae,
        options.features,
        options.choose or family[: options.top],
        options.config,
        problems=problems,
        verify=verify,
        direction=direction,
        donor=None if options.donor is None else series[options.donor],
        exclude=family,
        describe=describe,
    )
    with as_json(options.json) as write:
        print(behaviour_text(found.outcomes.rename(columns={"condition": "policy"})))
        for behaviour in found.measured:
            print(f"\n{found.summary(behaviour)}")
        say_wrote(found.save(options.to))
        write({**found.info, "record": found.record(), "outcomes": found.outcomes})


def opposed_features(options: Causal) -> list[int]:
    """Features that one checkpoint raised and another lowered; none where they are chosen by number alone.

    Raises:
        TsaeError: where no option chooses features, or no feature is opposed.
    """
    if options.diff is None and options.choose:
        return []
    if options.diff is None or options.raised is None or options.lowered is None:
        raise TsaeError(
            "no features chosen",
            where="tsae causal",
            fix="Give --choose with numbers, or --diff with --raised and --lowered.",
        )
    diff = tsae.FeatureDiff.load(options.diff, features=tsae.FeatureTable.load(options.features))
    found = diff.opposed(options.raised, options.lowered)
    if found.empty:
        message = f"no feature was raised by {options.raised} and lowered by {options.lowered}"
        raise TsaeError(message, where=options.diff)
    return [int(feature) for feature in found.index]


def run_influence(options: Influence) -> None:
    series = load_series(*options.series)
    checkpoint = series.base if options.checkpoint is None else series[options.checkpoint]
    batch = own_rollouts(options.rollouts, checkpoint.id)
    on = None if options.on is None else own_rollouts(options.on, checkpoint.id)
    found = tsae.influence(checkpoint, batch, options.sae, options.features, on=on, config=options.config)
    with as_json(options.json) as write:
        print(influence_text(found))
        if options.to is not None:
            say_wrote(found.save(options.to), found)
        write({**found.info, "influence": found.table})
