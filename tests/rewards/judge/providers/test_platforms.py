"""Azure, Vertex AI and Bedrock by the settings of their SDKs, against a loopback server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ppo_cli.config.models.known_models import JUDGES, effective_provider
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import JudgeError, Reply
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.secrets.redact import redact
from tests.judge_server import JudgeServer
from tests.judge_server.asking import ask_once, judge_api
from tests.judge_server.server import TOKEN, digest

SECRET = "loopback-0123456789abcdef"
AWS = {"AWS_ACCESS_KEY_ID": "AKIALOOPBACK", "AWS_SECRET_ACCESS_KEY": SECRET}
SETTINGS = {
    "azure": {"AZURE_OPENAI_API_KEY": SECRET, "OPENAI_API_VERSION": "2024-10-21"},
    "vertex": {"GOOGLE_CLOUD_PROJECT": "shop", "GOOGLE_CLOUD_LOCATION": "us-central1"},
    "vertex-claude": {"ANTHROPIC_VERTEX_PROJECT_ID": "shop", "CLOUD_ML_REGION": "us-east5"},
    "bedrock": {"AWS_REGION": "us-east-1", "AWS_BEARER_TOKEN_BEDROCK": SECRET},
}
PATHS = {
    "azure": "/openai/deployments/m/chat/completions",
    "vertex": "/v1beta1/projects/shop/locations/us-central1/publishers/google/models/"
    "m:generateContent",
    "vertex-claude": "/v1/projects/shop/locations/us-east5/publishers/anthropic/models/"
    "m:rawPredict",
    "bedrock": "/model/m/invoke",
}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials but those of a test: no home, no variables, no metadata server."""
    for declaration in JUDGES.values():
        names = " ".join([*declaration.keys, *declaration.url_variables, *declaration.needs,
                          *declaration.replaces.values()])  # fmt: skip
        for name in names.split():
            monkeypatch.delenv(name, raising=False)
    for name in (*AWS, "AWS_SESSION_TOKEN", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    no_password = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, no_password).decode()


