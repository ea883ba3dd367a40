// The responses: a table that filters and sorts, and a pane to read one. The index of all responses,
// without texts, is here: in `ppo view` it comes step by step from the server, which also sends the
// texts that are shown; in a report everything is in the file.

const PAGE = 50;
const SNIPPET_CHARS = 1000, HISTORY_CHARS = 20000, PANE_CHARS = 100000; // of a text that the server sends
const SORTS = ["step", "score", "tokens", "turn_count", "disputed", "changed"];
const keyOf = (row, sort) => (sort === "step" ? row.step + (row.split === "val" ? 0.5 : 0) : sort === "changed" ? row.history.changed : row[sort]);
const FILTERS = {
  from_step: (row, value) => row.step >= value, to_step: (row, value) => row.step <= value,
  split: (row, value) => row.split === value, source: (row, value) => row.data_source === value,
  min: (row, value) => row.score != null && row.score >= value, max: (row, value) => row.score != null && row.score <= value,
  why: (row, value) => (value === "tool errors" ? row.tool_errors > 0 : row.score == null ? ["unscored", `unscored: ${row.cause}`].includes(value) : value === "scored" || (value === "detailed" && row.detailed === 1)),
  pattern: () => true, where: () => true, // texts are searched apart
};
const SPLITS = { train: "training", val: "validation" };
const now = { run: 0, query: {}, sort: "step", order: "down", against: false, offset: 0, chosen: [], rows: [], row: null, asked: 0 };
// Of each run: all rows, oldest first; of the server's answers the rows by step, the changes seen, the steps left.
const indexes = DATA.runs.map(() => ({ rows: [], prompts: new Map(), steps: new Map(), since: 0, left: 1, reading: null }));

