"""Value models: the backbone of any causal language model with a head of one number per token.

Their files are those of transformers' token classifiers, which can load them for every family that
has such a class. A composite checkpoint (text, images, sound) gives its text part.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import TokenClassifierOutput

from ppo_cli.config.models.folder import VALUE_HEADS
from ppo_cli.engine.models.loading import load_weights
from ppo_cli.engine.models.policy import ValueModel, backbone_name
from ppo_cli.engine.pretrained import load_config
from ppo_cli.errors import ModelError

CRITIC_FLAG = "--critic_model"
HEAD = "score"
TASK = "ForTokenClassification"
CLASSIFIES_TEXTS = "ForSequenceClassification"
# Names of classes of attention, state spaces and short convolutions.
MIXES_TOKENS = re.compile(r"(Attention\d*|Mixer|DeltaNet|Conv|MambaLayer|RecurrentBlock)$")
# Suffixes of transformers' classes of causal language models.
CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def load_value_model(
    path: str,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    empty: bool = False,
    flag: str = CRITIC_FLAG,
) -> ValueModel:
    """Load a backbone with a value head; a head that the checkpoint lacks starts at zero.

    The head of a reward model (a sequence classifier with one label) becomes the value head. An
    `empty` model has all tensors on the meta device.
    """
    options: dict[str, Any] = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    config = load_config(path, flag, trust_remote_code)
    text = config.get_text_config(decoder=True)
    composite = type(text) is not type(config)
    text.num_labels = 1
    builder = _choose_class(text if composite else config, config, options)
    # A composite model is loaded in full, and its text backbone moved into a value model.
    if composite:
        full_model, _ = load_weights(
            AutoModelForCausalLM, path, "language model", flag, empty=empty, config=config,
            **options,
        )  # fmt: skip
        model = _take_text_part(full_model, builder, options)
        fresh = {f"{name}.weight" for name in VALUE_HEADS}
    else:
        model, fresh = load_weights(
            builder, path, "value model", flag, heads=VALUE_HEADS, replace_heads=True,
            empty=empty, config=config, **options, **_rename_head(builder, config, options),
        )  # fmt: skip
    name = value_head(model)
    if name is None:
        raise ModelError(
            f"The architecture of {path} has no plain value head; choose another with {flag}."
        )
    head = getattr(model, name)
    # With a zero head all first values are 0, and the first updates do not disturb the backbone.
    if f"{name}.weight" in fresh:
        nn.init.zeros_(head.weight)
    # Heads of sequence classifiers have no bias.
    if head.bias is not None and fresh:
        nn.init.zeros_(head.bias)
    return ValueModel(model=model, backbone=model.base_model, head=head)


def freeze_attention(model: Any) -> Any:
    """Freeze attention, other layers that mix tokens, and embeddings in place; return the model.

    MLPs, experts, norms between them and the head stay trained.
    """
    mixers = [part for part in model.modules() if MIXES_TOKENS.search(type(part).__name__)]
    if not mixers:
        raise ModelError(
            f"critic.model.freeze_attention: a {model.config.model_type} model has no layer of "
            "attention that is known here; leave it out."
        )
    for part in (*mixers, *(part for part in model.modules() if isinstance(part, nn.Embedding))):
        part.requires_grad_(False)
    return model


def _rename_head(builder: Any, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option that loads a sequence classifier's head under a token classifier's name."""
    if not any(name.endswith(CLASSIFIES_TEXTS) for name in config.architectures or ()):
        return {}
    with torch.device("meta"):
        head = value_head(builder.from_config(config, **options))
    return {} if head in (None, HEAD) else {"key_mapping": {rf"^{HEAD}\.": f"{head}."}}


def value_head(model: Any) -> str | None:
    """Return the attribute of the value head; None if the model has none."""
    names = (name for name in VALUE_HEADS if isinstance(getattr(model, name, None), nn.Linear))
    return next(names, None)


def _choose_class(text: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the class of a family's value models: transformers' token classifier, or our own."""
    remote = getattr(config, "auto_map", {})
    if type(text) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or (
        AutoModelForTokenClassification.__name__ in remote
    ):
        return AutoModelForTokenClassification
    # Some composite checkpoints have a causal language model under their own name only.
    source = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config
    trust = options.get("trust_remote_code", False)  # a kernel is refused where weights load
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(source, trust_remote_code=trust)
    except ValueError as error:
        raise ModelError(
            f"transformers has no causal language model of the type {config.model_type}, so it "
            f"cannot be a critic: name another model with {CRITIC_FLAG}."
        ) from error
    return make_token_classifier(causal)


def make_token_classifier(causal: Any) -> type[PreTrainedModel]:
    """Create a token classifier class for the family of a causal LM, which may have no weights.

    It has the same backbone under the same name, so both can load each other's files.
    """
    family = type(causal)
    prefix = backbone_name(causal)
    width = causal.get_output_embeddings().weight.shape[-1]
    # The family's base class: the last ancestor of the causal LM without generation.
    base: Any = next(
        kind
        for kind in family.__mro__
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, GenerationMixin)
    )

    def build(self: Any, config: Any) -> None:
        base.__init__(self, config)
        setattr(self, prefix, getattr(family(config), prefix))
        setattr(self, HEAD, nn.Linear(width, config.num_labels))
        self.post_init()

    def forward(
        self: Any,
        input_ids: Any = None,
        labels: Any = None,
        return_dict: Any = None,
        **options: Any,
    ) -> TokenClassifierOutput:
        hidden = getattr(self, prefix)(input_ids=input_ids, **options).last_hidden_state
        return TokenClassifierOutput(logits=getattr(self, HEAD)(hidden))

    def from_config(kind: Any, /, config: Any, *, trust_remote_code: bool, **options: Any) -> Any:
        return kind._from_config(config, **options)  # the code has run by now

    members = {
        "__init__": build,
        "forward": forward,
        # transformers converts weights only for classes of its modules.
        "__module__": family.__module__,
        "base_model_prefix": prefix,
        "config_class": type(causal.config),
        "from_config": classmethod(from_config),
    }
    return type(CAUSAL.sub("", family.__name__) + TASK, (base,), members)


def _take_text_part(full_model: Any, builder: Any, options: dict[str, Any]) -> Any:
    """Build a value model around the text backbone of a composite model."""
    text = full_model.config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = builder.from_config(text, dtype=torch.float32, **options)
    backbone = next(part for part in full_model.modules() if type(part) is type(model.base_model))
    setattr(model, model.base_model_prefix, backbone)
    name = value_head(model)
    if full_model.device.type != "meta" and name is not None:
        getattr(model, name).to_empty(device=full_model.device)
    return model.eval()
