"""Checkpoints from strangers: their code is never run, and their files name nothing outside of their folder."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import edit, save_adapter
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.tokenizers import load_tokenizer, text_limits
from tsae.checkpoints.weight_files import unfinished
from tsae.errors import TsaeError

_MARK = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
_CLASSES = "from transformers import *\nclass C(LlamaConfig): model_type = 'odd'\nclass M(LlamaForCausalLM): pass\n"
READERS: dict[str, Callable[[Checkpoint], object]] = {
    "model": ModelLoader().load,
    "tokenizer": load_tokenizer,
    "limits": text_limits,
}


@pytest.fixture
def with_code(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code of its own, in front of a user who says yes to everything."""
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "evil.py").write_text(_MARK + _CLASSES + "class T(PreTrainedTokenizerFast): pass\n")
    for name, changed in {
        "config.json": {"model_type": "odd", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
        "tokenizer_config.json": {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}},
    }.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changed}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


@pytest.mark.parametrize("what", READERS)
def test_code_beside_the_weights_is_never_run(what: str, with_code: Path, tmp_path: Path) -> None:
    with pytest.raises(TsaeError, match=r"needs Python code of its own \(auto_map\), which is never run") as said:
        READERS[what](Checkpoint("odd", str(with_code)))
    assert str(with_code) in str(said.value)
    assert not list(tmp_path.rglob("ran"))
    assert sys.stdin.read() == "y\n" * 20  # nobody was asked


def test_an_adapter_imports_no_module_that_its_configuration_names(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(llama, tmp_path / "adapter")
    (tmp_path / "evil.py").write_text(_MARK)
    monkeypatch.syspath_prepend(tmp_path)
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    config |= {"megatron_config": {"a": 1}, "megatron_core": "evil"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(TsaeError, match="uses megatron_config, which cannot be read"):
        ModelLoader().load(Checkpoint("a", str(folder), run="r", step=1))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"eos_token_id": "abc"}, "its configuration cannot be read"),
        ("config.json", {"num_attention_heads": 0}, "its configuration cannot be read"),
        ("config.json", {"dtype": "nonsense"}, "its configuration cannot be read"),
        ("config.json", {"model_type": ["x"]}, "its configuration cannot be read"),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"eos_token_id holds '\[1\]', which is not a token id"),
        ("generation_config.json", {"eos_token_id": {"a": 2}}, "which is not a token id"),
        ("generation_config.json", {"eos_token_id": [1, 2.5]}, "eos_token_id holds '2.5'"),
        ("generation_config.json", "[" * 100_000, "generation_config.json: cannot be read"),
        ("generation_config.json", "{", "generation_config.json: cannot be read"),
    ],
)
def test_limits_of_an_odd_configuration_are_refused(
    file: str, content: Any, message: str, llama: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    if isinstance(content, str):
        (folder / file).write_text(content)
    else:
        edit(folder / file, **content)
    with pytest.raises(TsaeError, match=message) as said:
        text_limits(Checkpoint("a", str(folder)))
    assert str(folder) in str(said.value)


@pytest.mark.parametrize("ends", [["x"], ["x", 3], [None], [[1]], [1e400]])
def test_weights_whose_head_names_no_places_are_not_complete(ends: list[Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    head = json.dumps({str(i): {"data_offsets": [0, end]} for i, end in enumerate(ends)}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert unfinished([tmp_path]) == {tmp_path: "model.safetensors is not all there"}
