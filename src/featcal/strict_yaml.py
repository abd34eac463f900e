"""YAML as people mean it: YAML 1.2 scalars, no duplicate keys, and the line of every value for error messages."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from .errors import InputError

Loc = tuple[Any, ...]
"""Where a value sits in a document, e.g. ``("tasks", "cars", "data", "split")``."""

MOST = 100_000
"""Values of a document: a few nested aliases can stand for billions."""


class _Loader(yaml.SafeLoader):
    """`1e-5` is a number; `on`, `off`, `yes`, `no`, dates and `010` are text; keys are always text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or YAML 1.2 would take for something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_RESOLVERS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Loc, str]]:
    """The document, and where each of its values was written: ``{("base",): "recipe.yaml, line 4"}``.

    Raises:
        InputError: not YAML, more than one document, an unhashable key, or keys given twice (all of them).
    """
    places: dict[Loc, str] = {}
    repeated: list[str] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _walk(node, (), name, places, repeated, frozenset())
        value = loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(_problem(error, name)) from None
    if repeated:
        raise InputError("\n".join(repeated))
    return value, places


def dump_yaml(tree: Any) -> str:
    """Plain data as YAML in the given key order; `parse_yaml` and any YAML 1.1 or 1.2 reader give it back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def dotted(loc: Loc) -> str:
    """``("tasks", "a.b", "expert")`` as it is typed after `--set`: ``tasks."a.b".expert``."""
    parts = [str(part) for part in loc]
    bare = re.compile(r"[^.=\"'\s]+")
    return ".".join(part if bare.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in parts)


def _walk(
    node: yaml.Node,
    loc: Loc,
    name: str,
    places: dict[Loc, str],
    repeated: list[str],
    above: frozenset[int],
) -> None:
    """Notes the place of every value under `node`, and every key that comes twice."""
    places[loc] = f"{name}, line {node.start_mark.line + 1}"
    if len(places) > MOST:
        raise yaml.MarkedYAMLError(problem=f"more than {MOST:,} values (aliases count as what they stand for)")
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*loc, index), name, places, repeated, above)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key.start_mark)
            below, line = (*loc, key.value), key.start_mark.line + 1
            if key.value in first:
                again = f"{dotted(below)} is given twice; the first is on line {first[key.value]}"
                repeated.append(f"{name}, line {line}: {again}")
            first.setdefault(key.value, line)
            _walk(value, below, name, places, repeated, above)
            places[below] = f"{name}, line {line}"


def _problem(error: yaml.YAMLError | RecursionError, name: str) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "nested too deeply"
    mark = getattr(error, "problem_mark", None)
    hint = ""
    if "escape" in problem:
        hint = "; in double quotes a backslash starts an escape: put Windows paths in single quotes"
    elif "'\\t'" in problem:
        hint = "; indent with spaces, not tabs"
    return f"{name}{f', line {mark.line + 1}' if mark else ''}: not valid YAML: {problem}{hint}"
