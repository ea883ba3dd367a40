// Two plots of what the critic predicts, as SVG: they print, and follow the colours of the page.

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A card with a plot: ticks are [place, text], points of a line [x, y, words]; places go from 0 to 1. */
function plotCard(title, what, ends, xTicks, yTicks, guide, numbers) {
  const [x, y] = [(place) => 40 + place * 308, (place) => 152 - place * 140];
  const marks = ends.flatMap(({ tone, dash, points }) => {
    const paint = `var(${COLOURS[tone % COLOURS.length]})`;
    return [svg("path", { d: points.map(([a, b], i) => `${i ? "L" : "M"}${x(a)} ${y(b)}`).join(""), stroke: paint, "stroke-dasharray": dash }),
      ...points.map(([a, b, words]) => svg("circle", { cx: x(a), cy: y(b), r: 3.5, fill: paint }, svg("title", {}, words)))];
  });
  return el("article", { class: "card" }, el("div", { class: "head" }, el("h3", {}, title)), el("p", { class: "what" }, what),
    el("div", { class: "legend" }, ...ends.map(({ tone, dash, name }) => el("span", {}, chip(tone, dash), name))),
    svg("svg", { class: "plot", viewBox: "0 0 360 180", role: "img", "aria-label": `${title}; the numbers are below` },
      ...yTicks.flatMap(([place, text]) => [svg("path", { stroke: "var(--line)", d: `M40 ${y(place)}H348` }), svg("text", { x: 34, y: y(place) + 4, "text-anchor": "end" }, text)]),
      ...xTicks.map(([place, text]) => svg("text", { x: x(place), y: 170, "text-anchor": "middle" }, text)),
      svg("path", { stroke: "var(--dim)", d: guide ? `M${x(0)} ${y(0)}L${x(1)} ${y(1)}` : "", "stroke-dasharray": "4 4" }), ...marks),
    el("details", { class: "no-print" }, el("summary", {}, "numbers"), numbers));
}

/** Explained variance over the position in the response, in the first and the latest steps of each run. */
function positionCard(runs) {
  const many = runs.length > 1;
  const ends = runs.flatMap((run, r) => run.critic.map((end, e) => {
    const latest = e === run.critic.length - 1;
    return { ...end, tone: many ? r : latest ? 0 : 1, dash: latest ? [] : [5, 4], name: many ? `${run.name}, ${end.name}` : end.name };
  }));
  const names = [...new Set(ends.flatMap((end) => end.positions.map(([name]) => name)))].sort((a, b) => parseInt(a, 10) - parseInt(b, 10));
  if (!names.length) return null;
  const low = ends.flatMap((end) => end.positions.map((row) => row[2])).reduce((a, b) => Math.min(a, b), 0);
  const bottom = [0, -0.5, -1].find((least) => low >= least) ?? -1;
  const [across, up] = [(name) => (names.indexOf(name) + 0.5) / names.length, (value) => (Math.max(bottom, value) - bottom) / (1 - bottom)];
  const points = (end) => end.positions.map(([name, tokens, value]) => [across(name), up(value), `token ${name}: ${digits(value)}, of ${digits(tokens)} tokens`]);
  return plotCard("Explained variance by position", `How much of the returns the critic predicts at the tokens of a response up to the 1st, 2nd, 4th, …; 1 is all.${low < -1 ? " Less than -1 is drawn at -1." : ""}`,
    ends.map((end) => ({ ...end, points: points(end) })), names.map((name) => [across(name), name.split("-").at(-1)]), [-1, -0.5, 0, 0.5, 1].filter((value) => value >= bottom).map((value) => [up(value), value]), false,
    table("criteria", ["token", ...ends.map((end) => end.name)], names.map((name) => [name, ...ends.map((end) => digits(end.positions.find((row) => row[0] === name)?.[2]))])));
}

/** Mean return by predicted value in the latest steps: a dot a tenth of the tokens, ordered by value. */
function calibrationCard(runs) {
  const ends = runs.map((run, tone) => ({ ...run.critic.at(-1), tone, dash: [], name: runs.length > 1 ? `${run.name}, ${run.critic.at(-1).name}` : run.critic.at(-1).name }));
  const all = ends.flatMap((end) => end.tenths.flatMap(([, value, mean]) => [value, mean]));
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const unit = 10 ** Math.floor(Math.log10(most - least || 1)); // ticks at 1, 2 or 5 times a power of ten
  const tick = [0.2, 0.5, 1, 2, 5].map((times) => times * unit).find((size) => most - least <= 3.5 * size);
  const [low, count] = [Math.floor(least / tick) * tick, Math.ceil(most / tick) - Math.floor(least / tick) || 1];
  const place = (value) => (value - low) / (count * tick);
  const points = (end) => end.tenths.map(([tokens, value, mean]) => [place(value), place(mean), `value ${digits(value)}: mean return ${digits(mean)}, of ${digits(tokens)} tokens`]);
  const ticks = Array.from({ length: count + 1 }, (_, i) => [i / count, digits(Number((low + i * tick).toPrecision(6)))]);
  return plotCard("Value against return", "Mean return (upwards) of tokens by predicted value (to the right), a tenth of the tokens at each dot. On the dashed line predictions are right on average.",
    ends.map((end) => ({ ...end, points: points(end) })), ticks, ticks, true,
    table("criteria", ["steps", "tokens", "value", "mean return"], ends.flatMap((end) => end.tenths.map((row) => [end.name, ...row.map(digits)]))));
}

function drawCritic() {
  const runs = DATA.runs.filter((run) => run.critic.length);
  fill($("critic-plots"), ...(runs.length ? [positionCard(runs), calibrationCard(runs)] : []));
}
