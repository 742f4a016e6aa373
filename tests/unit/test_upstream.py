"""Patches for other frameworks: each is a unified diff whose hunks are as long as they say, of a known revision."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[2] / "docs" / "upstream").glob("*.patch"))


def miscounted(patch: str) -> list[str]:
    """Return the headers of hunks whose lines are not as many as the header says."""
    wrong = []
    for header, body in re.findall(r"^(@@ .*)\n((?:[ +-].*\n|\n)*)", patch, flags=re.MULTILINE):
        lines = [line for line in body.split("\n")[:-1] if not line.startswith(("--- ", "+++ "))]
        numbers = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", header)
        assert numbers, header
        found = [sum(not line.startswith(sign) for line in lines) for sign in "+-"]
        if found != [int(number or 1) for number in numbers.groups()]:
            wrong.append(header)
    return wrong


def test_there_are_patches() -> None:
    assert [patch.stem for patch in PATCHES] == ["areal", "automodel", "llama-factory", "nemo-rl", "openrlhf"]


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_names_host_and_revision_and_adds_muonmesh(path: Path) -> None:
    text = path.read_text()
    header, _, diff = text.partition("diff --git ")
    assert re.search(r"^Host: [\w.-]+/[\w.-]+$", header, flags=re.MULTILINE)
    assert re.search(r"^Revision: [0-9a-f]{40}$", header, flags=re.MULTILINE)
    assert diff.count("\n@@ ") > 0
    assert miscounted(text) == []
    assert any("muonmesh" in line for line in diff.splitlines() if line.startswith("+"))
