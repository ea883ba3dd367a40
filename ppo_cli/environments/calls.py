"""Tool calls as each family of models writes them, read from its chat template.

`derive_format` renders an assistant message with probe calls and reads which text surrounds their
names and arguments. Four forms cover most templates: a JSON object that contains the name (Qwen,
Llama, Mistral v3), a name followed by a JSON object (DeepSeek, Mistral v11, Gemma 4), a name
followed by tagged keys and values (GLM, Qwen3.5), and a call as Python writes it (LFM2). The
channels of gpt-oss have their own reader, because its models write other headers than its template.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from ppo_cli.errors import first_line
from ppo_cli.records import Message
from ppo_cli.thoughts import MARKS, count_shared, find_thoughts, remove_thoughts

Render = Callable[[Sequence[Message], bool], str]  # messages, whether the assistant is next
Schemas = Sequence[Mapping[str, Any]]
# What the probe calls contain: texts that no template writes by itself.
NAMES, IDS = ("probealpha", "probebeta"), ("idalpha01", "idbeta002")
KEYS, VALUES = ("keyalpha", "keybeta"), ("valuealpha", "valuebeta")
ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
BACKSLASH = "probe\\slash"
# As JSON and as Python (and Jinja) write them.
CONSTANTS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


class Call(NamedTuple):
    """A call that the policy wrote; `call_id` is "" if the family writes none."""

    name: str
    arguments: dict[str, Any]
    call_id: str = ""


class Reading(NamedTuple):
    """The parts of a response."""

    content: str
    reasoning: str
    calls: list[Call]


class CallError(ValueError):
    """A call that cannot be read; the message is for the policy."""


class CallFormat(Protocol):
    """Reads a response with calls."""

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        ...


def make_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Return a call as chat templates take it. Mistral requires ids of nine letters or digits."""
    return {
        "type": "function", "id": call_id, "function": {"name": name, "arguments": arguments},
    }  # fmt: skip


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool from its schema."""
    return str(tool.get("function", tool)["name"])


def split_thoughts(text: str) -> tuple[str, str]:
    """Return a response without its thoughts, and the thoughts without their marks."""
    spans = find_thoughts(text)
    thoughts = [MARKS.sub("", text[span.start : span.end]).strip() for span in spans]
    return remove_thoughts(text, spans), "\n".join(thoughts)


def check_call(name: Any, arguments: Any, call_id: Any, *, example: str) -> Call:
    """Return a call; CallError if its name is not a text or its arguments are not an object."""
    if not isinstance(name, str) or not name.strip():
        raise CallError(f"The tool call has no name. Write {example}.")
    if not isinstance(arguments, dict):
        raise CallError(f"The arguments of the tool call are not a JSON object. Write {example}.")
    # Templates write the id, and Mistral's refuses any other.
    valid = isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id)
    return Call(name.strip(), arguments, call_id if valid else "")


def decode_json(text: str, example: str) -> tuple[Any, str]:
    """Return the JSON value at the start of a text, and the rest; CallError if there is none."""
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos + 1}"
    except UnicodeEncodeError:
        what = "half of a surrogate pair"
    except (RecursionError, ValueError):  # or a number with thousands of digits
        what = "nested too deeply, or NaN"
    else:
        return value, text[end:]
    raise CallError(f"The tool call is not valid JSON ({what}). Write {example}.")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


@dataclass(frozen=True)
class JsonCalls:
    """Calls in JSON: an object with a name in it, or a name, `middle` and an object.

    `opening` and `closing` surround each call, or a list of calls; if there is no opening, a whole
    response is a call or not. The paths are keys of the object. `quote` replaces quotation marks
    in a dialect with bare keys (Gemma 4). `wrappers` surround all calls.
    """

    opening: str
    closing: str
    wrappers: tuple[str, str]
    example: str
    paths: tuple[tuple[str, ...], ...] = ()  # of the name, the arguments, the id
    middle: str = ""  # a regular expression, in which the group `id` may be
    quote: str = ""

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        visible, reasoning = split_thoughts(text)
        if not self.opening:
            visible = visible.strip().removeprefix("<|python_tag|>").strip()
            keys = "|".join({path[0] for path in self.paths[:2]} | {"type"})
            if not re.match(rf'\{{\s*"({keys})"\s*:', visible):
                return Reading(visible, reasoning, [])
            visible, chunks = "", [visible]
        else:
            visible, *chunks = visible.split(self.opening)
        # Text after a call is content.
        calls: list[Call] = []
        for chunk in chunks:
            calls_here, rest = self._read_chunk(chunk.strip())
            calls += calls_here
            visible += rest.strip().removeprefix(self.closing)
        for wrapper in self.wrappers if calls else ():
            visible = visible.replace(wrapper, "")
        return Reading(visible.strip(), reasoning, calls)

    def _read_chunk(self, chunk: str) -> tuple[list[Call], str]:
        if self.paths:
            value, rest = decode_json(chunk, self.example)
            items = value if isinstance(value, list) else [value]
            parts = [[_follow(item, path) for path in self.paths] for item in items]
            return [check_call(*part, example=self.example) for part in parts], rest
        # The name is before the object.
        mark = re.search(self.middle, chunk)
        if not mark:
            raise CallError(f"The tool call has no arguments. Write {self.example}.")
        text, closing, after = chunk[mark.end() :], "", ""
        if self.quote:
            text, closing, after = text.partition(self.closing)
            text = _quote(text, self.quote)
        value, rest = decode_json(text.lstrip(), self.example)
        call_id = mark.groupdict().get("id")
        call = check_call(chunk[: mark.start()], value, call_id, example=self.example)
        return [call], rest + closing + after


@dataclass(frozen=True)
class TaggedCalls:
    """Calls whose arguments are keys and values between tags; values of texts have no quotes.

    `wrappers` surround all calls. `before_value` and `after_value` are the white space that the
    template writes around each value, which does not belong to it.
    """

    opening: str
    closing: str
    wrappers: tuple[str, str]
    example: str
    tools: Schemas
    name_end: str  # "" if the first key ends the name
    key_opening: str
    key_closing: str
    value_closing: str
    before_value: str
    after_value: str

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        visible, reasoning = split_thoughts(text)
        visible, *chunks = re.split(_loosen(self.opening), visible)
        calls: list[Call] = []
        for chunk in chunks:
            body, *rest = re.split(_loosen(self.closing), chunk, maxsplit=1)
            if not rest:
                raise CallError(f"The tool call is not closed. Write {self.example}")
            calls.append(self._read_body(body))
            visible += rest[0].strip()
        for wrapper in self.wrappers if calls else ():
            visible = visible.replace(wrapper, "")
        return Reading(visible.strip(), reasoning, calls)

    def _read_body(self, body: str) -> Call:
        name, *pieces = re.split(_loosen(self.key_opening), body)
        name = name.strip().removesuffix(self.name_end).strip()
        arguments = {}
        for piece in pieces:
            # A text may contain the closing mark: the last one is the template's.
            value, closed, _ = piece.rpartition(self.value_closing)
            key, *rest = re.split(_loosen(self.key_closing), value, maxsplit=1)
            if not closed or not rest:
                raise CallError(f"An argument of the tool call is not closed. Write {self.example}")
            text = rest[0].removeprefix(self.before_value).removesuffix(self.after_value)
            arguments[key.strip()] = self._convert(name, key.strip(), text)
        return check_call(name, arguments, "", example=self.example)

    def _convert(self, name: str, key: str, text: str) -> Any:
        schemas = {tool_name(tool): tool.get("function", tool) for tool in self.tools}
        parameters = schemas.get(name, {}).get("parameters") or {}
        return read_value(text, (parameters.get("properties") or {}).get(key), parameters)


JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_SCHEMA_DEPTH = 8


def read_value(text: str, schema: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the value of a text without quotes, which is a text if its schema allows only that.

    `parameters` is the schema that `$ref` refers to. A schema of texts and other types reads what
    is written exactly as a value of the other types: `0123` stays a text, `5` may be a number.
    """
    types, listed = read_schema(schema, parameters)
    if text in listed:
        return text
    for value in listed:
        if not isinstance(value, str) and text.strip() in (json.dumps(value), str(value)):
            return value
    if types == {"string"}:
        return text
    if text.strip() in CONSTANTS:
        constant = CONSTANTS[text.strip()]
        allowed = not types or ("null" if constant is None else "boolean") in types
        return constant if allowed or "string" not in types else text
    # Containers may be in Python's notation, too.
    try:
        value = _read_container(text.strip())
    except ValueError:
        return text
    if isinstance(value, str):
        return text  # its quotation marks belong to it
    exact = json.dumps(value) == text or isinstance(value, (list, dict))
    return value if "string" not in types or (exact and _json_type(value) & types) else text


