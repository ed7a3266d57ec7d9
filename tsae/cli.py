"""The command line: one subcommand a stage, whose options are the stage's own config.

A command is a dataclass of `tsae.commands`: its fields are the options, and `execute` does it. Whatever is heavy is
imported in `execute`, so that --help takes half a second.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import Positional, subcommand

from tsae.base.artefact import running_command, version_of
from tsae.base.mirror import in_words, is_url, local, published, url_of
from tsae.base.output_lock import output_lock
from tsae.base.part import Part
from tsae.base.usual_state import usual_state
from tsae.commands.activations import Capture, StoreCommand
from tsae.commands.causes import Attribute, Causal, Influence
from tsae.commands.diff import Diff, Drift, Explain, Reinforcement
from tsae.commands.helptext import WrappedOutput, help_rules, left_out, subcommands
from tsae.commands.outputs import check_outputs, output
from tsae.commands.report import Export, Push, Report, Serve
from tsae.commands.rl import CreditCommand, Reformulate
from tsae.commands.rollouts import RolloutsCommand
from tsae.commands.runs import Claims, Demo, Doctor, Run, Verify, Watch
from tsae.commands.sae import Crosscoder, Encode, Evaluate, Train, start_as_default
from tsae.commands.spreading import end_with_parent, run_parts, without_spread
from tsae.commands.system import resource_error, safe_stdio
from tsae.errors import TsaeError
from tsae.report.text import visible


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in a shell.

    For bash put this into ~/.bashrc: eval "$(tsae completion bash)"

    For zsh, in a folder of $fpath: tsae completion zsh > _tsae

    For fish: tsae completion fish > ~/.config/fish/completions/tsae.fish
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """The shell that the script is for."""


_GROUPS: dict[str, dict[str, type]] = {
    "A run": {
        "demo": Demo, "doctor": Doctor, "run": Run, "watch": Watch, "report": Report, "serve": Serve,
        "attribute": Attribute, "claims": Claims, "verify": Verify,
    },
    "Its stages alone, in their order; each reads what the one before wrote": {
        "rollouts": RolloutsCommand, "capture": Capture, "store": StoreCommand, "train": Train, "evaluate": Evaluate,
        "encode": Encode, "diff": Diff,
    },
    "Further questions": {
        "causal": Causal, "explain": Explain, "reinforcement": Reinforcement, "influence": Influence,
        "crosscoder": Crosscoder, "drift": Drift,
    },
    "Results for other tools, and for training": {
        "export": Export, "push": Push, "reformulate": Reformulate, "credit": CreditCommand, "completion": Completion,
    },
}  # fmt: skip
"""The commands as `tsae --help` shows them."""
COMMANDS = {name: kind for group in _GROUPS.values() for name, kind in group.items()}
Command: Any = Union[  # noqa: UP007
    tuple(Annotated[kind, subcommand(name, prefix_name=False)] for name, kind in COMMANDS.items())
]


def parse(args: Sequence[str]) -> Any:
    """The options of the command that arguments name.

    Raises:
        SystemExit: after --help.
        TsaeError: for a command or options that do not parse, and where a config refuses its values.
    """
    words = ["--help" if word == "--help-all" else word for word in args]
    helping = "-h" in words or "--help" in words
    path, kind = _command(words)
    if helping and kind is None:
        _print_help()
    given: dict[str, Any] = {}
    if path == ["train"] and any(text.startswith("--start") for text in args):
        start = start_as_default(args)
        given = {} if start is None else {"default": start}
    hidden = left_out(kind) if helping and kind is not None and "--help-all" not in args else []
    errors = io.StringIO()
    try:
        with redirect_stdout(WrappedOutput()) if helping else redirect_stderr(errors):
            rules = help_rules(hidden) if helping else None
            found = tyro.cli(Command, prog="tsae", args=words, registry=rules, **given)
    except SystemExit as ended:
        if ended.code == 2:
            raise _mistake(path, words[len(path) :], errors.getvalue()) from None
        if hidden:
            print(f"{len(hidden)} more options: tsae {' '.join(path)} --help-all")
        raise
    print(errors.getvalue(), end="", file=sys.stderr)  # such as warnings
    return found


def _command(words: Sequence[str]) -> tuple[list[str], type | None]:
    """The words that name a command, and its class; None without one.

    Raises:
        TsaeError: for a name that is not there.
    """
    path: list[str] = []
    kind, known = None, COMMANDS
    for word in words:
        if word.startswith("-") or not known:
            break
        if word not in known:
            what = f"there is no command `{' '.join(['tsae', *path, word])}`"
            raise TsaeError(what, fix=f"{_near(word, known)}`{' '.join(['tsae', *path])} --help` lists them.")
        kind = known[word]
        path.append(word)
        known = subcommands(kind)
    return path, kind


def _print_help() -> None:
    """What tsae is, and its commands by group."""
    width = min(100, shutil.get_terminal_size().columns)
    print("usage: tsae COMMAND …\n", *(textwrap.fill(text, width) for text in _DESCRIPTION.split("\n\n")), sep="\n")
    for title, group in _GROUPS.items():
        print(f"\n{title}")
        for name, kind in group.items():
            first = " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
            print(textwrap.fill(first, width, initial_indent=f"  {name:<15}", subsequent_indent=" " * 17))
    print("\n`tsae COMMAND --help` explains a command. `tsae --version` prints the version.")
    raise SystemExit(0)


def _near(word: str, known: Iterable[str]) -> str:
    """The question whether the nearest name is meant; empty where none is near."""
    inner = [name for name in known if name.endswith(f".{word.lstrip('-')}")]
    near = inner[:1] or get_close_matches(word, known, 1)
    return f"Did you mean `{near[0]}`? " if near else ""


def _mistake(path: Sequence[str], words: Sequence[str], printed: str) -> TsaeError:
    """What is wrong with the options of a command, in one paragraph.

    Args:
        path: words that name the command.
        words: the others.
        printed: what tyro says.
    """
    command, where = " ".join(["tsae", *path]), " ".join(["tsae", *path]) if path else None
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        parse([*path, "--help-all"])
    known = set(re.findall(r"--[a-z][a-z0-9.-]*", " ".join(re.findall(r"^[│ ] +-.*", out.getvalue(), re.MULTILINE))))
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            return TsaeError(f"there is no option {name}", where=where, fix=f"{_near(name, known)}{_lists(command)}")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines()[1:]
    told = itertools.takewhile(lambda line: not re.search("For full helptext|Argument helptext", line), lines)
    shown = [line.strip("│ ") for line in told if re.search(r"\w", line) and not re.match("[│ ] {9}", line)]
    what = " ".join(shown)  # without the help of options, which stands further in
    what = what.replace(f"Missing from {command}: ", "missing: ").rstrip(".")
    if what.startswith("Expected one of {"):
        return TsaeError("a command is missing", where=where, fix=f"`{command} --help` lists them.")
    return TsaeError(what[0].lower() + what[1:], where=where, fix=_lists(command))


def _lists(command: str) -> str:
    return f"`{command} --help` lists the options."


def run(options: Any, words: Sequence[str] = ()) -> None:
    """Run a command.

    Args:
        options: of the command.
        words: what was typed, from which the commands of its parts are made.
    """
    if isinstance(options, Completion):
        words = ["--tyro-write-completion", options.shell, "-"]
        tyro.cli(Command, prog="tsae", args=words, registry=help_rules())
        return
    options = _localised(getattr(options, "command", options))  # of a group, such as `tsae store`
    check_outputs(options)
    spread = getattr(options, "spread", None)
    if spread is not None and spread.asked and not run_parts(words, spread, options.to, _device(options)):
        return
    to = output(options)
    part = getattr(options, "part", None)
    with nullcontext() if to is None else output_lock(to, None if part is None else Part.of(part)):
        with running_command(without_spread(words), to):
            options.execute()
        if to is not None:
            published(to)


def _localised(options: Any) -> Any:
    """The options with the local paths of URLs. What lies there is fetched, but for shards."""
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            found[field.name] = _localised(value)
        elif isinstance(value, Path):
            if field.name == "json" and is_url(value):
                raise TsaeError("is written on this machine", where=f"--json {url_of(value)}", fix="Give a path here.")
            found[field.name] = local(value)
        elif isinstance(value, tuple) and any(isinstance(item, Path) for item in value):
            found[field.name] = tuple(local(item) if isinstance(item, Path) else item for item in value)
    return replace(options, **found)


def _device(options: Any) -> str:
    """Torch device of a command whose options, or those of its parts, name one or more."""
    holders = [options, *(getattr(options, name, None) for name in ("config", "sampling"))]
    holders.append(getattr(getattr(options, "live", None), "config", None))
    devices = [str(holder.device) for holder in holders if hasattr(holder, "device")]
    return next((device for device in devices if device.startswith("cuda")), "cpu")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Exit status: 0 done; 2 a `TsaeError`, printed in one paragraph, or options that do not parse; 130 interrupted; 141
    the output was closed; 1 anything else, with its traceback.
    """
    if not sys.stderr.isatty():
        # A log keeps every state of a bar; tqdm reads this when it is imported.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    end_with_parent()
    status: Any = None
    try:
        status = _status(sys.argv[1:] if args is None else args)
        # Else the interpreter flushes after all handlers, and prints an error for a closed pipe.
        sys.stdout.flush()
    except BrokenPipeError:
        # The output's other end was closed (`tsae … | head`): leave nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 141
    if status is not None:
        raise SystemExit(status)


