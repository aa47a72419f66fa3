"""The dependency rules of docs/design.md section 3, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("models", "data", "train_utils")
ENTRY_POINTS = ("train", "eval", "predict", "export")


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(part: str) -> list[Path]:
    found = sorted((REPOSITORY / part).rglob("*.py"))
    assert found, f"no source in {part}/"
    return found


@pytest.mark.parametrize("part", PARTS)
def test_parts_do_not_import_one_another_nor_what_joins_them(part: str) -> None:
    forbidden = {*PARTS, *ENTRY_POINTS, "conf", "scripts", "hydra", "omegaconf"} - {part}
    for path in sources(part):
        wrong = [name for name in imported_names(path) if name.split(".")[0] in forbidden]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"


@pytest.mark.parametrize("part", [*PARTS, "conf", "scripts"])
def test_one_file_knows_the_environment_and_with_that_of_the_group_torch_distributed(part: str) -> None:
    for path in sources(part):
        if path.relative_to(REPOSITORY) == Path("train_utils/distributed.py"):
            continue
        for name in imported_names(path):
            opens_it = path.relative_to(REPOSITORY) == Path("train_utils/processes/process_group.py")
            assert opens_it or not name.startswith("torch.distributed"), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in ("torch.distributed", "os.getenv"), path
                assert used != "os.environ" or part == "conf", path


def test_the_rule_finds_a_breach(tmp_path: Path) -> None:
    breach = tmp_path / "breach.py"
    breach.write_text("import torch\nfrom train_utils.log import Progress\nimport omegaconf.errors\n")
    assert list(imported_names(breach)) == ["torch", "train_utils.run.log.Progress", "omegaconf.errors"]
