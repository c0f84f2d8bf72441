# SPDX-License-Identifier: Apache-2.0
"""Documentation pages: their Python runs, their links are valid, every error has its row."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

import deltackpt.inspect as inspect_checkpoints
from deltackpt import errors

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
BLOCK = re.compile(r"(?<!<!-- fragment -->\n)^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def run_blocks(page: Path) -> None:
    namespace = {"__name__": name(page)}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=name)
def test_python_on_a_page_runs_from_top_to_bottom_and_can_be_rerun(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page)
    if "CheckpointManager(" in page.read_text() or any(tmp_path.iterdir()):
        run_blocks(page)  # Like a resumed run.


def test_the_readme_s_loop_resumes_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(REPOSITORY / "README.md")
    shutil.rmtree(tmp_path / "checkpoints" / "30")  # Simulates a stop before step 30.
    run_blocks(REPOSITORY / "README.md")
    found = inspect_checkpoints.open(tmp_path / "checkpoints")
    assert [(save.step, save.chain_length) for save in found.saves] == [(10, 0), (20, 1), (30, 2)]
    assert not (tmp_path / "checkpoints" / "rolled-back").exists()
    assert found.at(30)["bias"][0] == np.float32(sum([np.float32(0.1)] * 30, np.float32(0)))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_to_a_file(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = [
        target
        for target in LINK.findall(prose)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_design_pages_name_existing_files_and_types():
    package = REPOSITORY / "deltackpt"
    for name in ("architecture", "reading-order", "design"):
        text = (REPOSITORY / f"docs/project/{name}.md").read_text()
        files = [file for file in re.findall(r"`([\w/]+\.py)`", text)]
        missing = [f for f in files if not ((REPOSITORY / f).exists() or (package / f).exists())]
        assert missing == [], name
    order = (REPOSITORY / "docs/project/reading-order.md").read_text()
    assert len(re.findall(r"^\| \d+ \| `[\w/]+\.py` ", order, re.MULTILINE)) == 11
    opening = (REPOSITORY / "docs/project/architecture.md").read_text()
    assert len(opening.splitlines()) <= 60
    for types, module in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+)` \|", opening, re.MULTILINE
    ):
        path = package / module.replace(".", "/")
        sources = [path.with_suffix(".py"), *path.glob("*.py")]
        found = "\n".join(source.read_text() for source in sources if source.exists())
        for kind in re.findall(r"\w+", types):
            assert re.search(rf"^(class|def) {kind}\b", found, re.MULTILINE), (kind, module)


def test_every_error_has_a_row_on_the_errors_page():
    page = (REPOSITORY / "docs" / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, re.MULTILINE))
    classes = {
        value.code: value.__name__
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.DeltackptError)
    }
    assert rows == classes


#: Absolute links to our own files, which README needs on PyPI: prefix to folder.
OWN_LINKS = {
    "https://deltackpt.github.io/deltackpt/": "docs",
    "https://github.com/deltackpt/deltackpt/blob/main/": "",
    "https://github.com/deltackpt/deltackpt/tree/main/": "",
    "https://raw.githubusercontent.com/deltackpt/deltackpt/main/": "",
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_absolute_links_to_own_pages_lead_to_a_file(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in LINK.findall(prose):
        for prefix, folder in OWN_LINKS.items():
            if link.startswith(prefix):
                target = REPOSITORY / folder / (link.removeprefix(prefix).rstrip("/") or "index")
                if not any(
                    target.with_name(target.name + end).exists() for end in ("", ".md", ".ipynb")
                ):
                    broken.append(link)
    assert broken == []


def script(name: str) -> ModuleType:
    """Imports a script of tools/."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_options_page_matches_the_dataclasses():
    written = (REPOSITORY / "docs" / "reference" / "options.md").read_text()
    assert written == script("options_page").page(), "run: make generated"


def test_the_ledger_of_deleted_tests_names_lines_and_tests_that_exist():
    replay = script("replay_breaks")
    assert replay.check(replay.ledger()) == []


def test_the_figures_match_their_script():
    for name, drawn in script("figures").figures().items():
        assert (REPOSITORY / "docs" / "assets" / name).read_text() == drawn, "run: make generated"


@pytest.mark.parametrize("name", sorted(script("figures").figures()))
def test_a_figure_is_small_and_accessible_and_loads_nothing(name):
    text = (REPOSITORY / "docs" / "assets" / name).read_text()
    assert len(text) < 30_000
    svg = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    title, description = svg.find(f"{space}title"), svg.find(f"{space}desc")
    assert title is not None and title.text and description is not None and description.text
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert not re.search(r"<script|<image|@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
