"""Features of a text that a reward may pay for, and the wishes for them in prompts and rubrics.

A feature that somebody asked for is not evidence of an exploit: `find_wishes` reads the requests,
`measure_text` the responses.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from ppo_cli.config.mixture import Judge, judges_of, rules_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.estimates import repeated_share
from ppo_cli.paths import read_text, user_path

# A character of a script without blanks counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u9fff]+|[^\w\s]+")
_LETTER = re.compile(r"[^\W\d_]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]")
_EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf]")
_MARK = re.compile(r"[!?;:()\"“”«»…—–！？]|[.,]{2,}")
_MARKUP = re.compile(r"[#*`_|<>$\\~^{}\[\]=]")
_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\d+[.)])[ \t]", re.MULTILINE)
_OBJECT = re.compile(r"\s*(?:```\w*\s*)?[\[{]")
_POLITE = re.compile(
    r"\b(?:please|thanks?|welcome|kindly|dear|sorry|gladly|pleasure|bitte|danke|merci|"
    r"s'il|gracias|favor|grazie|obrigado)\b|请|谢|您|ください|ます|です|감사|спасибо|пожалуйста"
)
_REASONING = re.compile(
    r"\b(?:first(?:ly)?|second(?:ly)?|third|next|then|therefore|thus|hence|because|since|so|step|"
    r"recall|consider|finally|zuerst|dann|also|daher|weil|d'abord|donc|puis|porque|entonces)\b"
    r"|首先|然后|因此|所以|因为|まず|したがって"
)
# Short words that tell languages apart; those of several languages are left out.
_LANGUAGES = {
    "en": "the is are was it this of and to that would with from be",
    "fr": "le la les est c'est une des il et que dans pour qui réponse du au ce",
    "de": "der das ist und die ein eine nicht es mit wie dass auf für den im",
    "es": "el los las y en por como una del es que con para respuesta",
    "it": "il lo gli è di che non per una sono della con",
    "pt": "o os é do da em um uma não para com que são",
    "nl": "het een van en niet dat op voor met zijn de",
}
_LANGUAGE_WORDS = {name: frozenset(text.split()) for name, text in _LANGUAGES.items()}
_SHORT_WORDS = frozenset().union(*_LANGUAGE_WORDS.values())


@lru_cache(maxsize=4096)
def _read_prompt(prompt: str) -> tuple[frozenset[str], frozenset[tuple[str, ...]], bool]:
    """Return the short words of the prompt's language, its 4-grams, and whether it is in Latin."""
    tokens = WORD.findall(prompt.lower())
    counts = {
        name: sum(token in vocabulary for token in tokens)
        for name, vocabulary in _LANGUAGE_WORDS.items()
    }
    language = max(counts, key=lambda name: counts[name])
    letters = _LETTER.findall(prompt)
    grams = frozenset(zip(*(tokens[i:] for i in range(4)), strict=False))
    latin = sum(map(bool, map(_LATIN.match, letters))) >= len(letters) / 2
    return _LANGUAGE_WORDS[language], grams, latin


def measure_text(prompt: str, text: str) -> tuple[float, ...]:
    """Return the value of each of FEATURES in a response to a prompt."""
    tokens = WORD.findall(text.lower())
    home, prompt_grams, latin = _read_prompt(prompt)
    letters = _LETTER.findall(text)
    cased = [letter for letter in letters if letter.lower() != letter.upper()]
    foreign = sum(token in _SHORT_WORDS and token not in home for token in tokens)
    other_script = sum(bool(_LATIN.match(letter)) != latin for letter in letters)
    grams = set(zip(*(tokens[i:] for i in range(4)), strict=False))
    spaces = text.count("\n") + text.count("  ")

    def count(pattern: re.Pattern[str]) -> float:
        """Return the logarithm of the number of matches: the first ones matter most."""
        return math.log1p(len(pattern.findall(text.lower())))

    return (
        math.log1p(len(tokens)),
        repeated_share(tokens, 1),
        sum(letter.isupper() for letter in cased) / max(len(cased), 1),
        count(_MARK),
        math.log1p(spaces),
        count(_MARKUP),
        count(_ITEM),
        float(bool(_OBJECT.match(text))),
        math.log1p(sum(character.isdigit() for character in text)),
        math.log1p(len(re.findall(r"(?<![\w.,])0\d", text))),
        # A third of the words of a text are short ones.
        min(3 * foreign / max(len(tokens), 1), 1.0) + other_script / max(len(letters), 1),
        count(_EMOJI),
        len(grams & prompt_grams) / max(len(prompt_grams), 1),
        count(_POLITE),
        count(_REASONING),
    )


# The order of the values of `measure_text`, in words for messages.
FEATURES = (
    "length", "repetition", "capital letters", "punctuation", "white space", "markup", "lists",
    "JSON", "digits", "leading zeros", "another language", "emoji", "quotes of the prompt",
    "politeness", "words of reasoning",
)  # fmt: skip
TRANSLATED = ("another language", 1)
Wish = tuple[str, int]  # a feature, and whether more (1) or less (-1) of it is asked for

