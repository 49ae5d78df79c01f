// Elements, made without any HTML: text from a job is text alone.

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Replace the children of a box, but not between press and release: a click needs one element for both. The focus stays on the
// element with the same key.
export function refill(box, ...children) {
  if (box.matches(":active")) return;
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  box.replaceChildren(...children);
  if (key !== undefined) [...box.querySelectorAll("[data-key]")].find((element) => element.dataset.key === key)?.focus({ preventScroll: true });
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
