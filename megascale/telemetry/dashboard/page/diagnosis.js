// Diagnosis: every reader's answer in a sentence, what is wrong first; its JSON on opening.

import { paced } from "/page/app.js";
import { get } from "/page/api.js";
import { add, fill, h } from "/page/dom.js";
import { sentence } from "/page/format.js";

const LEVELS = ["alert", "notice", "ok"];
const MOST_TEXT = 20_000;

export function open(root, app) {
  const list = h("div", { class: "answers" });
  const message = h("p", { class: "empty", role: "status" }, "Asking the readers …");
  add(root, [message, list]);
  const items = new Map();
  let closed = false;
  const read = paced(async () => {
    try {
      const readers = await get("/api/readers");
      for (const { name, question } of readers) {
        if (closed) return;
        if (!items.has(name)) {
          items.set(name, new Item(name, question));
          list.append(items.get(name).element);
        }
        message.textContent = `Asking ${name} …`;
        await items.get(name).read();
      }
      order(list, items);
      const bad = [...items.values()].filter((item) => item.level === "alert").length;
      message.textContent = `${items.size} questions asked; ${bad ? `${bad} found what is wrong` : "none found anything wrong"}. Open one for its numbers.`;
    } catch (error) {
      message.textContent = error.message;
    }
  }, 15_000);
  read();
  const stop = app.on("revision", read);
  return { close() { closed = true; read.stop(); stop(); } };
}

function order(list, items) {
  const sorted = [...items.values()].sort((a, b) => rank(a) - rank(b));
  sorted.forEach((item, i) => {
    if (list.children[i] !== item.element) list.insertBefore(item.element, list.children[i] ?? null);
  });
}

function rank(item) {
  const at = LEVELS.indexOf(item.level);
  return at < 0 ? LEVELS.length : at;
}

class Item {
  constructor(name, question) {
    this.name = name;
    this.said = h("span", { class: "said muted" }, question);
    this.body = h("div", { class: "body" });
    const summary = h("summary", {}, h("span", { class: "sign", "aria-hidden": "true" }), h("span", { class: "name" }, name.replaceAll("_", " ")), this.said);
    this.element = h("details", { class: "answer", "data-reader": name, on: { toggle: () => this.#show() } }, summary);
    this.element.append(this.body);
    this.question = question;
  }

  async read() {
    try {
      this.answer = await get(`/api/read/${this.name}`);
      this.level = this.answer.level;
      this.said.textContent = sentence(this.answer.summary);
      this.said.className = this.level === "none" ? "said muted" : "said";
    } catch (error) {
      this.answer = null;
      this.level = "none";
      this.said.textContent = error.message;
      this.said.className = "said muted";
    }
    this.element.dataset.level = this.level;
    this.#show();
  }

  #show() {
    if (!this.element.open) return;
    const parts = [h("p", { class: "muted" }, this.question)];
    for (const caveat of this.answer?.caveats ?? []) parts.push(h("p", { class: "warn small" }, caveat));
    if (this.answer) {
      const text = JSON.stringify(this.answer.data, null, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inside) => `[${inside.replace(/\s+/g, " ")}]`);
      const cut = text.length > MOST_TEXT;
      parts.push(h("pre", { tabindex: "0", "aria-label": `Numbers of ${this.name}` }, cut ? `${text.slice(0, MOST_TEXT)} …` : text));
      parts.push(h("a", { href: `/api/read/${this.name}`, class: "small" }, cut ? "All of it, as JSON" : "As JSON"));
    }
    fill(this.body, parts);
  }
}
