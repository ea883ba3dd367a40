"""Whole PPO steps of `ppo train`, with its defaults, and of TRL's PPOTrainer, in turns.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.12.0
    python benchmarks/step_against_trl.py --trl trl/bin/python --pairs 5

Both train the same random Qwen2 of 10 million parameters on the same prompts with one optimizer
step a batch: actor, critic and reference. `--epochs 4` takes four passes. Prompts and responses
have many lengths (the model ends a response with probability 3/128 at each token), or one length
with `--fixed`; `--large` takes 135 million parameters. TRL keeps its activations
(`gradient_checkpointing=False`), as ours does where memory allows, and computes in float32, or in
its own default with `--bf16`. A process of each runs in turn; the first step of each is left out.
Printed are seconds a step and peak memory of each pair, and the median of the ratios.

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 3  # of a process; the first one warms up
RESPONSE = 128
VOCABULARY = 8192
ENDS = 3 / RESPONSE
SHAPES = {
    False: {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 6,
            "num_attention_heads": 5, "num_key_value_heads": 5},
    True: {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 37,
           "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip


def make_model(folder: Path, *, ends: float, large: bool = False) -> None:
    """Write a model and its tokenizer; each token ends the response with probability `ends`.

    It has 10 million parameters, or 135 if `large`. A bias of the last layer's values reaches every
    position unchanged, as attention weights sum to one; it is led into one width of the state that
    only the row of the end token reads.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    # Transformers takes its own byte-level class for any Qwen2: the words are tokens added to it.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<end>", "<pad>", *letters])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    words = [f"w{number}" for number in range(VOCABULARY - len(vocabulary))]
    raw.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in words])
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=raw, eos_token="<end>", pad_token="<pad>", unk_token=None,
        model_max_length=1024,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, max_position_embeddings=1024, **SHAPES[large],
            tie_word_embeddings=True, eos_token_id=0, pad_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    if ends:
        with torch.no_grad():
            attention = model.model.layers[-1].self_attn
            attention.v_proj.bias[0] = 20.0
            attention.o_proj.weight[0, 0] = 1.0
            head = model.model.embed_tokens.weight
            head[:, 0] = 0.0
            rows = torch.randint(2, VOCABULARY, (1 if large else 8, 64))
            low, high = 0.0, 50.0
            for _ in range(40):
                head[0, 0] = (low + high) / 2
                share = model(rows).logits.softmax(-1)[..., 0].mean()
                if share > ends:
                    high = float(head[0, 0])
                else:
                    low = float(head[0, 0])
    model.generation_config.eos_token_id = 0 if ends else None
    model.save_pretrained(folder)