def read_schema(
    schema: Any, parameters: Mapping[str, Any], depth: int = 0
) -> tuple[set[str], list[Any]]:
    """Return the types that a schema allows (empty: all), and the values that it lists."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return set(), []
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target: Any = parameters
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return read_schema(target, parameters, depth + 1)
    kinds = schema.get("type") or []
    types = {str(kind).lower() for kind in ([kinds] if isinstance(kinds, str) else kinds)}
    types |= {"integer"} if "number" in types else set()  # each integer is a number
    listed = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    for key in ("anyOf", "oneOf", "allOf"):
        parts = [read_schema(part, parameters, depth + 1) for part in schema.get(key) or ()]
        listed += [value for _, values in parts for value in values]
        # A condition beside others may say nothing of the type; an alternative then allows all.
        kinds = [part for part, values in parts if part or not (values or key == "allOf")]
        if kinds and all(kinds):
            allowed = set.intersection(*kinds) if key == "allOf" else set.union(*kinds)
            types = types & allowed or allowed
    if types and schema.get("nullable"):
        types.add("null")
    return (types if types <= JSON_TYPES else set()), listed


def _json_type(value: Any) -> set[str]:
    """Return the types of JSON schemas that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{float: "number", list: "array", dict: "object"}[type(value)]}


def _read_container(text: str) -> Any:
    """Return the value of a text of JSON, or of Python's notation for lists and objects.

    Raises ValueError for other texts.
    """
    try:
        value, rest = decode_json(text, "")
    except CallError:
        if text[:1] not in ("[", "{", "("):
            raise
        try:
            # Tuples become lists; what JSON cannot write is refused.
            written = json.dumps(ast.literal_eval(text), ensure_ascii=False)
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return decode_json(written, "")[0]
    if rest.strip():
        raise ValueError("text after the value")
    return value


