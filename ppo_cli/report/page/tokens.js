// A response token by token: one measure as colours, all numbers under the pointer, by arrow keys and in a table.

// Title, unit and scale of each measure: from its lowest to its highest number, from zero, or to both sides of zero.
const MEASURES = {
  reward: ["reward", "", "both"], value: ["value", "", "range"], advantage: ["advantage", "", "both"], return: ["return", "", "range"],
  kl: ["KL to the reference", " nats", "zero"], entropy: ["entropy", " nats", "zero"],
};

function halfFloat(bits) {
  const [sign, power, part] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, (bits & 1023) / 1024];
  if (power === 31) return part ? NaN : sign * Infinity;
  return sign * (power ? (1 + part) * 2 ** (power - 15) : part * 2 ** -14);
}

/** The numbers of a field: base64 of float16, or one number that all tokens share. */
function numbersOf(field, length) {
  const bytes = typeof field === "string" ? atob(field) : null;
  return Array.from({ length }, (_, i) => (bytes ? halfFloat(bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1)) : field));
}

/** The pieces of the text, and the numbers of each; null if the text is not what the tokens wrote. */
function tokensOf({ response, cut, token_details: details }) {
  const characters = [...details.text ?? response]; // of an episode all turns and replies
  let end = 0;
  const pieces = details.lengths.split(" ").map((length) => characters.slice(end, end += Number(length)).join(""));
  if (end !== characters.length && !cut?.response) return null;
  const names = Object.keys(MEASURES).filter((name) => details[name] != null);
  const numbers = Object.fromEntries(names.map((name) => [name, numbersOf(details[name], pieces.length)]));
  const replies = new Set((details.environment || []).flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i)));
  return { pieces, names, numbers, replies, masked: new Set((details.masked || []).filter((i) => !replies.has(i))) };
}

/** The colour of a place on a scale, 0 to 1: orange and blue to both sides of zero, else more and more green. */
function tokenColour(place, kind) {
  const [name, strength] = kind === "both" ? [place < 0.5 ? "--c3" : "--c0", Math.abs(2 * place - 1)] : ["--c2", place];
  return `color-mix(in srgb, var(${name}) ${Math.round(60 * (strength || 0))}%, transparent)`;
}

const pieceText = (piece) => (piece ? JSON.stringify(piece) : "no text: part of a character, or the end");

/** The text with a measure behind each token, its scale, and the numbers of the token that is pointed at. */
function colouredTokens({ pieces, names, numbers, replies, masked }, name) {
  const [title, unit, kind] = MEASURES[name];
  const sorted = numbers[name].filter((value, i) => Number.isFinite(value) && !replies.has(i)).sort((a, b) => a - b);
  const [least, most] = [sorted[0] ?? 0, sorted.at(-1) ?? 0];
  const [low, high] = kind === "both" ? [-Math.max(-least, most), Math.max(-least, most)] : [kind === "zero" ? 0 : least, most];
  const placeOf = (value) => (high > low ? (value - low) / (high - low) : kind === "both" ? 0.5 : 0);
  const spans = pieces.map((piece, i) => el("span", {
    "data-token": i, class: [masked.has(i) && "masked", replies.has(i) && "reply", !piece && "empty", piece.includes("\n") && "newline"].filter(Boolean).join(" ") || null,
    style: masked.has(i) || replies.has(i) ? null : `background: ${tokenColour(placeOf(numbers[name][i]), kind)}`,
  }, textOf(piece)));
  const words = el("p", { class: "dim no-print", role: "status" }, "Point at a token, tap it, or press the arrow keys.");
  let current = -1;
  const show = (i) => {
    spans[current]?.removeAttribute("aria-current");
    current = Math.min(spans.length - 1, Math.max(0, i));
    spans[current].setAttribute("aria-current", "true");
    const values = names.map((each) => `${MEASURES[each][0]} ${digits(numbers[each][current])}${MEASURES[each][1]}`);
    const said = replies.has(current) ? "of the environment: not in the losses" : `${values.join(" · ")}${masked.has(current) ? " · masked: not in the losses" : ""}`;
    fill(words, `token ${current + 1} of ${spans.length}: `, textOf(pieceText(pieces[current])), ` · ${said}`);
  };
  const point = ({ target }) => { if (target.closest("[data-token]")) show(Number(target.closest("[data-token]").dataset.token)); };
  const move = (event) => {
    if (!["ArrowRight", "ArrowLeft"].includes(event.key)) return;
    event.preventDefault();
    show(current + (event.key === "ArrowRight" ? 1 : -1));
    spans[current].scrollIntoView({ block: "nearest" });
  };
  const list = ({ target }) => { // a row a token, made when it is opened
    if (target.children.length === 1) target.append(table("", ["token", "text", ...names.map((each) => MEASURES[each].slice(0, 2).join(""))], pieces.map((piece, i) =>
      [`${i + 1}${masked.has(i) ? " masked" : ""}`, textOf(pieceText(piece)), ...names.map((each) => (replies.has(i) ? "–" : digits(numbers[each][i])))])));
  };
  return [
    el("p", { class: "dim scale" }, `${title}: ${digits(low)}`, el("span", { style: `background: linear-gradient(to right, ${[0, 0.5, 1].map((place) => tokenColour(place, kind))})` }),
      `${digits(high)}${unit}${masked.size ? " · hatched: masked, not in the losses" : ""}${replies.size ? " · grey: of the environment" : ""}`),
    words, el("div", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": `response, coloured by ${title}; arrow keys read its tokens`,
      onpointerover: point, onclick: point, onkeydown: move }, ...spans),
    el("details", { class: "no-print", ontoggle: list }, el("summary", {}, "the tokens as a table")),
  ];
}

/** A response, with buttons that colour its tokens if they were kept; the choice stays in the address. */
function responseView(line) {
  const ofStep = indexes[now.run].rows.filter((row) => row.step === line.step && row.split === line.split);
  const kept = ofStep.filter((row) => row.detailed).length;
  const tokens = line.token_details ? tokensOf(line) : null;
  const list = () => { now.query = { from_step: line.step, to_step: line.step, why: "detailed" }; load(); };
  const note = line.token_details && !tokens ? "Its tokens are not shown: a part of its text is hidden as a secret."
    : kept ? `${kept} of the ${ofStep.length} responses of this step are kept token by token${tokens ? "" : ", this one is not"}. `
    : indexes[now.run].rows.some((row) => row.detailed) ? ""
    : "This run kept no response token by token. With trainer.token_details=8 it keeps up to 8 of each step.";
  const view = el("div", { id: "tokens" });
  const draw = (name) => {
    const press = (value) => { address.set({ tokens: value }); draw(value); view.querySelector("[aria-pressed=true]").focus(); };
    const button = (value, title) => el("button", { type: "button", "aria-pressed": String(name === value), onclick: () => press(value) }, title);
    fill(view, tokens && el("div", { class: "bar no-print", role: "group", "aria-label": "colour of the tokens" }, el("span", { class: "dim" }, "colour"), button("", "none"), ...tokens.names.map((each) => button(each, MEASURES[each][0]))),
    ...(name ? colouredTokens(tokens, name) : line.turns ? [] : [response(line.response || "", line.thoughts)]),
    note && el("p", { class: "dim no-print" }, note, kept && !tokens ? el("button", { type: "button", onclick: list }, "list them") : null));
  };
  draw(tokens?.names.includes(address.get("tokens")) ? address.get("tokens") : "");
  return view;
}
