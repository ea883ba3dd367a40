"""Makes responses safe for a judge's prompt, and finds responses without content.

Control tokens in a response are broken, so that a judge reads them as text. A response without
content gets the lowest score without a call: some judges reward a bare "Solution:" or a colon
(arXiv 2507.08794), even against their prompt. Short answers such as "4", "(B)", "no" or "∅" are
content; punctuation alone is content only where the reference or the prompt has it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import regex

from ppo_cli.rewards.control_tokens import LESS, MORE, break_control_tokens

# By Unicode property: default-ignorable (zero-width, bidi controls, variation selectors, tags,
# fillers), other format and control characters, halves of surrogate pairs, noncharacters.
INVISIBLE = regex.compile(
    r"[[\p{Default_Ignorable_Code_Point}\p{Cc}\p{Cf}\p{Cs}\p{Noncharacter_Code_Point}]--[\n\t]]",
    regex.VERSION1,
)
LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")


def _in_any_width(word: str) -> str:
    """Return a pattern for a word in ASCII or full-width characters."""
    return "".join(f"[{char}{chr(ord(char) + 0xFEE0)}]" for char in word)


# Commands that switch a judge's thinking on or off. Nemotron's template looks for `/think`
# anywhere in a turn, even inside words and tags.
SWITCHES = re.compile(
    rf"[/／](?=(?:{_in_any_width('no')}[_＿－-]?)?{_in_any_width('think')}"
    r"|set (?:no)?think|system_override)",
    re.IGNORECASE,
)
# One word in brackets. The ordinary ones are listed below, since tokens cannot be enumerated.
TAGS = re.compile(
    rf"{LESS}(?=[/／∕⁄]?(?P<word>[^\W\d][\w-]{{0,80}}(?:[:=][\w.-]{{1,80}})?|0x\w\w){MORE})"
)
CAPITALS = re.compile(r"[\[［](?=/?(?P<word>[A-ZＡ-Ｚ][A-Z0-9_Ａ-Ｚ]{2,60})[\]］])")
# HTML elements, types and standard headers of programming languages.
PLAIN_TAGS = frozenset(
    re.findall(
        r"\w+",
        """
    a abbr address article aside b base bdi bdo big blockquote body br button canvas caption
    center cite code col colgroup dd del details dfn dialog dir div dl dt em fieldset figcaption
    figure font footer form frame h1 h2 h3 h4 h5 h6 head header hgroup hr html i iframe input ins
    kbd label legend li link main map mark math menu meta meter mfrac mi mn mo mrow ms msqrt msub
    msup mtext nav noscript ol optgroup option output p param pre progress q rp rt ruby samp script
    section select small span strike strong style sub summary sup svg table tbody td template
    textarea tfoot th thead time title tr tt u ul var wbr
    any array auto bool boolean byte char complex decimal double dynamic float half i8 i16 i32 i64
    i128 int int8 int16 int32 int64 integer isize long never number short
    sbyte str string u8 u16 u32 u64 u128 uint uint8 uint16 uint32 uint64 ulong unit
    ushort usize f16 f32 f64 float16 float32 float64 void wchar
    algorithm atomic bitset cassert cctype chrono climits cmath complex cstdint cstdio cstdlib
    cstring ctime deque exception fstream functional future iomanip ios iostream istream iterator
    limits list locale map memory mutex numeric optional ostream queue random ratio regex set
    sstream stack stdexcept streambuf system_error thread tuple type_traits typeinfo unordered_map
    unordered_set utility valarray variant vector
    """,
    )
)
_TYPE = re.compile(r"[A-Z]|[a-z]\w*_t")
_MIXED_CASE = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*")
# Words of logs and comments.
PLAIN_CAPITALS = frozenset(
    re.findall(
        r"\w+",
        """
    ALERT AND API BUG CRITICAL DEBUG DEPRECATED DONE ERR ERROR EXCEPTION FAIL FAILED FAILURE FALSE
    FATAL FIXED FIXME HACK HTML HTTP INFO JSON LOG MISSING NEW NONE NOT NOTE NOTICE NULL NUM
    OPTIONAL PASS PASSED REQUIRED RESULT SEVERE SKIP SKIPPED SQL SUCCESS TEST TIP TODO TRACE TRUE
    URL VERBOSE WARN WARNING XML XXX YES
    """,
    )
)
# The variables of judge prompts and the passages of episodes, which name the fences.
TAG_NAMES = (
    r"prompt|response|ground[_ -]?truth|extra_info(?:\.[\w-]{1,80}){0,8}"
    r"|assistant|thought|call|tools?|user|limit|piece"
)
# Everything that looks like a dash: hyphens, minus signs, full-width and small forms.
DASHES = (
    r"\-\u00ad\u02d7\u058a\u05be\u06d4\u1400\u1806\u2010-\u2015\u2043\u207b\u208b\u2212\u23af"
    r"\u2500\u2501\u2796\u2e1a\u2e3a\u2e3b\u301c\u3030\u30a0\u30fc\ufe31\ufe32\ufe58\ufe63\uff0d\uff70"
)
FENCES = re.compile(
    rf"[<＜﹤‹〈⟨](\s?[/／∕⁄]?\s?(?:{TAG_NAMES})\s?(?:[{DASHES}]\s?\w{{1,80}}\s?){{1,2}})[>＞﹥›〉⟩]",
    re.IGNORECASE,
)
CUT_MARKS = re.compile(r"\[(?=cut-\w)", re.IGNORECASE)


def clean(text: str) -> str:
    """Return the text in NFC, without invisible characters, with `\n` as line ends."""
    return unicodedata.normalize("NFC", INVISIBLE.sub("", LINE_ENDS.sub("\n", text)))


def neutralise(text: str) -> str:
    """Break everything that looks like a control token or a fence of the prompt.

    `<|im_end|>` becomes `< |im_end|>`, `[ARGS]` becomes `[ ARGS]`, `</response-1f…>` becomes
    `[/response-1f…]`: a reader still sees what was there, a tokenizer sees letters. A word in
    angle brackets is broken unless it is in PLAIN_TAGS or a type; a word in capitals and square
    brackets unless it is in PLAIN_CAPITALS.
    """
    shown = FENCES.sub(r"[\1]", text)
    shown = CUT_MARKS.sub("[ ", shown)
    shown, _ = break_control_tokens(shown)
    shown = TAGS.sub(lambda tag: tag[0] if _is_plain_tag(tag) else _broken(tag), shown)
    shown = CAPITALS.sub(
        lambda tag: tag[0] if tag["word"] in PLAIN_CAPITALS else _broken(tag), shown
    )
    return SWITCHES.sub(_broken, shown)


def _broken(match: re.Match[str]) -> str:
    """Return the first character of a token with a space after it."""
    return f"{match[0]} "


def _is_plain_tag(tag: re.Match[str]) -> bool:
    """Return whether a word in angle brackets is ordinary markup or code.

    A name in mixed case after an identifier is a type parameter, as in `Promise<Response>`.
    """
    word, text, at = tag["word"], tag.string, tag.start()
    if word in PLAIN_TAGS:
        return True
    if text[tag.end()] in "/／∕⁄":
        return False
    behind_a_name = text[max(0, at - 1) : at].isidentifier()
    return bool(_TYPE.fullmatch(word) or (behind_a_name and _MIXED_CASE.fullmatch(word)))


def cut_middle(text: str, max_chars: int) -> tuple[str, int, str]:
    """Return head, number of omitted characters, and tail of a text cut to `max_chars`.

    Two thirds of `max_chars` go to the head, which shows the approach, and one third to the tail,
    which has the conclusion. A short text is all head, with 0 and "".
    """
    if len(text) <= max_chars:
        return text, 0, ""
    tail = max_chars // 3
    return text[: max_chars - tail], len(text) - max_chars, text[len(text) - tail :] if tail else ""


def _phrases(listed: str) -> frozenset[str]:
    return frozenset(phrase.strip() for phrase in listed.replace("\n", "|").split("|")) - {""}


# A response that is only one of these says nothing, with or without a colon.
LEAD_INS = _phrases(
    """
    solution|the solution|solutions|thought process|my thought process|thinking process
    here is the solution|here's the solution|here is my solution|here's my solution
    here is the answer|here's the answer|here is my answer|here's my answer|here is my response
    here is a solution|here's a solution|the solution is|the answer is|the final answer is
    my answer is|so the answer is|therefore the answer is|the answer is as follows
    the solution is as follows|the result is|the final result is|final answer|the final answer
    the correct answer is|to solve this problem|to answer this question|to find the answer
    to solve this|let's think|let's solve|step by step|think step by step|step by step solution
    step-by-step solution|reasoning process|chain of thought|let's begin|let's get started
    let's think step by step|let us think step by step|let me think step by step
    解|解答|解析|解题过程|解答过程|解题思路|思考过程|思路|答案是|答案如下|最终答案|最终答案是|答案为
    让我们一步一步思考|让我们一步步思考|让我们逐步思考|让我们一步一步地解决这个问题
    让我们一步步解决这个问题|我们一步一步来解决这个问题|首先让我们分析这个问题
    かいせつ|解説|解き方|思考プロセス|答えは|解答は|回答は|ステップバイステップで考えましょう
    풀이|해설|풀이 과정|사고 과정|정답은|답은|단계별로 생각해 봅시다
    respuesta|la respuesta es|la solución es|solución|proceso de pensamiento|respuesta final
    pensemos paso a paso|resolvamos este problema paso a paso
    réponse|la réponse est|la solution est|processus de réflexion|réponse finale
    résolvons ce problème étape par étape|raisonnons étape par étape
    lösung|die antwort ist|die lösung ist|die lösung lautet|gedankengang|lösungsweg
    lass uns schritt für schritt denken|lösen wir dieses problem schritt für schritt
    soluzione|la risposta è|la soluzione è|processo di pensiero|risposta finale
    risolviamo questo problema passo dopo passo
    resposta|a resposta é|a solução é|solução|processo de pensamento|resposta final
    vamos resolver este problema passo a passo
    решение|ответ такой|ход мыслей|ход решения|давайте решим эту задачу шаг за шагом
    الحل|الجواب هو|عملية التفكير|دعونا نحل هذه المشكلة خطوة بخطوة
    समाधान|उत्तर है|विचार प्रक्रिया|lời giải|đáp án là|quá trình suy nghĩ
    """
)
# Words that may be an answer; only a colon after them makes them a lead-in.
BEFORE_COLON = _phrases(
    """
    answer|the answer|my answer|result|the result|response|my response|reply|output|conclusion
    explanation|reasoning|analysis|proof|thought|thoughts|thinking|approach|method|process|steps
    step 1|step one|question|problem|the problem|task|assistant|first|summary|code|note
    答|答案|回答|问题|题目|分析|证明|结论|步骤|解释|答え|問題|証明|考え|답|정답|문제|설명
    pregunta|explicación|razonamiento|question|explication|raisonnement|antwort|frage|erklärung
    risposta|domanda|spiegazione|pergunta|explicação|ответ|вопрос|объяснение|рассуждение|الجواب
    السؤال|उत्तर|प्रश्न|đáp án|trả lời|câu hỏi
    """
)
TASK = r"(?:the|this|your) (?:given )?(?:problem|question|task)"
STEP_BY_STEP = re.compile(
    r"(?:(?:okay|ok|sure|alright|all right|first|now|so|well|great)\W{1,3})?"
    rf"(?:to (?:solve|answer) {TASK},? )?"
    r"(?:let's|lets|let us|let me|i will|i'll|we will|we'll|we need to|i need to)\s"
    r"(?:now\s|first\s|carefully\s)?"
    r"(?:solve|think|work|reason|go|break|start|begin|analy[sz]e|tackle|approach|figure|examine)"
    r"(?:\s[\w']+){0,8}?\s"
    r"(?:step[ -]by[ -]step(?: as follows)?|(?:this|it) (?:carefully|thoroughly|through)"
    rf"|{TASK}(?: (?:down|carefully|together|out|step[ -]by[ -]step(?: as follows)?"
    r"|into (?:small |smaller )?(?:steps|parts)))?)"
    r"|here(?:'s| is) (?:a|the|my) (?:detailed |complete |full )?(?:step[ -]by[ -]step )?"
    rf"(?:solution|answer|explanation|reasoning|response|proof)(?: (?:to|for|of) {TASK})?"
    r"|(?:首先)?[，,]?(?:让|请)?我们?来?(?:一步一步|一步步|逐步|仔细)[地来]*"
    r"(?:思考|分析|解决|解答|求解|推理|解)(?:一下)?(?:这个|这道|该|此)?(?:问题|题目|题)?"
)
WRAPPING = re.compile(
    r"\\(?:boxed|text|fbox|mathrm|textbf)\s*\{[\s$]*\}|```[\w+-]*|</?(?:answer|solution|think)>"
)
SENTENCES = re.compile(r"\n|(?<=[.!?。！？])\s+|(?<=[。！？])")
OPERATORS = {"&&", "||", "!=", "==", "<=", ">=", "=>", "->", "<<", ">>", "+=", "-=", "++", ":="}
FILLERS = {"sure", "okay", "ok", "certainly", "of course", "alright", "all right", "absolutely"}
# Characters without a picture, besides spaces and those that `clean` removes.
BLANKS = re.compile("[\u2800\ufffc\U0001d159]")
LONE_SYMBOLS = set("^<>=+|~$°")
# A greeting may be answered with the same word.
GREETINGS = {"hello", "hi", "hey", "good", "morning", "day", "evening", "night", "bye", "goodbye"}
# Labels that a copied prompt may start with.
ASKING = {"question", "problem", "q", "prompt", "user"}
MARKUP = " \t\n*_`#>~-–—•·\"'“”‘’「」『』【】()[]{}<$\\"
COLONS = ":：;；…"
STOPS = ".,。，、!！?？｡"
# When a response counts as a copy of the prompt: the same words at both ends, at least this
# many words and letters, and this share of the prompt's words.
EDGE_WORDS = 3
FEWEST_WORDS = 4
FEWEST_LETTERS = 12
MOST_OF_IT = 0.9


def no_content_reason(prompt: str, response: str, ground_truth: Any = None) -> str | None:
    """Return why a response gets the lowest score without a call, or None.

    `response` is the text that the judge would see. One that equals the reference has content.
    """
    text = BLANKS.sub(" ", clean(response)).strip()
    if not text:
        return "empty response"
    if _is_reference(text, ground_truth):
        return None
    # Punctuation and markup alone are an answer only where the prompt offers them.
    bare = WRAPPING.sub(" ", text).strip()
    if not any(c.isalnum() for c in bare):
        meant = _has_content(bare) or text in OPERATORS or _prompt_offers(prompt, text)
        return None if meant else "only punctuation or empty markup"
    # Every sentence is a lead-in ("Let's think step by step.") or a filler ("Sure!").
    parts = [
        part for part in SENTENCES.split(bare) if part.strip(STOPS + " ").casefold() not in FILLERS
    ]
    if any(map(str.strip, parts)) and all(_is_lead_in(part) for part in parts if part.strip()):
        return "a lead-in without an answer"
    if _repeats_prompt(clean(prompt), text):
        return "only the prompt repeated"
    return None


def _is_reference(response: str, ground_truth: Any) -> bool:
    """Return whether a response equals the reference but for case, blanks and punctuation."""
    if isinstance(ground_truth, list | dict):
        ground_truth = json.dumps(ground_truth, ensure_ascii=False)
    if ground_truth is None or not (reference := clean(str(ground_truth)).strip()):
        return False
    return response.casefold() == reference.casefold() or _same(response, reference)


def _same(first_text: str, second_text: str) -> bool:
    """Return whether two texts have the same letters, digits and arithmetic signs, at least one."""
    first, second = _comparison_key(first_text), _comparison_key(second_text)
    return bool(first) and first == second


def _comparison_key(text: str) -> str:
    """Return the letters, digits and arithmetic signs of a text, in lower case."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")
    # A dash before a digit is a sign: 5 - 3 is not 5 3.
    signs = re.sub(r"[^\w+*/^<>=%|~$°√∞≤≥≠±×÷¬∧∨→-]|_|(?<!\w)-(?!\s*[\w(])", "", folded)
    return signs.strip("=*-|><~")


