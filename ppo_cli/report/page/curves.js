// The cards: one a metric, with a plot by Bokeh. All share one range of steps, and the step pointed at.

Bokeh.set_log_level("warn");
const P = Bokeh.Plotting;
const GREY = "#7c858e"; // reads on light, dark and paper
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [12, 3], [1, 6]];
const SMOOTH_FROM = 200; // steps
const view = { from: null, to: null, smooth: 0, log: false };
let cards = []; // { spec, lines, box, legend, area, figure, sources, shown }
let linking = false;

/** Exponential moving average, without the pull to its first value; gaps stay gaps. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return NaN;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** The lines of a card: one a run and metric. Of several runs each has one colour, else each metric. */
function linesOf({ lines, stacked }) {
  const many = DATA.runs.length > 1;
  const base = [];
  return DATA.runs.flatMap((run, r) => lines.filter(([key]) => run.series[key]).map(([key, label], k) => {
    const values = run.series[key];
    const kept = run.steps.map((_, i) => i).filter((i) => stacked || values[i] != null);
    const bottom = kept.map((i) => (stacked && base[i]) || 0);
    const y = kept.map((i, at) => (values[i] ?? 0) + bottom[at]);
    if (stacked) base.splice(0, base.length, ...y); // the next phase starts where this one ends
    return {
      key, run, values, bottom, y, x: kept.map((i) => run.steps[i]), tone: many ? r : k,
      dash: DASHES[many ? lines.findIndex((line) => line[0] === key) % DASHES.length : 0],
      label: [many && run.name, lines.length > 1 && label].filter(Boolean).join(", "),
    };
  }));
}

/** Validations are few and totals only rise: a mean over earlier values would be wrong. */
const canSmooth = (line) => view.smooth && !line.key.startsWith("val/") && !line.key.endsWith("_total");

function dataOf(line, { stacked }) {
  const positive = (values) => (view.log && !stacked ? values.map((v) => (v > 0 ? v : NaN)) : values);
  const y = stacked || !canSmooth(line) ? line.y : smoothed(line.y, view.smooth);
  return { x: line.x, y: positive(y), raw: positive(line.y), bottom: line.bottom };
}

function shownSteps() {
  const steps = DATA.runs.flatMap((run) => [run.steps[0], run.steps.at(-1)]).filter((step) => step != null);
  const first = steps.length ? Math.min(...steps) : 0;
  return [view.from ?? first, view.to ?? Math.max(first + 1, ...steps)];
}

/** The values of the shown steps with some air, and at least those that the catalogue names. */
function yRange({ spec, lines }) {
  const [from, to] = shownSteps();
  const logarithmic = view.log && !spec.stacked;
  const values = lines.flatMap((line) => line.y.filter((y, i) => line.x[i] >= from && line.x[i] <= to && (!logarithmic || y > 0)));
  if (!values.length) return logarithmic ? { start: 0.1, end: 1 } : { start: 0, end: 1 };
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  if (logarithmic) return { start: low / 1.2, end: high * 1.2 };
  const air = 0.06 * (high - low || Math.abs(high) || 1);
  const [least, most] = spec.axis;
  return { start: least == null || low < least ? low - air : least, end: most == null || high > most ? high + air : most };
}

