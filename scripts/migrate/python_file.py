"""Read a configuration that is written in Python, without running any of it.

It reads assignments of constants, lists, dictionaries, ``dict(...)``, arithmetic and names assigned
before, after those of the ``_base_`` files. Any other expression stays text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from conf.failures import ConfigError

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mult: operator.mul,
}  # fmt: skip


class Unread(str):
    """The text of an expression that was not evaluated."""


def read_python(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values that a file and its ``_base_`` files assign, by name; dictionaries are merged.

    Raises ConfigError for a file that is missing, includes itself or is not Python.
    """
    path = path.absolute()
    if path in seen or len(seen) > 20:
        raise ConfigError(f"{path} includes itself by _base_. fix: take that out")
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). fix: correct _base_") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no Python file ({error}). fix: name an MMYOLO configuration") from error
    base: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_base_")], value=value):
                given = _value(value, {})
                for name in [given] if isinstance(given, str) else given:
                    base = merged(base, read_python(path.parent / name, (*seen, path)))
                names["_base_"] = base
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = _value(value, names)
    names.pop("_base_", None)
    return merged(base, names)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, dictionaries merged unless they hold ``_delete_=True``."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            inner = result.get(key)
            kept = inner if isinstance(inner, dict) and not value.get("_delete_") else {}
            result[key] = merged(kept, {name: part for name, part in value.items() if name != "_delete_"})
        else:
            result[key] = value
    return result


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression; Unread if it is of no kind in this module's docstring."""
    value = partial(_value, names=names)
    try:
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.List(elts=items) | ast.Tuple(elts=items):
                lists = (value(item.value) if isinstance(item, ast.Starred) else [value(item)] for item in items)
                return list(chain.from_iterable(lists))
            case ast.Dict(keys=keys, values=values):
                return {value(key): value(of) for key, of in zip(keys, values, strict=True) if key is not None}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                parts = (value(each.value) if each.arg is None else {each.arg: value(each.value)} for each in keywords)
                return dict(chain.from_iterable(part.items() for part in parts))
            case _:
                return _computed(node, names, value)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError):
        return Unread(ast.unparse(node))


def _computed(node: ast.expr, names: Mapping[str, Any], value: Callable[[ast.expr], Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=tree, attr=key):
            return value(tree)[key]
        case ast.Subscript(value=tree, slice=index):
            return value(tree)[value(index)]
        case ast.Call(func=ast.Name(id="len"), args=[tree]):
            return len(value(tree))
        case ast.UnaryOp(op=ast.USub(), operand=number):
            return -value(number)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = value(left), value(right)
            numbers = isinstance(first, int | float) and isinstance(second, int | float)
            if numbers or isinstance(op, ast.Add):  # 10**9 * "a" would fill the memory
                return OPERATORS[type(op)](first, second)
    raise ValueError
