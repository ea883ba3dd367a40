"""Episodes as tokens: openings, the text between two turns of the policy, and its messages.

What the policy sampled stays as it was sampled. The tokens after it are rendered once: the chat
template renders the conversation with a probe in place of the policy's message, and what follows
the mark that ends this message is new. A turn ends with a control token, so tokenising the new
text after this token gives the same tokens as tokenising all of it.

Openings and replies come from data, tools and users, who may write the control words of a template.
Each gets a space after its first character (`< |im_end|>`) before the template sees it, so that no
text can end its message, whatever the tokenizer and the template do. A system message may name the
marks of thoughts and calls, and the policy writes them.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ppo_cli.data_sets.files import RowError
from ppo_cli.data_sets.prompts import Renderer, Tokenizer, control_words
from ppo_cli.environments.base import Schema
from ppo_cli.environments.calls import (
    CallError,
    CallFormat,
    ChannelCalls,
    NoCalls,
    Reading,
    ResponseTemplate,
    derive_format,
    has_channels,
    make_call,
    split_thoughts,
    tool_name,
)
from ppo_cli.errors import ModelError
from ppo_cli.paths import load_json
from ppo_cli.records import Message
from ppo_cli.thoughts import MARKS, count_shared, find_open_mark, find_thoughts

USER: Message = {"role": "user", "content": "probeuser"}
# What probes contain: texts that no template writes by itself.
ANSWER, REPLY = "probeanswer", "probereply"
PROBE = {"key": ANSWER}
MARK = re.compile(r"<[^\s<>]{1,40}>|\[/?[A-Z_]+\]")


class Chat:
    """Renders and reads the conversations of a model; ModelError if its template cannot.

    `tools` are schemas, and a template that does not show them to the model is refused. Results of
    tools are messages of role tool; a template without that role only takes replies of role user.
    `end_ids` are the tokens that end a response.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_arguments: Mapping[str, Any],
        tools: Sequence[Schema],
        end_ids: frozenset[int],
    ) -> None:
        self._tokenizer, self._tools, self._end_ids = tokenizer, tools, end_ids
        self._template = str(tokenizer.chat_template or "")
        if not self._template:
            raise ModelError(
                "Episodes need a chat template, and the model's tokenizer has none: use an "
                "instruct model, or add chat_template.jinja to its folder."
            )
        # Control tokens, and others that the template writes, as <tool_response>.
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        marks = {str(t) for t in added.values() if str(t) in self._template or "|" in str(t)}
        special = control_words(tokenizer)
        self._control = {*special, *filter(str.strip, marks)}
        self._forbidden = _compile({*self._control, ANSWER})
        self._special = _compile(word for word in special if not MARKS.fullmatch(word))
        # Descriptions of tools may come from an MCP server.
        shows_tools = "tools" in self._template
        schemas = {"tools": self._escape(tools)} if tools and shows_tools else {}
        self._renderer = Renderer(tokenizer, template_arguments={**template_arguments, **schemas})
        # How a turn begins and ends.
        try:
            self._prompt = self._render([USER], True)
            end = self._find_end([USER, _answer(), USER], True)
            # gpt-oss ends a conversation with another mark.
            self._final_end = self._find_end([USER, _answer()], False) or end
        except ValueError as error:
            raise ModelError(
                f"A conversation of several turns is not possible: {error}."
            ) from error
        if not end:
            raise ModelError(
                "The chat template ends the assistant's message without a control token, or does "
                "not write messages that are plain texts: use a model whose template ends it with "
                "one, such as <|im_end|>."
            )
        self._opened = find_open_mark(self._prompt)
        self._ends = {end, *(self._decode([token]) for token in end_ids)}
        # How the model calls tools.
        self._format: CallFormat = ChannelCalls() if has_channels(self._template) else NoCalls()
        self._arguments_as_text = False
        if tools and (not shows_tools or tool_name(tools[0]) not in self._prompt):
            raise ModelError(
                "The chat template does not show tools to the model: use a model that was trained "
                "for tool calls, or an --environment that describes its actions in its messages."
            )
        if tools and isinstance(self._format, NoCalls):
            self._format, self._arguments_as_text = self._choose_format()
        # Which roles can reply, and which text surrounds replies: it may not be in one.
        surroundings = {role: self._probe_role(role) for role in ("tool", "user")}
        self._roles = tuple(role for role, text in surroundings.items() if text)
        around = chain(*map(MARK.findall, surroundings.values()))
        self._forbidden = _compile({*self._control, ANSWER, *around})
        if tools and "tool" not in self._roles:
            raise ModelError(
                "The chat template writes no result of a tool after a call that ends with "
                f"{', '.join(sorted(self._ends))}: use a model that was trained for tool calls."
            )

    def open(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Return a conversation as the model reads it, and its token ids.

        Messages after the first of the assistant count as replies. ValueError, in one line, if the
        template refuses the messages.
        """
        text = self._render(self._adapt(messages), True)
        return text, self._renderer.tokenise([text])[0]

    def parse(self, turn: Sequence[int]) -> Message:
        """Return the policy's message: content, and where there are any, reasoning and calls.

        `error` says what is wrong with its tool calls; `content` is all of its answer then.
        """
        ids = list(turn[:-1] if turn and turn[-1] in self._end_ids else turn)
        text = self._opened + self._decode(ids)
        message: dict[str, Any] = {"role": "assistant"}
        try:
            reading = self._format.read(text)
        except CallError as error:
            reading = Reading(*split_thoughts(text), [])
            message["error"] = str(error)
        message["content"] = reading.content
        if reading.reasoning:
            message["reasoning_content"] = reading.reasoning
        if reading.calls:
            message["tool_calls"] = [
                make_call(c.name, c.arguments, c.call_id or _make_id(turn, index))
                for index, c in enumerate(reading.calls)
            ]
        return message

    def continue_after(
        self, turn: Sequence[int], replies: Sequence[Message], opening: Sequence[Message]
    ) -> tuple[int, ...]:
        """Return the tokens between a turn and the next: its end, the replies, the next opening.

        `turn` has the tokens of the policy; if they do not end with a mark that ends a turn, the
        result begins with it. `opening` has the first messages, which may decide about thoughts.
        ValueError, in one line, if the template cannot render the replies.
        """
        mark, text = self._render_after(opening, self.parse(turn), replies)
        ids = self._renderer.tokenise([mark + text])[0]
        ended = self._decode(turn[-1:]) in (mark, self._final_end)
        return ids[1:] if ended else ids

    def rewrites_history(self, roles: Sequence[str] = ("tool", "user")) -> str:
        """Return what the template changes in earlier turns after replies of these roles, or "".

        Compares the tokens of an episode, as texts, with the template's rendering of all of it.
        """
        changes = {role: self._find_change(role) for role in roles if role in self._roles}
        texts = [f"{change} after a {role} message" for role, change in changes.items() if change]
        return " and ".join(texts)

    def _find_change(self, role: str) -> str:
        """Return what replies of a role change in three earlier turns, or ""."""
        messages: list[Message] = [{"role": "system", "content": "probesystem"}, USER]
        try:
            written = self._render(messages, True)
        except ValueError:  # no system messages
            messages, written = [USER], self._prompt
        spans = find_thoughts(written)
        closed = bool(spans) and spans[-1].closed and not written[spans[-1].end :].strip()
        thinks = bool(re.search("think|thought|reasoning_content", self._template)) and not closed
        thoughts: list[str] = []
        for index in range(3):
            message = self._make_turn(role == "tool", f"probethought{index}" if thinks else "")
            opened = self._render(self._adapt(messages), True)
            text = self._render(self._adapt([*messages, message]), False)
            if thinks:
                thoughts.append(f"probethought{index}")
            if thoughts and thoughts[-1] not in text:
                return "the thoughts of each turn"
            if not text.startswith(opened):
                at = count_shared(text, opened)
                return f"the start of a turn ({opened[at : at + 30]!r})"
            # The turn as the policy ends it.
            last = text.rindex(ANSWER)
            at, end = min(
                ((text.find(end, last), end) for end in self._ends if end in text[last:]),
                default=(len(text), ""),  # GLM's turns end where the next one begins
            )
            reply = {"role": role, "content": f"{REPLY}{index}"}
            mark, rest = self._render_after(messages, message, [reply])
            mark = end if end == self._final_end else mark
            written += text[len(opened) : at] + mark + rest
            messages += [message, reply]
            later, _ = self.open(messages)
            if any(thought not in later for thought in thoughts):
                return "earlier thoughts"
            name = tool_name(self._tools[0]) if self._tools else ""
            if later.find(name) != written.find(name):
                return "the list of tools"
            at = count_shared(later, written)
            if any(span.start <= at < span.end for span in find_thoughts(written)):
                return "earlier empty thoughts"
            if later != written:
                return f"{written[at : at + 30]!r} to {later[at : at + 30]!r}"
        return ""

    def _make_turn(self, calls: bool, thought: str) -> dict[str, Any]:
        """Return a probe of the policy's message, with a thought if not ""."""
        message = _answer() | ({"reasoning_content": thought} if thought else {})
        if not calls:
            return message
        name = tool_name(self._tools[0]) if self._tools else "probetool"
        return message | {"content": "", "tool_calls": [make_call(name, PROBE, "call00000")]}

    def _adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template takes them.

        The policy's get its keys for thoughts and its type of arguments. Replies lose control
        words, and results of tools get the name and the id of their call.
        """
        adapted: list[Message] = []
        keys = [k for k in ("reasoning_content", "thinking", "reasoning") if k in self._template]
        calls = None
        for message in messages:
            if message.get("role") == "assistant":
                new = {**message, "content": message.get("content") or ""}
                new = self._escape(new, self._special)
                thought = new.pop("reasoning_content", "")
                calls = iter(new.get("tool_calls", ()))
                if thought and new.get("tool_calls") and isinstance(self._format, ChannelCalls):
                    thought = f"{thought}\n{new['content']}".strip()
                    new["content"] = ""  # its template takes one of them
                if thought and keys:
                    new.update(dict.fromkeys(keys, thought))
                elif thought:
                    new["content"] = f"<think>\n{thought}\n</think>\n\n{new['content']}"
                if new.get("tool_calls"):
                    as_text = self._arguments_as_text
                    new["tool_calls"] = [_convert_call(c, as_text) for c in new["tool_calls"]]
            elif message.get("role") in ("system", "developer"):
                new = self._escape(message, self._special)
            elif calls is None:
                new = self._escape(message)
            else:
                new = {**message, "content": message.get("content") or ""}
                if message.get("role") == "tool":
                    call = next(calls, make_call("tool", {}, "call00000"))
                    new = {"name": call["function"]["name"], "tool_call_id": call["id"], **new}
                new = self._escape(new)
            adapted.append(new)
        return adapted

    def _render_after(
        self, opening: Sequence[Message], message: Message, replies: Sequence[Message]
    ) -> tuple[str, str]:
        """Return the mark that ends the policy's message, and the text after it."""
        for reply in replies:
            if reply.get("role") not in self._roles:
                raise ValueError(
                    f"the chat template takes replies of role {' and '.join(self._roles)}, not of "
                    f"role {reply.get('role')}"
                )
        turn = _answer()
        # Templates want the call before its result; a malformed call is not one.
        if any(reply["role"] == "tool" for reply in replies):
            calls = message.get("tool_calls") or [make_call("tool", {}, "call00000")]
            names = [(self._escape(call["function"]["name"]), call["id"]) for call in calls]
            probes = [make_call(name, PROBE, call_id) for name, call_id in names]
            turn = {"role": "assistant", "content": "", "tool_calls": probes}
        text = self._render(self._adapt([*opening, turn, *replies]), True)
        after = text[text.rindex(ANSWER) + len(ANSWER) :]
        places = [(after.find(end), end) for end in self._ends if end in after]
        if not places:
            raise ValueError("the chat template does not end a turn that has no reply")
        at, mark = min(places)
        return mark, after[at + len(mark) :]

    def _probe_role(self, role: str) -> str:
        """Return the text around a reply of a role, "" if the template does not write it."""
        self._roles = (role,)
        message = self._make_turn(role == "tool", "")
        try:
            mark, text = self._render_after([USER], message, [{"role": role, "content": REPLY}])
        except ValueError:
            return ""
        return mark + text if REPLY in text else ""

    def _choose_format(self) -> tuple[CallFormat, bool]:
        form = derive_format(self._render, self._tools, tuple(self._ends))
        if form is not None:
            return form
        if getattr(self._tokenizer, "response_template", None):
            return ResponseTemplate(self._tokenizer, self._tools), False
        raise ModelError(
            "The chat template does not show how the model writes tool calls: use a model that "
            "was trained for tool calls, or one whose tokenizer has a response_template."
        )

    def breaks(self, messages: Sequence[Message]) -> bool:
        """Whether messages have control words."""
        return any(self._escape(message) != message for message in messages)

    def _escape(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        """Return a message, or a part of it, without control words, or those of a `pattern`."""
        if isinstance(value, Mapping):
            return {self._escape(k, pattern): self._escape(v, pattern) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(inner, pattern) for inner in value]
        if not isinstance(value, str):
            return value
        pattern = pattern or self._forbidden
        # Half of a surrogate pair cannot be tokenised.
        text = _break_words(value.encode("utf-8", "replace").decode(), pattern)
        # Tokenizers may normalise before they look for control words.
        normal = unicodedata.normalize("NFKC", text)
        return _break_words(normal, pattern) if pattern.search(normal) else text

    def _find_end(self, messages: Sequence[Message], continued: bool) -> str:
        """Return the control word after the assistant's message, "" if there is none."""
        _, answer, after = self._render(messages, continued).rpartition(ANSWER)
        ends = sorted(self._control, key=len, reverse=True) if answer else ()
        return next((word for word in ends if after.lstrip().startswith(word)), "")

    def _render(self, messages: Sequence[Message], continued: bool) -> str:
        try:
            return self._renderer.fill_template(messages, continued=continued)
        except RowError as error:
            raise ValueError(str(error)) from error

    def _decode(self, ids: Sequence[int]) -> str:
        # Clean-up would remove spaces in the arguments of calls.
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def _compile(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _break_words(text: str, pattern: re.Pattern[str]) -> str:
    while pattern.search(text):
        text = pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}" * (len(m[0]) > 1), text)
    return text


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER}


def _convert_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a call whose arguments are JSON text, or an object, as the template takes them."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = load_json(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a tool call are not JSON: {error}") from None
    elif as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _make_id(turn: Sequence[int], index: int) -> str:
    """Return an id of nine letters and digits, the same in a resumed run."""
    return hashlib.blake2b(repr((index, *turn)).encode()).hexdigest()[:9]