@pytest.fixture
def google(
    server: JudgeServer, private_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account whose tokens the loopback server gives."""
    account = {
        "type": "service_account", "project_id": "shop", "client_email": "judge@shop.iam",
        "private_key": private_key, "private_key_id": "1", "client_id": "1",
        "token_uri": f"http://127.0.0.1:{server.port}/token",
    }  # fmt: skip
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))


def ask_with_settings(
    kind: str, server: JudgeServer, monkeypatch: pytest.MonkeyPatch, **variables: str
) -> object:
    """Ask a judge whose address is the SDK's own variable, as all of its settings are."""
    environ = SETTINGS[kind] | variables
    (address, *_) = JUDGES[kind].url_variables
    environ |= {address: f"http://127.0.0.1:{server.port}"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return ask_once(build_provider(judge_api(kind), environ=environ))


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_sdk_asks_at_its_own_path_with_its_own_credentials(
    kind: str, server: JudgeServer, google: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = ask_with_settings(kind, server, monkeypatch)
    assert isinstance(reply, Reply), reply
    assert json.loads(reply.text)["score"] == 10
    (call,) = server.calls
    assert call.path == PATHS[kind]
    assert call.query == ("api-version=2024-10-21" if kind == "azure" else "")
    key, header = (TOKEN, "Authorization") if kind.startswith("vertex") else (
        SECRET, "api-key" if kind == "azure" else "Authorization"
    )  # fmt: skip
    assert (call.key_header, call.key_digest) == (header, digest(key))


def test_azure_takes_a_token_of_entra_id(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"AZURE_OPENAI_API_KEY": "", "AZURE_OPENAI_AD_TOKEN": SECRET}
    assert isinstance(ask_with_settings("azure", server, monkeypatch, **changes), Reply)
    assert (server.calls[0].key_header, server.calls[0].key_digest) == (
        "Authorization", digest(SECRET),
    )  # fmt: skip


def test_bedrock_signs_with_the_credentials_of_aws(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    reply = ask_with_settings("bedrock", server, monkeypatch, AWS_BEARER_TOKEN_BEDROCK="", **AWS)
    assert isinstance(reply, Reply), reply
    assert server.calls[0].key_header == "Authorization"
    assert {"X-Amz-Date"} <= set(server.calls[0].headers)


@pytest.mark.parametrize("kind", ["vertex", "vertex-claude", "bedrock"])
def test_no_credentials_end_the_run_at_once(
    kind: str, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "bedrock":
        pytest.importorskip("boto3")
    # The SDK keeps what it has found for a region.
    blank = {"AWS_BEARER_TOKEN_BEDROCK": "", "AWS_REGION": "eu-west-1"} if kind == "bedrock" else {}
    error = ask_with_settings(kind, server, monkeypatch, **blank)
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.FATAL, "credentials"), error
    assert "no credentials that work" in str(error)


def test_a_missing_setting_is_named_unless_a_flag_replaces_it() -> None:
    with pytest.raises(RewardError, match="needs AWS_REGION or AWS_DEFAULT_REGION"):
        build_provider(judge_api("bedrock"), environ={})
    with pytest.raises(RewardError, match=r"\A(?!.*ENDPOINT).*needs OPENAI_API_VERSION"):
        build_provider(judge_api("azure", base_url="http://gateway"), environ={})


def test_each_region_has_its_address() -> None:
    hosts = {
        "global": "aiplatform.googleapis.com", "eu": "aiplatform.eu.rep.googleapis.com",
        "us-east5": "us-east5-aiplatform.googleapis.com",
    }  # fmt: skip
    for region, host in hosts.items():
        claude = SETTINGS["vertex-claude"] | {"CLOUD_ML_REGION": region}
        built = build_provider(judge_api("vertex-claude"), environ=claude)
        assert built.base_url == f"https://{host}/v1"
        gemini = SETTINGS["vertex"] | {"GOOGLE_CLOUD_LOCATION": region}
        assert build_provider(judge_api("vertex"), environ=gemini).base_url == f"https://{host}"
    bedrock = build_provider(judge_api("bedrock"), environ=SETTINGS["bedrock"])
    assert bedrock.base_url == "https://bedrock-runtime.us-east-1.amazonaws.com"


def test_the_variable_of_google_s_sdk_means_vertex(
    server: JudgeServer, google: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert effective_provider("gemini", {"GOOGLE_GENAI_USE_VERTEXAI": "False"}) == "gemini"
    environ = SETTINGS["vertex"] | {"GOOGLE_GENAI_USE_VERTEXAI": "True"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    at = judge_api("gemini", "m", f"http://127.0.0.1:{server.port}")
    assert isinstance(ask_once(build_provider(at, environ=environ)), Reply)
    assert server.calls[0].path == PATHS["vertex"]


def test_credentials_are_in_no_text(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fail(401, message=f"wrong key {SECRET}")
    error = ask_with_settings("bedrock", server, monkeypatch)
    assert isinstance(error, JudgeError) and SECRET not in str(error)
    for name in (*JUDGES["azure"].keys, *JUDGES["bedrock"].keys, *AWS, "AWS_SESSION_TOKEN"):
        if name != "AWS_ACCESS_KEY_ID":  # names the account, and opens nothing
            assert redact(f"it is {SECRET}.", {name: SECRET}) == "it is ***.", name


def test_a_model_that_is_not_there_brings_up_the_nearest(server: JudgeServer) -> None:
    server.fail(404, message="The model does not exist")
    environ = {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": server.url("openai")}
    error = ask_once(build_provider(judge_api("openai", "gpt-6-lunna"), environ=environ))
    assert isinstance(error, JudgeError) and error.kind is Failure.FATAL
    assert "Did you mean 'gpt-6-luna'?" in str(error) and "ppo reward models" in str(error)
