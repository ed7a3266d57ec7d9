"""Pickles from strangers, read without running anything of them.

A pickle is a program for a small machine with a stack. This machine takes every instruction that would import, call or
set up an object, and puts an `Inert` in its place: the name that was asked for, the arguments, the state. Classes are
never looked up, so nothing can be called by mistake. A pickle has at most 1 MB and 50,000 instructions, which bounds
time and memory.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tsae.base.files import as_path, reading
from tsae.base.untrusted import check_zip

_MOST_BYTES = 1 << 20
_MOST_STEPS = 50_000
_MOST_VALUES = 20_000
_DEEPEST = 20
_FIX = "Give the file as the trainer wrote it, or the settings as JSON or YAML."
_MARK = object()


@dataclass(eq=False)
class Inert:
    """What stands where a pickle asks for a class, a function or one of its objects."""

    of: str
    """module.name of the class or function."""
    args: list[Any] = field(default_factory=list)
    """What it would have been called with."""
    state: Any = None
    """What the object would have been given."""
    items: dict[Any, Any] = field(default_factory=dict)
    """Of a subclass of dict."""


def read_pickle(file: str | Path) -> Any:
    """The content of a pickle, or of what `torch.save` wrote: numbers, texts, lists, tuples, dicts and `Inert`.

    Sets are lists. Tensors are `Inert`; their numbers are not read.

    Raises:
        TsaeError: where the file is missing or damaged, or asks for more than settings need.
    """
    file = as_path(file)
    with reading(file, _FIX):
        if not zipfile.is_zipfile(file):
            with file.open("rb") as stream:
                return _run(stream.read(_MOST_BYTES + 1))
        check_zip(file)
        with zipfile.ZipFile(file) as archive:
            return _run(_member(archive, "data.pkl"))


def read_dataclass(file: str | Path) -> tuple[str, dict[str, Any]]:
    """The class and the fields of an object such as `training_args.bin` holds, as plain values.

    Raises:
        TsaeError: as `read_pickle`; also where the file holds something else.
    """
    found = read_pickle(file)
    with reading(file, _FIX):
        if not (isinstance(found, Inert) and isinstance(found.state, dict)):
            raise ValueError("it does not hold an object with fields")
        left = [_MOST_VALUES]
        return found.of, {str(name): _plain(value, left) for name, value in found.state.items()}


def cpu_rng_state(file: str | Path) -> np.ndarray:
    """Read the state of torch's generator on the CPU, (n,) uint8, from transformers' `rng_state.pth`.

    Raises:
        TsaeError: as `read_pickle`; also where there is no such state.
    """
    found = read_pickle(file)
    with reading(file, "Remove the file, or give the trainer's own."):
        tensor = found["cpu"]
        storage, offset, size, stride = tensor.args[:4]
        _, kind, key, _, _ = storage.args[0]
        if not tensor.of.startswith("torch._utils._rebuild_tensor") or kind.of != "torch.ByteStorage":
            raise ValueError("its CPU state is not a tensor of bytes")
        with zipfile.ZipFile(as_path(file)) as archive:
            state = np.frombuffer(_member(archive, f"data/{key}"), dtype=np.uint8)
        if tuple(stride) != (1,) or not 0 <= offset <= offset + size[0] <= len(state):
            raise ValueError("its CPU state does not fit its storage")
        return state[offset : offset + size[0]].copy()


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member of an archive of `torch.save`, whose folder may have any name."""
    found = next((info for info in archive.infolist() if info.filename.partition("/")[2] == name), None)
    if found is None:
        raise ValueError(f"it has no {name}, which torch.save writes")
    if found.file_size > _MOST_BYTES:
        raise ValueError(f"its part {found.filename} has {found.file_size:,} bytes, more than {_MOST_BYTES:,}")
    return archive.read(found)


