"""Streamed json against the standard library, with windows that cut values anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.formats import json_stream
from data.formats.json_stream import stream_lists

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
KEYS = st.sampled_from(["images", "annotations", "info", "other"])


def collect(path: Path) -> tuple[dict[str, list[Any]], set[str]]:
    taken: dict[str, list[Any]] = {"images": [], "annotations": []}
    return taken, stream_lists(path, {key: values.append for key, values in taken.items()})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES | st.lists(VALUES)), st.sampled_from([1, 2, 3, 7, 1000]), st.booleans())
def test_it_reads_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], chunk: int, indented: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(content, indent=2 if indented else None, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "CHUNK", chunk)
        taken, found = collect(path)
    for key in ("images", "annotations"):
        value = content.get(key)
        assert taken[key] == (value if isinstance(value, list) else [])
        assert (key in found) == isinstance(value, list)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{]", '{"images": [1, 2', '{"images": [1 2]}', '{"images": [1,]}', '{"images": [{}]} x', '{"a": 1, }',
     '{"a" 1}', '{a: 1}', '{"images": [{"id": 1}', '{"a": tru', '{"a": 1 "b": 2}', "\x00\x01"],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 1000])
def test_what_is_no_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, chunk: int) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)  # the standard library agrees
    with pytest.raises(json.JSONDecodeError, match="at character"):
        collect(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null", "[1, {}]"])
def test_a_top_level_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TypeError):
        collect(tmp_path / "a.json")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"images": [1]}')
    assert collect(tmp_path / "a.json")[0]["images"] == [1]


def test_a_list_that_comes_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"images": [1], "images": [2]}')
    with pytest.raises(json.JSONDecodeError, match="second list of 'images'"):
        collect(tmp_path / "a.json")