# A text in quotes with its escapes; such a text or a bracket.
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_BRACKET = re.compile(rf"{_QUOTED.pattern}|[\[\](){{}}]", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\n": ""}


@dataclass(frozen=True)
class PythonCalls:
    """Calls as Python writes them, in a list or on lines: `[name(key='text', other=[1, 2])]`.

    `opening` and `closing` surround all calls; without an opening, a whole response is calls or
    not. `literal_quote` is the quotation mark in which the template writes texts without escapes,
    "" if it escapes them.
    """

    opening: str
    closing: str
    example: str
    literal_quote: str

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        visible, reasoning = split_thoughts(text)
        if self.opening:
            visible, *chunks = visible.split(self.opening)
        elif re.match(r"\s*\[\s*[\w.]+\(", visible):
            visible, chunks = "", [visible]
        else:
            return Reading(visible.strip(), reasoning, [])
        calls: list[Call] = []
        for chunk in chunks:
            rest = chunk.strip().removeprefix("[")
            # A comma, a line break or nothing divides calls.
            while mark := re.match(r"[\s,]*([\w.-]+)\s*\(\s*", rest):
                arguments, rest = self._read_arguments(rest[mark.end() :])
                calls.append(check_call(mark[1], arguments, "", example=self.example))
            rest = rest.strip().removeprefix("]").strip()
            if not calls or not rest.startswith(self.closing):
                raise CallError(f"The tool call cannot be read at {rest[:20]!r}. {self._advice()}")
            visible += rest.removeprefix(self.closing)
        return Reading(visible.strip(), reasoning, calls)

    def _read_arguments(self, text: str) -> tuple[dict[str, Any], str]:
        """Return the arguments up to the closing bracket, and the text after it."""
        arguments: dict[str, Any] = {}
        while not text.startswith(")"):
            key = re.match(r"([\w.-]+)\s*=\s*", text)
            if key is None:
                raise CallError(f"An argument of the tool call has no name. {self._advice()}")
            arguments[key[1]], text = self._read_argument(text[key.end() :])
            text = text.lstrip()
            if not text.startswith((",", ")")):
                raise CallError(f"The tool call is not closed. {self._advice()}")
            text = text.removeprefix(",").lstrip()
        return arguments, text[1:]

    def _read_argument(self, text: str) -> tuple[Any, str]:
        """Return the value at the start of a text, and the rest."""
        quote = text[:1]
        if quote and quote == self.literal_quote:
            # It ends where an argument can end, as it may contain its quotation mark.
            end = re.search(rf"{quote}(?=\s*(?:,\s*[\w.-]+\s*=|\)\s*(?:[,\]\n<]|$)))", text[1:])
            if end is not None:
                return text[1 : end.start() + 1], text[end.end() + 1 :]
        if quoted := _QUOTED.match(text):
            return _unescape(quoted.group()), text[quoted.end() :]
        end_at = _find_end(text) if quote in ("[", "{", "(") else -1
        word = re.match(r"[^\s,()\[\]{}'\"]+", text)
        end_at = word.end() if word else end_at
        try:
            written = text[: max(end_at, 0)]
            value = CONSTANTS[written] if written in CONSTANTS else _read_container(written)
        except ValueError:
            shown = text[:20]
            raise CallError(f"The value {shown!r} cannot be read. {self._advice()}") from None
        return value, text[end_at:]

    def _advice(self) -> str:
        return f"Write {self.example}."


def _find_end(text: str) -> int:
    """Return where the brackets that a text opens are closed, -1 if they are not."""
    depth = 0
    for mark in _BRACKET.finditer(text):
        depth += (mark.group() in "([{") - (mark.group() in ")]}")
        if depth == 0:
            return mark.end()
    return -1


def _unescape(quoted: str) -> str:
    """Return the text between quotation marks, in the notation of JSON or Python."""
    if quoted.startswith('"'):
        try:
            return str(json.loads(quoted, strict=False))
        except ValueError:
            pass

    def decode(match: re.Match[str]) -> str:
        mark = match[1]
        return chr(int(mark[1:], 16)) if mark[1:] else _ESCAPED.get(mark, mark)

    return _ESCAPE.sub(decode, quoted[1:-1])


class NoCalls:
    """A response to which no tools were shown: what looks like a call is text."""

    def read(self, text: str) -> Reading:
        """Return the parts of a response."""
        return Reading(*split_thoughts(text), [])


class ChannelCalls:
    """Messages of gpt-oss: a header names the channel, and the recipient of a call.

    The recipient is in the role (as the template writes it) or in the channel (as models do).
    Source: OpenAI's Harmony response format.
    """

    example = "<|channel|>commentary to=functions.… <|constrain|>json<|message|>{…}<|call|>"

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        parts: dict[str, list[str]] = {"analysis": [], "": []}
        calls = []
        for message in re.split(r"<\|(?:end|call|return)\|>", text):
            header, mark, body = message.partition("<|message|>")
            recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header) if mark else None
            if recipient:
                value, _ = decode_json(body.strip(), self.example)
                calls.append(check_call(recipient[1], value, "", example=self.example))
            else:
                parts["analysis" if mark and "analysis" in header else ""].append(
                    body if mark else header
                )
        content, reasoning = ("\n".join(parts[key]).strip() for key in ("", "analysis"))
        return Reading(content, reasoning, calls)


