"""The patches for other projects: well formed, counted, of names that exist."""

import ast
import contextlib
import importlib.util
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import jls

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))
HUNK = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@")

SPEC = importlib.util.spec_from_file_location("apply", FOLDER / "apply.py")
apply = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(apply)


def read(name):
    return (FOLDER / f"{name}.patch").read_text(encoding="utf-8")


def hunks(name):
    """Of each hunk the file, the four numbers of its header, and its lines."""
    found, file = [], None
    for line in read(name).splitlines():
        if line.startswith("--- a/"):
            file = line.removeprefix("--- a/")
        elif header := HUNK.match(line):
            found.append((file, [int(x) for x in header.groups()], []))
        elif line[:1] in {" ", "+", "-"} and not line.startswith("+++ b/"):
            found[-1][2].append(line)
    return found


def lines(name, sign):
    return [x[1:] for _, _, body in hunks(name) for x in body if x[0] == sign]


def old_files(name):
    """A file of the right length for each that the patch changes."""
    files = {}
    for file, (start, count, _, _), body in hunks(name):
        old = files.setdefault(file, [])
        old += [f"# {i}" for i in range(len(old) + 1, start)]
        old += [line[1:] for line in body if line[0] != "+"]
        assert len(old) == start + count - 1
    return files


def checkout(path, files):
    for file, old in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("\n".join([*old, "# end"]) + "\n", "utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for call in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", path, *call], check=True)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_headers_of_the_hunks_count_their_lines(name):
    assert hunks(name)
    moved = {}
    for file, (start, old, new_start, new), body in hunks(name):
        signs = [line[0] for line in body]
        assert (old, new) == (
            len(body) - signs.count("+"),
            len(body) - signs.count("-"),
        )
        assert new_start == start + moved.get(file, 0)
        moved[file] = moved.get(file, 0) + new - old
        # git applies a hunk without context only where told to.
        assert signs[0] == signs[-1] == " "


def test_table_names_each_patch_with_its_commit_and_lines():
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    named = [re.match(r"\| \[(\w+)\.patch\]\(\1\.patch\) \|", row)[1] for row in rows]
    assert sorted(named) == NAMES
    for name, row in zip(named, rows, strict=True):
        commit = apply.field(name, "Commit")
        assert re.fullmatch("[0-9a-f]{40}", commit)
        assert f"{apply.field(name, 'Project')} `{commit[:12]}`" in row
        added, removed = len(lines(name, "+")), len(lines(name, "-"))
        assert f"| +{added} -{removed} |" in row


def uses(name):
    """The expressions that begin with `jls.`, as far as they are in one hunk."""
    for _, _, body in hunks(name):
        text = "\n".join(line[1:] for line in body if line[0] != "-")
        for match in re.finditer(r"\bjls(\.\w+)+", text):
            ends = [i + 1 for i in range(match.end(), len(text)) if text[i] == ")"]
            is_call = text[match.end() : match.end() + 1] == "("
            for end in ends if is_call else [match.end()]:
                with contextlib.suppress(SyntaxError):
                    yield ast.parse(text[match.start() : end], mode="eval").body
                    break


@pytest.mark.parametrize("name", NAMES)
def test_added_lines_call_what_jls_has(name):
    added = "\n".join(lines(name, "+"))
    assert added.count("jls.") == len(list(uses(name))) > 0
    assert "import jls" in added
    for use in uses(name):
        call = use if isinstance(use, ast.Call) else None
        value = jls
        for part in ast.unparse(call.func if call else use).split(".")[1:]:
            value = getattr(value, part)
        if call:
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(value).bind(*call.args, **keywords)


@pytest.mark.parametrize("name", NAMES)
def test_script_applies_the_patch_once(name, tmp_path, capsys):
    path = checkout(tmp_path, old_files(name))
    apply.main([str(path)])
    out = capsys.readouterr()
    assert f"Applied {name}.patch" in out.out
    assert f"made for commit {apply.field(name, 'Commit')[:12]}" in out.err
    text = "\n".join((path / x).read_text("utf-8") for x in apply.files(name))
    assert all(line in text.splitlines() for line in lines(name, "+"))
    with pytest.raises(SystemExit, match="is already applied"):
        apply.main([str(path)])


def test_script_changes_nothing_where_a_hunk_fails(tmp_path):
    files = old_files("nanodo")
    files["nanodo/train.py"] = [f"# {i}" for i in range(500)]
    path = checkout(tmp_path, files)
    with pytest.raises(SystemExit, match="left as it was"):
        apply.main([str(path)])
    status = subprocess.run(
        ["git", "-C", path, "status", "--porcelain"], capture_output=True, check=True
    )
    assert status.stdout == b""


def test_script_refuses_what_is_no_checkout(tmp_path):
    with pytest.raises(SystemExit, match="is not a folder"):
        apply.main([str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="not the top folder of a git checkout"):
        apply.main([str(tmp_path)])
    path = checkout(tmp_path, {"inner/a.py": []})
    with pytest.raises(SystemExit, match="not the top folder of a git checkout"):
        apply.main([str(path / "inner")])
    with pytest.raises(SystemExit, match="files of none of the patches"):
        apply.main([str(path)])
