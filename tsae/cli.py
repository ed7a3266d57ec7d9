"""The command line: one subcommand per stage, whose options are the stage's own config."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from tsae.commands.analysis import Causal, Diff, Influence, Reinforcement, Report
from tsae.commands.capturing import Capture, Drift
from tsae.commands.common import as_json
from tsae.commands.helptext import WrappedOutput, join_lines
from tsae.commands.rl import CreditCommand, Reformulate
from tsae.commands.rollouts import RolloutsCommand
from tsae.commands.store import StoreCommand
from tsae.commands.training import Encode, Evaluate, Export, Train, start_as_default
from tsae.demo import DemoConfig
from tsae.errors import TsaeError
from tsae.run import RunConfig


@dataclass(frozen=True)
class Run:
    """The whole pipeline on what a trainer left: from the checkpoints and the rollout log of a run to a report.

    Every stage is a folder and says what it decided; the same command goes on where it was interrupted.
    """

    config: Annotated[RunConfig, arg(name="")]
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""

    def run(self) -> None:
        from tsae.report.printed.findings import print_findings
        from tsae.report.story.findings import findings_content
        from tsae.run import analyze_run

        with as_json(self.json) as write:
            diff = analyze_run(self.config)
            print_findings(diff)
            print(f"\nReport: {(self.config.to / 'report.html').resolve()}")
            write(findings_content(diff))


@dataclass(frozen=True)
class Demo:
    """The whole pipeline on the shipped arithmetic checkpoints: a findings table and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)
    open: bool = False
    """Open the report in the browser."""

    def run(self) -> None:
        from tsae.demo import demo

        report = demo(self.config)
        if self.open and not webbrowser.open(report.resolve().as_uri()):
            raise TsaeError("no browser was found to open it", where=report, fix="Open that file yourself.")


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in a shell.

    For bash put this into ~/.bashrc: eval "$(tsae completion bash)"

    For zsh, in a folder of $fpath: tsae completion zsh > _tsae

    For fish: tsae completion fish > ~/.config/fish/completions/tsae.fish
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """Whose script."""

    def run(self) -> None:
        tyro.cli(Command, prog="tsae", args=["--tyro-write-completion", self.shell, "-"])


Command = (
    Annotated[Demo, subcommand("demo", prefix_name=False)]
    | Annotated[Run, subcommand("run", prefix_name=False)]
    | Annotated[RolloutsCommand, subcommand("rollouts", prefix_name=False)]
    | Annotated[Drift, subcommand("drift", prefix_name=False)]
    | Annotated[Capture, subcommand("capture", prefix_name=False)]
    | Annotated[StoreCommand, subcommand("store", prefix_name=False)]
    | Annotated[Train, subcommand("train", prefix_name=False)]
    | Annotated[Evaluate, subcommand("evaluate", prefix_name=False)]
    | Annotated[Export, subcommand("export", prefix_name=False)]
    | Annotated[Encode, subcommand("encode", prefix_name=False)]
    | Annotated[Diff, subcommand("diff", prefix_name=False)]
    | Annotated[Causal, subcommand("causal", prefix_name=False)]
    | Annotated[Reinforcement, subcommand("reinforcement", prefix_name=False)]
    | Annotated[Influence, subcommand("influence", prefix_name=False)]
    | Annotated[Report, subcommand("report", prefix_name=False)]
    | Annotated[Reformulate, subcommand("reformulate", prefix_name=False)]
    | Annotated[CreditCommand, subcommand("credit", prefix_name=False)]
    | Annotated[Completion, subcommand("completion", prefix_name=False)]
)


def parse(args: Sequence[str]) -> Any:
    """The command that arguments name, not yet run.

    Raises:
        SystemExit: after --help (0), and for options that do not parse (2).
        TsaeError: where a config refuses its values.
    """
    helping = "-h" in args or "--help" in args
    if helping or list(args[:1]) == ["completion"]:
        join_lines(Command)
    # Parsing makes the configs, whose checks raise TsaeError too.
    start = start_as_default(args)
    given: dict[str, Any] = {} if start is None else {"default": start}
    with redirect_stdout(WrappedOutput()) if helping else nullcontext():
        return tyro.cli(Command, prog="tsae", description=_DESCRIPTION, args=args, **given)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Exit status: 0 done; 2 a `TsaeError`, printed in one paragraph, or options that do not parse; 130 interrupted; 141
    the reader of the output went away; 1 anything else, with its traceback.
    """
    if not sys.stderr.isatty():
        # A log keeps every state of a bar; tqdm reads this when it is imported.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    status: Any = None
    try:
        try:
            parse(sys.argv[1:] if args is None else args).run()
        except TsaeError as error:
            print(f"tsae: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            print("tsae: interrupted; the same command goes on from what is on disk", file=sys.stderr)
            status = 130
        except SystemExit as said:  # of --help, and of options that do not parse
            status = said.code or 0
        # The interpreter would do it after all handlers, and print that the reader went away.
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough (`tsae … | head`); nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 141
    if status is not None:
        raise SystemExit(status)


_DESCRIPTION = """What changed inside a language model trained with verifiable rewards, and which samples did that?

The stages, in order: rollouts, capture, train, encode, diff, report. Each reads what the one before wrote. All of them
run on the folder of a training run with `tsae run`, and on shipped checkpoints with `tsae demo`. What a diff found is
tested by `tsae causal`, and put to use in training by `tsae credit` and `tsae reformulate`; `tsae drift` needs none of
the stages.

Exit status: 0 done; 2 something that you can put right, said in one paragraph; 130 interrupted, and the same command
goes on; 1 anything else, with a traceback. With --json - only JSON goes to standard output."""
