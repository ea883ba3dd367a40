"""Games of Gymnasium and TextArena, with their packages' Python (`.venv-games`)."""

from __future__ import annotations

import sys

import pytest

from ppo_cli.environments.pool import check_environment
from ppo_cli.errors import UserError
from tests.environments.conftest import ROW, find_python
from tests.environments.test_pool import Start, say
from tests.settings import complete_environment


@pytest.mark.slow
def test_games_are_played(start: Start) -> None:
    python = str(find_python("games"))
    lake = start(path="gym:FrozenLake-v1", python=python, kwargs={"is_slippery": False})
    system = {"role": "system", "content": "Play."}
    opening = lake.reset("a", {**ROW, "messages": [system, *ROW["messages"]]}).result(60)
    assert opening.messages[0] == system
    assert opening.messages[1]["content"].splitlines() == [
        "[red S]FFF", "FHFH", "FFFH", "HFFG", "", "An action is a number from 0 to 3."
    ]  # fmt: skip
    reply = say(lake, "a", "I take the action 7.")
    assert "a number from 0 to 3" in reply.error and reply.rewards == {"environment": 0.0}
    assert "a number from 0 to 3" in say(lake, "a", "1" * 5000).error
    # Right, then down into the hole.
    reply = say(lake, "a", "After 7 I take 2")
    assert not reply.done and "S[red F]FF" in reply.messages[0]["content"]
    reply = say(lake, "a", "1")
    assert reply.done and reply.rewards == {"environment": 0.0}

    guess = start(path="textarena:GuessTheNumber-v0", python=python)
    assert "between 1 and 20" in guess.reset("b", ROW).result(60).messages[0]["content"]
    replies = []
    for number in range(1, 21):
        replies.append(say(guess, "b", f"[{number}]"))
        if replies[-1].done:
            break
    assert all("higher" in reply.messages[0]["content"] for reply in replies[:-1])
    assert replies[-1].done and "environment" in replies[-1].rewards
    for path, advice in {
        "gym:Pendulum-v1": "its actions are Box", "gym:Nope-v1": "does not begin: NameNotFound",
        "textarena:Nope-v0": "Name a game for one player",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=advice):
            check_environment(complete_environment(path=path, python=python))


@pytest.mark.parametrize(("kind", "package"), [("gym", "gymnasium"), ("textarena", "textarena")])
def test_a_python_without_the_package_is_refused(kind: str, package: str) -> None:
    advice = f"lacks the package {package}.*{sys.executable} -m pip install {package} "
    with pytest.raises(UserError, match=advice):
        check_environment(complete_environment(path=f"{kind}:X-v0"))