def make_prompts(file: Path, count: int, *, fixed: bool) -> None:
    """Write prompts of 32 words, or of 15 to 180 words with a mean of about 60."""
    dice = random.Random(0)
    lengths = [
        32 if fixed else min(180, int(dice.lognormvariate(3.95, 0.5)) + 10) for _ in range(count)
    ]
    rows = [
        {"prompt": " ".join(f"w{dice.randrange(7000)}" for _ in range(length))}
        for length in lengths
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_with_trl(
    folder: Path, batch: int, epochs: int, response: int, half: int
) -> dict[str, Any]:
    """Run TRL's trainer in this process; seconds of each step."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Qwen2Config,
        Qwen2ForSequenceClassification,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    data = Dataset.from_dict({"input_ids": rows})
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "model")

    small = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=batch,
            gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=epochs,
            local_rollout_forward_batch_size=batch, response_length=response, stop_token="eos",
            temperature=1.0, bf16=bool(half), gradient_checkpointing=False, use_cpu=True,
            num_sample_generations=0, report_to="none", total_episodes=batch * STEPS,
            learning_rate=1e-6, save_strategy="no", kl_coef=0.05, disable_tqdm=True,
        ),
        processing_class=tokenizer, model=policy(), ref_model=policy(),
        reward_model=Qwen2ForSequenceClassification(small),
        value_model=AutoModelForSequenceClassification.from_pretrained(
            folder / "model", num_labels=1
        ),
        train_dataset=data, eval_dataset=data.select(range(batch)), callbacks=[Clock()],
    )  # fmt: skip
    begin = time.perf_counter()
    trainer.train()
    times = [begin, *ends]
    return {"seconds": [b - a for a, b in itertools.pairwise(times)]}


def run_ours(folder: Path, batch: int, epochs: int, response: int) -> dict[str, float]:
    """Run `ppo train`; seconds between the lines of its steps."""
    out = folder / "ours"
    line = [
        sys.executable, "-m", "ppo_cli", "train", "--model", str(folder / "model"),
        "--train_files", str(folder / "prompts.jsonl"), "--batch_size", str(batch),
        "--mini_batch_size", str(batch), "--ppo_epochs", str(epochs), "--critic_epochs",
        str(epochs), "--max_response_length", str(response), "--max_prompt_length", "256",
        "--reward_function", str(folder / "reward.py"), "--lr", "1e-6", "--kl_coef", "0.05",
        "--max_steps", str(STEPS), "--save_freq", "-1", "--test_freq", "-1",
        "--resume", "never", "--output_dir", str(out), "data.apply_chat_template=false",
    ]  # fmt: skip
    return measured(line, lambda text: text.startswith("step "))


def run_trl(python: str, folder: Path, *numbers: int) -> dict[str, float]:
    """Run this file under the peer's Python."""
    line = [python, __file__, "--as-trl", str(folder), *map(str, numbers)]
    return measured(line, lambda text: False)


def measured(line: list[str], ends_a_step: Any) -> dict[str, float]:
    """Run a command; median seconds of its steps but the first, and its peak memory in GB."""
    times, told = [], []
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            told.append(text)
            if ends_a_step(text):
                times.append(time.perf_counter())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
    if status:
        sys.exit("".join(told[-30:]))
    # TRL's own process says the seconds of each step; ours are those between two lines.
    said = [json.loads(text)["seconds"][1:] for text in told if text.startswith('{"seconds"')]
    seconds = said[0] if said else [b - a for a, b in itertools.pairwise(times)]
    return {"seconds": statistics.median(seconds), "gigabytes": usage.ru_maxrss / 1e6}


def environment() -> dict[str, str]:
    """Both with as many threads, and without a hub."""
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    return os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Make the model and the prompts, run the pairs, print a table."""
    if sys.argv[1:2] == ["--as-trl"]:
        where, *numbers = sys.argv[2:]
        print(json.dumps(train_with_trl(Path(where), *map(int, numbers))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="TRL in bfloat16")
    asked = parser.parse_args()
    response = 64 if asked.fixed else RESPONSE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", ends=0.0 if asked.fixed else ENDS, large=asked.large)
        make_prompts(folder / "prompts.jsonl", asked.batch * STEPS, fixed=asked.fixed)
        (folder / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return len(solution_str) % 7 / 7\n"
        )
        print("| pair | TRL s | ppo s | ratio | TRL GB | ppo GB | ratio |")
        print("|---|---|---|---|---|---|---|")
        ratios: list[tuple[float, float]] = []
        for pair in range(1, asked.pairs + 1):
            theirs = run_trl(
                asked.trl, folder, asked.batch, asked.epochs, response, int(asked.bf16)
            )
            ours = run_ours(folder, asked.batch, asked.epochs, response)
            ratio = tuple(ours[key] / theirs[key] for key in ("seconds", "gigabytes"))
            ratios.append((ratio[0], ratio[1]))
            print(
                f"| {pair} | {theirs['seconds']:.1f} | {ours['seconds']:.1f} | {ratio[0]:.2f} "
                f"| {theirs['gigabytes']:.2f} | {ours['gigabytes']:.2f} | {ratio[1]:.2f} |",
                flush=True,
            )
        time_, memory = (statistics.median(values) for values in zip(*ratios, strict=True))
        print(f"median ratios: time {time_:.2f}, memory {memory:.2f}")


if __name__ == "__main__":
    main()
