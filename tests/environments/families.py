"""Five families' real chat templates, tokenizers with their control words, and traces by hand.

The templates come from installed packages: TRL has those of Qwen3, Llama, gpt-oss and Gemma, and
mistral_common writes Mistral's. A trace says who wrote each text of an episode, after the family's
documentation. The tokenizers are trained here, so that texts have merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One."},
                "b": {"type": "integer", "description": "Two."},
            },
            "required": ["a", "b"],
        },
    },
}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
RESULT = {"role": "tool", "content": "3"}
THANKS = {"role": "user", "content": "Thanks."}
POLICY, ENVIRONMENT = "policy", "environment"


@dataclass(frozen=True)
class Family:
    """`ends` end a response; `added` are tokens of the template that are not special.

    `trace` begins with the opening; before each text of the environment are its `replies`.
    """

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    opening: str
    trace: tuple[tuple[str, str], ...]
    replies: tuple[tuple[dict[str, Any], ...], ...]
    added: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = (SCHEMA,)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.opening + "".join(text for _, text in self.trace)


def trl_template(name: str) -> str:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, which has the chat templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def mistral_template(version: str, *, spm: bool = False) -> str:
    generator = pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    return str(
        generator.generate_chat_template(
            spm=spm, tokenizer_version=generator.TokenizerVersion(version), image_support=False,
            audio_support=False, thinking_support=False, default_system_prompt=None,
            plain_thinking_support=False, use_special_token_variables=True,
            model_settings_fields=None, reasoning_effort_values=None,
            reasoning_effort_default=None,
        )
    )  # fmt: skip


QWEN3 = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with "
    "the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:"
    f"\n<tools>\n{json.dumps(SCHEMA)}\n</tools>\n\nFor each function call, return a json object "
    "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nCutting "
    "Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond "
    "with a JSON for a function call with its proper arguments that best answers the given prompt."
    '\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name '
    f"and its value}}.Do not use variables.\n\n{json.dumps(SCHEMA, indent=4)}\n\nWhat is 1 + 2?"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
MISTRAL = (
    f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS][{json.dumps(SCHEMA)}]"
    "[/AVAILABLE_TOOLS][INST]What is 1 + 2?[/INST]"
)
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: "
    "analysis, commentary, final. Channel must be included for every message.\nCalls to these "
    "tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># "
    "Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n// Add two "
    "numbers.\ntype add = (_: {\n// One.\na: number,\n// Two.\nb: number,\n}) => any;\n\n} // "
    "namespace functions<|end|><|start|>user<|message|>What is 1 + 2?<|end|><|start|>assistant"
)
GEMMA4 = (
    '<bos><|turn>system\nBe brief.<|tool>declaration:add{description:<|"|>Add two numbers.<|"|>,'
    'parameters:{properties:{a:{description:<|"|>One.<|"|>,type:<|"|>INTEGER<|"|>},b:{description:'
    '<|"|>Two.<|"|>,type:<|"|>INTEGER<|"|>}},required:[<|"|>a<|"|>,<|"|>b<|"|>],type:<|"|>OBJECT'
    '<|"|>}}<tool|><turn|>\n<|turn>user\nWhat is 1 + 2?<turn|>\n<|turn>model\n'
)
MISTRAL_WORDS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]",
    "[TOOL_CONTENT]",
)  # fmt: skip
ARGUMENTS = '{"a": 1, "b": 2}'


def make_qwen3() -> Family:
    return Family(
        template=trl_template("qwen3"),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        added=(
            "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
            "</think>",
        ),
        ends=("<|im_end|>", "<|endoftext|>"),
        opening=QWEN3,
        trace=(
            (POLICY, "<think>\nI add.\n</think>\n\n<tool_call>\n"
                     f'{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'),
            (ENVIRONMENT, "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
                          "<|im_start|>assistant\n"),
            (POLICY, "<think>\nThree.\n</think>\n\nIt is 3.<|im_end|>"),
            (ENVIRONMENT, "\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n"),
            # A turn that was cut.
            (POLICY, "<think>\nNo que"),
            (ENVIRONMENT, "<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
                          "<|im_start|>assistant\n"),
        ),
        replies=((RESULT,), (THANKS,), (THANKS,)),
    )  # fmt: skip


def make_llama() -> Family:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return Family(
        template=trl_template("llama3_1"),
        special=(
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
        ),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        opening=LLAMA,
        trace=(
            (POLICY, f'{{"name": "add", "parameters": {ARGUMENTS}}}<|eot_id|>'),
            # The template writes the result as JSON.
            (ENVIRONMENT, f'{header.format("ipython")}"3"<|eot_id|>'
                          f"{header.format('assistant')}"),
            (POLICY, "It is 3.<|eot_id|>"),
            (ENVIRONMENT, f"{header.format('user')}Thanks.<|eot_id|>"
                          f"{header.format('assistant')}"),
            (POLICY, "You are wel"),
            (ENVIRONMENT, f"<|eot_id|>{header.format('user')}Thanks.<|eot_id|>"
                          f"{header.format('assistant')}"),
        ),
        replies=((RESULT,), (THANKS,), (THANKS,)),
    )  # fmt: skip


def make_mistral() -> Family:
    return Family(
        template=mistral_template("v13"),
        special=MISTRAL_WORDS,
        ends=("</s>",),
        opening=MISTRAL,
        trace=(
            (POLICY, f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]{ARGUMENTS}</s>"),
            (ENVIRONMENT, "[TOOL_RESULTS]3[/TOOL_RESULTS][TOOL_RESULTS]3[/TOOL_RESULTS]"),
            (POLICY, "It is 3.</s>"),
            (ENVIRONMENT, "[INST]Thanks.[/INST]"),
            (POLICY, "You are wel"),
            (ENVIRONMENT, "</s>[INST]Thanks.[/INST]"),
        ),
        replies=((RESULT, RESULT), (THANKS,), (THANKS,)),
    )


def make_gpt_oss() -> Family:
    return Family(
        template=trl_template("gptoss").replace(
            'strftime_now("%Y-%m-%d")', "'2025-06-28'"
        ),
        special=(
            "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
            "<|start|>", "<|end|>", "<|message|>", "<|call|>",
        ),
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
        opening=GPT_OSS,
        trace=(
            (POLICY, "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>"
                     "commentary to=functions.add <|constrain|>json<|message|>"
                     f"{ARGUMENTS}<|call|>"),
            (ENVIRONMENT, "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
                          '"3"<|end|><|start|>assistant'),
            (POLICY, "<|channel|>analysis<|message|>Three.<|end|><|start|>assistant<|channel|>"
                     "final<|message|>It is 3.<|return|>"),
            (ENVIRONMENT, "<|start|>user<|message|>Thanks.<|end|><|start|>assistant"),
            (POLICY, "<|channel|>final<|message|>You are wel"),
            (ENVIRONMENT, "<|end|><|start|>user<|message|>Thanks.<|end|><|start|>assistant"),
        ),
        replies=((RESULT,), (THANKS,), (THANKS,)),
    )  # fmt: skip


def make_gemma3() -> Family:
    # Its template has neither tools nor a role for their results.
    reply = "<start_of_turn>user\nThanks.<end_of_turn>\n<start_of_turn>model\n"
    return Family(
        template=trl_template("gemma3"),
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ends=("<eos>", "<end_of_turn>"),
        opening="<bos><start_of_turn>user\nBe brief.\n\nWhat is 1 + 2?<end_of_turn>\n"
                "<start_of_turn>model\n",
        trace=(
            (POLICY, "It is 3.<end_of_turn>"), (ENVIRONMENT, f"\n{reply}"),
            (POLICY, "You are wel"), (ENVIRONMENT, f"<end_of_turn>\n{reply}"),
        ),
        replies=((THANKS,), (THANKS,)),
        tools=(),
    )  # fmt: skip


def make_gemma4() -> Family:
    reply = "<|turn>user\nThanks.<turn|>\n<|turn>model\n"
    return Family(
        template=trl_template("gemma4_v5"),
        special=(
            "<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>",
            "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>",
            '<|"|>', "<|think|>",
        ),
        ends=("<eos>", "<turn|>", "<|tool_response>"),
        opening=GEMMA4,
        trace=(
            # A result belongs to the turn of the model, which goes on after it.
            (POLICY, "<|channel>thought\nI add.\n<channel|><|tool_call>call:add{a:1,b:2}"
                     "<tool_call|><|tool_response>"),
            (ENVIRONMENT, 'response:add{value:<|"|>3<|"|>}<tool_response|>'),
            (POLICY, "It is 3.<turn|>"), (ENVIRONMENT, f"\n{reply}"),
            (POLICY, "You are wel"), (ENVIRONMENT, f"<turn|>\n{reply}"),
        ),
        replies=((RESULT,), (THANKS,), (THANKS,)),
    )  # fmt: skip


FAMILIES = {
    "qwen3": make_qwen3, "llama3_1": make_llama, "mistral": make_mistral, "gpt-oss": make_gpt_oss,
    "gemma3": make_gemma3, "gemma4": make_gemma4,
}  # fmt: skip


@cache
def load_family(name: str) -> tuple[Family, Any]:
    """Return a family and its tokenizer; skips without the package that has its template."""
    family = FAMILIES[name]()
    return family, make_tokenizer(
        family.template, family.special, family.ends[0], added=family.added, texts=(family.text,)
    )


def make_tokenizer(
    template: str | None,
    special: Sequence[str],
    eos: str,
    *,
    added: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> Any:
    """Byte-level BPE with merges of these texts, and a family's tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    raw.train_from_iterator(texts, trainer)
    raw.add_special_tokens(list(special))
    raw.add_tokens(list(added))
    first = {"bos_token": special[0]} if special else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=eos, chat_template=template, **first
    )
