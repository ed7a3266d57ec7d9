"""`tsae rollouts formats`: a module of its own, because it needs nothing heavy."""

from __future__ import annotations

import shutil

from tsae.commands.options.formats import Formats
from tsae.rollouts.logs.known import formats_text


def run_formats(options: Formats) -> None:
    print(formats_text(shutil.get_terminal_size().columns))
