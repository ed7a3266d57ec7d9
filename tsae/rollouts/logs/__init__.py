"""Import of trainers' rollout logs, in the way of a row.

`on_disk` (files and parts of a log) → `tsae.rollouts.trainers` (one adapter for each trainer, made with `adapters`) →
`entry` (one trajectory as the log has it) → `tokens`, `templates`, `padding` (token ids) → `outcome_rules`, `policies`
→ `dedup_index` (repeats and conflicts) → `consistency_checks` (what the log says twice). `known` lists the formats.
"""
