"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
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
FAKE_CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
REPOSITORY = Path(__file__).resolve().parent.parent
SLOWEST = """test_gpu test_compile test_programs test_conformance test_train test_failing_rank test_bucket
    test_export test_forged test_package test_mirror test_resume test_eval test_docs test_world_size""".split()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that all processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: (order.get(item.path.stem, len(order)), item.path not in slow))


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
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FAKE_CAMERA])
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
