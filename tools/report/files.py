# SPDX-License-Identifier: Apache-2.0
"""Reads the files that a report is about: JSON that may be cut off, damaged, or of a newer lockstep."""
import json
from pathlib import Path


class Error(Exception):
    """What the command prints, in the words of every error of lockstep."""

    def __init__(self, kind, what, here="", likely="", next=""):
        self.kind, self.what = kind, what
        parts = (("here:   ", here), ("likely: ", likely), ("next:   ", next))
        super().__init__(f"lockstep: {kind}: {what}" + "".join(f"\n  {label}{text}" for label, text in parts if text))


def read(file):
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Error("SystemError", f"can't read {file}: {error.strerror}", here=str(file)) from None


def parse(text):
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def has_number(value, key):
    found = value.get(key) if isinstance(value, dict) else None
    return isinstance(found, (int, float)) and not isinstance(found, bool)


def text_of(value, key):
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else ""


def require_known_format(value, key, known, file):
    if has_number(value, key) and value[key] > known:
        raise Error("DataError", f"{file} is in format {value[key]}, and this lockstep knows {known}",
                    likely="a newer lockstep has written it", next="make the report with the lockstep that wrote it")
