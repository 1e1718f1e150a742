// The charts. Each draws what the server knows, or says that there is nothing yet.

import { $, empty, number, pathColor, replace, style } from "./dom.js";

const SETTINGS = { displayModeBar: false, responsive: true, doubleClick: "reset" };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

function axis(more = {}) {
  return {
    gridcolor: style("--grid"), zeroline: false, linecolor: style("--line"), tickcolor: style("--line"),
    automargin: true, fixedrange: true, ...more,
  };
}

function layout(more = {}) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: style("--font"), size: 12, color: style("--soft") },
    margin: { l: 8, r: 16, t: 8, b: 8 }, showlegend: false, hovermode: "closest", dragmode: false,
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink"), family: style("--font") }, namelength: -1 },
    xaxis: axis(), yaxis: axis(),
    ...more,
  };
}

const LEGEND = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 }, itemclick: false, itemdoubleclick: false };

function draw(id, traces, more, summary) {
  const place = $(id);
  if (!traces.length) return false;
  if (place.querySelector(".empty")) replace(place);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", summary);
  window.Plotly.react(place, traces, layout(more), SETTINGS);
  return true;
}

function nothing(id, text) {
  const place = $(id);
  if (place.data) window.Plotly.purge(place);
  place.removeAttribute("role");
  place.removeAttribute("aria-label");
  if (place.querySelector(".empty")?.textContent !== text) replace(place, empty(text));
}

function loss(monitor) {
  const texts = monitor.progressive.filter((text) => text.loss !== null);
  if (!texts.length) {
    return nothing("loss", monitor.learning ? "No texts yet. The first one sent to /v1/learn appears here." : "This server does not learn.");
  }
  const sources = [...new Set(texts.map((text) => text.source))];
  const traces = sources.map((source) => {
    const own = texts.filter((text) => text.source === source);
    return {
      type: "scatter", mode: "lines+markers", name: source, x: own.map((text) => text.version), y: own.map((text) => text.loss),
      line: { color: pathColor(source), width: 1.5 }, marker: { size: own.length > 80 ? 3 : 5, color: pathColor(source) },
      hovertemplate: "%{y:.3f} nats per token<br>version %{x}<extra>%{fullData.name}</extra>",
    };
  });
  const last = texts[texts.length - 1];
  draw("loss", traces, { showlegend: true, legend: LEGEND, xaxis: axis({ title: { text: "version" }, tickformat: "d" }), yaxis: axis({ nticks: 6 }) },
    `Loss before learning; the last text, version ${last.version} of ${last.source}, had ${number(last.loss, 3)} nats per token.`);
}

function canaries(monitor) {
  const names = Object.keys(monitor.canaries).filter((name) => monitor.canaries[name].length);
  if (!names.length) return nothing("canaries", "No canary was measured yet.");
  const traces = names.map((name, index) => ({
    type: "scatter", mode: monitor.canaries[name].length > 1 ? "lines" : "markers", name,
    x: monitor.canaries[name].map((point) => point.version), y: monitor.canaries[name].map((point) => point.perplexity),
    line: { color: style(index % 2 ? "--soft" : "--accent"), width: 2, dash: DASHES[index % DASHES.length] }, marker: { color: style("--accent"), size: 7 },
    hovertemplate: "%{y:.3f}<br>version %{x}<extra>%{fullData.name}</extra>",
  }));
  const latest = names.map((name) => `${name} ${number(monitor.canaries[name].at(-1).perplexity, 2)}`).join(", ");
  draw("canaries", traces, { showlegend: true, legend: LEGEND, xaxis: axis({ title: { text: "version" }, tickformat: "d" }), yaxis: axis({ nticks: 6 }) },
    `Perplexity of canaries; now ${latest}.`);
}

function rises(monitor) {
  const names = Object.keys(monitor.lessons.canaries);
  if (!names.length) return nothing("canaries", "No canary was measured yet.");
  const all = names.map((name) => monitor.lessons.canaries[name]);
  const shares = all.map((canary) => canary.rise);
  const trace = {
    type: "bar", orientation: "h", y: names, x: shares, width: 0.5, marker: { color: style("--accent") },
    text: all.map((canary) => `${number(100 * canary.rise, 2)}%<br>${canary.windows_entered ? `${canary.windows_entered} of ${canary.windows} windows entered` : "untouched"}`),
    textposition: "outside", cliponaxis: false, hovertemplate: "%{text}<extra>%{y}</extra>",
  };
  const most = Math.max(0.001, ...shares);
  draw("canaries", [trace], { xaxis: axis({ range: [Math.min(0, ...shares), 3 * most], showticklabels: false, showgrid: false, title: { text: "rise of perplexity" } }), yaxis: axis({ autorange: "reversed", showgrid: false, ticklabelstandoff: 6 }) },
    `Rise of perplexity by lessons: ${names.map((name, index) => `${name} ${number(100 * shares[index], 2)} percent`).join(", ")}.`);
}

