"""A byte-level BPE tokenizer in Qwen2's form, with merges learnt from the task's own words.

All 256 bytes are in the vocabulary, so any text can be encoded; a digit is always one token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
CONTEXT = 4096

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

# As Qwen writes calls and results, but a tool is described by its name and arguments alone.
TOOLS_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}(
{{- tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|im_start|>user{%- endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\n' }}{%- endif -%}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- set arguments = call.function.arguments -%}
{{ arguments if arguments is string else arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
MARKS_OF_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def build_tokenizer(
    texts: Sequence[str], template: str = CHAT_TEMPLATE, marks: Sequence[str] = ()
) -> Qwen2Tokenizer:
    """Learn merges from `texts` and dress them as a Qwen2 tokenizer with a ChatML template.

    `marks` become tokens that, unlike special ones, are part of the decoded text.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 3,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = learnt["vocab"]
    for token in (PAD, START, END):
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, END],
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    tokenizer.chat_template = template
    return tokenizer
