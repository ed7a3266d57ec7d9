"""Passwords and keys are in no message and no file: planted into addresses and variables, and looked for afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tsae
from support.builders import make_rollouts
from tsae.base.artefact import read_record, write_record
from tsae.cli import main
from tsae.errors import TsaeError, public, without_secrets
from tsae.stages import RunRecord

SECRET, KEY = "passw0rd", "abcdef0123456789"
BUCKET = f"memory://user:{SECRET}@bucket"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"https://user:{SECRET}@host/v1 fails", "https://***@host/v1 fails"),
        (f"https://{KEY}@host", "https://***@host"),
        *((f"http://joe:{password}@h:1/v1 x@y", "http://***@h:1/v1 x@y") for password in (
            "se@cretpw", "se/cretpw", "it's", "a?b#c", "12345678", "80x/y",
        )),
        ("https://to@ken@h", "https://***@h"),
        (f"s3:/user:{SECRET}@host/a", "s3:/***@host/a"),
        (f"https://h/a?X-Amz-Signature={KEY}&x=1", "https://h/a?X-Amz-Signature=***&x=1"),
        (f"https://h/a?api_key={KEY}", "https://h/a?api_key=***"),
        *((f"https://h/a?{name}={SECRET}", f"https://h/a?{name}=***") for name in (
            "pass", "pw", "pwd", "passwd", "user_passwd", "jwt", "ftp_pass", "passphrase",
        )),
        (f"'https://h/a?x=1&token={KEY}'", "'https://h/a?x=1&token=***'"),
        ("hf_" + "a" * 34 + " is no longer valid", "*** is no longer valid"),
        ("Bearer sk-proj-" + "a" * 30, "Bearer ***"),
        ("key AKIA" + "A" * 16, "key ***"),
        (f"({KEY})", "(***)"),
        *((text, text) for text in (
            "hf://datasets/org/name@main/file", "org/model@revision", "a@b.org: no", "/a/b@c", "https://h/a?tokens",
            "memory://acts/base", "1+1=? & key=2", "half_finished_and_left_alone", "s3://bucket/x@y",
            "https://h/a?passes=3&compass=north",
            "http://h:8000/v1/org@rev", "http://[::1]:80/v1/a@b", "'http://h:1', 'a@b.org'",
        )),
    ],
)  # fmt: skip
def test_what_is_hidden_and_what_is_not(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "half_finished")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "half_finished")
    assert without_secrets(text) == shown
    assert str(TsaeError(text, where=text, fix=text)).count("***") == 3 * shown.count("***")
    assert public({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


def test_files_that_say_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    told = {"url": f"s3://user:{SECRET}@h/a", "options": {"secret": KEY, KEY: (KEY,)}, "seed": 3, "path": Path("a")}
    found = json.loads(write_record(tmp_path / "a.json", {"config": told}).read_text())
    hidden = {"url": "s3://***@h/a", "options": {"secret": "***", "***": ["***"]}, "seed": 3, "path": "a"}
    assert found["config"] == hidden
    for _ in range(2):  # and the same again is the same
        RunRecord(tmp_path / "run", "run.json", {"run": told, "versions": {}}, "a run")
    assert read_record(tmp_path / "run" / "run.json", "")["run"] == hidden


def test_stages_at_an_address_with_a_password(
    remote: Any, llama: Path, fingerprint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", f"hf-{KEY}")
    make_rollouts(n_problems=4, tokenizer=fingerprint).write(f"{BUCKET}/rollouts.parquet?sig={KEY}")
    words = ["--series", str(llama), "--rollouts", f"{BUCKET}/rollouts.parquet?sig={KEY}"]
    words += ["--sites", "blocks.1.hook_resid_post", "--to", f"{BUCKET}/acts"]
    main(["capture", *words])
    main(["verify", f"{BUCKET}/acts"])
    for wrong in (
        ["store", "show", f"{BUCKET}/none"],
        ["capture", *words[:-1], f"{BUCKET}/acts", "--shard-tokens", "9"],
    ):
        with pytest.raises(SystemExit):
            main(wrong)
    said = capsys.readouterr()
    assert "wrote memory://***@bucket/acts" in said.out
    assert "memory://***@bucket/none" in said.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 4
    contents = [path.read_bytes() for path in written] + [remote.cat(name) for name in remote.find("/")]
    contents += [said.out.encode(), said.err.encode(), *(str(path).encode() for path in written)]
    for secret in (SECRET.encode(), KEY.encode()):
        assert not [content[:100] for content in contents if secret in content]
    assert tsae.ActivationStore(f"{BUCKET}/acts").manifest["complete"]
