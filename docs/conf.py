"""How Sphinx builds this site: see the end of getting_started.md.

Nothing is fetched and no notebook is run: their outputs are kept in the files.
"""

import base64
import contextlib
import dataclasses
import enum
import inspect
import json
import re
import runpy
import shutil
from pathlib import Path

import matplotlib
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

import jls
from jls._scalers import rule
from jls._text import format_number

DOCS = Path(__file__).parent

project = "jls"
author = "The jls developers"
project_copyright = "The jls developers, Apache-2.0"
version = release = jls.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
nitpicky = True
# Names of other packages, which would need the network, and private type variables.
nitpick_ignore_regex = [("py:.*", r"(?!jls\.).*|jls\._.*")]

nb_execution_mode = "off"
nb_code_prompt_show = "Install jls"  # the one cell that is folded
nb_code_prompt_hide = "Install jls"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

default_role = "literal"  # docstrings put code in single backticks
python_maximum_signature_line_length = 72
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autosummary_generate = False
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"jls {release}"
html_static_path = ["static"]
html_css_files = ["jls.css"]
html_js_files = ["jls.js"]
html_show_sphinx = False
html_show_sourcelink = False
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"  # of a doctest, copies what was typed

# A dtype with a shape, such as f32[]; a field or an enum member with its comment.
DTYPE = re.compile(r"\b(bool|[fiu]\d+)\[\w*\]")
FIELD = re.compile(r"    (?P<name>\w+)(?:: | = )[^#]+?(?:  # (?P<comment>.*))?$")


