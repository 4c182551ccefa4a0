// SPDX-License-Identifier: Apache-2.0
// The settings: a form, kept for as long as the tab is open.

const form = document.getElementById("settings");
const fields = form.elements;
const STORE = "nemo.settings";
const KEY = "nemo.key";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The tools that were written, or `null`. What is wrong with them is told beside the field. */
function tools() {
  const text = fields.tools.value.trim();
  let problem = "";
  let list = null;
  if (text) {
    try {
      list = JSON.parse(text);
      if (!Array.isArray(list)) problem = "Tools must be a list: [ … ].";
    } catch (error) {
      problem = `This is not JSON: ${error.message}`;
    }
  }
  fields.tools.setCustomValidity(problem);
  fields.tools.setAttribute("aria-invalid", String(Boolean(problem)));
  document.getElementById("tools-problem").textContent = problem;
  return problem ? null : list;
}

function changed() {
  const kept = {};
  for (const field of fields) {
    if (field.name && field.name !== "key") kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  sessionStorage.setItem(STORE, JSON.stringify(kept));
  sessionStorage.setItem(KEY, fields.key.value);
  document.body.classList.toggle("tint", fields.tint.checked);
  fields.budget.disabled = !fields.thinking.checked;
  tools();
}

export function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) || "{}");
  for (const [name, value] of Object.entries(kept)) {
    const field = fields.namedItem(name);
    if (field && field.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }
  fields.key.value = sessionStorage.getItem(KEY) || "";
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  changed();
}

export const key = () => fields.key.value.trim();
export const system = () => fields.system.value;

/** Show what the server does where a field is left empty. */
export function explain(info) {
  const defaults = info.sampling || {};
  for (const name of ["temperature", "top_p"]) if (name in defaults) fields[name].placeholder = String(defaults[name]);
  fields.speculate.disabled = !speculates(info);
}

export const speculates = (info) => Boolean(info.speculator) && info.speculator !== "none";

/** Whether all fields are good; if one is not, it is shown. */
export function valid() {
  if (form.checkValidity()) return true;
  show(true);
  form.reportValidity();
  return false;
}

/** What a request says of them. Empty fields are left to the server. */
export function parameters() {
  const asked = { nemo: { tokens: true } };
  for (const name of NUMBERS) if (fields[name].value !== "") asked[name] = Number(fields[name].value);
  asked.chat_template_kwargs = { enable_thinking: fields.thinking.checked };
  if (fields.thinking.checked && fields.budget.value !== "") asked.thinking_token_budget = Number(fields.budget.value);
  if (!fields.speculate.checked && !fields.speculate.disabled) asked.nemo.speculate = false;
  const list = tools();
  if (list && list.length) asked.tools = list;
  return asked;
}

const toggle = document.getElementById("toggle");

export function show(open) {
  document.body.classList.toggle("settings", open);
  toggle.setAttribute("aria-expanded", String(open));
}

export const shown = () => document.body.classList.contains("settings");

/** Open at the key, because the server wants one. */
export function askKey() {
  show(true);
  fields.key.focus();
}

toggle.addEventListener("click", () => show(!shown()));
document.getElementById("close").addEventListener("click", () => {
  show(false);
  toggle.focus();
});
