"""Entry point of `rljob`. Commands import what they need when they run, so that `rljob --help` is quick."""

from __future__ import annotations

import importlib
from typing import Final

import click

_COMMANDS: Final = {
    "render": ("rljob_operator.cli.render", "Print every object the operator would create for an RLJob."),
    "run": ("rljob_operator.cli.run", "Train an RLJob on this machine."),
    "validate": ("rljob_operator.cli.validate", "Check RLJobs and say what is wrong and what would work."),
    "version": ("rljob_operator.cli.version", "Print the versions of RLJob and of what it supports."),
}


class _LazyGroup(click.Group):
    """Loads the module of a command only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """RL post-training jobs: check, render and run them."""


if __name__ == "__main__":
    main()
