"""The supervised steps before tinker_rl_loop.py; run in .venv-tinker: URL LOG_PATH STEPS."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import tinker
import torch
from tinker import types
from tinker_cookbook import renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer

NAME, BELOW = "Qwen/Qwen3-8B-Base", 3
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
# The worked case of the recipe.
CASE = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]


def main(url: str, log_path: Path, steps: int) -> None:
    tokenizer = get_tokenizer(NAME)
    renderer = renderers.get_renderer("role_colon", tokenizer)
    client = tinker.ServiceClient(base_url=url)
    trainer = client.create_lora_training_client(base_model=NAME, rank=0).result()
    draw = random.Random(1).randrange
    for step in range(steps):
        data = []
        for _ in range(16):
            a, b = draw(BELOW), draw(BELOW)
            question = {"role": "user", "content": f"What is {a}+{b}?" + SUFFIX}
            prompt = renderer.build_generation_prompt([*CASE, question]).to_ints()
            answer = [*tokenizer.encode(f" \\boxed{{{a + b}}}"), tokenizer.eos_token_id]
            ids = prompt + answer
            weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
            inputs = {"target_tokens": torch.tensor(ids[1:]), "weights": torch.tensor(weights)}
            tokens = types.ModelInput.from_ints(ids[:-1])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
        lr = 2e-3 if step < 0.85 * steps else 5e-4
        batch = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=lr)).result()
        if step % 10 == 0:
            print(step, batch.result().metrics["loss:sum"] / len(data), flush=True)
    log_path.mkdir(parents=True, exist_ok=True)
    record = {"name": "warm", "batch": 0, "state_path": trainer.save_state("warm").result().path}
    (log_path / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
