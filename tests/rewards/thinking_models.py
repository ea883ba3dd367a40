"""Models that think: how their templates end a prompt, and how they write thoughts down.

The templates are cut down to a system line, the user's and the end; the ends are those that the
makers publish. `special` says whether the tokenizer has the marks as special tokens, which
decoding drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Thinker:
    """A family: template, marks as it writes them, and what its prompt opens by arguments."""

    name: str
    before: str  # of the user's text
    after: str  # up to where the model goes on, Jinja
    opening: str
    closing: str
    end: str
    opened: tuple[tuple[dict[str, Any], str], ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    aside: str = ""  # what the model puts among its thoughts, of marks of its own
    framed: str = "{}"  # the answer as it writes it

    @property
    def template(self) -> str:
        """The chat template."""
        end = "{{ '' }}"  # Jinja drops a newline at the very end
        return f"{self.before}{{{{ messages[0]['content'] }}}}{self.after}{end}"


NEVER = (({}, ""),)
THINK = "<think>\n"
TAGS = ("<think>", "</think>")
CHATML = "<|im_start|>user\n"
CHATML_END = "<|im_end|>\n<|im_start|>assistant\n"


def switch(name: str, off: str, on: str = "", default: str = "true") -> str:
    return (
        f"{{%- if {name} | default({default}) -%}}{{{{ {on!r} }}}}"
        f"{{%- else -%}}{{{{ {off!r} }}}}{{%- endif -%}}"
    )


THINKERS = (
    Thinker("Qwen3", CHATML, CHATML_END + switch("enable_thinking", "<think>\n\n</think>\n\n"),
            THINK, "\n</think>\n\n", "<|im_end|>",
            (({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "")),
            plain=TAGS),
    Thinker("Qwen3.6", CHATML,
            CHATML_END + switch("enable_thinking", "<think>\n\n</think>\n\n", THINK),
            THINK, "\n</think>\n\n", "<|im_end|>",
            (({}, THINK), ({"enable_thinking": False}, "")), plain=TAGS),
    Thinker("DeepSeek-R1", "<｜User｜>", "<｜Assistant｜><think>\n",
            THINK, "\n</think>\n\n", "<｜end▁of▁sentence｜>", (({}, THINK),), plain=TAGS),
    Thinker("DeepSeek-V3.1", "<｜User｜>",
            "<｜Assistant｜>" + switch("thinking", "</think>", "<think>", "false"),
            "<think>", "</think>", "<｜end▁of▁sentence｜>",
            (({}, ""), ({"thinking": True}, "<think>")), plain=TAGS),
    Thinker("gpt-oss", "<|start|>user<|message|>", "<|end|><|start|>assistant",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>", "<|return|>", NEVER,
            special=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
            aside="<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."),
    Thinker("GLM-4.5", "[gMASK]<sop><|user|>\n",
            "<|assistant|>" + switch("enable_thinking", "\n<think></think>"),
            "\n<think>", "</think>\n", "<|user|>",
            (({}, ""), ({"enable_thinking": False}, "")), plain=TAGS),
    Thinker("Kimi K2 Thinking", "<|im_user|>user<|im_middle|>",
            "<|im_end|><|im_assistant|>assistant<|im_middle|>",
            "<think>", "</think>", "<|im_end|>", NEVER, plain=TAGS),
    Thinker("Kimi K3", "<|open|>user<|sep|>", "<|close|>user<|sep|><|open|>think<|sep|>",
            "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|end_of_msg|>",
            (({}, "<|open|>think<|sep|>"),), special=("<|open|>", "<|close|>", "<|sep|>")),
    Thinker("Magistral", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "</s>", NEVER,
            special=("[THINK]", "[/THINK]")),
    Thinker("MiniMax-M2", "]~b]user\n", "[e~[\n]~b]ai\n<think>\n",
            THINK, "\n</think>\n\n", "[e~[", (({}, THINK),), plain=TAGS),
    Thinker("Granite 3.3", "<|start_of_role|>user<|end_of_role|>",
            "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
            "<think>", "</think>", "<|end_of_text|>", NEVER,
            framed="<response>{}</response>"),
    Thinker("Hunyuan", "<｜hy_User｜>",
            "<｜hy_Assistant｜>" + switch("enable_thinking", "<think>\n\n</think>\n"),
            THINK, "\n</think>\n", "<｜hy_EOT｜>", (({}, ""), ({"enable_thinking": False}, "")),
            framed="<answer>\n{}\n</answer>"),
    Thinker("EXAONE Deep", "[|user|]", "\n[|assistant|]<thought>\n",
            "<thought>\n", "\n</thought>\n\n", "[|endofturn|]", (({}, "<thought>\n"),)),
    Thinker("Nemotron 3", CHATML,
            CHATML_END + switch("enable_thinking", "<think></think>", THINK),
            THINK, "\n</think>\n", "<|im_end|>",
            (({}, THINK), ({"enable_thinking": False}, "")), special=TAGS),
    Thinker("Gemma 4", "<|turn>user\n",
            "<turn|>\n<|turn>model\n" + switch("enable_thinking", "<|channel>thought\n<channel|>"),
            "<|channel>thought\n", "<channel|>", "<turn|>",
            (({}, ""), ({"enable_thinking": False}, "")),
            special=("<|channel>", "<channel|>")),
    Thinker("Seed-OSS", "<seed:bos>user\n", "<seed:eos><seed:bos>assistant\n",
            "<seed:think>", "</seed:think>", "<seed:eos>", NEVER,
            aside="<seed:cot_budget_reflect>I have used 60 tokens.</seed:cot_budget_reflect>"),
)  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What a model wrote; `answer` is what a reader may take from it, empty: nothing."""

    of: Thinker
    shape: str
    text: str
    answer: str
    cut: bool = False
    opened: str = field(default="")


