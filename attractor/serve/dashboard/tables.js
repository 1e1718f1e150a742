// Overlays and versions, with what can be done to them.

import { ask, freshKey } from "./api.js";
import { $, bytes, confirmed, element, empty, moment, named, number, replace } from "./dom.js";

export function table(headings, rows) {
  const head = headings.map(([text, kind]) => element("th", { class: kind, scope: "col" }, text));
  return element("table", { class: "stacks" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

export const cell = (label, kind, ...content) => element("td", { "data-label": label, class: kind }, ...content);

let close = null; // the question that is open; there is at most one on the page

export const stopAsking = () => close?.();
export const isAsking = (place) => place.querySelector(".sure") !== null;

// A button that asks again, in its own place, before `forget` is called.
export function forgetButton(id, name, forget) {
  const place = element("span");
  const keep = () => {
    close = null;
    replace(place, button);
  };
  const back = () => {
    keep();
    button.focus();
  };
  const yes = () => {
    keep();
    forget();
  };
  const question = () => {
    stopAsking();
    close = keep;
    const escape = (event) => event.key === "Escape" && back();
    const no = element("button", { type: "button", class: "small", id: "forget-no", onclick: back }, "Keep");
    replace(place, element("span", { class: "sure", role: "group", "aria-label": `Forget ${name}?`, onkeydown: escape },
      element("button", { type: "button", class: "small danger", id: "forget-yes", onclick: yes }, "Yes, forget"), no));
    no.focus();
  };
  const button = element("button", { type: "button", class: "small danger", id, "aria-label": `Forget ${name}`, onclick: question }, "Forget");
  replace(place, button);
  return place;
}

function drift(used) {
  if (!used) return "\u2013";
  const share = used.budget > 0 ? used.used / used.budget : 1;
  const meter = element("meter", { min: 0, max: 1, low: 0.7, high: 0.9, optimum: 0, value: Math.min(1, share), "aria-label": "drift used" });
  return element("span", {}, meter, `${number(100 * share)}%`);
}

export function drawOverlays(monitor, change) {
  const names = Object.keys(monitor.overlays);
  const counted = monitor.lessons ? "lessons" : "tokens"; // what a source taught
  $("overlays-title").textContent = monitor.lessons ? "Sources" : "Overlays";
  if (!names.length) return replace($("overlays"), empty(`No ${monitor.lessons ? "sources" : "overlays"}: the server answers with its base alone.`));
  const rows = names.map((name) => {
    const overlay = monitor.overlays[name];
    const patches = Object.values(overlay.patches).reduce((sum, count) => sum + count, 0);
    const button = forgetButton(`forget-source-${name}`, name, async () => {
      $("sources").focus();
      await change(`Forgot ${name}`, () => ask("DELETE", `/v1/sources/${encodeURIComponent(name)}?idempotency_key=${freshKey()}`));
    });
    return element("tr", {}, cell(null, null, named(name)), cell(counted, "number", number(overlay[counted])), cell("size", "number", bytes(overlay.bytes)),
      cell("patches", "number", number(patches)), cell("changed by", "number", `v${overlay.version}`), monitor.lessons ? null : cell("drift", "number", drift(monitor.drift[name])), element("td", { class: "action" }, button));
  });
  const headings = [["Source"], [monitor.lessons ? "Lessons" : "Tokens", "number"], ["Size", "number"], ["Patches", "number"], ["Changed by", "number"], ...(monitor.lessons ? [] : [["Drift of budget", "number"]]), ["", "action"]];
  const focused = document.activeElement?.id;
  replace($("overlays"), table(headings, rows));
  if (focused) $(focused)?.focus();
}

const lines = []; // of versions, newest first
let complete = false;
const PAGE = 12;

export function forgetVersions() {
  lines.length = 0;
  complete = false;
}

// New versions go on top; what was loaded below stays.
export async function loadVersions(older) {
  const before = older && lines.length ? `&before=${lines[lines.length - 1].version}` : "";
  const page = (await ask("GET", `/v1/versions?limit=${PAGE}${before}`)).data;
  if (older || !lines.length) {
    complete = page.length < PAGE;
    lines.push(...page);
  } else {
    const known = lines[0].version;
    const fresh = page.filter((line) => line.version > known);
    if (fresh.length === page.length && page.length === PAGE) lines.length = 0; // a gap: begin anew
    lines.unshift(...fresh);
    complete = complete && lines.length > 0;
  }
}

function what(line) {
  const lesson = line.lesson === undefined ? "" : `lesson ${line.lesson} from `;
  if (line.kind === "lesson") return element("span", {}, lesson ? `Learned ${lesson}` : "Learned from ", named(String(line.source)));
  if (line.kind === "drop" || line.kind === "erase") {
    return element("span", {}, line.kind === "drop" ? "Forgot " : "Erased ", lesson, named(String(line.source)));
  }
  if (line.kind === "nothing") return element("span", {}, "Kept nothing from ", named(String(line.source)));
  if (line.kind === "calibration") return "Measured background text";
  if (line.kind === "rollback") return `Rolled back to v${line.to}`;
  return String(line.kind);
}

export function drawVersions(current, change, more) {
  const place = $("versions");
  if (!current && !lines.length) return replace(place, empty("Version 0: the base, as it was loaded."));
  const shown = complete ? [...lines, { version: 0, kind: "The base, as it was loaded" }] : lines;
  const rows = shown.map((line) => {
    const back = async () => {
      const later = current - line.version;
      const text = `Everything becomes as it was at version ${line.version}, to the bit, and that is version ${current + 1}. ${number(later)} later ${later === 1 ? "change is" : "changes are"} undone. Texts being written finish as they began.`;
      if (!(await confirmed(`Roll back to version ${line.version}?`, text, "Roll back"))) return;
      await change(`Rolled back to version ${line.version}`, () => ask("POST", "/v1/rollback", { version: line.version, idempotency_key: freshKey() }));
    };
    const action = line.version === current ? element("span", { class: "chip on" }, "in use")
      : element("button", { type: "button", class: "small", "aria-label": `Roll back to version ${line.version}`, onclick: back }, "Roll back");
    return element("tr", {}, cell(null, null, `v${line.version}`), cell(null, "wide", what(line)), cell(line.loss === undefined ? null : "loss", "number", line.loss === undefined ? "" : number(line.loss, 3)),
      cell(line.tokens === undefined ? null : "tokens", "number", line.tokens === undefined ? "" : number(line.tokens)), cell(null, "number", line.at ? moment(line.at) : ""), element("td", { class: "action" }, action));
  });
  const headings = [["Version"], ["What"], ["Loss before", "number"], ["Tokens", "number"], ["When", "number"], ["", "action"]];
  const button = complete ? null : element("button", { type: "button", class: "more", onclick: more }, "Older versions");
  replace(place, table(headings, rows), ...(button ? [button] : []));
}
