"""Addresses (s3://…) as paths: each setting serves them or refuses them by name."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.schema.keys import table
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import ConfigError, DataError
from tests.config.settling import settle

ADDRESSES = ("s3://x/y", "gs://x/y", "hdfs://x/y", "memory://x/y", "file:///tmp/x")
SERVED = {"trainer.output_dir", "trainer.store", "data.train_files", "data.val_files"}
# Texts that name no file, and settings with forms of their own.
TEXTS = {
    "algorithm.filter_groups.metric", "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold", "critic.model.target_modules",
    "data.answer_key", "data.prompt_key", "data.reward_fn_key", "data.system_prompt",
    "environment.mcp", "environment.pass_env",
    "model.target_modules", "reward.api.cascade.model", "reward.api.monitor.model",
    "reward.api.panel.judges", "reward.api.scoring_prompt", "reward.api.system_prompt",
    "reward.model.model_name", "reward.model.revision", "reward.rule", "rollout.stop",
    "trainer.experiment_name", "trainer.master_addr", "trainer.project_name",
}  # fmt: skip

PATHS = {
    "model.path", "critic.model.path", "ref.path", "reward.api.cache", "reward.api.model",
    "reward.api.monitor.labels", "reward.api.place", "reward.api.prices", "reward.api.prompt_file",
    "reward.api.rubric", "reward.config_file", "reward.function", "reward.model.path",
    "reward.model.tokenizer", "environment.path", "environment.tools", "environment.python",
    "environment.mcp_config", "trainer.resume_mode",
}  # fmt: skip


def refusal(name: str, value: str) -> str:
    try:
        settle(f"{name}={value}")
    except ConfigError as error:
        return str(error)
    return ""


def test_every_setting_of_text_refuses_addresses_or_is_no_path() -> None:
    keys = table().items()
    settings = [name for name, key in keys if not key.choices and "str" in str(key.kind)]
    few = {"model.path", "data.answer_key"}
    for address in ADDRESSES:
        # Every setting once; one of each kind where only those that serve addresses differ.
        if address != ADDRESSES[0]:
            settings = [*SERVED, *few]
        unserved = SERVED if address.startswith(("gs:", "hdfs:")) else set()
        if address.startswith("memory:"):
            unserved = {"trainer.output_dir", "trainer.store"}
        answers = {name: refusal(name, address) for name in settings}
        served = {name for name, answer in answers.items() if not answer}
        assert served == (TEXTS | (SERVED - unserved)) & {*settings}
        by_name = {name for name, answer in answers.items()
                   if f"{name} {address} is an address" in answer}  # fmt: skip
        assert by_name == PATHS & {*settings}


def test_a_missing_package_and_secrets_are_refused_by_name() -> None:
    answer = refusal("trainer.output_dir", "gs://bucket/run")
    assert "gcsfs" in answer and answer.endswith("pip install 'ppo-cli[gcs]'.")
    assert "trainer.store" not in answer
    assert "hdfs://x/y cannot be opened here: " in refusal("trainer.output_dir", "hdfs://x/y")
    for url in (
        "s3://AKIAEXAMPLE:sEcr3t-w0rd-9081@bucket/run",
        "s3://bucket/run?token=sEcr3t-w0rd",
    ):
        answer = refusal("trainer.output_dir", url)
        assert "credentials are read from the environment" in answer and "sEcr3t" not in answer
    for url in (
        "nofs://bucket/run", "s3://", "s3:///x", "s3://bucket/../run", "s3://bucket/./run", "s3://ü/x",
        "S3://bucket/run", "s3://[b/x", "s3://b/x\ny", "s3:b/x", "s3:", "simplecache::s3://b/x",
    ):  # fmt: skip
        assert "no address that fsspec opens" in refusal("trainer.store", url)
        assert "no address that fsspec opens" in refusal("trainer.output_dir", url)
    # The user of a login and Azure's container are no secrets.
    assert "adlfs" in refusal("trainer.store", "abfs://runs@account.dfs.core.windows.net/x")
    assert "password" in refusal("trainer.store", "sftp://me:sEcr3t-w0rd@host/x")
    assert "cannot be written" in refusal("trainer.store", "https://host/run")


def test_the_folder_of_an_address_and_whose_copy_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    trainer = settle(flags={"trainer.output_dir": ("s3://bucket/a//b/", "flag")}).config.trainer
    assert trainer.store == "s3://bucket/a//b/"
    assert trainer.output_dir == "/cache/ppo-cli/runs/s3/bucket/a/b"
    # A path has lost a slash; a folder of this machine has no copy.
    for path, store, folder in (
        ("s3:/bucket/a", "s3://bucket/a", "/cache/ppo-cli/runs/s3/bucket/a"),
        ("file:///tmp/x", None, "/tmp/x"),
    ):
        trainer = settle(flags={"trainer.output_dir": (path, "flag")}).config.trainer
        assert (trainer.store, trainer.output_dir) == (store, folder)
    # The settings of a run name its copy; another folder does not write there.
    file = tmp_path / "config.yaml"
    file.write_text("trainer:\n  output_dir: there\n  store: s3://bucket/a\n")
    assert settle(files=[file]).config.trainer.store == "s3://bucket/a"
    other = {"trainer.output_dir": ("here", "flag --output_dir")}
    assert settle(files=[file], flags=other).config.trainer.store is None
    both = settle("trainer.store=s3://bucket/c", files=[file], flags=other).config
    assert (both.trainer.output_dir, both.trainer.store) == ("here", "s3://bucket/c")
    two = {"trainer.output_dir": ("s3://bucket/d", "flag --output_dir")}
    with pytest.raises(ConfigError, match="name two addresses"):
        settle("trainer.store=s3://bucket/c", flags=two)


def test_data_files_are_copied_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    system = fsspec.filesystem("memory")
    for text in ("1 + 1", "2 + 2"):
        system.pipe_file("/sets/sums.jsonl", f'{{"prompt": "{text}"}}\n'.encode())
        records = read_source("memory://sets/sums.jsonl")
        assert records.label == "sums" and records.records[0][1] == {"prompt": text}
    assert len([path for path in tmp_path.rglob("sums.jsonl") if path.is_file()]) == 2
    with pytest.raises(DataError, match=r"^memory://sets/none.jsonl cannot be read: "):
        read_source("memory://sets/none.jsonl")


def test_a_store_that_ends_with_the_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "train"):
        assert main([command, "--preset", "embedded", "--output_dir", "memory://x/y"]) == 2
        assert "memory://x/y is gone when this process ends" in capsys.readouterr().err
