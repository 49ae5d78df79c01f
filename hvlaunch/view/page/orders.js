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

function say(text) {
  find("stacks-note").textContent = text;
}

export async function takeStacks() {
  say("asking all ranks …");
  find("stacks").scrollIntoView({ behavior: "smooth" });
  try {
    const found = await ask("/stacks", { ranks: null, native: false });
    say(`${found.summary ?? ""} (${new Date().toLocaleTimeString([], { hour12: false })})`);
    find("stacks-body").textContent = (found.lines ?? []).join("\n");
    find("stacks-body").hidden = false;
  } catch (error) {
    say(`no stacks: ${error.message}`);
  }
}

export async function sendSignal() {
  if (await confirmed("Send a signal to all workers?", true)) await ask("/signal", { signal: find("ask-input").value });
}

export async function stopJob() {
  if (await confirmed("Stop the job? Its workers get SIGTERM, and what they do then is lost with them.", false)) await ask("/stop", { kill: false });
}