async function ask(path, query, body = null) {
  const reply = await fetch(`/api/${path}?${new URLSearchParams(query)}`, body && { method: "POST", body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

const source = DATA.live ? {
  texts: (run, ids, chars, tokens = 0) => (ids.length ? ask("texts", { run, ids, chars, tokens }) : []),
  search: (run, pattern, where) => ask("search", { run, pattern, where }),
} : {
  texts: async (run, ids) => ids.map((id) => DATA.rows[run].find((row) => row.id === id)),
  async search(run, pattern, where) {
    const names = where ? [where] : ["prompt", "response", "reason"];
    try {
      const expression = new RegExp(pattern, "iu");
      const textsOf = (row) => [...names.map((name) => row[name] || ""), names.includes("response") && row.turns ? JSON.stringify(row.turns) : ""];
      return DATA.rows[run].filter((row) => textsOf(row).some((text) => expression.test(text))).map((row) => row.id);
    } catch (error) {
      throw new Error(`The pattern cannot be read: ${error.message}.`);
    }
  },
};

/** Read what is new in the index of a run; while it is read for the first time, the table follows. */
async function readOn(run) {
  const index = indexes[run];
  const first = index.left > 0;
  do {
    const reply = DATA.live ? await ask("index", { run, since: index.since }) : { steps: [], left: 0 };
    for (const [split, step, rows] of reply.steps) {
      index.steps.set(`${split}:${step}`, rows.map((values) => ({
        id: `${split}:${step}:${values[0]}`, split, step, ...Object.fromEntries(values.map((value, i) => [reply.fields[i], value])),
      })));
    }
    [index.since, index.left] = [reply.since, reply.left];
    if (reply.steps.length || first) groupByPrompt(index, DATA.live ? [...index.steps.values()].flat() : DATA.rows[run]);
    const shown = run === now.run && (first || (reply.steps.length && !now.row && !now.offset));
    if (shown && !index.left) load({ keep: true });
    else if (shown && !now.query.pattern) await load({ keep: true }); // a search waits for the whole index
  } while (index.left);
}

function readIndex(run) {
  indexes[run].reading ??= readOn(run).finally(() => { indexes[run].reading = null; });
  return indexes[run].reading;
}

/** Order the rows; those of one prompt share its history and the change of its mean score. */
function groupByPrompt(index, rows) {
  index.rows = rows.sort((a, b) => keyOf(a, "step") - keyOf(b, "step") || a.line - b.line);
  index.prompts = Map.groupBy(index.rows, promptOf);
  for (const same of index.prompts.values()) {
    const scored = same.filter((row) => row.score != null);
    const mean = (end) => scored.filter((row) => row.step === end.step).reduce((sum, row, _, all) => sum + row.score / all.length, 0);
    const history = { rows: same, changed: scored.length ? Math.abs(mean(scored.at(-1)) - mean(scored[0])) : 0 };
    for (const row of same) row.history = history;
  }
}

const promptOf = (row) => `${row.split} ${row.uid}`;
/** Of the rows of a prompt, the one at the step of another row; of several samples the one like `row`. */
const sampleAt = (rows, end, row) => rows.find((other) => other.step === end.step && other.sample === row.sample) || end;
const firstOf = (row) => sampleAt(row.history.rows, row.history.rows[0], row);
/** The newest row whose prompt has a response at an earlier step: of validation, which repeats its prompts, or else of training. */
const newestSeenBefore = (rows) => ["val", "train"].map((split) => rows.findLast((row) => row.split === split && row.history.rows[0].step < row.step))
  .find(Boolean);

/** Text as text: controls, and marks that turn its direction, are shown by their code. */
function textOf(value) {
  const odd = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const made = document.createDocumentFragment();
  let done = 0, shown = 0;
  for (const match of value.matchAll(odd)) {
    if ((shown += 1) > 2000) break;
    const code = match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    made.append(value.slice(done, match.index), el("span", { class: "odd" }, `[U+${code}]`));
    done = match.index + match[0].length;
  }
  made.append(value.slice(done));
  return made;
}

const box = (value) => el("div", { class: "text", dir: "auto", tabindex: 0 }, textOf(value));
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
const oneLine = (value) => String(value ?? "").replace(/\s+/g, " ");
const snippet = (value) => el("span", { class: "clip", dir: "auto" }, textOf(value.slice(0, 400)));
const scoreOf = (row) => (row.score == null ? "no score" : `score ${digits(row.score)}`);

/** A response with what the model thought folded away; Python says where that is. */
function response(text, thoughts) {
  const made = el("div", {});
  let done = 0;
  for (const [start, end] of thoughts || []) {
    const thought = text.slice(start, end);
    if (start > done) made.append(box(text.slice(done, start)));
    made.append(el("details", {}, el("summary", {}, `thinking, ${thought.length.toLocaleString("en-US")} characters`), box(thought)));
    done = end;
  }
  if (done < text.length || !text) made.append(box(text.slice(done)));
  return made;
}

/** What changed from one text to another, word by word (longest common subsequence); null if they are too long. */
function diff(before, after) {
  const [a, b] = [before, after].map((text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) || []);
  if (a.length * b.length > 4e6) return null;
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
  }
  const made = el("div", { class: "text", dir: "auto" });
  const put = (name, word) => {
    const last = made.lastElementChild;
    if (name && last && last.localName === name && last === made.lastChild) last.append(textOf(word));
    else made.append(name ? el(name, {}, textOf(word)) : textOf(word));
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put("", a[i]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) { put("del", a[i]); i += 1; }
    else { put("ins", b[j]); j += 1; }
  }
  return made;
}

/** The label of a row; a run that went on from an earlier step may have another response there. */
function labelOf(row) {
  const label = DATA.labels[now.run][row.id];
  return label?.response_id === row.response_id ? label : undefined;
}

function labelMark(row) {
  const label = labelOf(row);
  if (!label) return null;
  const [kind, mark] = label.label == null ? ["dim", "✎"] : label.label >= 0.5 ? ["good", "●"] : ["bad", "○"];
  return el("span", { class: kind, title: `your label: ${label.label ?? "–"} ${label.comment || ""}` }, ` ${mark}`);
}

/** Fill a list with [value, text]; one with fewer than `least` choices is hidden. */
function setOptions(name, options, least = 3) {
  const list = $("filter").elements[name];
  const value = name === "run" ? String(now.run) : now.query[name] ?? "";
  if (!options.some(([known]) => known === value)) options.push([value, value]);
  list.closest(".field").hidden = options.length < least;
  if (list.dataset.options === JSON.stringify(options)) return;
  list.dataset.options = JSON.stringify(options);
  fill(list, ...options.map(([known, text]) => el("option", { value: known }, text)));
  list.value = value;
}

/** The lists whose choices depend on the responses: runs, splits, sources, causes with counts. */
function drawChoices() {
  const { rows } = indexes[now.run];
  const count = (values) => [...Map.groupBy(values, (value) => value)].map(([value, same]) => [value, same.length]);
  const counted = (value, text, number) => [value, `${text} (${number.toLocaleString("en-US")})`];
  const unscored = rows.filter((row) => row.score == null);
  const detailed = rows.filter((row) => row.detailed).length, wrong = rows.filter((row) => row.tool_errors).length;
  const causes = count(unscored.map((row) => row.cause)).sort((a, b) => b[1] - a[1]);
  setOptions("run", DATA.runs.map((run, i) => [String(i), run.name]), 2);
  setOptions("split", [["", "training and validation"], ...count(rows.map((row) => row.split)).map(([split]) => [split, SPLITS[split]])]);
  setOptions("source", [["", "all"], ...count(rows.map((row) => row.data_source)).filter(([name]) => name).sort().map(([name]) => [name, name])]);
  setOptions("why", [["", "all responses"], counted("scored", "scored", rows.length - unscored.length),
    ...(detailed ? [counted("detailed", "token by token", detailed)] : []),
    ...(wrong ? [counted("tool errors", "with tool errors", wrong)] : []),
    ...(causes.length ? [counted("unscored", "without a score", unscored.length)] : []),
    ...causes.map(([cause, number]) => counted(`unscored: ${cause}`, `without a score: ${cause}`, number))]);
}

/** Put what is chosen into the form, but not into a field in use, and into the page's address. */
function writeState() {
  const { query, sort, order, against, run } = now;
  const filters = Object.keys(FILTERS).map((name) => [name, query[name] ?? ""]);
  for (const [name, value] of filters) if ($("filter").elements[name] !== document.activeElement) $("filter").elements[name].value = value;
  address.set({
    ...Object.fromEntries(filters), sort: sort === "step" ? "" : sort, order: order === "down" ? "" : order, against,
    run: DATA.runs.length > 1 ? DATA.runs[run].name : "", response: now.row?.id,
  });
}

function readState() {
  now.run = Math.max(0, DATA.runs.findIndex((run) => run.name === address.get("run")));
  now.query = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, address.get(name)]).filter(([, value]) => value));
  if (SORTS.includes(address.get("sort"))) now.sort = address.get("sort");
  [now.order, now.against] = [address.get("order") || "down", address.get("against") === "true"];
}

