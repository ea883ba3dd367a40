"""Clouds that have the models of other providers: Azure, Vertex AI and Bedrock.

Each is the provider's own class with another client. Regions, projects, versions and credentials
are those that the SDK reads from the environment; judges.toml says which. Batches work otherwise
on each cloud, and are not offered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ppo_cli.rewards.judge.providers import claude, gemini, openai


class Azure(openai.Judge):
    """Azure OpenAI; the model is the name of a deployment."""

    name = "azure"
    batch_rows = 0
    pasted = r"/openai(/.*)?$"
    path = ""

    def connect(self, key: str) -> Any:
        """An AsyncAzureOpenAI client without retries; the key may be a token of Entra ID."""
        from openai import AsyncAzureOpenAI

        token = self._key.variable == "AZURE_OPENAI_AD_TOKEN"
        let_in: dict[str, Any] = {"azure_ad_token": key} if token else {"api_key": key}
        return AsyncAzureOpenAI(azure_endpoint=self.base_url, max_retries=0, **let_in)

    async def models(self, client: Any) -> list[str] | None:
        """The SDK lists models, and no deployments."""
        return None


class Vertex(gemini.Judge):
    """Gemini at Vertex AI, with Google's own credentials."""

    name = "vertex"
    batch_rows = 0

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        return _vertex(environ["GOOGLE_CLOUD_LOCATION"])

    def access(self, key: str) -> dict[str, Any]:
        """Project and region; the SDK finds the credentials."""
        project, location = (os.environ[f"GOOGLE_CLOUD_{it}"] for it in ("PROJECT", "LOCATION"))
        return {"vertexai": True, "project": project.strip(), "location": location.strip()}


class VertexClaude(claude.Judge):
    """Claude at Vertex AI, with Google's own credentials."""

    name = "vertex-claude"
    batch_rows = 0
    pasted = r"/projects(/.*)?$"
    path = "/v1"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        return f"{_vertex(environ['CLOUD_ML_REGION'])}/v1"

    def connect(self, key: str) -> Any:
        """An AsyncAnthropicVertex client without retries."""
        from anthropic import AsyncAnthropicVertex

        return AsyncAnthropicVertex(base_url=self.base_url, max_retries=0)

    async def models(self, client: Any) -> list[str] | None:
        """The SDK lists none."""
        return None


class Bedrock(claude.Judge):
    """Claude at Bedrock: a bearer token, or the credentials of AWS that boto3 finds."""

    name = "bedrock"
    batch_rows = 0
    pasted = r"/model(/.*)?$"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        region = environ.get("AWS_REGION", "").strip() or environ["AWS_DEFAULT_REGION"].strip()
        return f"https://bedrock-runtime.{region}.amazonaws.com"

    def connect(self, key: str) -> Any:
        """An AsyncAnthropicBedrock client without retries."""
        from anthropic import AsyncAnthropicBedrock

        client = AsyncAnthropicBedrock(base_url=self.base_url, max_retries=0)
        client.api_key = key if self._key.variable else None  # its own look takes a blank one
        return client

    async def models(self, client: Any) -> list[str] | None:
        """The SDK lists none."""
        return None


def _vertex(location: str) -> str:
    """The address of Vertex AI in a region, as Google's SDKs have it."""
    place = location.strip()
    if place == "global":
        return "https://aiplatform.googleapis.com"
    if place in ("us", "eu"):
        return f"https://aiplatform.{place}.rep.googleapis.com"
    return f"https://{place}-aiplatform.googleapis.com"
