"""Lists read entry by entry against the standard library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.formats.json_lists import read_lists

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
KEYS = st.sampled_from(["images", "annotations", "info", "other"])


def collect(path: Path) -> tuple[dict[str, list[Any]], set[str]]:
    taken: dict[str, list[Any]] = {"images": [], "annotations": []}
    return taken, read_lists(path, {key: values.append for key, values in taken.items()})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES | st.lists(VALUES)), st.booleans(), st.booleans())
def test_it_reads_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], indented: bool, escaped: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(content, indent=2 if indented else None, ensure_ascii=escaped), encoding="utf-8")
    taken, found = collect(path)
    for key in ("images", "annotations"):
        value = content.get(key)
        assert taken[key] == (value if isinstance(value, list) else [])
        assert (key in found) == isinstance(value, list)


@pytest.mark.parametrize(
    "entry", ["NaN", "-Infinity", "1e999", '"\\ud800"', "1" * 400, '{"a": [NaN]}', "-0.0", "1E-400"]
)
def test_what_only_python_reads(tmp_path: Path, entry: str) -> None:
    """Entries before and behind such a one are passed on once."""
    text = f'{{"annotations": [7], "images": [1, {entry}, 2], "info": null}}'
    (tmp_path / "a.json").write_text(text)
    taken, found = collect(tmp_path / "a.json")
    assert repr(taken["images"]) == repr(json.loads(text)["images"]) and taken["annotations"] == [7]
    assert found == {"images", "annotations"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "{]", '{"images": [1, 2', '{"images": [1 2]}', '{"images": [1,]}', '{"images": [{}]} x', '{"a": 1, }',
     '{"a" 1}', '{a: 1}', '{"images": [{"id": 1}', '{"a": tru', '{"a": 1 "b": 2}', "\x00\x01", '{"images": [NaN, 1'],
)  # fmt: skip
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)  # the standard library agrees
    with pytest.raises(ValueError, match=r"byte \d+|truncated|empty file|char \d+"):
        collect(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null", "[1, {}]"])
def test_a_top_level_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TypeError):
        collect(tmp_path / "a.json")


@pytest.mark.parametrize("entry", ["1", "NaN"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, entry: str) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"images": [%s]}' % entry.encode())
    assert str(collect(tmp_path / "a.json")[0]["images"]) == f"[{entry.lower()}]"


@pytest.mark.parametrize("entries", [("1", "2"), ("1", ""), ("1", "NaN"), ("NaN", "1"), ("1, 2", "3, NaN")])
def test_a_list_that_comes_twice_is_refused(tmp_path: Path, entries: tuple[str, str]) -> None:
    first, second = entries
    (tmp_path / "a.json").write_text(f'{{"images": [{first}], "images": [{second}]}}')
    with pytest.raises(ValueError, match="second list of 'images'"):
        collect(tmp_path / "a.json")


def test_an_error_about_an_entry_passes_through(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"images": [1]}')
    fault = DataError("no such image")

    def refuse(_: Any) -> None:
        raise fault

    with pytest.raises(DataError) as caught:
        read_lists(tmp_path / "a.json", {"images": refuse})
    assert caught.value is fault
