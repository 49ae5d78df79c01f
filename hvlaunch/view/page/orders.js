// What one can ask the job for: stacks, a signal to all workers, its end.

import { find } from "./dom.js";
import { ask } from "./session.js";

function confirmed(text, withInput) {
  find("ask-text").textContent = text;
  find("ask-label").hidden = !withInput;
  const dialog = find("ask");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function say(text, lines = []) {
  find("stacks").hidden = false;
  find("stacks-note").textContent = text;
  find("stacks-body").textContent = lines.join("\n");
  find("stacks-body").hidden = !lines.length;
  find("stacks").scrollIntoView();
}

async function order(path, body) {
  try {
    return await ask(path, body);
  } catch (error) {
    say(`${path.slice(1)}: ${error.message}`);
    return null;
  }
}

export async function takeStacks() {
  say("asking all ranks …");
  const stacks = await order("/stacks", { ranks: null, native: false });
  if (stacks) say(`${stacks.summary} (${new Date().toLocaleTimeString([], { hour12: false })})`, stacks.lines);
}

export async function sendSignal() {
  if (await confirmed("Send a signal to all workers?", true)) await order("/signal", { signal: find("ask-input").value });
}

export async function stopJob() {
  if (await confirmed("Stop the job? Its workers get SIGTERM, and what they do then is lost with them.", false)) await order("/stop", { kill: false });
}
