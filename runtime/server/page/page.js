// SPDX-License-Identifier: Apache-2.0
// The conversation: what was said, what is asked, and what the keys and buttons do.

import { Answer, button, make } from "./answer.js";
import * as settings from "./settings.js";
import { chat, info, ServerError } from "./stream.js";

const at = (id) => document.getElementById(id);
const main = at("main");
const input = at("input");

let turns = []; // { messages, element, view? }: view is the Answer of the model's turns
let server = {};
let running = null; // the AbortController of the answer that comes
let follows = true; // whether the end of the conversation is in view, and is to stay there

function say(text) {
  if (at("status").textContent !== text) at("status").textContent = text;
}

function follow() {
  if (follows) main.scrollTop = main.scrollHeight;
}

main.addEventListener("scroll", () => (follows = main.scrollHeight - main.scrollTop - main.clientHeight < 48), {
  passive: true,
});
new ResizeObserver(follow).observe(main);

function add(turn) {
  turns.push(turn);
  if (turn.element) at("turns").append(turn.element);
  at("empty").hidden = true;
}

function cut(from) {
  for (const turn of turns.splice(from)) if (turn.element) turn.element.remove();
  at("empty").hidden = turns.length > 0;
}

function clearProblem() {
  for (const old of at("turns").querySelectorAll(".error")) old.remove();
}

function problem(error) {
  const item = make("li", "error");
  const text = make("p", "", error.message);
  text.setAttribute("role", "alert");
  item.append(text, button("retry", "Try again"));
  at("turns").append(item);
  say("");
  if (error.status === 401) settings.askKey();
}

function drawn(answer) {
  const words = { waiting: "Waiting …", thinking: "Thinking …", answering: "Answering …", calling: "Calling a tool …" };
  if (running) say(words[answer.phase] || "");
  follow();
}

/** The buttons of the last answer; earlier ones can be copied only. */
function offer() {
  const last = turns.length - 1;
  turns.forEach((turn, i) => {
    if (!turn.view) return;
    const made = [button("copy", "Copy")];
    if (i === last) made.push(button("again", "Regenerate"), button("rewrite", "Edit"));
    turn.element.querySelector(":scope > .actions").replaceChildren(...made);
  });
}

function run(controller) {
  running = controller;
  document.body.classList.toggle("running", Boolean(controller));
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
  main.setAttribute("aria-busy", String(Boolean(controller)));
}

function request() {
  const messages = turns.flatMap((turn) => turn.messages);
  const system = settings.system();
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const asked = { messages, stream: true, stream_options: { include_usage: true }, ...settings.parameters() };
  return server.model ? { model: server.model, ...asked } : asked;
}

/** Ask for an answer to what has been said. */
async function answer() {
  clearProblem();
  const body = request();
  const view = new Answer(drawn);
  const turn = { messages: [], element: view.element, view };
  add(turn);
  const controller = new AbortController();
  run(controller);
  say("Waiting …");
  follows = true;
  follow();
  let failure = null;
  try {
    for await (const chunks of chat(body, settings.key(), controller.signal)) view.push(chunks);
  } catch (error) {
    failure = error;
  }
  const stopped = controller.signal.aborted;
  run(null);
  view.finish(stopped ? "Stopped." : failure ? "Broken off." : "");
  if (!turns.includes(turn)) return; // a new chat was begun
  turn.messages = [view.message];
  if (view.empty && failure) cut(turns.length - 1);
  offer();
  say(stopped ? "Stopped." : "Done.");
  if (failure && !stopped) problem(failure);
  follow();
  if (failure && !stopped && !(failure instanceof ServerError)) throw failure;
}

/** Results of calls that wait for them become messages. */
function collect() {
  const last = turns.at(-1);
  if (last && last.view && last.view.asks) add({ messages: last.view.results(), element: null });
}

function send() {
  const text = input.value;
  if (running || !text.trim() || !settings.valid()) return;
  collect();
  input.value = "";
  const element = make("li", "turn question");
  element.setAttribute("aria-label", "Question");
  const body = make("div", "text", text);
  body.dir = "auto";
  const actions = make("p", "actions");
  actions.append(button("edit", "Edit"), button("copy", "Copy"));
  element.append(body, actions);
  add({ messages: [{ role: "user", content: text }], element });
  answer();
}

function stop() {
  if (running) running.abort();
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have no clipboard for pages of plain HTTP, but still this.
    const field = make("textarea", "hidden");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  say("Copied.");
}

function rewrite(turn) {
  const view = turn.view;
  const field = make("textarea", "rewrite");
  field.value = view.message.content;
  field.rows = 8;
  field.setAttribute("aria-label", "Answer");
  const actions = view.actions;
  const done = (keep) => {
    if (keep) view.rewrite(field.value);
    field.remove();
    view.body.hidden = false;
    offer();
    actions.firstChild.focus();
  };
  const save = make("button", "", "Save");
  const cancel = make("button", "", "Cancel");
  save.addEventListener("click", () => done(true));
  cancel.addEventListener("click", () => done(false));
  view.body.hidden = true;
  view.body.after(field);
  actions.replaceChildren(save, cancel);
  field.focus();
}

const ACTIONS = {
  copy: (i, from) => copy(turns[i].messages[0].content, from),
  edit: (i) => {
    input.value = turns[i].messages[0].content;
    cut(i);
    clearProblem();
    offer();
    input.focus();
  },
  again: (i) => {
    if (!settings.valid()) return;
    cut(i);
    answer();
  },
  rewrite: (i) => rewrite(turns[i]),
  retry: () => {
    if (!settings.valid()) return;
    // What came of the answer that failed makes room for another.
    if (turns.at(-1).view) cut(turns.length - 1);
    answer();
  },
  results: () => {
    if (!settings.valid()) return;
    collect();
    answer();
  },
};

at("turns").addEventListener("click", ({ target }) => {
  if (target.dataset.copy) copy(target.closest(".code").querySelector("code").textContent, target);
  const act = ACTIONS[target.dataset.action];
  if (!act || running) return;
  act(turns.findIndex((turn) => turn.element && turn.element.contains(target)), target);
});

at("turns").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.closest(".call textarea")) return;
  event.preventDefault();
  if (!running && turns.at(-1).view?.asks) ACTIONS.results();
});

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});

input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (settings.shown()) settings.show(false);
});

at("stop").addEventListener("click", () => {
  stop();
  input.focus();
});

at("new").addEventListener("click", () => {
  stop();
  cut(0);
  clearProblem();
  say("");
  input.focus();
});

function legend() {
  const words = make("span", "", "Tokens:");
  const own = make("span", "mark own", "the model’s own");
  at("legend").replaceChildren(words, own);
  if (!settings.speculates(server)) return;
  at("legend").append(make("span", `mark token by-${server.speculator}`, `drafts of ${server.speculator}, accepted`));
}

/** What the server runs. Without an answer the page works, but cannot tell. */
async function learn() {
  try {
    server = await info(settings.key());
  } catch (error) {
    if (error.status === 401) say("This server wants an API key: see the settings.");
    else say(error.message);
    return;
  }
  const parts = [server.model, server.context ? `${server.context.toLocaleString("en")} tokens of context` : ""];
  at("model").textContent = parts.filter(Boolean).join(" · ");
  document.title = `${server.model} · nemo-build`;
  settings.explain(server);
  legend();
}

settings.restore();
at("key").addEventListener("change", learn);
input.focus();
learn();
