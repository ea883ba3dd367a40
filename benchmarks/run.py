"""Our speed against bare loops and peers, each pair measured in turns in one run: one table.

    python benchmarks/run.py                       # about ten minutes on two cores
    python benchmarks/run.py --trl trl/bin/python  # with TRL's trainer, see step_against_trl.py
    python benchmarks/run.py --write               # puts the table into README.md
    python benchmarks/run.py --quick               # five minutes; exit 1: a ratio is 25 % worse,
                                                   # twice; `scripts/check --all` runs it
    OMP_NUM_THREADS=1 python benchmarks/run.py --quick --record   # what --quick compares with

A random Qwen2 of 10 million parameters on the CPU, rows of many lengths, settings and allocator as
`ppo train` has them without a flag. A ratio is how many times as fast we are; medians of pairs.
The other side runs as torch ships: its BLAS multiplies the matrices in float32, where ours may
leave them to oneDNN (`model.float32_matmul`), or computes in bfloat16 (`model.dtype`);
`--bf16` lets the other side do the latter too, under autocast. With `--quick` BLAS multiplies in
float32 for both, so that ratios hold on other processors too; what oneDNN brings is a line of its
own there, on processors that it is chosen for.
The bare loops take as many tokens as our rows hold, all rows of one length, so that they pad
nothing: forward and backward passes with logits at response tokens and AdamW for actor and critic;
for `annotate` passes of reference and critic alone, as old log-probs are the sampler's. Responses
that share a prompt are compared with our own way without that (`shared_prompts.py`).
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import shared_prompts
import torch
from engine_speed import make_batch, with_scores
from step_against_trl import ENDS, VOCABULARY, make_model, make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.allocator import start_with_jemalloc
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.processor import matmul_library
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.records import Prompt

HERE = Path(__file__).parent
RECORDED = HERE / "ratios.json"  # what `--quick` compares with; `--record` writes it
WORSE = 0.75
README = HERE.parent / "README.md"
MARKS = ("<!-- speed -->\n", "<!-- end of speed -->")

Pair = tuple[Callable[[], object], Callable[[], object]]


def main() -> int:
    """Measure, print the table, compare or write as asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true", help="keep the ratios for --quick")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="bare loops in bfloat16")
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, ends=ENDS)
        make_prompts(folder / "prompts.jsonl", 64, fixed=False)
        pairs = dict(pairs_of(folder, asked.quick, half=asked.bf16))
        ratios = {what: measure(what, pair, asked.pairs) for what, pair in pairs.items()}
        if asked.quick and not asked.record:
            for what in worse_than_recorded(ratios):  # other work may have hit one side alone
                again = measure(what, pairs[what], asked.pairs)
                ratios[what] = max(ratios[what], again)
    if asked.trl:
        ratios |= against_trl(asked.trl, asked.pairs)
    table = "\n".join(
        ["| what | times as fast |", "|---|---|"]
        + [f"| {what} | {ratio:.2f} |" for what, ratio in ratios.items()]
    )
    print(table)
    if asked.record:
        RECORDED.write_text(json.dumps(ratios, indent=2) + "\n", encoding="utf-8")
    if asked.write:
        before, _, rest = README.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        README.write_text(before + MARKS[0] + table + "\n" + MARKS[1] + after, encoding="utf-8")
    return 1 if asked.quick and worse_than_recorded(ratios) else 0


