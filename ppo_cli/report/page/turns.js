// An episode as a conversation: its turns with thoughts, calls of tools and replies; long parts are folded.

const thousands = (count) => count.toLocaleString("en-US");
const folded = (title, text, attributes = {}) => el("details", attributes, el("summary", {}, textOf(title)), box(text));
const contentOf = (message) => (message.content == null ? "" : asText(message.content));

function callText(call) {
  const { name, arguments: values } = call.function || call;
  const shown = values && typeof values === "object" ? Object.entries(values).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ") : values ?? "";
  return `${name}(${shown})`;
}

/** A reply: a user's is shown, a tool's is folded behind its first line. */
function replyView(reply, open) {
  const text = contentOf(reply);
  if (reply.role !== "tool") return el("div", {}, el("p", { class: "dim" }, textOf(String(reply.role))), box(text));
  const first = oneLine(text).slice(0, 80);
  return folded(`${reply.name || "tool"}, ${thousands(text.length)} characters: ${first}${first.length < text.length ? " …" : ""}`, text, { open });
}

function turnView(turn, number) {
  const { message, replies = [], rewards = {}, tools = [], error } = turn;
  const facts = [`turn ${number}`, ...Object.entries(rewards).map(([name, value]) => `${name} ${digits(value)}`),
    ...tools.map(([name, seconds]) => `${name} ${digits(seconds)} s`), ...(turn.cut ? ["cut off"] : [])];
  const thought = message.reasoning_content;
  const calls = (message.tool_calls || []).map((call) => el("div", { class: "text call", dir: "auto" }, textOf(callText(call))));
  const content = contentOf(message);
  return el("div", { class: error ? "turn wrong" : "turn" }, el("h3", {}, textOf(facts.join(" · "))),
    thought ? folded(`thinking, ${thousands(thought.length)} characters`, thought) : null,
    content || !calls.length ? box(content) : null, ...calls,
    error ? el("p", { class: "failed" }, textOf(`tool error: ${error}`)) : null,
    ...replies.map((reply) => replyView(reply, Boolean(error))));
}

/** What happened in all turns, the messages before them, and the turns. */
function episodeView(line) {
  const { turns, opening = [], ended, cut } = line;
  const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
  const times = [...Map.groupBy(turns.flatMap(({ tools = [] }) => tools), ([name]) => name)]
    .map(([name, calls]) => `${name} ${digits(calls.reduce((sum, [, seconds]) => sum + seconds, 0))} s (${counted(calls.length, "call")})`);
  const errors = turns.filter((turn) => turn.error).length;
  const facts = [counted(turns.length, "turn"), ...(ended ? [`ended by the limit of ${ended}`] : []), ...times];
  return [
    el("p", {}, textOf(facts.join(" · ")), errors ? el("span", { class: "failed" }, ` · ${counted(errors, "tool error")}`) : null),
    opening.length > 1 ? el("details", {}, el("summary", {}, `the ${opening.length} messages before the first turn`),
      ...opening.map((message) => el("div", {}, el("p", { class: "dim" }, textOf(String(message.role))), box(contentOf(message))))) : null,
    ...turns.map((turn, i) => turnView(turn, i + 1)),
    cut?.turns ? el("p", { class: "dim" }, `${counted(cut.turns, "text")} cut here `,
      DATA.live ? el("button", { type: "button", onclick: () => read(line.id, true) }, "show all") : "") : null,
  ].filter(Boolean);
}