def _status(words: Sequence[str]) -> Any:
    """Run a command; its exit status, or None. What a user can put right is printed in one paragraph."""
    try:
        with usual_state():
            if list(words) == ["--version"]:
                print(f"tsae {version_of('tsae')}")
                return None
            _need_working_folder()
            options = parse(words)
            with safe_stdio():
                run(options, words)
        return None
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("tsae: interrupted; the same command resumes from what is on disk", file=sys.stderr)
        return 130
    except SystemExit as ended:  # of --help, and of options that do not parse
        return ended.code or 0
    except BaseException as error:
        refusal = error if isinstance(error, TsaeError) else resource_error(error)
        if refusal is None:
            raise
        print(f"tsae: {visible(in_words(str(refusal)))}", file=sys.stderr)
        return 2


def _need_working_folder() -> None:
    """Refuse a working folder that was removed, before libraries stop in words of their own."""
    try:
        os.getcwd()
    except OSError as error:
        fix = "Change into a folder that is there, and give the same command again."
        raise TsaeError("the working folder is not there any more", fix=fix) from error


_DESCRIPTION = """What changed inside a language model trained with verifiable rewards, and which samples did that?

`tsae demo` shows it on shipped checkpoints. `tsae doctor RUN` says what a training run lacks, `tsae run RUN` analyses
its folder. The other commands of the first group take the folder that `tsae run` wrote.

Exit status: 0 done; 2 something that you can put right, in one paragraph; 130 interrupted, and the same command
resumes; 1 anything else, with a traceback. With --json - only JSON goes to standard output."""
