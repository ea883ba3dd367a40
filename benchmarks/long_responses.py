"""What a critic buys on long responses with a reward at the end: PPO, pretrained PPO and GRPO.

    OMP_NUM_THREADS=1 python benchmarks/long_responses.py --out DIR [--jobs 2] [--picture FILE.svg]
    OMP_NUM_THREADS=1 python benchmarks/long_responses.py --out DIR --ceiling [--uneven]
    OMP_NUM_THREADS=1 python benchmarks/long_responses.py --out DIR --uneven

A tiny model, trained here from a seed, walks four times through a list of nine numbers and writes
the distance from its last result to each number: 36 steps in 293 tokens.

    prompt    4;a8,b5,c1,...      response  0a8~4=4;0b5^4>1,... #### 2

The reward is 1 if every step is right, else 0. In the first two rounds the model has wrong habits,
and after a wrong step most of its signs are sloppy ones, so that errors can be seen in the text.
The choice among signs of a kind is free: most of the entropy has nothing to do with the reward.
Every step samples 64 responses, and the steps of pretraining are counted. Nothing is downloaded.
With `--uneven` half of the prompts are easy and half are hard; only the critic at the first update
is measured. `--ceiling` estimates what the best possible critic explains there.
The same command continues, and does not repeat finished runs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

LETTERS = "abcdefghi"
STEPS = 4 * len(LETTERS)
# Between the numbers, before the result, after the step: first, and after a wrong step.
NEAT, SLOPPY = ("~-^", "=:>", ",;/"), ("&+*", "|@_", "!?%")
SAME_SIGNS = str.maketrans({s: a[0] for a, b in zip(NEAT, SLOPPY, strict=True) for s in a + b})
LARGE = 6  # habits are about numbers from here on
MODEL_SEED = 17
ROWS = {"train": 8192, "val": 128}

SAMPLED_STEPS, SEEDS = 30, (1, 2, 3, 4, 5)
COMMON: dict[str, Any] = {
    "model.dtype": "float32", "data.max_prompt_length": 64, "data.max_response_length": 320,
    "data.train_batch_size": 64, "actor.ppo_mini_batch_size": 32, "actor.optim.lr": 1e-4,
    "critic.optim.lr": 1e-3, "algorithm.use_kl_in_reward": False,
    "rollout.val_kwargs.temperature": 1.0, "trainer.save_freq": -1, "trainer.test_freq": 10,
}  # fmt: skip
GRPO = {
    "algorithm.adv_estimator": "grpo", "rollout.n": 8, "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 4,
}  # fmt: skip
PRESET = {
    "critic.pretrain_steps": 10, "critic.pretrain_until": None, "critic.ppo_mini_batch_size": 16,
    "critic.optim.lr": 5e-4,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {"long-responses": PRESET, "grpo": GRPO, "ppo": {}}
# The critic at the first update alone, after pretraining and without.
FIRST_UPDATE = {"trainer.test_freq": -1, "trainer.val_before_train": False}
FIRST: dict[str, dict[str, Any]] = {
    "pretrained": PRESET | FIRST_UPDATE,
    "fresh": PRESET | FIRST_UPDATE | {"critic.pretrain_steps": None},
}
PLACES, CONTINUATIONS = 12, 16
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f")

_DRAW = random.Random(MODEL_SEED)
HABITS = {  # the wrong result that is written for a difference, and how often
    (now, number): (_DRAW.choice([r for r in range(10) if r != abs(now - number)]),
                    _DRAW.uniform(0.2, 0.5))
    for now in range(10) for number in range(LARGE, 10) if _DRAW.random() < 0.6
}  # fmt: skip

Question = tuple[int, list[int]]  # where to start, and the numbers of the list
Curve = list[tuple[int, float]]  # by steps that have sampled
Floats = Sequence[float]


def draw_question(rng: random.Random, uneven: bool = False) -> Question:
    """Draw a list with any number of large numbers; an uneven one has none, or most are large."""
    large = rng.choice((0, rng.randrange(5, 10))) if uneven else rng.randrange(len(LETTERS) + 1)
    numbers = [rng.randrange(LARGE, 10) for _ in range(large)]
    numbers += [rng.randrange(LARGE) for _ in range(len(LETTERS) - large)]
    rng.shuffle(numbers)
    return rng.randrange(10), numbers


def write_prompt(question: Question) -> str:
    """Return the text of the prompt."""
    start, numbers = question
    return f"{start};" + ",".join(f"{a}{n}" for a, n in zip(LETTERS, numbers, strict=True))


def write_working(question: Question, rng: random.Random, factors: Floats, share: float) -> str:
    """Return a working: factors on the rates of habits, share of sloppy signs after one."""

    def draw_sign(position: int) -> str:
        return rng.choice((SLOPPY if rng.random() < sloppy else NEAT)[position])

    now, numbers = question
    steps, sloppy = [], 0.0
    for step, factor in enumerate(factors):
        round_, place = divmod(step, len(LETTERS))
        number = numbers[place]
        result = abs(now - number)
        between, equals = draw_sign(0), draw_sign(1)
        wrong, rate = HABITS.get((now, number), (result, 0.0))
        if rng.random() < factor * rate:
            result, sloppy = wrong, share
        step_text = f"{round_}{LETTERS[place]}{number}{between}{now}{equals}{result}"
        steps.append(step_text + draw_sign(2))
        now = result
    return "".join(steps) + f"#### {now}"


def write_answer(prompt: str) -> str:
    """Return the right working, with the first sign of each kind."""
    question = int(prompt[0]), [int(item[1]) for item in prompt[2:].split(",")]
    right = write_working(question, random.Random(0), [0.0] * STEPS, 0.0)
    return right.translate(SAME_SIGNS)


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return 1 if every step is right, else 0. The ground truth is the prompt."""
    return float(solution_str.translate(SAME_SIGNS) == write_answer(ground_truth))


