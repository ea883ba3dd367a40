"""Secrets are removed from texts and values; everything else stays as it is."""

from __future__ import annotations

import base64
import html
import json
import shlex
import string
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.run_folder.lines import to_json
from ppo_cli.secrets.known import hide_secret, hide_settings, secret_values
from ppo_cli.secrets.redact import HIDDEN, Redactor, mask_secrets, redact

ENV = {
    "OPENAI_API_KEY": "abc123def",
    "HF_TOKEN": "hf-token-value",
    "SHORT_API_KEY": "x",
    "DB_PASSWORD": "correct-horse",
    "SIGNING_SECRET": 'battery "staple',
    "HOME": "/h",
}
RANDOM = "q7Rk2LmX9vTb4NcW8sYd1Zg5"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r"
PEM = "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"
KEYS = (
    f"sk-{RANDOM}", f"sk-ant-api03-{RANDOM}", f"sk-proj-{RANDOM}_{RANDOM}",
    f"AIza{RANDOM}{RANDOM[:11]}", f"hf_{RANDOM}{RANDOM[:10]}", f"ghp_{RANDOM}{RANDOM[:12]}",
    f"github_pat_{RANDOM}_{RANDOM}",
    f"glpat-{RANDOM[:20]}", f"xoxb-123456789012-{RANDOM}", "AKIAQ7RK2LMX9VTB4NCW",
    f"gsk_{RANDOM}{RANDOM}", JWT,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key abc123def!", "key ***!"),
        ("hf-token-value", "***"),
        ("https://me:pw@host:8/v1", "https://***@host:8/v1"),
        (f"http://h/v1?key={RANDOM}&model=m", "http://h/v1?key=***&model=m"),
        (f"http://h/v1?a=1&amp;api_key={RANDOM}", "http://h/v1?a=1&amp;api_key=***"),
        (f"http://h/v1?access_token={RANDOM}#top", "http://h/v1?access_token=***#top"),
        (
            f"http://h/v1?sig={RANDOM}&v=1&X-Amz-Signature={RANDOM}",
            "http://h/v1?sig=***&v=1&X-Amz-Signature=***",
        ),
        (f"Authorization: Bearer {RANDOM}.ijkl", "Authorization: Bearer ***"),
        (f"x-api-key: {RANDOM}", "x-api-key: ***"),
        ("opened with correct-horse", "opened with ***"),
        (f"aws_secret_access_key = {RANDOM}/{RANDOM[:15]}", "aws_secret_access_key = ***"),
        (PEM.format(f"MIIE{RANDOM}\n{RANDOM}=="), PEM.replace("\n{}", "***")),
        (f"curl -H 'Authorization: Basic {base64.b64encode(b'me:long-password').decode()}'",
         "curl -H 'Authorization: Basic ***'"),
        *((f"密钥{key}。", "密钥***。") for key in KEYS),
        *((f"\x1b[1;32m{key}\x1b[0m", "\x1b[1;32m***\x1b[0m") for key in KEYS),
        (f"mail: key=3D{KEYS[0]}", "mail: key=3D***"),
        (f"https://h/callback#access_token={RANDOM}&state=1", "https://h/callback#access_token=***&state=1"),
        (f"https://h/?apiKey={RANDOM}&userToken={RANDOM}", "https://h/?apiKey=***&userToken=***"),
        ("postgres://me:my-dog-rex-9@db/x", "postgres://***@db/x"),
        # The name of a secret next to a value.
        *((text.format(RANDOM), text.format("***")) for text in (
            "x --api-key {}", "x --token={}", "env X_API_KEY={} x", "api_key: {}", "apiKey => '{}'",
            "Client(api_key='{}')", "f('MY_API_KEY', '{}')", "-H 'Authorization: Token {}'",
            "environ['KEY'] = \"{}\"", "<api_key>{}</api_key>", "login me password {}",
            "the token is {}", "AccountKey={};x", "//registry/:_authToken={}",
            "https://h/api/{}/mcp", "PGPASSWORD={}",
        )),
        (f'{{"api_key": "{RANDOM}"}}', '{"api_key": "***"}'),
        (f'{{\\"api_key\\": \\"{RANDOM}\\"}}', '{\\"api_key\\": \\"***\\"}'),
        (f"wandb login {'3f9c1a7be0' * 4}", "wandb login ***"),
        (f"AWS_SESSION_TOKEN={RANDOM}//{RANDOM}==", "AWS_SESSION_TOKEN=***"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(text: str, clean: str) -> None:
    assert redact(text, ENV) == clean
    assert redact(clean, ENV) == clean


@pytest.mark.parametrize(
    "text",
    [
        "x stays, /h stays",
        "from huggingface_hub import hf_hub_download",
        '<img src="https://maps.example.com/staticmap?center=Paris&key=YOUR_API_KEY">',
        'print(requests.get("http://api?api_key=K1").json())',
        'curl "https://h/?sig=1&password=p&donkey=brown"',
        'requests.get(url, headers={"Authorization": "Bearer YOUR_API_KEY_GOES_HERE"})',
        'f"https://{user}:{password}@{host}/v1?key={api_key}"',
        "https://$USER:$PASSWORD@host and ssh://git@github.com/a/b",
        "Basic understanding of task-classification-2024abc and sk-translations-2024",
        "ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx sk-xxxxxxxxxxxxxxxxxxxxxxxx",
        'if "-----BEGIN PRIVATE KEY-----" in text: raise ValueError("this is not for you")',
        "me@example.org wrote http://host/v1/chat?model=m prompt_key=prompt token_ids=3",
        'curl "https://h/?donkey=brown1animal2on3hills&monkey=abcdefghijkl1234&keyboard=a1b2c3d4e5f6g7h8"',
        '<img src="https://h/map?sig=YOUR_SIGNATURE_HERE_1&token=next-page-token-2024">',
        "postgres://user:password@localhost/db http://USER:PASS@h redis://me:your_password@h",
        "RFC 6750: a bearer internationalization_token_format2",
        "key = base64.b64decode(t); token=model1.generate_tokens2(x); key=/data/v2checkpoint10step",
        "https://github.com/a/b/commit/3f9c1a7be04d52e8816bc7f0a94d1e2c5b7780aa",
        "foreign_key='Customer12OrderLine34'; key='layers.0.self_attn.q_proj'",
        "monkey: ab1cd2ef3gh4ij5k",
        r"\frac{1}{2} \nabla \u00e9 100%25 &amp; C:\new\table",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text, ENV) == text


@pytest.mark.parametrize("secret", ["correct-horse", 'battery "staple', KEYS[2]])
def test_escapes_hide_no_secret(secret: str) -> None:
    escaped = "".join(f"\\u{ord(c):04x}" for c in secret)
    percent = "".join(f"%{ord(c):02X}" for c in secret)
    numbers = "".join(f"&#{ord(c)};" for c in secret)
    text = json.dumps([f"line\n{secret}", json.dumps(secret)])
    for spelling in (escaped, percent, numbers, "\u200b".join(secret), json.dumps(secret)[1:-1]):
        assert redact(f"a {spelling} b", ENV) == "a *** b"
    assert json.loads(redact(text, ENV)) == [f"line\n{HIDDEN}", f'"{HIDDEN}"']


@pytest.mark.parametrize(
    ("secret", "spell"),
    [("ключ от дома", quote), *(("pa\"s\\s<w>&'0rd", f) for f in (html.escape, repr, shlex.quote))],
)
def test_a_known_secret_is_hidden_as_other_languages_quote_it(secret: str, spell: Any) -> None:
    shown = redact(f"x = {spell(secret)}", {"DB_PASSWORD": secret})
    assert shown.replace("'", "") == "x = ***"


@pytest.mark.parametrize("before", ["", "u", "us", "use"])
def test_a_known_secret_in_base64_is_hidden(before: str) -> None:
    text = base64.b64encode(f"{before}correct-horse and more".encode()).decode()
    shown = redact(text, ENV)
    assert b"horse" not in base64.b64decode(shown.split("***")[0] + "====")
    assert HIDDEN in shown


def test_a_key_of_any_variable_is_hidden_once_it_was_read() -> None:
    hide_secret("plain-words-as-a-key")
    hide_secret("short")
    assert redact("plain-words-as-a-key, short", {}) == "***, short"
    inside = mask_secrets({"reason": ["the plain-words-as-a-key"], "token": "x", "n": 1})
    assert inside == {"reason": ["the ***"], "token": "***", "n": 1}


def test_secrets_of_settings_are_hidden_in_any_text() -> None:
    hide_settings({
        "function_kwargs": {"api_key": "key-of-a-function", "eos_token": "<|the end|>"},
        "path": "https://me:word-of-an-address@h/v1?key=lowercase-in-a-query&n=many-responses",
        "mcp": (
            "x --api-key word-of-a-flag --n many-responses", "A_TOKEN=word-of-a-variable x",
            "x --pat one-of-github --file-pat a-pattern-of-files", "env MY_PAT=my-variable x",
            "x --gitlab-pat one-of-gitlab --include_pat=many-responses",
            f"x -u me:{RANDOM[:12]} -t{RANDOM[12:]} -u many-responses",
            "x --header 'X-Api-Key: word-of-a-header ' -H 'Accept: many-responses'",
            "x --password 'words of a flag' 'postgres://me:word-of-a-database@h/d'",
            """bash -c 'export TOKEN="words of a line"; x --n many-responses'""",
            """x '{"api_key": "words of JSON", "n": "many-responses"}'""", 'x --token "left-open',
        ),
    })  # fmt: skip
    text = "word-of-a-flag word-of-a-variable one-of-github one-of-gitlab my-variable"
    assert redact(f"{text} a-pattern-of-files", {}) == "*** *** *** *** *** a-pattern-of-files"
    text = f"{RANDOM[:12]} -t{RANDOM[12:]} word-of-a-header words of a flag word-of-a-database"
    assert redact(text, {}) == "*** -t*** *** *** ***"
    assert redact("words of a line, words of JSON, left-open", {}) == "***, ***, ***"
    assert redact(r"words\ of\ a\ flag", {}) == "***"
    text = "key-of-a-function <|the end|> word-of-an-address lowercase-in-a-query many-responses"
    assert redact(text, {}) == "*** <|the end|> *** *** many-responses"


COMMIT = "3f9c1a7be04d52e8816bc7f0a94d1e2c5b7780aa"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("postgresql://superuser@localhost:5432/db", "superuser localhost"),
        ("s3://bucket-name@x/y", "bucket-name"), ("redis://superuser:superuser@h/0", "superuser"),
        ("postgres://me:password@h/?monkey=capuchin", "password capuchin"),
        ('Reply as {"token": "reasoning"}', "reasoning"), ("Use --token reasoning", "reasoning"),
        ("Balance H2SO4+2NaOH->Na2SO4+2H2O", "H2SO4+2NaOH->Na2SO4+2H2O"),
        ("Play e2e4e7e5g1f3 or x1+x2+x3+x4+x5", "e2e4e7e5g1f3 x1+x2+x3+x4+x5"),
        ({"mcp": f"uvx --rev {COMMIT} git+https://h/a@{COMMIT}"}, COMMIT),
        ({"mcp": "env AUTH_TYPE=password COOKIE_DOMAIN=localhost x --sort-key created_at"},
         "password localhost created_at"),
        ({"mcp": "x --token $TOKEN_NAME --key-file /run/key"}, "$TOKEN_NAME /run/key"),
        ({"mcp": 8}, "x"),
    ],
)  # fmt: skip
def test_words_of_settings_that_are_no_secret_stay(setting: Any, text: str) -> None:
    hide_settings({"text": setting, "kwargs": setting})
    assert redact(text, {}) == text


def test_a_value_of_eight_characters_is_a_secret_and_a_shorter_one_is_not() -> None:
    hide_secret("kq7zwab")
    hide_secret("kq7zwxab")
    env = {"A_API_KEY": "pj4vhab", "B_TOKEN": "pj4vhnab"}
    assert secret_values(env) == ("pj4vhnab",)
    assert redact("kq7zwab kq7zwxab pj4vhab pj4vhnab", env) == "kq7zwab *** pj4vhab ***"


@pytest.mark.parametrize(
    ("name", "value", "secrets"),
    [
        ("OPENAI_API_KEY", " plain words \n", ("plain words",)),
        ("api_key", "plain-words", ("plain-words",)),
        ("AWS_SECRET_ACCESS_KEY", "plain-words", ("plain-words",)),
        ("AZURE_OPENAI_KEY", "0123456789abcdef", ("0123456789abcdef",)),
        ("HTTPS_PROXY", "http://me:word-of-a-proxy@proxy:80", ("word-of-a-proxy",)),
        ("DB_URL", "db://superuser:superuser@h", ()), ("SORT_KEY", "response_length", ()),
        ("DATABASE_URL", "https://host/@page", ()),
        ("TOKENIZERS_PARALLELISM", "false-or-true", ()),
        ("GOOGLE_APPLICATION_CREDENTIALS", "folder/file.json", ()),
    ],
)  # fmt: skip
def test_variables_that_hold_secrets(name: str, value: str, secrets: tuple[str, ...]) -> None:
    assert secret_values({name: value}) == secrets


def test_the_variables_of_this_process_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "value-of-this-process")
    assert redact("value-of-this-process") == "***"
    assert redact("value-of-this-process", {}) == "value-of-this-process"


