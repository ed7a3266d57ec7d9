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
