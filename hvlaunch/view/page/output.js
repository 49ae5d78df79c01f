// The job's output, as far as it is kept: the newest lines, or those with a text in them.

import { find, make } from "./dom.js";
import { ask } from "./session.js";

const COUNT = 400;

function marked(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), make("mark", { textContent: text.slice(at, at + wanted.length) }), text.slice(at + wanted.length)];
}

const isAtEnd = (box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 8;

// Show the newest lines of the ranks; null: of all. While the reader scrolls or marks text, `isFollowing` changes nothing.
export async function showOutput(ranks, isFollowing) {
  const box = find("lines"), isAway = !isAtEnd(box) || (!getSelection().isCollapsed && box.contains(getSelection().anchorNode));
  find("follow").hidden = !isFollowing || !isAway;
  if (isFollowing && isAway) return;
  const text = find("search").value;
  const query = new URLSearchParams({ text, count: COUNT });
  if (ranks) query.set("ranks", ranks.join(","));
  const { lines } = ranks?.length === 0 ? { lines: [] } : await ask(`/output?${query}`);
  box.replaceChildren(...lines.map((line) => make("div", { className: line.stream },
    make("span", { className: "who", textContent: line.rank === null ? "hvlaunch" : `[${line.rank}]` }),
    make("span", { className: "text" }, ...marked(line.text, text)))));
  box.scrollTop = box.scrollHeight;
  const count = lines.length === COUNT ? `the newest ${COUNT} lines` : `${lines.length} line${lines.length === 1 ? "" : "s"}`;
  find("search-note").textContent = text ? `${count} with “${text}”` : count;
}

export function follow() {
  getSelection().removeAllRanges();
  find("lines").scrollTop = find("lines").scrollHeight;
  find("follow").hidden = true;
}
