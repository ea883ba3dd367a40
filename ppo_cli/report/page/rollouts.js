// The responses: a table that filters and sorts, and a pane to read one. In `ppo view` rows come
// from the server as they are asked for; in a report they are in the file.

const PAGE = 50;
const COLUMNS = [
  ["step", "step", "n"], ["split", null, "wide"], ["data_source", null, "wide", "source"],
  ["score", "score", "n"], ["tokens", "tokens", "n wide"], ["prompt", null, ""], ["response", null, ""],
];
const VIEWS = [
  ["newest", "step", "down"], ["best", "score", "down"], ["worst", "score", "up"],
  ["most changed", "changed", "down"], ["most disputed", "disputed", "down"],
];
const now = { run: 0, sort: "step", order: "down", offset: 0, rows: [], total: 0, place: -1, row: null, asked: 0 };

/** The rows of a report, with the same answers as the server of `ppo view`. */
const inFile = {
  rows(query) {
    const everything = DATA.rows[now.run];
    const number = (name) => (query[name] ? Number(query[name]) : null);
    const [from, to, least, most] = ["from_step", "to_step", "min", "max"].map(number);
    let pattern = null;
    if (query.pattern) {
      try {
        pattern = new RegExp(query.pattern, "iu");
      } catch (error) {
        throw new Error(`The pattern cannot be read: ${error.message}.`);
      }
    }
    const where = query.where ? [query.where] : ["prompt", "response", "reason"];
    const has = (row) => where.some((name) => pattern.test(row[name] || ""));
    const chosen = everything.filter((row) => (from == null || row.step >= from)
      && (to == null || row.step <= to)
      && (!query.split || row.split === query.split)
      && (!query.source || row.data_source === query.source)
      && (least == null || (row.score != null && row.score >= least))
      && (most == null || (row.score != null && row.score <= most))
      && (query.failed !== "yes" || row.score == null)
      && (query.failed !== "no" || row.score != null)
      && (!query.why || (row.failure || "").toLowerCase().includes(query.why.toLowerCase()))
      && (!pattern || has(row)));
    const sign = query.order === "down" ? -1 : 1;
    const key = (row) => (query.sort === "step" ? row.step + (row.split === "val" ? 0.5 : 0) : row[query.sort]);
    chosen.sort((a, b) => (key(a) == null) - (key(b) == null) || sign * (key(a) - key(b)) || 0);
    const offset = Number(query.offset);
    return {
      total: chosen.length, all: everything.length, rows: chosen.slice(offset, offset + PAGE),
      sources: [...new Set(everything.map((row) => row.data_source || ""))].sort(),
    };
  },
  row: (id) => DATA.rows[now.run].find((row) => row.id === id),
  prompt(id) {
    const one = inFile.row(id);
    return DATA.rows[now.run].filter((row) => row.uid === one.uid && row.split === one.split);
  },
};

