"""A dumped configuration loads again as itself."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_origin

from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.config.layers import read_yaml
from ppo_cli.config.schema.keys import Key, table
from ppo_cli.errors import ConfigError
from ppo_cli.planning.resolved import Resolved
from tests.config import settling
from tests.settings import config_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).filter(
    lambda text: not {"@", "?", "&", "$"} & set(text) and "-" not in text
)


def settle(flags: dict[str, Any], files: tuple[Path, ...] = ()) -> Resolved:
    given_flags = {key: (value, f"flag {key}") for key, value in flags.items()}
    return settling.settle(flags=given_flags, files=files, env={"MODEL_PATH": ""} if files else {})


def values_of(key: Key) -> st.SearchStrategy[Any]:
    if key.choices:
        choice = st.sampled_from(key.choices)
        return st.lists(choice, max_size=3) if key.is_list else choice
    if get_origin(key.kind) is dict:
        leaf = st.one_of(st.integers(), st.booleans(), TEXT, st.floats(allow_nan=False, width=32))
        return st.dictionaries(st.sampled_from(["a", "b", "c"]), leaf, max_size=3)
    if get_origin(key.kind) is tuple and not key.is_list:
        return st.tuples(*[st.floats(0, 0.99) for _ in get_args(key.kind)])
    if key.is_list:
        return st.lists(TEXT, max_size=3)
    plain = {
        bool: st.booleans(),
        int: st.integers(-1, 2**20),
        float: st.floats(0, 1e6, exclude_min=True, allow_subnormal=False),
        str: TEXT,
    }
    return plain.get(key.kind, TEXT)


NAMES = [k for k in table() if k != "reward.config_file"]
SOME = st.lists(st.sampled_from(NAMES), max_size=6, unique=True)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_dump_and_load_round_trip(data: st.DataObject) -> None:
    flags = {name: data.draw(values_of(table()[name]), name) for name in data.draw(SOME)}
    try:
        first = settle(flags)
    except ConfigError:
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config_yaml(first), encoding="utf-8")
        reread = settle({}, (path,))
    assert reread.config == first.config


def test_every_value_carries_its_origin(tmp_path: Path) -> None:
    text = config_yaml(settle({"rollout.n": "4"}))
    assert "  n: 4  # flag rollout.n\n" in text
    assert '  path: "some/model"  # env MODEL_PATH\n' in text
    (tmp_path / "c.yaml").write_text(text)
    names = [e.name for e in read_yaml(tmp_path / "c.yaml", "c")]
    assert set(names) == set(table())


def test_a_dump_holds_no_secrets() -> None:
    url = "https://user:hidden@host/v1?key=abcdef"
    kwargs = {"api_key": "hush1", "max_tokens": "77"}
    text = config_yaml(settle({"reward.model.path": url, "reward.function_kwargs": kwargs}))
    assert not any(secret in text for secret in ("hidden", "abcdef", "hush1"))
    assert '"max_tokens": "77"' in text
    assert "https://***@host/v1?key=***" in text
