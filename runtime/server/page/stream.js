// SPDX-License-Identifier: Apache-2.0
// Requests to the server this page came from.

/** What the server, or the way to it, says is wrong. `status` is 0 where there was no response. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function told(error, otherwise) {
  if (!error || !error.message) return otherwise;
  return error.param ? `${error.message} (${error.param})` : error.message;
}

async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = JSON.parse(await response.text());
  } catch {
    // A proxy's page, say: the status is all there is to tell.
  }
  throw new ServerError(told(body && body.error, `The server answers ${response.status}.`), response.status);
}

/** What the server runs: model, context, speculators, defaults of sampling. */
export async function info(key) {
  return (await request("nemo/info", key)).json();
}

/**
 * The chunks of a streamed chat completion, in lists: those that came together.
 * Aborting `signal` closes the connection, by which the server knows to stop.
 */
export async function* chat(body, key, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  const response = await request("v1/chat/completions", key, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let step;
    try {
      step = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke.");
    }
    const lines = (rest + (step.value || "")).split(/\r?\n/);
    rest = step.done ? "" : lines.pop();
    const chunks = [];
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        yield chunks;
        return;
      }
      chunks.push(JSON.parse(data));
    }
    yield chunks;
    const failed = chunks.find((chunk) => chunk.error);
    if (failed) throw new ServerError(told(failed.error, "The server failed."));
    if (step.done) throw new ServerError("The answer broke off.");
  }
}
