# SPDX-License-Identifier: Apache-2.0
"""Shared by the tools: errors and exit codes, files, and how numbers and lists are written."""

import json
import os
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parents[3] / "bin/lockstep"  # of an installed tool: PREFIX/libexec/lockstep/tools


class Error(Exception):
    """Says what happened, and perhaps where (`here`), why (`likely`) and what to do (`next`)."""

    code = 1

    def __init__(self, what, **parts):
        self.what = what
        lines = [f"  {part + ':':8}{text}" for part, text in parts.items()]
        super().__init__("\n".join([f"lockstep: {type(self).__name__}: {what}", *lines]))


class DataError(Error):
    pass


class SystemError(Error):
    pass


class UsageError(Error):
    code = 2


def run(main):
    """Ends the process with the exit code of main(), or of what it raises."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt:
        code = 130
    except (OSError, Error) as error:
        if isinstance(error, OSError):
            error = SystemError(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        print(error, file=sys.stderr)
        code = error.code
    sys.exit(code)


def finite(text):
    value = float(text)
    if abs(value) < float("inf"):
        return value
    raise ValueError(text)


def parse(text):
    """The value of JSON text, whose numbers are finite; None if it is none."""
    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        return None


def read(path):
    return Path(path).read_text(encoding="utf-8", errors="replace")


def write(path, text):
    """The whole file or nothing."""
    new = Path(f"{path}.tmp-{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def require_format(found, known, path):
    if number(found) is not None and found > known:
        raise DataError(
            f"{path} is in format {found}, and this lockstep knows {known}",
            likely="a newer lockstep has written it",
            next="use the lockstep that wrote it",
        )


def number(value):
    """The value if it is a number, else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def numbers(kind, least, most, one=False):
    """A type for argparse: numbers with commas between them, or one of them."""

    def read_numbers(text):
        values = [kind(word) for word in text.split(",")]
        if not all(least <= value <= most for value in values) or (one and len(values) > 1):
            raise ValueError(text)
        return values[0] if one else values

    read_numbers.__name__ = f"number from {least} to {most}"
    return read_numbers


def quotient(above, below):
    return above / below if above is not None and below else None


def named(words):
    """0, 1 and 3"""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def count(many, thing):
    return f"{many} {thing}" if many == 1 else f"{many} {thing}s"


def human_bytes(value):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(seconds):
    if seconds < 60:
        scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
        return f"{seconds * scale:.1f} {unit}"
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
