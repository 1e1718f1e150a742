// Asking the server. The key lives in this tab only.

const PLACE = "attractor-key";

export const key = {
  get: () => sessionStorage.getItem(PLACE),
  set: (value) => sessionStorage.setItem(PLACE, value),
  forget: () => sessionStorage.removeItem(PLACE),
};

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method, headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) options.body = JSON.stringify(body);
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not JSON: the number has to do
  }
  throw new Failure(answer.status, message);
}

export async function ask(method, path, body, signal) {
  return (await send(method, path, body, signal)).json();
}

// The objects of a stream of events, as they come.
export async function* stream(path, body, signal) {
  const reader = (await send("POST", path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Failure(500, content.error.message);
      yield content;
    }
  }
}

// So that a change that was sent twice happens once.
export function freshKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
