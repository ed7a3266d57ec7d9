"""Paths as users give them: `~`, spaces and Unicode, text, `Path`, `os.PathLike` and file:// URLs, everywhere."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import tsae
from support.builders import make_rollouts, save_base_and_run, save_model
from support.cli import commands
from tsae.base.files import as_path
from tsae.base.mirror import local
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.tokenizers import load_tokenizer, tokenizer_fingerprint
from tsae.cli import _localised, main

ROOT = Path(tsae.__file__).parent
FOLDER = "my runs/größe – 実験"


class Place:
    """Something of os.PathLike whose text is not its path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[Path]:
    """A home folder beside the working folder."""
    (tmp_path / "home" / FOLDER).mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir())  # such as a folder named ~


def test_a_path_is_read_as_the_user_means_it(home: Path) -> None:
    there = home / FOLDER
    for given in (f"~/{FOLDER}", f"~/{FOLDER}/", Path("~", FOLDER), Place(f"~/{FOLDER}"), there.as_uri()):
        assert as_path(given) == local(given) == there
    assert as_path(Path(there.as_uri())) == as_path(f"file://localhost{there}") == there
    for given in (there, Place(str(there)), Place(f"~/{FOLDER}")):
        assert tsae.Checkpoint("a", given).path == str(there)  # type: ignore[arg-type]
    for unchanged in ("a/~", "./~", "~nobody-of-this-name/a", "..", "a b/ü"):
        assert as_path(unchanged) == Path(unchanged)
    assert str(as_path("s3://bucket/a")) == str(Path("s3://bucket/a"))


OPENING = ("Path", "open", "os.stat", "os.path.abspath", "safe_open", "pq.ParquetFile", "pq.read_schema", "load_file")


def uses(function: ast.FunctionDef, parents: dict[ast.AST, ast.AST], name: str) -> typing.Iterator[ast.AST]:
    """What is done with a parameter until it is given to `as_path` or `local`."""
    loads = [x for x in ast.walk(function) if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load)]
    for load in sorted(loads, key=lambda x: (x.lineno, x.col_offset)):
        use = parents[load]
        if isinstance(use, ast.Call) and getattr(use.func, "id", "") in ("as_path", "local"):
            return
        yield use


@pytest.mark.slow(ci=True)
def test_every_function_that_takes_a_path_expands_it_or_hands_it_on() -> None:
    """By the types of the parameters, so that none is forgotten: no `Path(path)`, path.name or open(path) before it is
    one of this machine."""
    plain, seen = [], 0
    for file in sorted(ROOT.rglob("*.py")):
        if file.is_relative_to(ROOT / "base") or file.name == "errors.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for parameter in [*function.args.args, *function.args.kwonlyargs]:
                kinds = ast.unparse(parameter.annotation) if parameter.annotation else ""
                if not re.fullmatch(r"str \| Path( \| None)?", kinds) or parameter.arg == "where":
                    continue
                seen += 1
                for use in uses(function, parents, parameter.arg):
                    opens = isinstance(use, ast.Call) and ast.unparse(use.func) in OPENING
                    if opens or isinstance(use, ast.Attribute | ast.BinOp):
                        plain.append(f"{file.relative_to(ROOT)}:{use.lineno} {ast.unparse(use)}")
    assert seen > 50
    assert not plain


def paths_in(kind: Any) -> bool:
    return kind is Path or any(paths_in(part) for part in typing.get_args(kind))


def fields_with_paths(options: Any) -> dict[str, Any]:
    """Types of the fields of a command that hold paths, its parts' too, by name."""
    found = {}
    for name, kind in typing.get_type_hints(options).items():
        inner = [part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)]
        found |= {f"{name}.{below}": of for part in inner for below, of in fields_with_paths(part).items()}
        if paths_in(kind):
            found[name] = kind
    return found


def test_every_option_that_takes_a_path_expands_it(home: Path) -> None:
    options = {
        f"{of.__name__} {name}": kind for of in commands().values() for name, kind in fields_with_paths(of).items()
    }
    assert len(options) > 80
    for name, kind in options.items():
        several = typing.get_origin(kind) is tuple
        value = (Path("~/a b"),) * 2 if several else Path("~/a b")
        holder = dataclasses.make_dataclass("Holder", [("value", Any)])(value)
        inner = dataclasses.make_dataclass("Outer", [("inner", Any)])(holder)
        found = _localised(inner).inner.value
        assert found == ((home / "a b",) * 2 if several else home / "a b"), (name, kind)
        assert several or kind in (Path, Path | None) or typing.get_origin(kind) is typing.Annotated, (name, kind)


@pytest.mark.slow(ci=True)
def test_stages_read_and_write_below_the_home_folder(home: Path) -> None:
    there, given = home / FOLDER, f"~/{FOLDER}"
    save_base_and_run(there, save_model(home / "model"))
    series = tsae.CheckpointSeries.load(given)
    assert series.name == tsae.CheckpointSeries.load(Place(f"{given}/")).name
    alone = Checkpoint(id="base", path=f"{given}/base")
    rollouts = make_rollouts(("base", "run-1"), tokenizer=tokenizer_fingerprint(load_tokenizer(alone)))
    assert rollouts.write(f"{given}/r.parquet") == there / "r.parquet"
    assert len(tsae.Rollouts.read(Place(f"{given}/r.parquet"))) == len(rollouts)
    assert len(tsae.Rollouts.read((there / "r.parquet").as_uri())) == len(rollouts)
    site = "blocks.1.hook_resid_post"
    store = tsae.capture(series, rollouts, [site], to=Path(f"{given}/acts"), progress=False)
    assert store.path == there / "acts"
    training = tsae.TrainingConfig(tokens=2_000, batch_tokens=128)
    config = tsae.SAEConfig(d_sae=32, k=4)
    tsae.train(f"{given}/acts", config, training=training, to=f"{given}/sae", progress=False)
    features = tsae.encode(f"{given}/sae", f"{given}/acts", to=f"{given}/features", progress=False)
    diff = tsae.feature_diff(f"{given}/features", progress=False)
    assert diff.to_html(f"{given}/pages/report.html") == there / "pages" / "report.html"
    diff.save(f"{given}/diff")
    features.save(f"{given}/again")
    tsae.load_sae(f"{given}/sae").save(f"{given}/copy")
    tsae.load_sae(f"{given}/sae").to_saelens(f"{given}/lens")
    tsae.FeatureDiff.load(f"{given}/diff"), tsae.FeatureTable.load(f"{given}/again")
    assert tsae.load_sae(f"{given}/copy").fingerprint == tsae.load_sae(f"{given}/sae").fingerprint
    assert tsae.RunConfig(path=f"{given}/run", to=f"{given}/out").to == there / "out"
    main(["evaluate", f"--sae={given}/sae", f"--store={given}/acts", f"--json={given}/found.json"])
    assert {entry.name for entry in there.iterdir()} >= {"acts", "sae", "features", "diff", "lens", "found.json"}
    assert os.listdir(there / "pages") == ["report.html"]
