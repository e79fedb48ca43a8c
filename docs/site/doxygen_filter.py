#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the header $1 as Doxygen wants it: the plain comments of lockstep's headers become documentation.

A comment belongs to the declaration after it, or to the one on its line. "// ---- Title" begins a group of members. A
comment between blank lines belongs to the class around it. Comments in the bodies of functions stay as they are. What is
private is left out, and so is the namespace, since Breathe would show it on each page anew; the pages name it.
"""
import re
import sys
from pathlib import Path

from plain_text import restructured

COMMENT = re.compile(r"(\s*)//(.*)")
TRAILING = re.compile(r"(.*\S)\s+//(.*)")
SCOPE = re.compile(r"(?:template\s*<[^{]*>\s*)?(?:namespace|class|struct|enum(?: class)?|union)\b\s*([\w:]*)")


def documentation(lines, command=""):
    return ["/**" + command, "@verbatim embed:rst", *restructured([line.removeprefix(" ") for line in lines]), "@endverbatim", "*/"]


class Filter:
    def __init__(self, lines):
        self.lines = lines
        self.out = []
        self.scopes = []  # of each open brace: the name of a class or namespace, or None for a body
        self.groups = set()  # depths at which a group of members is open
        self.private = None  # how many scopes were open where a private part began
        self.statement = ""  # what came since the last declaration ended

    def run(self):
        at = next(i for i, line in enumerate(self.lines) if line.startswith("// ") and "SPDX" not in line)
        at, block = self.block(at)
        first = block[0].split(": ", 1)[1]
        self.out += documentation([" " + first[0].upper() + first[1:], *block[1:]], " @file")
        while at < len(self.lines):
            at = self.step(at)
        return self.out

    def block(self, at):
        end = at
        while end < len(self.lines) and COMMENT.fullmatch(self.lines[end]):
            end += 1
        return end, [COMMENT.fullmatch(line)[2] for line in self.lines[at:end]]

    def step(self, at):
        """Handles what begins at a line; returns the line after it."""
        line = self.lines[at]
        if None in self.scopes or "(" in self.statement or line.startswith("#"):
            self.code(line)
            return at + 1
        if re.fullmatch(r" *(public|protected|private):", line):
            self.private = len(self.scopes) if "private" in line else None
            self.close_group()
        elif self.private:
            self.code(line)
            return at + 1
        if COMMENT.fullmatch(line):
            end, block = self.block(at)
            self.comment(block, followed=end < len(self.lines) and self.lines[end].strip())
            return end
        trailing = TRAILING.fullmatch(line)
        if not trailing or trailing[1] == "}":
            self.code(line)
            return at + 1
        text, end = [trailing[2]], at + 1
        while end < len(self.lines) and (more := COMMENT.fullmatch(self.lines[end])) and len(more[1]) >= trailing.start(2) - 2:
            text.append(more[2])
            end += 1
        before = not self.statement
        self.out += documentation(text) if before else []
        self.code(trailing[1])
        self.out += [] if before else documentation(text, "<")
        return end

    def comment(self, block, followed):
        title = re.match(r" -+ (.*)", block[0])
        if title:
            self.close_group()
            self.groups.add(len(self.scopes))
            self.out += [f"/** @name {title[1]}", *documentation(block[1:])[1:], "/**@{*/"]
        elif followed:
            self.out += documentation(block)
        elif self.scopes[1:] and not re.match(r" (clang-format|IWYU)", block[0]):
            self.out += documentation(block, " @class " + "::".join(self.scopes[1:]))

    def code(self, line):
        code = re.sub(r"//.*", "", line)
        for mark in re.findall(r"[^{};]+|.", code) if not line.startswith("#") else ():
            if mark == "{":
                scope = SCOPE.match(self.statement.strip())
                self.scopes.append(scope[1] if scope else None)
            elif mark == "}":
                self.close_group()
                self.scopes.pop()
                self.private = None if len(self.scopes) < (self.private or 0) else self.private
            self.statement = "" if mark in "{};" else self.statement + mark
        if re.fullmatch(r"\s*\w+:|.*,", self.statement) and "(" not in self.statement or not self.statement.strip():
            self.statement = ""
        hidden = self.private or line.startswith(("namespace lockstep {", "}  // namespace lockstep"))
        self.out.append("" if hidden else line)

    def close_group(self):
        if len(self.scopes) in self.groups:
            self.groups.remove(len(self.scopes))
            self.out.append("/**@}*/")


if __name__ == "__main__":
    print("\n".join(Filter(Path(sys.argv[1]).read_text().splitlines()).run()))
