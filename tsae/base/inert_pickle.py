"""Pickles from strangers, read without running anything of them.

A pickle is a program for a small machine with a stack. This machine takes every instruction that would import, call or
set up an object, and puts an `Inert` in its place: the name that was asked for, the arguments, the state. Classes are
never looked up, so nothing can be called by mistake. A pickle has at most 1 MB and 50,000 instructions, which bounds
time and memory.
"""

from __future__ import annotations

import pickletools
import zipfile
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
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


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
    """(n,) uint8, the state of torch's generator on the CPU in a `rng_state.pth` of transformers.

    Raises:
        TsaeError: as `read_pickle`; also where there is no such state.
    """
    found = read_pickle(file)
    with reading(file, "Remove the file, or give the one that the trainer wrote."):
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
    pop, push = stack.pop, stack.append

    def since_mark() -> list[Any]:
        place = len(stack) - 1 - stack[::-1].index(_MARK)
        found = stack[place + 1 :]
        del stack[place:]
        return found

    arg: Any
    for step, (opcode, arg, _) in enumerate(pickletools.genops(pickled)):
        if step > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS:,} instructions")
        match opcode.name:
            case "PROTO" | "FRAME" | "READONLY_BUFFER":
                pass
            case "STOP":
                return pop()
            case "MARK":
                push(_MARK)
            case "POP":
                pop()
            case "POP_MARK":
                since_mark()
            case "DUP":
                push(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(memo[arg])
            case name if name in _CONSTANTS:
                push(_CONSTANTS[name])
            case "EMPTY_LIST" | "EMPTY_SET":
                push([])
            case "EMPTY_DICT":
                push({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple([pop() for _ in range(int(opcode.name[-1]))][::-1]))
            case "TUPLE":
                push(tuple(since_mark()))
            case "LIST" | "FROZENSET":
                push(since_mark())
            case "DICT":
                push(_put({}, since_mark()))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = [pop()] if opcode.name == "APPEND" else since_mark()
                if not isinstance(stack[-1], Inert):  # what a subclass of list holds is not needed
                    stack[-1].extend(items)
            case "SETITEM":
                _put(stack[-3], [stack[-2], stack[-1]])
                del stack[-2:]
            case "SETITEMS":
                items = since_mark()
                _put(stack[-1], items)
            case "GLOBAL":
                push(Inert(arg.replace(" ", ".")))
            case "STACK_GLOBAL":
                names = pop(), pop()
                push(Inert(".".join(reversed(names))))
            case "EXT1" | "EXT2" | "EXT4":
                push(Inert(f"copyreg.{arg}"))
            case "PERSID" | "BINPERSID":
                push(Inert("persistent", [pop() if arg is None else arg]))
            case "INST":
                push(Inert(arg.replace(" ", "."), since_mark()))
            case "OBJ":
                whose, *args = since_mark()
                push(Inert(whose.of, args))
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                state = pop() if opcode.name == "NEWOBJ_EX" else None
                args, whose = pop(), pop()
                push(Inert(whose.of, list(args), state))
            case "BUILD":
                state = pop()
                stack[-1].state = state
            case _ if not opcode.stack_before and opcode.arg is not None:  # numbers, texts and bytes
                push(arg)
            case _:
                raise ValueError(f"its instruction {opcode.name} is not known")
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
