"""One line a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tsae.errors import TsaeError


def refuses(message: str, call: Callable[..., object], /, *args: Any, **options: Any) -> None:
    """A call is refused with a message that matches a pattern."""
    with pytest.raises(TsaeError, match=message):
        call(*args, **options)


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a command prints (`out`, `err`) that ends with status 2: there is something that a user can put right."""
    from tsae.cli import main

    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr()
