"""`ppo data prepare`: convert well-known data sets to verl-style parquet files.

A new set is one function (source -> rows of each split) and one line in RECIPES.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.data_sets.files import (
    SPLITS,
    SUFFIXES,
    Place,
    Record,
    Records,
    RowError,
    RowProblem,
    file_suffix,
    raise_problems,
    read_bytes,
)
from ppo_cli.data_sets.rows import find_value, read_plain, read_prompt, read_records
from ppo_cli.data_sets.sources import read_source, split_sources
from ppo_cli.errors import DataError, did_you_mean, plural, ppo, refuse_out_address, shorten
from ppo_cli.extras.lab.transcripts import is_transcript, split_transcript
from ppo_cli.paths import load_json, user_path
from ppo_cli.records import Message

# Names of the sets on the hub, and the instructions that their prompts end with.
GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = (
    "Reason step by step. Finish with a last line that holds only the result, "
    "written as `#### answer`."
)
MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH_INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
HUMANEVAL = "openai/openai_humaneval"
HUMANEVAL_SPLIT = "test"
HUMANEVAL_INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function, with the imports "
    "that it needs, in one ```python block."
)
KODCODE_INSTRUCTION = (
    "Answer with one ```python block that holds the whole program, with the imports that it needs. "
    "It defines what is tested:"
)
HH_RLHF = "Anthropic/hh-rlhf"
SIDES = ("chosen", "rejected")
# Share of bad rows to leave out: the published HH-RLHF files have a few dialogues that end with the
# human, or whose two versions differ early.
MAX_ODD = 0.01


@dataclass(frozen=True)
class BuiltSet:
    """The rows of each split of a data set, and the rows that were left out."""

    splits: Mapping[str, list[dict[str, Any]]]
    left_out: tuple[RowProblem, ...] = ()


def _build_splits(
    sources: Mapping[str, list[str]],
    read_row: Callable[[Place, Record], dict[str, Any]],
    read: Callable[[str], Records] = read_source,
) -> BuiltSet:
    """Read all files of all splits; DataError with all bad rows if there are any."""
    splits: dict[str, list[dict[str, Any]]] = {}
    problems: list[RowProblem] = []
    for split, files in sources.items():
        rows: list[dict[str, Any]] = []
        for file in files:
            parsed, bad = read_records(read(file), read_row)
            rows += parsed
            problems += bad
        # verl's rows carry their split and index.
        for index, row in enumerate(rows):
            row["extra_info"] = {"split": split, "index": index, **row["extra_info"]}
        splits[split] = rows
    raise_problems(problems)
    return BuiltSet(splits)


def _verl_row(
    source: str, prompt: str | tuple[Message, ...], ability: str, truth: str,
    info: Mapping[str, Any], style: str = "rule",
) -> dict[str, Any]:  # fmt: skip
    """Return a row in verl's layout; a prompt of text becomes a message of the user."""
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    return {
        "data_source": source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": dict(info),
    }


def _require_text(record: Record, columns: tuple[str, ...], name: str) -> None:
    for column in columns:
        value = read_plain(record.get(column), column)
        if not isinstance(value, str) or not value.strip():
            raise RowError(column, f"is missing or not text; {name} rows have it")


def build_gsm8k(source: str) -> BuiltSet:
    """GSM8K: grade-school word problems whose answers end with `#### NUMBER`."""
    return _build_splits({split: _gsm8k_files(source, split) for split in SPLITS}, _gsm8k_row)


def _gsm8k_files(source: str, split: str) -> list[str]:
    """Return the files of a split in a folder (shards in order), or its name on the hub."""
    folder = user_path(source)
    if folder.is_file():
        raise DataError(f"{folder} is a file; --source takes the folder of both splits.")
    if not folder.is_dir():
        name = f"{GSM8K}/main" if source == GSM8K else source
        return [f"{name}:{split}"]
    # Named like a split, or shards as on the hub.
    exact = [f"{split}{suffix}" for suffix in SUFFIXES]
    if files := _first_files((folder, folder / "main"), (*exact, f"{split}-*")):
        return files
    raise DataError(
        f"{folder} holds no '{split}' split; expected {split}.jsonl or {split}.parquet."
    )


