# SPDX-License-Identifier: Apache-2.0
"""Sphinx makes the site from the repository's own pages: `make docs`.

The pages of the API are written into docs/api/, which git ignores: C++ from the public headers, by Doxygen and Breathe;
Python from lockstep.__all__, by autodoc. Torch and the compiled part of the package need not be there for that.
"""
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import _MockModule, _MockObject, mock

sys.path.insert(0, str(Path(__file__).parent))
from plain_text import restructured  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "include/lockstep"

project = "lockstep"
version = release = re.search(r"project\(lockstep VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
root_doc = "docs/start"
include_patterns = ["*.md", "docs/**.md", "docs/api/**.rst"]
exclude_patterns = ["build", "dist", ".*", "python"]
smartquotes = False  # --augment stays as it is
highlight_language = "none"
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 3
breathe_projects = {"lockstep": str(ROOT / "build/docs/doxygen/xml")}
breathe_default_project = "lockstep"
breathe_show_include = False
autodoc_member_order = "bysource"
autodoc_default_options = {"inherited-members": "BaseException"}

html_theme = "furo"
html_title = f"lockstep {version}"
html_favicon = "icon.svg"
html_extra_path = ["index.html"]
html_copy_source = False
html_show_copyright = False

# What a page lists below itself. Pages in docs/ that are not listed come after those of "Using lockstep".
CONTENTS = {
    root_doc: [
        ("Using lockstep", "docs/install docs/command docs/python docs/tutorial docs/clusters docs/data docs/strategies/README docs/five-systems docs/watching"),
        ("Reference", "docs/api/cpp docs/api/python docs/collectives docs/correctness docs/step-rules docs/benchmarks"),
        ("Inside", "README HACKING docs/design/README CONTRIBUTING CHANGELOG"),
    ],
    "docs/strategies/README": [("", "*")],
    "docs/design/README": [("", "*")],
}
LISTED = {page for groups in CONTENTS.values() for _, pages in groups for page in pages.split()}
CAPTION, FIRST = CONTENTS[root_doc][0]
CONTENTS[root_doc][0] = CAPTION, " ".join([FIRST, *sorted({f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} - LISTED - {root_doc})])
# What is shown of a header and of each class in it, in this order.
SECTIONS = ("detaileddescription public-type public-static-func public-func user-defined public-static-attrib public-attrib "
            "protected-func protected-attrib innerclass typedef enum func var")
# Links to folders lead to these pages.
FOLDERS = {"](examples)": "](docs/tutorial.md)", "](include/lockstep)": "](docs/api/cpp.md)"}

HEADER_PAGE = """\
{name}.h
{line}

In ``namespace lockstep``.

.. cpp:namespace:: lockstep

.. doxygenfile:: {name}.h
   :sections: {sections}
"""


def add_contents(app, docname, source):
    for link, page in FOLDERS.items():
        source[0] = source[0].replace(link, page)
    for caption, pages in CONTENTS.get(docname, ()):
        source[0] += toctree(caption, [page if page == "*" else f"/{page}" for page in pages.split()], ":hidden:")


def toctree(caption, pages, *options):
    lines = [f":caption: {caption}"] * bool(caption) + [":glob:", *options, *pages]
    return "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def write_page(name, text):
    path = ROOT / "docs/api" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:  # else Sphinx need not read it again
        path.write_text(text)


def write_cpp_pages():
    """A page for each public header, in the groups and the order of lockstep.h."""
    text, listed = "# C++\n\n`#include <lockstep/lockstep.h>` includes all of these headers, in this order.\n", []
    for line in (HEADERS / "lockstep.h").read_text().splitlines():
        if line.startswith("// ") and line.endswith(":"):
            text += f"\n## {line[3:-1]}\n\n"
        elif include := re.match(r'#include "lockstep/(\w+)\.h" +// (.*)', line):
            text += f"- [{include[1]}.h](cpp/{include[1]}.rst): {include[2]}\n"
            listed.append(include[1])
    others = sorted({path.stem for path in HEADERS.glob("*.h")} - {"lockstep", *listed})
    text += "\n## Beside these\n\n" + "".join(f"- [{name}.h](cpp/{name}.rst)\n" for name in others)
    write_page("cpp.md", text + toctree("", [f"cpp/{name}" for name in listed + others], ":hidden:"))
    for name in listed + others:
        write_page(f"cpp/{name}.rst", HEADER_PAGE.format(name=name, line="=" * 40, sections=SECTIONS))


def import_lockstep():
    """Imports the package for autodoc, without torch and its compiled part: they are mocks, but for the exceptions."""
    _MockObject.__or__ = _MockObject.__ror__ = lambda self, other: self  # torch.Tensor | None
    compiled = sys.modules["lockstep._C"] = _MockModule("lockstep._C")
    compiled.Error = type("Error", (RuntimeError,), {"__doc__": "What lockstep raises. The text says what happened, where, the likely cause, and what to do next."})
    for kind, about in re.findall(r"LOCKSTEP_ERROR\((\w+)\);\s+// (.*)", (HEADERS / "error.h").read_text()):
        setattr(compiled, kind, type(kind, (compiled.Error,), {"__doc__": about}))
    sys.path.insert(0, str(ROOT / "python/src"))

    class Accelerator:
        def prepare_model(self):
            return self._models, self._is_accelerate_prepared  # lockstep.accelerate looks for them

    with mock(["torch", "lightning", "accelerate", "transformers"]):
        import accelerate
        import torch

        accelerate.Accelerator = Accelerator
        torch.__version__ = "2.11.0"
        names = sorted(path.stem for path in (ROOT / "python/src/lockstep").glob("[a-z]*.py"))
        package, modules = importlib.import_module("lockstep"), [importlib.import_module(f"lockstep.{name}") for name in names]
    for cls in [value for module in modules for value in vars(module).values() if "__init__" in getattr(value, "__dict__", ())]:
        itself, *arguments = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(arguments)  # else that of the mock it is derived from
    return package, modules


def write_python_page(package, modules):
    """What lockstep.__all__ has, then what its modules have besides."""
    text = "Python\n======\n\n.. automodule:: lockstep\n   :members:\n"
    for module in modules:
        if set(getattr(module, "__all__", ())) - set(package.__all__):
            text += f"\n{module.__name__}\n{'-' * 40}\n\n.. automodule:: {module.__name__}\n   :members:\n"
            text += f"   :exclude-members: {', '.join(package.__all__)}\n"
    write_page("python.rst", text)


def plain_docstring(app, what, name, obj, options, lines):
    lines[:] = restructured(lines)


def setup(app):
    (ROOT / "build/docs/doxygen").mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", "docs/site/Doxyfile"], cwd=ROOT, check=True)
    write_cpp_pages()
    write_python_page(*import_lockstep())
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("source-read", add_contents)
