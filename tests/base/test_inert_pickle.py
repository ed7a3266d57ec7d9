"""Pickles from strangers: what they hold is read, and nothing of them runs."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.refusals import refuses
from tsae.base.inert_pickle import Inert, cpu_rng_state, read_dataclass, read_pickle


class Kind(Enum):
    LINEAR = "linear"


@dataclass
class Inner:
    depth: int = 2


@dataclass
class Settings:
    rate: float = 1e-6
    kind: Kind = Kind.LINEAR
    where: Path = Path("/runs/a")
    dtype: torch.dtype = torch.bfloat16
    inner: Inner = field(default_factory=Inner)
    names: list[Any] = field(default_factory=lambda: ["a", (1, 2.5), {"b": None}, True])
    weights: torch.Tensor = field(default_factory=lambda: torch.ones(2))


PLAIN = {
    "rate": 1e-6,
    "kind": "linear",
    "where": "/runs/a",
    "dtype": "bfloat16",
    "inner": {"depth": 2},
    "names": ["a", [1, 2.5], {"b": None}, True],
    "weights": "<torch._utils._rebuild_tensor_v2>",
}


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_that_torch_saved_gives_its_fields(protocol: int, tmp_path: Path) -> None:
    torch.save(Settings(), tmp_path / "a.bin", pickle_protocol=protocol)
    of, found = read_dataclass(tmp_path / "a.bin")
    assert (of, found) == (f"{__name__}.Settings", PLAIN)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    content = {"a": [1, -5, 2**70, 1.5, None, True, False], "b": ("x", "é", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))}
    (tmp_path / "a").write_bytes(pickle.dumps(content, protocol))
    assert read_pickle(tmp_path / "a") == content
    held = [b"bytes", bytearray(b"more"), {1, 2}, frozenset({3}), np.arange(3)]
    (tmp_path / "a").write_bytes(pickle.dumps(held, protocol))
    *_, array = read_pickle(tmp_path / "a")
    assert isinstance(array, Inert)
    assert array.of.startswith("numpy.")


def test_the_random_state_of_the_cpu(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    others = {"python": random.getstate(), "numpy": np.random.get_state(), "cuda": [state[:16]]}  # noqa: NPY002
    torch.save({**others, "cpu": state}, tmp_path / "rng_state.pth")
    np.testing.assert_array_equal(cpu_rng_state(tmp_path / "rng_state.pth"), state.numpy())
    for content in ({"python": 1}, {"cpu": torch.ones(3)}, [1], {"cpu": 3}):
        torch.save(content, tmp_path / "rng_state.pth")
        refuses(r"rng_state\.pth: cannot be read", cpu_rng_state, tmp_path / "rng_state.pth")


class Evil:
    def __init__(self, *called: Any) -> None:
        self.called = called

    def __reduce__(self) -> Any:
        return self.called


TOUCH = "open('RAN', 'w')"
SYSTEM = b"cposix\nsystem\n(S'touch RAN'\ntR"
HOSTILE = {
    "reduce": SYSTEM + b".",
    "eval": pickle.dumps(Evil(eval, (TOUCH,))),
    "exec nested": pickle.dumps({"a": [(1, Evil(exec, (TOUCH,)))]}),
    "state": pickle.dumps(Evil(dict, (), {"__setstate__": Evil(eval, (TOUCH,))})),
    "setstate": b"cbuiltins\nobject\n)\x81}S'__setstate__'\ncos\nsystem\nsbS'touch RAN'\nb.",
    "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'touch RAN'\ntR.",
    "instance": b"(S'touch RAN'\niposix\nsystem\n.",
    "object": b"(cposix\nsystem\nS'touch RAN'\no.",
    "newobj": b"\x80\x02cposix\nsystem\nS'touch RAN'\n\x85\x81.",
    "newobj_ex": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x09touch RAN\x85}\x92.",
    "stack_global": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93\x8c\x09touch RAN\x85R.",
    "extension": b"\x80\x02\x82\x01(S'touch RAN'\ntR.",
    "module": b"ctsae_no_such_module\nrun\n)R.",
    "items": b"ccollections\nOrderedDict\n)R(S'a'\n" + SYSTEM + b"u.",
}
REFUSED = {
    "deep tuple as key": b"}" + b")" + b"\x85" * 40_000 + b"I1\ns.",
    "wide tuple as key": b"})" + b"2\x86" * 100 + b"I1\ns.",
    "many instructions": b"]" + b"2" * 100_000 + b".",
    "many bytes": b"X" + (1 << 21).to_bytes(4, "little") + b"a" * (1 << 21) + b".",
    "long text that is not there": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"a.",
    "call as key": b"}" + SYSTEM + b"I1\ns.",
    "digits": b"I" + b"9" * 5000 + b"\n.",
    "build on a number": b"I1\n}b.",
    "call a text": b"S'a'\n)R.",
    "empty stack": b"0.",
    "no mark": b"N]e.",
    "missing memo": b"h\x05.",
    "buffer": b"\x80\x05\x97.",
    "no end": b"N",
    "empty": b"",
    "text": b"not a pickle",
    "odd items": b"}(I1\nu.",
    "other name": b"\x80\x04K\x01K\x02\x93.",
}


def test_values_that_count_in_many_places_are_refused(tmp_path: Path) -> None:
    head = b"ca\nB\n)R}S'x'\n"
    laughs = b"]q\x000" + b"".join(b"](h%ch%ch%ceq%c0" % (i, i, i, i + 1) for i in range(15)) + b"h\x0f"
    for state in (laughs, b"]" * 100 + b"a" * 99, b"]q\x012a"):
        (tmp_path / "a").write_bytes(head + state + b"sb.")
        assert isinstance(read_pickle(tmp_path / "a"), Inert)
        refuses("stands for more than 20,000 values, or 20 of them inside", read_dataclass, tmp_path / "a")


def test_archives_that_unpack_to_more_are_refused(tmp_path: Path) -> None:
    for how, size in ((zipfile.ZIP_DEFLATED, 1 << 20), (zipfile.ZIP_STORED, 1 << 21)):
        with zipfile.ZipFile(tmp_path / "a", "w", how) as archive:
            archive.writestr("a/data.pkl", b"N" * size)
        refuses(r"is compressed|has 2,097,152 bytes, more than 1,048,576", read_pickle, tmp_path / "a")


AUDIT = """
import sys
from contextlib import suppress
from pathlib import Path
from tsae.base.inert_pickle import read_dataclass, read_pickle
from tsae.errors import TsaeError

