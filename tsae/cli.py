"""The command line: one subcommand a stage, whose options are the stage's own config.

A command is a dataclass of `tsae.commands`: its fields are the options, and `execute` does it. Whatever is heavy is
imported in `execute`, so that --help takes half a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass, replace
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
from tsae.commands.helptext import WrappedOutput, join_lines
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


_COMMANDS: dict[str, type] = {
    # whole runs
    "demo": Demo, "doctor": Doctor, "run": Run, "watch": Watch, "claims": Claims, "serve": Serve, "verify": Verify,
    # the stages, in their order
    "rollouts": RolloutsCommand, "capture": Capture, "store": StoreCommand, "train": Train, "evaluate": Evaluate,
    "encode": Encode, "diff": Diff, "report": Report,
    # further questions
    "attribute": Attribute, "causal": Causal, "explain": Explain, "reinforcement": Reinforcement,
    "influence": Influence, "crosscoder": Crosscoder, "drift": Drift,
    # results for other tools, and for training
    "export": Export, "push": Push, "reformulate": Reformulate, "credit": CreditCommand, "completion": Completion,
}  # fmt: skip


def _union(*, brief: bool) -> Any:
    """The type that tyro parses: one of the commands. A brief one describes each by its first paragraph."""
    kinds = []
    for name, kind in _COMMANDS.items():
        first = (kind.__doc__ or "").partition("\n\n")[0] if brief else None
        kinds.append(Annotated[kind, subcommand(name, prefix_name=False, description=first)])
    return Union[tuple(kinds)]  # noqa: UP007


Command = _union(brief=False)


def parse(args: Sequence[str]) -> Any:
    """The options of the command that arguments name.

    Raises:
        SystemExit: after --help (0), and for options that do not parse (2).
        TsaeError: where a config refuses its values.
    """
    helping = "-h" in args or "--help" in args
    if helping or list(args[:1]) == ["completion"]:
        join_lines(Command)
    given: dict[str, Any] = {}
    if list(args[:1]) == ["train"] and any(text.startswith("--start") for text in args):
        start = start_as_default(args)
        given = {} if start is None else {"default": start}
    kinds = _union(brief=True) if args[:1] in (["-h"], ["--help"]) else Command
    with redirect_stdout(WrappedOutput()) if helping else nullcontext():
        return tyro.cli(kinds, prog="tsae", description=_DESCRIPTION, args=args, **given)


def run(options: Any, words: Sequence[str] = ()) -> None:
    """Run a command.

    Args:
        options: of the command.
        words: what was typed, from which the commands of its parts are made.
    """
    if isinstance(options, Completion):
        tyro.cli(Command, prog="tsae", args=["--tyro-write-completion", options.shell, "-"])
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

`tsae demo` shows it on shipped checkpoints. `tsae doctor` says what a training run lacks, `tsae run` makes every stage
on its folder, and `tsae watch` on one that is still training. The stages alone, in order: rollouts, capture, train,
encode, diff, report; each reads what the one before wrote. Further questions to the results: `tsae attribute` finds the
training samples that did it, `tsae causal` tests what a diff found, `tsae explain` labels features, `tsae claims` tests
what the literature claims. `tsae verify` checks that results are whole, and names the command that makes them again.

Exit status: 0 done; 2 something that you can put right, in one paragraph; 130 interrupted, and the same command
resumes; 1 anything else, with a traceback. With --json - only JSON goes to standard output."""