/** The rows of the index that the filter lets through, in order. */
async function select() {
  const { run, query } = now;
  if (query.pattern) await readIndex(run); // all texts are searched
  const found = query.pattern ? new Set(await source.search(run, query.pattern, query.where || "")) : null;
  const tests = Object.entries(query).map(([name, value]) => (row) => FILTERS[name](row, value));
  const chosen = indexes[run].rows.filter((row) => tests.every((test) => test(row)) && (!found || found.has(row.id)));
  const sign = now.order === "down" ? -1 : 1;
  const key = (row) => keyOf(row, now.sort);
  const rise = (a, b) => (now.against ? firstOf(b).score - firstOf(a).score : 0); // equal ones: what changed most is first
  return chosen.sort((a, b) => (key(a) == null) - (key(b) == null) || sign * (key(a) - key(b)) || sign * rise(a, b) || 0);
}

async function load({ keep = false } = {}) {
  const ticket = (now.asked += 1);
  if (!keep) now.offset = 0;
  if (!$("found").textContent) $("found").textContent = "reading the responses …";
  try {
    const { run } = now;
    const chosen = await select();
    const shown = chosen.slice(now.offset, now.offset + PAGE);
    const starts = now.against ? shown.map(firstOf) : [];
    const lines = await source.texts(run, [...shown, ...starts].map((row) => row.id), SNIPPET_CHARS);
    if (ticket !== now.asked) return; // a newer question is under way
    now.chosen = chosen;
    now.rows = shown.map((row, i) => ({ ...lines[i], start: lines[shown.length + i] }));
    const { rows, left } = indexes[run];
    $("found").className = "dim";
    $("found").textContent = `${chosen.length.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")} responses`
      + (left ? `; ${left.toLocaleString("en-US")} earlier steps are being read …` : "");
    drawChoices();
    drawViews();
    writeState();
    drawTable();
  } catch (error) {
    showError(error);
  }
}

