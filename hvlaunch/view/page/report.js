// The failure report, of the same JSON as --report writes: docs/interfaces/report.md.

import { make } from "./dom.js";
import { duration } from "./figures.js";

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const block = (name, lines) => make("pre", { tabIndex: 0, role: "region", "aria-label": name, textContent: lines.join("\n") });

function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", {}, ...told.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
}

function missing({ what, name, there, lacking }) {
  const has = there.length ? `; it is on ${there.join(", ")}` : "";
  return `${what} ${name}${has}${lacking.length ? `; also missing on ${lacking.join(", ")}` : ""}`;
}

function causeOf(cause) {
  const parts = [facts([
    ["rank", cause.rank], ["host", cause.host], ["end", cause.end], ["kind", cause.kind], ["error", cause.exception],
    ["after", duration(cause.when)],
    ...cause.memory.map((one) => ["memory", `${one.of} had ${gib(one.used)} of ${gib(one.total)} in use`]),
    ["not found", cause.missing && missing(cause.missing)], ["all output", cause.output], ["try", cause.hint],
  ])];
  if (cause.evidence.lines.length) parts.push(make("p", { textContent: `Its ${cause.evidence.kind}:` }), block(`Its ${cause.evidence.kind}`, cause.evidence.lines));
  return parts;
}

function stacksOf({ places, notes, tree }) {
  if (!places.length && !notes.length) return [];
  const lines = places.map((one) => `${one.ranks.match(/[,-]/) ? "ranks" : "rank"} ${one.ranks} in ${one.place}`);
  const all = make("details", {}, make("summary", { textContent: "All stacks" }), block("All stacks", tree));
  return [make("h3", { textContent: "Before they were stopped" }), block("Before they were stopped", [...lines, ...notes]), ...(tree.length ? [all] : [])];
}

function whole(text) {
  return text ? [make("details", {}, make("summary", { textContent: "As the terminal has it" }), block("As the terminal has it", text.trimEnd().split("\n")))] : [];
}

export function drawReport(body, ending, report) {
  const first = report?.text.split("\n")[0].replace(/^hvlaunch: /, "") || ending.cause || "";
  const parts = [make("p", { className: "first", textContent: `Exit code ${ending.exit_code}. ${first}` })];
  if (report) parts.push(...(report.cause ? causeOf(report.cause) : []), ...stacksOf(report.stacks), ...whole(report.text));
  body.replaceChildren(...parts);
}
