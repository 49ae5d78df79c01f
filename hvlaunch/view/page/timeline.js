// Rounds and hosts as a time line, and in words what has happened, with the cause.

import { draw, find, make } from "./dom.js";
import { clock } from "./figures.js";

const ROW = 18, LEFT = 110, FOOT = 18, MOST_ROWS = 24;

export function drawTimeline(view) {
  const box = find("timeline");
  box.hidden = view.rounds.length < 2; // a bar for the only round has no news
  const end = view.time, begin = Math.min(view.began, ...view.rounds.map((round) => round.begin));
  const width = Math.max(280, box.clientWidth), x = (time) => LEFT + ((time - begin) / Math.max(1, end - begin)) * (width - LEFT - 4);
  let names = [...new Set([...view.rounds.flatMap((round) => Object.keys(round.hosts)), ...view.hosts.map((host) => host.host)])].sort();
  const isFolded = names.length > MOST_ROWS;
  if (isFolded) names = [`${names.length} hosts`];
  const height = names.length * ROW + FOOT;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${view.rounds.length} rounds on ${names.length} hosts; the list below has all in words` });
  names.forEach((name, row) => svg.append(draw("text", { class: "label", x: 0, y: row * ROW + 13 }, name.length > 16 ? `${name.slice(0, 15)}…` : name)));
  for (const round of view.rounds) {
    const left = x(round.begin), right = Math.max(left + 2, x(round.end ?? end));
    names.forEach((name, row) => {
      if (!isFolded && !(name in round.hosts)) return;
      const bar = draw("rect", { class: `round-${round.number % 2}`, x: left, y: row * ROW + 2, width: right - left, height: ROW - 4, rx: 3 },
        draw("title", {}, `round ${round.number}${round.cause ? `, ended: ${round.cause}` : ""}`));
      svg.append(bar);
      if (right - left > 24 && view.round !== null) svg.append(draw("text", { class: "label", x: left + 5, y: row * ROW + 13 }, `${round.number}`));
    });
  }
  for (const moment of view.moments) {
    if (moment.kind !== "failure") continue;
    const row = names.indexOf(moment.host), at = x(moment.time);
    const [top, bottom] = row < 0 ? [0, names.length * ROW] : [row * ROW, (row + 1) * ROW];
    svg.append(draw("line", { class: "failure", x1: at, x2: at, y1: top, y2: bottom }, draw("title", {}, moment.text)));
  }
  const y = names.length * ROW;
  svg.append(draw("line", { class: "axis", x1: LEFT, x2: width, y1: y, y2: y }),
    draw("text", { x: LEFT, y: y + 13 }, clock(begin)), draw("text", { x: width - 2, y: y + 13, "text-anchor": "end" }, clock(end)));
  box.replaceChildren(svg);
  find("moments").replaceChildren(...view.moments.toReversed().map((moment) =>
    make("li", { className: moment.kind }, make("time", { textContent: clock(moment.time) }), make("span", { textContent: moment.text }))));
}