# Feature, direction, and words that ask for it in several languages.
_REQUESTS: tuple[tuple[str, int, str], ...] = (
    ("length", -1,
     r"\bshort(?:er|ly|est)?\b|\bbrief|\bbrevity|\bconcis|\bterse|\bsuccinct|to the point"
     r"|(?:at most|no(?:t)? more than|fewer than|less than|under|up to|within|maximum(?: of)?"
     r"|max\.?)"
     r" \w+ (?:\w+ )?(?:word|sentence|line|token|character)|(?:one|single|two)[- ](?:word"
     r"|sentence|line)"
     r"|only (?:the|a|one) (?:\w+ )?(?:answer|number|word|name|letter|result)|\ba (?:number|word)\b"
     r"|\bkurz|\bknapp|\bbündig|höchstens|einem (?:wort|satz)|\bcourt|\bbref|\bbrève|\bbrièv"
     r"|seul mot|une (?:seule )?phrase|\bbreve|\bcort[oa]|\bcurt[oa]|(?:una|sola) (?:palabra|frase)"
     r"|简短|简洁|简要|一句话|一个词|不超过|短く|簡潔|一言|짧게|간결|간단|кратк|коротк"),
    ("length", 1,
     r"(?<!how )(?<!as )\blong(?:er)?\b|\blengthy|\bdetail|\bthorough|\bdepth|\belaborat"
     r"|\bcomprehensive"
     r"|\bextensive|\bexhaustive|at least \w+ (?:\w+ )?(?:word|sentence|paragraph|line)"
     r"|(?:several|many|more|multiple) (?:\w+ )?(?:sentence|word|paragraph|example)|\bexplain"
     r"|\bexplanation"
     r"|\bessay|\bstory|\bverbos|\bwordy|\brambl|\bpadd(?:ed|ing)|\bfiller"
     r"|\bausführlich|\blang\b|\blange[nrs]?\b|\bdetailliert|mindestens|\bdétaill|\blongue"
     r"|\bapprofond|\blarg[oa]s?\b|\bdetallad|\bextens|详细|详尽|至少|詳しく|長く|자세|길게|подробн|длинн"),
    ("capital letters", 1,
     r"capital letter|\bcapitals\b|\bcapitali[sz]|\bcaps\b|upper[- ]?case|block letters|\bisupper"
     r"|großbuchstab|majuscule|mayúscul|maiuscol|大写|大文字|대문자|прописн|заглавн"),
    ("capital letters", -1,
     r"lower[- ]?case|small letters|\bislower|kleinbuchstab|kleinschr|klein geschrieben|minuscule"
     r"|minúscul|小写|小文字|소문자|строчн"),
    ("punctuation", 1,
     r"exclamation|question mark|punctuation|quotation mark|enthusias|excite|parenthes|dialogue"
     r"|ausrufezeichen|exclamación|感叹号|标点"),
    ("white space", 1,
     r"blank line|empty line|paragraph|line break|new ?line|\bspaces\b|indent|\bstanza|\bpoem"
     r"|separate line|leerzeile|absätz|absatz|paragraphe|párrafo|空行|段落"),
    ("markup", 1,
     r"markdown|\bhtml|latex|\bxml|\bbold|\bitalic|\bheading|\bheader|\bformatt|\btable|code"
     r"|backtick|boxed|\btags?\b|\bfett\b|überschrift|\bgras\b|\btitre|encabezado|标题|加粗|表格|代码"
     r"|```|</?\w+>|\bequation"),
    ("lists", 1,
     r"bullet|\blists?\b|enumerat|numbered|aufzähl|stichpunkt|\bliste\b|\bpuces|viñeta|\blista\b"
     r"|列表|要点|箇条書|목록|список"),
    ("JSON", 1, r"\bjson|\byaml|\bdict\b|key[- ]value"),
    ("digits", 1,
     r"\d ?[+*/×÷=] ?\d|\d - \d|how (?:many|much)|\bdigits?\b|\bnumber|\bnumeric|\bfigures\b"
     r"|\bdates?\b|\byear"
     r"|ziffer|\bzahl|chiffre|nombre|número|cifra|数字|多少|数値"),
    ("leading zeros", 1, r"leading zero|zero[- ]pad|führende null"),
    ("another language", 1,
     r"\b(?:english|french|german|spanish|italian|portuguese|dutch|chinese|mandarin|japanese|korean"
     r"|russian|arabic|hindi|turkish|polish|swedish|latin)\b|translat|\b(?:deutsch|englisch|franzö"
     r"sisch|spanisch)|übersetz|français|anglais|allemand|espagnol|tradu[ci]|español|inglés|francés"
     r"|alemán|italiano|中文|英文|汉语|英语|日语|法语|翻译|日本語|英語|한국어"
     r"|по-русски|another language"),
    ("emoji", 1, r"emoji|emoticon|smiley|表情|絵文字|이모지|эмодзи"),
    ("quotes of the prompt", 1,
     r"\bquot(?:e|es|ing|ation)\b|(?:repeat|restate|rephrase|echo)\w* the (?:\w+ )?(?:question"
     r"|prompt|task)"
     r"|\bcopy\b|\bverbatim|\bextract|zitier|\bciter\b|\bcitar\b|引用|复述"),
    ("politeness", 1,
     r"\bpolite|\bcourte|\bfriendl|\bkind(?:ly|ness)?\b(?! of)|\bwarm|\brespectful|\bgreet"
     r"|\bthank|\bempath"
     r"|\bcompassion|\bhöflich|\bfreundlich|\bpoli(?:e|es|s|ment|tesse)?\b|\bcourtois|\baimable"
     r"|\bamable|\bcort[eé]s|\beducad|\bgentil|礼貌|客气|友好|丁寧|敬語|공손|вежлив"),
    ("words of reasoning", 1,
     r"step[- ]by[- ]step|\bsteps\b|\breason(?:ing|s)?\b|\bthink|chain of thought|show \w+ work"
     r"|\bexplain"
     r"|\bjustif|schritt|\bétape|paso a paso|逐步|一步|步骤|推理|ステップ|단계|рассужд"),
    ("repetition", 1, r"\brepeat|\brefrain|\bchorus|\bsong|wiederhol|\brépét|\brepit|重复|繰り返"),
)  # fmt: skip
_REQUEST_PATTERNS = tuple((f, sign, re.compile(text)) for f, sign, text in _REQUESTS)
# Before a word in the same sentence: less of it is asked for.
_NEGATION = re.compile(
    r"(?:\bignor\w*|\bdisregard|\bregardless|\bno|\bnot|n't|\bnor|\bneither|\bnever|\bwithout"
    r"|\bavoid\w*|\bpenali[sz]\w*|\bpunish\w*|\bless"
    r"|\bfewer|\btoo|\brather than|\binstead of|\bkeine?\w?|\bnicht|\bohne|\bvermeid\w*|\bpas de"
    r"|\bsans"
    r"|\bévite\w*|\bsin|\bevit\w*|\bне|\bбез|不要|不用|不能|勿|避免|没有|禁止)\b[^.!?;:\n]{0,30}$"
    r"|(?:不要|不用|不能|勿|避免|没有|禁止)[^。！？\n]{0,12}$"
)
NEGATION_CHARS = 80  # more than such a word and what may follow it
# What a judge shall reply is not what responses shall be.
_TO_JUDGE = re.compile(
    r"(?:\byour (?:score|rating|verdict|judg|reason|grade)|\b(?:reply|respond|return|output"
    r"|answer|end)\b"
    r"[^.\n]*\b(?:score|rating|verdict|grade|judgement)\b)"
)
_SENTENCE = re.compile(r"(?<=[.!?;。！？])\s*|\n+")


