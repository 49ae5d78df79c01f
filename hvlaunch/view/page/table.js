// Hosts with their ranks, the worst first, as the driver has ordered them.

import { find, make } from "./dom.js";
import { folded, share, size, steps } from "./figures.js";

const FEW = 64; // ranks that are shown one by one at first
const COLUMNS = ["Host", "Rank", "State", "Step", "CPU", "Memory", "GPU", "GPU memory", "Last line"];
const NUMBERS = new Set([4, 5, 6, 7]);
const WAITING = new Set(["starting", "waiting", "dismissed", "connecting", "parting", "closing"]);

const tone = (state) => (state === "working" || state === "ready" ? "state-good" : WAITING.has(state) ? "state-wait" : "state-bad");

function states(host) {
  const counts = new Map();
  for (const row of host.ranks) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
  const words = [...counts].map(([state, count]) => (counts.size === 1 ? state : `${count} ${state}`));
  return host.state === "ready" && words.length ? words.join(", ") : [host.state, ...words].join(", ");
}

function hostCells(host) {
  const known = host.ranks.map((row) => row.step).filter((step) => step !== null);
  const least = Math.min(...known), most = Math.max(...known);
  const slow = host.ranks.find((row) => row.is_slowest);
  const notes = [...host.problems, ...(slow ? [`slowest: rank ${slow.rank}`] : [])];
  const memory = host.memory_used === null ? "-" : `${size(host.memory_used)} ${share(host.memory_used, host.memory_total)}`;
  return [host.host, host.ranks.length ? folded(host.ranks.map((row) => row.rank)) : "-", states(host),
    known.length ? (least === most ? `${least}` : `${least}-${most}`) : "-", share(host.cpu, host.cores), memory,
    share(host.gpu), size(host.gpu_memory_used), notes.join("; ")];
}

function rankCells(row, onRank) {
  const open = make("button", { type: "button", textContent: `${row.rank}`, title: `the output of rank ${row.rank}`, onclick: () => onRank(row.rank) });
  const who = make("span", {}, open, ...(row.is_slowest ? [make("span", { className: "mark", textContent: " slowest" })] : []));
  const state = row.activity?.startsWith("stopped") ? row.activity : row.state;
  const silent = row.silent !== null && row.silent >= 60 ? `(silent for ${Math.round(row.silent)} s) ` : "";
  return ["", who, state, steps(row), share(row.cpu), size(row.memory), share(row.gpu), size(row.gpu_memory), silent + row.line];
}

function line(kind, cells, state, shown) {
  const row = make("tr", { className: kind });
  for (const at of shown) {
    const cell = make("td", { className: at === 8 ? "line" : NUMBERS.has(at) ? "number" : at === 2 ? tone(state) : "" }, cells[at]);
    if (at === 8) cell.title = cells[at];
    row.append(cell);
  }
  return row;
}

export function drawTable(view, filter, isFolded, onRank) {
  const wanted = filter.trim().toLowerCase();
  const fits = (...words) => !wanted || words.join(" ").toLowerCase().includes(wanted);
  const rows = [];
  for (const host of view.hosts) {
    const isWhole = fits(host.host, host.state);
    const ranks = host.ranks.filter((row) => isWhole || fits(`rank ${row.rank}`, row.state, row.activity ?? "", row.line, row.is_slowest ? "slowest" : ""));
    if (!isWhole && !ranks.length) continue;
    rows.push({ kind: "host", cells: hostCells(host), state: host.state === "ready" ? host.ranks[0]?.state ?? "ready" : host.state });
    if (!isFolded || wanted) for (const row of ranks) rows.push({ kind: "rank", cells: rankCells(row, onRank), state: row.activity?.startsWith("stopped") ? "stopped" : row.state });
  }
  const isKnown = (at) => at < 3 || rows.some((row) => row.cells[at] !== "-" && row.cells[at] !== "");
  const shown = COLUMNS.map((_, at) => at).filter(isKnown);
  const head = make("tr", {}, ...shown.map((at) => make("th", { scope: "col", className: NUMBERS.has(at) ? "number" : "", textContent: COLUMNS[at] })));
  const focused = document.activeElement?.closest("#table") ? document.activeElement.textContent : null;
  find("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows.map((row) => line(row.kind, row.cells, row.state, shown))));
  if (focused !== null) [...find("table").querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
}

export const isMany = (view) => view.hosts.reduce((sum, host) => sum + host.ranks.length, 0) > FEW;
