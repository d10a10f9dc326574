"""Checks what the built packages in a folder contain: `python .ci/packages.py dist`."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("jls", "tests", "docs", "notebooks", "examples", "benchmarks")
MADE = ("__pycache__", "_cache/", "build/")
MADE += ("docs/notebooks/", "docs/pictures/", "docs/diffs/")


def sources(*folders: str) -> set[str]:
    """The files of the checkout in `folders`, without what programs make there."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    names = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}
    return {name for name in names if not any(part in name for part in MADE)}


def main(dist: Path) -> None:
    """Raises SystemExit with the names of files that are missing, or too many.

    And with the links of the description that are dead on the page of an index.
    """
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    in_wheel = {
        name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name
    }
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    wanted = sources(*FOLDERS) | {
        *(path.name for path in ROOT.glob("*.md")),
        *("LICENSE", "CITATION.cff", "pyproject.toml", "conftest.py", ".ci/run"),
    }
    faults = {
        f"{wheel.name} lacks": sources("jls") - in_wheel,
        f"{wheel.name} should not have": in_wheel - sources("jls"),
        f"{sdist.name} lacks": wanted - in_sdist,
    }
    name = next(x for x in zipfile.ZipFile(wheel).namelist() if x.endswith("/METADATA"))
    page = zipfile.ZipFile(wheel).read(name).decode()
    faults["the page of an index has links to files:"] = {
        link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link
    }
    found = [
        f"{what} {', '.join(sorted(names))}" for what, names in faults.items() if names
    ]
    if found:
        raise SystemExit("\n".join(found))
    print(f"{wheel.name}: {len(in_wheel)} files; {sdist.name}: {len(in_sdist)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
