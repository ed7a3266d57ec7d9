"""Pushing to a Hub on this machine, by huggingface_hub's own client; and what comes back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

import tsae
from support.cli import SITE, run
from support.damage import resealed
from support.refusals import fails, refuses
from support.servers import TOKEN, Hub
from tsae.base.artefact import read_record, write_record
from tsae.base.files import partial_name, write_json
from tsae.report.hub import prepare, upload
from tsae.sae.quality.stability import Stability
from tsae.verify import verify

# huggingface_hub gives its HTTP client a file as it should not.
pytestmark = [
    pytest.mark.slow(ci=True),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def analysis(store: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stages of a run's folder, tiny."""
    folder = tmp_path_factory.mktemp("run") / "analysis"
    training = tsae.TrainingConfig(tokens=4000, batch_tokens=200, site=SITE)
    sae = tsae.train(store, tsae.SAEConfig(d_sae=32, k=4), to=folder / "sae", training=training, progress=False)
    evaluation = tsae.evaluate(sae, store, held_out=None)
    evaluation.save(folder / "evaluation" / "evaluation.json")
    features = tsae.encode(folder / "sae", store, to=folder / "features", progress=False)
    config = tsae.DiffConfig(n_bootstrap=100, n_permutations=100)
    diff = tsae.feature_diff(features, config, progress=False)
    diff.save(folder / "diff")
    (folder / "report.html").write_text("<!doctype html><title>The page</title>")
    series = [["base", "org/base-model"], ["easy-10", "/here/easy-10"]]
    write_record(folder / "run.json", {"kind": "run", "run": {}, "series": series})
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


def front(card: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.read_text().split("---\n")[1])
    return found


