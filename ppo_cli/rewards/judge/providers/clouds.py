"""Clouds that have models of other providers: Azure, Vertex AI and Bedrock.

Their SDKs read region, project, version and credentials from variables; config/models/judges.toml
says which. Batches work differently on each cloud, and are not offered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ppo_cli.rewards.judge.providers import claude, gemini, openai


class Azure(openai.Judge):
    """Azure OpenAI; the model is the name of a deployment."""

    name = "azure"
    client_class = "AsyncAzureOpenAI"
    batches = ""
    lists_models = False  # the SDK lists models, not deployments
    redundant_path = r"/openai(/.*)?$"
    default_path = ""

    def credentials(self, key: str) -> dict[str, Any]:
        """Return the address of the resource, and a key or a token of Entra ID."""
        is_token = self._key.variable == "AZURE_OPENAI_AD_TOKEN"
        return {"azure_endpoint": self.base_url, "azure_ad_token" if is_token else "api_key": key}


class Vertex(gemini.Judge):
    """Gemini at Vertex AI, with Google's own credentials."""

    name = "vertex"
    batches = ""

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        return vertex_address(environ["GOOGLE_CLOUD_LOCATION"])

    def credentials(self, key: str) -> dict[str, Any]:
        """Return project and region; the SDK finds the credentials."""
        names = {"project": "GOOGLE_CLOUD_PROJECT", "location": "GOOGLE_CLOUD_LOCATION"}
        return {"vertexai": True} | {
            field: os.environ[name].strip() for field, name in names.items()
        }


class _CloudClaude(claude.Judge):
    """Claude at a cloud, whose credentials the SDK finds."""

    uses_aiohttp = False  # the SDK signs requests as httpx sends them
    batches = ""
    lists_models = False

    def credentials(self, key: str) -> dict[str, Any]:
        """Return the address alone."""
        return {"base_url": self.base_url}


class VertexClaude(_CloudClaude):
    """Claude at Vertex AI, with Google's own credentials."""

    name = "vertex-claude"
    client_class = "AsyncAnthropicVertex"
    redundant_path = r"/projects(/.*)?$"
    default_path = "/v1"

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        return f"{vertex_address(environ['CLOUD_ML_REGION'])}/v1"


class Bedrock(_CloudClaude):
    """Claude at Bedrock: a bearer token, or the credentials of AWS that boto3 finds."""

    name = "bedrock"
    client_class = "AsyncAnthropicBedrock"
    redundant_path = r"/model(/.*)?$"

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        region = environ.get("AWS_REGION", "").strip() or environ["AWS_DEFAULT_REGION"].strip()
        return f"https://bedrock-runtime.{region}.amazonaws.com"

    def connect(self, key: str) -> Any:
        """Return an AsyncAnthropicBedrock client without retries."""
        client = super().connect(key)
        client.api_key = key if self._key.variable else None  # the SDK would take a blank variable
        return client


def vertex_address(location: str) -> str:
    """Return the address of Vertex AI in a region, as Google's SDKs form it."""
    region = location.strip()
    if region == "global":
        return "https://aiplatform.googleapis.com"
    if region in ("us", "eu"):
        return f"https://aiplatform.{region}.rep.googleapis.com"
    return f"https://{region}-aiplatform.googleapis.com"
