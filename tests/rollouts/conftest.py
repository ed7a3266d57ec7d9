"""Checkpoints whose tokenizers read the logs of these tests, and which sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.builders import save_model
from support.checkpoints import make_tokenizer
from support.logs import TEMPLATE
from tsae.checkpoints.loading import Checkpoint


@pytest.fixture(scope="module")
def policy(llama: Path) -> Checkpoint:
    """Without a chat template."""
    return Checkpoint(id="base", path=str(llama))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With a chat template that writes special tokens."""
    path = save_model(tmp_path_factory.mktemp("chat") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Checkpoint(id="base", path=str(path))


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tokenizer and nothing else, by the name of its chat template."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("tokenizers") / name
        make_tokenizer(name).save_pretrained(path)
        return path

    return folder