def test_what_is_pushed_is_what_the_folder_holds_and_comes_back(
    analysis: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push", "org/name", analysis, "--licence", "apache-2.0", "--dataset", "--space"]
    run(*words, "--to-folder", tmp_path / "files")
    assert hub.repositories == {}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run(*words, "--yes")
    folders = {"models/org/name": "model", "datasets/org/name-features": "dataset", "spaces/org/name-report": "space"}
    assert hub.repositories == {name: contents(tmp_path / "files" / folder) for name, folder in folders.items()}
    assert len(hub.commits) == 3  # one each, whole or not at all
    assert hub.lfs  # what is large went beside the commit
    # The token is in no file, and in nothing that was said.
    written = b"".join(data for held in hub.repositories.values() for data in held.values())
    assert TOKEN.encode() not in written + capsys.readouterr().out.encode()
    assert str(analysis.parent).encode() not in written
    # Everything of ours among it is whole.
    found = verify([tmp_path / "files"], progress=False)
    assert {finding.kind for finding in found} == {"SAE", "features", "diff"}
    assert all(finding.ok for finding in found)
    assert "evaluation.json" in read_record(tmp_path / "files" / "model" / "manifest.json", "")["files"]
    sae = tsae.load_sae("org/name")
    mine = tsae.load_sae(analysis / "sae")
    assert (sae.fingerprint, sae.config, sae.norm_limit) == (mine.fingerprint, mine.config, mine.norm_limit)
    evaluation = json.loads((analysis / "evaluation" / "evaluation.json").read_text())
    assert sae.training_info["promised"] == {"fve": evaluation["fve"], "l0": evaluation["l0"]}
    assert tsae.load_sae("org/name/saelens").fingerprint == mine.fingerprint


@pytest.mark.slow  # sae_lens is imported, and processes are started
@pytest.mark.filterwarnings("ignore:The 'utils' module has been deprecated:DeprecationWarning")
def test_others_load_it_by_its_name(
    analysis: Path, store: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By commands that know nothing but HF_ENDPOINT, and by sae_lens alone."""
    from sae_lens import SAE

    def command(*words: object) -> str:
        args = [sys.executable, "-m", "tsae", *map(str, words)]
        done = subprocess.run(args, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "pushed http" in command("push", "org/name", analysis, "--licence", "mit", "--yes")
    monkeypatch.delenv("HF_TOKEN")
    command("encode", "--sae", "org/name", "--store", store.path, "--to", "features")
    found = tsae.FeatureTable.load(tmp_path / "features")
    assert (found.codes[:] != tsae.FeatureTable.load(analysis / "features").codes[:]).nnz == 0
    lens = SAE.from_pretrained("org/name", "saelens")
    x = torch.from_numpy(next(store.shards()).read(SITE, slice(None)))
    with torch.no_grad():
        assert torch.equal(lens.encode(x), tsae.load_sae(analysis / "sae").encode(x))
    assert hub.tokens == {None, f"Bearer {TOKEN}"}


def test_the_cards_say_what_is_known(analysis: Path, tmp_path: Path) -> None:
    prepare("org/name", analysis, tmp_path, tsae.PushConfig(licence="mit", dataset=True, space=True))
    card = (tmp_path / "model" / "README.md").read_text()
    told = front(tmp_path / "model" / "README.md")
    assert (told["license"], told["library_name"], told["base_model"]) == ("mit", "tsae", "org/base-model")
    sae = tsae.load_sae(analysis / "sae")
    for text in (
        f"at `{SITE}`: 32 latents on 16 dimensions, of which the first 3 are high-level",
        'tsae.load_sae("org/name")',
        'SAE.from_pretrained("org/name", "saelens")',
        "| trained on | 4,000 tokens in batches of 200 |",
        "| read by | base and easy-10 |",
        "| reader | base |",
        f"| fingerprint | {sae.fingerprint} |",
        "It explains least of reader",
        "mit, as its makers say",
        "bhalla2025temporal",
        "datasets/org/name-features",
    ):
        assert text in card, text
    assert "/here/" not in card  # no path of this machine
    shown = front(tmp_path / "dataset" / "README.md")["configs"]
    assert {"config_name": "shifts", "data_files": "diff/shifts.parquet"} in shown
    assert all((tmp_path / "dataset" / table["data_files"]).is_file() for table in shown)
    assert front(tmp_path / "space" / "README.md")["sdk"] == "static"
    # A lone SAE, of which less is known.
    prepare("org/alone", analysis / "sae", tmp_path / "alone", tsae.PushConfig(licence="unknown"))
    alone = (tmp_path / "alone" / "model" / "README.md").read_text()
    assert "Not evaluated." in alone
    assert "of a model and of what training" in alone
    assert "base_model" not in front(tmp_path / "alone" / "model" / "README.md")


def refused(message: str, *words: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(capsys, "push", *words).err


def test_what_is_refused_leaves_nothing_behind(
    analysis: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to, licence = tmp_path / "files", ["--licence", "mit"]
    refused("has no licence, without which nobody may use it", "org/name", analysis, "--to-folder", to, capsys=capsys)
    refused("'name' is not a repository's name", "name", analysis, *licence, "--to-folder", to, capsys=capsys)
    alone = ["org/name", analysis / "sae", *licence]
    refused("is not a run, which has features and a page", *alone, "--space", "--to-folder", to, capsys=capsys)
    whole = shutil.copytree(analysis, tmp_path / "damaged")
    (whole / "features" / "features.h5").write_bytes(b"damaged")
    refused("features", "org/name", whole, *licence, "--dataset", "--to-folder", to, capsys=capsys)
    assert not to.exists()
    assert not partial_name(to).exists()
    to.mkdir()
    (to / "notes.txt").write_text("mine")
    refused("is not empty, and holds something else", *alone, "--to-folder", to, capsys=capsys)
    assert [path.name for path in to.iterdir()] == ["notes.txt"]
    # Nobody is asked where there is no terminal, and nobody is logged in.
    refused("nobody is there to be asked, and nothing was pushed", *alone, capsys=capsys)
    refused("model org/name: cannot be pushed", *alone, "--yes", capsys=capsys)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    run("push", *alone)
    assert "nothing was pushed" in capsys.readouterr().out
    assert hub.repositories == {}
    # A folder that a kill left half written is written anew; a whole one is left.
    (partial_name(tmp_path / "again") / "model").mkdir(parents=True)
    (partial_name(tmp_path / "again") / "model" / "README.md").write_text("half")
    for _ in range(2):
        run("push", *alone, "--to-folder", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir() if "again" in path.name) == ["again"]
    lens = tsae.load_sae(analysis / "sae").to_saelens(tmp_path / "lens")
    refuses("was not trained by tsae", prepare, "org/name", lens, tmp_path / "x", tsae.PushConfig(licence="mit"))


def test_only_what_belongs_there_is_published(analysis: Path, tmp_path: Path) -> None:
    """Strays stay, links are refused, and so is what another SAE made."""
    config = tsae.PushConfig(licence="mit", dataset=True, space=True)
    whole = shutil.copytree(analysis, tmp_path / "run")
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE")
    (whole / "features" / "id_rsa").write_text("PRIVATE")
    (whole / "features" / "notes.parquet").symlink_to(secret)
    (whole / "diff" / "home").symlink_to(tmp_path)
    prepare("org/name", whole, tmp_path / "files", config)
    assert not [file for file in (tmp_path / "files").rglob("*") if file.is_symlink()]
    assert not [name for name, data in contents(tmp_path / "files").items() if b"PRIVATE" in data]
    held = {part: read_record(whole / part / "manifest.json", "")["files"] for part in ("features", "diff")}
    for part, names in held.items():
        there = sorted(file.name for file in (tmp_path / "files" / "dataset" / part).iterdir())
        assert there == sorted([*names, "manifest.json"])
    for name in ("report.html", "diff/shifts.parquet"):
        linked = shutil.copytree(analysis, tmp_path / "linked" / name.replace("/", "-"))
        shutil.move(linked / name, tmp_path / "elsewhere")
        (linked / name).symlink_to(tmp_path / "elsewhere")
        refuses(f"{name}: is a link, and what it leads to is not", prepare, "org/name", linked, tmp_path / "x", config)
        assert not (tmp_path / "x").exists()
    other = tsae.load_sae(analysis / "sae")
    other.W_dec.data[0] *= -1
    shutil.rmtree(whole / "sae")
    other.save(whole / "sae")
    refuses("the evaluation is that of the SAE", prepare, "org/name", whole, tmp_path / "x", config)
    shutil.rmtree(whole / "evaluation")
    refuses("holds the codes of the SAE", prepare, "org/name", whole, tmp_path / "x", config)


def test_what_is_only_its_owners_is_not_published(analysis: Path, tmp_path: Path) -> None:
    sae = tsae.load_sae(analysis / "sae")
    secret = "tensorboard:s3://AKIAIOSFODNN7EXAMPLE:verysecret@bucket/x"
    for place, told in (("log", {"log_to": "tensorboard:/home/me/logs"}), ("key", {"log_to": secret})):
        sae.training_info["training"] |= told
        folder = sae.save(tmp_path / place)
        cosine = np.full((1, 32), 0.9)
        others = Stability(sae.fingerprint, ("/home/me/secret/seed1",), cosine, cosine > 0, 3)
        others.save(folder)
        prepare("org/name", folder, tmp_path / f"{place}-files", tsae.PushConfig(licence="mit"))
        written = b"".join(contents(tmp_path / f"{place}-files").values())
        assert b"/home/me" not in written
        assert b"verysecret" not in written
        assert b"seed1" in written


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("sae/training.json", lambda told: told["training"].update(tokens="4"), "cannot be read"),
        ("sae/training.json", lambda told: told.update(store=[1]), "cannot be read"),
        ("sae/training.json", lambda told: told.update(norms={"limit": 3.0}), "cannot be read"),
        ("evaluation/evaluation.json", lambda told: told.update(fve="<b>"), "fve='<b>' is not"),
        ("evaluation/evaluation.json", lambda told: told.update(n_tokens=True), "n_tokens=True is not"),
        ("evaluation/evaluation.json", lambda told: told.update(alive=float("inf")), "alive=inf is not"),
        ("evaluation/evaluation.json", lambda told: told.update(slices=[]), "it measures nothing"),
        ("evaluation/evaluation.json", lambda told: told["slices"][0].pop("fve"), "'fve'"),
        ("evaluation/evaluation.json", lambda told: told.update(more=1), "'more'"),
        ("run.json", lambda told: told.update(series={"a": 1}), "cannot be read"),
        ("run.json", lambda told: told.update(series=[[1]]), "cannot be read"),
    ],
)
def test_strange_content_is_one_paragraph(analysis: Path, tmp_path: Path, name: str, change: Any, said: str) -> None:
    whole = shutil.copytree(analysis, tmp_path / "run")
    told = json.loads((whole / name).read_text())
    told.pop("checksum", None)
    change(told)
    if "sae" in name:
        write_json(whole / name, told)
        resealed(whole / "sae")
    else:
        write_record(whole / name, told)
    refuses(said, prepare, "org/name", whole, tmp_path / "x", tsae.PushConfig(licence="mit"))


def test_names_that_break_out_of_the_card_are_refused(analysis: Path, tmp_path: Path) -> None:
    for config in (
        tsae.PushConfig(licence="mit\n<script>"),
        tsae.PushConfig(licence="mit", base_model="org/x`\n![i](http://evil/x.png)"),
    ):
        refuses("is not a name that the Hub knows", prepare, "org/name", analysis, tmp_path / "x", config)
    refuses("is not a folder that can be made", prepare, "org/name", analysis, "/", tsae.PushConfig(licence="mit"))


def test_a_hub_that_cannot_be_reached_is_one_paragraph(
    analysis: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepare("org/name", analysis / "sae", tmp_path / "files", tsae.PushConfig(licence="mit"))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", Mock(side_effect=HTTPError("Connection refused")))
    refuses(r"cannot be pushed \(Connection refused\)", upload, found)