@dataclass(frozen=True)
class ResponseTemplate:
    """The format in a tokenizer's `response_template`, which transformers reads."""

    tokenizer: Any
    tools: Schemas

    def read(self, text: str) -> Reading:
        """Return the parts of a response; CallError if a call is malformed."""
        try:
            parts = self.tokenizer.parse_response(text, prefix="", tools=list(self.tools))
        except (ValueError, KeyError) as error:
            raise CallError(f"The tool call cannot be read: {first_line(error)}.") from error
        functions = [call.get("function", {}) for call in parts.get("tool_calls") or ()]
        example = "a name and arguments by name"
        calls = [
            check_call(f.get("name"), f.get("arguments"), "", example=example) for f in functions
        ]
        reasoning = parts.get("reasoning_content") or parts.get("thinking") or ""
        return Reading(parts.get("content") or "", reasoning, calls)


def has_channels(template: str) -> bool:
    """Return whether a template is that of gpt-oss."""
    return "<|channel|>" in template and "<|message|>" in template


def derive_format(
    render: Render, tools: Schemas, ends: Sequence[str]
) -> tuple[CallFormat, bool] | None:
    """Return how a template writes calls, and whether it takes arguments as text.

    `ends` are the marks that end a turn. None if a rendering does not show it.
    """
    user = {"role": "user", "content": "probe"}
    prompt = render([user], True)
    for as_text in (False, True):
        arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
        calls = [make_call(name, arguments, i) for name, i in zip(NAMES, IDS, strict=True)]
        turns = []
        for count in (1, 2):
            message = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
            try:
                turn = render([user, message], False)
            except ValueError:  # a second call, or arguments of this type
                turn = ""
            turn = turn[count_shared(prompt, turn) :]
            last = max(turn.rfind(VALUES[1]), 0)
            cut = min((at for end in ends if (at := turn.find(end, last)) >= 0), default=len(turn))
            turns.append(split_thoughts(turn[:cut])[0])
        if NAMES[0] in turns[0] and (form := _read_probe(turns[0], turns[1], tools)):
            if isinstance(form, PythonCalls):
                call = make_call(NAMES[0], {KEYS[0]: BACKSLASH}, IDS[0])
                turn = render(
                    [user, {"role": "assistant", "content": "", "tool_calls": [call]}], False
                )
                if BACKSLASH not in turn:
                    form = replace(form, literal_quote="")
            return form, as_text
    return None


