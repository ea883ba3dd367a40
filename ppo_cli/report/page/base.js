"use strict";
// The overview: facts, verdict, settings, findings, spending.
// Texts of a run only ever enter the page as text nodes.

let DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["--c0", "--c3", "--c2", "--c1", "--c4", "--c5", "--c6", "--c7", "--c8"];
const FINALS = ["reward_mean", "val/accuracy", "val/reward_mean", "kl_divergence", "response_length_mean", "entropy"];
const $ = (id) => document.getElementById(id);

/** What is shown, as #at=curves&from=3&to=9: a link to the page opens it as it was. */
let parameters = new URLSearchParams();
const address = {
  get: (name) => parameters.get(name),
  /** Keep values; an empty one is left out. */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (value == null || value === "" || value === false) parameters.delete(name);
      else parameters.set(name, value);
    }
    history.replaceState(null, "", `#${parameters}`);
  },
};

/** Whether the pane of a response is below the table. */
const isNarrow = () => matchMedia("(max-width: 860px)").matches;

/** A link within the page is a plain #section; the state is added to it. */
function readAddress() {
  const text = location.hash.slice(1);
  if (text.includes("=")) parameters = new URLSearchParams(text);
  else if (text) address.set({ at: text });
  const at = address.get("at");
  $(at === "rollouts" && address.get("response") && isNarrow() ? "pane" : at)?.scrollIntoView();
}

/** An element with attributes and children; strings become text nodes. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** Words in which a flag such as --kl_coef is broken only where a line is too short for it. */
function prose(text) {
  const made = document.createDocumentFragment();
  text.split(/(--?[A-Za-z]\w+|[\w.]+\.md\S*)/).forEach((piece, i) => made.append(i % 2 ? el("span", { class: "flag" }, piece) : piece));
  return made;
}

/** The key of a setting, which a narrow column breaks after a dot or an underscore only. */
const keyName = (text) => el("span", {}, ...text.split(/(?<=[._])/).flatMap((piece) => [piece, el("wbr")]));

const colour = (index) => getComputedStyle(document.documentElement)
  .getPropertyValue(COLOURS[index % COLOURS.length]).trim();

/** The mark of a line in a legend: its colour, and its dashes as lengths of line and gap. */
function chip(index, dash = []) {
  const tone = `var(${COLOURS[index % COLOURS.length]})`;
  if (!dash.length) return el("span", { class: "chip", style: `background: ${tone}` });
  const [picture, path] = ["svg", "path"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  picture.setAttribute("class", "chip dashes");
  path.setAttribute("d", "M0 2h26");
  path.setAttribute("style", `stroke: ${tone}; stroke-width: 3; stroke-dasharray: ${dash}`);
  picture.append(path);
  return picture;
}

/** A number in at most five characters or so: 0.4943, 12.3, 1,204, 1e-6. */
function digits(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 100 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 })
    : String(Number(value.toPrecision(3)));
}

function fill(box, ...children) {
  box.replaceChildren(...children.filter((child) => child != null));
  return box;
}

const measured = (value, unit) => (unit === "$" ? `$${digits(value)}` : digits(value));

/** A text with a link to the card of a metric, if the run has that metric. */
const cardLink = (run, text, key) => (run.series[key] ? el("a", { href: `#m-${key}` }, prose(text)) : prose(text));

