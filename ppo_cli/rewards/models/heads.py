"""The heads of reward models: network, format and length of each kind; and loading a model.

Most compute one number from the hidden state at the last token. ArmoRM computes 19 objectives
there and weights them by a gate that depends on the prompt: with h the hidden state at the last
token and p the one at the end of the prompt (the last `<|eot_id|>` before an assistant's header),
    objectives r = R h,   gate g = s * softmax(MLP(p) / T),   score = sum_o g_o (r M)_o
with R `regression_layer`, M `reward_transform_matrix`, s `gating.logit_scale`, T the temperature
(arXiv:2406.12845). A sample without such a header has no gate: its score is NaN.

Legend: B samples, L tokens, H hidden size, O objectives or rows of a head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from ppo_cli.config.models.known_models import HEADS as PATTERNS
from ppo_cli.config.models.known_models import AdapterChoice, choose_adapter, find_model_folder
from ppo_cli.config.models.weight_files import read_json
from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import MissingPart, ModelError, first_line, is_out_of_memory, plural
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.rewards.judge.rubric import Rubric, read_rubric
from ppo_cli.rewards.models.base import LoadedModel, Network, Scores
from ppo_cli.rewards.models.checkpoint import (
    Checkpoint,
    check_finite,
    fetch,
    freeze,
    is_unneeded,
    last_BH,
    load_body,
    load_module,
    pack_left,
)
from ppo_cli.rewards.models.formats import (
    DAMAGED,
    ChatFormat,
    FormatClass,
    PairFormat,
    StarlingFormat,
    load_part,
)


@dataclass(frozen=True)
class Parts:
    """What a network is built from; `outputs` are the user's weights of the head's rows."""

    checkpoint: Checkpoint
    config: Any
    dtype: torch.dtype
    tokenizer: Any
    outputs: Sequence[float]


class LeftPacked:
    """A network around a module that requires rows without padding on the left."""

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module = freeze(module)

    @torch.inference_mode()
    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        """Score a padded batch."""
        device = next(self.module.parameters()).device
        types_BL = None if type_ids_BL is None else type_ids_BL.to(device)
        scores: Scores = self.module(*pack_left(ids_BL.to(device), mask_BL.to(device), types_BL))
        return scores


class BodyAndHead(nn.Module):
    """A body and a linear head at the last token: its row, or the weighted sum of its rows."""

    def __init__(
        self, body: nn.Module, weight_OH: Tensor, bias_O: Tensor | None,
        rows: RowWeights | CriteriaRows,
    ) -> None:  # fmt: skip
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(weight_OH)
        self.bias = None if bias_O is None else nn.Parameter(bias_O)
        self._rows = rows

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, types_BL: Tensor | None) -> Scores:
        """Score in float32; the body of a causal model has no token types."""
        hidden_BLH = hidden_states(self.body, ids_BL, mask_BL)
        output_BO = functional.linear(last_BH(hidden_BLH, mask_BL), self.weight, self.bias)
        return self._rows.scores(output_BO)


def hidden_states(body: nn.Module, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the last hidden states (B, L, H) of left-packed rows."""
    out = body(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False)
    hidden_BLH: Tensor = out.last_hidden_state
    return hidden_BLH


@dataclass(frozen=True)
class RowWeights:
    """Names and weights of the rows of a head."""

    weights: tuple[float, ...]
    names: tuple[str, ...]

    def scores(self, output_BO: Tensor) -> Scores:
        """Return the weighted sum of the rows; several rows become objectives by name."""
        if len(self.names) == 1 and self.weights == (1.0,):
            return Scores(output_BO[:, 0])
        # Several rows: the weighted sum, and each row as an objective.
        weights_O = output_BO.new_tensor(self.weights)
        each = {name: output_BO[:, row] for row, name in enumerate(self.names)}
        return Scores((output_BO * weights_O).sum(-1), each if len(each) > 1 else {})


CRITERIA_FILE = "criteria.json"  # in the folder of a model that was fitted to labels


@dataclass(frozen=True)
class CriteriaRows:
    """The rows of a head that decide criteria: the sigmoid of a row is its grade."""

    rubric: Rubric

    def scores(self, output_BO: Tensor) -> Scores:
        """Return the value of the grades; several criteria become objectives by name."""
        grades_BO, criteria = output_BO.sigmoid(), self.rubric.criteria
        score_B = output_BO.new_tensor([self.rubric.value(grades) for grades in grades_BO.tolist()])
        faults_O = output_BO.new_tensor([criterion.fault for criterion in criteria])
        credits_BO = (faults_O - grades_BO).abs()
        each = {f"rubric/{c.name}": credits_BO[:, i] for i, c in enumerate(criteria)}
        return Scores(score_B, each if len(each) > 1 else {})


