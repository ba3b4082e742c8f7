"""The command line. `main` owns exit codes and streams: results go to stdout, everything else to stderr.

Exit codes: 0 equivalent (or done), 1 different, 2 trouble (there is no result), 3 inconclusive, 130 interrupted. An
uncaught error is 2, never 1: 1 means that tensors differ, and scripts rely on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from equivcheck.cli.root import root
from equivcheck.errors import EngineError, EquivcheckError

TROUBLE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing escapes but SystemExit of Python itself."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with root.make_context(
            "equivcheck", given.copy(), obj=given
        ) as context:  # not root.main: it turns a broken pipe into exit 1
            code = root.invoke(context)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return TROUBLE
    except click.UsageError as error:
        return _complain(_usage(error))
    except click.ClickException as error:
        return _complain(error.format_message())
    except (KeyboardInterrupt, click.Abort) as stop:
        return _interrupted(stop)
    except EquivcheckError as error:
        return _complain(str(error))
    except EngineError as error:
        return _complain(f"the engine failed: {error}")
    except BrokenPipeError:
        _abandon_stdout()
        return TROUBLE
    except OSError as error:
        _abandon_stdout()
        return _complain(f"cannot write the result: {error.strerror or error}")
    except MemoryError:
        return _complain("out of memory; fewer samples at once (-i), or --values splits, need less")
    except Exception as error:
        return _bug(error)


def _abandon_stdout() -> None:
    """Nobody takes what is left in the buffer: without this, Python's own flush at exit makes the exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str) -> int:
    print("equivcheck: " + " ".join(text.split()), file=sys.stderr)
    return TROUBLE


def _usage(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx is not None else "equivcheck"
    return f"{error.format_message()} (see: {command} --help)"


def _interrupted(stop: BaseException) -> int:
    """Say what is kept, where the command has noted that on the exception."""
    kept = "; ".join(getattr(stop, "__notes__", ())) or "nothing was written"
    print(f"equivcheck: interrupted; {kept}", file=sys.stderr)
    return INTERRUPTED


def _bug(error: Exception) -> int:
    if os.environ.get("EQUIVCHECK_DEBUG"):
        import traceback

        traceback.print_exc()
    text = " ".join(str(error).split())[:500]
    return _complain(
        f"internal error, please report it: {type(error).__name__}: {text} (EQUIVCHECK_DEBUG=1 shows where)"
    )
