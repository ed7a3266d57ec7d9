"""`tsae claims`."""

from __future__ import annotations

import tsae
from tsae.base.disk.sole_writer import sole_writer
from tsae.base.plugins import find_function
from tsae.commands.common import as_json, say_wrote
from tsae.commands.options.claims import Claims


def run_claims(options: Claims) -> None:
    fix = "Give module:function of a function (prompt, response) -> whether each step is right."
    check = None if options.check is None else find_function(options.check, where="check", fix=fix)
    with as_json(options.json) as write:
        found = tsae.claims_of(options.run, options.only, check=check)
        print(found)
        if not options.only:
            with sole_writer(options.run):
                say_wrote(found.save(options.run))
        write(found.as_dict())
