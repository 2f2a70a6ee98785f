"""Grammars of answers whose form a client asks for: JSON, a regular expression, or tool calls."""

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe
from llguidance import regex_to_lark

from dsv4_jax.engine.grammar import json_rule


def lark_grammar(constraint: recipe.OutputConstraint, thinks: bool, ids: Mapping[str, int]) -> str | None:
    """Writes the grammar of an answer.

    Args:
      constraint: what a client asks for, as deepseek-recipe puts it.
      thinks: whether the answer begins with reasoning, which may be any text.
      ids: the ids of the release's tokens by name.

    Returns:
      A Lark grammar; None if any text will do, as with tools that the model may call and that are not strict.
    """
    kind, schema = constraint.kind, constraint.schema
    match kind:
        case "json":
            rules = [f"answer: {json_rule(json.loads(schema) if schema else dict(type='object'))}"]
        case "regex":
            rules = [f"answer: /{regex_to_lark(schema, 'dw')}/"]
        case _:  # tool_call, tool_call_required
            functions = [tool["function"] for tool in json.loads(schema)]
            if kind == "tool_call" and not any(function.get("strict") for function in functions):
                return None
            rules = [f"dsml: <[{ids['｜DSML｜']}]>", *_call_rules(functions, kind == "tool_call_required")]
    start = f"ANY <[{ids['</think>']}]> answer" if thinks else "answer"
    return "\n".join([f"start: {start}", r"ANY: /(.|\n)*/", *rules])


def _call_rules(functions: list[dict[str, Any]], is_required: bool) -> list[str]:
    """Returns the rules of an answer with tool calls. The prompt of a required call ends where the calls begin."""
    rules = [
        "answer: calls" if is_required else r'answer: ANY | /(.|\n)*</ dsml "tool_calls>\n" calls',
        rf'calls: call ("\n" call)* "\n" {_close("tool_calls")}',
        r'string: /(.|\n)*<\// dsml "parameter>"',  # the text with the `</` behind it
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        schema = function.get("parameters") or {}
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for k, (name, value) in enumerate((schema.get("properties") or {}).items()):
            value = value | definitions if isinstance(value, dict) else {}
            rules.append(f"value_{i}_{k}: " + " | ".join(_values(name, value)))
            parts.append(f"value_{i}_{k}" if name in schema.get("required", ()) else f"value_{i}_{k}?")
        begin = _open(f'invoke name="{function["name"]}"')
        rules.append(f"call_{i}: " + " ".join([begin, r'"\n"', *parts, _close("invoke")]))
    return rules


def _values(name: str, schema: dict[str, Any]) -> list[str]:
    """Returns the ways to write a parameter: a string as it is, everything else as JSON."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is not None:
        texts = {x if isinstance(x, str) else json.dumps(x, ensure_ascii=False): isinstance(x, str) for x in values}
        return [_parameter(name, is_string, f"{_quote(x)} {_close('parameter')}") for x, is_string in texts.items()]
    found = [_parameter(name, True, "string")] if _may_be_string(schema) else []
    if schema.get("type") != "string":
        found.append(_parameter(name, False, f"{json_rule(schema)} {_close('parameter')}"))
    return found


def _parameter(name: str, is_string: bool, value: str) -> str:
    return rf'{_open(f'parameter name="{name}" string="{str(is_string).lower()}"')} {value} "\n"'


def _may_be_string(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    choices = schema.get("anyOf", schema.get("oneOf"))
    return any(_may_be_string(choice) for choice in choices) if choices else "$ref" not in schema


def _open(tag: str) -> str:
    return f'"<" dsml {_quote(tag + ">")}'


def _close(tag: str) -> str:
    return f'"</" dsml {_quote(tag + ">")}'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