function showError(error) {
  $("found").className = "error";
  $("found").textContent = error.message;
}

/** What all texts begin with, up to the last word but one, so that "… about X" is left. */
function commonStart(texts) {
  let start = texts[0] || "";
  for (const text of texts) while (!text.startsWith(start)) start = start.slice(0, -1);
  const whole = texts.every((text) => text === start);
  return whole || start.length < 20 ? 0 : start.match(/(\S+\s+)?\S*$/).index;
}

/** The columns of the table: [title, sort, class, cell, characters to have room for]; one with a single value is left out. */
function listColumns() {
  const longest = (name) => Math.min(200, Math.max(20, ...now.rows.map((row) => oneLine(row[name]).length)));
  const differ = (name) => now.chosen.some((row) => row[name] !== now.chosen[0][name]);
  const start = commonStart(now.rows.map((row) => oneLine(row.prompt)));
  const score = (row) => (row.score == null ? el("span", { class: "failed", title: row.failure }, "none") : digits(row.score));
  const turns = (row) => el("span", row.tool_errors ? { class: "failed", title: `tool errors: ${row.tool_errors}` } : {}, row.turn_count);
  const steps = new Set(now.rows.map((row) => row.start?.step));
  const first = steps.size === 1 ? `at step ${[...steps][0]}` : "first";
  const latest = now.against && !differ("step") && now.rows.length ? ` at step ${now.rows[0].step}` : "";
  return [
    (differ("step") || !now.against) && ["step", "step", "n", (row) => row.step],
    differ("split") && ["split", null, "wide", (row) => SPLITS[row.split]],
    differ("data_source") && ["source", null, "wide", (row) => snippet(oneLine(row.data_source))],
    ["score", "score", "n", (row) => el("span", {}, score(row), labelMark(row))],
    !now.against && ["tokens", "tokens", "n wide", (row) => row.tokens],
    !now.against && now.chosen.some((row) => row.turn_count) && ["turns", "turn_count", "n", turns],
    differ("uid") && ["prompt", null, now.against ? "wide" : "", (row) => snippet((start ? "… " : "") + oneLine(row.prompt).slice(start)), longest("prompt") - start],
    [`response${latest}`, null, "", (row) => snippet(oneLine(row.response)), longest("response")],
    now.against && [first, null, "n", ({ start }) => el("span", {}, score(start), steps.size > 1 ? el("div", { class: "dim" }, `step ${start.step}`) : null)],
    now.against && [steps.size === 1 ? `response ${first}` : "first response", null, "", ({ start }) => snippet(oneLine(start.response))],
  ].filter(Boolean);
}

function drawTable() {
  const columns = listColumns();
  $("table").className = now.against ? "against" : "";
  const heads = document.querySelector("#table thead tr");
  const focused = [...heads.children].findIndex((head) => head.contains(document.activeElement));
  const characters = columns.reduce((sum, [, , , , room = 0]) => sum + room, 0);
  fill(heads, ...columns.map(([title, sort, kind, , room]) => {
    const mark = sort === now.sort ? (now.order === "down" ? " ↓" : " ↑") : "";
    const order = () => { now.order = now.sort === sort && now.order === "down" ? "up" : "down"; now.sort = sort; load(); };
    const style = room && !now.against ? `width: ${(100 * room) / characters}%` : null; // texts share what is left by their length
    return el("th", { class: kind, style, "aria-sort": mark ? (now.order === "down" ? "descending" : "ascending") : null },
      sort ? el("button", { type: "button", onclick: order }, title + mark) : title);
  }));
  heads.children[focused]?.firstChild.focus();
  const current = Math.max(0, now.rows.findIndex((row) => row.id === now.row?.id));
  fill(document.querySelector("#table tbody"), ...now.rows.map((row, place) => el("tr", {
    tabindex: place === current ? 0 : -1, "data-id": row.id, "aria-selected": String(now.row?.id === row.id), onclick: () => choose(place),
  }, ...columns.map(([, , kind, cell]) => el("td", { class: kind }, cell(row))))));
  const last = now.offset + now.rows.length;
  [$("earlier").disabled, $("later").disabled] = [now.offset === 0, last >= now.chosen.length];
  $("shown").textContent = now.chosen.length ? `${now.offset + 1} to ${last}` : "";
}

