// SPDX-License-Identifier: Apache-2.0
// One answer of the model: its message as data, and as it is shown.

import { Markdown } from "./markdown.js";

export function make(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function button(action, text) {
  const made = make("button", "", text);
  made.type = "button";
  made.dataset.action = action;
  return made;
}

/**
 * Which token each piece of an answer's text came from. The server tells tokens as the model wrote them, the text
 * without marks such as `</think>`, and what could be one comes later; so one is looked for in the other.
 */
export class Origins {
  constructor() {
    this.text = "";
    this.ends = [];
    this.kinds = [];
  }

  push(text, kind) {
    if (!text) return;
    this.text += text;
    this.ends.push(this.text.length);
    this.kinds.push(kind);
  }

  forget(length = this.text.length) {
    this.text = this.text.slice(length);
    const gone = this.ends.findIndex((end) => end > length);
    const kept = gone < 0 ? this.ends.length : gone;
    this.ends = this.ends.slice(kept).map((end) => end - length);
    this.kinds = this.kinds.slice(kept);
  }

  /** `text` in pieces, each with its kind; "" where no token is known. */
  take(text) {
    let at = this.text.length - text.length;
    if (this.text.startsWith(text)) at = 0;
    else if (!this.text.endsWith(text)) at = this.text.indexOf(text);
    if (at < 0) return [[text, ""]];
    const pieces = [];
    let from = at;
    for (let i = this.ends.findIndex((end) => end > at); from < at + text.length; i++) {
      const end = Math.min(this.ends[i], at + text.length);
      pieces.push([this.text.slice(from, end), this.kinds[i]]);
      from = end;
    }
    this.forget(from);
    return pieces;
  }
}

const BURST = 0.1; // seconds in which a rate cannot be told: what came together was not made together

/** Times and counts of one answer. */
class Pace {
  constructor() {
    this.started = performance.now();
    this.first = 0;
    this.last = 0;
    this.tokens = 0;
    this.drafted = 0;
    this.atFirst = 0; // tokens that came first, together
    this.acceptance = 0; // tokens of a verification, as the server tells it
    this.usage = null;
  }

  count(told) {
    const tokens = told.tokens || [];
    if (!tokens.length) return;
    if (told.acceptance_length) this.acceptance = told.acceptance_length;
    this.last = performance.now();
    this.tokens += tokens.length;
    for (const token of tokens) if (token.drafted) this.drafted++;
    if (this.first) return;
    this.first = this.last;
    this.atFirst = this.tokens;
  }

  /** Tokens a second behind the first; of all tokens where they came too fast for that. */
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    if (seconds >= BURST) return (this.tokens - this.atFirst) / seconds;
    return this.tokens ? (this.tokens * 1000) / (this.last - this.started) : 0;
  }

  text() {
    const parts = [];
    if (this.tokens) parts.push(`${this.tokens} tokens`);
    if (this.rate) parts.push(`${this.rate.toFixed(1)} tokens/s`);
    if (this.first) parts.push(`first after ${((this.first - this.started) / 1000).toFixed(2)} s`);
    if (this.drafted) {
      if (this.acceptance) parts.push(`acceptance length ${this.acceptance.toFixed(2)}`);
      parts.push(`${Math.round((100 * this.drafted) / this.tokens)} % drafted`);
    }
    if (this.usage) {
      const cached = (this.usage.prompt_tokens_details || {}).cached_tokens;
      parts.push(`prompt ${this.usage.prompt_tokens}${cached ? `, ${cached} of them cached` : ""}`);
    }
    return parts.join(" · ");
  }
}

/** A call of a tool: name, arguments, and a field for what it gave. */
class Call {
  constructor(index) {
    this.data = { id: "", type: "function", function: { name: "", arguments: "" } };
    this.element = make("section", "call");
    this.name = make("h3");
    this.arguments = make("pre");
    this.arguments.tabIndex = 0;
    this.result = make("textarea");
    this.result.rows = 2;
    this.result.id = `result-${crypto.getRandomValues(new Uint32Array(1))[0]}-${index}`;
    this.label = make("label", "", "Its result");
    this.label.htmlFor = this.result.id;
    this.element.append(this.name, this.arguments);
  }

  add(delta) {
    if (delta.id) this.data.id = delta.id;
    const told = delta.function || {};
    if (told.name) this.data.function.name = told.name;
    if (told.arguments) this.data.function.arguments += told.arguments;
  }

  draw() {
    this.name.textContent = `Calls ${this.data.function.name}`;
    this.arguments.textContent = this.data.function.arguments;
  }

