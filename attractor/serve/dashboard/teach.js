// Sentences, or prompts and answers, become lessons; what became of each is told.

import { ask, freshKey } from "./api.js";
import { $, element, number, replace } from "./dom.js";
import { percent } from "./lessons.js";

const ARROW = "=>";

function say(text, kind = "") {
  $("teach-message").textContent = text;
  $("teach-message").className = `message ${kind}`;
}

// Lines with an arrow are the forms of one lesson; anything else is a text.
function lesson(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!lines.some((line) => line.includes(ARROW))) return { text };
  const forms = lines.map((line) => {
    const place = line.indexOf(ARROW);
    return place < 0 ? line : [line.slice(0, place).trim(), line.slice(place + ARROW.length).trim()];
  });
  return { forms };
}

function outcome({ lesson: numbered, subject, known, kept, reason, note, share_answered: answered, overrides }) {
  const parts = [known ? " is known" : ` is not known: ${reason}`];
  if (known && answered !== null) parts.push(`, and ${percent(answered)} of the questions made from it are answered`);
  if (overrides.length) parts.push(`; it takes the place of lesson ${overrides.join(", ")}`);
  if (note) parts.push(`; ${note}`);
  return element("li", { class: known ? "good" : "bad" }, element("b", {}, kept ? `lesson ${numbered}, ${subject}` : subject), parts.join(""));
}

async function run(event, taught) {
  event.preventDefault();
  if ($("teach-run").disabled) return;
  $("teach-run").disabled = true;
  replace($("teach-lessons"));
  say("Learning, and asking for it afterwards \u2026");
  try {
    const answer = await ask("POST", "/v1/lessons", { ...lesson($("teach-text").value), source: "dashboard", idempotency_key: freshKey() });
    const count = answer.lessons.filter(({ kept }) => kept).length;
    const told = `${number(count)} ${count === 1 ? "lesson" : "lessons"} taught, in version ${answer.version}.`;
    say(count ? told : "Nothing was kept.", answer.known ? "good" : "bad");
    replace($("teach-lessons"), ...answer.lessons.map(outcome));
    if (answer.kept) $("teach-text").value = "";
    taught();
  } catch (error) {
    say(error.message, "bad");
  } finally {
    $("teach-run").disabled = false;
  }
}

export function startTeaching(taught) {
  $("teach").addEventListener("submit", (event) => run(event, taught));
  $("teach-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("teach").requestSubmit();
  });
}
