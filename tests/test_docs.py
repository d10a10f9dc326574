"""The pages of the documentation say what is so: their code runs, and prints that."""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import get_args

import matplotlib
import pytest
from code_blocks import blocks, execute

import jls

pytestmark = pytest.mark.standard_promotion

DOCS = Path(__file__).parent.parent / "docs"
MADE = ["_build", "notebooks", "pictures"]  # by Sphinx, from files elsewhere
PAGES = {
    str(path.relative_to(DOCS)): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in MADE
}
WITH_CODE = [name for name, text in PAGES.items() if "\n```python\n" in text]


def test_questions_have_code():
    questions = {name for name in PAGES if name.startswith("questions/")}
    assert len(questions) >= 7
    assert questions - set(WITH_CODE) == {"questions/faq.md"}


@pytest.mark.parametrize("page", WITH_CODE)
def test_page_prints_what_it_says(page, capsys):
    """A block prints what the text block right after it has, or nothing."""
    text, names = PAGES[page], {"__name__": "page"}
    found = blocks(text)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        execute(block.code, f"{page}, {block.title}", names)
        is_output = (
            following
            and following.language == "text"
            and not text[block.end : following.start].strip()
        )
        said = following.code if is_output else ""
        assert capsys.readouterr().out.split() == said.split(), block.title


def test_every_page_checks_something():
    for page in WITH_CODE:
        assert "text" in [block.language for block in blocks(PAGES[page])], page


def test_picture_shows_a_healthy_run(capsys):
    matplotlib.use("Agg")
    names = {}
    execute((DOCS / "healthy_run.py").read_text(), "healthy_run.py", names)
    applied = names["history"]["applied"][1:]
    scales = names["history"]["loss_scale"]
    assert not applied[:6].any()  # the scale comes down
    later = applied[100:]
    assert 3 <= (later == 0).sum() <= 20  # then a skip now and then
    assert not ((later[1:] == 0) & (later[:-1] == 0)).any()  # never two in a row
    assert (scales[100:].max() / scales[100:].min()) in (2, 4, 8)
    assert "\nok: " in capsys.readouterr().out


def test_verdicts_of_the_table_are_all_there_are():
    text = PAGES["questions/healthy_run.md"]
    rows = re.findall(r"^\| ([a-z -]+) \|", text, re.MULTILINE)
    assert sorted(set(rows) - {"verdict"}) == sorted(get_args(jls.types.Verdict))


def test_reference_has_every_public_name_once():
    text = "".join(text for name, text in PAGES.items() if name.startswith("api/"))
    directive = r"^\.\. auto(?:function|class|exception|data):: (\w+)"
    listed = re.findall(directive, text, re.MULTILINE)
    expected = [name for name in vars(jls) if not name.startswith("_")]
    expected = [name for name in expected if name not in ("presets", "types")]
    expected += [name for name in vars(jls.types) if not name.startswith("_")]
    expected += [
        name
        for name, _ in inspect.getmembers(jls.presets, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert sorted(listed) == sorted(expected)


def test_code_in_running_text_names_what_exists():
    for page, text in PAGES.items():
        for code in re.findall(r"`(jls\.[^`\n]+)`", text):
            for node in ast.walk(ast.parse(code.replace("...", "None"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jls":
                    assert hasattr(jls, node.attr), (page, code)


def test_formulas_need_no_network():
    """TeX in dollars would be rendered by MathJax, from the network."""
    texts = dict(PAGES)
    for path in (DOCS.parent / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        markdown = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
        texts[path.name] = "".join(itertools.chain.from_iterable(markdown))
    for page, text in texts.items():
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        assert not re.search(r"\$[^$\n]+\$", prose), page
