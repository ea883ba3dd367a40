// The curves, drawn by Bokeh as they come into view. All share one range of steps.

Bokeh.set_log_level("warn");
const P = Bokeh.Plotting;
const GREY = "#7c858e"; // reads on light, dark and paper
const view = { from: null, to: null, smooth: 0, log: false };
let plots = []; // { spec, box, figure, sources }
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

/** The lines of a plot: one a run and key; values that no step has are left out. */
function linesOf(spec) {
  const several = DATA.runs.length > 1 && !spec.stacked;
  const lines = [];
  DATA.runs.forEach((run, r) => spec.keys.forEach((key, k) => {
    if (!run.series[key] || (spec.stacked && spec.run !== r)) return;
    const kept = run.steps.map((step, i) => [step, run.series[key][i]]).filter(([, v]) => v != null);
    lines.push({
      key, run, tone: several && spec.keys.length === 1 ? r : k,
      dash: several && spec.keys.length > 1 ? ["solid", "dashed", "dotted", "dotdash"][r % 4] : "solid",
      label: several ? (spec.keys.length > 1 ? `${run.name} ${key}${r % 4 ? ` (${["", "dashed", "dotted", "dotdash"][r % 4]})` : ""}` : run.name) : spec.stacked ? key.replace(/^time\/|_s$/g, "") : key,
      x: kept.map(([step]) => step), y: kept.map(([, value]) => value),
    });
  }));
  return lines;
}

/** Phases stack on each other: each line starts where the one before ended. */
function stack(lines) {
  const base = [];
  for (const line of lines) {
    line.y = line.run.steps.map((_, i) => line.run.series[line.key][i] ?? 0);
    line.x = line.run.steps;
    line.bottom = line.x.map((_, i) => base[i] || 0);
    line.y = line.y.map((value, i) => value + line.bottom[i]);
    base.splice(0, base.length, ...line.y);
  }
  return lines;
}

/** Validations are few and totals only rise: a mean over earlier values would be wrong. */
const canSmooth = (line) => view.smooth && !line.key.startsWith("val/") && !line.key.endsWith("_total");

function dataOf(line, spec) {
  const positive = (values) => (view.log ? values.map((v) => (v > 0 ? v : NaN)) : values);
  const y = spec.stacked || !canSmooth(line) ? line.y : smoothed(line.y, view.smooth);
  return { x: line.x, y: positive(y), raw: positive(line.y), bottom: line.bottom || line.x.map(() => 0) };
}

function allSteps() {
  const steps = DATA.runs.flatMap((run) => [run.steps[0], run.steps[run.steps.length - 1]]).filter((s) => s != null);
  return steps.length ? [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)] : [0, 1];
}

function shownSteps() {
  const [first, last] = allSteps();
  return [view.from ?? first, view.to ?? last];
}

function draw(plot) {
  const { spec } = plot;
  const lines = spec.stacked ? stack(linesOf(spec)) : linesOf(spec);
  const [start, end] = shownSteps();
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  const figure = P.figure({
    height: 210, sizing_mode: "stretch_width", toolbar_location: null, outline_line_color: null,
    x_range: new Bokeh.Range1d({ start, end }), tools: touch ? "" : "xbox_zoom",
    y_axis_type: view.log && !spec.stacked ? "log" : "linear",
    background_fill_color: null, border_fill_color: null, min_border_left: 52, min_border_right: 6,
  });
  for (const axis of figure.axes) {
    Object.assign(axis, {
      axis_line_color: null, major_tick_line_color: GREY, minor_tick_line_color: null,
      major_label_text_color: GREY, major_label_text_font_size: "11px",
      major_label_text_font: "system-ui",
      ...(axis.formatter.type === "BasicTickFormatter" ? { formatter: new Bokeh.BasicTickFormatter({ power_limit_low: -6 }) } : {}),
    });
  }
  for (const grid of figure.grids) {
    Object.assign(grid, { grid_line_color: GREY, grid_line_alpha: 0.16 });
  }
  mark(figure, spec);
  const drawn = [];
  plot.sources = lines.map((line) => {
    const source = new Bokeh.ColumnDataSource({ data: dataOf(line, spec) });
    const style = { source, line_color: colour(line.tone), line_dash: line.dash };
    if (spec.stacked) {
      drawn.push(figure.varea({ x: { field: "x" }, y1: { field: "bottom" }, y2: { field: "y" }, source, fill_color: colour(line.tone), fill_alpha: 0.75 }));
    } else {
      if (canSmooth(line)) drawn.push(figure.line({ field: "x" }, { field: "raw" }, { ...style, line_alpha: 0.25 }));
      drawn.push(figure.line({ field: "x" }, { field: "y" }, { ...style, line_width: 1.7 }));
      if (line.x.length <= 30) figure.scatter({ field: "x" }, { field: "y" }, { source, size: 4, line_color: null, fill_color: colour(line.tone) });
    }
    return source;
  });
  figure.y_range.renderers = drawn; // the axis follows the curves, not the healthy band
  const hover = new Bokeh.HoverTool({ tooltips: [["step", "@x"], ["value", "@raw{0.0000a}"]], mode: "mouse", point_policy: "snap_to_data" });
  if (!spec.stacked) figure.add_tools(hover);
  link(figure);
  plot.figure = figure;
  const legend = el("div", { class: "legend" }, ...(lines.length > 1
    ? lines.map((line) => el("span", {}, chip(line.tone), line.label)) : []));
  const area = el("div", { class: "area" });
  const what = tileOf(spec)?.what;
  plot.box.replaceChildren(el("h3", {}, spec.title, what ? el("small", {}, ` ${what}`) : ""), area, legend);
  return P.show(figure, area).then(() => {
    if (!performance.getEntriesByName("first-curve").length) performance.mark("first-curve");
    plot.box.dataset.drawn = "yes";
  });
}

