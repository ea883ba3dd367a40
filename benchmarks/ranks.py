"""What many processes under Ray cost and gain, each figure beside the one it is a ratio of.

    python benchmarks/ranks.py                    # all parts, about five minutes on two cores
    python benchmarks/ranks.py ranks overhead     # some

- `ranks`: annotate and step of one learner rank against two, of one thread each, on rows of many
  lengths: 1.0 is no gain, 2.0 all that is possible. A random Qwen2 of 10 million parameters.
- `travel`: seconds and bytes of a batch of 1024 x (512 + 512) tokens on its way to two ranks: a
  step in which no row counts, so that nothing is computed.
- `publish`: weights from the learner to a sampler with a model of its own, against a plain copy
  of the same bytes; random models of 10 and 135 million parameters.
- `overhead`: a step of the bundled model in one process (`--engine local`) and under Ray with one
  rank and one sampler, verb by verb.

Medians of measurements in turns, after one of each that is left out. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of this process too: `local` is measured in it

import torch
from engine_speed import make_batch, with_scores
from step_against_trl import ENDS, VOCABULARY, make_model

from ppo_cli.algo.batch import AnnotatedBatch, Batch, build_batch
from ppo_cli.cluster.driver import DriverEngine
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.placement import Placement
from ppo_cli.records import Prompt

PARTS = ("ranks", "travel", "publish", "overhead")


def main() -> None:
    """Measure the parts that are asked for and print their lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="of `ranks`")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "10M", ends=ENDS)
        for part in asked.parts or PARTS:
            globals()[f"measure_{part}"](folder, asked)


def measure_ranks(folder: Path, asked: Namespace) -> None:
    """One rank against two on the same rows."""
    batch = make_batch(Namespace(small=False, rows=asked.rows), VOCABULARY)
    scored = with_scores(annotated(batch))
    with ExitStack() as stack:
        engines = [stack.enter_context(cluster(folder, "10M", ranks)) for ranks in (1, 2)]
        verbs: dict[str, Callable[[Any], Any]] = {
            "annotate": lambda engine: engine.annotate(batch),
            "step": lambda engine: engine.step(MiniBatch(scored, actor=True, critic=True)),
        }
        for verb, work in verbs.items():
            one, two = in_turns([partial(work, engine) for engine in engines], asked.turns)
            tokens = int((batch.prompt_len_B + batch.response_len_B).sum())
            print(
                f"ranks    {verb:9} {tokens} tokens: one {one:.2f} s, two {two:.2f} s: "
                f"{one / two:.2f} times"
            )


def measure_travel(folder: Path, asked: Namespace) -> None:
    """A large batch of which no row counts."""
    rows, length = 1024, 512
    ones = torch.full((rows,), length)
    batch = with_scores(annotated(Batch(
        input_ids_BL=torch.randint(2, VOCABULARY, (rows, 2 * length)),
        prompt_len_B=ones, response_len_B=ones,
        response_mask_BT=torch.ones(rows, length, dtype=torch.bool),
        sampler_logprobs_BT=torch.zeros(rows, length),
        group_B=torch.arange(rows), weight_version_B=torch.zeros(rows, dtype=torch.int64),
    )))  # fmt: skip
    idle = replace(batch, valid_B=torch.zeros_like(batch.valid_B))
    tensors = [getattr(idle, f.name) for f in fields(idle)]
    size = sum(t.nbytes for t in tensors if t is not None) / 1e6
    with cluster(folder, "10M", 2) as engine:
        (found,) = in_turns(
            [lambda: engine.step(MiniBatch(idle, actor=True, critic=True))], asked.turns
        )
    print(f"travel   step      {size:.0f} MB to two ranks in {found:.3f} s")


