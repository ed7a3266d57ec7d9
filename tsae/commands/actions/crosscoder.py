"""`tsae crosscoder`."""

from __future__ import annotations

from dataclasses import replace

import tsae
from tsae.base.torchrun import first_process
from tsae.commands.common import as_json, say_wrote
from tsae.commands.options.crosscoder import Crosscoder
from tsae.sae.crosscoder.changes import crosscoder_changes
from tsae.sae.crosscoder.published import read_published


def run_crosscoder(options: Crosscoder) -> None:
    store = tsae.ActivationStore(options.store).subset(replace(options.subset, readers=()))
    pair = tsae.Pair(store, options.reader)
    with as_json(options.json) as write:
        if options.published is None:
            found = tsae.Crosscoder.from_sae(tsae.train(pair, options.sae, to=options.to, training=options.training))
        else:
            site = options.training.site or pair.sites[0]
            found = read_published(options.published, site=site, compared=pair.compared)
            found.save(options.to)
        if not first_process():
            return
        changes = crosscoder_changes(
            found, pair, span=options.training.span, held_out=None if options.all_problems else True
        )
        print(changes)
        say_wrote(options.to, found)
        write({"compared": changes.compared, "fve": changes.fve, "latents": changes.table()})