def row_weights(
    path: Path, rows: int, config: Any, outputs: Sequence[float]
) -> RowWeights | CriteriaRows:
    """Return how a head's rows make the score: by criteria, or by weights of the settings."""
    if not outputs and (criteria := read_json(path / CRITERIA_FILE)):
        rubric = read_rubric(criteria, str(path / CRITERIA_FILE), fixed=True)
        if len(rubric.criteria) != rows:
            raise ModelError(f"{path} has {rows} outputs, but {CRITERIA_FILE} has other criteria.")
        return CriteriaRows(rubric)
    if len(outputs) != rows and (outputs or rows > 1):
        raise ModelError(
            f"{path} has {plural(rows, 'output')}, and reward.model.outputs holds "
            f"{len(outputs)} weights; say how they count with reward.model.outputs="
            f"[{','.join(['1', *['0'] * (rows - 1)])}] or other weights."
        )
    # Names from the config, if they are complete and distinct.
    labels = getattr(config, "id2label", None) or {}
    named = len(labels) == rows and len(set(labels.values())) == rows
    names = (str(labels[i]) if named and i in labels else f"output_{i}" for i in range(rows))
    return RowWeights(tuple(outputs) or (1.0,), tuple(names))


def linear_head(
    checkpoint: Checkpoint, stem: str, hidden: int, *, bias: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the weight (O, H) of a head, and with `bias` its bias if the checkpoint has one."""
    # The head is read in float32, independent of the body's dtype.
    names = [f"{stem}.weight"]
    if bias and f"{stem}.bias" in checkpoint.names:
        names.append(f"{stem}.bias")
    tensors = checkpoint.head(names)
    check_finite(tensors.items(), checkpoint.folder)
    weight_OH = tensors[names[0]]
    if weight_OH.ndim != 2 or weight_OH.shape[1] != hidden:
        raise ModelError(
            f"{checkpoint.folder}: {names[0]} has the shape {list(weight_OH.shape)}, and the body "
            f"gives {hidden} numbers a token: head and body are not of one model."
        )
    bias_O = tensors.get(f"{stem}.bias")
    if bias_O is not None and bias_O.shape != weight_OH.shape[:1]:
        raise ModelError(
            f"{checkpoint.folder}: {stem}.bias has {len(bias_O)} numbers for "
            f"{len(weight_OH)} outputs."
        )
    return weight_OH, bias_O


def load_decoder(
    parts: Parts, stem: str, *, bias: bool = True, bodies: tuple[str, ...] = ()
) -> Network:
    """Load body and head of a causal model; `bodies` orders the prefixes of the body."""
    checkpoint, config = parts.checkpoint, parts.config
    hidden = config.get_text_config().hidden_size
    weight_OH, bias_O = linear_head(checkpoint, stem, hidden, bias=bias)
    rows = row_weights(checkpoint.folder, len(weight_OH), config, parts.outputs)
    body = load_body(checkpoint, config, parts.dtype, prefer=bodies)
    return LeftPacked(BodyAndHead(body, weight_OH, bias_O, rows))


def load_seqcls(parts: Parts) -> Network:
    """Load a sequence classifier: a decoder, whose head is called `score`, or an encoder."""
    decoder = parts.checkpoint.starting_with("score.")
    return load_decoder(parts, "score") if decoder else load_encoder(parts)


def load_starling(parts: Parts) -> Network:
    """Load the copy of the body that the head was trained with, and the head."""
    bodies = ("transformer.", "model.model.", "model.")
    return load_decoder(parts, "v_head", bias=False, bodies=bodies)


class Encoder(nn.Module):
    """Scores with the forward pass of transformers' sequence classifier."""

    def __init__(self, model: Any, rows: RowWeights | CriteriaRows) -> None:
        super().__init__()
        self.model = model
        self._rows = rows
        # Types need an embedding table of at least two types.
        self._takes_types = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, types_BL: Tensor | None) -> Scores:
        """Score; token types are passed to families that have them."""
        types = {"token_type_ids": types_BL} if self._takes_types and types_BL is not None else {}
        out = self.model(input_ids=ids_BL, attention_mask=mask_BL.long(), **types)
        return self._rows.scores(out.logits.float())


