"""The command line: one subcommand per stage, whose options are the stage's own config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from tyro.conf import arg, subcommand

from tsae.commands.analysis import Causal, Diff, Influence, Reinforcement, Report
from tsae.commands.capturing import Capture, Drift
from tsae.commands.rl import CreditCommand, Reformulate
from tsae.commands.rollouts import RolloutsCommand
from tsae.commands.store import StoreCommand
from tsae.commands.training import Encode, Evaluate, Export, Train, start_as_default
from tsae.demo import DemoConfig
from tsae.errors import TsaeError
from tsae.helptext import join_lines
from tsae.run import RunConfig


@dataclass(frozen=True)
class Run:
    """The whole pipeline on what a trainer left: from the checkpoints and the rollout log of a run to a report.

    Every stage is a folder and says what it decided; the same command goes on where it was interrupted.
    """

    config: Annotated[RunConfig, arg(name="")]

    def run(self) -> None:
        from tsae.report.terminal import print_findings
        from tsae.run import analyze_run

        print_findings(analyze_run(self.config))
        print(f"\nReport: {(self.config.to / 'report.html').resolve()}")


@dataclass(frozen=True)
class Demo:
    """The whole pipeline on the shipped arithmetic checkpoints: a findings table and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)

    def run(self) -> None:
        from tsae.demo import demo

        demo(self.config)


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
)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script; a `TsaeError` is printed in one paragraph and exits with status 2."""
    try:
        # Parsing makes the configs, whose checks raise TsaeError too.
        args = sys.argv[1:] if args is None else args
        if "-h" in args or "--help" in args:
            join_lines(Command)
        start = start_as_default(args)
        given: dict[str, Any] = {} if start is None else {"default": start}
        command: Any = tyro.cli(Command, prog="tsae", description=_DESCRIPTION, args=args, **given)
        command.run()
    except TsaeError as error:
        print(f"tsae: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("tsae: interrupted; the same command goes on from what is on disk", file=sys.stderr)
        raise SystemExit(130) from None


_DESCRIPTION = """What changed inside a language model trained with verifiable rewards, and which samples did that?

The stages, in order: rollouts, capture, train, encode, diff, report. Each reads what the one before wrote. `tsae run`
runs them all on the folder of a training run, `tsae demo` on shipped checkpoints. `tsae drift` needs none of them;
`tsae causal` tests what a diff found. `tsae credit` and `tsae reformulate` put the findings to use in training."""