const tileOf = (spec) => DATA.runs[0].tiles.find((found) => found.key === spec.keys[0]);

/** One after the other, so that the first is there early and the page answers meanwhile. */
let turn = Promise.resolve();
function drawSoon(plot) {
  turn = turn.then(() => (plot.figure ? null : draw(plot))).then(() => new Promise((next) => { setTimeout(next); }));
}

/** The healthy band, and lines where a finding began, the run went on, or was saved. */
function mark(figure, spec) {
  const run = DATA.runs[0];
  const tile = tileOf(spec);
  if (tile && (tile.band[0] != null || tile.band[1] != null)) {
    figure.add_layout(new Bokeh.BoxAnnotation({
      ...(tile.band[0] == null ? {} : { bottom: tile.band[0] }),
      ...(tile.band[1] == null ? {} : { top: tile.band[1] }), fill_color: "#009e73", fill_alpha: 0.09,
      line_color: null, level: "underlay",
    }));
  }
  const kinds = [
    [run.marks.checkpoints, GREY, "dotted"], [run.marks.restarts, colour(4), "solid"],
    [run.findings.filter((span) => spec.keys.includes(span.key)).map((span) => span.from), "#e69f00", "dashed"],
  ];
  for (const [steps, line_color, line_dash] of kinds) {
    for (const location of new Set(steps.slice(-20))) {
      figure.add_layout(new Bokeh.Span({ location, dimension: "height", line_color, line_dash, line_alpha: 0.6, level: "underlay" }));
    }
  }
}

/** What one plot zooms to, all plots show, and the two fields say. */
function link(figure) {
  const moved = () => {
    if (linking) return;
    const { start, end } = figure.x_range;
    zoom(Math.round(start), Math.round(end), figure);
  };
  figure.x_range.change.connect(moved);
}

function zoom(from, to, origin = null) {
  [view.from, view.to] = [from, to];
  address.set({ from, to });
  const [start, end] = shownSteps();
  linking = true;
  for (const { figure } of plots) {
    if (figure && figure !== origin) Object.assign(figure.x_range, { start, end });
  }
  linking = false;
  [$("zoom-from").value, $("zoom-to").value] = [start, end];
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const plot = plots.find(({ box }) => box === entry.target);
    if (entry.isIntersecting && plot && !plot.figure) drawSoon(plot);
  }
}, { rootMargin: "300px" });

/** Lay out a box for each plot that the runs need; those in view are drawn at once. */
function layOut() {
  watcher.disconnect();
  const specs = new Map();
  for (const [r, run] of DATA.runs.entries()) {
    for (const spec of run.plots) {
      const title = spec.stacked && DATA.runs.length > 1 ? `${spec.title}, ${run.name}` : spec.title;
      const id = `${spec.other} ${title}`;
      if (!specs.has(id)) specs.set(id, { ...spec, title, run: r, keys: [] });
      const known = specs.get(id);
      known.keys = [...new Set([...known.keys, ...spec.keys])];
    }
  }
  plots = [...specs.values()].map((spec) => ({ spec, box: el("div", { class: "plot" }, el("h3", {}, spec.title)) }));
  $("plots").replaceChildren(...plots.filter(({ spec }) => !spec.other).map(({ box }) => box));
  $("other-plots").replaceChildren(...plots.filter(({ spec }) => spec.other).map(({ box }) => box));
  $("others").hidden = !$("other-plots").children.length;
  const { marks, findings } = DATA.runs[0];
  $("marks").textContent = [
    marks.checkpoints.length && "dotted: checkpoint", marks.restarts.length && "solid: restart",
    findings.length && "dashed: a finding begins",
  ].filter(Boolean).join(" · ");
  for (const { box } of plots) watcher.observe(box);
}

/** New values into the plots that are drawn; a new metric rebuilds the layout. */
function follow() {
  const ids = (run) => run.plots.flatMap((spec) => spec.keys).join();
  const names = DATA.runs.map(ids).join(";");
  if (names !== follow.names) {
    follow.names = names;
    layOut();
    return;
  }
  for (const { figure, sources, spec } of plots) {
    if (!figure) continue;
    const lines = spec.stacked ? stack(linesOf(spec)) : linesOf(spec);
    lines.forEach((line, i) => { sources[i].data = dataOf(line, spec); });
  }
  zoom(view.from, view.to);
}

function redraw() {
  for (const plot of plots) {
    if (plot.figure) draw(plot);
  }
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

/** Smoothing, scale and steps as the address has them; long runs are smoothed unless it says otherwise. */
function readView() {
  const number = (name) => (address.get(name) == null ? null : Number(address.get(name)));
  view.smooth = number("smooth") ?? (DATA.runs.some((run) => run.steps.length > 200) ? 0.9 : 0);
  view.log = address.get("log") === "true";
  [$("smooth").value, $("log").checked] = [view.smooth, view.log];
  redraw();
  zoom(number("from"), number("to"));
}

addEventListener("beforeprint", () => plots.forEach((plot) => { if (!plot.figure && !plot.spec.other) draw(plot); }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
follow();
readView();
addEventListener("hashchange", readView);
