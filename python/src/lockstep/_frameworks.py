# SPDX-License-Identifier: Apache-2.0
"""Packages that lockstep works with, and does not need."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_by(module: str, requirement: str) -> Iterator[None]:
    """An ImportError inside says what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be used: {error}\n"
            "  likely: it is not installed, or another release is; lockstep itself does not need it\n"
            f"  next:   pip install '{requirement}'"
        ) from error
