// The hosts as a heat map, and the table of those that the reader chose. The driver orders both, the worst first.

import { find, make, refill } from "./dom.js";
import { folded, share, size, steps } from "./figures.js";

const FEW = 16; // ranks that the table shows before the reader chooses a host
const NUMBERED = 512; // ranks that have their numbers in the map
const COLUMNS = ["Host", "Rank", "State", "Step", "CPU", "Memory", "GPU", "GPU memory", "Last line"];
const NUMBERS = new Set([4, 5, 6, 7]), LINE = 8;
const WORDS = { away: "connection lost", excluded: "lost or excluded", none: "not in use" };
const GOOD = new Set(["working", "ready", "ended", "none"]), BAD = new Set(["hanging", "excluded"]);

const stateOf = (row) => (row.activity?.startsWith("stopped") ? row.activity : row.state);
const toneOf = (state) => (GOOD.has(state) ? "good" : BAD.has(state) || state.startsWith("stopped") ? "bad" : "wait");

// The tone of a host is that of its worst rank, unless its own is worse, or its rank made the job fail.
function worstOf(host, view) {
  const tones = [host.state, ...host.ranks.map(stateOf)].map(toneOf);
  return view.ending?.host === host.host ? "bad" : ["bad", "wait"].find((tone) => tones.includes(tone)) ?? "good";
}

function heat(row) {
  const tone = toneOf(stateOf(row)), busy = row.gpu ?? row.cpu;
  return tone !== "good" ? tone : `heat-${busy === null ? 2 : busy < 0.1 ? 0 : busy < 0.4 ? 1 : busy < 0.75 ? 2 : 3}`;
}

// "3 working, 1 hanging"; the state of the host first unless it is ready and has ranks.
function states(host) {
  const counts = new Map();
  for (const row of host.ranks) counts.set(stateOf(row), (counts.get(stateOf(row)) ?? 0) + 1);
  const words = [...counts].map(([state, count]) => (counts.size === 1 ? state : `${count} ${state}`));
  return (host.state === "ready" && words.length ? words : [WORDS[host.state] ?? host.state, ...words]).join(", ");
}

function notes(host, view) {
  const slow = host.ranks.find((row) => row.is_slowest);
  const last = host.state === "ready" ? null : view.moments.findLast((moment) => moment.kind === "failure" && moment.host === host.host);
  return [...(last ? [last.text] : []), ...host.problems, ...(slow ? [`slowest: rank ${slow.rank}`] : []),
    ...(host.commits ? [`commits: ${size(host.commits)}`] : [])].join("; ");
}

function tile(view, host, isNumbered, chosen, onChoose) {
  const cells = [...host.ranks].sort((one, other) => one.rank - other.rank).map((row) => {
    const cell = make("i", { className: heat(row), textContent: isNumbered ? row.rank : "", title: `rank ${row.rank}: ${stateOf(row)}` });
    cell.onclick = (event) => { event.stopPropagation(); onChoose({ host: host.host, rank: row.rank }); };
    return cell;
  });
  const use = host.gpu !== null ? `GPU ${share(host.gpu)}` : host.cpu !== null ? `CPU ${share(host.cpu, host.cores)}` : "";
  const text = [notes(host, view) && host.state !== "ready" ? "" : states(host), host.state === "ready" ? use : "", notes(host, view)].filter(Boolean).join(" · ");
  const ranks = host.ranks.length ? `, ranks ${folded(host.ranks.map((row) => row.rank))}` : "";
  return make("button", {
    type: "button", "data-key": host.host, className: `tile ${worstOf(host, view)}`, onclick: () => onChoose({ host: host.host }),
    "aria-label": `host ${host.host}${ranks}: ${text}`, "aria-pressed": `${chosen?.host === host.host}`,
  }, make("b", { textContent: host.host }), make("span", { className: "cells" }, ...cells), make("small", { textContent: text }));
}

export function drawMap(view, chosen, onChoose) {
  const count = view.hosts.reduce((sum, host) => sum + host.ranks.length, 0);
  const isMany = count > NUMBERED; // then the worst come first, and each stays small: the reader must see them without scrolling
  const hosts = isMany ? view.hosts : [...view.hosts].sort((one, other) => one.host.localeCompare(other.host, undefined, { numeric: true }));
  find("map").className = isMany ? "many" : "";
  refill(find("map"), ...hosts.map((host) => tile(view, host, !isMany, chosen, onChoose)));
}

function hostCells(host, view) {
  const told = host.ranks.map((row) => row.step).filter((step) => step !== null);
  const least = Math.min(...told), most = Math.max(...told);
  const memory = host.memory_used === null ? "-" : `${size(host.memory_used)} ${share(host.memory_used, host.memory_total)}`;
  return [host.host, host.ranks.length ? folded(host.ranks.map((row) => row.rank)) : "-", states(host),
    told.length ? (least === most ? `${least}` : `${least}-${most}`) : "-", share(host.cpu, host.cores), memory,
    share(host.gpu), size(host.gpu_memory_used), notes(host, view)];
}

function rankCells(host, row, onChoose) {
  const open = make("button", { type: "button", "data-key": `${row.rank}`, textContent: `${row.rank}`, "aria-label": `rank ${row.rank}: its output`, onclick: () => onChoose({ host: host.host, rank: row.rank }) });
  const mark = row.is_slowest ? [make("span", { className: "mark", textContent: " slowest" })] : [];
  const silent = row.silent !== null && row.silent >= 60 ? `(silent for ${Math.round(row.silent)} s) ` : "";
  return ["", make("span", {}, open, ...mark), stateOf(row), steps(row), share(row.cpu), size(row.memory), share(row.gpu), size(row.gpu_memory), silent + row.line];
}

export function drawTable(view, filter, chosen, onChoose) {
  const words = filter.trim().toLowerCase();
  const fits = (...texts) => !words || texts.join(" ").toLowerCase().includes(words);
  const isFolded = !words && !chosen && view.hosts.reduce((sum, host) => sum + host.ranks.length, 0) > FEW;
  const rows = [];
  for (const host of view.hosts) {
    if (chosen && chosen.host !== host.host) continue;
    const isWhole = fits(host.host, states(host));
    const ranks = host.ranks.filter((row) => (chosen?.rank ?? row.rank) === row.rank
      && (isWhole || fits(`rank ${row.rank}`, stateOf(row), row.line, row.is_slowest ? "slowest" : "")));
    if (!isWhole && !ranks.length) continue;
    rows.push({ kind: "host", tone: worstOf(host, view), cells: hostCells(host, view) });
    if (!isFolded) rows.push(...ranks.map((row) => ({ kind: "rank", tone: toneOf(stateOf(row)), cells: rankCells(host, row, onChoose) })));
  }
  const shown = COLUMNS.map((_, at) => at).filter((at) => at < 3 || rows.some(({ cells }) => cells[at] !== "-" && cells[at] !== ""));
  const classOf = (at, tone) => (at === LINE ? "line" : NUMBERS.has(at) ? "number" : at === 2 ? `state ${tone}` : "");
  const head = make("tr", {}, ...shown.map((at) => make("th", { scope: "col", className: classOf(at, ""), textContent: COLUMNS[at] })));
  const body = rows.map(({ kind, tone, cells }) => make("tr", { className: kind }, ...shown.map((at) => {
    const cell = make("td", { className: classOf(at, tone) }, cells[at]);
    if (at > 2 && cells[at] !== "-") cell.dataset.name = COLUMNS[at]; // a telephone shows it beside the value
    return cell;
  })));
  refill(find("table"), make("thead", {}, head), make("tbody", {}, ...body));
}
