"""What a judge is paid until a policy is good: one score a response, or scores placed in it.

    OMP_NUM_THREADS=1 python benchmarks/judge_bill.py --out DIR [--task letters|trap|sentences]
        [--arms ...] [--seeds 1 2 3] [--rates ...] [--model FOLDER]
        [--noise 0.3] [--loud] [--moved 0.5] [--pieces 4] [--uneven]

A tiny model, trained here from a seed on sloppy answers, learns with 40 steps of 16 responses, so
that all arms make the same number of judge calls. The judge is a function below: it gives the
whole score w, the share of right pieces, and for placed arms a score p of each piece, which gets
w p / sum(p). Calls are responses that were scored. A request is that of the product for a right
response, in tokens of Qwen; replies are assumed to have WRITTEN tokens, and WRITTEN_A_PIECE more
for each piece (`"piece_12": 7, ` has 8.5 with Qwen and SmolLM2, with the level 10 9.5). No prompt
occurs twice, so that the true quality of a step's responses is that of held-out prompts; the target
is reached when the mean of three steps is.

letters  16 letters of 82, each with a digit to be known: `a,b,...` -> `3,1,...`. Half of the
         digits are wrong at first, and some responses end early. `--uneven`: letters are easy or
         hard, and so are prompts.
trap     the same, but the first piece is a choice, even at first, in place of the digit of the
         first letter: `x` is tempting, earns 1 at once and halves what each later digit earns; `y`
         earns 0.
sentences  the text model of `--model` (SmolLM2-135M-Instruct) continues an example of four
         sentences on another subject, in 12 steps: the first has to have a colour, the next a
         number, a "not" and a feeling; one that is missing is wrong. The judge is asked as any
         other, with `--rm_place sentence`, through a loopback server.

With `--noise` that share of the scores of pieces is turned over, with `--loud` w is their mean too
(for all arms); with `--moved` that share of them goes to another piece. Runs that are finished are
not repeated: the same command continues. Nothing is downloaded. Credit of letters alone is moved.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import string
import sys
import traceback
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

MODEL_SEED, STEPS, RESPONSES, LENGTH = 17, 40, 16, 16
LETTERS = "".join(c for c in string.ascii_letters + string.punctuation if c not in ",<")[:82]
WRITTEN, WRITTEN_A_PIECE = 60, 9  # tokens of a judge's reply
PRICE = 0.15, 0.60  # dollars for a million tokens, in and out: gpt-4o-mini's
TARGET = {"letters": 0.8, "trap": 0.6, "sentences": 0.7}
COLUMNS = ("arm", "rate", "mean", "sd", "end", "sd", "calls", "reached", "tokens", "$",
           "pieces", "at end")  # fmt: skip

_DRAW = random.Random(MODEL_SEED)
DIGITS = {letter: _DRAW.randrange(10) for letter in LETTERS}
# What is added to the right digit of a letter, one of three, and how often it is.
HABITS = {letter: (_DRAW.sample(range(1, 10), 3), _DRAW.uniform(0.3, 0.7)) for letter in LETTERS}
EASY = frozenset(_DRAW.sample(LETTERS, len(LETTERS) // 2))
SHORT = 0.05  # responses that end early

COMMON: dict[str, Any] = {
    "model.dtype": "float32", "data.max_prompt_length": 64, "data.max_response_length": 40,
    "algorithm.use_kl_in_reward": False, "actor.use_kl_loss": False, "critic.lam": 1.0,
    "critic.optim.lr": 1e-3, "critic.ppo_epochs": 2, "trainer.save_freq": -1,
    "trainer.test_freq": -1, "trainer.val_before_train": False, "data.val_files": [],
}  # fmt: skip
# What is in the sentences, in this order. With the same in all, one score is enough.
RULES = {
    "a colour": "red|orange|yellow|green|blue|purple|pink|brown|black|white|grey|gray|gold|silver",
    "a number": r"\d+|two|three|four|five|six|seven|eight|nine|ten|hundred|thousand",
    "a not": r"no|not|never|nothing|\w+n[’']t",
    "a feeling": "loves?|loved|likes?|liked|hates?|hated|fears?|enjoys?|happy|sad|angry|proud",
}
SENTENCES, SENTENCE_STEPS = len(RULES), 12
EXAMPLE = "Dogs: The dog is brown. It has two ears. Its ball is not red. We love it."
KINDS = "Old Young Small Big Quiet Strange Wild Lost Happy Broken Heavy New"
NOUNS = """cats birds horses boats gardens trees houses cars trains shoes fish clouds lamps kings
    doors hats rivers flowers toys shops"""
SUBJECTS = [f"{kind} {noun}" for kind, noun in product(KINDS.split(), NOUNS.split())]
TASK = f"Four short sentences, with {', '.join(RULES)}."
QUESTION = "{prompt}\n\n{response}\n\nHow many sentences have what the first line says of them?"
SENTENCE_JUDGE: dict[str, Any] = {"scoring_prompt": QUESTION, "scale": f"0-{SENTENCES}"}
# Arm -> responses to a prompt, whether scores are placed, learning rate, settings of `algorithm`.
Arm = tuple[int, bool, float, dict[str, Any]]
ARMS: dict[str, Arm] = {
    "grpo8": (8, False, 5e-4, {"adv_estimator": "grpo"}),
    "grpo4": (4, False, 5e-4, {"adv_estimator": "grpo"}),
    "rloo4": (4, False, 5e-4, {"adv_estimator": "rloo"}),
    "ppo": (1, False, 1e-3, {"adv_estimator": "gae", "lam": 1.0}),
    "ppo_placed": (1, True, 1e-3, {"adv_estimator": "gae", "gamma_piece": 0.5, "lam_piece": 0.9}),
    "ppo_placed_9": (1, True, 1e-3, {"adv_estimator": "gae", "gamma_piece": 0.9, "lam_piece": 0.9}),
    "batch1": (1, True, 1e-3, {"adv_estimator": "piece_batch"}),
    "batch1_0": (1, True, 1e-3, {"adv_estimator": "piece_batch", "gamma_piece": 0.0}),
    "batch1_5": (1, True, 1e-3, {"adv_estimator": "piece_batch", "gamma_piece": 0.5}),
    "batch1_9": (1, True, 1e-3, {"adv_estimator": "piece_batch", "gamma_piece": 0.9}),
    "batch1_8": (1, True, 1e-3, {"adv_estimator": "piece_batch", "gamma_piece": 0.8}),
    "group4_9": (4, True, 1e-3, {"adv_estimator": "piece_group", "gamma_piece": 0.9}),
    "group4_8": (4, True, 1e-3, {"adv_estimator": "piece_group", "gamma_piece": 0.8}),
    "group4_5": (4, True, 1e-3, {"adv_estimator": "piece_group", "gamma_piece": 0.5}),
    "group4": (4, True, 1e-3, {"adv_estimator": "piece_group"}),
    "mixed4": (4, True, 1e-3, {"adv_estimator": "piece_grpo"}),
    "process8": (8, True, 1e-3, {"adv_estimator": "process_grpo"}),
}  # fmt: skip


def draw_prompt(rng: random.Random, task: str = "letters") -> str:
    """Draw the text of a prompt; an uneven one has easy letters alone, or hard ones."""
    easy = rng.random() < 0.5
    letters = [c for c in LETTERS if (c in EASY) == easy] if task == "uneven" else LETTERS
    return ",".join(rng.choices(letters, k=LENGTH))


def write_response(prompt: str, rng: random.Random, sloppy: bool, task: str = "letters") -> str:
    """Return a right response, or a sloppy one."""
    pieces = []
    for letter in prompt[::2]:
        shifts, rate = HABITS[letter]
        if task == "uneven":
            rate = 0.15 if letter in EASY else 0.8
        shift = rng.choice(shifts) if rng.random() < sloppy * rate else 0
        pieces.append(str((DIGITS[letter] + shift) % 10))
    if task == "trap":
        pieces[0] = rng.choice("xy")
    if sloppy and rng.random() < SHORT:
        pieces = pieces[: rng.randrange(LENGTH // 2, LENGTH)]
    return ",".join(pieces)


def mark_pieces(task: str, prompt: str, response: str) -> list[float]:
    """Return the true score of each piece of a response that was asked for; one ends at `,`."""
    pieces = response.split(",")[:LENGTH]
    marks = [float(d == str(DIGITS[x])) for d, x in zip(pieces, prompt[::2], strict=False)]
    if task == "trap":
        tempted = float(pieces[0] == "x")
        marks = [tempted, *((1 - tempted / 2) * mark for mark in marks[1:])]
    return marks


def compute_score(
    solution_str: str, ground_truth: str, *, task: str, placed: bool, pieces: int, seed: int,
    noise: float = 0.0, moved: float = 0.0, loud: bool = False, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Judge a response; the ground truth is the prompt. `true` and `count` are for the report."""
    dice = random.Random(f"{seed} {ground_truth} {solution_str}")
    marks, size = mark_pieces(task, ground_truth, solution_str), LENGTH // pieces
    true = sum(marks) / LENGTH
    lengths = [len(word) + 1 for word in solution_str.split(",")]
    ends = [sum(lengths[: k + size]) for k in range(0, len(marks), size)]
    ends[-1] = len(solution_str)
    scores = [fmean(marks[k : k + size]) for k in range(0, len(marks), size)]
    scores = disturb(scores, dice, noise, moved)
    whole = sum(scores) / pieces if loud else true
    answer: dict[str, Any] = {"score": whole, "true": true, "count": len(marks)}
    if placed and solution_str:
        total = sum(scores)
        shares = [score / total if total else 1 / len(scores) for score in scores]
        answer["step_rewards"] = [(e, whole * s) for e, s in zip(ends, shares, strict=True)]
    return answer