function drawViews() {
  for (const button of $("views").children) {
    const { sort, order, against = "" } = button.dataset;
    button.hidden = against && !newestSeenBefore(indexes[now.run].rows);
    button.setAttribute("aria-pressed", String(now.sort === sort && now.order === order && String(now.against || "") === against));
  }
}

/** What the judges of the run were asked, folded. */
function drawAsked() {
  const { judges, formula } = DATA.runs[now.run].reward;
  fill($("asked"), formula ? el("p", { class: "dim" }, formula) : null, ...judges.map((judge) => el("details", {},
    el("summary", {}, `What the judge ${judge.model} was asked: ${judge.summary}`),
    judge.problem ? el("p", { class: "error" }, judge.problem) : null,
    judge.criteria.length ? table("criteria", ["criterion", "weight"], judge.criteria.map((one) => [criterion(one.name, one), weightOf(one)])) : null,
    ...Object.entries(judge.texts).flatMap(([title, text]) => [el("h3", {}, title), box(text)]))));
}

const criterion = (name, known) => el("span", {}, el("b", {}, name), known ? ": " : "", known ? textOf(known.text) : "");
/** Whether a criterion is a fault: its weight is below 0, or 0 and it says so. */
const isFault = ({ weight, fault = false }) => fault || weight < 0;

/** A credit as the judge's verdict: the credit of a fault is for its absence. */
function gradeOf(credit, criterion) {
  const { levels = 1 } = criterion;
  const grade = isFault(criterion) ? 1 - credit : credit;
  if (levels > 1) return `level ${digits(grade * levels)} of ${levels}`;
  return grade === 0 || grade === 1 ? `${grade ? "" : "not "}${isFault(criterion) ? "present" : "met"}` : `credit ${digits(credit)}`;
}

const weightOf = (known) => (known ? `${known.weight}${known.must ? ", must be met" : ""}${known.held_out ? ", held out: only reported" : ""}${isFault(known) ? ", a fault" : ""}` : "–");

async function choose(place) {
  await read(now.rows[place].id);
  drawTable();
  document.querySelectorAll("#table tbody tr")[place].focus();
  if (isNarrow()) $("pane").scrollIntoView();
}

async function read(id, whole = false) {
  const { run } = now;
  $("unread").hidden = true;
  try {
    const [line] = await source.texts(run, [id], whole ? 0 : PANE_CHARS, 1);
    if (!line?.id) throw new Error("This response is not on this page.");
    now.row = line;
    address.set({ at: "rollouts", response: id });
    drawLabel(line);
    drawPane(line);
    drawSamePrompt(run, line).catch(showError);
  } catch (error) {
    fill($("reading"), el("p", { class: "error" }, error.message));
  }
}

// Facts of a scorer in words: a title, and how a number, or false and true, are written.
const FACTS = new Map(Object.entries({
  cached: ["verdict", ["from a call", "from the cache"]], gated: ["judge", ["asked", "not asked"]], unclosed: ["thought", ["finished", "not finished"]],
  cost_usd: ["cost", (value) => `$${Number(value.toPrecision(2))}`], latency_s: ["time", (value) => `${digits(value)} s`],
  vote_spread: ["spread of the votes"], monitor: ["second judge"], monitor_gap: ["gap to the second judge"],
  escalated: ["asked", ["the cheaper judge", "both judges"]], cheap_score: ["cheaper judge"], cheap_spread: ["its spread"], cheap_reason: ["its reason"],
  extracted: ["answer that was read"], imputed: ["substitute score"],
}));
const SHOWN = new Set(["id", "response_id", "split", "step", "line", "uid", "sample", "prompt", "response", "ground_truth", "data_source", "score",
  "failure", "cause", "reason", "parts", "tokens", "finish_reason", "mixture", "judge_reply", "cut", "disputed", "thoughts", "opened", "criteria", "history", "detailed", "token_details", "turns", "turn_count", "tool_errors", "opening", "ended"]);
const graded = (line) => Object.values(line.criteria || "").some((credit) => typeof credit === "number");