def read(file):
    with suppress(TsaeError):
        read_dataclass(file)
    try:
        read_pickle(file)
    except TsaeError as error:
        return "refused" if "cannot be read" in str(error) else str(error)
    return "hostile"

seen = []
files = sorted(Path.cwd().glob("*.bin"))
for file in files:  # whatever is imported or compiled once
    read(file) if file.name.startswith("refused") else None
(Path.cwd() / "first.txt").write_bytes(b"N.")
read(Path.cwd() / "first.txt")
sys.addaudithook(lambda event, args: seen.append((event, str(args[0]) if event == "open" else None)))
wrong = [file.name for file in files if read(file) != file.name.partition("-")[0]]
events = set(seen)
print(wrong, sorted(events - {("open", str(file)) for file in files}, key=str))
"""


def test_what_asks_to_be_run_is_inert_or_refused(tmp_path: Path) -> None:
    """By Python's own audit nothing is imported, called or opened."""
    for kind, contents in (("hostile", HOSTILE), ("refused", REFUSED)):
        for name, content in contents.items():
            (tmp_path / f"{kind}-{name}.bin").write_bytes(content)
    torch.save(Settings(), tmp_path / "hostile-settings.bin")
    for kind, name in (("hostile", "b/data.pkl"), ("refused", "data.pkl")):
        with zipfile.ZipFile(tmp_path / f"{kind}-archive.bin", "w") as archive:
            archive.writestr(name, HOSTILE["reduce"])
    done = subprocess.run([sys.executable, "-c", AUDIT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[] []", "")
    assert not (tmp_path / "RAN").exists()