def disturb(
    scores: Sequence[float], dice: random.Random, noise: float, moved: float = 0.0
) -> list[float]:
    """Return scores of pieces of which a share is turned over; a share goes to other pieces."""
    turned = [1 - score if dice.random() < noise else score for score in scores]
    if not moved or len(turned) < 2:
        return turned
    kept = [0.0] * len(turned)
    for k, score in enumerate(turned):
        others = [j for j in range(len(turned)) if j != k]
        kept[dice.choice(others) if dice.random() < moved else k] += score
    return kept


def mark_sentences(text: str) -> list[float]:
    """Return the true score of each sentence of a response."""
    from ppo_cli.config.schema.reward import ApiReward
    from ppo_cli.rewards.judge.placing import show_example

    shown = show_example(text, ApiReward(place="sentence"))
    return _apply_rules([shown] if isinstance(shown, str) else [piece.text for piece in shown])


def _apply_rules(sentences: Sequence[str]) -> list[float]:
    # A fifth sentence was not asked for.
    rules = [*RULES.values(), *["(?!)"] * len(sentences)]
    pairs = zip(rules, sentences, strict=False)
    return [float(bool(re.search(rf"\b(?:{rule})\b", text, re.I))) for rule, text in pairs]


def judge_sentences(judge: dict[str, Any], _: str, user: str) -> str:
    """Return the reply to a request about sentences: a score of each piece, if asked, and all."""
    from tests.judge_server.wire import fenced, verdict_keys

    # At the start it is asked what else the instructions want: 1 is that they do not say.
    if criteria := verdict_keys(user):
        return json.dumps({key: {"reason": "Read.", name: 1} for key, name in criteria.items()})
    response = fenced("response", user) or ""
    pieces = re.split(r"<piece-\d+-[0-9a-f]+>\n", response)[1:]
    marks = _apply_rules(pieces) if pieces else mark_sentences(response)
    turned = disturb(marks, random.Random(f"{judge['seed']} {response}"), judge["noise"])
    whole = sum(turned if judge["loud"] else marks) / SENTENCES
    low, high = map(int, re.findall(r"from (\d+) \(worst\) to (\d+)", user)[-1])
    scores = {f"piece_{k}": mark for k, mark in enumerate(turned, start=1)} if pieces else {}
    scores[re.findall(r'"(score\w*)"', user)[-1]] = min(whole, 1.0)
    levels = {name: low + round((high - low) * score) for name, score in scores.items()}
    return json.dumps({"reason": "Counted."} | levels)


