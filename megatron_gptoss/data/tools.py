"""How tools are described to the model: `functions.*` in the developer message, the built-in `python` tool in the system message.

In: tools with JSON schemas. Out: the texts that openai-harmony writes for them, without its vocabulary, so that a tiny model can be told of
tools too. It covers objects, arrays, strings, enums, numbers and booleans, and refuses a schema that says more (openai-harmony 0.0.8
passes over what it does not know, and the model would never hear of it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai_harmony import ToolNamespaceConfig

SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
KEYS = {"type", "description", "properties", "required", "items", "enum", "default"}
STATELESS_PYTHON = (
    "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool should be used for "
    "internal reasoning, but not for code that is intended to be visible to the user (e.g. when creating plots, tables, or files).\n\n"
    "When you send a message containing Python code to python, it will be executed in a fresh, stateless interpreter without a network. "
    "python will respond with what the code prints, so print what you want to see, or time out after {timeout_s:g} seconds."
)


@dataclass(frozen=True)
class Tool:
    """A function the model may call as functions.NAME. `parameters`: a JSON schema of type object, None for a function without any."""

    name: str
    description: str
    parameters: Mapping[str, Any] | None = None


def functions_text(tools: Sequence[Tool], instructions: str = "") -> str:
    """A developer message that lists functions. ValueError for a schema that cannot be shown, with the tool and the place."""
    lines = ["## functions\n", "namespace functions {\n"]
    for tool in tools:
        lines += [f"// {line}" for line in tool.description.splitlines()]
        shown = "" if tool.parameters is None else f"_: {_type_of(tool.parameters, '', tool.name)}"
        lines.append(f"type {tool.name} = ({shown}) => any;\n")
    lines.append("} // namespace functions")
    return "\n\n".join([*(["# Instructions", instructions] if instructions else []), "# Tools", "\n".join(lines)])


def python_text(description: str = "") -> str:
    """The section of a system message that gives the model the built-in python tool, described as in its training unless told otherwise.

    The built-in description promises a stateful notebook. Where there is none, STATELESS_PYTHON says what there is.
    """
    return f"# Tools\n\n## python\n\n{description or ToolNamespaceConfig.python().description}"


def _type_of(schema: Mapping[str, Any], indent: str, where: str) -> str:
    """TypeScript of a schema, as openai-harmony writes it."""
    unknown = set(schema) - KEYS
    if unknown:
        raise ValueError(f"tool {where}: the schema says {', '.join(sorted(unknown))}, which cannot be shown to the model; leave it out")
    kind = schema.get("type")
    if kind == "object":
        return _object(schema, indent, where)
    if kind == "array":
        return f"{_type_of(schema['items'], indent, where + '[]')}[]" if "items" in schema else "Array<any>"
    if kind == "string" and schema.get("enum"):
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if not isinstance(kind, str) or kind not in SCALARS:
        raise ValueError(f"tool {where}: type {kind!r} cannot be shown to the model; use object, array, {', '.join(SCALARS)}")
    return SCALARS[kind]


def _object(schema: Mapping[str, Any], indent: str, where: str) -> str:
    out = f"{indent}// {schema['description']}\n" if "description" in schema else ""
    out += "{\n"
    for name, each in schema.get("properties", {}).items():
        if "description" in each:
            if "\n" in each["description"]:
                raise ValueError(f"tool {where}.{name}: the description of a parameter must be one line")
            out += f"{indent}// {each['description']}\n"
        optional = "" if name in schema.get("required", ()) else "?"
        out += f"{indent}{name}{optional}: {_type_of(each, indent + '    ', f'{where}.{name}')},{_default(each)}\n"
    return out + f"{indent}}}"


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str):  # their quotes are not escaped
        return f" // default: {value}" if schema.get("enum") else f' // default: "{value}"'
    return f" // default: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"
