"""The command line: ``python -m gradstats COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gradstats.demo import add_command
from gradstats.errors import GradStatsError


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; every command sets ``run`` to its function."""
    parser = argparse.ArgumentParser(
        prog="python -m gradstats",
        description="Exact per-example gradient norms for unmodified PyTorch models.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; by default those of the process.

    Returns:
        The exit code: 0 after success, 2 if the command cannot run as asked, 130 after an
        interrupt.
    """
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except GradStatsError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