def load_encoder(parts: Parts) -> Network:
    """Load an encoder's sequence classifier, with its head in float32."""
    checkpoint, config = parts.checkpoint, parts.config
    kind = _find_classifier_class(config, checkpoint)
    # The number of outputs is the checkpoint's: a config may have transformers' default of 2.
    outputs = ("classifier.weight", "classifier.out_proj.weight")
    output_name = next((name for name in outputs if name in checkpoint.names), None)
    count = checkpoint.shape(output_name)[0] if output_name else int(config.num_labels)
    config.num_labels = count
    # All parameters outside the body belong to the head, and must be in the checkpoint.
    with torch.device("meta"):
        bare = kind(config)
    body = f"{kind.base_model_prefix}."
    heads = [name for name, _ in bare.named_parameters() if not name.startswith(body)]
    # The head is read in float32 here, and restored after transformers has cast it.
    raw = checkpoint.head(heads)
    check_finite(raw.items(), checkpoint.folder)
    module_names = set(bare.state_dict())
    weights = {
        name: checkpoint.lazy(name)
        for name in checkpoint.names
        if name in module_names or (name.startswith(body) and not is_unneeded(name))
    }
    rows = row_weights(checkpoint.folder, count, config, parts.outputs)
    module = load_module(kind, checkpoint, config, weights, parts.dtype)
    _restore_head(module, kind.base_model_prefix, raw)
    return LeftPacked(Encoder(module, rows))


def _find_classifier_class(config: Any, checkpoint: Checkpoint) -> Any:
    """Return transformers' sequence classifier for a config; ModelError if there is none."""
    kinds = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in kinds:
        raise ModelError(
            f"{checkpoint.folder}: transformers has no sequence classifier for the model type "
            f"{config.model_type}."
        )
    with warnings.catch_warnings():  # importing DeBERTa's module warns about torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        return kinds[type(config)]


def _restore_head(module: Any, body: str, raw: dict[str, Tensor]) -> None:
    """Set the head to the saved tensors in float32, and cast its inputs to float32."""
    parameters = dict(module.named_parameters())
    for name, tensor in raw.items():
        parameters[name].data = tensor.clone()
    for name, child in module.named_children():
        if name != body:
            child.float()
            child.register_forward_pre_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    floating = (isinstance(value, Tensor) and value.is_floating_point() for value in inputs)
    return tuple(v.float() if cast else v for v, cast in zip(inputs, floating, strict=True))


# The end of the prompt in a Llama 3 chat, and ArmoRM's objectives in the order of its rows.
HEADER = ("<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n")
OBJECTIVES = (
    "helpsteer-helpfulness", "helpsteer-correctness", "helpsteer-coherence",
    "helpsteer-complexity", "helpsteer-verbosity",
    "ultrafeedback-overall_score", "ultrafeedback-instruction_following",
    "ultrafeedback-truthfulness", "ultrafeedback-honesty", "ultrafeedback-helpfulness",
    "beavertails-is_safe", "prometheus-score", "argilla-overall_quality", "argilla-judge_lm",
    "code-complexity", "code-style", "code-explanation", "code-instruction-following",
    "code-readability",
)  # fmt: skip


class GatedRewards(nn.Module):
    """ArmoRM: the body in its dtype, and in float32 the objectives and the gate."""

    def __init__(
        self, body: nn.Module, head: Mapping[str, Tensor], temperature: float,
        header: Sequence[int], names: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__()
        self.body = body
        self.regression_OH = nn.Parameter(head["regression_layer.weight"])
        self.transform_OO = nn.Parameter(head["reward_transform_matrix"])
        self.scale = nn.Parameter(head["gating.logit_scale"])
        self._temperature = temperature
        self._header = tuple(header)
        self._names = tuple(names)
        # Each layer of the gate has a weight and a bias, hence the half.
        layers = sum(name.startswith("gating.layers.") for name in head) // 2
        self.weights = nn.ParameterList(head[f"gating.layers.{i}.weight"] for i in range(layers))
        self.biases = nn.ParameterList(head[f"gating.layers.{i}.bias"] for i in range(layers))

    def gate_BO(self, prompt_BH: Tensor) -> Tensor:
        """Return the weight of each objective, from the hidden state at the end of the prompt."""
        x = prompt_BH
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = functional.linear(x if index == 0 else x.relu(), weight, bias)
        return functional.softmax(x / self._temperature, dim=-1) * self.scale[0]

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, types_BL: Tensor | None) -> Scores:
        """Return the gated sum (NaN without an assistant's header) and the raw objectives."""
        # The gate reads where the last header starts, the rewards at the last token.
        gates_B = find_last(ids_BL, mask_BL, self._header)
        hidden_BLH = hidden_states(self.body, ids_BL, mask_BL)
        rewards_BO = functional.linear(last_BH(hidden_BLH, mask_BL), self.regression_OH)
        rows = torch.arange(len(ids_BL), device=ids_BL.device)
        prompt_BH = hidden_BLH[rows, gates_B.clamp(min=0)].float()
        score_B = (self.gate_BO(prompt_BH) * (rewards_BO @ self.transform_OO)).sum(-1)
        score_B = score_B.masked_fill(gates_B < 0, float("nan"))
        return Scores(score_B, {name: rewards_BO[:, i] for i, name in enumerate(self._names)})