def measure_publish(folder: Path, asked: Namespace) -> None:
    """New weights for a sampler, and a plain copy of as many bytes."""
    make_model(folder / "135M", ends=0.0, large=True)
    for name in ("10M", "135M"):
        with cluster(folder, name, 1) as engine:
            size = (folder / name / "model.safetensors").stat().st_size
            source, target = torch.ones(2, size // 4)
            ours, plain = in_turns([engine.publish, partial(target.copy_, source)], 3 * asked.turns)
        print(
            f"publish  {name:9} {size / 1e6:.0f} MB: {1e3 * ours:.1f} ms, "
            f"a copy {1e3 * plain:.1f} ms: {ours / plain:.1f} times"
        )


def measure_overhead(folder: Path, asked: Namespace) -> None:
    """The verbs of a step of the bundled model, in one process and under Ray."""
    name = str(model_folder("embedded"))
    tokenizer = load_tokenizer(name)
    texts = [f"{i} + {7 * i} =" for i in range(64)]
    prompts = [
        Prompt(f"{i}", text, (), text, token_ids=tuple(tokenizer(text).input_ids))
        for i, text in enumerate(texts)
    ]
    with cluster(folder, name, 1) as ray:
        local = LocalEngine(settings(name, None), tokenizer, total_steps=100)
        seconds: dict[str, list[list[float]]] = {}
        for turn in range(2 * asked.turns + 1):
            for place, engine in enumerate((local, ray)):
                for verb, took in step_of(engine, prompts, tokenizer.pad_token_id, turn).items():
                    seconds.setdefault(verb, [[], []])[place].append(took)
    whole = [0.0, 0.0]
    for verb, both in seconds.items():
        one, many = (statistics.median(took[1:]) for took in both)
        whole = [whole[0] + one, whole[1] + many]
        print(f"overhead {verb:9} local {one:.3f} s, Ray {many:.3f} s")
    print(f"overhead {'a step':9} local {whole[0]:.3f} s, Ray {whole[1]:.3f} s: "
          f"{1e3 * (whole[1] - whole[0]):.0f} ms more")  # fmt: skip


def step_of(engine: Any, prompts: list[Prompt], pad: int, seed: int) -> dict[str, float]:
    """Seconds of each verb of a step."""
    sampling, found = Sampling(n=4, max_tokens=16, seed=seed), {}

    def timed(verb: str, work: Callable[[], Any]) -> Any:
        found[verb], value = seconds_of(work)
        return value

    rollouts = timed("generate", lambda: list(engine.generate(prompts, sampling)))
    rollouts.sort(key=lambda r: (int(r.prompt.uid), r.sample))
    batch = timed("annotate", partial(engine.annotate, build_batch(rollouts, pad)))
    torch.manual_seed(seed)
    scored = with_scores(batch)
    timed("step", lambda: engine.step(MiniBatch(scored, actor=True, critic=True)))
    timed("publish", engine.publish)
    return found


def cluster(folder: Path, name: str, ranks: int) -> Any:
    """An engine under a Ray of its own, which ends with it."""
    learners = tuple(range(ranks))
    return closing(DriverEngine(
        settings(str(folder / name), ranks), load_tokenizer(str(folder / name)), total_steps=100,
        placement=Placement(1, 0, learners, ((ranks,),), ()),
        logs=Path(tempfile.mkdtemp(dir=folder)),
    ))  # fmt: skip


def settings(model: str, ranks: int | None) -> Config:
    """As `ppo train` has them, with a reference; without ranks, of one process."""
    return fit_memory(settle(
        Config.model_validate({
            "model": {"path": model, "dtype": "float32"},
            "rollout": {"name": "hf"},
            "actor": {"use_kl_loss": True},
            # The same work on both sides: only one process could take the sampler's log-probs.
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "data": {"max_prompt_length": 512, "max_response_length": 1024},
            "trainer": {
                "threads": 1, "n_gpus_per_node": 0, "num_workers": ranks,
                "engine": "ray" if ranks else "local",
            },
        }),
        Machine.here())).config  # fmt: skip


def annotated(batch: Batch) -> AnnotatedBatch:
    """The batch with made-up annotations."""
    flat = torch.full(batch.response_mask_BT.shape, -9.0)
    return AnnotatedBatch(
        **{f.name: getattr(batch, f.name) for f in fields(batch)},
        old_logprobs_BT=flat, ref_logprobs_BT=flat, entropy_BT=-flat, values_BT=flat * 0,
        full_kl_BT=None,
    )  # fmt: skip


def in_turns(works: list[Callable[[], Any]], turns: int) -> list[float]:
    """Median seconds of each, done one after the other so many times."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(turns + 1):
        for work, took in zip(works, times, strict=True):
            took.append(seconds_of(work)[0])
    print([[f"{t:.3f}" for t in took] for took in times], file=sys.stderr)
    return [statistics.median(took[1:]) for took in times]


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Time one call."""
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value


if __name__ == "__main__":
    main()
