"""What is wrong with the settings of a run, or with the machine, or may surprise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# refuse: settings that do not fit together, that no machine can honour, or that somebody typed
# without effect. missing: what this machine or disk lacks. elsewhere: what is missing here and may
# be there on the machine that trains (GPUs, keys): `ppo train` needs it, a plan notes it.
# no_effect: a setting of a preset or file without effect. remark: what may surprise. ok: only
# `ppo doctor` shows what it has found in order.
Kind = Literal["refuse", "missing", "elsewhere", "no_effect", "remark", "ok"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to do about it.

    `keys` are the settings concerned. `advice` has what to do, unless `text` ends with it.
    """

    keys: tuple[str, ...]
    text: str
    kind: Kind = "refuse"
    advice: str = ""
