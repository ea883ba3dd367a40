"""Tool calls as each family of models writes them, read from its chat template.

`derive_format` renders an assistant message with probe calls and reads which text surrounds their
names and arguments. Three forms cover most templates: a JSON object that contains the name (Qwen,
Llama, Mistral v3), a name followed by a JSON object (DeepSeek, Mistral v11, Gemma 4), and a name
followed by tagged keys and values (GLM, Qwen3.5). The channels of gpt-oss have their own reader,
because its models write other headers than its template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    `wrappers` surround all calls.
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
            value, closed, _ = piece.partition(self.value_closing)
            key, *rest = re.split(_loosen(self.key_closing), value, maxsplit=1)
            if not closed or not rest:
                raise CallError(f"An argument of the tool call is not closed. Write {self.example}")
            arguments[key.strip()] = self._convert(name, key.strip(), rest[0].strip("\n"))
        return check_call(name, arguments, "", example=self.example)

    def _convert(self, name: str, key: str, value: str) -> Any:
        """Return a value: text if its schema says so, else JSON if it is."""
        schemas = {tool_name(tool): tool.get("function", tool) for tool in self.tools}
        declared = schemas.get(name, {}).get("parameters", {}).get("properties", {}).get(key, {})
        if declared.get("type") == "string":
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value


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
        example = "…".join((f"{opening}", f"{name_end}\n{marks[0]}", *marks[1:])) + f"\n{closing}"
        return TaggedCalls(opening, closing, wrappers, example, tools, name_end, *marks)
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
            middle = re.escape(text[name_end : match.start()].strip())
            middle = middle.replace(IDS[index], r"(?P<id>\w+)")
            return name_at, end, {"middle": middle or r"(?=\{)"}
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
    tags = (name_mark, key_opening, key_closing.strip(), value_closing.strip())
    return name_at, end, {"tags": tags}


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
    # Texts are at odd places; keys are bare words at the even ones.
    plain = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in texts[::2]]
    strings = [json.dumps(part) for part in texts[1::2]]
    return "".join(p + s for p, s in zip(plain, [*strings, ""], strict=False))


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