def _first_files(places: Sequence[Path], patterns: Sequence[str]) -> list[str]:
    """Return the sorted data files of the first pattern that matches any."""
    for place, pattern in product(places, patterns):
        files = sorted(str(p) for p in place.glob(pattern) if file_suffix(p) in SUFFIXES)
        if files:
            return files
    return []


def _gsm8k_row(place: Place, record: Record) -> dict[str, Any]:
    """Return the verl-style row of a GSM8K record; RowError without a question or an answer."""
    _require_text(record, ("question", "answer"), "GSM8K")
    question, answer = record["question"], record["answer"]
    if not final_answer(answer):
        raise RowError("answer", "has no final '#### NUMBER'")
    text, texts = f"{question}\n\n{GSM8K_INSTRUCTION}", {"question": question, "answer": answer}
    return _verl_row(GSM8K, text, "math", final_answer(answer), texts)


def final_answer(answer: str) -> str:
    """Return what follows the last `####`, without thousands commas."""
    _, mark, last = answer.rpartition("####")
    return last.strip().replace(",", "") if mark else ""


def build_math(source: str) -> BuiltSet:
    """MATH (Hendrycks et al. 2021): competition problems whose solutions box the answer."""
    return _build_splits(split_sources(source), _math_row, _read_problems)


def _read_problems(file: str) -> Records:
    """Read a file of rows, or a file of the original set with a single problem."""
    path = Path(file)
    # The original set has a file for each problem.
    if path.suffix == ".json":
        with suppress(ValueError):
            record = load_json(read_bytes(path))
            if isinstance(record, dict) and "problem" in record:
                return Records(file, path.stem, ((Place(file, 1), record),))
    return read_source(file)


def _math_row(place: Place, record: Record) -> dict[str, Any]:
    """Return the verl-style row of a MATH record; RowError without a problem or an answer."""
    _require_text(record, ("problem", "solution"), "MATH")
    problem, solution = record["problem"], record["solution"]
    answer = boxed_answer(solution)
    if not answer:
        raise RowError("solution", r"has no final answer in \boxed{…}")
    kind = {name: str(record.get(name) or "") for name in ("level", "type")}
    texts = {"problem": problem, "solution": solution, **kind}
    return _verl_row(MATH, f"{problem}\n\n{MATH_INSTRUCTION}", "math", answer, texts)


def boxed_answer(solution: str) -> str:
    r"""Return the content of the last box, of `\boxed{\frac{1}{2}}` or `\boxed 2`, or ""."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return ""
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0].rstrip(".,")
    # Find the closing brace.
    depth = 0
    # A brace after a backslash is text, not a group.
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return rest[1 : match.start()].strip()
    return ""


def build_humaneval(source: str) -> BuiltSet:
    """HumanEval: functions to complete, each with tests that a sandbox runs."""
    return _build_splits({HUMANEVAL_SPLIT: humaneval_files(source)}, humaneval_row)


def humaneval_files(source: str) -> list[str]:
    """Return the file itself, the one set of a folder (shards in order), or a name on the hub."""
    path = user_path(source)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        return [f"{source}:{HUMANEVAL_SPLIT}"]
    # Names of the published file and of the hub's shards.
    names = ("HumanEval*", "humaneval*", f"{HUMANEVAL_SPLIT}*")
    if files := _first_files((path, path / "openai_humaneval"), names):
        return files
    raise DataError(
        f"{path} holds no HumanEval file; expected HumanEval.jsonl.gz, or test-*.parquet."
    )


def humaneval_row(place: Place, record: Record) -> dict[str, Any]:
    """Return one row in verl's layout; the rule `code` reads its ground truth."""
    _require_text(record, ("task_id", "prompt", "entry_point", "test"), "HumanEval")
    if "def check(" not in record["test"]:
        raise RowError("test", "has no function check(candidate)")
    tests = {name: record[name] for name in ("test", "entry_point", "prompt")}
    question = f"{HUMANEVAL_INSTRUCTION}\n\n```python\n{record['prompt'].rstrip()}\n```"
    task = {"task_id": record["task_id"]}
    return _verl_row("openai_humaneval", question, "code", json.dumps(tests), task)


