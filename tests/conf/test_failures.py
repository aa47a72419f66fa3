"""Which errors are a user's, and in what sentence."""

from __future__ import annotations

import errno
import os

import pytest

from conf.failures import in_one_sentence
from conf.schema import TrainConfig


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("path", ["/out/model.yaml", None])
def test_no_right_or_no_space_is_one_sentence_wherever_it_shows(code: int, path: str | None) -> None:
    named = [path] if path else []
    said = in_one_sentence(OSError(code, os.strerror(code), *named), TrainConfig, [])
    assert said == f"{path or 'a file'} cannot be used ({os.strerror(code)}). fix: another place, rights or space"


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone", "x"), ValueError("1"), OSError("plain")])
def test_other_errors_are_bugs_with_a_traceback(error: Exception) -> None:
    assert in_one_sentence(error, TrainConfig, []) is None
