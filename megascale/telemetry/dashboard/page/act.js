// What needs the token: spans or a profile of a live run, a node out of the job.

import { get, hasToken, post, setToken } from "/page/api.js";
import { fill, h } from "/page/dom.js";

const FOLLOW_MS = 300_000;

export function open(dialog, app) {
  dialog.returnValue = "";
  if (hasToken()) choices(dialog, app);
  else unlock(dialog, app);
  if (!dialog.open) dialog.showModal();
}

function frame(dialog, title, form) {
  fill(dialog, h("h2", { id: "dialog-title" }, title), form);
  form.querySelector("input, select, button")?.focus();
}

function buttons(dialog, text) {
  return h("div", { class: "buttons" }, h("button", { type: "button", on: { click: () => dialog.close() } }, "Close"), h("button", { type: "submit", class: "main" }, text));
}

function unlock(dialog, app) {
  const input = h("input", { type: "password", autocomplete: "off", required: true });
  const said = h("p", { class: "small muted", role: "status" }, "It is in the file that the dashboard was started with, and is kept in this tab only.");
  const form = h("form", { method: "dialog" }, h("label", {}, "Token", input), said, buttons(dialog, "Unlock"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    setToken(input.value.trim());
    try {
      await post("/api/token", {});
      choices(dialog, app);
    } catch (error) {
      setToken(null);
      said.className = "small bad";
      said.textContent = error.message;
    }
  });
  frame(dialog, "Act on this run", form);
}

function choices(dialog, app) {
  const what = h("select", {}, [["spans", "spans of the next steps"], ["torch", "torch profile of the next steps"], ["memory", "memory snapshot"]].map(([value, text]) => h("option", { value }, text)));
  const steps = h("input", { type: "number", min: "1", max: "1000", value: "3", required: true });
  const ranks = h("input", { type: "text", placeholder: "all; or such as 0,8-15", value: app.rank === null ? "" : String(app.rank) });
  const said = h("p", { class: "small muted", role: "status" });
  const form = h("form", { method: "dialog" }, h("label", {}, "Ask the run for", what), h("label", {}, "Steps", steps), h("label", {}, "Ranks", ranks), said, buttons(dialog, "Ask"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = await tell(said, () => post("/api/requests", { what: what.value, num_steps: Number(steps.value), ranks: ranks.value.trim() || null }));
    if (asked) follow(dialog, said, asked);
  });
  fill(dialog, h("h2", { id: "dialog-title" }, "Act on this run"), form, evicting(app));
  what.focus();
}

// How many ranks have answered, until all have or the dialog is closed.
async function follow(dialog, said, asked) {
  const endMs = performance.now() + FOLLOW_MS;
  while (dialog.open && said.isConnected && performance.now() < endMs) {
    await new Promise((resolve) => { setTimeout(resolve, 1000); });
    const got = await get(`/api/requests/${asked.name}`).catch(() => null);
    if (!got) continue;
    const { done = 0, refused = 0 } = got.states;
    said.textContent = [asked.told, `${done} of ${asked.num_ranks} done${refused ? `, ${refused} refused` : ""}.`, ...got.paths.slice(0, 1), ...got.refused.slice(0, 1)].join(" ");
    if (done + refused >= asked.num_ranks) return;
  }
}

function evicting(app) {
  const nodes = app.overview?.driver?.status?.nodes ?? [];
  if (!nodes.length) return null;
  const mine = app.rank === null ? null : nodes.find((node) => node.ranks && node.ranks[0] <= app.rank && app.rank <= node.ranks[1]);
  const node = h("input", { type: "text", required: true, value: mine?.node ?? "" });
  const reason = h("input", { type: "text", required: true, maxlength: "300" });
  const said = h("p", { class: "small muted", role: "status" }, "The job restarts without it; it does not come back.");
  const form = h("form", {}, h("h3", {}, "Evict a node"), h("label", {}, "Node", node), h("label", {}, "Why", reason), said,
    h("div", { class: "buttons" }, h("button", { type: "submit" }, "Evict")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await tell(said, () => post("/api/evict", { node: node.value.trim(), reason: reason.value.trim() }));
  });
  return form;
}

async function tell(said, work) {
  said.className = "small muted";
  said.textContent = "Asking …";
  try {
    const answer = await work();
    said.textContent = answer.told ?? "Done.";
    return answer;
  } catch (error) {
    said.className = "small bad";
    said.textContent = error.message;
    return null;
  }
}
