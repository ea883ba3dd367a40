"""The model of a fit, and its training steps.

A decoder with one score, read at the last token of a sample. A model without a chat template gets
one, which is saved with it, so that scoring uses the same. Then the recipe, the losses of pairs
(Bradley-Terry) and of labelled rows (cross-entropy), updates in micro-batches, and evaluation.

Legend: P pairs or rows, S samples of each, O outputs, B samples, L tokens, H hidden size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ppo_cli.config.models.folder import VALUE_HEADS
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.batches.micro_batches import Budget, plan_micro_batches, run_within_memory
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import load_tokenizer, pad_token_id
from ppo_cli.engine.models.loading import load_weights
from ppo_cli.engine.pretrained import load_config
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import ModelError, did_you_mean
from ppo_cli.estimates import Estimate, bootstrap
from ppo_cli.extras.lab.fitting.preferences import EncodedExample
from ppo_cli.paths import user_path
from ppo_cli.report.tracker import Advance
from ppo_cli.rewards.judge.rubric import Rubric
from ppo_cli.rewards.models.base import Encoded, pad
from ppo_cli.rewards.models.checkpoint import last_BH
from ppo_cli.rewards.models.heads import hard_limit, hidden_states

Examples = Sequence[EncodedExample]
# The format of hh-rlhf transcripts.
TRANSCRIPT = (
    "{%- for message in messages -%}"
    "{%- set name = {'user': 'Human', 'assistant': 'Assistant'}.get("
    "message['role'], message['role'] | capitalize) -%}"
    "{{- '\\n\\n' + name + ': ' + message['content'] -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n\\nAssistant: ' -}}{%- else -%}"
    "{{- eos_token -}}{%- endif -%}"
)
# The format of ChatML.
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TEMPLATES = {"transcript": TRANSCRIPT, "chatml": CHATML}


def set_template(tokenizer: Any, path: str, template: str | None) -> None:
    """Set the tokenizer's chat template, if `template` is given; ModelError if it has none."""
    if template is not None:
        tokenizer.chat_template = read_template(template)
    if not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer of {path} has no chat template, so prompt and reply cannot be put "
            "together. Name one with --template: transcript (Human: … Assistant: …), chatml, or a "
            "file with a Jinja chat template."
        )