def _read_probe(single: str, double: str, tools: Schemas) -> CallFormat | None:
    """Return the format of a turn with one call; `double` has two calls, or is empty."""
    span = _find_call(single, 0)
    if span is None:
        return None
    start, end, details = span
    before, after = single[:start], single[end:]
    opening, closing = before, after
    second = _find_call(double, 1) if NAMES[1] in double else None
    if second and (first := _find_call(double, 0)):
        between = double[first[1] : second[0]]
        opening = _shared_end(before, between)
        closing = _shared_start(after, between)
    wrappers = before.removesuffix(opening).strip(), after.removeprefix(closing).strip()
    # Without marks of each call, the calls are a JSON list.
    if not opening.strip() and before.strip():
        opening, closing, wrappers = before.strip().rstrip("["), "", ("", "")
    opening, closing = opening.strip(), closing.strip()
    if "tags" in details:
        if not opening or not closing:
            return None
        name_end, *marks = details["tags"]
        example = "…".join((f"{opening}", f"{name_end}\n{marks[0]}", *marks[1:3])) + f"\n{closing}"
        return TaggedCalls(opening, closing, wrappers, example, tools, name_end, *marks)
    if "literal_quote" in details:
        closing = after.strip().removeprefix("]").strip()
        quote = details["literal_quote"]
        example = f"{before.strip()}…(…={quote}…{quote}){after.strip()}"
        return PythonCalls(opening, closing, example, quote)
    example = single[start:end].replace(NAMES[0], "…").replace(IDS[0], "…")
    example = re.sub(rf"\{{[^{{}}]*{KEYS[0]}.*{VALUES[1]}[^{{}}]*\}}", "{…}", example, flags=re.S)
    example = f"{opening}{example}{closing}".replace("\n", " ")
    return JsonCalls(opening, closing, wrappers, example, **details)


