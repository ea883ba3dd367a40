"""Settings of episodes: the environment or the tools, their processes, and the limits."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from ppo_cli.addresses import refuse_address
from ppo_cli.config.choices import choose_isolation, choose_python, choose_starts
from ppo_cli.config.schema.algorithm import Conflict, LocalPath, Section, checked, setting
from ppo_cli.config.schema.unset import Chosen, Follows


class Environment(Section):
    """Episodes of several turns, with an environment or tools."""

    # Where the turns come from: one of these three.
    path: LocalPath = setting(
        None, "Environment that replies to the model. FILE.py:NAME, verifiers:NAME, openenv:URL, "
        "gym:ID or textarena:ID.",
        absent="no environment", flag="--environment", env="PPO_ENVIRONMENT", unused="",
        common=True,
    )  # fmt: skip
    tools: LocalPath = setting(
        None, "Python functions that the model may call. FILE.py or FILE.py:NAME,NAME.",
        absent="no Python tools", flag="--tools", env="PPO_TOOLS", unused="", common=True,
    )  # fmt: skip
    mcp: tuple[str, ...] = setting(
        (), "Tools of MCP servers: each a command, which speaks MCP over stdin and stdout, an "
        "http:// address, or SERVER:TOOL,TOOL of mcp_config (SERVER alone: all its tools).",
        flag="--mcp", unused="",
    )  # fmt: skip
    mcp_config: LocalPath = setting(
        None, "File of MCP servers as other hosts read it (mcp.json). Without --mcp SERVER, all of "
        "them offer their tools.",
        absent="no file of MCP servers", flag="--mcp_config", unused="",
    )  # fmt: skip
    mcp_scope: Literal["process", "episode"] = setting(
        "process", "What shares an MCP server: the episodes of an environment process; or each "
        "episode starts its own, which sees no other episode.",
    )  # fmt: skip
    kwargs: dict[str, Any] = setting({}, "Arguments of the environment, by name.")
    seed_per: Literal["prompt", "sample"] = setting(
        "prompt", "What shares row[\"seed\"] in a step: all responses to a prompt, so that their "
        "rewards are of one game; or each response (sample) has its own.",
    )  # fmt: skip
    # Its processes.
    python: Annotated[str, checked(refuse_address)] = setting(
        Chosen(choose_python, "the one that runs this program"),
        "Python that runs the environment.", identity="start",
    )  # fmt: skip
    pass_env: tuple[str, ...] = setting(
        (), "Variables with keys that the environment, its tools and MCP servers need. They get no "
        "other key of this program; MCP servers get no other variable but PATH, HOME and the like.",
        flag="--pass_env", identity="start",
    )  # fmt: skip
    num_workers: int = setting(4, "Environment processes.", ge=1, identity="start")
    isolation: Literal["episode", "process"] = setting(
        Chosen(choose_isolation, "episode, and process for verifiers"),
        "What shares a process: the calls of an episode, whose process is forked; or all episodes "
        "(process), for code that starts threads or uses a GPU when it is imported. There a call "
        "that hangs or crashes takes other episodes along.",
    )  # fmt: skip
    memory_gb: float = setting(
        1.0, "Memory of an episode's process, in GiB, beyond what importing takes.", gt=0,
    )  # fmt: skip
    timeout: float = setting(
        30.0, "Limit of a call of the environment or of a tool, in seconds.", flag="--tool_timeout",
        gt=0,
    )  # fmt: skip
    max_starts: int = setting(
        Chosen(choose_starts, "8 where each may start a server, else 256"),
        "Episodes that begin at once; each has `timeout` for it.", ge=1, identity="start",
    )  # fmt: skip
    max_reply_chars: int = setting(
        4096, "Longest reply that the policy reads, in characters; the middle of a longer one is "
        "left out.", ge=16,
    )  # fmt: skip
    # Limits of an episode; its tokens are limited by data.max_response_length.
    max_turns: int = setting(8, "Maximum turns of the policy.", flag="--max_turns", ge=1)
    max_turn_tokens: int = setting(
        Follows("data.max_response_length"),
        "Maximum tokens of one turn; no turn has more than the episode has left.",
        flag="--max_turn_tokens", ge=1,
    )  # fmt: skip
    # How turns become training samples.
    history: Literal["refuse", "split", "keep"] = setting(
        "refuse", "If the chat template rewrites earlier turns (drops thoughts): refuse to start, "
        "split the episode into one sample a turn, or keep what was sampled.",
    )  # fmt: skip
    gamma_turn: float = setting(
        1.0, "Discount between the turns of an episode, as well as algorithm.gamma.", gt=0, le=1,
        unused="no_critic",
    )  # fmt: skip

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "path tools mcp mcp_config",
            lambda s: s.path is not None and bool(s.tools or s.mcp or s.mcp_config),
            lambda s, at: (
                f"{at}path names an environment, which has its own tools ({at}tools, {at}mcp, "
                f"{at}mcp_config); "
                f"keep one: {at}tools=null leaves a preset's tools out. An environment offers "
                "tools to the policy by its attribute tools."
            ),
            example="path=game.py:Game tools=tools.py",
            advice="tools=null",
        ),
        Conflict(
            "kwargs path",
            lambda s: bool(s.kwargs) and s.is_set and s.path is None,
            lambda s, at: (
                f"{at}kwargs are arguments of an environment, and only tools are named; leave them "
                "out."
            ),
            example="tools=tools.py kwargs.level=2",
            advice="kwargs={}",
        ),
    )

    @property
    def is_set(self) -> bool:
        """Whether the run has episodes of several turns."""
        return bool(self.path or self.tools or self.mcp or self.mcp_config)