def build_hh_rlhf(source: str) -> BuiltSet:
    """HH-RLHF: dialogues with a chosen and a rejected last reply, as pairs and as prompts.

    The pairs, as published, are for `ppo reward fit`; the prompts, each once, for `ppo train`.
    """
    splits: dict[str, list[dict[str, Any]]] = {}
    odd: list[RowProblem] = []
    for split, files in split_sources(source).items():
        pairs: list[tuple[Record, tuple[Message, ...]]] = []
        problems: list[RowProblem] = []
        for file in files:
            good, bad = read_records(read_source(file), _hh_pair)
            pairs += good
            problems += bad
        # A few bad rows are left out; many mean that this is another data set.
        if len(problems) > MAX_ODD * (len(pairs) + len(problems)):
            raise_problems(problems)
        odd += problems
        # Several pairs may share a prompt.
        prompts = {str(prompt): prompt for _, prompt in pairs}.values()
        # A reward model or a judge scores the replies.
        splits[split] = [
            _verl_row(HH_RLHF, prompt, "alignment", "", {"split": split, "index": index}, "model")
            for index, prompt in enumerate(prompts)
        ]
        splits[f"pairs_{split}"] = [{side: record[side] for side in SIDES} for record, _ in pairs]
    return BuiltSet(splits, tuple(odd))


def _hh_pair(place: Place, record: Record) -> tuple[Record, tuple[Message, ...]]:
    """Return two dialogues that differ in the last reply, and the messages before it."""
    chosen, rejected = (_hh_dialogue(record.get(column), column) for column in SIDES)
    if chosen[:-1] != rejected[:-1]:
        raise RowError("rejected", "is another dialogue than `chosen`, not another last reply")
    return record, chosen[:-1]


def _hh_dialogue(value: Any, column: str) -> tuple[Message, ...]:
    """Split a transcript into messages; RowError unless it ends with a reply."""
    value = read_plain(value, column)
    if not isinstance(value, str) or not is_transcript(value):
        raise RowError(column, 'is not a transcript "\\n\\nHuman: …\\n\\nAssistant: …"')
    messages = split_transcript(value)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(column, "does not end with a reply of the assistant")
    return messages


@dataclass(frozen=True)
class OneSplit:
    """A published set with one split, and its columns; dotted names are keys inside a column.

    Without `answer` the replies are for a reward model or a judge. `source` selects the rule.
    """

    hub: str
    split: str  # of the files that are written; `hub` ends with the set's own
    prompt: str
    answer: str
    source: str
    instruction: str = MATH_INSTRUCTION

    def build(self, source: str) -> BuiltSet:
        """Read the set from a file, from the files of a folder, or from the hub."""
        folder = user_path(source)
        files = [source]
        if folder.is_dir():
            patterns = (f"{self.hub.rpartition(':')[2]}*", "*")
            files = _first_files((folder, folder / "data"), patterns)
            if not files:
                raise DataError(f"{folder} holds no data file ({', '.join(SUFFIXES)}).")
        return _build_splits({self.split: files}, self.read_row)

    def read_row(self, place: Place, record: Record) -> dict[str, Any]:
        """Return the verl-style row of a record; RowError without a prompt or an answer."""
        prompt = read_prompt(find_value(record, self.prompt), self.prompt)
        answer = read_plain(find_value(record, self.answer), self.answer) if self.answer else ""
        if self.answer and answer in (None, ""):
            raise RowError(self.answer, "is missing or empty")
        # Skywork's answers are lists of one, as text.
        if isinstance(answer, str) and answer.startswith('["'):
            with suppress(ValueError):
                (answer,) = json.loads(answer)
        if isinstance(prompt, str):
            prompt = f"{prompt}\n\n{self.instruction}".strip()
        ability, style = ("math", "rule") if self.answer else ("alignment", "model")
        return _verl_row(self.source, prompt, ability, str(answer), {}, style)