def write_prompts(folder: Path, rng: random.Random, uneven: bool = False) -> None:
    """Write the prompts for training and validation."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        prompts = [write_prompt(draw_question(rng, uneven)) for _ in range(count)]
        rows = [{"prompt": p, "ground_truth": p, "data_source": "working"} for p in prompts]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def build(folder: Path) -> None:
    """Write the prompts and train the model on workings: short ones, then whole ones."""
    import torch
    from embedded.tokenizer import build_tokenizer
    from embedded.warm_up import IGNORED, Stage, render, train_stage
    from torch.nn.utils.rnn import pad_sequence
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    rng = random.Random(MODEL_SEED)
    write_prompts(folder, rng)
    short, whole = [1.0] * 12, [1.0] * (STEPS // 2) + [0.0] * (STEPS // 2)
    questions = [draw_question(rng) for _ in range(200)]
    texts = [write_prompt(q) + write_working(q, rng, short, 0.9) for q in questions]
    tokenizer = build_tokenizer(texts)
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    torch.manual_seed(MODEL_SEED)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad,
        dtype="float32",
    ))  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)

    def draw(size: int, answer: Callable[[Question, random.Random], str]) -> tuple[Any, Any]:
        ids, labels = [], []
        for _ in range(size):
            question = draw_question(rng)
            prompt = tokenizer.encode(render(tokenizer, write_prompt(question)))
            reply = [*tokenizer.encode(answer(question, rng)), end]
            ids.append(torch.tensor(prompt + reply))
            labels.append(torch.tensor([IGNORED] * len(prompt) + reply))
        return pad_sequence(ids, True, pad), pad_sequence(labels, True, IGNORED)

    for stage in (
        Stage("short", 700, 4e-3, 32, partial(write_working, factors=short, share=0.9)),
        Stage("whole", 600, 2e-3, 16, partial(write_working, factors=whole, share=0.9)),
        Stage("sloppy", 150, 1e-3, 16, partial(write_working, factors=whole, share=1.0)),
    ):
        rng = random.Random(f"{MODEL_SEED} 2") if stage.name == "sloppy" else rng
        train_stage(model, SimpleNamespace(draw=draw), stage)
    model.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def train_arm(arm: str, seed: int, folder: Path, model: Path) -> None:
    """Train one run; every step samples 64 responses, in pretraining too."""
    from ppo_cli import train

    first = arm in FIRST
    settings = COMMON | (FIRST | ARMS)[arm]
    train(
        preset="long-responses" if first or arm == "long-responses" else None, model=str(model),
        train_files=[str(folder / "train.jsonl")], val_files=[str(folder / "val.jsonl")],
        reward_function=f"{Path(__file__).resolve()}:compute_score", seed=seed,
        max_steps=1 if first else SAMPLED_STEPS - settings.get("critic.pretrain_steps", 0),
        output_dir=str(folder / f"{arm}-{seed}"), overrides=settings,
    )  # fmt: skip


def measure_ceiling(folder: Path, model_folder: Path) -> None:
    """Print what the expected reward itself explains, at places in responses to held-out prompts.

    Each beginning of a response is continued CONTINUATIONS times by the policy; after an error the
    reward is 0 for certain. The square of the mean reward is estimated without bias, from pairs of
    continuations.
    """
    import torch
    from embedded.warm_up import render
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(MODEL_SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    prompts = [json.loads(x)["prompt"] for x in (folder / "val.jsonl").read_text().splitlines()]
    ids_BL = torch.tensor([tokenizer.encode(render(tokenizer, prompt)) for prompt in prompts])
    start = ids_BL.shape[1]

    def extend(begun_BL: Any) -> Any:
        with torch.no_grad():
            return model.generate(
                begun_BL, attention_mask=torch.ones_like(begun_BL), do_sample=True, top_k=0,
                max_length=start + COMMON["data.max_response_length"],
            )  # fmt: skip

    def read(rows_BL: Any) -> list[str]:
        texts = tokenizer.batch_decode(rows_BL[:, start:], skip_special_tokens=True)
        return [text.translate(SAME_SIGNS) for text in texts]

    whole_BL, answers = extend(ids_BL), [write_answer(prompt) for prompt in prompts]
    share = np.mean([x == y for x, y in zip(read(whole_BL), answers, strict=True)])
    lengths = (whole_BL[:, start:] != tokenizer.pad_token_id).sum(1).numpy()
    length = int(np.median(lengths))
    print(f"{len(prompts)} responses of {length} tokens (median), {share:.2f} of them right")
    spreads, variances = [], []
    for place in range(PLACES):
        token = (length - 2) * place // (PLACES - 1)
        right = np.zeros(len(prompts))
        begun_BL = whole_BL[:, : start + token]
        so_far = [i for i, text in enumerate(read(begun_BL)) if answers[i].startswith(text)]
        for rows in torch.tensor(so_far).split(32):
            texts = read(extend(begun_BL[rows].repeat_interleave(CONTINUATIONS, 0)))
            for i, text in enumerate(texts):
                row = int(rows[i // CONTINUATIONS])
                right[row] += text == answers[row]
        right = right[lengths > token]
        squares = right * (right - 1) / CONTINUATIONS / (CONTINUATIONS - 1)
        mean = right.mean() / CONTINUATIONS
        spreads.append(squares.mean() - mean**2)
        variances.append(mean * (1 - mean))
        print(f"from token {token + 1}: {spreads[-1] / variances[-1]:.2f}", flush=True)
    print(f"over all tokens: {np.trapezoid(spreads) / np.trapezoid(variances):.2f}")


def read_run(folder: Path) -> tuple[Curve, Floats]:
    """Return the accuracy on held-out prompts by sampled step, and explained variances.

    Those are of the first policy's fresh responses: the last steps of pretraining, then step 1.
    """

    def read(name: str) -> list[dict[str, Any]]:
        file = folder / name
        return [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []

    pretraining, metrics = read("pretraining.jsonl"), read("metrics.jsonl")
    before = len(pretraining)
    accuracy = [(m["step"] + before, m["val/accuracy"]) for m in metrics if "val/accuracy" in m]
    start = [(0, accuracy[0][1])] if before and accuracy else []
    first = [*pretraining[-4:], next(m for m in metrics if m["step"] == 1)]
    return start + accuracy, [m.get("explained_variance") or 0.0 for m in first]


def draw_picture(curves: dict[str, list[Curve]]) -> str:
    """Return an SVG: accuracy by sampled responses, thin for each seed and thick for the mean."""

    def draw_line(curve: Curve, style: str) -> str:
        points = (f"{56 + x / SAMPLED_STEPS * 568:.1f},{276 - y * 260:.1f}" for x, y in curve)
        return f'<polyline fill="none" {style} points="{" ".join(points)}"/>'

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 340" font-family="sans-serif">',
        "<title>Accuracy on held-out prompts by sampled responses; thin lines are seeds</title>",
        '<rect width="640" height="340" fill="white"/><g font-size="12" text-anchor="middle">',
        '<text x="340" y="312">sampled responses</text>',
    ]
    for tick in range(6):
        height, step = tick / 5, tick * SAMPLED_STEPS // 5
        lines.append(draw_line([(0, height), (SAMPLED_STEPS, height)], 'stroke="#ddd"'))
        lines.append(f'<text x="40" y="{280 - height * 260:.0f}">{height:g}</text>')
        lines.append(f'<text x="{56 + step / SAMPLED_STEPS * 568:.0f}" y="294">{64 * step}</text>')
    for place, (arm, runs) in enumerate(curves.items()):
        style = f'stroke="{COLOURS[place]}" stroke-'
        lines += [draw_line(curve, style + 'opacity="0.3"') for curve in runs]
        mean = [(p[0][0], np.mean([y for _, y in p])) for p in zip(*runs, strict=True)]
        lines.append(draw_line(mean, style + 'width="2.5"'))
        lines.append(f'<text x="{140 + 200 * place}" y="332" fill="{COLOURS[place]}">{arm}</text>')
    return "\n".join([*lines, "</g></svg>", ""])


def main() -> None:
    """Build the model, train all arms, and print the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--uneven", action="store_true", help="easy and hard prompts")
    parser.add_argument("--ceiling", action="store_true", help="what the best critic explains")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder, model = args.out / "uneven" if args.uneven else args.out, args.out / "model"
    if args.run:
        train_arm(args.run[0], int(args.run[1]), folder, model)
        return
    if not (model / "tokenizer.json").exists():
        build(args.out)
    if args.uneven and not (folder / "val.jsonl").exists():
        write_prompts(folder, random.Random(f"{MODEL_SEED} uneven"), uneven=True)
    if args.ceiling:
        measure_ceiling(folder, model)
        return
    names = [(arm, str(seed)) for arm in (FIRST if args.uneven else ARMS) for seed in SEEDS]
    start = [sys.executable, __file__, "--out", str(args.out)] + ["--uneven"] * args.uneven
    with ThreadPool(args.jobs) as pool:
        pool.map(lambda name: subprocess.run([*start, "--run", *name], check=True), names, 1)
    if args.uneven:
        for arm, seed in names:
            _, explained = read_run(folder / f"{arm}-{seed}")
            print(f"{arm} {seed}: explained variance {explained[-1]:.2f} at update 1")
        return
    curves: dict[str, list[Curve]] = {arm: [] for arm in ARMS}
    for arm, seed in names:
        accuracy, explained = read_run(args.out / f"{arm}-{seed}")
        curves[arm].append(accuracy)
        steps, heights = zip(*accuracy, strict=True)
        average = np.trapezoid(heights, steps) / SAMPLED_STEPS
        print(
            f"{arm} {seed}: accuracy {average:.3f} on average, "
            f"{heights[-1]:.3f} at the end; explained variance {explained[-1]:.2f} at update 1, "
            f"{np.mean(explained):.2f} over {len(explained)} steps up to it"
        )
    if args.picture:
        args.picture.write_text(draw_picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
