"use strict";
// The overview: sentences, tiles with their healthy range, settings, findings, spending.
// Texts of a run only ever enter the page as text nodes.

let DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["--c0", "--c3", "--c2", "--c1", "--c4", "--c5", "--c6", "--c7", "--c8"];
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

/** A link within the page is a plain #section; the state is added to it. */
function readAddress() {
  const text = location.hash.slice(1);
  if (text.includes("=")) parameters = new URLSearchParams(text);
  else if (text) address.set({ at: text });
  $(address.get("at"))?.scrollIntoView();
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

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const colour = (index) => getComputedStyle(document.documentElement)
  .getPropertyValue(COLOURS[index % COLOURS.length]).trim();
const chip = (index) => {
  const made = el("span", { class: "chip" });
  made.style.background = `var(${COLOURS[index % COLOURS.length]})`;
  return made;
};

/** A number in at most five characters or so: 0.4943, 12.3, 1,204, 1e-6. */
function digits(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 100 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 })
    : String(Number(value.toPrecision(3)));
}

function fill(box, ...children) {
  box.replaceChildren(...children.filter((child) => child != null));
  return box;
}

function drawSentences() {
  const many = DATA.runs.length > 1;
  $("title").textContent = many ? `${DATA.runs.length} runs` : DATA.runs[0].name;
  document.title = `${DATA.runs.map((run) => run.name).join(", ")} – ppo-cli`;
  fill($("sentences"), ...DATA.runs.flatMap((run, index) => [
    el("dl", { class: "facts" }, ...run.facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "sentence" },
      many ? chip(index) : null, many ? el("b", {}, `${run.name}: `) : null, prose(run.sentence),
      run.note ? el("small", {}, run.note) : null),
  ]));
}

/** The range that the values of all runs and the healthy band share. */
function extent(series, band) {
  const known = series.flat().filter((value) => value != null);
  let [low, high] = [Math.min(...known), Math.max(...known)];
  const gap = high - low || Math.abs(high) || 1;
  // A far end of the band is left out: the curve is what counts.
  for (const end of band) {
    if (end != null && end > high && end - high < 1.5 * gap) high = end;
    if (end != null && end < low && low - end < 1.5 * gap) low = end;
  }
  if (high === low) [low, high] = [low - gap / 2, high + gap / 2];
  const air = 0.06 * (high - low);
  return [low - air, high + air];
}

function sparkline(runs, key, band) {
  const [width, height] = [200, 54];
  const last = Math.max(1, ...runs.map((run) => run.steps[run.steps.length - 1] || 1));
  const [low, high] = extent(runs.map((run) => run.series[key] || []), band);
  const y = (value) => height - ((value - low) / (high - low)) * height;
  const inside = (value) => Math.min(height, Math.max(0, value));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (band[0] != null || band[1] != null) {
    const top = inside(band[1] == null ? 0 : y(band[1]));
    const bottom = inside(band[0] == null ? height : y(band[0]));
    if (bottom > top) picture.append(svg("rect", { x: 0, width, y: top, height: bottom - top, style: "fill:var(--band)" }));
  }
  runs.forEach((run, index) => {
    const points = (run.series[key] || []).map((value, i) => [run.steps[i], value])
      .filter(([, value]) => value != null)
      .map(([step, value]) => `${((step / last) * width).toFixed(1)},${y(value).toFixed(1)}`);
    const style = `fill:none;stroke:var(${COLOURS[index % COLOURS.length]});stroke-width:1.5;vector-effect:non-scaling-stroke`;
    if (points.length === 1) points.push(points[0].replace(/^[^,]*/, (x) => String(Number(x) + 3)));
    picture.append(svg("polyline", { points: points.join(" "), style, "vector-effect": "non-scaling-stroke" }));
  });
  return picture;
}

function range([low, high]) {
  if (low != null && high != null) return `healthy ${digits(low)} to ${digits(high)}`;
  if (high != null) return high === 0 ? "healthy at 0" : `healthy up to ${digits(high)}`;
  return low != null ? `healthy from ${digits(low)}` : "";
}

function drawTiles() {
  const runs = DATA.runs;
  const tiles = new Map();
  runs.forEach((run, index) => run.tiles.forEach((tile) => {
    if (!tiles.has(tile.key)) tiles.set(tile.key, []);
    tiles.get(tile.key).push({ ...tile, index });
  }));
  fill($("tiles"), ...[...tiles.values()].map((found) => {
    const first = found[0];
    const faults = found.flatMap((tile) => tile.findings.map((span) =>
      (runs.length > 1 ? `${runs[tile.index].name}: ` : "") + `since step ${span.from}: ${span.text}`));
    return el("div", { class: faults.length ? "tile out" : "tile", title: first.what },
      el("div", { class: "head" }, el("span", {}, first.title),
        el("span", { class: "flag" }, found.map((tile) => digits(tile.value)).join(" · "))),
      sparkline(runs, first.key, first.band),
      el("p", { class: "state" }, faults.length ? prose(faults.join(" ")) : range(first.band)));
  }));
}

function table(kind, heads, rows) {
  return el("table", { class: kind },
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}

function drawSettings() {
  const runs = DATA.runs;
  const tables = runs.map((run) => new Map(run.settings.map(([key, value]) => [key, value])));
  const keys = [...new Set(tables.flatMap((found) => [...found.keys()]))];
  const differ = keys.filter((key) => new Set(tables.map((found) => found.get(key))).size > 1);
  const set = (run) => run.settings.filter(([, , origin]) => !["default", "fork"].includes(origin));
  fill($("settings"), el("h2", {}, "Settings"),
    runs.length > 1 ? el("h3", {}, "Settings that differ") : null,
    runs.length > 1 ? table("settings", ["setting", ...runs.map((run) => run.name)],
      differ.map((key) => [key, ...tables.map((found) => found.get(key) ?? "–")])) : null,
    ...runs.flatMap((run) => [
      el("h3", {}, runs.length > 1 ? `Set in ${run.name}` : "Set for this run"),
      table("settings", ["setting", "value", "origin"], set(run)),
      el("details", {}, el("summary", {}, `All ${run.settings.length} settings`),
        table("settings", ["setting", "value", "origin"], run.settings)),
    ]));
}

function drawFindings() {
  fill($("findings"), el("h2", {}, "Findings"), ...DATA.runs.flatMap((run) => [
    DATA.runs.length > 1 ? el("h3", {}, run.name) : null,
    run.findings.length ? table("", ["steps", "what, and what to change"], run.findings.map((span) => [
      span.from === span.to ? `${span.from}` : `${span.from} to ${span.to}`,
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

function drawOverview() {
  drawSentences();
  drawTiles();
  drawSettings();
  drawFindings();
  drawSpent();
}

document.querySelector("footer").textContent = `ppo-cli ${DATA.version}`;
drawOverview();
readAddress();
addEventListener("hashchange", readAddress);
addEventListener("load", readAddress); // the plots have their places now
performance.mark("overview");