def copy_notebooks() -> None:
    """Copies the notebooks here, since Sphinx reads only this folder."""
    target = DOCS / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
        content = json.loads(notebook.read_text(encoding="utf-8"))
        # Cells may hold lines such as `!pip`, which are not Python.
        content["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
        (target / notebook.name).write_text(json.dumps(content), encoding="utf-8")


def link_to_copies(app, name: str, source: list[str]) -> None:
    """Links to notebooks, which lead to the repository, lead to their copies here."""
    source[0] = source[0].replace("../notebooks/", "notebooks/")


def copy_pictures() -> None:
    """Takes the picture that opens each notebook, for the page that lists them."""
    target = DOCS / "pictures"
    target.mkdir(exist_ok=True)
    for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        (cell,) = (x for x in cells if x["id"] == "poster")
        (png,) = (
            output["data"]["image/png"]
            for output in cell["outputs"]
            if "image/png" in output.get("data", {})
        )
        picture = target / f"{notebook.stem}.png"
        picture.write_bytes(base64.b64decode("".join(png)))


def draw_picture() -> None:
    """Runs the script shown on the page about healthy runs."""
    matplotlib.use("Agg")
    target = DOCS / "pictures"
    target.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(None):
        figure = runpy.run_path(str(DOCS / "healthy_run.py"))["figure"]
    figure.savefig(target / "healthy_run.png", dpi=150)


def fields_of(record: type) -> list[str]:
    """Lists the fields of a record with their comments."""
    names = {*inspect.get_annotations(record), *getattr(record, "__members__", ())}
    lines, above = [], []
    for line in inspect.getsource(record).splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
        elif (field := FIELD.match(line)) and field["name"] in names:
            aside = re.sub(r"(^|  # )pyright: .*", "", field["comment"] or "")
            says = DTYPE.sub(r"`\g<0>`", " ".join([aside, *above]))
            lines.append(f"* **{field['name']}**: {says}".rstrip(": "))
            above = []
    title = "Members" if issubclass(record, enum.Enum) else "Fields"
    return [f".. rubric:: {title}", "", *lines, ""]


def is_record(value: object) -> bool:
    """Whether a class has fields, or members, to list."""
    return inspect.isclass(value) and (
        "_fields" in vars(value)  # not inherited
        or dataclasses.is_dataclass(value)
        or issubclass(value, enum.Enum)
    )


FIELDS = {}
for module in (jls, jls.types):
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if is_record(value):
            FIELDS[value] = fields_of(value)
        if inspect.isclass(value) or inspect.isfunction(value):
            value.__module__ = module.__name__  # where users find it


# An alias has the docstring of its type, or none.
ALIASES = {
    "jls.types.Verdict": "The verdicts of `jls.health`.",
}


# The defaults that all scalers share, by the names that their signatures have.
DEFAULTS = {
    name: format_number(value)
    for name, value in vars(rule).items()
    if name.isupper() and not name.startswith("_")
}


def show_defaults(app, what, name, obj, options, signature, returns):
    """Puts numbers in the place of the names of shared defaults."""
    if signature:
        signature = re.sub(
            r"\brule\.([A-Z_]{5,})\b", lambda m: DEFAULTS.get(m[1], m[0]), signature
        )
    return signature, returns


def document(app, what, name, obj, options, lines):
    """Puts the fields of a record before its example, and documents the aliases."""
    if name in ALIASES:
        lines[:] = [ALIASES[name], ""]
    if what == "class" and obj in FIELDS:
        place = lines.index("Example:")
        lines[place:place] = FIELDS[obj]


def is_there(name):
    """Whether jls has a name such as "jls.History.plot"."""
    holder = jls
    for part in name.split(".")[1:]:
        holder = getattr(holder, part, None)
    return holder is not None


class LinkNames(SphinxTransform):
    """Links every `jls.name` set as code, and so makes a wrong name an error."""

    default_priority = 400

    def apply(self, **kwargs):
        for node in list(self.document.findall(nodes.literal)):
            name = re.match(r"jls(\.[a-zA-Z]\w*)+(?=\(|$)", node.astext())
            if self.env.docname == "changelog" and name and not is_there(name[0]):
                continue  # of an older version
            if name and not isinstance(node.parent, nodes.reference | pending_xref):
                link = pending_xref(
                    refdomain="py",
                    reftype="obj",
                    reftarget=name[0],
                    refdoc=self.env.docname,
                    refspecific=False,
                    refexplicit=True,
                    refwarn=True,
                )
                node.replace_self(link)
                link.append(node)


class MarkRanges(SphinxTransform):
    """Puts the (1.08-1.14) after a number in a table on a line of its own."""

    default_priority = 400

    def apply(self, **kwargs):
        for cell in self.document.findall(nodes.entry):
            for text in list(cell.findall(nodes.Text)):
                before, _, after = text.partition(" (")
                if re.fullmatch(r"[\d.]+(-[\d.]+)?\)", after):
                    marked = nodes.inline("", f"({after}", classes=["range"])
                    text.parent.replace(text, [nodes.Text(f"{before} "), marked])


class LinkNotes(SphinxTransform):
    """Links [1] in a table to the first note of the numbered list after it."""

    default_priority = 400

    def apply(self, **kwargs):
        tables, wanted = [], nodes.table | nodes.enumerated_list
        for node in list(self.document.findall(lambda node: isinstance(node, wanted))):
            if isinstance(node, nodes.table):
                tables.append(node)
                continue
            for table in tables:
                self.link(table, node)
            tables = []

    def link(self, table, notes):
        for text in list(table.findall(nodes.Text)):
            parts = re.split(r"(\[\d+\])", text)
            if len(parts) == 1 or isinstance(text.parent, nodes.literal):
                continue
            linked = []
            for part in parts:
                number = re.fullmatch(r"\[(\d+)\]", part)
                if not number:
                    linked.append(nodes.Text(part))
                    continue
                note = notes[int(number[1]) - 1]
                if not note["ids"]:
                    note["ids"] = [self.document.set_id(note, suggested_prefix="note")]
                linked.append(
                    nodes.reference("", part, refid=note["ids"][0], internal=True)
                )
            text.parent.replace(text, linked)


def setup(app):
    """Called by Sphinx."""
    copy_notebooks()
    copy_pictures()
    draw_picture()
    app.connect("autodoc-process-docstring", document, priority=400)
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("source-read", link_to_copies)
    app.add_transform(LinkNames)
    app.add_transform(LinkNotes)
    app.add_transform(MarkRanges)
