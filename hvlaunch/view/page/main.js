// The page of a running job: asks hvlaunch for its view again and again, and draws it.

import { find } from "./dom.js";
import { clock, duration } from "./figures.js";
import { drawMap, drawTable } from "./hosts.js";
import { sendSignal, stopJob, takeStacks } from "./orders.js";
import { follow, showOutput } from "./output.js";
import { drawPlots, fitPlots, forgetPlots } from "./plots.js";
import { drawReport } from "./report.js";
import { Series } from "./series.js";
import { Away, Refused, ask, enter } from "./session.js";
import { drawTimeline } from "./timeline.js";

const AGAIN = 500, PAUSE = 200, SILENT = 6;
const series = new Series();
let view = null, newsAt = 0, problem = null;
let chosen = null; // the host and perhaps the rank that the details are of

// The driver's verdict; the page's own where it hears nothing from the driver.
function verdictNow() {
  if (problem instanceof Refused) return { tone: "lost", text: "This page was not let in", detail: problem.message };
  const seconds = (performance.now() - newsAt) / 1000;
  if (!view) return problem && { tone: "lost", text: "No connection to hvlaunch", detail: problem.message };
  if (view.ending || (!problem && seconds < SILENT)) return view.verdict;
  const why = problem?.message ?? "the driver does not answer";
  return { tone: "lost", text: `Connection lost: no news for ${duration(seconds)}`, detail: `${why}; the page shows the job at ${clock(view.time)}` };
}

function drawVerdict() {
  const verdict = verdictNow();
  if (!verdict) return;
  find("verdict").className = verdict.tone;
  find("main").classList.toggle("stale", verdict.tone === "lost");
  find("verdict-text").textContent = verdict.text;
  find("verdict-detail").textContent = verdict.detail;
  document.title = verdict.text;
  // A screen reader hears a new verdict, and not each second of it.
  const words = verdict.text.replace(/[\d.]+ (s|min|h)\b/g, "");
  if (find("announced").textContent !== words) find("announced").textContent = words;
}

function drawSummary() {
  const ranks = view.hosts.reduce((sum, host) => sum + host.ranks.length, 0);
  const round = view.round === null || view.ending ? [] : [`round ${view.round} ${view.round_state}`];
  const workers = `${ranks} of ${view.size} workers on ${view.hosts.length} host${view.hosts.length === 1 ? "" : "s"}`;
  find("summary").textContent = [view.name ?? `job ${view.id}`, view.phase, ...round, ...(view.ending ? [] : [workers]), duration(view.time - view.began)].join(" · ");
  find("summary").title = `job ${view.id}: ${view.command.join(" ")}`;
}

const chosenRanks = () =>
  !chosen ? null : chosen.rank !== undefined ? [chosen.rank] : (view.hosts.find((host) => host.host === chosen.host)?.ranks ?? []).map((row) => row.rank);

function drawDetails() {
  find("details-head").textContent = !chosen ? "All ranks" : chosen.rank === undefined ? `Host ${chosen.host}` : `Rank ${chosen.rank} on host ${chosen.host}`;
  find("show-all").hidden = !chosen;
  drawMap(view, chosen, choose);
  drawTable(view, find("filter").value, chosen, choose);
}

function drawAll() {
  drawVerdict();
  drawSummary();
  find("report").hidden = !view.ending;
  find("orders").hidden = Boolean(view.ending);
  if (view.ending) drawReport(find("report-body"), view.ending, view.report);
  drawTimeline(view);
  drawDetails();
  if (find("use").open) drawPlots(series, find("by").value);
}

async function search() {
  try {
    await showOutput(chosenRanks(), false);
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    find("search-note").textContent = error.message;
  }
}

function choose(next) {
  chosen = next;
  drawDetails();
  if (next) find("details").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion)").matches ? "auto" : "smooth" });
  return search();
}

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

async function watch() {
  while (!view?.ending) {
    try {
      view = await ask("/view");
      newsAt = performance.now();
      problem = null;
      series.add(view);
      find("main").hidden = false;
      drawAll();
      await showOutput(chosenRanks(), true);
      await pause(PAUSE);
    } catch (error) {
      problem = error;
      drawVerdict();
      if (error instanceof Refused) return;
      await pause(AGAIN);
    }
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || find("ask").open) return;
  const acts = { "/": () => find("filter").focus(), f: () => find("search").focus(), s: takeStacks };
  if (view && acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

function listen() {
  find("filter").addEventListener("input", drawDetails);
  find("filter-form").addEventListener("submit", (event) => event.preventDefault());
  find("show-all").addEventListener("click", () => choose(null));
  find("search-form").addEventListener("submit", (event) => { event.preventDefault(); search(); });
  find("follow").addEventListener("click", follow);
  find("use").addEventListener("toggle", drawAll);
  find("by").addEventListener("change", drawAll);
  find("take-stacks").addEventListener("click", takeStacks);
  find("send-signal").addEventListener("click", sendSignal);
  find("stop").addEventListener("click", stopJob);
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => { fitPlots(); if (view) drawTimeline(view); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetPlots(); if (view) drawAll(); });
  setInterval(drawVerdict, 1000);
}

try {
  listen();
  await enter();
  watch();
} catch (error) {
  problem = error;
  drawVerdict();
}
