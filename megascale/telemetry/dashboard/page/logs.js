// Logs: the first errors that ranks left, and the end of one rank's output, followed.

import { get } from "/page/api.js";
import { add, fill, h, panel } from "/page/dom.js";
import { clock, count } from "/page/format.js";

const MOST_CHARACTERS = 400_000;
const FOLLOW_MS = 2000;
const MOST_ERRORS = 8;

export function open(root, app, query) {
  const log = h("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Output of the rank" });
  const errors = h("div");
  const input = h("input", { type: "number", min: "0", step: "1", inputmode: "numeric", value: query.get("rank") ?? String(app.rank ?? 0) });
  const follow = h("input", { type: "checkbox", checked: true });
  const note = h("span", { class: "small muted", role: "status" });
  const state = { rank: null, next: null, timer: 0, closed: false };
  add(root, [
    panel("First errors", null, errors),
    h("div", { class: "bar" }, h("label", {}, "Rank", input), h("label", {}, follow, "Follow"), note),
    log,
  ]);
  const pick = () => {
    const rank = Number(input.value);
    if (!Number.isInteger(rank) || rank < 0 || input.value === "") return;
    app.select(rank);
    start(rank);
  };
  input.addEventListener("change", pick);
  const stop = app.on("rank", (rank) => {
    if (rank !== null && rank !== state.rank) {
      input.value = String(rank);
      start(rank);
    }
  });

  async function readErrors() {
    const found = await get("/api/log").catch((error) => ({ errors: [], failed: error.message }));
    if (state.closed) return;
    const shown = found.errors.slice(0, MOST_ERRORS).map((one, i) => h("div", { class: "first-error" },
      h("strong", { class: i ? "" : "bad" }, i ? `Rank ${one.rank}` : `First: rank ${one.rank}`), h("span", { class: "muted" }, `  ${clock(one.unix_s)}, exit code ${one.exit_code ?? "unknown"}  `),
      h("button", { type: "button", class: "link", on: { click: () => { input.value = String(one.rank); pick(); } } }, "its output"),
      h("pre", { tabindex: "0", "aria-label": `Error of rank ${one.rank}` }, one.message)));
    const more = (found.num_errors ?? 0) - shown.length;
    fill(errors, shown.length ? shown : h("p", { class: "empty" }, found.failed ?? "No rank left an error."), more > 0 ? h("p", { class: "small muted" }, `and ${count(more)} later, which may follow from these`) : null);
  }

  function start(rank) {
    clearTimeout(state.timer);
    Object.assign(state, { rank, next: null });
    log.textContent = "";
    note.textContent = "Reading …";
    more(rank);
  }

  async function more(rank) {
    try {
      const got = await get("/api/log", { rank, after: state.next });
      if (state.closed || rank !== state.rank) return;
      if (state.next !== null && got.start !== state.next) log.textContent = "";
      const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      if (got.text) log.textContent = (log.textContent + got.text).slice(-MOST_CHARACTERS);
      if (got.text && (atEnd || state.next === null)) log.scrollTop = log.scrollHeight;
      state.next = got.next;
      note.textContent = got.why || (got.next ? "" : "The log is empty.");
    } catch (error) {
      if (!state.closed && rank === state.rank) note.textContent = error.message;
    }
    if (!state.closed && rank === state.rank) state.timer = setTimeout(() => next(rank), FOLLOW_MS);
  }

  function next(rank) {
    if (follow.checked) more(rank);
    else state.timer = setTimeout(() => next(rank), FOLLOW_MS);
  }

  readErrors();
  const again = setInterval(readErrors, 10_000);
  start(Number(input.value) || 0);
  return {
    close() {
      state.closed = true;
      clearTimeout(state.timer);
      clearInterval(again);
      stop();
    },
  };
}
