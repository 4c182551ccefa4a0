// SPDX-License-Identifier: Apache-2.0
// A model's text as nodes: the part of Markdown that models write, each token tinted by where it came from.
// Text becomes text nodes only, so nothing in it is ever taken for HTML.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^\s*>\s?/;
const ROW = /^\s*\|.*\|\s*$/;
const RULE = /^\s*\|?[\s:|-]*-[\s:|-]*\|[\s:|-]*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*(?!\*)|\*(?=[^\s*])[^*]+\*/g;
const MOST = 1000; // characters of a line that are drawn again with each token

function element(name, className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  return made;
}

/** A line, or a piece of a long one, and which of its characters came from which kind of token. */
class Line {
  constructor(continued = false) {
    this.text = "";
    this.ends = [];
    this.kinds = [];
    this.continued = continued;
  }

  add(text, kind) {
    this.text += text;
    this.ends.push(this.text.length);
    this.kinds.push(kind);
  }

  /** Characters `from` to `to` as nodes of `parent`; a token that was a draft gets an element of its own. */
  put(parent, from, to) {
    let i = this.ends.findIndex((end) => end > from);
    for (; from < to; i++) {
      const end = Math.min(this.ends[i], to);
      const part = this.text.slice(from, end);
      if (this.kinds[i]) {
        const token = element("span", `token ${this.kinds[i]}`);
        token.textContent = part;
        parent.append(token);
      } else if (parent.lastChild instanceof Text) parent.lastChild.appendData(part);
      else parent.append(part);
      from = end;
    }
  }

  /** The same, with code, bold and emphasis. */
  inline(parent, from = 0, to = this.text.length) {
    let at = from;
    for (const match of this.text.slice(from, to).matchAll(INLINE)) {
      const [all, ticks, code, bold] = match;
      const start = from + match.index;
      this.put(parent, at, start);
      at = start + all.length;
      const edge = code ? ticks.length : bold ? 2 : 1;
      const inner = element(code ? "code" : bold ? "strong" : "em");
      if (code) this.put(inner, start + edge, at - edge);
      else this.inline(inner, start + edge, at - edge);
      parent.append(inner);
    }
    this.put(parent, at, to);
  }
}

/** Writes text that comes in pieces into `root`. Only the last line is ever drawn again. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.line = new Line();
    this.ready = []; // lines that are complete and not drawn
    this.tentative = null; // how to undo the drawing of the last line
    this.state = { block: null, key: "", tail: null, fence: "" };
  }

  /** More text, which came as a token of a kind: a class name, or "" for no tint. Drawn by `draw`. */
  push(text, kind = "") {
    const parts = text.split("\n");
    parts.forEach((part, i) => {
      if (part) this.line.add(part, kind);
      if (i < parts.length - 1) this.cut(false);
      else if (this.line.text.length > MOST) this.cut(true);
    });
  }

  cut(continued) {
    this.line.whole = !continued;
    this.ready.push(this.line);
    this.line = new Line(continued);
  }

  draw() {
    this.undo();
    for (const line of this.ready) this.place(line, true);
    this.ready = [];
    if (!this.line.text) return;
    const state = { ...this.state };
    this.added = [];
    this.place(this.line, false);
    this.tentative = { state, added: this.added };
    this.added = null;
  }

  undo() {
    if (!this.tentative) return;
    for (const node of this.tentative.added) node.remove();
    this.state = this.tentative.state;
    this.tentative = null;
  }

  append(parent, ...nodes) {
    parent.append(...nodes);
    if (this.added) this.added.push(...nodes);
  }

  /** The block that is open, if it is what `key` says; a new one otherwise. */
  open(key, make) {
    if (this.state.key !== key || !this.state.block) {
      const block = make();
      this.append(this.root, block);
      this.state = { ...this.state, block, key };
    }
    return this.state.block;
  }

  shut() {
    this.state = { ...this.state, block: null, key: "" };
  }

  inline(parent, line, from) {
    const nodes = document.createDocumentFragment();
    line.inline(nodes, from);
    this.append(parent, ...nodes.childNodes);
    this.state.tail = parent;
  }

  place(line, complete) {
    const text = line.text;
    if (this.state.fence) return this.code(line, complete);
    if (line.continued && this.state.tail) return this.inline(this.state.tail, line, 0);
    const fence = FENCE.exec(text);
    if (fence) return this.fence(fence[1], fence[2]);
    if (!text.trim()) return this.shut();
    const heading = HEADING.exec(text);
    if (heading) return this.heading(line, heading);
    const item = ITEM.exec(text);
    if (item) return this.item(line, item);
    if (RULE.test(text) && this.state.key === "table") return complete && this.rule();
    if (ROW.test(text)) return this.row(line);
    const quote = QUOTE.exec(text);
    if (quote) return this.lines(line, "blockquote", quote[0].length);
    // An indented line below an item goes on with it.
    if (/^\s/.test(text) && this.state.key.startsWith("list")) return this.more(this.state.tail, line, 0);
    return this.lines(line, "p", 0);
  }

  fence(mark, language) {
    const figure = element("figure", "code");
    const bar = element("figcaption");
    const name = element("span");
    name.textContent = language;
    const copy = element("button", "copy");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.dataset.copy = "code";
    bar.append(name, copy);
    const code = element("code");
    const pre = element("pre");
    pre.tabIndex = 0; // so that the keyboard can scroll it
    pre.append(code);
    figure.append(bar, pre);
    this.append(this.root, figure);
    this.state = { block: null, key: "", tail: code, fence: mark };
  }

  code(line, complete) {
    const trimmed = line.text.trim();
    const { fence, tail } = this.state;
    const ends = trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
    if (ends && !line.continued) {
      this.state = { block: null, key: "", tail: null, fence: "" };
      return;
    }
    const nodes = document.createDocumentFragment();
    line.put(nodes, 0, line.text.length);
    if (complete && line.whole) nodes.append("\n");
    this.append(tail, ...nodes.childNodes);
  }

  heading(line, match) {
    this.shut();
    // The page's own headings are above those of a text.
    const made = element(`h${Math.min(match[1].length + 2, 6)}`);
    this.append(this.root, made);
    this.inline(made, line, match[0].length);
  }

  item(line, match) {
    const [all, indent, mark] = match;
    const ordered = /\d/.test(mark);
    const depth = Math.min(Math.floor(indent.replaceAll("\t", "    ").length / 2), 4);
    const list = this.open(`list ${ordered} ${depth}`, () => element(ordered ? "ol" : "ul", `depth-${depth}`));
    const item = element("li");
    if (ordered) item.value = parseInt(mark, 10);
    this.append(list, item);
    this.inline(item, line, all.length);
  }

  lines(line, name, from) {
    const fresh = this.state.key !== name;
    const block = this.open(name, () => element(name));
    if (fresh) this.inline(block, line, from);
    else this.more(block, line, from);
  }

  more(block, line, from) {
    this.append(block, element("br"));
    this.inline(block, line, from);
  }

  row(line) {
    const table = this.open("table", () => element("table"));
    const row = element("tr");
    const edges = [...line.text.matchAll(/\|/g)].map((match) => match.index);
    for (let i = 0; i + 1 < edges.length; i++) {
      const cell = element("td");
      line.inline(cell, edges[i] + 1, edges[i + 1]);
      row.append(cell);
    }
    this.append(table, row);
  }

  /** The line below a table's head: what is above it are headings. */
  rule() {
    const head = this.state.block.lastChild;
    for (const cell of [...head.children]) {
      const heading = element("th");
      heading.scope = "col";
      heading.append(...cell.childNodes);
      cell.replaceWith(heading);
    }
  }
}
