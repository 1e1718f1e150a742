// The page: asks the server every two seconds while it is looked at, and draws what it says.

import { ask, key } from "./api.js";
import { startAsking } from "./ask.js";
import { drawAll, drawNothing } from "./charts.js";
import { $, bytes, duration, number } from "./dom.js";
import { drawLessons, startLessons } from "./lessons.js";
import { loadModels, startPlayground } from "./playground.js";
import { drawOverlays, drawVersions, forgetVersions, isAsking, loadVersions } from "./tables.js";
import { startTeaching } from "./teach.js";

const EVERY = 2000;
const LOCKED = {
  401: "This server needs a key.",
  403: "Figures need a key with the scope monitor, learn or admin.",
};
let drawn = ""; // what tables show, so that they are not rebuilt under a pointer
let latest = null;
let timer = null;
let modelsFor = null;

function banner(text, info = false) {
  $("banner").hidden = !text;
  $("banner").textContent = text;
  $("banner").classList.toggle("info", info);
}

function status(kind, text) {
  $("status").className = `status ${kind}`;
  $("status-text").textContent = text;
}

function tiles(monitor) {
  const { queue, journal } = monitor;
  $("tile-version").textContent = `v${monitor.version}`;
  $("tile-speed").textContent = number(monitor.tokens_per_second, 1);
  $("tile-generating").textContent = number(queue.generating);
  $("tile-waiting").textContent = number(queue.waiting);
  $("tile-learning").textContent = `${number(queue.learning)} / ${number(queue.limit)}`;
  $("tile-journal").textContent = bytes(journal.bytes);
  $("tile-uptime").textContent = duration(monitor.uptime);
  $("learning").hidden = false;
  $("learning").textContent = monitor.learning ? "learning" : "not learning";
  $("learning").classList.toggle("on", monitor.learning);
}

async function change(done, work) {
  try {
    await work();
    banner(`${done}.`, true);
  } catch (error) {
    banner(error.message);
  }
  await refresh();
}

async function more() {
  try {
    await loadVersions(true);
    drawVersions(latest.version, change, more);
  } catch (error) {
    banner(error.message);
  }
}

async function tables(monitor) {
  const now = JSON.stringify([monitor.version, monitor.overlays, monitor.drift]);
  if (now === drawn || isAsking($("overlays"))) return; // not under an open question
  if (latest && monitor.version < latest.version) forgetVersions(); // another server, or another life of it
  await loadVersions(false);
  if (isAsking($("overlays"))) return;
  drawOverlays(monitor, change);
  drawVersions(monitor.version, change, more);
  drawn = now;
}

async function models(monitor) {
  const now = `${key.get() ?? ""} ${Object.keys(monitor.overlays)}`;
  if (now === modelsFor) return;
  modelsFor = now;
  try {
    $("model").textContent = await loadModels();
    $("model").hidden = false;
    for (const button of ["play-run", "ask-run"]) $(button).disabled = false;
  } catch (error) {
    const reason = error.status === 401 || error.status === 403 ? "This key may not generate." : error.message;
    for (const button of ["play-run", "ask-run"]) $(button).disabled = true;
    for (const message of ["play-message", "ask-message"]) $(message).textContent = reason;
  }
}

// Where lessons are taught, they come first, and what only texts have is not shown.
async function lessons(monitor) {
  const taught = monitor.lessons !== null;
  if (taught !== document.body.classList.contains("taught")) {
    document.body.classList.toggle("taught", taught);
    if (taught) $("charts").after($("playground"));
    else $("charts").before($("playground"));
  }
  if (taught) await drawLessons(monitor);
}

async function refresh() {
  clearTimeout(timer);
  try {
    const monitor = await ask("GET", "/v1/monitor");
    tiles(monitor);
    await lessons(monitor);
    drawAll(monitor);
    await tables(monitor);
    latest = monitor;
    await models(monitor);
    if (!$("banner").classList.contains("info")) banner("");
    if (monitor.journal.recovered) banner(`When the journal was opened: ${monitor.journal.recovered}`, true);
    if (monitor.journal.behind) banner(`Not up to date: ${monitor.journal.behind}`, true);
    status("live", "Live");
  } catch (error) {
    const denied = error.status === 401 || error.status === 403;
    status("lost", denied ? "Locked" : "Not connected");
    banner(denied ? `${LOCKED[error.status]} Use the button at the top to enter one.` : `The server does not answer as it should: ${error.message}`);
    if (!latest) drawNothing(denied ? "No figures without a key." : "No figures yet.");
  }
  timer = setTimeout(refresh, document.hidden ? 10 * EVERY : EVERY);
}

function startKeys() {
  const dialog = $("key-dialog");
  $("key-button").addEventListener("click", () => {
    $("key-input").value = "";
    dialog.returnValue = "cancel";
    dialog.showModal();
    $("key-input").focus();
  });
  $("key-input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    dialog.close("use");
  });
  dialog.addEventListener("close", () => {
    const entered = $("key-input").value.trim();
    $("key-input").value = "";
    if (dialog.returnValue === "use" && entered) key.set(entered);
    else if (dialog.returnValue === "forget") key.forget();
    else return;
    drawn = "";
    refresh();
  });
}

startKeys();
startPlayground();
startLessons(change);
startTeaching(() => refresh());
startAsking();
document.addEventListener("visibilitychange", () => document.hidden || refresh());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => latest && drawAll(latest));
refresh();