def find_last(ids_BL: Tensor, mask_BL: Tensor, pattern: Sequence[int]) -> Tensor:
    """Return the start of the last occurrence of `pattern` in each row; -1 for none."""
    width = len(pattern)
    # A batch shorter than the pattern has no window at all.
    if ids_BL.shape[1] < width:
        return ids_BL.new_full((len(ids_BL),), -1)
    pattern_ids = ids_BL.new_tensor(pattern)
    # Compare all windows of the pattern's width at once.
    windows = ids_BL.unfold(1, width, 1)
    inside = mask_BL[:, width - 1 :].bool()  # rows are left-packed: windows that end in the row
    hits = (windows == pattern_ids).all(-1) & inside
    places = torch.arange(hits.shape[1], device=hits.device).expand_as(hits)
    return torch.where(hits, places, -1).max(dim=-1).values


def load_armorm(parts: Parts) -> Network:
    """Load ArmoRM by tensor names; the checkpoint's Python code is never run."""
    checkpoint, config = parts.checkpoint, parts.config
    # Check names and shapes before the large body is loaded.
    shapes = _expected_shapes(config)
    head = checkpoint.head(shapes)
    check_finite(head.items(), checkpoint.folder)
    for name, shape in shapes.items():
        if tuple(head[name].shape) != shape:
            raise ModelError(
                f"{checkpoint.folder}: {name} has the shape {list(head[name].shape)}, and its "
                f"config.json requires {list(shape)}: config and weights are not of one model."
            )
    body = load_body(checkpoint, config, parts.dtype)
    temperature = float(_get_field(config, "gating_temperature", 10.0))
    count = len(head["regression_layer.weight"])
    # The published names, or numbers if the model has another number of objectives.
    names = OBJECTIVES if count == len(OBJECTIVES) else [f"objective_{i}" for i in range(count)]
    return LeftPacked(GatedRewards(body, head, temperature, header_ids(parts.tokenizer), names))


def header_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of an assistant's header in a Llama 3 chat, by the model's tokenizer."""
    vocabulary = set(tokenizer.get_added_vocab())
    absent = [token for token in HEADER if token.startswith("<|") and token not in vocabulary]
    if absent:
        raise ModelError(
            f"The tokenizer has no {', '.join(absent)}, and ArmoRM's gate needs Llama 3's chat "
            "tokens: set reward.model.tokenizer to the tokenizer that belongs to it."
        )
    ids = tokenizer("".join(HEADER), add_special_tokens=False)["input_ids"]
    return tuple(int(i) for i in ids)


def _expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of ArmoRM's tensors by its config."""
    objectives = int(_get_field(config, "num_objectives", len(OBJECTIVES)))
    hidden_layers = int(_get_field(config, "gating_n_hidden", 3))
    wide = int(_get_field(config, "gating_hidden_dim", 1024))
    # Layer sizes of the gate: from the hidden state over its hidden layers to the objectives.
    sizes = [config.hidden_size, *[wide] * hidden_layers, objectives]
    shapes: dict[str, tuple[int, ...]] = {
        "regression_layer.weight": (objectives, config.hidden_size),
        "reward_transform_matrix": (objectives, objectives),
        "gating.logit_scale": (1,),
    }
    for i, (size_in, size_out) in enumerate(pairwise(sizes)):
        shapes[f"gating.layers.{i}.weight"] = (size_out, size_in)
        shapes[f"gating.layers.{i}.bias"] = (size_out,)
    return shapes


def _get_field(config: Any, name: str, default: float) -> float:
    """Return a field of ArmoRM's config; the defaults are those of its published class."""
    value = vars(config).get(name)
    return default if value is None else float(value)


@dataclass(frozen=True)
class Head:
    """A kind of reward model: how it is loaded, and its format.

    `not_finite` explains a score that is not finite.
    """

    load: Callable[[Parts], Network]
    format: FormatClass = ChatFormat
    not_finite: str = ""