async function draw(card) {
  const { spec, lines } = card;
  const [start, end] = shownSteps();
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  const figure = P.figure({
    height: 180, sizing_mode: "stretch_width", toolbar_location: null, outline_line_color: null,
    x_range: new Bokeh.Range1d({ start, end }), y_range: new Bokeh.Range1d(yRange(card)), tools: touch ? "" : "xbox_zoom",
    y_axis_type: view.log && !spec.stacked ? "log" : "linear",
    background_fill_color: null, border_fill_color: null, min_border_left: 52, min_border_right: 6,
  });
  for (const axis of figure.axes) {
    Object.assign(axis, {
      axis_line_color: null, major_tick_line_color: GREY, major_tick_in: 0, major_tick_out: 3, minor_tick_line_color: null, major_label_text_color: GREY,
      major_label_text_font_size: "11px", major_label_text_font: "system-ui",
      ...(axis.formatter.type === "BasicTickFormatter" ? { formatter: new Bokeh.BasicTickFormatter({ power_limit_low: -6 }) } : {}),
    });
  }
  figure.below[0].ticker.min_interval = 1; // there is no step 7.5
  for (const grid of figure.grids) Object.assign(grid, { grid_line_color: GREY, grid_line_alpha: 0.16 });
  mark(figure, spec);
  card.sources = lines.map((line) => {
    const source = new Bokeh.ColumnDataSource({ data: dataOf(line, spec) });
    const [x, y, tone] = [{ field: "x" }, { field: "y" }, colour(line.tone)];
    const style = { source, line_color: tone, line_dash: line.dash };
    if (spec.stacked) figure.varea({ x, y1: { field: "bottom" }, y2: y, source, fill_color: tone, fill_alpha: 0.75 });
    else {
      if (canSmooth(line)) figure.line(x, { field: "raw" }, { ...style, line_alpha: 0.25 });
      figure.line(x, y, { ...style, line_width: 1.7 });
      if (line.x.length <= 30) figure.scatter(x, y, { source, size: 4, line_color: null, fill_color: tone });
    }
    return source;
  });
  figure.x_range.change.connect(() => {
    if (!linking) zoom(Math.round(figure.x_range.start), Math.round(figure.x_range.end));
  });
  card.figure = figure;
  card.area.replaceChildren(card.cross);
  const page = new Bokeh.Document();
  page.add_root(figure);
  [card.shown] = await Bokeh.embed.add_document_standalone(page, card.area); // P.show would wait for the first frame
  if (!performance.getEntriesByName("first-curve").length) performance.mark("first-curve");
  card.box.dataset.drawn = "yes";
}

/** One after the other. While the page loads without a pause: a printer takes what is there after that. */
let turn = Promise.resolve();
function drawSoon(card) {
  turn = turn.then(() => (card.figure ? null : draw(card)))
    .then(() => (document.readyState === "complete" ? new Promise((next) => { setTimeout(next); }) : null));
}

/** The healthy band, and lines where a finding began, the run went on, or was saved. */
function mark(figure, { band, lines }) {
  const [run] = DATA.runs;
  const [bottom, top] = band;
  if (bottom != null || top != null) {
    figure.add_layout(new Bokeh.BoxAnnotation({
      ...(bottom == null ? {} : { bottom }), ...(top == null ? {} : { top }),
      fill_color: "#009e73", fill_alpha: 0.09, line_color: null, level: "underlay",
    }));
  }
  const begun = run.findings.filter((span) => lines.some(([key]) => key === span.key)).map((span) => span.from);
  for (const [steps, line_color, line_dash] of [
    [run.marks.checkpoints, GREY, "dotted"], [run.marks.restarts, colour(4), "solid"], [begun, "#e69f00", "dashed"],
  ]) {
    for (const location of new Set(steps.slice(-20))) {
      figure.add_layout(new Bokeh.Span({ location, dimension: "height", line_color, line_dash, line_alpha: 0.6, level: "underlay" }));
    }
  }
}

/** What one plot zooms to, all plots show, and the two fields say. */
function zoom(from, to) {
  [view.from, view.to] = [from, to];
  address.set({ from, to });
  const [start, end] = shownSteps();
  linking = true;
  for (const card of cards.filter(({ figure }) => figure)) {
    Object.assign(card.figure.x_range, { start, end });
    Object.assign(card.figure.y_range, yRange(card));
  }
  linking = false;
  [$("zoom-from").value, $("zoom-to").value] = [start, end];
}

/** The values of a step in all cards, and a line there in their plots; without a step the last values. */
function point(step) {
  for (const { lines, legend, cross, shown, spec } of cards) {
    lines.forEach(({ run, values }, i) => {
      const value = step == null ? values.findLast((v) => v != null) : values[run.steps.indexOf(step)];
      legend.children[i].lastChild.textContent = measured(value, spec.unit);
    });
    cross.hidden = step == null || !shown;
    if (cross.hidden) continue;
    cross.style.left = `${shown.frame.x_scale.compute(step)}px`;
    cross.textContent = `step ${step}`;
  }
}

/** The step under the mouse, and the run whose line is nearest there. */
function stepAt({ shown, area, lines }, event) {
  const { left, top } = area.getBoundingClientRect();
  const [first, last] = shownSteps();
  const step = Math.min(last, Math.max(first, Math.round(shown.frame.x_scale.invert(event.clientX - left))));
  const gap = ({ run, values }) => Math.abs(shown.frame.y_scale.compute(values[run.steps.indexOf(step)]) - (event.clientY - top));
  const near = lines.reduce((a, b) => (gap(b) < gap(a) ? b : a));
  return [step, DATA.runs.indexOf(near.run)];
}