def read_template(template: str) -> str:
    """Return the text of a template, given by name, as text, or as a file."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    text = template
    # Without template syntax it is the name of a file.
    if "{{" not in template and "{%" not in template:
        path = user_path(template)
        if not path.is_file():
            raise ModelError(
                f"--template {template}: no such file, and none of the names "
                f"{', '.join(TEMPLATES)}.{did_you_mean(template, TEMPLATES)}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"--template {template} cannot be read as text ({error}).") from error
    # A template that ignores `messages` would render every pair alike.
    if "messages" not in text:
        raise ModelError(
            f"--template {template} does not name `messages`: it is not a Jinja chat template."
        )
    return text


DEFAULT_MAX_LENGTH = 2048  # tokens of a sample
# Added where a tokenizer has no pad token other than its end token.
PAD_TOKEN = "<|pad|>"


@dataclass
class ScoreNetwork:
    """A sequence classifier and what it learns; a frozen body's hidden states are cached.

    `max_length` is the token limit of a sample; `notes` are for the user.
    """

    module: Any
    compute: Compute
    tokenizer: Any
    max_length: int
    pad_token_id: int
    frozen: bool = False
    notes: tuple[str, ...] = ()
    objective: PairObjective | GradeObjective = field(default_factory=lambda: PairObjective())
    _cached_hidden: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def score_samples(self, samples: Sequence[Encoded]) -> Tensor:
        """Score samples of any length: (B,) in float32, or (B, O) for several outputs."""
        if not self.frozen:
            return self._apply_head(self._compute_last_hidden_BH(samples))
        # The body does not change: compute each sample's last hidden state once.
        fresh = {s.ids: s for s in samples if s.ids not in self._cached_hidden}
        if fresh:
            with torch.no_grad():
                for ids, hidden_H in zip(
                    fresh, self._compute_last_hidden_BH(list(fresh.values())), strict=True
                ):
                    self._cached_hidden[ids] = hidden_H.cpu()
        hidden_BH = torch.stack([self._cached_hidden[s.ids] for s in samples])
        return self._apply_head(hidden_BH.to(self.compute.device))

    def _compute_last_hidden_BH(self, samples: Sequence[Encoded]) -> Tensor:
        ids_BL, mask_BL, _ = pad(samples, self.pad_token_id, self.compute.device)
        with self.compute.autocast():
            hidden_BLH = hidden_states(self.module.base_model, ids_BL, mask_BL)
        return last_BH(hidden_BLH, mask_BL)

    def _apply_head(self, hidden_BH: Tensor) -> Tensor:
        # The head computes in float32, also under autocast.
        with torch.autocast(hidden_BH.device.type, enabled=False):
            scores: Tensor = self.module.score(hidden_BH).squeeze(-1)
        return scores

    def size(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.module.parameters())


def load_to_fit(
    path: str,
    *,
    compute: Compute,
    seed: int,
    frozen: bool = False,
    template: str | None = None,
    max_length: int | None = None,
    objective: PairObjective | GradeObjective | None = None,
) -> ScoreNetwork:
    """Load a causal LM, or a reward model to continue from, ready for fitting."""
    tokenizer = load_tokenizer(path)
    set_template(tokenizer, path, template)
    objective = objective or PairObjective()
    config = load_config(path, "--model", False)
    # The head's size and labels, which transformers writes into the saved config.
    config.num_labels = len(objective.outputs)
    config.id2label = dict(enumerate(objective.outputs))
    config.label2id = {name: i for i, name in enumerate(objective.outputs)}
    # `fresh` lists missing tensors: a value model's head is not a score head and is replaced.
    model, fresh = load_weights(
        AutoModelForSequenceClassification,
        path,
        "model with one score",
        heads=VALUE_HEADS,
        config=config,
        trust_remote_code=False,
    )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{path} ({type(model).__name__}) has no plain `score` head; give --model a causal "
            "language model."
        )
    generator = torch.Generator().manual_seed(seed)
    pad = choose_pad(tokenizer, model)
    # A head that was loaded continues; a new one needs a start.
    if fresh:
        start_head(model.score, generator, zero=frozen)
    if frozen:
        model.base_model.requires_grad_(False)
    model.to(compute.device)
    # Evaluation mode: the fit runs without dropout.
    model.eval()
    limit = hard_limit(model.config, tokenizer)
    if max_length is not None and max_length > limit:
        raise ModelError(f"--max_length {max_length}: the model reads at most {limit} tokens.")
    longest = max_length or min(DEFAULT_MAX_LENGTH, limit)
    notes = () if fresh else (f"{path} already has a score head: the fit continues from it.",)
    return ScoreNetwork(model, compute, tokenizer, longest, pad, frozen, notes, objective)


def start_head(head: nn.Linear, generator: torch.Generator, *, zero: bool) -> None:
    """Initialise the head: zero if only the head is trained, else a small random direction.

    A zero head would pass no gradient to the body in the first step, and tiny ones later.
    """
    with torch.no_grad():
        head.weight.zero_()
        if not zero:
            spread = 1 / math.sqrt(head.in_features + 1)
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * spread)
        if head.bias is not None:
            head.bias.zero_()


def choose_pad(tokenizer: Any, model: Any) -> int:
    """Give tokenizer and model a pad token other than the end token; returns its id."""
    if pad_token_id(tokenizer) == tokenizer.eos_token_id:
        # Prefer the unknown token, which exists already, unless it is BOS or EOS too.
        unused = tokenizer.unk_token
        usable = unused is not None and unused not in (tokenizer.eos_token, tokenizer.bos_token)
        if usable:
            tokenizer.pad_token = unused
        else:
            tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    # Some models have spare embedding rows; others need one more for the pad token.
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.pad_token_id >= rows:
        model.resize_token_embeddings(tokenizer.pad_token_id + 1, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.pad_token_id] = 0.0
    model.config.pad_token_id = int(tokenizer.pad_token_id)
    return int(tokenizer.pad_token_id)


SMALL_MODEL = 10_000_000  # parameters, below which a model takes the rate of a head
# Rates for a head alone, for a small model, and for all weights of a usual one.
HEAD_LR, SMALL_LR, USUAL_LR = 1e-3, 1e-3, 1e-5


@dataclass(frozen=True)
class Recipe:
    """Training settings of a fit; the flags of `ppo reward fit` define their ranges."""

    epochs: int = 1
    max_steps: int | None = None  # unset: all of the epochs
    lr: float | None = None  # unset: see choose_lr
    warmup: float = 0.05  # share of the steps with a rising learning rate
    weight_decay: float = 0.01
    grad_clip: float = 1.0  # 0: no limit
    batch_size: int = 32  # pairs
    batch_tokens: int = 16384  # in memory at once, padding included
    center: float = 0.0  # weight of (chosen + rejected)^2
    freeze_body: bool = False
    dtype: str | None = None  # unset: bfloat16 on a GPU, else float32
    seed: int = 42  # of head, split and order


@dataclass(frozen=True)
class FitSettings:
    """All settings of a fit: input files, output folder, recipe."""

    data: tuple[str, ...]
    model: str
    out: Path
    recipe: Recipe
    val_data: tuple[str, ...] = ()
    val_share: float = 0.1
    max_length: int | None = None
    template: str | None = None
    skip_bad_rows: bool = False
    overwrite: bool = False
    labels: str | None = None  # the column of labels; unset: pairs
    criteria: str | None = None  # the file of a rubric whose grades the labels are


def choose_lr(recipe: Recipe, parameters: int) -> float:
    """Return the recipe's learning rate, or a default by model size and frozen body."""
    if recipe.lr is not None:
        return recipe.lr
    if recipe.freeze_body:
        return HEAD_LR
    return SMALL_LR if parameters < SMALL_MODEL else USUAL_LR


