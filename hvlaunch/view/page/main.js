// The page of a running job: asks hvlaunch for its view again and again, and draws it.

import { find, make } from "./dom.js";
import { duration } from "./figures.js";
import { sendSignal, stopJob, takeStacks } from "./orders.js";
import { search, showRank } from "./output.js";
import { drawPlots, fitPlots, forgetPlots } from "./plots.js";
import { drawReport } from "./report.js";
import { Series } from "./series.js";
import { Away, Refused, ask, enter } from "./session.js";
import { drawTable, isMany } from "./table.js";
import { drawTimeline } from "./timeline.js";

const AGAIN = 500, PAUSE = 200;
const series = new Series();
let view = null, isFoldedByHand = false;

function drawHead() {
  const name = view.name ? ` (${view.name})` : "";
  const ranks = view.hosts.reduce((sum, host) => sum + host.ranks.length, 0);
  const round = view.round === null ? "" : `, round ${view.round} ${view.round_state}`;
  find("title").textContent = `job ${view.id}${name}`;
  document.title = `${view.phase}: ${view.name ?? view.id}`;
  const workers = view.ending ? "" : `, ${ranks} of ${view.size} workers on ${view.hosts.length} host${view.hosts.length === 1 ? "" : "s"}`;
  find("summary").textContent = `${view.phase}${round}${workers}, ${duration(view.time - view.began)}`;
  find("summary").title = view.command.join(" ");
}

function drawEnd() {
  const ending = view.ending;
  find("report").hidden = !ending;
  if (!ending) return;
  find("report").className = ending.exit_code === 0 ? "well" : "";
  drawReport(find("report-body"), ending, view.report);
}

function drawAll() {
  drawHead();
  drawEnd();
  drawTimeline(view);
  drawTable(view, find("filter").value, find("folded").checked, (rank) => guarded(() => showRank(rank)));
  drawPlots(series, find("by").value);
}

function tell(error) {
  find("link").textContent = error?.message ?? "";
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    if (error instanceof Away) tell(error);
    else throw error;
  }
}

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

async function watch() {
  for (;;) {
    try {
      view = await ask("/view");
      series.add(view);
      if (!isFoldedByHand) find("folded").checked = isMany(view);
      find("main").hidden = find("orders").hidden = false;
      tell(null);
      drawAll();
      if (find("follow").checked) await search();
      if (view.ending) { find("orders").hidden = true; return; }
      await pause(PAUSE);
    } catch (error) {
      tell(error);
      if (error instanceof Refused) return;
      await pause(AGAIN);
    }
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || find("ask").open) return;
  const acts = { "/": () => find("filter").focus(), f: () => find("search").focus(), s: () => takeStacks() };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

function listen() {
  find("filter").addEventListener("input", () => view && drawAll());
  find("folded").addEventListener("change", () => { isFoldedByHand = true; drawAll(); });
  find("by").addEventListener("change", drawAll);
  find("filter-form").addEventListener("submit", (event) => event.preventDefault());
  find("search-form").addEventListener("submit", (event) => { event.preventDefault(); guarded(search); });
  find("take-stacks").addEventListener("click", () => takeStacks());
  find("send-signal").addEventListener("click", () => guarded(sendSignal));
  find("stop").addEventListener("click", () => guarded(stopJob));
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => { fitPlots(); if (view) drawTimeline(view); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetPlots(); if (view) drawAll(); });
}

try {
  listen();
  await enter();
  watch();
  guarded(search);
} catch (error) {
  tell(error);
}
