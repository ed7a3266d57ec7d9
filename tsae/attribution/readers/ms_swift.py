"""ms-swift's ``args.json`` of a GRPO run: TRL's words beside its own, 3.2 to 4.5.

It says every word, so no default counts. Those of its own that change updates have TRL's names here, or are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsae.attribution.readers import trl
from tsae.attribution.readers.words import Words
from tsae.attribution.training.settings import RunSettings


def of(settings: Mapping[str, Any], *, file: Path, steps: int | None) -> RunSettings:
    """The settings of a run; `steps` are updates.

    Raises:
        TsaeError: for a word that is not known, and for what is not replayed.
    """
    words = Words(settings, file, "ms_swift")
    words.refuse()
    if words.get("rollout_importance_sampling_mode"):  # It weighs the KL term, too.
        words.need("beta")
    given = {name: settings[name] for name in words.table["trl"].split() if name in settings}
    given |= {ours: settings[name] for name, ours in words.table["ours"].items() if settings.get(name) is not None}
    given["vllm_importance_sampling_correction"] = "vllm_importance_sampling_mode" in given
    if given.get("importance_sampling_level") == "sequence_token":  # The gradient of sequence.
        given["importance_sampling_level"] = "sequence"
    given["vllm_importance_sampling_cap"], given["use_bias_correction_kl"] = None, False
    found = trl.of(given, file=file, beside=trl.Beside(n_steps=steps, base=words.get("model")))
    loss = replace(found.loss, kl_input_clamp=20.0, kl_clamp=10.0)
    if words.flag("kl_in_reward"):  # It is in the advantages, which are logged.
        loss = replace(loss, beta=0.0)
    facts = {**found.facts, "advantages": "logged"}
    return replace(found, loss=loss, trainer="ms_swift", version=words.get("swift_version"), facts=facts)