def _has_content(text: str) -> bool:
    """Return whether a text has a letter, a digit, or a symbol that can be an answer."""
    signs = [c for c in text if not c.isspace()]
    if len(signs) == 1 and signs[0] in LONE_SYMBOLS:
        return True
    return any(_is_content(c) for c in signs) and not _is_drawn_line(signs)


def _is_content(char: str) -> bool:
    """Return whether a character can be (part of) an answer; box drawings cannot."""
    kind = unicodedata.category(char)
    if kind == "So":
        return not ("\u2500" <= char <= "\u259f" or char == "\ufffd")
    return kind[0] in "LN" or (kind in {"Sm", "Sc"} and char not in "|~=+<>$")


def _is_drawn_line(signs: list[str]) -> bool:
    """Return whether one symbol is repeated to draw a line; emoji may be repeated on purpose."""
    same = len(signs) > 2 and len(set(signs)) == 1
    return same and not signs[0].isalnum() and ord(signs[0]) < 0x1F000


def _prompt_offers(prompt: str, sign: str) -> bool:
    """Return whether a sign is offered by the prompt as a word, as in "+ or -?"."""
    free = rf"(?:^|[\s'\"`(,]){re.escape(sign)}(?:$|[\s'\"`),.:;?])"
    return len(sign) <= 4 and bool(re.search(free, prompt))


