// A question, and an answer in which the tokens are marked at which a lesson acted.

import { stream } from "./api.js";
import { $, element, number, replace } from "./dom.js";
import { percent, subjectOf } from "./lessons.js";

const UNTOUCHED = "untouched: exactly what the base would have written";
let running = null;

function say(text, kind = "") {
  $("ask-message").textContent = text;
  $("ask-message").className = `message ${kind}`;
}

// Tokens that follow each other, as one: [{part, from, to, text, weight}].
function together(tokens) {
  const runs = [];
  for (const { part, index, text, weight } of tokens) {
    const last = runs.at(-1);
    if (last?.part === part && last.to + 1 === index) {
      last.to = index;
      last.text += text;
      last.weight = Math.max(last.weight, weight);
    } else {
      runs.push({ part, from: index, to: index, text, weight });
    }
  }
  return runs;
}

// Puts the tokens of a run into a mark that names the lesson.
function mark(spans, run, lesson, name, colour) {
  const own = spans.slice(run.from, run.to + 1);
  if (!own.length) return; // of a token that ended the answer, and is not shown
  for (const span of own) {
    span.classList.add("token", colour);
    span.title = [span.title, name].filter(Boolean).join("; ");
  }
  own.at(-1).append(element("sup", { "aria-label": `(${name})` }, lesson));
}

function places(runs, part) {
  const acted = runs.filter((run) => run.part === part).map((run) => `\u201c${run.text.trim()}\u201d ${percent(run.weight)}`);
  return acted.length ? `${part === "prompt" ? "in the question at" : "in the answer at"} ${acted.join(", ")}` : null;
}

async function attribute(outcome, spans) {
  if (outcome.untouched) return say(UNTOUCHED, "good");
  const names = await Promise.all(outcome.lessons.map(({ lesson }) => subjectOf(lesson)));
  const lines = outcome.lessons.map(({ lesson, tokens }, position) => {
    const colour = `path-${(position % 8) + 1}`;
    const name = names[position] === null ? `lesson ${lesson}` : `lesson ${lesson}, ${names[position]}`;
    const runs = together(tokens);
    for (const run of runs.filter((each) => each.part === "text")) mark(spans, run, lesson, name, colour);
    const where = [places(runs, "prompt"), places(runs, "text")].filter(Boolean).join("; ");
    return element("li", { class: colour }, element("span", { class: "swatch", "aria-hidden": "true" }), element("span", {}, element("b", {}, name), ` acted ${where}`));
  });
  replace($("ask-lessons"), ...lines);
  say(`${number(lines.length)} ${lines.length === 1 ? "lesson" : "lessons"} acted on this answer, written with v${outcome.version}.`);
}

async function run(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  const spans = [];
  let outcome = null;
  replace($("ask-lessons"));
  replace($("ask-answer"));
  $("ask-run").disabled = true;
  $("ask-stop").disabled = false;
  say("Waiting for the first token \u2026");
  const body = {
    model: $("ask-model").value, messages: [{ role: "user", content: $("ask-question").value }], temperature: 0,
    stream: true, attractor: { paths: true },
  };
  try {
    for await (const chunk of stream("/v1/chat/completions", body, running.signal)) {
      const ours = chunk.choices[0]?.attractor ?? {};
      if (ours.untouched !== undefined) outcome = ours;
      for (const token of ours.tokens ?? []) {
        spans.push(element("span", {}, token.text));
        $("ask-answer").append(spans.at(-1));
      }
      say(`${number(spans.length)} tokens \u2026`);
      $("ask-answer").scrollTop = $("ask-answer").scrollHeight;
    }
    if (outcome) await attribute(outcome, spans);
    else say("The server did not say which lessons acted.", "bad");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped. The end of an answer says which lessons acted.");
    else say(error.message, "bad");
  } finally {
    running = null;
    $("ask-run").disabled = false;
    $("ask-stop").disabled = true;
  }
}

export function startAsking() {
  $("ask").addEventListener("submit", run);
  $("ask-stop").addEventListener("click", () => running?.abort());
  $("ask-question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
}
