// A completion as it is written, every token in the colour of its path.

import { ask, stream } from "./api.js";
import { $, element, named, number, pathNumber, replace } from "./dom.js";

let running = null;

export async function loadModels() {
  const models = (await ask("GET", "/v1/models")).data.map((model) => model.id);
  offer($("play-model"), models, "all paths");
  offer($("ask-model"), models, "with lessons");
  return models[0];
}

function offer(select, models, whole) {
  const chosen = select.value;
  const same = models.length === select.options.length && models.every((id, index) => select.options[index].value === id);
  if (!same) replace(select, ...models.map((id, index) => element("option", { value: id }, index ? id : `${id} (${whole})`)));
  if (models.includes(chosen)) select.value = chosen;
}

function say(text, bad = false) {
  $("play-message").textContent = text;
  $("play-message").classList.toggle("bad", bad);
}

const shares = (token) => Object.entries(token.shares).sort((a, b) => b[1] - a[1]);
const sharesOf = (token) => shares(token).map(([path, share]) => `${path} ${number(100 * share)}%`).join(", ");
const visible = (text) => JSON.stringify(text).slice(1, -1);

function show(token, paths) {
  const [best] = shares(token)[0] ?? ["base"];
  for (const path of Object.keys(token.shares)) { // in the server's order: the base comes first
    if (paths.has(path)) continue;
    paths.add(path);
    $("play-legend").append(named(path));
  }
  $("play-output").append(element("span", { class: `token path-${pathNumber(best)}`, title: sharesOf(token) }, token.text));
}

function fillTable(tokens, paths) {
  const names = [...paths];
  const head = [["Token"], ...names.map((name) => [name, "number"])].map(([text, kind]) => element("th", { class: kind, scope: "col" }, text));
  const rows = tokens.map((token) => element("tr", {}, element("td", {}, element("code", {}, visible(token.text))),
    ...names.map((name) => element("td", { class: "number" }, `${number(100 * (token.shares[name] ?? 0), 1)}%`))));
  replace($("play-table"), element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

async function run(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  const prompt = $("play-prompt").value;
  const paths = new Set();
  const tokens = [];
  replace($("play-legend"));
  replace($("play-output"), element("span", { class: "prompt" }, prompt));
  $("play-details").hidden = true;
  $("play-run").disabled = true;
  $("play-stop").disabled = false;
  say("Waiting for the first token \u2026");
  const body = {
    model: $("play-model").value, prompt, max_tokens: Number($("play-tokens").value), temperature: Number($("play-temperature").value),
    stream: true, truncate_prompt: true, attractor: { paths: true },
  };
  if ($("play-seed").value !== "") body.seed = Number($("play-seed").value);
  let version = null;
  try {
    for await (const chunk of stream("/v1/completions", body, running.signal)) {
      version = chunk.system_fingerprint;
      for (const token of chunk.choices[0]?.attractor?.tokens ?? []) {
        tokens.push(token);
        show(token, paths);
      }
      say(`${number(tokens.length)} tokens with ${version}`);
      $("play-output").scrollTop = $("play-output").scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") say(`Stopped after ${number(tokens.length)} tokens.`);
    else say(error.message, true);
  } finally {
    running = null;
    $("play-run").disabled = false;
    $("play-stop").disabled = true;
    $("play-details").hidden = !tokens.length;
    fillTable(tokens, paths);
  }
}

export function startPlayground() {
  $("play").addEventListener("submit", run);
  $("play-stop").addEventListener("click", () => running?.abort());
  $("play-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("play").requestSubmit();
  });
}
