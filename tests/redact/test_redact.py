"""Secrets are taken out of text; everything else stays."""

from __future__ import annotations

import pytest

from ppo_cli.redact import hide, mask_secrets, redact, secret_values

ENV = {
    "OPENAI_API_KEY": "abc123def",
    "HF_TOKEN": "hf-token-value",
    "SHORT_API_KEY": "x",
    "DB_PASSWORD": "correct-horse",
    "SIGNING_SECRET": "battery-staple",
    "HOME": "/h",
}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key abc123def!", "key ***!"),
        ("hf-token-value", "***"),
        ("x stays, /h stays", "x stays, /h stays"),
        ("https://me:pw@host:8/v1", "https://***@host:8/v1"),
        ("http://h/v1?key=zzz&model=m", "http://h/v1?key=***&model=m"),
        ("http://h/v1?a=1&api_key=zzz", "http://h/v1?a=1&api_key=***"),
        ("http://h/v1?access_token=zzz#top", "http://h/v1?access_token=***#top"),
        (
            "http://h/v1?sig=u&v=1&signature=v&secret=w&password=x&X-Amz-Signature=y",
            "http://h/v1?sig=***&v=1&signature=***&secret=***&password=***&X-Amz-Signature=***",
        ),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: Bearer ***"),
        ("sk-ant-REDACTED", "***"),
        ("hf_AbCdEfGhIjKlMnOpQr said no", "*** said no"),
        ("opened with correct-horse and battery-staple", "opened with *** and ***"),
        ("AIzaSyA1234567890abcdefghijk", "***"),
        ("me@example.org wrote", "me@example.org wrote"),
        ("http://host/v1/chat?model=m", "http://host/v1/chat?model=m"),
        ("prompt_key=prompt token_ids=3", "prompt_key=prompt token_ids=3"),
    ],
)
def test_redact(text: str, clean: str) -> None:
    assert redact(text, ENV) == clean
    assert redact(redact(text, ENV), ENV) == clean


def test_a_key_of_any_variable_is_hidden_once_it_was_read() -> None:
    hide("plain-words-as-a-key")
    hide("short")
    assert redact("plain-words-as-a-key, short", {}) == "***, short"
    inside = mask_secrets({"reason": ["the plain-words-as-a-key"], "token": "x", "n": 1})
    assert inside == {"reason": ["the ***"], "token": "***", "n": 1}


def test_a_value_of_six_characters_is_a_secret_and_a_shorter_one_is_not() -> None:
    hide("kq7zw")
    hide("kq7zwx")
    env = {"A_API_KEY": "pj4vh", "B_TOKEN": "pj4vhn"}
    assert secret_values(env) == ("pj4vhn",)
    assert redact("kq7zw kq7zwx pj4vh pj4vhn", env) == "kq7zw *** pj4vh ***"


def test_the_variables_of_this_process_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "value-of-this-process")
    assert redact("value-of-this-process") == "***"
    assert redact("value-of-this-process", {}) == "value-of-this-process"


def test_longer_secrets_go_first() -> None:
    env = {"A_API_KEY": "secret", "B_API_KEY": "secret-longer"}
    assert secret_values(env) == ("secret-longer", "secret")
    assert redact("secret-longer", env) == "***"


def test_what_stands_under_a_secret_name_is_masked_at_any_depth() -> None:
    inner = {"api_key": "abc", "token": None, "max_tokens": 5, "name": "n"}
    hidden = inner | {"api_key": "***"}
    given = {
        "parts": [inner, 1],
        "pair": (inner, "token"),
        "deep": {"client-secret": [1], "a": inner},
    }
    masked = mask_secrets(given)
    assert masked == {
        "parts": [hidden, 1],
        "pair": (hidden, "token"),
        "deep": {"client-secret": "***", "a": hidden},
    }
    assert inner["api_key"] == "abc"