function drawSentences() {
  const { runs, compared: { groups } } = DATA;
  const many = runs.length > 1;
  $("title").textContent = many ? `${runs.length} runs` : runs[0].name;
  document.title = `${runs.map((run) => run.name).join(", ")} – ppo-cli`;
  const lastOf = (run, { title, unit, lines: [[key]] }) => [title, `${measured(run.series[key].findLast((v) => v != null), unit)} ${unit}`];
  const finals = (run) => run.cards.filter(({ lines }) => FINALS.includes(lines[0][0])).map((card) => lastOf(run, card));
  // What all runs share is said once, the rest side by side.
  const rowsOf = (run) => (many ? [...run.facts, ...run.answers, ...finals(run)] : run.facts);
  const names = [...new Set(runs.flatMap((run) => rowsOf(run).map(([name]) => name)))];
  const textOf = (run, name) => rowsOf(run).find((row) => row[0] === name)?.[1] ?? "–";
  const shared = names.filter((name) => new Set(runs.map((run) => textOf(run, name))).size === 1);
  const cell = (run, name) => el("span", { class: textOf(run, name).startsWith("failed") ? "failed" : null }, textOf(run, name));
  const titled = (run, index) => el("b", {}, chip(index), run.name);
  fill($("sentences"),
    el("dl", { class: "facts" }, ...shared.map((name) => el("div", {}, el("dt", {}, name), el("dd", {}, cell(runs[0], name))))),
    ...runs.map((run, index) => el("p", { class: "sentence" }, ...(many ? [titled(run, index), ": "] : []),
      ...run.verdict.map(([text, key]) => cardLink(run, text, key)), run.note ? el("small", {}, run.note) : null)),
    groups.length ? table("facts groups", groups[0], groups.slice(1)) : null,
    many ? table("facts", ["", ...runs.map(titled)], names.filter((name) => !shared.includes(name))
      .map((name) => [name, ...runs.map((run) => cell(run, name))]))
      : el("dl", { class: "answers" }, ...runs[0].answers.flatMap(([question, text, key]) =>
        [el("dt", {}, question), el("dd", {}, cardLink(runs[0], text, key))]),
      el("dt", {}, "what next?"), el("dd", {}, ...runs[0].findings.some((span) => span.now) ? [el("a", { href: "#findings" }, "what the findings advise"), el("br", {})] : [],
        ...runs[0].next.flatMap(([purpose, command]) => [`${purpose}: `, el("code", {}, command), el("br", {})]))));
}

function table(kind, heads, rows) {
  return el("table", { class: kind },
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}

function drawSettings() {
  const runs = DATA.runs;
  const rowsOf = (settings) => settings.map(([key, ...cells]) => [keyName(key), ...cells]);
  const set = (run) => run.settings.filter(([, , origin]) => !["default", "fork"].includes(origin));
  fill($("settings"), el("h2", {}, "Settings"),
    runs.length > 1 ? el("h3", {}, "Settings that differ") : null,
    runs.length > 1 ? table("settings", ["setting", ...runs.map((run) => run.name)],
      rowsOf(DATA.compared.settings)) : null,
    ...runs.flatMap((run) => [
      el("h3", {}, runs.length > 1 ? `Set in ${run.name}` : "Set for this run"),
      table("settings", ["setting", "value", "origin"], rowsOf(set(run))),
      el("details", {}, el("summary", {}, `All ${run.settings.length} settings`),
        table("settings", ["setting", "value", "origin"], rowsOf(run.settings))),
    ]));
}

function drawFindings() {
  fill($("findings"), el("h2", {}, "Findings"), ...DATA.runs.flatMap((run) => [
    DATA.runs.length > 1 ? el("h3", {}, run.name) : null,
    run.findings.length ? table("", ["steps", "what, and what to change"], run.findings.map((span) => [
      el("a", { href: `#m-${span.key}`, onclick: () => zoom(span.from, span.to) },
        span.from === span.to ? `${span.from}` : `${span.from} to ${span.to}`),
      prose(span.text + (span.now ? "" : " (over)")),
    ])) : el("p", { class: "dim" }, "No health check reported a problem."),
  ]).filter(Boolean));
}

function drawSpent() {
  fill($("spent"), el("h2", {}, "Spent, versions, machine"), ...DATA.runs.flatMap((run) => [
    DATA.runs.length > 1 ? el("h3", {}, run.name) : null,
    table("", ["", ""], [...run.spent.rows, ["written by", run.machine || "not recorded"]]),
  ]).filter(Boolean));
}

/** The cards of the judges (noise, biases, agreement, cost, latency) and of the episodes (turns, tools, limits). */
function drawJudge() {
  const cards = DATA.runs.flatMap((run) => [["The judge", run.judge, run], ["The episodes", run.episodes, run]]).filter(([, rows]) => rows.length);
  fill($("judge"), ...cards.map(([title, rows, run]) => el("article", { class: "card" },
    el("h3", {}, DATA.runs.length > 1 ? `${title} of ${run.name}` : title),
    el("dl", { class: "answers" }, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])))));
}

function drawOverview() {
  drawSentences();
  drawSettings();
  drawJudge();
  drawFindings();
  drawSpent();
}

document.querySelector("footer").textContent = `ppo-cli ${DATA.version}`;
drawOverview();
readAddress();
addEventListener("hashchange", readAddress);
addEventListener("load", readAddress); // the plots have their places now
performance.mark("overview");
