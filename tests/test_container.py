"""The image and the devcontainer: what they name exists.

No image is built here; docs/machines/container.md says what was built, and how.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.test_docs import check, own_files  # noqa: F401  (a fixture)

REPOSITORY = Path(__file__).resolve().parent.parent


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined: (``RUN``, its text)."""
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(words[0], words[2]) for line in text.splitlines() if (words := line.partition(" "))[0]]


def test_each_stage_of_the_image_is_made_of_what_is_here() -> None:
    found = instructions()
    stages = [words.split()[-1] for name, words in found if name == "FROM"]
    assert [words.split()[0] for name, words in found if name == "FROM"] == ["${BASE}", *stages[:-1]]
    copied = [[word for word in words.split() if not word.startswith("--")] for name, words in found if name == "COPY"]
    assert copied == [["pyproject.toml", "./"], [".", "./"]], "packages must not be installed anew for each change"
    assert [words for name, words in found if name == "USER"][-1] == "yolo", "it must not run as root"
    command = json.loads(next(words for name, words in found if name == "CMD"))
    assert command[0] == "python" and (REPOSITORY / command[1]).exists()
    devcontainer = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    assert devcontainer["build"]["target"] in stages
    assert (REPOSITORY / ".devcontainer" / devcontainer["build"]["dockerfile"]).resolve() == REPOSITORY / "Dockerfile"
    assert f"useradd --create-home --uid 1000 --shell /bin/bash {devcontainer['remoteUser']}" in str(found)


def test_what_git_ignores_stays_out_of_the_image() -> None:
    left_out = {line.strip("/").removeprefix("**/") for line in (REPOSITORY / ".dockerignore").read_text().splitlines()}
    for line in (REPOSITORY / ".gitignore").read_text().splitlines():
        name = line.strip("/")
        covered = {name, re.sub(r"^\.\w+_cache$", ".*_cache", name)}
        assert line.startswith("#") or covered & left_out, f".dockerignore lacks {name}"


def test_the_commands_of_the_page_are_taken(own_files: Path) -> None:  # noqa: F811
    page = (REPOSITORY / "docs" / "machines" / "container.md").read_text()
    commands = re.findall(r"^    docker run .*? yolo (.+)$", page.replace("\\\n", ""), re.M)
    assert len(commands) >= 4
    for command in commands:
        check(command, own_files)
    given = {words.partition("=")[0] for name, words in instructions() if name == "ARG"}
    assert given == set(re.findall(r"`([A-Z_]+)`", page)), "the page lists the build arguments"
