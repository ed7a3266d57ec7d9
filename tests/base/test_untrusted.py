"""Text and archives from strangers: small files that stand for more than memory holds."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tsae
from support.refusals import refuses
from tsae.attribution.find_settings import read_settings
from tsae.base.untrusted import check_zip, parse_json, parse_yaml, weighs_within
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.tokenizers import load_tokenizer, text_limits
from tsae.errors import TsaeError
from tsae.rollouts.problems import read_problems

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LONG = '{"a": ' + "9" * 5000 + "}"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize("text", [DEEP, LONG, "{", DEEP.encode()])
def test_json_that_cannot_be_read_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


@pytest.mark.parametrize("text", [BOMB, DEEP, "a: 2001-99-99", "a: !!python/object/apply:os.system [ls]", "{"])
def test_yaml_that_cannot_be_read_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_yaml_with_a_few_aliases_is_read() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}


def test_what_is_in_several_places_counts_in_each() -> None:
    shared = [1, 2, 3]
    content = {"a": [shared, shared], "b": {"c": (shared,)}}
    assert weighs_within(content, 2 + 2 + 3 + 3 + 1 + 1 + 3)
    assert not weighs_within(content, 14)
    endless: list[Any] = []
    endless.append(endless)
    assert not weighs_within(endless, 1000)


def test_archives_that_unpack_to_more_are_refused(tmp_path: Path) -> None:
    for name, how in {"plain": zipfile.ZIP_STORED, "packed": zipfile.ZIP_DEFLATED}.items():
        with zipfile.ZipFile(tmp_path / name, "w", how) as archive:
            archive.writestr("a", bytes(1 << 20))
    check_zip(tmp_path / "plain")
    check_zip(tmp_path / "packed", most=1 << 20)
    with pytest.raises(ValueError, match="its part a is compressed"):
        check_zip(tmp_path / "packed")
    with pytest.raises(ValueError, match="its part a unpacks to 1,048,576 bytes"):
        check_zip(tmp_path / "packed", most=1000)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("series.json", tsae.CheckpointSeries.load),
    ("adapter_config.json", lambda folder: Checkpoint("a", str(folder), run="r", step=1).load_model()),
    ("model.safetensors.index.json", lambda folder: Checkpoint("a", str(folder)).load_model()),
    ("config.json", lambda folder: text_limits(Checkpoint("a", str(folder)))),
    ("config.json", lambda folder: Checkpoint("a", str(folder)).load_model()),
    ("tokenizer_config.json", lambda folder: load_tokenizer(Checkpoint("a", str(folder)))),
    ("tokenizer.json", lambda folder: load_tokenizer(Checkpoint("a", str(folder)))),
    ("manifest.json", tsae.ActivationStore),
    ("features.json", tsae.FeatureTable.load),
    ("diff.json", tsae.FeatureDiff.load),
    ("attribution.json", tsae.Attribution.load),
    ("cfg.json", tsae.TemporalSAE.load),
    ("trainer_state.json", read_settings),
    ("problems.jsonl", lambda folder: read_problems(folder / "problems.jsonl")),
]


@pytest.mark.parametrize(("name", "read"), READERS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(READERS)])
@pytest.mark.parametrize("text", [DEEP, LONG], ids=["deep", "long"])
def test_files_of_json_that_cannot_be_read_are_refused_by_name(
    name: str, read: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for other in ("sae.safetensors", "sae_weights.safetensors", "adapter_model.safetensors", "features.h5"):
        (tmp_path / other).write_bytes(b"")
    if name in ("cfg.json", "adapter_config.json"):
        (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "training_args.yaml").write_text(
        "{beta: 0, loss_type: dapo, temperature: 1, epsilon: 0.2, max_steps: 3}"
    )
    (tmp_path / name).write_text(text)
    with pytest.raises(TsaeError) as said:
        read(tmp_path)
    assert str(tmp_path) in str(said.value)
    assert len(str(said.value)) < 1000


@pytest.mark.parametrize("text", [BOMB, "a: 2001-99-99"])
def test_a_recipe_in_hostile_yaml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    refuses(r"config\.yaml: is not YAML", read_settings, tmp_path / "config.yaml")
