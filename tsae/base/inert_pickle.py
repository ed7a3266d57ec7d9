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
    if len(pickled) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    arg: Any

    def pop() -> Any:
        if stack[-1] is _MARK:
            raise ValueError("an instruction has no value to work on")
        return stack.pop()

    def pop_to_mark() -> list[Any]:
        found: list[Any] = []
        while stack[-1] is not _MARK:
            found.append(stack.pop())
        stack.pop()
        return found[::-1]

    for step, (opcode, arg, _) in enumerate(pickletools.genops(pickled)):
        if step > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS:,} instructions")
        match opcode.name:
            case "PROTO" | "FRAME" | "READONLY_BUFFER":
                pass
            case "STOP":
                return pop()
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()
            case "POP_MARK":
                pop_to_mark()
            case "DUP":
                stack.append(_top(stack))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = _top(stack)
            case "MEMOIZE":
                memo[len(memo)] = _top(stack)
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple([pop() for _ in range(int(opcode.name[-1]))][::-1]))
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "LIST" | "FROZENSET":
                stack.append(pop_to_mark())
            case "DICT":
                items = pop_to_mark()
                stack.append({})
                _put(stack[-1], items)
            case "APPEND":
                _extend(stack, [pop()])
            case "APPENDS" | "ADDITEMS":
                items = pop_to_mark()
                _extend(stack, items)
            case "SETITEM":
                value, key = pop(), pop()
                _put(_top(stack), [key, value])
            case "SETITEMS":
                items = pop_to_mark()
                _put(_top(stack), items)
            case "GLOBAL":
                stack.append(Inert(arg.replace(" ", ".")))
            case "STACK_GLOBAL":
                name, module = pop(), pop()
                stack.append(Inert(f"{_text(module)}.{_text(name)}"))
            case "EXT1" | "EXT2" | "EXT4":
                stack.append(Inert(f"copyreg.{arg}"))
            case "PERSID":
                stack.append(Inert("persistent", [arg]))
            case "BINPERSID":
                stack.append(Inert("persistent", [pop()]))
            case "INST":
                stack.append(Inert(arg.replace(" ", "."), pop_to_mark()))
            case "OBJ":
                whose, *args = pop_to_mark()
                stack.append(Inert(_name(whose), args))
            case "REDUCE" | "NEWOBJ":
                args, whose = pop(), pop()
                stack.append(Inert(_name(whose), list(args)))
            case "NEWOBJ_EX":
                named, args, whose = pop(), pop(), pop()
                stack.append(Inert(_name(whose), list(args), named))
            case "BUILD":
                state = pop()
                _inert(_top(stack)).state = state
            case _ if not opcode.stack_before and opcode.arg is not None:  # numbers, texts and bytes
                stack.append(arg)
            case _:
                raise ValueError(f"its instruction {opcode.name} is not known")
    raise ValueError("it has no end")


def _top(stack: list[Any]) -> Any:
    if stack[-1] is _MARK:
        raise ValueError("an instruction has no value to work on")
    return stack[-1]


def _extend(stack: list[Any], items: list[Any]) -> None:
    if isinstance(_top(stack), list):
        stack[-1].extend(items)
    else:
        _inert(stack[-1])  # a subclass of list: its items are not needed


def _put(held: Any, items: list[Any]) -> None:
    """Set items of a dict. Keys are texts and numbers alone: the hash of a nested tuple may take for ever."""
    keys = items[::2]
    if not all(isinstance(key, (str, bytes, int, float, type(None))) for key in keys):
        raise ValueError("a key is neither a text nor a number")
    (held if isinstance(held, dict) else _inert(held).items).update(zip(keys, items[1::2], strict=True))


def _inert(value: Any) -> Inert:
    if not isinstance(value, Inert):
        raise ValueError(f"an instruction takes a {type(value).__name__} for an object")
    return value


def _name(value: Any) -> str:
    return _inert(value).of


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not a text")
    return value


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
        return str(Path(*(_text(part) for part in value.args)))
    if value.of == "builtins.getattr" and len(value.args) == 2:  # an enum, by Python 3.11.0 to 3.11.3
        return _text(value.args[1]).lower()
    if len(value.args) == 1 and isinstance(value.args[0], (str, int)):  # an enum
        return value.args[0]
    return name if module == "torch" and not value.args else f"<{value.of}>"