function fact(name, value) {
  const [title, how] = FACTS.get(name) || [name.replaceAll("_", " ")];
  const text = typeof value === "number" ? (typeof how === "function" ? how : digits)(value) : how?.[Number(value)] || asText(value);
  return el("div", {}, el("dt", {}, title), el("dd", {}, textOf(text)));
}

/** What a scorer said besides: criteria, cost, time, votes. A judge's whole reply is folded. */
function facts(line, part, reason) {
  const plain = Object.entries(line).filter(([name, value]) => !SHOWN.has(name) && value != null && !(line.cached && value === 0));
  return [
    graded(line) ? criteriaTable(line.criteria, part, reason) : null,
    el("dl", { class: "facts" }, ...plain.map(([name, value]) => fact(name, value))),
    line.judge_reply ? el("details", {}, el("summary", {}, "the judge's whole reply"), box(line.judge_reply)) : null,
  ];
}

/** The criteria with weight, grade and reason; a judge's reason has a line "name: grade. why" for each. */
function criteriaTable(credits, part, reason) {
  const judge = DATA.runs[now.run].reward.judges.find((one) => one.part === part);
  return table("criteria", ["criterion", "weight", "grade", "reason"], Object.entries(credits).map(([name, credit]) => {
    const known = judge?.criteria.find((one) => one.name === name);
    const line = new RegExp(`(?:^|\\n)${name.replace(/\W/g, ".")}: ((?:not )?(?:met|present)(?: with probability [^ ]+)?|level [^ ]+ of \\d+)\\. ?(.*)`);
    const [, grade, why] = reason.match(line) || [];
    return [criterion(name, known), weightOf(known), el("span", { class: credit >= 0.5 ? "good" : "bad" }, known ? gradeOf(credit, known) : grade || `credit ${digits(credit)}`),
      el("span", {}, textOf(why || ""))];
  }));
}

function drawPane(line) {
  const head = (text) => el("h3", {}, text);
  const part = (name, text) => (text == null || text === "" ? [] : [head(name), box(asText(text)), cutNote(line, name)]);
  const { weights } = DATA.runs[now.run].reward;
  const parts = Object.entries(line.parts || {}).filter(([name]) => !name.includes("rubric/"));
  const missed = Object.entries(line.parts || {}).some(([name, value]) => name.endsWith("rubric/hurdle_missed") && value.raw > 0);
  const mixed = Object.entries(line.mixture || {});
  // A mixture joins the reasons of its parts: `judge: …; rule: …`.
  const reason = String(line.reason || "");
  const others = mixed.flatMap(([name, told]) => [el("p", {}, el("b", {}, name), told.failure ? `: ${told.failure}` : ""),
    ...facts({ ...told, failure: null }, name, reason.split(`${name}: `).slice(1).join(`${name}: `))]);
  const go = (text, by) => el("button", { type: "button", onclick: () => step(by) }, text);
  fill($("reading"),
    el("div", { class: "bar narrow" }, go("← previous", -1), go("next →", 1), el("button", { type: "button", onclick: () => $("rollouts").scrollIntoView() }, "to the table")),
    el("p", {}, el("b", {}, scoreOf(line)),
      ` · step ${line.step}, ${SPLITS[line.split]} · ${line.tokens} token${line.tokens === 1 ? "" : "s"}${line.finish_reason === "length" && !line.turns ? ", cut off" : ""} · ${line.data_source ? `${line.data_source} · ` : ""}${line.uid} #${line.sample}`),
    line.failure ? el("p", { class: "failed" }, `no score: ${line.failure}`) : null,
    !DATA.live && labelOf(line) ? el("p", {}, `label ${labelOf(line).label ?? "–"} ${labelOf(line).comment}`) : null,
    ...part("prompt", line.prompt), ...(line.turns ? [head("turns"), ...episodeView(line), line.token_details ? head("tokens") : null] : [head("response")]),
    responseView(line), cutNote(line, "response"), el("div", { id: "ends" }),
    ...part("ground truth", line.ground_truth), ...(graded(line) ? [] : part("reason", line.reason)),
    parts.length ? table("", ["part of the score", "weight in the sum", "raw", "scaled"].filter((_, i) => mixed.length || i !== 1),
      parts.map(([name, value]) => [name, ...(mixed.length ? [digits(weights[name])] : []), digits(value?.raw), digits(value?.scaled)])) : null,
    missed ? el("p", { class: "failed" }, "A criterion that must be met is not: the score is 0.") : null,
    ...facts(line, null, reason), ...others);
}

