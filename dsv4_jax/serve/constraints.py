"""Grammars that constrain answers to the form that a client asks for: JSON, a regular expression, or tool calls.

A schema is a JSON schema, which is a dict or a bool. Before it is validated, it may be any JSON value.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence

import deepseek_recipe as recipe
from llguidance import regex_to_lark

from dsv4_jax.engine.grammar import Grammar, json_fault, json_rule
from dsv4_jax.serve.call_blocks import CALL_TOKEN, V4_TAGS, CallTags


_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions"}
# At the top of a tool's schema, the grammar of the tool's calls takes these keywords into account.
_CALL_KEYWORDS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
# The values of these keywords of a JSON schema are dicts of schemas.
_PARTS_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# The values of these keywords are schemas, or lists or dicts of schemas. Definitions come first, so that an error names
# the definition at fault and not a reference to it.
_WITH_PARTS = (*_PARTS_BY_NAME, "prefixItems", "items", "anyOf", "oneOf", "allOf", "additionalProperties")
_WITH_PARTS += ("additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_WITH_PARTS += ("unevaluatedItems", "unevaluatedProperties")


def compile_form(
    conversation: recipe.Conversation,
    prompt: Sequence[int],
    ids: Mapping[str, int],
    strict: Collection[str],
    compile_lark: Callable[[str], Grammar],
    tags: CallTags = V4_TAGS,
) -> Grammar | None:
    """Compiles the grammar that constrains an answer.

    Args:
      conversation: the conversation, with the form of the answer and the tools.
      prompt: token ids of the conversation. If the last one is `<think>`, the answer begins with reasoning, which is
        not constrained.
      ids: {name: id} of the release's special tokens.
      strict: names of the strict tools, whose calls must follow their schemas in full. In calls of other tools, a value
        may be anything if its schema cannot be enforced.
      compile_lark: function that compiles a grammar in Lark's syntax; it raises ValueError if it cannot.
      tags: how the model writes the tags of tool calls.

    Returns:
      The grammar. None if any text is allowed: no form is asked for, no tool call is required, and no tool is strict.

    Raises:
      ValueError: the form cannot be enforced; the message names the place in the schema. Or the answer continues a
        message that the prompt begins, to which no form can apply.
    """
    tools = conversation.tools
    kind = conversation.response_format
    is_required = conversation.tool_choice == "required"
    if kind == "text" and not is_required and not any(tool.name in strict for tool in tools):
        return None
    if any(message.prefix for message in conversation.messages):
        raise ValueError("a continued message takes any text")

    def lark(enforce):
        """Returns the grammar as text. `enforce` replaces the schemas in it, see `_enforced`."""
        rules = [r"ANY: /(.|\n)*/"]
        match kind:
            case "json_object":
                rules.append(f"form: {json_rule({'type': 'object'})}")
            case "json_schema":
                schema = conversation.response_schema
                rules.append(f"form: {json_rule(enforce(schema, schema, ''))}")
            case "regex":
                rules.append(f"form: /{regex_to_lark(conversation.response_regex or '', 'dw')}/")
        forms = ["ANY"] if kind == "text" else ["form"]
        if is_required:  # the prompt ends where the calls begin
            forms = ["calls"]
        elif tools:  # calls may follow any text, or stand in place of a form
            before_calls = r"/(.|\n)*</" if kind == "text" else r'"\n\n<"'
            forms.append(rf'{before_calls} dsml "{tags.block}>\n" calls')
        if tools:
            rules += [f"dsml: <[{ids[CALL_TOKEN]}]> {_quote(tags.gap)}", *_call_rules(tools, tags, strict, enforce)]
        start = f"ANY <[{ids['</think>']}]> answer" if prompt[-1] == ids.get("<think>") else "answer"
        return "\n".join([f"start: {start}", f"answer: {' | '.join(forms)}", *rules])

    try:
        return compile_lark(lark(lambda schema, whole, name: schema))
    except ValueError:  # checks each schema by itself, to relax or to name those that cannot be enforced
        return compile_lark(lark(_enforced))


def _enforced(schema, whole, strict_tool):
    """Returns the given schema if a grammar can enforce it.

    If it cannot, a tool that is not strict gets a schema that allows any value. In all other cases, raises ValueError.

    Args:
      schema: the schema.
      whole: the whole schema that contains it.
      strict_tool: name of a strict tool; None for other tools, and "" for the schema of the answer.
    """
    is_lenient = strict_tool is None
    if not (fault := json_fault(schema, is_lenient)):
        return schema
    if is_lenient:
        return {}
    moved = _moved(whole)
    path, fault = next(_faults(moved, moved), ((), fault))
    part = ".".join([*([f"tool {strict_tool!r}"] if strict_tool else []), "schema", *path])
    raise ValueError(f"{part}: {fault}")


def _faults(schema, whole):
    """Yields (path, reason) of each part of a schema that cannot be enforced, a part before the parts that contain it.

    References are looked up in `whole`, a result of `_moved`.
    """
    if isinstance(schema, bool):
        return
    for path, part in _parts(schema):
        for path_in_part, fault in _faults(part, whole):
            yield (*path, *path_in_part), fault
    if fault := json_fault(_alone(schema, whole)):
        yield (), fault


def _parts(schema):
    """Yields (path, schema) of the schemas that are direct parts of a schema."""
    if not isinstance(schema, dict):
        return
    for key in _WITH_PARTS:
        value = schema.get(key)
        if isinstance(value, list):
            yield from (((f"{key}[{i}]",), part) for i, part in enumerate(value))
        elif isinstance(value, dict) and key in _PARTS_BY_NAME:
            yield from (((key, name), part) for name, part in value.items())
        elif value is not None:
            yield (key,), value


def _moved(schema):
    """Rewrites a schema's references, so that they stay valid if it becomes the definition `_` of another schema."""
    return json.loads(json.dumps(schema).replace('"$ref": "#', '"$ref": "#/$defs/_'))