def pair_losses(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, center: float) -> Tensor:
    """Loss of each pair: -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2.

    The first term is the negative log-likelihood of Bradley & Terry (1952), as in eq. 1 of
    Ouyang et al. 2022 (arXiv 2203.02155), with the margin of Touvron et al. 2023 (2307.09288).
    The second keeps scores around 0 (Eisenstein et al. 2023, 2312.09244), as the first does not
    change when all scores of a prompt move together.
    """
    # A margin asks for a lead of that size before the loss becomes small.
    losses_P = -F.logsigmoid(chosen_P - rejected_P - margin_P)
    if center:
        losses_P = losses_P + center * (chosen_P + rejected_P) ** 2
    return losses_P


@dataclass(frozen=True)
class Figures:
    """Means over pairs; `mean` and `std` are of the scores of all responses."""

    loss: float
    accuracy: float
    margin: float
    mean: float
    std: float

    @classmethod
    def of(cls, loss_P: Tensor, leads: Tensor, scores: Tensor) -> Figures:
        """Compute them; `leads` are the better score of each two minus the worse one."""
        right = (leads > 0).double() + 0.5 * (leads == 0).double()  # a tie counts half
        return cls(*map(float, (
            loss_P.mean(), right.mean(), leads.mean(), scores.mean(), scores.std(correction=0),
        )))  # fmt: skip

    def better_than(self, other: Figures | None) -> bool:
        """Whether accuracy is higher, or equal with a lower loss."""
        return other is None or (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


@dataclass(frozen=True)
class PairObjective:
    """The chosen response of a pair scores above the rejected one."""

    outputs: tuple[str, ...] = ("score",)

    def losses(self, scores_SPO: Tensor, examples: Examples, center: float) -> Tensor:
        """Return `pair_losses` of chosen and rejected: (P,)."""
        margin_P = scores_SPO.new_tensor([pair.targets[0] for pair in examples])
        return pair_losses(scores_SPO[0, :, 0], scores_SPO[1, :, 0], margin_P, center)

    def figures(self, scores_SPO: Tensor, examples: Examples) -> Figures:
        """Return the figures of scored pairs."""
        # In float64, because means of many pairs are compared with each other.
        scores_SPO = scores_SPO.double()
        lead_P = scores_SPO[0, :, 0] - scores_SPO[1, :, 0]
        return Figures.of(self.losses(scores_SPO, examples, 0.0), lead_P, scores_SPO)


@dataclass(frozen=True)
class GradeObjective:
    """The sigmoid of an output is the grade of its criterion; labels are grades in [0, 1]."""

    rubric: Rubric

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the criteria."""
        return tuple(criterion.name for criterion in self.rubric.criteria)

    def losses(self, scores_SPO: Tensor, examples: Examples, center: float) -> Tensor:
        """Return the cross-entropy with the grades, a mean over a row's labels: (P,)."""
        grades_PO = torch.tensor([row.targets for row in examples], device=scores_SPO.device)
        losses_PO = F.binary_cross_entropy_with_logits(
            scores_SPO[0], grades_PO.nan_to_num(), reduction="none"
        )
        known_PO = ~grades_PO.isnan()
        return (losses_PO * known_PO).sum(-1) / known_PO.sum(-1)

    def figures(self, scores_SPO: Tensor, examples: Examples) -> Figures:
        """Return the figures of rows: any two with different labels are a pair."""
        value_P, label_P = map(torch.from_numpy, self._columns(scores_SPO, examples)["score"])
        leads = (value_P[:, None] - value_P)[label_P[:, None] > label_P]
        return Figures.of(self.losses(scores_SPO, examples, 0.0), leads, value_P)

    def agreement(self, scores_SPO: Tensor, rows: Examples) -> dict[str, Estimate]:
        """Return the ranking accuracy of the score and of each criterion, with its interval."""
        columns, prompts = self._columns(scores_SPO, rows), [row.prompt_id for row in rows]
        return {name: rank_agreement(*both, prompts) for name, both in columns.items()}

    def _columns(self, scores_SPO: Tensor, rows: Examples) -> dict[str, tuple[Any, Any]]:
        """Return the prediction and the label of each row: of the score, then of each criterion."""
        predicted_PO = scores_SPO[0].double().sigmoid().numpy()
        grades_PO, value = np.array([row.targets for row in rows]), self.rubric.value
        # A row that lacks a label has no value, and NaN ranks neither above nor below another.
        known = [value(g) if not np.isnan(g).any() else np.nan for g in grades_PO]
        columns = {"score": (np.array([value(g) for g in predicted_PO]), np.array(known))}
        if len(self.outputs) == 1:
            return columns
        return columns | {
            name: (predicted_PO[:, i], grades_PO[:, i]) for i, name in enumerate(self.outputs)
        }


def rank_agreement(scores: Any, labels: Any, prompts: Sequence[str]) -> Estimate:
    """Return how often the better-labelled of two rows scores higher; a tie counts half.

    For labels of two classes that is the area under the ROC curve. The interval is a bootstrap over
    prompts, since the rows of one prompt are alike; undefined if all labels are equal.
    """
    ahead = (labels[:, None] > labels).astype(np.float64)
    right = ahead * ((scores[:, None] > scores) + 0.5 * (scores[:, None] == scores))
    names, prompt_of_row = np.unique(np.array(prompts), return_inverse=True)

    def share(drawn: Any) -> float | None:
        count = np.bincount(drawn, minlength=len(names))[prompt_of_row].astype(np.float64)
        pairs = count @ ahead @ count
        return float(count @ right @ count / pairs) if pairs else None

    return bootstrap(share, len(names), share=True)


@torch.no_grad()
def score_examples(
    network: ScoreNetwork, examples: Examples, batch_tokens: int, advance: Advance
) -> Tensor:
    """Score all samples of pairs or rows: (S, P, O)."""
    samples = [sample for example in examples for sample in example.samples]
    # Micro-batches group samples of similar length; `group` holds positions in `samples`.
    scores_BO = torch.empty(len(samples), len(network.objective.outputs))
    lengths = [len(s.ids) for s in samples]
    for group in plan_micro_batches(lengths, Budget(batch_tokens)):
        scores = network.score_samples([samples[i] for i in group]).float().cpu()
        scores_BO[group] = scores.view(len(group), -1)
        advance(len(group))
    return scores_BO.view(len(examples), -1, scores_BO.shape[1]).transpose(0, 1)


MAX_NONFINITE_STEPS = 5  # in a row, before the fit ends


OUT_OF_MEMORY_ADVICE = (
    "Lower --max_length, train the head alone with --freeze_body, or take a smaller --model."
)


@dataclass(frozen=True)
class FitStep:
    """The figures of a step, before its update."""

    figures: Figures
    loss: float  # with centring
    grad_norm: float
    updated: bool


class Trainer:
    """Runs training steps: holds the optimizer and the count of skipped steps."""

    def __init__(self, network: ScoreNetwork, recipe: Recipe, lr: float, total_steps: int) -> None:
        self.network = network
        self._recipe = recipe
        # Both samples of a pair are in one micro-batch, because the loss couples them.
        paired = isinstance(network.objective, PairObjective)
        samples, row = (2, "pair of 2 x {} tokens") if paired else (1, "row of {} tokens")
        self._budget = Budget(
            max(1, recipe.batch_tokens // samples), row=row, advise=lambda _: OUT_OF_MEMORY_ADVICE
        )
        self._nonfinite_steps = 0
        self.skipped = 0
        self.optimizer = Optimizer(
            network.module,
            Optim(
                lr=lr, lr_warmup_steps_ratio=recipe.warmup, lr_scheduler_type="cosine",
                min_lr_ratio=0.1, weight_decay=recipe.weight_decay,
            ),
            total_steps=total_steps,
            grad_clip=recipe.grad_clip,
            clip_grad_value=None,
        )  # fmt: skip

    def step(self, number: int, pairs: Examples) -> FitStep:
        """Run step `number`, counted from 0; a step that is not finite changes no weights."""
        # Gradient, then clipped update with the scheduled rate.
        self.optimizer.set_progress(number)
        self.optimizer.zero_grad()
        scores_SPO, objective = self.backward(pairs), self.network.objective
        norm, updated = self.optimizer.apply()
        loss = float(objective.losses(scores_SPO, pairs, self._recipe.center).mean())
        # Single bad steps are skipped; several in a row mean that training has diverged.
        self._nonfinite_steps = 0 if updated else self._nonfinite_steps + 1
        self.skipped += not updated
        if self._nonfinite_steps == MAX_NONFINITE_STEPS:
            raise ModelError(
                f"Loss or gradient was not finite in {MAX_NONFINITE_STEPS} steps in a row (up "
                f"to step {number + 1}): the fit cannot continue. Lower --lr, try --dtype "
                "float32, or check whether the weights of --model are whole."
            )
        return FitStep(objective.figures(scores_SPO, pairs), loss, norm, updated)

    def backward(self, pairs: Examples) -> Tensor:
        """Accumulate the gradient of the mean loss; returns the scores (S, P, O)."""
        outputs = len(self.network.objective.outputs)
        scores_SPO = torch.empty(len(pairs[0].samples), len(pairs), outputs)

        def work(group: Sequence[int], last: bool) -> None:
            examples = [pairs[i] for i in group]
            # The chosen samples of pairs first, then the rejected, so that one view separates them.
            sides = zip(*(example.samples for example in examples), strict=True)
            scores = self.network.score_samples([sample for side in sides for sample in side])
            scores = scores.view(len(scores_SPO), len(group), -1)
            losses_P = self.network.objective.losses(scores, examples, self._recipe.center)
            # Divided by the pairs of the whole step, so that the micro-batches add up to its mean.
            (losses_P.sum() / len(pairs)).backward()
            scores_SPO[:, group] = scores.detach().cpu()

        run_within_memory(
            [pair.length for pair in pairs], self._budget, work, self.optimizer.zero_grad
        )
        return scores_SPO


def count_steps(pairs: int, recipe: Recipe) -> int:
    """Return the number of steps of a fit."""
    all_steps = recipe.epochs * -(-pairs // recipe.batch_size)
    return min(all_steps, recipe.max_steps) if recipe.max_steps else all_steps


def iterate_batches(
    pairs: Examples, recipe: Recipe, total_steps: int
) -> Iterator[list[EncodedExample]]:
    """Yield the pairs of each step; each epoch has its own seeded order."""
    done, epoch = 0, 0
    while done < total_steps:
        order = list(range(len(pairs)))
        random.Random(f"order {recipe.seed} {epoch}").shuffle(order)
        for start in range(0, len(order), recipe.batch_size):
            if done == total_steps:
                return
            yield [pairs[i] for i in order[start : start + recipe.batch_size]]
            done += 1
        epoch += 1