WRONG, RIGHT = "41", "42"
MUSED = (
    "Okay, so the user wants 6 times 7. I first took 6*7 to be 41, so the answer is 41.\n"
    "#### 41\nThat is \\boxed{41}, and the score is 41."
)
AGAIN = "Wait, let me check that again. Alternatively it could be 41. Hmm, \\boxed{41}\n#### 41"


def replies(of: Thinker) -> Iterator[Reply]:
    """Replies of a family, where the prompt opens the thought without its opening mark."""
    opened = of.opened[0][1]
    opening, closing = of.opening, of.closing
    said = of.framed.format(f"The answer is {RIGHT}\n#### {RIGHT}")

    def reply(shape: str, text: str, answer: str = said, *, cut: bool = False) -> Reply:
        """Written by the model after its own opening mark."""
        return Reply(of, shape, text if opened else opening + text, answer, cut, opened)

    thought, begun = f"{MUSED}{of.aside}", said.partition("\n####")[0]
    yield reply("closed", f"{thought}{closing}{said}")
    yield reply("closed, in two parts", f"{thought}\n\n{AGAIN}{closing}{said}")
    yield reply("closed, nothing thought", f"{closing}{said}")
    yield reply("closed, no answer", f"{thought}{closing}", "")
    yield reply("closed, the answer cut", f"{thought}{closing}{begun}", begun, cut=True)
    yield reply("open", thought, "")
    yield reply("cut", thought[: len(thought) * 3 // 4], "", cut=True)
    yield reply("cut, nothing thought", "", "", cut=True)
    yield reply("opened twice", f"{opening}{thought}{closing}{said}")
    yield reply("names its opening", f"I open with {opening} and go on. {MUSED}{closing}{said}")
    if "final" not in closing:  # a channel begins where it is named
        yield reply("nested, cut", f"A {opening}{AGAIN}{closing} within. {MUSED}", "", cut=True)
    yield reply("closed twice", f"{thought}{closing}{AGAIN}{closing}{said}")
    yield reply("thinks again", f"{thought}{closing}{said}\n{opening}{AGAIN}{closing}")
    yield reply("thinks again, cut", f"{thought}{closing}{said}\n{opening}{AGAIN}", cut=True)
    mention = f"{said} (I thought between `{opening.strip()}` marks.)"
    yield reply("the answer names it", f"{thought}{closing}{mention}", mention)
    plain = f"The answer is {RIGHT}"
    yield Reply(of, "no mark at all", plain, "" if opened else plain, opened=opened)


CORPUS = tuple(reply for thinker in THINKERS for reply in replies(thinker))
