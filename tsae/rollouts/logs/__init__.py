"""Import of trainers' rollout logs.

`detect` finds out whose log it is, and `known` lists the formats. The folders follow the way of a row:
`on_disk` (files and parts of a log) → `trainers` (one module for each trainer's format) → `entries` (one trajectory as
the log has it) → `tokenising` (token ids) → `bookkeeping` (outcomes, policies, repeats, the summary) and `checks` (what
the log says twice). `running` holds workers, progress and resumption.
"""