def worse_than_recorded(ratios: dict[str, float]) -> list[str]:
    """Name what is slower than it was when `--record` kept it, and say so."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    worse = [what for what, ratio in ratios.items() if ratio < WORSE * recorded[what]]
    for what in worse:
        print(f"{what}: {ratios[what]:.2f}, recorded {recorded[what]:.2f}", file=sys.stderr)
    return worse


def measure(what: str, pair: Pair, count: int) -> float:
    """Their seconds over ours: the median of so many pairs, after one that is left out."""
    ratios = []
    for turn in range(count + 1):
        theirs, ours = (seconds(work) for work in pair)
        if turn:
            ratios.append(theirs / ours)
            print(f"{what}: {theirs:.2f} s against {ours:.2f} s", file=sys.stderr, flush=True)
    return statistics.median(ratios)


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def by(library: Literal["blas", "onednn"], work: Callable[[], object]) -> Callable[[], object]:
    """The same work, with matrices multiplied so."""

    def run() -> None:
        set_matmul_library(library)
        work()

    return run


def in_bfloat16(work: Callable[[], object]) -> Callable[[], object]:
    """The same work under autocast."""

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            work()

    return run


def pairs_of(folder: Path, quick: bool, *, half: bool = False) -> list[tuple[str, Pair]]:
    """What is compared: theirs and ours, by the name that the table shows."""
    size = argparse.Namespace(small=False, rows=8 if quick else 16)
    chosen = matmul_library()
    own: Literal["blas", "onednn"] = "blas" if quick else chosen
    config = fit_memory(settle(
        Config.model_validate({
            "model": {"path": str(folder)} | ({"dtype": "float32"} if quick else {}),
            "actor": {"use_kl_loss": True},
            "data": {"max_prompt_length": 256, "max_response_length": 1024},
        }),
        Machine.here())).config  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = make_batch(size, VOCABULARY)
    batch = replace(batch, sampler_entropy_BT=torch.zeros_like(batch.sampler_logprobs_BT))
    learner = Learner(config, tokenizer, total_steps=100)
    scored = with_scores(merge_annotations(batch, [learner.annotate(batch)]))
    bare = BareLoops(
        folder,
        rows=len(batch),
        prompt=int(batch.prompt_len_B.float().mean()),
        response=int(batch.response_len_B.float().mean()),
    )
    lines = (
        (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: 32 if quick else 64]
    )
    texts = [json.loads(line)["prompt"] for line in lines]
    minibatch = MiniBatch(scored, actor=True, critic=True)
    step = partial(learner.step, minibatch)
    pairs: list[tuple[str, *Pair]] = [
        ("`step` against forward, backward and AdamW", bare.step, step),
        ("`annotate` against forward passes", bare.annotate, partial(learner.annotate, batch)),
        (
            "sampling against `model.generate`",
            *sampling_pair(learner.policy.model, config, tokenizer, texts),
        ),
        ("8 responses a prompt, against the prompt for each", *shared_pair(folder, quick)),
    ]
    found = [
        (what, (by("blas", in_bfloat16(theirs) if half else theirs), by(own, ours)))
        for what, theirs, ours in pairs[:3]
    ]
    found += [(what, (by(own, theirs), by(own, ours))) for what, theirs, ours in pairs[3:]]
    if quick and chosen == "onednn":
        found.append(("`step` by oneDNN, against BLAS", (by("blas", step), by(chosen, step))))
    return found


def shared_pair(folder: Path, quick: bool) -> Pair:
    """Annotation and update of responses as long as their prompt."""
    batch = shared_prompts.make_batch(2 if quick else 8, 8, 64, 64)
    each, once = (shared_prompts.make_learner(str(folder), share) for share in (False, True))
    return (
        lambda: shared_prompts.seconds(each, batch),
        lambda: shared_prompts.seconds(once, batch),
    )


class BareLoops:
    """Actor, reference and critic with nothing around them, on rows of one length."""

    def __init__(self, folder: Path, *, rows: int, prompt: int, response: int) -> None:
        torch.manual_seed(0)
        self._models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(3)]
        actor, _, critic = self._models
        self._head = torch.nn.Linear(actor.config.hidden_size, 1)
        self._optimizers = [
            torch.optim.AdamW(actor.parameters(), lr=1e-6),
            torch.optim.AdamW([*critic.model.parameters(), *self._head.parameters()], lr=1e-6),
        ]
        self._ids_BL = torch.randint(2, VOCABULARY, (rows, prompt + response))
        self._response = response

    def step(self) -> None:
        """One update of the actor and one of the critic."""
        actor, _, critic = self._models
        losses: tuple[Callable[[], Tensor], ...] = (
            lambda: -self._logprobs(actor).mean(),
            lambda: self._values(critic).square().mean(),
        )
        for optimizer, loss in zip(self._optimizers, losses, strict=True):
            torch.autograd.backward(loss())
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def annotate(self) -> None:
        """Log-probs of the reference, and values."""
        _, reference, critic = self._models
        self._logprobs(reference)
        self._values(critic)

    def _hidden(self, model: PreTrainedModel) -> Tensor:
        hidden_BLH: Tensor = model.model(self._ids_BL, use_cache=False).last_hidden_state
        return hidden_BLH[:, -self._response - 1 : -1]

    def _logprobs(self, model: PreTrainedModel) -> Tensor:
        logprobs_BTV: Tensor = model.lm_head(self._hidden(model)).log_softmax(-1)
        return logprobs_BTV.gather(-1, self._ids_BL[:, -self._response :, None])

    def _values(self, model: PreTrainedModel) -> Tensor:
        values_BT1: Tensor = self._head(self._hidden(model))
        return values_BT1


def sampling_pair(
    model: PreTrainedModel, config: Config, tokenizer: object, texts: list[str]
) -> Pair:
    """Responses of at most 128 tokens; theirs in one batch, padded on the left."""
    assert callable(tokenizer)
    rows: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    prompts = [Prompt(f"{i}", "", (), "", token_ids=tuple(ids)) for i, ids in enumerate(rows)]
    width = max(map(len, rows))
    ids_BL = torch.tensor([[1] * (width - len(ids)) + ids for ids in rows])
    turns = itertools.count()

    @torch.no_grad()
    def theirs() -> None:
        model.eval()
        model.generate(
            ids_BL, attention_mask=(ids_BL != 1).long(), do_sample=True, top_k=0,
            max_new_tokens=128, eos_token_id=0, pad_token_id=1,
        )  # fmt: skip

    def ours() -> None:
        sampler = HFSampler(
            model, eos_token_ids=frozenset({0}), pad_token_id=1, max_num_seqs=256,
            detokenize=lambda ids, context: "", compute=Compute.choose(config.model.dtype),
        )  # fmt: skip
        list(sampler.generate(prompts, Sampling(max_tokens=128, seed=next(turns)), 0))

    return theirs, ours


def against_trl(python: str, count: int) -> dict[str, float]:
    """Whole steps: `step_against_trl.py`, one and four epochs, and one length."""
    found = {}
    for what, more in (
        ("a whole step against TRL", []),
        ("the same, four epochs", ["--epochs", "4"]),
        ("the same, rows of one length", ["--fixed", "--batch", "64"]),
    ):
        line = [sys.executable, str(HERE / "step_against_trl.py"), "--trl", python]
        said = subprocess.run(
            [*line, "--pairs", str(count), *more], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        print(said, file=sys.stderr)
        ratio = re.search(r"time ([\d.]+)", said)
        assert ratio is not None
        found[what] = 1 / float(ratio[1])
    return found


if __name__ == "__main__":
    start_with_jemalloc()
    sys.exit(main())