/** Responses side by side: [title, line] each; with `changes` the words that differ from the first are marked. */
function sideBySide(cells, changes) {
  return el("div", { class: "beside" }, ...cells.map(([title, line], i) => el("div", {},
    el("p", {}, el("b", {}, title), ` · ${scoreOf(line)}`),
    (changes && i && diff(cells[0][1].response || "", line.response || "")) || response(line.response || "", line.thoughts))));
}

/** Add the prompt of a response in each run, at the first and the latest step, and through time. */
async function drawSamePrompt(run, line) {
  await Promise.all(DATA.runs.map((_, other) => readIndex(other)));
  const rows = indexes[run].prompts.get(promptOf(line)) || [line];
  const textsOf = (from, wanted) => source.texts(from, wanted.map((row) => row.id), HISTORY_CHARS);
  const before = rows.findLast((row) => row.step < line.step) || rows[rows.findIndex((row) => row.id === line.id) - 1] || rows[0];
  const [first, latest, last] = await textsOf(run, [sampleAt(rows, rows[0], line), sampleAt(rows, rows.at(-1), line), before]);
  const inRuns = await Promise.all(DATA.runs.map(async ({ name }, other) => {
    const there = indexes[other].prompts.get(promptOf(line));
    const [newest] = there ? await textsOf(other, [sampleAt(there, there.at(-1), line)]) : [];
    return [`${name}, step ${newest?.step}`, newest];
  }));
  const alike = inRuns.filter(([, newest]) => newest?.prompt === first.prompt);
  const buttons = rows.map((row) => el("button", { type: "button", "aria-pressed": String(row.id === line.id), onclick: () => read(row.id) },
    `${row.step}: ${row.score == null ? "none" : digits(row.score)}`));
  const blocks = [
    alike.length > 1 && ["the same prompt in each run, at its latest step", sideBySide(alike, false)],
    rows.length > 1 && ["the same prompt through time (step: score)", el("div", { class: "through" }, ...buttons)],
    before.id !== line.id && [`what changed since step ${before.step}`, last.response === line.response ? "nothing" : diff(last.response || "", line.response || "") || "too long to compare word by word"],
  ];
  if (now.row !== line) return; // another one was chosen meanwhile
  $("reading").append(...blocks.filter(Boolean).flatMap(([title, block]) => [el("h3", {}, title), block]));
  if (first.step < latest.step) {
    fill($("ends"), el("h3", {}, "the same prompt at the first and the latest step"), sideBySide([first, latest].map((end) => [`step ${end.step}`, end]), true));
  }
}

function cutNote(line, name) {
  const length = line.cut && line.cut[name.replace(" ", "_")];
  if (!length) return null;
  const said = `the first ${line[name].length.toLocaleString("en-US")} of ${length.toLocaleString("en-US")} characters`;
  return el("p", { class: "dim" }, said, DATA.live ? " " : "", DATA.live ? el("button", { type: "button", onclick: () => read(line.id, true) }, "show all") : "");
}

/** The form for a label, filled for a response; a report has none. */
function drawLabel(line) {
  const known = labelOf(line) || {};
  $("label").hidden = !DATA.live;
  [$("label").elements.label.value, $("label").elements.comment.value] = [known.label ?? "", known.comment || ""];
  $("kept").className = "dim";
  $("kept").textContent = known.id ? `kept in the run folder; ${DATA.calibrate[now.run]}` : "";
}

async function label(line, value, comment) {
  try {
    const kept = await ask("label", { run: now.run }, { id: line.id, response_id: line.response_id, label: value, comment });
    if (kept.id) DATA.labels[now.run][line.id] = kept;
    else delete DATA.labels[now.run][line.id];
    drawLabel(line);
    drawTable();
  } catch (error) {
    $("kept").className = "error";
    $("kept").textContent = error.message;
  }
}