  finish(asks) {
    try {
      this.arguments.textContent = JSON.stringify(JSON.parse(this.data.function.arguments), null, 2);
    } catch {
      // An answer that was stopped: the arguments stay as far as they came.
    }
    if (asks) this.element.append(this.label, this.result);
  }

  answered() {
    this.result.readOnly = true;
  }
}

/** An answer while it comes and after. `message` is what is sent with the next question. */
export class Answer {
  constructor(onDraw) {
    this.onDraw = onDraw;
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.origins = new Origins();
    this.pace = new Pace();
    this.phase = "waiting";
    this.reason = "";
    this.frame = 0;
    this.element = make("li", "turn answer live");
    this.element.setAttribute("aria-label", "Answer");
    this.thinking = make("details", "thinking");
    this.summary = make("summary", "", "Thinking");
    this.thinking.append(this.summary, make("div", "text"));
    this.thinking.hidden = true;
    this.body = make("div", "text");
    this.list = make("div", "calls");
    this.notes = make("p", "notes");
    this.figures = make("p", "figures");
    this.actions = make("p", "actions");
    this.element.append(this.thinking, this.body, this.list, this.notes, this.figures, this.actions);
    for (const text of [this.thinking.lastChild, this.body]) text.dir = "auto";
    this.trace = new Markdown(this.thinking.lastChild);
    this.text = new Markdown(this.body);
  }

  /** Chunks that came together. They are shown with the next frame. */
  push(chunks) {
    for (const chunk of chunks) {
      const told = chunk.nemo || {};
      const kind = `by-${told.speculator}`;
      for (const token of told.tokens || []) this.origins.push(token.text, token.drafted ? kind : "");
      this.pace.count(told);
      if (chunk.usage) this.pace.usage = chunk.usage;
      for (const choice of chunk.choices || []) {
        this.take(choice.delta || {});
        if (choice.finish_reason) this.reason = choice.finish_reason;
      }
    }
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  take(delta) {
    const reasoning = delta.reasoning_content || delta.reasoning;
    if (reasoning) {
      this.message.reasoning_content = (this.message.reasoning_content || "") + reasoning;
      if (this.phase === "waiting") this.turnTo("thinking");
      for (const [text, kind] of this.origins.take(reasoning)) this.trace.push(text, kind);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.turnTo("answering");
      for (const [text, kind] of this.origins.take(delta.content)) this.text.push(text, kind);
    }
    for (const part of delta.tool_calls || []) {
      this.turnTo("calling");
      this.origins.forget(); // arguments are told as JSON, which is not what the tokens say
      this.call(part.index || 0).add(part);
    }
  }

  call(index) {
    while (this.calls.length <= index) {
      const call = new Call(this.calls.length);
      this.calls.push(call);
      this.list.append(call.element);
    }
    return this.calls[index];
  }

  /** The trace is open while the model thinks, and closes with the answer. */
  turnTo(phase) {
    if (phase === this.phase) return;
    if (phase === "thinking") this.thinking.open = true;
    else if (this.phase === "thinking") this.thinking.open = false;
    this.phase = phase;
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.thinking.hidden = !this.message.reasoning_content;
    this.trace.draw();
    this.text.draw();
    if (this.phase === "calling") for (const call of this.calls) call.draw();
    this.figures.textContent = this.pace.text();
    this.onDraw(this);
  }

  /** No more comes; `note` says why if it is not the model's own end. */
  finish(note = "") {
    this.draw();
    if (this.calls.length) this.message.tool_calls = this.calls.map((call) => call.data);
    for (const call of this.calls) call.finish(!note);
    if (!note && this.calls.length) this.list.append(button("results", "Send results"));
    const details = (this.pace.usage && this.pace.usage.completion_tokens_details) || {};
    if (details.reasoning_tokens) this.summary.textContent = `Thinking · ${details.reasoning_tokens} tokens`;
    this.notes.textContent = note || (this.reason === "length" ? "Ended at the most tokens it may have." : "");
    this.element.classList.remove("live");
    this.phase = "done";
  }

  get empty() {
    return !this.message.content && !this.message.reasoning_content && !this.calls.length;
  }

  /** Whether calls wait for results. */
  get asks() {
    return Boolean(this.list.querySelector("[data-action=results]"));
  }

  /** The results as messages; the fields are closed. */
  results() {
    this.list.querySelector("[data-action=results]").remove();
    for (const call of this.calls) call.answered();
    return this.calls.map((call) => ({ role: "tool", tool_call_id: call.data.id, content: call.result.value }));
  }

  /** Put another text in the place of the model's. */
  rewrite(text) {
    this.message.content = text;
    this.body.replaceChildren();
    this.text = new Markdown(this.body);
    this.text.push(text);
    this.text.draw();
  }
}
