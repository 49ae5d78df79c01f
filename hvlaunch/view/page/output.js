// The job's output, as far as it is kept: the newest lines, or those with a text in them.

import { find, make } from "./dom.js";
import { unfolded } from "./figures.js";
import { ask } from "./session.js";

const COUNT = 400;

function marked(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), make("mark", { textContent: text.slice(at, at + wanted.length) }), text.slice(at + wanted.length)];
}

export async function search() {
  const text = find("search").value, ranks = find("search-ranks").value.trim();
  const box = find("lines");
  if (!find("search-ranks").checkValidity()) { find("search-note").textContent = "ranks are such as 0,8-15"; return; }
  const query = new URLSearchParams({ text, count: COUNT });
  if (ranks) query.set("ranks", unfolded(ranks).join(","));
  const { lines } = await ask(`/output?${query}`);
  const wasAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.replaceChildren(...lines.map((line) => make("div", { className: line.stream },
    make("span", { className: "who", textContent: line.rank === null ? "hvlaunch" : `[${line.rank}]` }),
    make("span", { className: "text" }, ...marked(line.text, text)))));
  if (wasAtEnd) box.scrollTop = box.scrollHeight;
  const count = lines.length === COUNT ? `the newest ${COUNT} lines` : `${lines.length} line${lines.length === 1 ? "" : "s"}`;
  find("search-note").textContent = text ? `${count} with “${text}”` : count;
}

export function showRank(rank) {
  find("search").value = "";
  find("search-ranks").value = `${rank}`;
  find("output").scrollIntoView({ behavior: "smooth" });
  find("lines").focus({ preventScroll: true });
  return search();
}