async function ask(path, query, body = null) {
  const words = new URLSearchParams({ run: now.run, ...query });
  const reply = await fetch(`/api/${path}?${words}`, body && { method: "POST", body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

const source = DATA.live ? {
  rows: (query) => ask("rows", query),
  row: (id, whole) => ask("row", whole ? { id, whole: 1 } : { id }),
  prompt: (id) => ask("prompt", { id }),
} : inFile;

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
const snippet = (value) => el("span", { class: "clip", dir: "auto" }, textOf(String(value ?? "").slice(0, 160).replace(/\s+/g, " ")));

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

/** What changed from one text to another, word by word (longest common subsequence). */
function diff(before, after) {
  const [a, b] = [before, after].map((text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) || []);
  if (a.length * b.length > 4e6) return el("p", { class: "dim" }, "Too long to compare word by word.");
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

const option = (value, text) => el("option", { value }, text);

/** The sources to choose from; a run under way may bring new ones. */
function drawSources(sources) {
  const field = $("filter").elements.source;
  const named = sources.filter(Boolean);
  if (field.children.length === named.length + 1) return;
  const { value } = field;
  fill(field, option("", "all sources"), ...named.map((name) => option(name, name)));
  field.value = value;
}

function drawFilter() {
  const form = $("filter");
  const number = (name, text) => el("input", { type: "number", step: "any", name, placeholder: text, "aria-label": text });
  form.replaceChildren(
    DATA.runs.length > 1 ? el("select", { name: "run", "aria-label": "run" }, ...DATA.runs.map((run, i) => option(i, run.name))) : "",
    number("from_step", "from step"), number("to_step", "to step"),
    el("select", { name: "split", "aria-label": "split" }, option("", "train and val"), option("train", "train"), option("val", "val")),
    el("select", { name: "source", "aria-label": "data source" }),
    number("min", "score from"), number("max", "score to"),
    el("select", { name: "failed", "aria-label": "failed" }, option("", "scored or not"), option("no", "scored"), option("yes", "failed")),
    el("input", { type: "text", name: "why", placeholder: "why it failed", "aria-label": "why it failed" }),
    el("input", { type: "text", name: "pattern", placeholder: "regular expression  ( / )", "aria-label": "regular expression" }),
    el("select", { name: "where", "aria-label": "where to search" }, option("", "in any text"), option("prompt", "in the prompt"), option("response", "in the response"), option("reason", "in the reason")),
    el("button", { type: "reset" }, "clear"));
}

const query = () => Object.fromEntries([...new FormData($("filter"))].filter(([name, value]) => value !== "" && name !== "run"));

async function load({ keep = false } = {}) {
  const ticket = (now.asked += 1);
  if (!keep) now.offset = 0;
  if (!$("found").textContent) $("found").textContent = "reading the responses …";
  try {
    const found = await source.rows({ ...query(), sort: now.sort, order: now.order, offset: now.offset });
    if (ticket !== now.asked) return; // a newer question is under way
    [now.rows, now.total] = [found.rows, found.total];
    if (!$("filter").children.length) drawFilter();
    drawSources(found.sources);
    $("found").className = "dim";
    $("found").textContent = `${found.total.toLocaleString("en-US")} of ${found.all.toLocaleString("en-US")} responses`
      + (found.unread ? `; ${found.unread.toLocaleString("en-US")} earlier steps are being read …` : "");
    drawTable();
    if (found.unread) setTimeout(() => { if (ticket === now.asked) load({ keep: true }); });
  } catch (error) {
    $("found").className = "error";
    $("found").textContent = error.message;
  }
}

function drawTable() {
  fill(document.querySelector("#table thead tr"), ...COLUMNS.map(([name, sort, kind, title]) => {
    const mark = sort === now.sort ? (now.order === "down" ? " ↓" : " ↑") : "";
    const order = () => { now.order = now.sort === sort && now.order === "down" ? "up" : "down"; now.sort = sort; load(); drawViews(); };
    return el("th", { class: kind, "aria-sort": mark ? (now.order === "down" ? "descending" : "ascending") : null },
      sort ? el("button", { type: "button", onclick: order }, (title || name) + mark) : title || name);
  }));
  fill(document.querySelector("#table tbody"), ...now.rows.map((row, place) => {
    const label = labelOf(row);
    const cells = COLUMNS.map(([name, , kind]) => {
      if (name === "score") return el("td", { class: row.score == null ? "n failed" : kind, title: row.failure || null }, row.score == null ? "failed" : digits(row.score), label ? " ●" : "");
      if (name === "prompt" || name === "response") return el("td", {}, snippet(row[name]));
      return el("td", { class: kind, title: kind === "wide" ? row[name] : null }, String(row[name] ?? ""));
    });
    return el("tr", { tabindex: place === Math.max(0, now.place) ? 0 : -1, "data-id": row.id, "aria-selected": String(now.row?.id === row.id), onclick: () => choose(place) }, ...cells);
  }));
  const turn = (offset, text, off) => el("button", { type: "button", disabled: off, onclick: () => { now.offset = offset; now.place = -1; load({ keep: true }); } }, text);
  const last = now.offset + now.rows.length;
  fill($("pages"), turn(now.offset - PAGE, "← earlier", now.offset === 0), turn(now.offset + PAGE, "later →", last >= now.total),
    el("span", { class: "dim" }, now.total ? `${now.offset + 1} to ${last}` : ""),
    el("span", { class: "dim wide" }, el("kbd", {}, "j"), " next ", el("kbd", {}, "k"), " previous ", el("kbd", {}, "/"), " search",
      DATA.live ? " " : null, DATA.live ? el("kbd", {}, "1") : null, DATA.live ? " good " : null, DATA.live ? el("kbd", {}, "0") : null, DATA.live ? " bad" : null));
}

function drawViews() {
  fill($("views"), ...VIEWS.map(([text, sort, order]) => el("button", {
    type: "button", "aria-pressed": String(now.sort === sort && now.order === order),
    onclick: () => { [now.sort, now.order] = [sort, order]; now.place = -1; load(); drawViews(); },
  }, text)));
}

async function choose(place, { focus = true } = {}) {
  now.place = place;
  for (const row of document.querySelectorAll("#table tbody tr")) row.setAttribute("aria-selected", String(row.dataset.id === now.rows[place].id));
  await read(now.rows[place].id);
  const row = document.querySelectorAll("#table tbody tr")[place];
  if (focus && row) { row.tabIndex = 0; row.focus({ preventScroll: false }); }
  // On a narrow screen the pane is below the table.
  if (matchMedia("(max-width: 860px)").matches) $("pane").scrollIntoView();
}

async function read(id, whole = false) {
  try {
    const line = await source.row(id, whole);
    now.row = line;
    drawPane(line, await source.prompt(id));
  } catch (error) {
    fill($("pane"), el("p", { class: "error" }, error.message));
  }
}

const SHOWN = new Set(["id", "response_id", "split", "step", "uid", "sample", "prompt", "response", "ground_truth", "data_source", "score",
  "failure", "reason", "parts", "tokens", "finish_reason", "mixture", "judge_reply", "cut", "disputed", "changed", "thoughts"]);

/** What a scorer said besides: cost, latency, votes. A judge's whole reply is folded. */
function facts(line) {
  const plain = Object.entries(line).filter(([name, value]) => !SHOWN.has(name) && value != null);
  return [
    plain.length ? el("p", { class: "dim" }, plain.map(([name, value]) => `${name} ${typeof value === "number" ? digits(value) : asText(value)}`).join(" · ")) : null,
    line.judge_reply ? el("details", {}, el("summary", {}, "the judge's whole reply"), box(line.judge_reply)) : null,
  ];
}

function drawPane(line, same) {
  const head = (text) => el("h3", {}, text);
  const part = (name, text) => (text == null || text === "" ? [] : [head(name), box(asText(text)), cutNote(line, name)]);
  const parts = Object.entries(line.parts || {});
  const others = Object.entries(line.mixture || {}).flatMap(([name, told]) => [el("p", {}, el("b", {}, name), told.failure ? `: ${told.failure}` : ""), ...facts({ ...told, failure: null })]);
  const go = (text, by) => el("button", { type: "button", onclick: () => step(by) }, text);
  fill($("pane"),
    el("div", { class: "bar narrow" }, go("← previous", -1), go("next →", 1), el("button", { type: "button", onclick: () => $("rollouts").scrollIntoView() }, "to the table")),
    el("p", {}, el("b", {}, line.score == null ? "no score" : `score ${digits(line.score)}`),
      ` · step ${line.step} ${line.split} · ${line.tokens ?? "?"} tokens${line.finish_reason === "length" ? ", cut off" : ""} · ${line.data_source || "no source"} · ${line.uid} #${line.sample}`),
    line.failure ? el("p", { class: "failed" }, `failed: ${line.failure}`) : null,
    DATA.live || labelOf(line) ? labelBox(line) : null,
    ...part("prompt", line.prompt), head("response"), response(line.response || "", line.thoughts), cutNote(line, "response"),
    ...part("ground truth", line.ground_truth), ...part("reason", line.reason),
    parts.length ? table("", ["part", "raw", "scaled"], parts.map(([name, value]) => [name, digits(value?.raw), digits(value?.scaled)])) : null,
    ...facts(line), ...others, ...throughTime(line, same));
}

function cutNote(line, name) {
  const length = line.cut && line.cut[name.replace(" ", "_")];
  if (!length) return null;
  const said = `the first ${line[name].length.toLocaleString("en-US")} of ${length.toLocaleString("en-US")} characters`;
  return el("p", { class: "dim" }, said, DATA.live ? " " : "", DATA.live ? el("button", { type: "button", onclick: () => read(line.id, true) }, "show all") : "");
}

/** All responses to this prompt; what one says otherwise than the response before it. */
function throughTime(line, same) {
  if (same.length < 2) return [];
  const at = same.findIndex((row) => row.id === line.id);
  const before = same.filter((row) => row.step < line.step).pop() || same[at - 1];
  const steps = el("div", { class: "through" }, ...same.map((row) => el("button", {
    type: "button", "aria-pressed": String(row.id === line.id), onclick: () => read(row.id),
  }, `${row.step}: ${row.score == null ? "failed" : digits(row.score)}`)));
  return [el("h3", {}, "the same prompt through time (step: score)"), steps,
    ...(before ? [el("h3", {}, `what changed since step ${before.step}`), diff(before.response || "", line.response || "")] : [])];
}

function labelBox(line) {
  const known = labelOf(line) || {};
  if (!DATA.live) return el("p", {}, `label ${known.label ?? "–"} ${known.comment || ""}`);
  const value = el("input", { type: "number", step: "any", name: "label", "aria-label": "label", value: known.label ?? "", placeholder: "score" });
  const comment = el("input", { type: "text", name: "comment", "aria-label": "comment", value: known.comment || "", placeholder: "comment" });
  const save = () => label(line, value.value === "" ? null : Number(value.value), comment.value);
  return el("form", { class: "bar", id: "label", onsubmit: (event) => { event.preventDefault(); save(); } },
    el("span", { class: "dim" }, "your label"),
    el("button", { type: "button", onclick: () => label(line, 1, comment.value) }, "good (1)"),
    el("button", { type: "button", onclick: () => label(line, 0, comment.value) }, "bad (0)"),
    value, comment, el("button", { type: "submit" }, "keep"), el("span", { id: "kept", class: "dim", role: "status" },
      known.id ? `kept in the run folder; ${DATA.calibrate[now.run]}` : ""));
}

async function label(line, value, comment) {
  try {
    const kept = await ask("label", {}, { id: line.id, response_id: line.response_id, label: value, comment });
    if (kept.id) DATA.labels[now.run][line.id] = kept;
    else delete DATA.labels[now.run][line.id];
    document.querySelector("#label").replaceWith(labelBox(line));
    drawTable();
  } catch (error) {
    $("kept").className = "error";
    $("kept").textContent = error.message;
  }
}

async function step(by) {
  const place = now.place + by;
  if (place >= now.rows.length && now.offset + PAGE < now.total) {
    now.offset += PAGE;
    await load({ keep: true });
    return choose(0);
  }
  if (place < 0 && now.offset) {
    now.offset -= PAGE;
    await load({ keep: true });
    return choose(now.rows.length - 1);
  }
  return place >= 0 && place < now.rows.length ? choose(place) : null;
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

let typing = 0;
$("filter").addEventListener("input", (event) => {
  if (event.target.name === "run") {
    now.run = Number(event.target.value);
    now.row = null;
    fill($("pane"), el("p", { class: "dim" }, "Choose a response."));
    showNote();
  }
  clearTimeout(typing);
  now.place = -1;
  typing = setTimeout(load, 250);
});
$("filter").addEventListener("reset", () => setTimeout(load));
$("filter").addEventListener("submit", (event) => { event.preventDefault(); load(); });

function showNote() {
  const note = DATA.live ? "" : DATA.notes[now.run];
  $("sampled").hidden = !note;
  $("sampled").textContent = note;
}

/** Look for new steps every few seconds; a run that ended costs one small answer each time. */
async function followRun() {
  try {
    const fresh = await ask("runs", { seen: DATA.seen });
    if (fresh.seen) {
      DATA = { ...DATA, ...fresh };
      drawOverview();
      follow();
      if (now.offset === 0 && now.sort === "step" && !now.row) load();
    }
    $("state").textContent = "following";
  } catch (error) {
    $("state").textContent = "the server has ended";
  }
  setTimeout(followRun, document.hidden ? 20000 : 3000);
}

showNote();
drawViews();
load();
if (DATA.live) followRun();
