"""Which errors are a user's, and in what sentence."""

from __future__ import annotations

import errno
import os

import pytest

from conf.failures import in_one_sentence
from conf.schema import TrainConfig


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_place_without_rights_or_space_is_one_sentence_wherever_it_shows(code: int) -> None:
    for path in ([], ["x.yaml"]):
        sentence = in_one_sentence(OSError(code, os.strerror(code), *path), TrainConfig, [])
        assert sentence is not None and sentence.startswith(f"{[*path, 'a file'][0]} cannot be used (")


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone", "x"), ValueError("1"), OSError("plain")])
def test_other_errors_are_bugs_with_a_traceback(error: Exception) -> None:
    assert in_one_sentence(error, TrainConfig, []) is None