def test_a_secret_within_another_is_hidden_with_it() -> None:
    env = {"A_API_KEY": "a-secret", "B_API_KEY": "a-secret-longer"}
    assert secret_values(env) == ("a-secret-longer", "a-secret")
    assert redact("a-secret-longer", env) == "***"


def test_values_of_a_secret_name_are_masked_at_any_depth() -> None:
    inner = {"api_key": "abc", "token": None, "max_tokens": 5, "name": "n"}

    def values(part: Any, secret: Any) -> Any:
        return {"parts": [part, 1], "pair": (part, "token"),
                "deep": {"client-secret": secret, "a": part}}  # fmt: skip

    assert mask_secrets(values(inner, [1])) == values(inner | {"api_key": "***"}, "***")
    assert inner["api_key"] == "abc"


@pytest.mark.parametrize(
    "text",
    [
        "xoxb-" * 60_000, "AIza-" * 60_000, "eyJaaaa-" * 40_000, "sk-" * 100_000, "://a:" * 60_000,
        "-----BEGIN " + "PRIVATE KEY " * 25_000, "-----BEGIN PRIVATE KEY-----" + "\nx: a" * 60_000,
        "-----BEGIN PRIVATE KEY-----\nx" + ": a" * 100_000, "-----BEGIN PRIVATE KEY-----" * 10_000,
        "-----BEGIN PRIVATE KEY-----" + "\n" * 300_000, "?key" * 75_000, "?" + "key" * 100_000,
        "://" + "a:" * 150_000, "bearer" + " " * 300_000, "\\" * 300_000, "%41" * 100_000,
        "\u200b" * 300_000, "basic " * 50_000, 'x-api-key"' * 30_000, "&amp;" * 60_000,
        "secret_key: " * 25_000, "eyJaaaaaa." * 30_000, "://aaaaaaaaaaaaaaaaaaaaaaaa" * 10_000,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    redact(text, ENV)
    assert time.process_time() - start < 5


KNOWN = [value for value in ENV.values() if len(value) > 7]
PIECES = st.one_of(
    st.text(max_size=8),
    st.text(string.printable, max_size=8),
    st.sampled_from([
        *(f" {key} " for key in KEYS), *KNOWN, '"', "\\", "\\u00", "?key=", "&token=", '">', '\\"',
        "https://a:b@h/", "Bearer ", "</script>", '{"a": "', "-----BEGIN PRIVATE KEY-----",
    ]),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=6).map("".join)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def shape(value: Any) -> Any:
    """The value with each text and each name as a blank."""
    if isinstance(value, dict | list):
        return [shape(inner) for inner in (value.values() if isinstance(value, dict) else value)]
    return "" if isinstance(value, str) else value


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_redacted_values_keep_their_structure_as_json(value: Any) -> None:
    shown = to_json({"value": value}, Redactor(ENV))
    decoded = json.loads(shown)["value"]
    assert shape(decoded) == shape(json.loads(json.dumps(value), parse_constant=lambda _: None))
    for secret in (*KEYS, *KNOWN[:3]):
        assert secret not in shown


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_a_text_of_json_stays_json(text: str) -> None:
    """What a model wrote may be JSON, with a key in it."""
    wrapped = json.dumps({"text": text, "n": [1, text]})
    read = json.loads(redact(wrapped, ENV))
    assert set(read) == {"text", "n"} and len(read["n"]) == 2