function save(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** The plot of a card with its title and legend, on the colour of the page. */
function savePng({ spec, lines, area, shown }) {
  const plot = shown.export("png").canvas;
  const { width, height } = area.getBoundingClientRect();
  const [scale, rows] = [plot.width / width, lines.length > 1 ? lines.length : 0];
  const canvas = el("canvas", { width: plot.width, height: plot.height + scale * (30 + 16 * rows) });
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.scale(scale, scale);
  const write = (text, x, y, font) => { [pen.font, pen.fillStyle] = [`${font} system-ui`, style.color]; pen.fillText(text, x, y); };
  write([spec.title, spec.unit].filter(Boolean).join(", "), 8, 20, "bold 13px");
  pen.drawImage(plot, 0, 26, width, height);
  lines.slice(0, rows).forEach(({ label, tone, dash }, i) => {
    const y = 26 + height + 16 * i + 8;
    [pen.strokeStyle, pen.lineWidth] = [colour(tone), 3];
    pen.setLineDash(dash);
    pen.stroke(new Path2D(`M 12 ${y} h 24`));
    write(label, 42, y + 4, "12px");
  });
  canvas.toBlob((blob) => save(`${spec.title}.png`, blob));
}

/** A row a step, a column a line, with the values as they were measured. */
function saveCsv({ spec, lines }) {
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? "");
  const steps = [...new Set(lines.flatMap(({ run }) => run.steps))].sort((a, b) => a - b);
  const rows = steps.map((step) => [step, ...lines.map(({ run, values }) => values[run.steps.indexOf(step)])]);
  const text = [["step", ...lines.map(({ label }) => label || spec.title)], ...rows].map((row) => row.map(cell).join(",")).join("\n");
  save(`${spec.title}.csv`, new Blob([`${text}\n`], { type: "text/csv" }));
}

/** Title, what it is, the last value of each line, plot; what is wrong and what to change only if something is. */
function makeCard(spec) {
  const lines = linesOf(spec);
  const faults = DATA.runs.flatMap((run) => run.findings.filter((span) => span.now && spec.lines.some(([key]) => key === span.key))
    .map((span) => `${DATA.runs.length > 1 ? `${run.name}, ` : ""}since step ${span.from}: ${span.text}`));
  const more = lines.length > 8 ? `and ${lines.length - 8} more; CSV has all` : null;
  const legend = el("div", { class: "legend", "data-more": more }, ...lines.map((line) => el("span", { id: line.run === DATA.runs[0] ? `m-${line.key}` : null },
    lines.length > 1 ? chip(line.tone, line.dash) : null, line.label && `${line.label} `, el("b", {}))));
  const area = el("div", { class: "area" });
  const card = { spec, lines, legend, area, cross: el("div", { class: "cross", hidden: true }) };
  const button = (text, act) => el("button", { type: "button", class: "no-print", title: `save as ${text}`, onclick: () => act(card) }, text);
  card.box = el("article", { class: faults.length ? "card out" : "card" },
    el("div", { class: "head" }, el("h3", {}, spec.title, el("small", {}, ` ${spec.unit}`)), button("PNG", savePng), button("CSV", saveCsv)),
    el("p", { class: "what" }, [spec.what, healthy(spec)].filter(Boolean).join(" ")), legend, area,
    faults.length ? el("p", { class: "state" }, prose(faults.join(" "))) : null);
  let pressed = null;
  area.addEventListener("pointermove", (event) => { if (card.shown) point(stepAt(card, event)[0]); });
  area.addEventListener("pointerleave", () => point(null));
  area.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
  area.addEventListener("click", (event) => { // the end of a drag is a click too
    const [step, run] = card.shown && Math.abs(event.clientX - pressed) < 4 && event.pointerType === "mouse" ? stepAt(card, event) : [];
    if (step != null) showStep(run, step);
  });
  return card;
}

function healthy({ band: [low, high] }) {
  if (low != null && high != null) return `Healthy: ${digits(low)} to ${digits(high)}.`;
  if (high != null) return high === 0 ? "Healthy: 0." : `Healthy: up to ${digits(high)}.`;
  return low != null ? `Healthy: from ${digits(low)}.` : "";
}

