"""Judges behind the dashscope SDK, through its native or its compatible protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    chat_messages,
    decision_input,
    decision_questions,
    read_decision,
    response_format,
)
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import CHAT, TokenFields, check_response
from ppo_cli.rewards.remote.proxies import client_settings

if TYPE_CHECKING:
    import httpx

_PAGE_SIZE = 100  # of the list of models


class Judge(SdkProvider):
    """A judge behind DashScope's endpoints for chat completions and decisions."""

    name = package = module = "dashscope"
    noisy_logger = "dashscope.v2"  # warns about every failed attempt
    decision_module = "dashscope.v2.resources.decision"
    redundant_path = (
        r"/(services/aigc/(text|multimodal)-generation/generation|systemone|(chat/)?completions"
        r"|responses|decisions|models)$"
    )
    default_path = "/api/v1"
    reply_fields = CHAT._replace(
        tokens=TokenFields(
            ("input_tokens",), ("output_tokens",), "prompt_tokens_details.cached_tokens",
            "total_tokens",
        )
    )  # fmt: skip
    _http: httpx.AsyncClient | None = None

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of $DASHSCOPE_WORKSPACE if it is set, else the region's shared one.

        The region is $DASHSCOPE_REGION, by default cn-beijing.
        """
        workspace = environ.get("DASHSCOPE_WORKSPACE", "").strip()
        region = environ.get("DASHSCOPE_REGION", "").strip() or "cn-beijing"
        # A workspace has a separate host, regions have shared ones.
        if workspace:
            return f"https://{workspace}.{region}.maas.aliyuncs.com/api/v1"
        if region == "cn-beijing":
            return super().default_url(environ)
        host = "cn-hongkong.dashscope" if region == "cn-hongkong" else "dashscope-intl"
        return f"https://{host}.aliyuncs.com/api/v1"

    def options(self) -> Sequence[Option]:
        """Thinking is switched off: many Qwen models think by default."""
        return [
            Option("enable_thinking", aliases=("thinking",)),
            Option("seed"),
            Option("response_format", ("json_schema", "json_object"), ("schema", *FORMAT_WORDS)),
            Option("temperature"),
            Option("max_tokens"),
        ]

    def connect(self, key: str) -> Any:
        """Return an AsyncClient without retries; the URL decides the protocol."""
        import httpx
        from dashscope import AsyncClient

        # The two protocols have different paths.
        compatible = "/compatible-mode" in self.base_url
        base = self.base_url
        if self.api.mode == "decision":  # only the compatible path has it
            base = re.sub(r"/api/v1$", "/compatible-mode/v1", base)
        # A client that is passed in needs what the SDK would set on its own one (dashscope 1.25).
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
        """Close the SDK's client and the HTTP client that was passed to it."""
        await client.aclose()
        if self._http is not None:
            await self._http.aclose()

    async def list_models(self, client: Any) -> list[str] | None:
        """Return the models that the native protocol lists, page by page."""
        # The compatible protocol has no list of models.
        if "/compatible-mode" in self.base_url:
            return None
        names: list[str] = []
        while True:
            page = await client.models.list(
                page_no=len(names) // _PAGE_SIZE + 1, page_size=_PAGE_SIZE
            )
            names += [model.model for model in page.models if model.model]
            if len(page.models) < _PAGE_SIZE or len(names) >= page.total_count:
                return names

    def arguments(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of a chat completion."""
        messages = chat_messages(question)
        arguments: dict[str, Any] = {"model": self.model, "messages": messages}
        if "enable_thinking" in forms:
            arguments["enable_thinking"] = False
        arguments |= self.plain_fields(question, forms)
        if "response_format" in forms and question.output == "json":
            arguments["response_format"] = response_format(question, forms["response_format"])
        return arguments

    async def send(self, client: Any, arguments: dict[str, Any], timeout: float) -> Any:
        """One chat completion."""
        return await client.chat.completions.create(**arguments, timeout=timeout)

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level."""
        reply = await client.decision.create(
            model=self.model, state=decision_input(question),
            questions=decision_questions(question), timeout=timeout,
        )  # fmt: skip
        return read_decision(reply, question, self.reply_fields.tokens)
