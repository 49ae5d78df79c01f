// Who we are to hvlaunch: the token in the address is good once; from then on a cookie, and a key that is this page's alone.

const KEY = "hvlaunch-key";

export class Refused extends Error {}
export class Away extends Error {}

export async function enter() {
  const token = location.hash.slice(1);
  if (!/^[0-9a-f]{32}$/.test(token)) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  if (answer.ok) localStorage.setItem(KEY, (await answer.json()).key);
  else if (!localStorage.getItem(KEY)) throw new Refused((await answer.text()).trim());
}

// Data from hvlaunch. Raises Away where it does not answer, Refused where it doesn't know us.
export async function ask(path, body) {
  const options = { headers: { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` }, cache: "no-store" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Away("hvlaunch does not answer");
  }
  if (answer.status === 401 || answer.status === 403) throw new Refused("This page needs a new token: run hvlaunch top --web again.");
  if (answer.status === 503) throw new Away("hvlaunch is busy, or the job is ending");
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}