def _run(pickled: bytes) -> Any:
    """What the pickle stands for. An instruction that does not fit what is on the stack raises some usual error."""
    if len(pickled) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    arg: Any = None
    pop = stack.pop

    def since_mark() -> list[Any]:
        place = len(stack) - 1 - stack[::-1].index(_MARK)
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def called(args: Any, whose: Inert, state: Any = None) -> Inert:
        return Inert(whose.of, list(args), state)

    pushed: dict[str, Callable[[], Any]] = {
        "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
        "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_DICT": dict, "DUP": lambda: stack[-1],
        "GET": lambda: memo[arg], "BINGET": lambda: memo[arg], "LONG_BINGET": lambda: memo[arg],
        "TUPLE": lambda: tuple(since_mark()), "TUPLE1": lambda: (pop(),), "TUPLE2": lambda: (pop(), pop())[::-1],
        "TUPLE3": lambda: (pop(), pop(), pop())[::-1], "LIST": since_mark, "FROZENSET": since_mark,
        "DICT": lambda: _put({}, since_mark()), "GLOBAL": lambda: Inert(arg.replace(" ", ".")),
        "STACK_GLOBAL": lambda: Inert(".".join((pop(), pop())[::-1])),
        "EXT1": lambda: Inert(f"copyreg.{arg}"), "EXT2": lambda: Inert(f"copyreg.{arg}"),
        "EXT4": lambda: Inert(f"copyreg.{arg}"), "PERSID": lambda: Inert("persistent", [arg]),
        "BINPERSID": lambda: Inert("persistent", [pop()]), "INST": lambda: Inert(arg.replace(" ", "."), since_mark()),
        "OBJ": lambda: (lambda whose, *args: called(args, whose))(*since_mark()),
        "REDUCE": lambda: called(pop(), pop()), "NEWOBJ": lambda: called(pop(), pop()),
        "NEWOBJ_EX": lambda: called(state=pop(), args=pop(), whose=pop()),
    }  # fmt: skip
    for step, (opcode, arg, _) in enumerate(pickletools.genops(pickled)):
        if step > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS:,} instructions")
        name = opcode.name
        if name in pushed:
            stack.append(pushed[name]())
        elif name == "STOP":
            return pop()
        elif name in ("POP", "POP_MARK"):
            pop() if name == "POP" else since_mark()
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [pop()] if name == "APPEND" else since_mark()
            if not isinstance(stack[-1], Inert):  # what a subclass of list holds is not needed
                stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [pop(), pop()][::-1] if name == "SETITEM" else since_mark()
            _put(stack[-1], items)
        elif name == "BUILD":
            state = pop()
            stack[-1].state = state
        elif opcode.arg is not None and not opcode.stack_before:  # numbers, texts and bytes
            if name not in ("PROTO", "FRAME"):
                stack.append(arg)
        elif name != "READONLY_BUFFER":
            raise ValueError(f"its instruction {name} is not known")
    raise ValueError("it has no end")


def _put(held: Any, items: list[Any]) -> Any:
    """Set items of a dict. Keys are texts and numbers alone: the hash of a nested tuple may take for ever."""
    keys = items[::2]
    if not all(isinstance(key, (str, bytes, int, float, type(None))) for key in keys):
        raise ValueError("a key is neither a text nor a number")
    (held.items if isinstance(held, Inert) else held).update(zip(keys, items[1::2], strict=True))
    return held


def _plain(value: Any, left: list[int], depth: int = 0) -> Any:
    """A value without `Inert`: enums, paths and dtypes are their texts, nested dataclasses are dicts.

    Args:
        value: of `read_pickle`.
        left: how many values may still come; one that is in several places counts in each.
        depth: of the lists and dicts around it.
    """
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        raise ValueError(f"it stands for more than {_MOST_VALUES:,} values, or {_DEEPEST} of them inside each other")
    if isinstance(value, dict):
        return {str(name): _plain(each, left, depth + 1) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, left, depth + 1) for each in value]
    if not isinstance(value, Inert):
        return value
    module, _, name = value.of.rpartition(".")
    if isinstance(value.state, dict) or value.items:
        return _plain(value.items or value.state, left, depth + 1)
    if module.startswith("pathlib"):
        return str(Path(*value.args))
    if value.of == "builtins.getattr" and len(value.args) == 2:  # an enum, by Python 3.11.0 to 3.11.3
        return value.args[1].lower()
    if len(value.args) == 1 and isinstance(value.args[0], (str, int)):  # an enum
        return value.args[0]
    return name if module == "torch" and not value.args else f"<{value.of}>"