/** The cards that the runs need: those with a finding first; what never changed is one line. */
function specsOf() {
  const specs = new Map();
  for (const spec of DATA.runs.flatMap((run) => run.cards)) {
    // Phases stack up in one run; several runs are compared by the whole step.
    const shown = spec.stacked && DATA.runs.length > 1
      ? { ...spec, stacked: false, title: "Time of a step", what: "", lines: [["time/step_s", ""]] } : spec;
    const id = `${shown.place === "other"} ${shown.title}`;
    const known = specs.get(id) || { ...shown, lines: [], findings: [], constant: true };
    known.lines = [...known.lines, ...shown.lines.filter(([key]) => !known.lines.some((line) => line[0] === key))];
    known.findings = [...known.findings, ...shown.findings];
    known.constant &&= shown.constant;
    if (shown.place === "main") known.place = "main"; // a finding of another run
    specs.set(id, known);
  }
  return [...specs.values()].sort((a, b) => (b.findings.length > 0) - (a.findings.length > 0));
}

const isConstant = ({ constant, findings, place }) => constant && !findings.length && place !== "other";

function layOut() {
  const specs = specsOf();
  cards = specs.filter((spec) => !isConstant(spec)).map(makeCard);
  for (const place of ["main", "more", "other"]) {
    $(`${place}-plots`).replaceChildren(...cards.filter(({ spec }) => spec.place === place).map(({ box }) => box));
  }
  $("others").hidden = !$("other-plots").children.length;
  $("more").hidden = cards.every(({ spec }) => spec.place === "main") && !$("critic-plots").children.length;
  const texts = specs.filter(isConstant).map((spec) => {
    const values = spec.lines.map(([key, label]) => [spec.lines.length > 1 ? `${label} ` : "",
      ...new Set(linesOf(spec).filter((line) => line.key === key).map((line) => measured(line.y.at(-1), spec.unit)))]);
    const name = spec.title.replace(/^[A-Z](?=[a-z])/, (letter) => letter.toLowerCase());
    return `${name}${spec.lines.length > 1 ? ":" : ""} ${values.map(([label, ...each]) => label + each.join(" or ")).join(", ")}`;
  });
  $("constant").textContent = texts.length ? `Constant: ${texts.join(" · ")}` : "";
  const { marks, findings } = DATA.runs[0];
  $("marks").textContent = [
    marks.checkpoints.length && "dotted: checkpoint", marks.restarts.length && "solid: restart",
    findings.length && "dashed: a finding begins",
  ].filter(Boolean).join(" · ");
  point(null);
  cards.filter(({ spec }) => spec.place !== "other" || $("others").open).forEach(drawSoon);
}

/** New values into the cards; another set of cards, or another finding, rebuilds the layout. */
function follow() {
  drawCritic();
  const layout = JSON.stringify(specsOf().map((spec) => [spec.title, spec.lines, isConstant(spec), spec.findings.map(({ text }) => text)]));
  if (layout !== follow.layout) {
    follow.layout = layout;
    layOut();
  } else {
    for (const card of cards) {
      card.lines = linesOf(card.spec);
      card.sources?.forEach((source, i) => { source.data = dataOf(card.lines[i], card.spec); });
    }
    point(null);
  }
  zoom(view.from, view.to);
}

/** Smoothing, scale and steps as the address has them; long runs are smoothed unless it says otherwise. */
function readView() {
  const number = (name) => (address.get(name) == null ? null : Number(address.get(name)));
  const smooth = number("smooth") ?? (DATA.runs.some((run) => run.steps.length > SMOOTH_FROM) ? 0.9 : 0);
  const log = address.get("log") === "true";
  for (const card of cards.filter(({ figure }) => figure && (smooth !== view.smooth || log !== view.log))) {
    card.figure = null;
    drawSoon(card);
  }
  Object.assign(view, { smooth, log });
  [$("smooth").value, $("log").checked] = [smooth, log];
  zoom(number("from"), number("to"));
}

$("smooth").addEventListener("change", (event) => { address.set({ smooth: event.target.value }); readView(); });
$("log").addEventListener("change", (event) => { address.set({ log: event.target.checked }); readView(); });
$("zoom-all").addEventListener("click", () => zoom(null, null));
for (const id of ["zoom-from", "zoom-to"]) {
  $(id).addEventListener("change", () => {
    const [from, to] = [$("zoom-from"), $("zoom-to")].map((field) => (field.value === "" ? null : Number(field.value)));
    zoom(from, to);
  });
}
$("others").addEventListener("toggle", () => cards.forEach(drawSoon));
// Paper takes pictures of the plots, which fit its columns.
addEventListener("beforeprint", () => {
  for (const { shown, area } of cards.filter((card) => card.shown)) {
    const picture = shown.export("png").canvas;
    picture.className = "print-only";
    area.before(picture);
  }
});
addEventListener("afterprint", () => document.querySelectorAll("canvas.print-only").forEach((picture) => picture.remove()));
readView();
follow();
addEventListener("hashchange", readView);
