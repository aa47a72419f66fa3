"""Fixtures for all tests."""

from __future__ import annotations

import copy
import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Tests start a hundred programs; without .pyc files each would compile torch's source anew, which
# doubles the time of its import.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch  # noqa: E402 - after the lines above, which then hold for it, too

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Small networks are faster so, and the tests share the machine; the programs that they start
# inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
REPOSITORY = Path(__file__).resolve().parent.parent
SLOWEST = """test_programs test_package test_compile test_failing_rank test_export test_attack test_train
    test_platforms test_names test_eval test_bucket test_fused_norm test_fake_cuda test_forged test_resume
    test_run test_docs test_world_size""".split()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that all processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("release")}
    order = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: (order.get(item.path.stem, len(order)), item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape names that are not UTF-8 in what a test logged: pytest-xdist could not send them."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """Spare the garbage collector what the imports made: it would look at all of it many times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The reference material of CONTRIBUTING.md; tests skip where it is absent."""
    folder = Path(os.environ.get("YOLO_TEST_DATA", REPOSITORY.parent / "shared")).resolve()
    if not (folder / "darknet").is_dir() or not (folder / "data").is_dir():
        pytest.skip(f"no reference material in {folder}. fix: YOLO_TEST_DATA=<folder>, see CONTRIBUTING.md")
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests draw the same numbers in any order and selection."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Programs that a test runs in this process set handlers, and end only with it."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A headless Chromium of the system; skips without one."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium. fix: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """An empty tab of 1200 x 900 pixels; the test fails if it leaves an error in the console."""
    errors: list[str] = []
    tab = chromium.new_page(viewport={"width": 1200, "height": 900})
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    yield tab
    tab.close()
    assert not errors, errors


@pytest.fixture(scope="session", autouse=True)
def groups_composed_once() -> Iterator[None]:
    """Hydra takes a quarter of a second to compose; tests mostly vary values, not choices."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from conf import CONF_DIR, compose
    from conf.options import is_path

    original, trees = compose._composed, dict[tuple[object, ...], object]()
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}

    def composed(name: str, schema: type, overrides: list[str]) -> object:
        choices = [word for word in overrides if word.partition("=")[0] in groups]
        values = [word for word in overrides if word not in choices]
        of_files = any(is_path(word.partition("=")[2]) for word in choices)
        if of_files or not all(re.match(r"(?!hydra)[a-z]\w*(\.\w+)*=", word) for word in overrides):
            return original(name, schema, overrides)
        key = (name, schema, *choices)
        if key not in trees:
            trees[key] = original(name, schema, choices)
        tree = copy.deepcopy(trees[key])
        try:
            ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), tree)
        except Exception:
            return original(name, schema, overrides)  # which says it as users see it
        return tree

    compose._composed = composed
    yield
    compose._composed = original
