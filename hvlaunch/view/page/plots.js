// Draws the series with uPlot (see uplot.LICENSE.txt).

import { find, make } from "./dom.js";
import { size } from "./figures.js";
import { QUANTITIES } from "./series.js";

const HEIGHT = 150;
const COLORS = ["#3b82c4", "#d9822b", "#3a9d5d", "#c2476b", "#8a63d2", "#1a9ba1", "#b0902a", "#7a8594", "#e06c9f", "#5b8c2a", "#4f6bd8", "#a8603a"];
const plots = new Map();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(quantity, labels, width) {
  const axis = { stroke: color("--dim"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid") } };
  const value = (_, raw) => (raw === null ? "-" : quantity.unit === "bytes" ? size(raw) : Number(raw.toPrecision(3)));
  const values = (_, ticks) => ticks.map((tick) => (quantity.unit === "bytes" ? size(tick) : tick));
  return {
    width, height: HEIGHT, legend: { live: true }, cursor: { sync: { key: "time" } },
    scales: { y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [axis, { ...axis, size: 52, values }],
    series: [{}, ...labels.map((label, at) => ({ label, stroke: COLORS[at % COLORS.length], width: 1.5, value, points: { show: false } }))],
  };
}

export function drawPlots(series, by) {
  const box = find("plots");
  for (const quantity of QUANTITIES) {
    const found = series.times.length > 1 ? series.lines(by, quantity) : null;
    const known = plots.get(quantity.id);
    const key = found && `${by} ${found.labels}`;
    if (known && known.key !== key) { known.plot.destroy(); known.figure.remove(); plots.delete(quantity.id); }
    if (!found) continue;
    const data = [series.times, ...found.values];
    if (plots.has(quantity.id)) { plots.get(quantity.id).plot.setData(data); continue; }
    const figure = make("figure", { id: `plot-${quantity.id}` }, make("figcaption", { textContent: quantity.title }));
    const after = QUANTITIES.slice(QUANTITIES.indexOf(quantity) + 1).map((one) => plots.get(one.id)?.figure).find(Boolean);
    box.insertBefore(figure, after ?? null);
    plots.set(quantity.id, { key, figure, plot: new uPlot(options(quantity, found.labels, figure.clientWidth), data, figure) });
  }
}

export function forgetPlots() {
  for (const { plot, figure } of plots.values()) { plot.destroy(); figure.remove(); }
  plots.clear();
}

export function fitPlots() {
  for (const { plot, figure } of plots.values()) plot.setSize({ width: figure.clientWidth, height: HEIGHT });
}