def _is_lead_in(part: str) -> bool:
    """Return whether a sentence only announces an answer, or is empty."""
    phrase = part.casefold().replace("’", "'").strip(MARKUP)
    colon = phrase.rstrip(MARKUP + STOPS).endswith(tuple(COLONS))
    phrase = " ".join(phrase.strip(MARKUP + STOPS + COLONS).split())
    if not phrase:
        return not _has_content(part)
    is_listed = phrase in LEAD_INS or (colon and phrase in BEFORE_COLON)
    plain = phrase.replace(",", "").replace("，", "")
    return is_listed or plain in LEAD_INS or bool(STEP_BY_STEP.fullmatch(phrase))


def _split_words(text: str) -> list[str]:
    """Return the words of a text; each character of a script without spaces is a word."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+", text.casefold())


def _repeats_prompt(prompt: str, response: str) -> bool:
    """Return whether a response only repeats the prompt, once or several times.

    A near copy begins and ends like the prompt, adds no word and omits at most a tenth. A task
    that asks to copy or correct a text is safe: its answer lacks the words of the request.
    """
    prompt_words, response_words = _split_words(prompt), _split_words(response)
    if _is_copy(prompt, response) and not GREETINGS.issuperset(prompt_words):
        return True
    if len(prompt_words) < FEWEST_WORDS or sum(map(len, prompt_words)) < FEWEST_LETTERS:
        return False
    while response_words[:1] and response_words[0] in ASKING - set(prompt_words[:1]):
        response_words = response_words[1:]
    # The prompt several times in a row.
    times, rest = divmod(len(response_words), len(prompt_words))
    if times and not rest and response_words == prompt_words * times:
        return True
    if not MOST_OF_IT * len(prompt_words) <= len(response_words) <= len(prompt_words):
        return False
    # A near copy: the same ends, and its words are a subsequence of the prompt's.
    edges = (
        response_words[:EDGE_WORDS] == prompt_words[:EDGE_WORDS]
        and response_words[-EDGE_WORDS:] == prompt_words[-EDGE_WORDS:]
    )
    remaining = iter(prompt_words)
    return edges and all(word in remaining for word in response_words)


def _is_copy(prompt: str, response: str) -> bool:
    """Return whether two texts are equal but for case, blanks, punctuation and a label "Q:"."""
    bare = re.sub(rf"^\W*(?:{'|'.join(ASKING)})\W*[:：]\s*", "", response, flags=re.IGNORECASE)
    return _same(prompt, response) or _same(prompt, bare)