def _find_call(text: str, index: int) -> tuple[int, int, dict[str, Any]] | None:
    """Return where a probe call starts and ends, and how it is written."""
    name_at = text.find(NAMES[index])
    name_end = name_at + len(NAMES[index])
    decoder = json.JSONDecoder()
    # An object that contains the name, or one after it.
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if match.start() < name_at < end:
            paths = [_find_path(value, part) for part in (NAMES[index], ARGUMENTS, IDS[index])]
            return match.start(), end, {"paths": tuple(path or () for path in paths)}
        if match.start() > name_at and value == ARGUMENTS:
            # The number of the call may be in it, as in `name:0`.
            middle = re.sub(
                r"(?<=:)\d+", r"\\d+", re.escape(text[name_end : match.start()].strip())
            )
            middle = middle.replace(IDS[index], r"(?P<id>\w+)")
            return name_at, end, {"middle": middle or r"(?=\{)"}
    # As Python writes calls.
    values = [rf"{key}=(['\"]){value}['\"]" for key, value in ARGUMENTS.items()]
    python = re.compile(rf"{NAMES[index]}\({', '.join(values)}\)").search(text)
    if python is not None:
        return python.start(), python.end(), {"literal_quote": python[1]}
    # Bare keys, and another quotation mark.
    places = [text.find(part, name_end) for part in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if -1 in places or places != sorted(places):
        return None
    key, value_at, second, last = places
    opened, key_closing = text[name_end:key], text[key + len(KEYS[0]) : value_at]
    between, tail = text[value_at + len(VALUES[0]) : second], text[last + len(VALUES[1]) :]
    if opened == "{" and key_closing.startswith(":"):
        end = text.find("}", last) + 1
        if json.loads(_quote(text[key - 1 : end], key_closing[1:])) == ARGUMENTS:
            return name_at, end, {"middle": r"(?=\{)", "quote": key_closing[1:]}
    value_closing = _shared_start(tail, between)
    key_opening = _shared_end(opened, between).strip()
    if not value_closing.strip() or not key_opening or NAMES[index] in opened:
        return None
    name_mark = opened.strip().removesuffix(key_opening).strip()
    end = last + len(VALUES[1]) + len(value_closing.rstrip())
    before_value = key_closing[len(key_closing.rstrip()) :]
    after_value = value_closing[: -len(value_closing.lstrip())]
    marks = (key_opening, key_closing.strip(), value_closing.strip(), before_value, after_value)
    return name_at, end, {"tags": (name_mark, *marks)}


def _shared_start(text: str, other: str) -> str:
    """Return what two texts start with, without half a mark."""
    return re.sub(r"<[^>]*$", "", text[: count_shared(text, other)])


def _shared_end(text: str, other: str) -> str:
    """Return what two texts end with, without half a mark."""
    return re.sub(r"^[^<]*>", "", text[len(text) - count_shared(text[::-1], other[::-1]) :])


def _loosen(mark: str) -> str:
    """Return a regular expression for a mark with any white space where it has some."""
    return r"\s*".join(map(re.escape, mark.split()))


def _quote(text: str, quote: str) -> str:
    """Turn a dialect with bare keys and other quotation marks into JSON."""
    texts = text.split(quote)
    # Texts are at odd places; keys are bare at the even ones.
    keys = re.compile(r'([{,]\s*)([^\s"{}\[\],:](?:[^"{}\[\],:]*[^\s"{}\[\],:])?)\s*:')
    plain = [keys.sub(r'\1"\2":', part) for part in texts[::2]]
    # Templates write some constants as Python does.
    plain = [re.sub(r"(?<=[:,\[])\s*(None|True|False)\b", _write_constant, p) for p in plain]
    strings = [json.dumps(part) for part in texts[1::2]]
    return "".join(p + s for p, s in zip(plain, [*strings, ""], strict=False))


def _write_constant(match: re.Match[str]) -> str:
    return json.dumps(CONSTANTS[match[1]])


def _find_path(value: Any, part: Any) -> tuple[str, ...] | None:
    """Return the keys that lead to a part of an object, which may be written as JSON text."""
    if value == part or (isinstance(value, str) and value == json.dumps(part)):
        return ()
    for key, inner in value.items() if isinstance(value, dict) else ():
        if (path := _find_path(inner, part)) is not None:
            return (key, *path)
    return None


def _follow(value: Any, path: Sequence[str]) -> Any:
    """Return the part of an object at these keys; None if there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if path else None
