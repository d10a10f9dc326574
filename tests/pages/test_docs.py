"""The pages of the documentation say what is so: their code runs, and prints that."""

import ast
import inspect
import itertools
import json
import re
import runpy
from pathlib import Path
from typing import get_args

import matplotlib
import pytest
from code_blocks import blocks, execute

import jls
from jls._tools.check.codes import CODES

pytestmark = pytest.mark.standard_promotion

DOCS = Path(__file__).parents[2] / "docs"
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
    assert questions <= set(WITH_CODE)


@pytest.mark.parametrize("page", WITH_CODE)
def test_page_prints_what_it_says(page, capsys):
    """A block prints what the text block right after it has, or nothing."""
    text, names = PAGES[page], {"__name__": "page"}
    found = blocks(text)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        execute(block.code, "step.py", names)
        is_output = (
            following
            and following.language == "text"
            and not text[block.end : following.start].strip()
        )
        said = following.code if is_output else ""
        assert capsys.readouterr().out.split() == said.split(), block.title


def test_parts_that_are_made_are_those_of_their_source():
    """`python docs/made.py` writes them."""
    made = runpy.run_path(str(DOCS / "made.py"), run_name="made")
    written = [
        name for text in PAGES.values() for _, name, _ in made["PART"].findall(text)
    ]
    assert sorted(written) == sorted(made["PARTS"])
    for page, text in PAGES.items():
        assert made["made"](text) == text, page


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


def test_verdicts_of_the_table_are_all_there_are_in_their_order():
    text = PAGES["questions/healthy_run.md"].split("## Ask for a verdict")[1]
    text = text.split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z -]+) \|", text, re.MULTILINE)
    assert rows == ["verdict", *get_args(jls.types.Verdict)]


def test_mistakes_are_called_what_check_step_calls_them():
    text = PAGES["questions/where_is_my_mistake.md"]
    by_symptom = text.split("## By symptom")[1].split("\n## ")[0]
    rows = [line for line in by_symptom.splitlines() if line.startswith("| ")][1:]
    called = {code for row in rows for code in re.findall(r'"([a-z ]+)"', row)}
    assert called == set(CODES)
    assert all('"' in row.split(" | ")[-1] for row in rows)


def test_reference_has_every_public_name_once():
    text = "".join(text for name, text in PAGES.items() if name.startswith("api/"))
    directive = r"^\.\. auto(?:function|class|exception|data):: (\w+)"
    listed = re.findall(directive, text, re.MULTILINE)
    expected = [name for name in dir(jls) if not name.startswith("_")]
    expected = [name for name in expected if name not in ("presets", "types")]
    expected += [name for name in dir(jls.types) if not name.startswith("_")]
    expected += [
        name
        for name, _ in inspect.getmembers(jls.presets, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert sorted(listed) == sorted(expected)


def test_reference_is_grouped_as_the_package():
    """Each group of `jls/__init__.py` is a page, with the same names in its order."""
    source = Path(jls.__file__).read_text(encoding="utf-8").split("# isort: off\n")[1]
    lines = r"^# (\w.*)\.\n((?:\n?if .*\n| *from .*\n)+)"
    groups = re.findall(lines, source, re.MULTILINE)
    assert len(groups) >= 7
    pages = re.findall(r"^\w+$", PAGES["api/index.md"].split("{toctree}")[1], re.M)
    pages = [page for page in pages if page not in ("presets", "types")]
    for page, (title, imports) in zip(pages, groups, strict=True):
        text = PAGES[f"api/{page}.md"]
        names = re.findall(r" as (\w+)$", imports, re.MULTILINE)
        names = [name for name in names if name != "presets"]
        assert text.startswith(f"# {title.split(', ')[0]}\n")
        listed = text.split(".. autosummary::\n\n")[1].split("\n\n")[0].split()
        documented = re.findall(
            r"^\.\. auto(?:function|class|exception):: (\w+)", text, re.M
        )
        assert names == listed == documented


def test_index_of_the_reference_names_all_functions():
    for name in dir(jls):
        if not name.startswith("_") and not inspect.ismodule(getattr(jls, name)):
            assert f"`jls.{name}`" in PAGES["api/index.md"], name


def test_first_page_begins_as_the_readme():
    """And nothing else is cut out of it."""
    sources = [*PAGES.values(), (DOCS / "conf.py").read_text(encoding="utf-8")]
    assert "".join(sources).count("README.md") == 1
    options = PAGES["index.md"].split("{include} ../README.md\n")[1].split("```")[0]
    start, end = re.findall(r':(?:start-after|end-before): "(.*)"\n', options)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert (readme.count(start), readme.count(end)) == (1, 1)
    included = readme.split(start)[1].split(end)[0]
    assert included.count("\n## ") == 4
    assert not re.search(r"\]\((?!docs/)", included)


def test_first_page_leads_newcomers_migrants_and_the_worried():
    doors = PAGES["index.md"].split("{container} door\n")[1:]
    titles = [re.match(r"\*\*(.*)\*\*", door)[1] for door in doors]
    assert titles == ["New here?", "Migrating?", "Worried?"]
    for door, page in zip(
        doors,
        ["getting_started", "coming_from", "questions/where_is_my_mistake"],
        strict=True,
    ):
        assert f"({page}.md)" in door


def test_every_notebook_and_example_has_a_sentence_and_a_picture():
    text = PAGES["notebooks.md"]
    notebooks = sorted((DOCS.parent / "notebooks").glob("*.ipynb"))
    for notebook in notebooks:
        part = rf"^## \[.*\]\(../notebooks/{notebook.name}\)\n\n[A-Z].*?\.\n\n"
        part += rf"!\[[^]]+\]\(pictures/{notebook.stem}\.png\)"
        assert re.search(part, text, re.MULTILINE | re.DOTALL), notebook.name
    examples = sorted((DOCS.parent / "examples").glob("*.py"))
    for example in examples:
        assert f"](examples/{example.stem}.png)" in PAGES["examples.md"]
        assert (DOCS / "examples" / f"{example.stem}.png").exists()


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
