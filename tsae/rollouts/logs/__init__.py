"""Import of trainers' rollout logs, in the way of a row.

`readers` and `log_files` (a log's files and their rows) → `tsae.rollouts.trainers` (one adapter a trainer, made with
`adapters`) → `entry` (one trajectory as the log has it) → `tokens`, `templates` (token ids) →
`outcome_rules`, `policies` → `import_parts` (a Parquet file for each part of the log) → `repeats` →
`consistency_checks` (what the log says twice). `tsae.rollouts.importing` puts them together.
`tsae/rollouts/known_logs.toml` lists the formats.
"""
