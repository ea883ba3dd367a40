"""What holds for every test: one thread a process, no hub, no leaked settings.

And a real byte-level tokenizer, made in a moment: one token a byte, and the control tokens.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from tests.nvml import Machine

# Set before anything imports torch: spinning OpenMP threads make a busy machine crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A busy machine misses a deadline that says nothing about the code.
settings.register_profile("unhurried", deadline=None, max_examples=30)
settings.load_profile("unhurried")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Runs of many processes each: side by side they miss deadlines that Ray sets.
MESSAGE_PARTS = 12
ONE_AFTER_ANOTHER = ("test_two_node_runs.py", "test_lost_workers.py", "test_cluster_runs.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only after collection, which makes little and has much to look through.

    What is there then stays: the tests' own collections need not look at it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Caches of the user are neither read nor written: there may be none, or no right to."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = TemporaryDirectory(prefix="ppo-caches-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order", type=int, metavar="SEED", help="files, and tests in them, at random"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left alone with one at the end.

    Where there is no GPU, tests that need one are skipped; so are those that are run once a week.
    """
    for item in items:
        weekly = item.get_closest_marker("weekly") and not item.get_closest_marker("gpu")
        if weekly and not os.environ.get("PPO_SWEEP"):
            item.add_marker(pytest.mark.skip(reason="weekly: PPO_SWEEP=1 runs it"))
    if seed := config.getoption("--order"):
        # By digest: the processes of xdist must agree, and files stay whole.
        for name in (lambda item: item.nodeid, lambda item: item.location[0]):
            items.sort(key=lambda item, name=name: crc32(f"{seed} {name(item)}".encode()))
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: (item.path.name not in ONE_AFTER_ANOTHER, item.path not in slow))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _finds_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU here"))


def _finds_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or os.environ.get("PPO_TEST_DEVICE") == "second"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process one file at a time, and one process all of ONE_AFTER_ANOTHER."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            # The golden messages are many and independent: all processes share them.
            if path.endswith("test_messages.py"):
                return f"{path} {crc32(nodeid.encode()) % MESSAGE_PARTS}"
            return "clusters" if path.endswith(ONE_AFTER_ANOTHER) else path

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which sandboxes the tests of code rewards ran in."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    skipped = {
        text
        for report in reports
        for key, text in getattr(report, "user_properties", ())
        if key == "sandbox"
    }
    if skipped:
        terminalreporter.write_line(f"Sandboxes of code rewards: {'; '.join(sorted(skipped))}")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None = TEMPLATE, frame: str = "<s> $A") -> Any:
        """`frame` is what the tokenizer puts around a text that it encodes by itself."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special_tokens = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
        vocab = {word: index for index, word in enumerate([*alphabet, *special_tokens])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=[(word, vocab[word]) for word in special_tokens[:3]]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=raw,
            bos_token="<s>",
            eos_token="<|im_end|>",
            pad_token="<pad>",
            additional_special_tokens=["<|im_start|>"],
            chat_template=template,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine of which the test says what NVIDIA GPUs it has."""
    from ppo_cli.machine import gpus

    yield Machine(tmp_path, monkeypatch)
    gpus.read_inventory.cache_clear()
