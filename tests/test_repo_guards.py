"""Rules of the repository that no linter knows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_LINES = 450
TEST_PREFIXES = ("test_api_", "test_op_", "test_tr_", "test_chart_", "test_e2e_", "test_bench_", "test_repo_")
# Split, so that this file does not contain what it looks for.
FORBIDDEN = {
    "path of a developer's machine": re.compile(r"(?<![\w.-])/(?:ro" r"ot|wo" r"rk)/(?!\.\.\.)[\w.~]"),
    "path outside the repository": re.compile(r"\.\./sha" r"red\b"),
    # Names below .example are reserved for examples.
    "address of a package index": re.compile(
        r"https?://(?![^\s/]*\.example\b)[^\s\"']*(?:/simp" r"le\b|pythonho" r"sted\.org|proxy\.gol" r"ang)"
    ),
    "unresolved merge": re.compile(r"^(?:<{7} |>{7} )", re.MULTILINE),
}


@cache
def list_files() -> tuple[Path, ...]:
    """Files of the tree, except those git ignores."""
    result = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"not a git checkout: {result.stderr.strip()}")
    paths = (REPOSITORY / name for name in result.stdout.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


def read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def is_test(path: Path) -> bool:
    return path.suffix == ".py" and ("tests" in path.parts or "cases" in path.parts)


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not list((REPOSITORY / "operator").glob("*.py")), "`import operator` would find these"
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "importlib" not in options["addopts"], "pytest would register a namespace module named operator"


def test_test_files_have_unique_prefixed_names_and_no_packages() -> None:
    names = Counter(path.name for path in list_files() if path.name.startswith("test_") and path.suffix == ".py")
    assert [name for name, count in names.items() if count > 1] == []
    assert [name for name in names if not name.startswith(TEST_PREFIXES)] == []
    assert [relative(path) for path in list_files() if path.name == "__init__.py" and path.parent.name == "tests"] == []


def test_no_file_is_long() -> None:
    lengths = {
        relative(path): len(path.read_text().splitlines())
        for path in list_files()
        if path.suffix == ".py" and not is_test(path)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_mentions(what: str) -> None:
    found = []
    for path in list_files():
        text = read_text(path)
        if text is not None and (match := FORBIDDEN[what].search(text)):
            found.append(f"{relative(path)}:{text[: match.start()].count(chr(10)) + 1}: {match.group()}")
    assert found == []


def test_lock_files_have_hashes_and_no_index() -> None:
    locks = sorted((REPOSITORY / "requirements").glob("*.txt"))
    assert {path.stem for path in locks} >= {"dev", "operator", "trainer"}
    for path in locks:
        text = path.read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            assert re.match(r"^[a-z0-9][\w.-]*==", line), f"{path.name}: {line[:80]}"
            assert "--hash=sha256:" in line, f"{path.name}: {line[:80]}"


def test_api_package_needs_neither_torch_nor_a_cluster_client() -> None:
    program = (
        "import importlib, pkgutil, sys, rljob_api\n"
        "for module in pkgutil.walk_packages(rljob_api.__path__, 'rljob_api.'):\n"
        "    if '.tests' not in module.name: importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'kopf', 'kubernetes', 'ray', 'transformers'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_wheel_holds_the_three_packages(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("rljob_api", "rljob_operator", "rljob_trainer"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "rljob = rljob_operator.cli.main:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def iterate_pages() -> list[Path]:
    return [path for path in list_files() if path.suffix == ".md"]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in iterate_pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.parent / file).resolve() if file else page
            if not path.exists():
                broken.append(f"{relative(page)}: {target}")
            elif anchor and path.suffix == ".md" and anchor not in list_anchors(path):
                broken.append(f"{relative(page)}: {target} (no such heading)")
    assert broken == []


def list_anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for page in iterate_pages():
        for words in re.findall(r"(?:^|`)make ((?:[a-z][a-z0-9-]* ?)+)", page.read_text(), re.MULTILINE):
            assert set(words.split()) <= targets, f"{relative(page)}: make {words}"