@dataclass(frozen=True)
class TestedSplit(OneSplit):
    """A set of questions about code, whose tests import the response as `solution`."""

    def read_row(self, place: Place, record: Record) -> dict[str, Any]:
        """Return the verl-style row of a record; the rule `code` reads its ground truth."""
        _require_text(record, (self.prompt, self.answer), "KodCode")
        tests = record.get("test_info") or []
        declared: list[str] = []
        for test in tests if isinstance(tests, list) else [tests]:
            text = test.get("function_declaration") if isinstance(test, Mapping) else None
            if not isinstance(text, str):
                raise RowError("test_info", "is no list of tests that have a function_declaration")
            declared.append(text)
        text = "\n".join([f"{record[self.prompt]}\n\n{self.instruction}", *declared])
        return _verl_row(self.source, text, "code", json.dumps({"test": record[self.answer]}), {})


ONE_SPLIT = {
    "aime": OneSplit("HuggingFaceH4/aime_2024:train", "test", "problem", "answer", "aime"),
    "big_math": OneSplit(
        "SynthLabsAI/Big-Math-RL-Verified:train", "train", "problem", "answer", "math_big"
    ),
    # Its prompts have an instruction already.
    "dapo": OneSplit(
        "BytedTsinghua-SIA/DAPO-Math-17k:train", "train", "prompt", "reward_model.ground_truth",
        "math_dapo",
    ),
    "deepmath": OneSplit(
        "zwhe99/DeepMath-103K:train", "train", "question", "final_answer", "math_deepmath"
    ),
    "kodcode": TestedSplit(
        "KodCode/KodCode-Light-RL-10K:train", "train", "question", "test", "kodcode",
        KODCODE_INSTRUCTION,
    ),
    "math_500": OneSplit("HuggingFaceH4/MATH-500:test", "test", "problem", "answer", "math_500"),
    "polaris": OneSplit(
        "POLARIS-Project/Polaris-Dataset-53K:train", "train", "problem", "answer", "math_polaris"
    ),
    "skywork": OneSplit(
        "Skywork/Skywork-OR1-RL-Data:math", "train", "prompt", "reward_model.ground_truth",
        "math_skywork",
    ),
    "ultrafeedback": OneSplit(
        "HuggingFaceH4/ultrafeedback_binarized:train_prefs", "train", "prompt", "",
        "ultrafeedback", "",
    ),
}  # fmt: skip

REASONING_GYM = "reasoning_gym"
TAGS_INSTRUCTION = "Write the answer between <answer> and </answer>."
TEST_SHARE = 10  # one test row for so many training rows


def build_reasoning_gym(names: str, rows: int, seed: int) -> BuiltSet:
    """Sets that the package reasoning_gym generates: `rows` of training in all, in equal parts.

    The rule `reasoning_gym` scores them by the scorer of their set, which reads the whole entry.
    """
    try:
        import reasoning_gym  # type: ignore[import-not-found, unused-ignore]
        from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"The package {error.name} is not installed: pip install reasoning-gym."
        ) from None
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    repeated: list[RowProblem] = []
    sets = list(dict.fromkeys(filter(None, names.split(","))))
    if not sets:
        raise DataError(f"{REASONING_GYM}:{names} names no set. Known: {', '.join(DATASETS)}.")
    for name in sets:
        if name not in DATASETS:
            near = did_you_mean(name, DATASETS)
            raise DataError(
                f"reasoning_gym has no set {name!r}.{near} Known: {', '.join(DATASETS)}."
            )
        train = math.ceil(rows / len(sets))
        size = train + math.ceil(train / TEST_SHARE)
        entries = [*islice(reasoning_gym.create_dataset(name, size=size, seed=seed), size)]
        # An entry's seed is that of the set plus its index: those of another seed would overlap.
        asked = {entry["question"] for entry in entries[:train]}
        for index, entry in enumerate(entries):
            if index >= train and entry["question"] in asked:
                place = Place(f"{REASONING_GYM}:{name}", index)
                repeated.append(RowProblem(place, "", "repeats a training question"))
                continue
            split = SPLITS[index >= train]
            text = f"{entry['question'].rstrip()}\n\n{TAGS_INSTRUCTION}"
            try:
                literal = write_literal(entry)
            except ValueError as error:
                raise DataError(
                    f"{REASONING_GYM}:{name}, row {index}: its entry {error}, so its scorer cannot "
                    "read it in training. Leave the set out."
                ) from None
            info = {"split": split, "index": index, "set": name, "entry": literal}
            truth = str(entry["answer"] or "")
            row = _verl_row(f"{REASONING_GYM}:{name}", text, "reasoning", truth, info)
            splits[split].append(row)
    filled = {split: written for split, written in splits.items() if written}
    return BuiltSet(filled, tuple(repeated))