def _alone(part, moved):
    """Returns a part of a schema. If the part has references, adds `moved`, which they refer to, as a definition."""
    has_references = isinstance(part, dict) and '"$ref"' in json.dumps(part)
    return part | {"$defs": {"_": moved}} if has_references else part


def _call_rules(tools, tags, strict, enforce):
    """Returns the grammar's rules for a block of tool calls, from the end of its opening tag on."""
    rules = [
        rf'calls: call ("\n" call)* "\n" {_close(tags.block)}',
        r'string: /(.|\n)*<\// dsml "parameter>"',  # a text with the closing tag
        r'NAME: /[^"\\<>\x00-\x1f]+/',
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        strict_tool = tool.name if tool.name in strict else None
        parts = []
        for k, (name, value, is_needed) in enumerate(_parameters(tool.parameters, strict_tool)):
            value = enforce(value, tool.parameters, strict_tool)
            rules.append(f"value_{i}_{k}: " + " | ".join(_values(name, value, strict_tool is not None)))
            quantifier = "*" if name is None else "" if is_needed else "?"
            parts.append(f"value_{i}_{k}{quantifier}")
        begin = f'"<" dsml {_quote(f'invoke name="{tool.name}">')}'
        rules.append(f"call_{i}: " + " ".join([begin, r'"\n"', *parts, _close("invoke")]))
    return rules


def _parameters(schema, strict_tool):
    """Yields (name, schema, whether it is required) of each parameter of a tool.

    With the name None, the schema is that of any number of parameters with any names. Raises ValueError if a strict
    tool's schema has a keyword that is not supported at the top.
    """
    schema = schema if isinstance(schema, dict) else {}
    unknown = sorted(schema.keys() - _CALL_KEYWORDS)
    if strict_tool is not None and unknown:
        raise ValueError(f"tool {strict_tool!r}.schema.{unknown[0]}: a strict tool has no such keyword at the top")
    moved = _moved(schema)
    additional = moved.get("additionalProperties", True)
    properties = moved.get("properties")
    required = moved.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    # A required name without a schema of its own gets the schema of additional properties.
    for name in dict.fromkeys([*properties, *required]):
        value = properties.get(name, additional)
        if value is not False or name in required:
            yield name, _alone(value, moved), name in required
    # Only a schema without properties allows parameters of any name.
    if not properties and additional is not False:
        yield None, _alone(additional, moved), False


def _values(name, schema, is_strict):
    """Returns the grammar's alternatives for a parameter. Strings are written as they are, other values as JSON."""
    strings, json_schema = _split({} if schema is True else schema, is_strict)
    values = [_parameter(name, True, string) for string in strings]
    if json_schema is not None:
        values.append(_parameter(name, False, f"{json_rule(json_schema, not is_strict)} {_close('parameter')}"))
    return values


def _split(schema, is_strict):
    """Divides a schema into strings, which calls write as they are, and values that calls write as JSON.

    Strings of a strict tool are written as JSON, too, if the schema has keywords that rules for plain strings cannot
    express.

    Returns:
      (strings, json_schema). `strings` are the grammar's alternatives for plain strings. `json_schema` is the schema of
      the values in JSON, or None if there are none.
    """
    if not isinstance(schema, dict):
        return [], schema
    keys = schema.keys() - _ANNOTATIONS
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and (not is_strict or keys <= {"type", "enum", "const"}):
        texts = [x for x in choices if isinstance(x, str)] if _may_be_string(schema) else []
        values = [x for x in choices if not isinstance(x, str)]
        strings = [f"{_quote(text)} {_close('parameter')}" for text in texts]
        return strings, (schema | {"enum": values} if values else None)
    if not _may_be_string(schema):
        return [], schema
    # Other types than strings are written as JSON.
    json_schema = None if schema.get("type") == "string" else schema
    if not is_strict or keys <= {"type"}:
        return ["string"], json_schema
    if keys <= {"type", "minLength", "maxLength"} and all(isinstance(schema[key], int) for key in keys - {"type"}):
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        return [rf'/(?s:.){length}<\// dsml "parameter>"'], json_schema
    if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
        return [string for part in schema["anyOf"] for string in _split(part, True)[0]], schema
    return [], schema


def _parameter(name, is_string, value):
    """Returns the grammar's text for a parameter with a value, closing tag included. The name None = any name."""
    end = f'" string="{str(is_string).lower()}">'
    if name is not None:
        return rf'"<" dsml {_quote(f'parameter name="{name}{end}')} {value} "\n"'
    return rf'"<" dsml {_quote('parameter name="')} NAME {_quote(end)} {value} "\n"'


def _may_be_string(schema):
    """Returns whether a schema may allow strings. A reference counts as a schema without strings."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    choices = schema.get("anyOf", schema.get("oneOf"))
    return any(map(_may_be_string, choices)) if isinstance(choices, list) else "$ref" not in schema


def _close(tag):
    """Returns the grammar's text for a closing tag."""
    return f'"</" dsml {_quote(tag + ">")}'


def _quote(text):
    """Returns a text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
