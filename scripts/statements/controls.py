"""Verdicts of the controls on outcome effects, in the world of `statements.diffs`.

Found is the share of the verdicts that are right.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from statements import Line
from statements.diffs import LEVEL, N_FEATURES, World, activations, one
from statements.tables import EOS, feature_table
from tsae import DiffConfig, Rollouts
from tsae.diff.confounds import CONTROLS, FAILS, SURVIVES, confound_table
from tsae.diff.effects import draw

LENGTH, POSITION, TOKEN, REAL = (np.arange(i, N_FEATURES, 4) for i in range(4))
EXPLAINED = dict(zip(CONTROLS, (LENGTH, POSITION, TOKEN), strict=True))


def kept(verdict: str, control: str, seed: int, config: DiffConfig) -> tuple[float, float]:
    """What a control says of an outcome effect that it explains (false: survives), or of one that has nothing to do
    with it (false: does not survive), among the features that differ by outcome.

    Successes are longer and have one token more often. A quarter of the features follow a trajectory's length, a
    quarter the place of a token, a quarter the token, and a quarter differ by outcome.
    """
    rng = np.random.default_rng([seed, 6])
    world = World.of(rng, 1)
    right = world.success
    length = np.exp(rng.normal(np.where(right, 2.5, 2.1), 0.4)).astype(int).clip(3, 40)
    row = np.repeat(np.arange(len(right)), length)
    place = np.arange(len(row)) - np.repeat(length.cumsum() - length, length)
    token = np.where(rng.random(len(row)) < np.where(right, 0.4, 0.25)[row], 2, rng.integers(3, 9, len(row)))
    noise = activations(rng, world.problem, world.side(), N_FEATURES)[row] + 0.7 * rng.normal(
        size=(len(row), N_FEATURES)
    )
    noise[:, LENGTH] += 0.1 * length[row, None]
    noise[:, POSITION] += 0.2 * place[:, None]
    noise[:, TOKEN] += 4.0 * (token == 2)[:, None]
    noise[:, REAL] += 0.7 * right[row, None]
    # The prompt is one token of 0, and so is <eos>, which does not count.
    ends = length.cumsum()
    codes = np.insert(LEVEL + noise, np.sort(np.concatenate([ends - length, ends])), 0.0, axis=0)
    records = [
        {
            "problem_id": f"p{p}", "policy": "base", "prompt_ids": [0], "response_ids": [*tokens.tolist(), EOS],
            "outcome": "success" if s else "failure",
        }
        for p, s, tokens in zip(world.problem, right, np.split(token, ends[:-1]), strict=True)
    ]  # fmt: skip
    readers = [("base", np.arange(len(right)))]
    table = feature_table(Rollouts.from_records(records), codes, readers, special=(EOS,))
    rows, of = one(table, config, kind="outcome")
    contrast = draw(rows, of, config)
    assert contrast.inference is not None
    found = contrast.feature[contrast.inference.q <= config.q]
    controls = confound_table(table, rows, [contrast], config)
    said = controls[(controls.control == control) & controls.feature.isin(found)].set_index("feature").verdict
    of_verdict = EXPLAINED[control] if verdict == SURVIVES else REAL
    told = said[said.index.isin(of_verdict) & said.isin([SURVIVES, FAILS])]
    if not len(told):
        return 0.0, math.nan
    false = float((told == verdict).mean())
    return false, 1 - false


LINES = [
    *(Line("survives", f"{control} explains all", partial(kept, SURVIVES, control)) for control in CONTROLS),
    *(Line("does not survive", f"{control} explains nothing", partial(kept, FAILS, control)) for control in CONTROLS),
]