def write_subjects(folder: Path) -> None:
    """Write the prompts of the sentences, a subject each, in a drawn order."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = random.Random(MODEL_SEED).sample(SUBJECTS, len(SUBJECTS))
    rows = [{"prompt": ask_sentences(subject)} for subject in subjects]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")


def ask_sentences(subject: str) -> str:
    """Return the prompt for sentences on a subject, which the model continues."""
    return f"{TASK}\n{EXAMPLE}\n{subject}:"


def build(folder: Path, task: str) -> None:
    """Write the prompts, and train the model on right responses, then on sloppy ones."""
    import torch
    from embedded.tokenizer import build_tokenizer
    from embedded.warm_up import Stage, collate, render, train_stage
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{MODEL_SEED} letters")
    prompts = [draw_prompt(rng, task) for _ in range(2 * STEPS * RESPONSES)]
    rows = [{"prompt": p, "ground_truth": p, "data_source": "letters"} for p in prompts]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    tokenizer = build_tokenizer([])  # without merges: a token for each character
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    torch.manual_seed(MODEL_SEED)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad,
        dtype="float32",
    ))  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)

    def draw(size: int, sloppy: bool) -> Any:
        rows = []
        for _ in range(size):
            prompt = draw_prompt(rng, task)
            reply = tokenizer.encode(write_response(prompt, rng, sloppy, task))
            asked = tokenizer.encode(render(tokenizer, prompt))
            rows.append([(asked, False), ([*reply, end], True)])
        return collate(rows, pad)

    for stage in (Stage("right", 400, 4e-3, 32, False), Stage("sloppy", 150, 2e-3, 32, True)):
        train_stage(model, SimpleNamespace(draw=draw), stage)
    model.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def train_run(
    folder: Path, model: Path, arm: str, rate: float, seed: int, judge: dict[str, Any]
) -> None:
    """Train one run in a fork of this process, which has loaded torch; its error ends the fork."""
    import ppo_cli
    import ppo_cli.run.assemble
    from tests.judge_server import JudgeServer

    responses, placed, _, algorithm = ARMS[arm]
    base, task = folder.parent, folder.parent.name
    if child := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(f"{folder.name} failed: see {folder}.log")
        return
    status = 1
    try:
        reply = functools.partial(judge_sentences, judge | {"seed": seed})
        server = JudgeServer(reply, keep_calls=False)
        with open(f"{folder}.log", "w") as log, server:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            prompts = RESPONSES // responses
            overrides = COMMON | {
                "data.train_batch_size": prompts, "actor.ppo_mini_batch_size": prompts,
                "rollout.n": responses, "actor.optim.lr": rate,
                **{f"algorithm.{key}": value for key, value in algorithm.items()},
            }  # fmt: skip
            if task == "sentences":
                overrides |= {
                    "trainer.total_training_steps": SENTENCE_STEPS, "rollout.temperature": 0.7,
                    "data.max_response_length": 32, "data.apply_chat_template": False,
                    "reward.api.enable": True,
                    "reward.api.type": "openai", "reward.api.model": "judge",
                    "reward.api.base_url": server.url("openai"),
                    "reward.api.noise_responses": 0,
                    "reward.api.place": "sentence" if placed else None,
                    **{f"reward.api.{key}": value for key, value in SENTENCE_JUDGE.items()},
                }  # fmt: skip
            else:
                overrides |= {
                    "reward.function": f"{Path(__file__).resolve()}:compute_score",
                    "reward.function_kwargs": judge | {"placed": placed, "seed": seed},
                    "trainer.total_training_steps": STEPS,
                }
            ppo_cli.train(
                model=str(model), train_files=[str(base / "train.jsonl")], seed=seed,
                output_dir=str(folder), resume="never", overrides=overrides,
            )  # fmt: skip
            # Weights of a text model are half a gigabyte.
            shutil.rmtree(folder / "checkpoints")
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def read_run(folder: Path) -> tuple[list[float], list[float]]:
    """Return the mean true quality and the mean number of pieces of each step."""
    from ppo_cli.run_folder.lines import read_lines, rollout_file

    task = folder.parent.name
    true, counts = list[float](), list[float]()
    for step in range(1, 1 + (SENTENCE_STEPS if task == "sentences" else STEPS)):
        rows = [*read_lines(rollout_file(folder, step, "train"))]
        if task == "sentences":  # what the judge should have said, whether it was asked or not
            marks = [mark_sentences(row["response"]) for row in rows]
            true.append(fmean(sum(each) / SENTENCES for each in marks))
            counts.append(fmean(map(len, marks)))
        else:
            true.append(fmean(row["parts"]["true"]["raw"] for row in rows))
            counts.append(fmean(row["parts"]["count"]["raw"] for row in rows))
    return true, counts


def price_call(task: str, pieces: int) -> tuple[int, int]:
    """Return the tokens of one call, in and out; `pieces` is 1 for a whole score alone."""
    from dashscope.tokenizers import get_tokenizer

    from ppo_cli.config.schema.reward import ApiReward
    from ppo_cli.rewards.judge.placing import Piece, request_places, show_example, show_pieces
    from ppo_cli.rewards.judge.prompt import Material, load_template

    if task == "sentences":
        prompt, text = ask_sentences(SUBJECTS[0]), EXAMPLE.partition(" ")[2]
        api = ApiReward(place="sentence", **SENTENCE_JUDGE)
        shown = show_example(text, api) if pieces > 1 else text
    else:
        prompt = draw_prompt(random.Random(0))
        text = write_response(prompt, random.Random(0), sloppy=False)
        size = 2 * LENGTH // pieces
        cut = [Piece(text[k : k + size], k + size) for k in range(0, len(text), size)]
        api = ApiReward(place="line")
        shown = show_pieces(cut) if pieces > 1 else text
    template = load_template(api)
    placing = request_places(shown, api, template.scale)
    question = template.question(Material(prompt, shown), nonce="0123456789abcdef", placing=placing)
    read = len(get_tokenizer("qwen-turbo").encode(f"{question.system}\n{question.user}"))
    return read, WRITTEN + WRITTEN_A_PIECE * pieces * (placing is not None)


def find_target(true: Sequence[float], target: float) -> int | None:
    """Return the calls after the first three steps whose mean reaches the target."""
    reached = (k + 3 for k in range(len(true) - 2) if fmean(true[k : k + 3]) >= target)
    return next((steps * RESPONSES for steps in reached), None)


def describe(runs: Sequence[tuple[list[float], list[float]]], call: tuple[int, int],
             target: float) -> list[str]:  # fmt: skip
    """Return the figures of an arm, a text for each column but the first two.

    They are means over seeds; calls, tokens and dollars until the target are those of the runs
    that reached it.
    """
    figures = []
    for part in (slice(None), slice(-4, None)):
        values = [fmean(true[part]) for true, _ in runs]
        figures += [f"{fmean(values):.3f}", f"{stdev(values):.3f}" if len(runs) > 1 else "-"]
    calls = [count for true, _ in runs if (count := find_target(true, target)) is not None]
    bill = ["-"] * 3
    if calls:
        each = sum(tokens * price for tokens, price in zip(call, PRICE, strict=True)) / 1e6
        mean = fmean(calls)
        bill = [f"{mean:.0f}", f"{mean * sum(call):.0f}", f"{mean * each:.3f}"]
    figures += [bill[0], f"{len(calls)}/{len(runs)}", *bill[1:]]
    lengths = [fmean(fmean(counts[part]) for _, counts in runs)
               for part in (slice(4), slice(-4, None))]  # fmt: skip
    return [*figures, *(f"{length:.2f}" for length in lengths)]


def main() -> None:
    """Build the model, train the runs that are missing, and print their figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TARGET, default="letters")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates, for a search")
    parser.add_argument("--noise", type=float, default=0.0, help="share of pieces wrongly scored")
    parser.add_argument("--loud", action="store_true", help="the whole score has that noise too")
    parser.add_argument("--moved", type=float, default=0.0, help="share of credit elsewhere")
    parser.add_argument("--pieces", type=int, default=LENGTH, choices=(16, 8, 4, 2))
    parser.add_argument("--uneven", action="store_true", help="easy and hard prompts")
    parser.add_argument("--model", type=Path, help="folder of the text model, for sentences")
    parser.add_argument("--target", type=float, help="true quality that is to be reached")
    args = parser.parse_args()
    task = "uneven" if args.uneven else args.task
    base = args.out / task
    model = base / "model"
    if task == "sentences":
        if args.model is None:
            parser.error("--task sentences needs --model, the folder of a text model")
        model, args.pieces = args.model.resolve(), SENTENCES
        write_subjects(base)
    elif not (model / "tokenizer.json").exists():
        build(base, task)
    judge = {"task": task, "pieces": args.pieces}
    judge |= {"noise": args.noise, "moved": args.moved, "loud": args.loud}
    print("".join(f"{word:>13}" for word in COLUMNS))
    for arm in args.arms:
        placed = ARMS[arm][1]
        # Whole scores do not depend on places, unless their noise comes from there.
        marks = f"-{args.pieces}-{args.noise}-{args.moved}" if placed or args.loud else ""
        marks += "-loud" * args.loud
        for rate in args.rates or [ARMS[arm][2]]:
            folders = [base / f"{arm}-{rate:g}-{seed}{marks}" for seed in args.seeds]
            for seed, folder in zip(args.seeds, folders, strict=True):
                if not (folder / "done").exists():
                    train_run(folder, model, arm, rate, seed, judge)
                    (folder / "done").touch()
            call = price_call(task, args.pieces if placed else 1)
            figures = describe([*map(read_run, folders)], call, args.target or TARGET[args.task])
            print("".join(f"{word:>13}" for word in (arm, f"{rate:g}", *figures)), flush=True)


if __name__ == "__main__":
    main()