def write_literal(value: Any) -> str:
    """Return a value as a Python literal: JSON would turn tuples into lists, and keys into texts.

    Values of numpy become Python's. Raises ValueError for a value without a literal, as of dates.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {plain(key): plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple | set):
            return type(value)(map(plain, value))
        return value.tolist() if hasattr(value, "tolist") else value

    literal = repr(plain(value))
    try:
        ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        raise ValueError(f"has a value without a literal: {shorten(literal, 200)}") from None
    return literal


# Name -> the default source, and the function that builds the splits.
RECIPES: dict[str, tuple[str, Callable[[str], BuiltSet]]] = {
    "gsm8k": (GSM8K, build_gsm8k),
    "humaneval": (HUMANEVAL, build_humaneval),
    "hh_rlhf": (HH_RLHF, build_hh_rlhf),
    "math": (MATH, build_math),
    **{name: (row.hub, row.build) for name, row in ONE_SPLIT.items()},
}


@dataclass(frozen=True)
class PreparedFile:
    """One file that was written."""

    split: str
    path: Path
    rows: int
    note: str = ""


def prepare(
    name: str, *, source: str | None = None, out: str, force: bool = False,
    rows: int = 1000, seed: int = 42,
) -> list[PreparedFile]:  # fmt: skip
    """Write one parquet file for each split into `out`: all of them or none.

    `rows` and `seed` are of sets that are generated.
    """
    kind, _, generated = name.partition(":")
    if kind == REASONING_GYM and generated:
        if source is not None:
            raise DataError(f"{name} is generated: leave --source out.")
    elif name not in RECIPES:
        raise DataError(
            f"No recipe for the data set '{name}'.{did_you_mean(name.lower(), RECIPES)} Known: "
            f"{', '.join(RECIPES)}, {REASONING_GYM}:SET,SET. Your own JSONL or parquet files need "
            f"no preparation; see `{ppo('data check')}`."
        )
    folder = user_path(out)
    refuse_out_address(out)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--out {folder} is a file; name a folder.")
    # Read everything before anything is written.
    if generated:
        built = build_reasoning_gym(generated, rows, seed)
    else:
        usual, build = RECIPES[name]
        built = build(source or usual)
    splits = built.splits
    targets = {split: folder / f"{split}.parquet" for split in splits}
    existing = [path.name for path in targets.values() if path.exists()]
    if existing and not force:
        raise DataError(f"{folder} already holds {' and '.join(existing)}. Add --force to replace.")
    import pyarrow
    from pyarrow import parquet

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as all_written:
            for split, contents in splits.items():
                fresh = all_written.enter_context(atomic_replace(targets[split]))
                parquet.write_table(pyarrow.Table.from_pylist(contents), fresh)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error}).") from error
    files = [PreparedFile(split, path, len(splits[split])) for split, path in targets.items()]
    if built.left_out:
        count = len({problem.place for problem in built.left_out})
        note = f"{plural(count, 'row')} left out, such as {built.left_out[0]}."
        files[-1] = replace(files[-1], note=note)
    return files
