"""The model that is fitted: a decoder with one score, read at the last token of a sample.

A model without a chat template gets one, saved with it, so that scoring uses the same.
Legend: B samples, L tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import DAMAGED, load_config, load_tokenizer
from ppo_cli.errors import ModelError, did_you_mean, first_line
from ppo_cli.rewards.local.base import Encoded, LoadedModel, Scores
from ppo_cli.rewards.local.load import hard_limit

TRANSCRIPT = (
    "{%- for message in messages -%}"
    "{%- set name = {'user': 'Human', 'assistant': 'Assistant'}.get("
    "message['role'], message['role'] | capitalize) -%}"
    "{{- '\\n\\n' + name + ': ' + message['content'] -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n\\nAssistant: ' -}}{%- else -%}"
    "{{- eos_token -}}{%- endif -%}"
)
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TEMPLATES = {"transcript": TRANSCRIPT, "chatml": CHATML}


def set_template(tokenizer: Any, path: str, wanted: str | None) -> None:
    """Give the tokenizer the template that was asked for; it must have one in the end."""
    if wanted is not None:
        tokenizer.chat_template = read_template(wanted)
    if not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer of {path} has no chat template, so prompt and reply cannot be put "
            "together. Name one with --template: transcript (Human: … Assistant: …), chatml, or a "
            "file with a Jinja chat template."
        )


def read_template(wanted: str) -> str:
    """Return the text of a template: by name, as text, or from a file."""
    if wanted in TEMPLATES:
        return TEMPLATES[wanted]
    text = wanted
    if "{{" not in wanted and "{%" not in wanted:
        path = Path(wanted).expanduser()
        if not path.is_file():
            raise ModelError(
                f"--template {wanted}: no such file, and none of the names "
                f"{', '.join(TEMPLATES)}.{did_you_mean(wanted, TEMPLATES)}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"--template {wanted} cannot be read as text ({error}).") from error
    if "messages" not in text:
        raise ModelError(
            f"--template {wanted} does not name `messages`: it is no Jinja chat template."
        )
    return text


LONGEST = 2048
PAD_WORD = "<|pad|>"


@dataclass
class ScoreNetwork:
    """A sequence classifier with one row; with a frozen body, what it says is kept."""

    module: Any
    compute: Compute
    pad_token_id: int
    frozen: bool = False
    notes: list[str] = field(default_factory=list)
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        """Score a padded batch."""
        return Scores(self._head(self._last_hidden_BH(ids_BL, mask_BL)))

    def score_samples(self, samples: Sequence[Encoded]) -> Tensor:
        """Score samples of any length, (B,) in float32."""
        if not self.frozen:
            return self._head(self._read_BH(samples))
        fresh = {s.ids: s for s in samples if s.ids not in self._known}
        if fresh:
            with torch.no_grad():
                for ids, hidden_H in zip(fresh, self._read_BH(list(fresh.values())), strict=True):
                    self._known[ids] = hidden_H.cpu()
        hidden_BH = torch.stack([self._known[s.ids] for s in samples])
        return self._head(hidden_BH.to(self.compute.device))

    def _read_BH(self, samples: Sequence[Encoded]) -> Tensor:
        longest = max(len(s.ids) for s in samples)
        ids_BL = torch.full((len(samples), longest), self.pad_token_id)
        mask_BL = torch.zeros_like(ids_BL)
        for row, sample in enumerate(samples):
            ids_BL[row, : len(sample.ids)] = torch.tensor(sample.ids)
            mask_BL[row, : len(sample.ids)] = 1
        device = self.compute.device
        return self._last_hidden_BH(ids_BL.to(device), mask_BL.to(device))

    def _last_hidden_BH(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        with self.compute.autocast():
            out = self.module.base_model(
                input_ids=ids_BL, attention_mask=mask_BL, use_cache=False
            ).last_hidden_state
        places_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        last_B = (mask_BL * places_L).argmax(dim=1)
        hidden_BH: Tensor = out[torch.arange(len(last_B), device=out.device), last_B]
        return hidden_BH.float()

    def _head(self, hidden_BH: Tensor) -> Tensor:
        with torch.autocast(hidden_BH.device.type, enabled=False):
            scores: Tensor = self.module.score(hidden_BH).squeeze(-1)
        return scores

    def size(self) -> int:
        """How many numbers the model has."""
        return sum(p.numel() for p in self.module.parameters())


def load_to_fit(
    path: str,
    *,
    compute: Compute,
    seed: int,
    frozen: bool = False,
    template: str | None = None,
    max_length: int | None = None,
) -> LoadedModel:
    """Load a causal LM, or a reward model to go on from, ready to be fitted."""
    tokenizer = load_tokenizer(path)
    set_template(tokenizer, path, template)
    model, fresh = load_classifier(path)
    generator = torch.Generator().manual_seed(seed)
    pad = choose_pad(tokenizer, model)
    notes = []
    if fresh:
        start_head(model.score, generator, zero=frozen)
    else:
        notes.append(f"{path} has a score head already: the fit goes on from it.")
    if frozen:
        model.base_model.requires_grad_(False)
    model.to(compute.device)
    model.eval()
    network = ScoreNetwork(model, compute, pad, frozen, notes)
    return LoadedModel(
        adapter="seqcls",
        reason="it is being fitted",
        network=network,
        tokenizer=tokenizer,
        max_length=fitting_length(model.config, tokenizer, max_length),
        pad_token_id=pad,
    )


def load_classifier(path: str) -> tuple[Any, bool]:
    """Load a sequence classifier with one row, and tell whether its head is a fresh one."""
    config = load_config(path, "--model", False)
    config.num_labels = 1
    config.id2label, config.label2id = {0: "score"}, {"score": 0}
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, dtype=torch.float32, output_loading_info=True
        )
    except DAMAGED as error:
        raise ModelError(
            f"{path} does not load as a model with one score ({first_line(error)}). Give "
            "--model a causal language model, such as RUN/checkpoints/latest/actor, or a reward "
            "model with one score."
        ) from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{path} ({type(model).__name__}) has no plain `score` head; give --model a causal "
            "language model."
        )
    absent = [key for key in info["missing_keys"] if not key.startswith("score.")]
    if absent:
        raise ModelError(
            f"{path} lacks weights of its body ({absent[0]} and {len(absent) - 1} more); give "
            "--model a complete checkpoint."
        )
    # The head of a value model has a bias, and says something else.
    foreign = any(key.startswith("score.") for key in info["unexpected_keys"])
    return model, foreign or bool(info["missing_keys"])


def start_head(head: nn.Linear, generator: torch.Generator, *, zero: bool) -> None:
    """Start at zero where the head alone is trained, else at a small random direction.

    A zero head would pass no gradient to the body in the first step, and a tiny one later.
    """
    with torch.no_grad():
        head.weight.zero_()
        if not zero:
            spread = 1 / math.sqrt(head.in_features + 1)
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * spread)
        if head.bias is not None:
            head.bias.zero_()


def choose_pad(tokenizer: Any, model: Any) -> int:
    """Give tokenizer and model a pad token that ends no sample: pooling looks for the pads."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        unused = tokenizer.unk_token
        known = unused is not None and unused not in (tokenizer.eos_token, tokenizer.bos_token)
        if known:
            tokenizer.pad_token = unused
        else:
            tokenizer.add_special_tokens({"pad_token": PAD_WORD})
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.pad_token_id >= rows:
        model.resize_token_embeddings(tokenizer.pad_token_id + 1, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.pad_token_id] = 0.0
    model.config.pad_token_id = int(tokenizer.pad_token_id)
    return int(tokenizer.pad_token_id)


def fitting_length(config: Any, tokenizer: Any, wanted: int | None) -> int:
    """Return the most tokens of a sample: what was asked for, within what the model can read."""
    made_for = hard_limit(config, tokenizer)
    if wanted is not None and wanted > made_for:
        raise ModelError(f"--max_length {wanted}: the model was made for {made_for} tokens.")
    return int(wanted or min(LONGEST, made_for))
