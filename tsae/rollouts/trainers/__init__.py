"""Adapters of trainers' ways of logging rollouts.

A new trainer takes two files. First a module here, with a function that makes an `Entry` of a row, and a format::

    from tsae.rollouts.logs.adapters import Format, by_row
    from tsae.rollouts.logs.entry import Entry, Fields

    def _entry(row: Fields) -> Entry:
        step = row.count("iteration")
        return Entry(
            row.where,
            prompt=row.text("question"),                 # or prompt_ids=row.ids("prompt_tokens")
            response=row.text("completion"),             # or response_ids=row.ids("tokens"), with the end token
            rewards={"reward": row.score("reward")},
            answer=row.answer("target"),
            step=step,
            updates=step - 1,                            # optimiser steps of the weights that sampled it
        )

    FORMAT = Format("mytrainer", by_row(_entry))      # for --format

`Fields` (`logs.entry`) reads and checks columns, and names file and line if a value is wrong. An `Entry` also has
advantage, group, key (an id that is unique in the log: a row that a resumed run logs again is then known), decides
(which reward says what is right), finish_reason and logprobs. `logs.adapters` has what adapters share: rows with a
list of responses (`each_response`, for `by_row`), conversations, log-probabilities, masks of sampled tokens. A row that
cannot be imported is reported with ``row.leave_out(kind, why)``.

Second, `rollouts/known_logs.toml` gets an entry that says what the log holds, which docs/logs.md may repeat, and one
that says how its files are recognised::

    [format.mytrainer]
    title = "MyTrainer rollouts"
    columns = ["iteration question completion reward"]
    path = '(^|/)rollouts-(?P<step>\\d+)\\.jsonl$'

With ``a_file_a_step = true`` the number in the path is the step, which a row has as ``row.file.step``.
``row.object(name)`` reads a nested object. A file that is neither JSON lines nor a table also needs a reader in
`logs.readers`.

To test it, put a small log into a folder of tests/logs, write into tests/logs/expected.json what the log holds, and add
the name to SHIPPED in tests/app/test_formats_survive.py.
"""