async function step(by) {
  const place = now.chosen.findIndex((row) => row.id === now.row?.id) + by;
  if (place < 0 || place >= now.chosen.length) return;
  if (Math.floor(place / PAGE) !== now.offset / PAGE) {
    now.offset = PAGE * Math.floor(place / PAGE);
    await load({ keep: true });
  }
  await choose(place - now.offset);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, button, summary")) return;
  const inTable = event.target.closest("#table tbody");
  const by = { j: 1, n: 1, k: -1, p: -1, ...(inTable ? { ArrowDown: 1, ArrowUp: -1 } : {}) }[event.key];
  if (by) step(by);
  else if (event.key === "Enter" && inTable) choose([...event.target.parentNode.children].indexOf(event.target));
  else if (event.key === "/") $("filter").elements.pattern?.focus();
  else if (DATA.live && now.row && (event.key === "1" || event.key === "0")) label(now.row, Number(event.key), labelOf(now.row)?.comment || "");
  else return;
  event.preventDefault();
});

const commentOf = () => $("label").elements.comment.value;
$("label").addEventListener("submit", (event) => {
  const { value } = event.target.elements.label;
  event.preventDefault();
  label(now.row, value === "" ? null : Number(value), commentOf());
});
for (const button of document.querySelectorAll("#label [type=button]")) button.addEventListener("click", () => label(now.row, Number(button.value), commentOf()));

for (const [id, by] of [["earlier", -PAGE], ["later", PAGE]]) $(id).addEventListener("click", () => { now.offset += by; load({ keep: true }); });
$("views").addEventListener("click", ({ target: { dataset: { sort, order, against } } }) => {
  const newest = newestSeenBefore(indexes[now.run].rows);
  if (!sort) return; // between the buttons
  if (against) Object.assign(now.query, { split: newest.split, from_step: newest.step, to_step: newest.step });
  else if (now.against) for (const name of ["split", "from_step", "to_step"]) delete now.query[name];
  Object.assign(now, { sort, order, against: Boolean(against) });
  load();
});

let typing = 0;
$("filter").addEventListener("input", (event) => {
  const form = Object.fromEntries(new FormData($("filter")));
  now.query = Object.fromEntries(Object.keys(FILTERS).filter((name) => form[name]).map((name) => [name, form[name]]));
  if (event.target.name === "run") showRun(Number(form.run));
  clearTimeout(typing);
  typing = setTimeout(load, 250);
});
$("filter").addEventListener("reset", (event) => { event.preventDefault(); [now.query, now.against] = [{}, false]; load(); });
$("filter").addEventListener("submit", (event) => { event.preventDefault(); load(); });

/** Choose a run: its note, and what its judges were asked. */
function showRun(run) {
  [now.run, now.row] = [run, null];
  $("label").hidden = true;
  $("unread").hidden = false;
  const note = DATA.live ? "" : DATA.notes[run];
  $("sampled").hidden = !note;
  $("sampled").textContent = note;
  drawAsked();
}

/** Show the responses of a step of a run, as a click in a plot asks for. */
function showStep(run, step) {
  if (run !== now.run) showRun(run);
  Object.assign(now, { query: { from_step: step, to_step: step }, against: false });
  address.set({ at: "rollouts" });
  $("rollouts").scrollIntoView();
  return load();
}

/** Look for new steps every few seconds; a run that ended costs one small answer each time. */
async function followRun() {
  try {
    const fresh = await ask("runs", { seen: DATA.seen });
    if (fresh.seen) {
      DATA = { ...DATA, ...fresh };
      drawOverview();
      follow();
      await Promise.all(DATA.runs.map((_, run) => readIndex(run)));
    }
    const isRunning = DATA.runs.some(({ facts }) => facts.some(([name, value]) => name === "state" && value === "running"));
    $("state").textContent = isRunning ? "following" : "";
  } catch (error) {
    $("state").textContent = "the server has ended";
  }
  setTimeout(followRun, document.hidden ? 20000 : 3000);
}

/** Read the index of the run that is shown, then of the others; open the response in the address. */
async function begin() {
  readState();
  const id = address.get("response");
  showRun(now.run);
  const reading = readIndex(now.run);
  if (id) await read(id);
  await reading;
  if (id && isNarrow()) {
    await load({ keep: true }); // the table above the pane has its height now
    readAddress();
  }
  for (const run of DATA.runs.keys()) await readIndex(run);
}

begin().catch(showError);
if (DATA.live) followRun();