function posterior(monitor) {
  const recent = monitor.posteriors;
  if (!recent.length) return nothing("posterior", "No request yet. Write something in the playground.");
  const paths = [...new Set(recent.flatMap((request) => Object.keys(request.shares)))];
  const positions = recent.map((_, index) => index - recent.length + 1);
  const hover = recent.map((request) => `${new Date(request.at * 1000).toLocaleTimeString()}, version ${request.version}`);
  const traces = paths.map((path) => ({
    type: "bar", name: path, x: positions, y: recent.map((request) => request.shares[path] ?? 0), customdata: hover,
    marker: { color: pathColor(path), line: { width: 0 } }, hovertemplate: "%{y:.1%}<br>%{customdata}<extra>%{fullData.name}</extra>",
  }));
  const last = recent[recent.length - 1].shares;
  const most = Object.keys(last).reduce((best, path) => (last[path] > last[best] ? path : best));
  draw("posterior", traces, {
    barmode: "stack", bargap: 0.12, showlegend: true, legend: { ...LEGEND, traceorder: "normal" },
    xaxis: axis({ showgrid: false, showticklabels: false, title: { text: recent.length === 1 ? "the last request" : `the last ${recent.length} requests` } }),
    yaxis: axis({ range: [0, 1], tickformat: ".0%", nticks: 5 }),
  }, `Shares of paths in ${recent.length} requests; in the last one ${most} had ${number(100 * last[most])} percent.`);
}

const seen = [];
function queue(monitor) {
  const now = Date.now();
  seen.push({ at: now, ...monitor.queue });
  while (seen.length && now - seen[0].at > 600000) seen.shift();
  if (seen.length < 2) return nothing("queue", "Watching \u2026");
  const lines = [["generating", "writing", "solid"], ["waiting", "waiting", "dot"], ["learning", "learning", "dash"]];
  const traces = lines.map(([name, label, dash], index) => ({
    type: "scatter", mode: "lines", name: label, x: seen.map((point) => new Date(point.at)), y: seen.map((point) => point[name]),
    line: { shape: "hv", width: 2, dash, color: [style("--accent"), style("--soft"), style("--warn")][index] },
    hovertemplate: "%{y}<br>%{x|%H:%M:%S}<extra>%{fullData.name}</extra>",
  }));
  const most = Math.max(3, ...seen.flatMap((point) => lines.map(([name]) => point[name])));
  draw("queue", traces, { showlegend: true, legend: LEGEND, xaxis: axis({ type: "date", nticks: 4, tickformat: "%H:%M:%S" }), yaxis: axis({ range: [0, most * 1.15], nticks: 5, tickformat: "d" }) },
    `${monitor.queue.generating} texts being written, ${monitor.queue.waiting} waiting, ${monitor.queue.learning} of ${monitor.queue.limit} requests to learn queued.`);
}

const layers = (monitor) => Object.keys(monitor.usage).sort((a, b) => a - b);

function entropy(monitor) {
  const names = layers(monitor).filter((name) => monitor.usage[name].entropy !== null);
  if (!names.length) return nothing("entropy", "Nothing was routed yet.");
  const most = names.map((name) => Math.log(Math.max(2, monitor.usage[name].counts.length)));
  const shares = names.map((name, index) => monitor.usage[name].entropy / most[index]);
  const trace = {
    type: "bar", orientation: "h", y: names.map((name) => `layer ${name}`), x: shares, width: 0.6, marker: { color: style("--accent") },
    customdata: names.map((name, index) => `${number(monitor.usage[name].entropy, 2)} of ${number(most[index], 2)} nats`),
    text: shares.map((share) => `${number(100 * share)}%`), textposition: "auto", insidetextfont: { color: style("--on-accent") }, cliponaxis: false,
    hovertemplate: "%{customdata}<extra>%{y}</extra>",
  };
  draw("entropy", [trace], { xaxis: axis({ range: [0, 1.02], tickformat: ".0%", tickvals: [0, 0.25, 0.5, 0.75, 1] }), yaxis: axis({ autorange: "reversed", showgrid: false, ticklabelstandoff: 6 }) },
    `Usage entropy: ${names.map((name, index) => `layer ${name} ${number(100 * shares[index])} percent`).join(", ")}.`);
}

function patches(monitor) {
  const names = layers(monitor).filter((name) => monitor.usage[name].counts.length);
  if (!names.length) return nothing("patches", "Nothing was routed yet.");
  const rows = names.map((name) => {
    const counts = monitor.usage[name].counts;
    const total = counts.reduce((sum, count) => sum + count, 0);
    return counts.map((count) => (total ? (count * counts.length) / total : 0));
  });
  const trace = {
    type: "heatmap", z: rows, y: names.map((name) => `layer ${name}`), xgap: rows[0].length > 80 ? 0 : 1, ygap: 2, zmin: 0,
    colorscale: [[0, style("--heat-0")], [0.5, style("--heat-1")], [1, style("--heat-2")]],
    colorbar: { thickness: 8, outlinewidth: 0, ticksuffix: "\u00d7", nticks: 4, len: 1, xpad: 6 },
    hovertemplate: "patch %{x}<br>%{z:.2f} times even usage<extra>%{y}</extra>",
  };
  const dead = rows.flat().filter((value) => value === 0).length;
  draw("patches", [trace], { xaxis: axis({ showgrid: false, title: { text: "patch" }, tickformat: "d" }), yaxis: axis({ autorange: "reversed", showgrid: false, type: "category", ticklabelstandoff: 6 }) },
    `Usage of patches in ${names.length} layers; ${dead} of ${rows.flat().length} were not used.`);
}

export function drawNothing(text) {
  for (const id of ["loss", "canaries", "posterior", "queue", "entropy", "patches"]) nothing(id, text);
}

export function drawAll(monitor) {
  const charts = monitor.lessons ? [rises, queue] : [loss, canaries, posterior, queue, entropy, patches];
  for (const chart of charts) chart(monitor);
}
