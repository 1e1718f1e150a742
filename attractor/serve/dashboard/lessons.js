// The lessons of a server that is taught some: found by their words, and forgotten one by one.

import { ask, freshKey, key } from "./api.js";
import { $, bytes, element, empty, moment, named, number, replace } from "./dom.js";
import { cell, forgetButton, isAsking, stopAsking, table } from "./tables.js";

const PAGE = 8;
const MOST = 1000; // that the server lists at once
let limit = PAGE;
let drawn = null; // which list is shown, so that it is not rebuilt under a pointer
let asked = 0; // only the newest list that was asked for is shown
let found = { total: 0, data: [] };
let change = null;
let version = null;

export const percent = (share) => `${number(100 * share)}%`;

function sum(totals) {
  const lessons = `${number(totals.count)} ${totals.count === 1 ? "lesson" : "lessons"}`;
  const sources = `${number(totals.sources)} ${totals.sources === 1 ? "source" : "sources"}`;
  return `${lessons} from ${sources}, ${number(totals.known)} known, ${bytes(totals.bytes)}.`;
}

function known(lesson) {
  const text = `${percent(lesson.share_known_before)} \u2192 ${percent(lesson.share_known)}`;
  return element("span", { class: lesson.known ? "good" : "bad", title: lesson.reason }, text);
}

function action({ lesson, subject }) {
  return forgetButton(`forget-${lesson}`, `lesson ${lesson}, ${subject}`, async () => {
    $("lessons").focus();
    await change(`Forgot lesson ${lesson}`, () => ask("DELETE", `/v1/lessons/${lesson}?idempotency_key=${freshKey()}`));
  });
}

function draw() {
  const focused = document.activeElement?.id;
  const rows = found.data.map((lesson) => element("tr", {},
    cell(null, null, lesson.subject), cell(null, null, named(lesson.source)), cell("lesson", "number", number(lesson.lesson)),
    cell("known", "number", known(lesson)), cell("size", "number", bytes(lesson.bytes)), cell(null, "number", moment(lesson.at)),
    element("td", { class: "action" }, action(lesson))));
  const headings = [["Subject"], ["Source"], ["Lesson", "number"], ["Known before \u2192 after", "number"], ["Size", "number"], ["When", "number"], ["", "action"]];
  const left = found.total - found.data.length;
  const more = left && limit < MOST ? element("button", { type: "button", class: "more", id: "lessons-more", onclick: older }, `Older lessons (${number(left)})`) : null;
  const none = $("lessons-search").value ? "No lesson says that." : "No lessons yet. The first one sent to /v1/lessons appears here.";
  replace($("lessons-list"), ...(rows.length ? [table(headings, rows)] : [empty(none)]), ...(more ? [more] : []));
  if (focused) $(focused)?.focus();
}

async function load() {
  const search = $("lessons-search").value;
  const wanted = JSON.stringify([key.get(), version, search, limit]);
  if (wanted === drawn || isAsking($("lessons-list"))) return;
  const mine = (asked += 1);
  const where = search ? `&search=${encodeURIComponent(search)}` : "";
  try {
    const answer = await ask("GET", `/v1/lessons?limit=${limit}${where}`);
    if (mine !== asked || isAsking($("lessons-list"))) return;
    found = answer;
    draw();
    drawn = wanted;
  } catch (error) {
    if (mine !== asked) return;
    const denied = error.status === 401 || error.status === 403;
    replace($("lessons-list"), empty(denied ? "What lessons say needs a key with the scope learn or admin." : error.message));
    drawn = denied ? wanted : null; // anything else may have passed by the next time
  }
}

function older() {
  limit = Math.min(MOST, limit + 4 * PAGE);
  stopAsking();
  load();
}

export function drawLessons(monitor) {
  version = monitor.version;
  $("lessons-sum").textContent = sum(monitor.lessons);
  return load();
}

// What a lesson is called where only its number is known.
export async function subjectOf(lesson) {
  const shown = found.data.find((each) => each.lesson === lesson);
  try {
    return (shown ?? (await ask("GET", `/v1/lessons/${lesson}`))).subject;
  } catch {
    return null; // forgotten meanwhile, or not for this key
  }
}

// `changing` makes a change and says what became of it.
export function startLessons(changing) {
  change = changing;
  let typing = null;
  $("lessons-search").addEventListener("input", () => {
    clearTimeout(typing);
    stopAsking();
    limit = PAGE;
    typing = setTimeout(load, 150);
  });
  $("lessons-form").addEventListener("submit", (event) => event.preventDefault());
}
