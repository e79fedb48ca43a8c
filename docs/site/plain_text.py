# SPDX-License-Identifier: Apache-2.0
"""Comments of the headers and docstrings are plain text; here they become reStructuredText that shows them as they are."""
import re
from pathlib import Path

FIELD = re.compile(r"(Flow|Owns|Threads|Ranks): +")


def escaped(line):
    """reStructuredText of a line of prose: `code` is code, pages and public headers are links, all else means itself."""
    return "".join(markup(part) for part in re.split(r"(`[^`]+`|docs/[\w/-]+\.md|lockstep/\w+\.h)", line))


def markup(part):
    if re.fullmatch("`.+`", part):
        return f"`{part}`"
    if part.endswith(".md"):
        return f":doc:`{part} </{part[:-3]}>`"
    if part.endswith(".h") and Path("include", part).exists():
        return f":doc:`{part} </docs/api/cpp/{Path(part).stem}>`"
    return re.sub(r"([\\*|_`])", r"\\\1", part)


def restructured(lines):
    """A comment or docstring as reStructuredText. An indented block is shown as it is, but for what follows Flow, Owns, Threads or
    Ranks, "Args:" or "- ".
    """
    out, kind = [], "text"
    for line in lines:
        text = line.strip()
        if field := FIELD.match(line):
            out += [""] * (kind != "field")
            kind, line = "field", f":{field[1]}: {escaped(line[field.end():])}"
        elif not text:
            kind = kind if kind == "arguments" else "text"
        elif line == "Args:":
            kind, line = "arguments", "Arguments:"
        elif line.startswith("- "):
            out += [""] * (kind != "list")
            kind, line = "list", escaped(line)
        elif not line.startswith("  "):
            out += [""] * (kind != "text")
            kind, line = "text", escaped(line)
        elif kind == "arguments":
            names, colon, about = text.partition(": ")
            begins = colon and not line.startswith(" " * 5)
            out += [""] * (out[-1] == "Arguments:")
            line = f"- ``{names}``: {escaped(about)}" if begins else "  " + escaped(text)
        elif kind in ("field", "list"):
            line = "   " * (kind == "field") + "  " * (kind == "list") + escaped(text)
        else:
            out += ["", "::", ""] * (kind != "literal")
            kind = "literal"
        out.append(line)
    return out
