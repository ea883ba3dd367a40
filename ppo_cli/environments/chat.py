"""Episodes as tokens: openings, the text between two turns of the policy, and its messages.

What the policy sampled stays as it was sampled. The tokens after it are rendered once: the chat
template renders the conversation with a probe in place of the policy's message, and what follows
the mark that ends this message is new. A turn ends with a control token, so tokenising the new
text after this token gives the same tokens as tokenising all of it.

Replies come from tools and users, who may write the control words of a template. Each gets a space
after its first character (`< |im_end|>`) before the template sees it, so that no reply can end its
message, whatever the tokenizer and the template do.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.data_sets.files import RowError
from ppo_cli.data_sets.prompts import Renderer, Tokenizer, control_words
from ppo_cli.environments.base import EnvironmentFailure, Schema
from ppo_cli.environments.calls import (
    CallError,
    JsonCalls,
    derive_format,
    make_call,
    split_thoughts,
)
from ppo_cli.errors import ModelError
from ppo_cli.records import Message
from ppo_cli.thoughts import find_open_mark

PROBE, THOUGHT, ANSWER = "probemessage", "probethought", "probeanswer"
USER: Message = {"role": "user", "content": "probeuser"}


class Chat:
    """Renders and reads the conversations of a model; ModelError if its template cannot.

    `tools` are schemas; a template that does not show them to the model is refused. Tool results
    are messages of role tool: a template without that role takes replies of role user only.
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
        if tools and "tools" not in self._template:
            raise self._refuse_tools()
        arguments = {**template_arguments, "tools": list(tools)} if tools else template_arguments
        self._renderer = Renderer(tokenizer, template_arguments=arguments)
        # Control tokens, and other tokens that the template writes, as Qwen's <tool_response>.
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        written = {str(t) for t in added.values() if str(t).strip() and str(t) in self._template}
        self._control = tuple(sorted({*control_words(tokenizer), *written}, key=len, reverse=True))
        self._control_pattern = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        # How a turn begins and ends.
        self._opened = find_open_mark(self._render([USER], True))
        self._ends = {self._decode([token]) for token in end_ids}
        turn = {"role": "assistant", "content": ANSWER}
        self._final_end = self._find_end(self._render([USER, turn], False), ANSWER)
        self._ends.add(self._find_end(self._render([USER, turn, USER], True), ANSWER))
        if "" in self._ends:
            raise ModelError(
                "The chat template ends the assistant's message without a control token, so "
                "the tokens of a reply depend on those before it: use a model whose template "
                "ends it with one, such as <|im_end|>."
            )
        # How the model calls tools.
        self._calls: Any = JsonCalls("\0", "", ("", ""), "")  # reads no calls
        self._arguments_as_text = False
        if tools:
            if str(tools[0].get("function", tools[0])["name"]) not in self._render([USER], True):
                raise self._refuse_tools()
            form = derive_format(self._render, tools, self._template, tuple(self._ends))
            if form is None:
                raise ModelError(
                    "The chat template does not show how the model writes tool calls: use a "
                    "model that was trained for tool calls."
                )
            self._calls, self._arguments_as_text = form

    def _refuse_tools(self) -> ModelError:
        return ModelError(
            "The chat template does not show tools to the model: use a model that was trained "
            "for tool calls, or an --environment that describes its actions in its messages."
        )

    def open(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Return the text that the model reads first, and its token ids."""
        text = self._render(messages, True)
        return text, self._renderer.tokenise([text])[0]

    def parse(self, turn_ids: Sequence[int]) -> tuple[Message, str]:
        """Return the policy's message, and what is wrong with its tool calls ("" if nothing).

        The message has role, content, and where there are any, reasoning_content and tool_calls.
        With an error, content is the whole answer.
        """
        ids = list(turn_ids)
        text = self._opened + self._decode(ids[:-1] if ids and ids[-1] in self._end_ids else ids)
        try:
            content, reasoning, calls = self._calls.read(text)
        except CallError as error:
            content, reasoning = split_thoughts(text)
            calls, problem = [], str(error)
        else:
            problem = ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                make_call(c.name, c.arguments, c.call_id or _make_id(turn_ids, index))
                for index, c in enumerate(calls)
            ]
        return message, problem

    def continue_after(
        self,
        messages_before: Sequence[Message],
        turn_ids: Sequence[int],
        replies: Sequence[Message],
        cut: bool,
    ) -> tuple[int, ...]:
        """Return the tokens between a turn and the next: its end, the replies, the next opening.

        `messages_before` end before this turn. A turn that was `cut` gets the mark that ends it.
        EnvironmentFailure if the template cannot render the replies.
        """
        message, _ = self.parse(turn_ids)
        # The system message decides about the next opening; earlier turns do not.
        first = next(
            (i for i, m in enumerate(messages_before) if m["role"] == "assistant"),
            len(messages_before),
        )
        mark, text = self._render_after(messages_before[:first], message, replies)
        ids = self._renderer.tokenise([mark + text])[0]
        last = self._decode(turn_ids[-1:])
        ended = not cut and last in (mark, self._final_end)
        return ids[1:] if ended else ids

    def _render_after(
        self, opening: Sequence[Message], message: Message, replies: Sequence[Message]
    ) -> tuple[str, str]:
        """Return the mark that ends the policy's message, and the text after it."""
        calls = message.get("tool_calls", ())
        results = [reply for reply in replies if reply["role"] == "tool"]
        turn: dict[str, Any] = {"role": "assistant", "content": PROBE}
        # Templates want the call before its result; after a malformed one there is none.
        if results:
            arguments: Any = {"key": PROBE}
            if self._arguments_as_text:
                arguments = f'{{"key": "{PROBE}"}}'
            names = [(c["function"]["name"], c["id"]) for c in calls] or [("tool", "call00000")]
            turn["content"] = ""
            turn["tool_calls"] = [
                make_call(self._escape(name), arguments, call_id) for name, call_id in names
            ]
            defaults = [{"name": name, "tool_call_id": call_id} for name, call_id in names]
        escaped, position = [], 0
        for reply in replies:
            if reply["role"] not in ("tool", "user"):
                raise EnvironmentFailure(
                    f"replied with a message of role {reply['role']}; roles are tool and user"
                )
            if reply["role"] == "tool":
                reply = {**defaults[min(position, len(defaults) - 1)], **reply}
                position += 1
            escaped.append(self._escape(reply))
        try:
            text = self._render([*opening, turn, *escaped], True)
        except ValueError as error:
            raise EnvironmentFailure(
                f"the replies do not fit the chat template: {error}"
            ) from error
        after = text[text.rindex(PROBE) + len(PROBE) :]
        at, mark = min((after.find(end), end) for end in self._ends if end in after)
        return mark, after[at + len(mark) :]

    def _escape(self, value: Any) -> Any:
        """Return a message or a part of it without control words."""
        if isinstance(value, Mapping):
            return {key: self._escape(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(inner) for inner in value]
        if not isinstance(value, str):
            return value
        # Tokenizers may normalise before they look for control words.
        normal = unicodedata.normalize("NFKC", value)
        if self._control_pattern.search(normal) and not self._control_pattern.search(value):
            value = normal
        while self._control_pattern.search(value):
            value = self._control_pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}", value)
        return value

    def rewrites_history(self, roles: Sequence[str] = ("tool", "user")) -> str:
        """Return what the template changes in earlier turns after replies of these roles, or ""."""
        return ""

    def _find_end(self, text: str, payload: str) -> str:
        """Return the control word right after a payload, "" if there is none."""
        after = text[text.rindex(payload) + len(payload) :].lstrip() if payload in text else ""
        return next((word for word in self._control if after.startswith(word)), "")

    def _render(self, messages: Sequence[Message], continued: bool) -> str:
        try:
            return self._renderer.fill_template(messages, continued=continued)
        except RowError as error:
            raise ValueError(str(error)) from error

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _make_id(turn_ids: Sequence[int], index: int) -> str:
    """Return an id of nine letters and digits, the same in a resumed run."""
    return hashlib.blake2b(repr((index, *turn_ids)).encode()).hexdigest()[:9]