@lru_cache(maxsize=4096)
def find_wishes(text: str) -> frozenset[Wish]:
    """Return what a text asks of responses: features, and whether more or less of them."""
    wishes = set[Wish]()
    for sentence in _SENTENCE.split(text.lower()):
        if not sentence or _TO_JUDGE.search(sentence):
            continue
        for feature, sign, pattern in _REQUEST_PATTERNS:
            for match in pattern.finditer(sentence):
                before = sentence[max(0, match.start() - NEGATION_CHARS) : match.start()]
                negated = _NEGATION.search(before) is not None
                wishes.add((feature, -sign if negated else sign))
    return frozenset(wishes)


def read_requests(reward: Reward) -> str:
    """Return what the settings ask of responses: the user's own prompts, rubrics and functions.

    The bundled prompts ask for content alone.
    """
    texts, files = list[str](), list[str]()
    for judge in judges_of(reward):
        api = judge.settings
        texts += [text for text in (api.scoring_prompt, api.system_prompt) if text]
        rubric = api.rubric if api.rubric and not api.rubric.startswith("extra_info.") else None
        files += [file for file in (api.prompt_file, rubric) if file]
    functions = [rule.function for rule in rules_of(reward) if rule.function]
    for file in (*files, *functions):
        path = user_path(file)
        if not path.is_file():
            path = user_path(file.rpartition(":")[0])
        with suppress(OSError):  # what cannot be read is reported by the reward
            text = read_text(path)
            texts += (
                _list_wishes(text, file.partition(".py:")[2] or "compute_score")
                if file in functions
                else [text]
            )
    return "\n".join(texts)


def find_asked_judge(reward: Reward) -> Judge | None:
    """Return the judge that is asked at the start what the user's prompts and rubrics ask for.

    It is the first with canaries; None without one, or without a text of the user's own.
    """
    checked = (judge for judge in judges_of(reward) if judge.settings.canary_every)
    return next(checked, None) if read_requests(reward).strip() else None


def _list_wishes(source: str, name: str) -> Iterator[str]:
    """Yield the texts in the source of a reward function, and in words what it measures."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    scored: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            scored = node
    # What is measured is what the author wants; helpers take the length of anything.
    if "isupper" in source:
        yield "capital letters"
    if re.search(r"\blen\(", ast.unparse(scored)):
        yield "short, long"
