// Small tools for the page. Text only ever goes in as text.

export const $ = (id) => document.getElementById(id);

// element("td", {class: "number", title: "x"}, child or text, ...)
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

export function replace(place, ...children) {
  place.replaceChildren(...children);
}

export const empty = (text) => element("p", { class: "empty" }, text);

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 90) return `${number(seconds)} s`;
  if (seconds < 5400) return `${number(seconds / 60)} min`;
  if (seconds < 129600) return `${number(seconds / 3600, 1)} h`;
  return `${number(seconds / 86400, 1)} d`;
}

export function moment(text) {
  const when = new Date(text);
  return Number.isNaN(when.getTime()) ? String(text ?? "") : when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

// Asks before something that changes the server; resolves to whether it was confirmed. A dialog tells late that
// it was closed, so it may be open again by then: only the newest question is answered.
let answer = null;
$("confirm").addEventListener("close", () => {
  if ($("confirm").open) return;
  answer?.($("confirm").returnValue === "yes");
  answer = null;
});

export function confirmed(title, text, action) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  $("confirm-yes").textContent = action;
  dialog.returnValue = "cancel";
  dialog.showModal();
  $("confirm-cancel").focus();
  answer?.(false);
  return new Promise((resolve) => {
    answer = resolve;
  });
}

// Paths keep their colours while the page is open: the base is grey, sources take the next free one.
const numbers = new Map([["base", 0]]);
export function pathNumber(path) {
  if (!numbers.has(path)) numbers.set(path, ((numbers.size - 1) % 8) + 1);
  return numbers.get(path);
}

export function named(path) {
  return element("span", { class: `named path-${pathNumber(path)}` }, element("span", { class: "swatch", "aria-hidden": "true" }), path);
}

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const pathColor = (path) => style(`--path-${pathNumber(path)}`);