# By the names of `HEADS` in `config/models/known_models.py`, which recognises a kind by its files.
HEADS = {
    "seqcls": Head(load_seqcls),
    "armorm": Head(
        load_armorm,
        not_finite="ArmoRM does so where it finds no assistant's header",
    ),
    "starling": Head(load_starling, StarlingFormat),
    "pair": Head(load_encoder, PairFormat),
}  # fmt: skip

# Positions of a body whose config and tokenizer give no limit.
_DEFAULT_LIMIT = 2048
_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")
_OF_ROBERTA = ("roberta", "camembert", "longformer", "mpnet", "xmod", "data2vec-text", "ibert")
# transformers reports a missing limit of a tokenizer as a huge number.
_NO_LIMIT = 10**6


def hard_limit(config: Any, tokenizer: Any) -> int:
    """Return the most tokens of a row: the body's positions, else the tokenizer's limit."""
    text = config.get_text_config()
    for field in _FIELDS:
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            # Families derived from RoBERTa's: their positions start after the pad token's id.
            kin = any(word in text.model_type for word in _OF_ROBERTA)
            return value - (int(text.pad_token_id or 0) + 1 if kin else 0)
    limit = getattr(tokenizer, "model_max_length", _NO_LIMIT)
    return int(limit) if limit < _NO_LIMIT else _DEFAULT_LIMIT


def load_reward_model(settings: ModelReward) -> LoadedModel:
    """Load body, head and tokenizer of `settings.path` onto its device."""
    # Device and precision, then adapter, config and tokenizer, then the weights.
    device = open_device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    path = str(settings.path)
    folder = user_path(path)
    if not folder.is_dir():  # a model of the hub, which is downloaded
        cached = find_model_folder(path)  # refuses names that are not valid on the hub
        usable = cached if settings.revision is None else None
        folder = usable or fetch(path, settings.revision)
    choice = choose_adapter(str(folder), settings.adapter)
    config = _load_config(folder, settings.tokenizer, choice)
    source = settings.tokenizer or str(folder)
    what = f"The tokenizer of the reward model {source} does not load"
    advice = "Set reward.model.tokenizer to another one."
    tokenizer = load_part(AutoTokenizer, source, what, advice)
    checkpoint = Checkpoint(folder)
    head = HEADS[choice.adapter]
    # Load, and name the cause of a failure: too little memory on the device, or a damaged file.
    try:
        network = head.load(Parts(checkpoint, config, dtype, tokenizer, settings.outputs))
        checkpoint.check_all_used(choice.adapter)
        network.module.to(device)
    except ModelError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"{settings.path} does not fit into the free memory of {device}: choose another "
            "device with --reward_model_device."
        ) from error
    except DAMAGED as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{settings.path} does not load: {first_line(error)}.") from error
    # A token to pad with: any token that has an embedding.
    rows = int(getattr(config.get_text_config(), "vocab_size", 1))
    ids = (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id)
    return LoadedModel(
        adapter=choice.adapter,
        reason=choice.reason,
        network=network,
        tokenizer=tokenizer,
        max_length=min(
            hard_limit(config, tokenizer),
            settings.max_length or PATTERNS[choice.adapter].max_length,
        ),
        pad_token_id=next((i for i in ids if isinstance(i, int) and 0 <= i < rows), 0),
    )


def open_device(name: str) -> torch.device:
    """Return the device called `name`; MissingPart if torch cannot use that GPU."""
    if name != "cpu" and (fault := Machine.here().gpu_fault(1)):
        raise MissingPart(str(fault))
    return torch.device(name)


def _load_config(folder: Path, base: str | None, choice: AdapterChoice) -> Any:
    """Return the checkpoint's config, or that of its base model if it has no `model_type`."""
    # Quantised weights would need the quantiser's kernels.
    written = read_json(folder / "config.json")
    if "quantization_config" in written:
        raise ModelError(f"{folder} is quantised; give the reward model's plain weights.")
    source = str(folder)
    if not written.get("model_type"):
        if base is None:
            raise ModelError(
                f"{folder} has no config.json that says its model_type, so its body cannot be "
                "built: put the config.json of its base model there, or set reward.model.tokenizer "
                "to a folder with config and tokenizer of the base model."
            )
        source = base
    what = f"The config of {source} cannot be read as {choice.adapter}"
    return load_part(AutoConfig, source, what, "Code that comes with a model is never run.")
