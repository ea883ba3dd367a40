"""A judge behind the dashscope SDK, through its native or its compatible protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    Form,
    Option,
    SdkProvider,
    TokenFields,
    attribute,
    hush,
    read_usage,
)
from ppo_cli.rewards.judge.providers.bodies import check_response
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    read_decision,
    response_format,
    score_question,
)
from ppo_cli.rewards.judge.providers.openai import chat_messages, read_completion
from ppo_cli.rewards.remote.proxies import client_settings

if TYPE_CHECKING:
    import httpx

TOKENS = TokenFields(
    ("input_tokens",), ("output_tokens",), "prompt_tokens_details.cached_tokens", "total_tokens"
)

_PAGE = 100  # models in a page of their list


class Judge(SdkProvider):
    """Chat completions, and the decision endpoint."""

    name = "dashscope"
    package = "dashscope"
    module = "dashscope"
    decisions = "dashscope.v2.resources.decision"
    pasted = (
        r"/(services/aigc/(text|multimodal)-generation/generation|systemone|(chat/)?completions"
        r"|responses|decisions|models)$"
    )
    path = "/api/v1"
    _http: httpx.AsyncClient | None = None

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each workspace and region."""
        workspace = environ.get("DASHSCOPE_WORKSPACE", "").strip()
        region = environ.get("DASHSCOPE_REGION", "").strip() or "cn-beijing"
        if workspace:
            return f"https://{workspace}.{region}.maas.aliyuncs.com/api/v1"
        if region == "cn-beijing":
            return super().home(environ)
        host = "cn-hongkong.dashscope" if region == "cn-hongkong" else "dashscope-intl"
        return f"https://{host}.aliyuncs.com/api/v1"

    def options(self) -> Sequence[Option]:
        """Qwen thinks by default in many models: a judge's answer is to be short."""
        return [
            Option("enable_thinking", words=("thinking",)),
            Option("seed"),
            Option("response_format", ("json_schema", "json_object"), ("schema", *FORMAT_WORDS)),
            Option("temperature"),
            Option("max_tokens"),
        ]

    def connect(self, key: str) -> Any:
        """An AsyncClient without retries; the URL tells the protocol."""
        import httpx
        from dashscope import AsyncClient

        hush("dashscope.v2")  # it warns of every failed attempt
        compatible = "/compatible-mode" in self.base_url
        base = self.base_url
        if self.api.mode == "decision":  # it lives under the compatible path only
            base = re.sub(r"/api/v1$", "/compatible-mode/v1", base)
        # A client that is passed in has to bring what the SDK gives its own.
        self._http = httpx.AsyncClient(
            base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=None,
            limits=httpx.Limits(max_connections=None),
            event_hooks={"response": [check_response]}, **client_settings(base),
        )  # fmt: skip
        client = AsyncClient(
            api_key=key,
            base_url=base,
            protocol="openai" if compatible else "native",
            max_retries=0,
            http_client=self._http,
        )
        if client.config.workspace:
            self._http.headers["X-DashScope-WorkSpace"] = client.config.workspace
        return client

    async def disconnect(self, client: Any) -> None:
        """Close the connection pool, and the client that was lent to it."""
        await client.aclose()
        if self._http is not None:
            await self._http.aclose()

    async def models(self, client: Any) -> list[str] | None:
        """What the models endpoint of the native protocol lists, page after page."""
        if "/compatible-mode" in self.base_url:
            return None
        found: list[str] = []
        while True:
            page = await client.models.list(page_no=len(found) // _PAGE + 1, page_size=_PAGE)
            found += [model.model for model in page.models if model.model]
            if len(page.models) < _PAGE or len(found) >= page.total_count:
                return found

    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """One chat completion."""
        plain = {
            "enable_thinking": False, "seed": question.vote, "temperature": self.sampling(),
            "max_tokens": question.max_tokens,
        }  # fmt: skip
        chosen: dict[str, Any] = {name: value for name, value in plain.items() if name in form}
        if "response_format" in form and question.output == "json":
            chosen["response_format"] = response_format(question, form["response_format"])
        reply = await client.chat.completions.create(
            model=self.model, messages=chat_messages(question), timeout=timeout, **chosen
        )
        return read_completion(reply, TOKENS)

    async def decide(self, client: Any, question: Question, timeout: float) -> Reply:
        """One decision."""
        reply = await client.decision.create(
            model=self.model,
            state=question.user,
            questions=score_question(question),
            timeout=timeout,
        )
        return read_decision(reply, question.scale, read_usage(attribute(reply, "usage"), TOKENS))
