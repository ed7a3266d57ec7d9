"""`tsae push`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tsae.commands.common import say_wrote
from tsae.commands.options.hub import Push
from tsae.errors import TsaeError
from tsae.report.hub.push import prepare, upload


def run_push(options: Push) -> None:
    if options.to_folder is not None:
        for one in prepare(options.repo, options.source, options.to_folder, options.config):
            say_wrote(one.folder, one)
        return
    with TemporaryDirectory(prefix="tsae-push-") as folder:
        found = prepare(options.repo, options.source, Path(folder) / "files", options.config)
        for one in found:
            print(one)
        if not options.yes and not _agreed(options):
            print("nothing was pushed")
            return
        for address in upload(found, private=options.config.private):
            print(f"pushed {address}")


def _agreed(options: Push) -> bool:
    from huggingface_hub import constants

    if not sys.stdin.isatty():
        raise TsaeError(
            "nobody is there to be asked, and nothing was pushed",
            where="tsae push",
            fix="Look at it with --to-folder, then push with --yes.",
        )
    seen = "for you and your organisation" if options.config.private else "for everybody to see"
    return input(f"Push this to {constants.ENDPOINT}, {seen}? [y/N] ").strip().lower() in ("y", "yes")
