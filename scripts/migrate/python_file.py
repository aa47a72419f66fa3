"""Read a configuration that is written in Python, without running any of it.

It reads assignments, after those of the ``_base_`` files: constants, lists, dictionaries,
``dict(...)``, ``len(...)``, arithmetic and names assigned before. Any other expression stays text.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from conf.failures import ConfigError

KINDS = "Constant Name List Dict Subscript UnaryOp BinOp Call keyword".split()


class UnreadError(Exception):
    """In place of a value: an expression that was not evaluated, with its text.

    Nothing can be computed from it, so what would be is unread, too.
    """


class _Evaluator(EvalWithCompoundTypes):  # type: ignore[misc]
    """Evaluates expressions part by part, without calling anything but dict, len and the like."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(functions={"len": len}, names=names)
        del self.operators[ast.Not]
        kept = {kind: read for kind, read in self.nodes.items() if kind.__name__ in KINDS}
        # Attributes are keys, never methods.
        self.nodes: Any = {**kept, ast.Tuple: self._eval_list, ast.Attribute: lambda at: self._eval(at.value)[at.attr]}

    def _eval(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:  # may hold **more
            keys: list[ast.expr | None] = [ast.Constant(one.arg) if one.arg else None for one in node.keywords]
            node = ast.Dict(keys, [one.value for one in node.keywords])
        try:
            return super()._eval(node)
        except (InvalidExpression, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            return UnreadError(ast.unparse(node))


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
                given = _Evaluator({})._eval(value)
                for name in given if isinstance(given, list) else [given]:
                    base = merged(base, read_python(path.parent / str(name), (*seen, path)))
                names["_base_"] = base
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = _Evaluator(names)._eval(value)
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
