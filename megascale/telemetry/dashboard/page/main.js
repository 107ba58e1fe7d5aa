// Starts the page: the frame, the stream of events, and one view at a time, loaded when looked at.

import { App, paced } from "/page/app.js";
import { get } from "/page/api.js";
import { add, fill, h } from "/page/dom.js";
import { count, sentence } from "/page/format.js";
import { onTheme, wireTheme } from "/page/theme.js";

const VIEWS = [
  ["overview", "Overview"],
  ["curves", "Curves"],
  ["heat", "Heat map"],
  ["timeline", "Timeline"],
  ["space", "3D"],
  ["diagnosis", "Diagnosis"],
  ["logs", "Logs"],
];

const NEEDS_RUN = new Set(["curves", "heat", "timeline", "space", "diagnosis"]);

const $ = (id) => document.getElementById(id);
const app = new App();
let shown = null; // {name, close}
let opening = 0;

function route() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: VIEWS.some(([one]) => one === name) ? name : "overview", query: new URLSearchParams(query ?? "") };
}

export function link(name, query = {}) {
  const search = new URLSearchParams(query).toString();
  return `#/${name}${search ? `?${search}` : ""}`;
}

async function show() {
  const { name, query } = route();
  const ticket = ++opening;
  for (const anchor of $("tabs").children) {
    if (anchor.dataset.view === name) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  if (query.has("rank")) app.select(Number(query.get("rank")));
  if (shown?.name === name) {
    shown.turn?.(query);
    return;
  }
  if (NEEDS_RUN.has(name) && !app.overview?.revision) {
    shown?.close?.();
    shown = null;
    fill($("main"), h("p", { class: "empty" }, "This view needs a run that has begun; it comes by itself."));
    return;
  }
  const view = await import(`/page/${name}.js`);
  if (ticket !== opening) return;
  shown?.close?.();
  const root = h("div", { class: "view", style: { display: "contents" } });
  fill($("main"), root);
  document.title = `${VIEWS.find(([one]) => one === name)[1]} · ${app.overview?.name ?? "megascale"}`;
  shown = { name, ...view.open(root, app, query) };
}

function showOverview() {
  const seen = app.overview;
  $("name").textContent = seen.name ?? seen.run_dir.split("/").at(-1);
  $("name").title = seen.run_dir;
  $("act").hidden = !seen.may_write;
  mark("overview");
}

function showHeadline() {
  const { level, summary, also } = app.headline;
  $("headline").dataset.level = level;
  fill($("headline"), h("span", { class: "sign", "aria-hidden": "true" }),
    h("div", {}, h("p", { title: summary }, summary), also ? h("p", { class: "also" }, also) : null));
  if (level !== "waiting") mark("headline");
}

// When something was there first: what the page is measured by.
function mark(name) {
  if (!performance.getEntriesByName(`megascale-${name}`).length) performance.mark(`megascale-${name}`);
}

function showPicked() {
  const box = $("picked");
  if (app.rank === null) {
    fill(box);
    return;
  }
  const words = h("span", {}, h("strong", {}, `Rank ${app.rank}`), ` ${app.mesh?.place(app.rank) ?? ""}`);
  const clear = h("button", { type: "button", class: "quiet", "aria-label": "Clear the selected rank", on: { click: () => app.select(null) } }, "✕");
  fill(box, h("span", { class: "chip" }, words, clear));
  app.places().then((places) => {
    const host = app.hostName(places, app.rank);
    if (host && words.isConnected) words.append(` · ${host}`);
  }).catch(() => {});
}

async function readOverview() {
  const seen = await get("/api/overview");
  const before = app.overview;
  app.overview = seen;
  app.tell("overview", seen);
  if (seen.revision !== before?.revision) app.tell("revision", seen.revision);
}

async function readHeadline() {
  const seen = app.overview;
  const open = seen?.driver?.status?.incidents?.length ?? 0;
  const also = open ? `The driver acts on ${count(open)} incident${open > 1 ? "s" : ""}.` : "";
  if (!seen || seen.revision === 0) {
    app.headline = { level: "waiting", summary: sentence(seen?.why || "the run has not been read yet"), also };
  } else {
    try {
      if (!app.headline || app.headline.level === "waiting") await readHang();
      app.headline = headlineOf(await get("/api/read/summary"), seen.why ? `What is shown may be old: ${seen.why}` : also);
    } catch (error) {
      app.headline = { level: "notice", summary: error.message, also };
    }
  }
  app.tell("headline", app.headline);
}

// A run that stands still is known at once; the whole summary of 12,288 ranks takes seconds.
async function readHang() {
  const { level, summary } = await get("/api/read/hang");
  if (level === "alert") {
    app.headline = { level, summary: sentence(summary), also: "" };
    app.tell("headline", app.headline);
  }
}

// What is wrong comes before how fast it goes: the worst finding is the sentence.
function headlineOf({ level, summary, data }, also) {
  const [worst, ...more] = data.findings ?? [];
  if (!worst) return { level, summary: sentence(summary), also };
  const others = more.length ? `Also: ${more.map((one) => one.reader.replaceAll("_", " ")).join(", ")}.` : "";
  return { level, summary: sentence(worst.summary), also: [also, others].filter(Boolean).join(" ") };
}

const wantHeadline = paced(readHeadline, 2000);
const wantOverview = paced(() => readOverview().then(wantHeadline).catch(lost), 1000);

function lost(error) {
  $("live").className = "live lost";
  $("live").textContent = error.message;
}

function listen() {
  const source = new EventSource("/api/events");
  source.addEventListener("state", (event) => {
    const { revision, step, why } = JSON.parse(event.data);
    $("live").className = why ? "live" : "live on";
    $("live").textContent = step === null ? (why ? "waiting" : "no step yet") : `step ${count(step)}`;
    if (revision !== app.overview?.revision || why !== app.overview?.why) wantOverview();
  });
  source.addEventListener("incident", (event) => {
    app.tell("incident", JSON.parse(event.data));
    wantOverview();
  });
  source.addEventListener("driver", (event) => {
    app.tell("driver", JSON.parse(event.data));
    wantOverview();
  });
  source.addEventListener("error", () => lost(new Error("not connected: trying again")));
}

function keys(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape" && !$("dialog").open) {
    if (typing) event.target.blur();
    else app.select(null);
  }
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("rank").focus();
  }
  const number = Number(event.key);
  if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && number >= 1 && number <= VIEWS.length) {
    location.hash = link(VIEWS[number - 1][0]);
  }
}

// For the browser's console: what is selected, and what the view that is shown holds.
globalThis.megascale = { app, get view() { return shown?.view ?? null; }, get shown() { return shown?.name ?? null; } };

add($("tabs"), VIEWS.map(([name, title], i) => h("a", { href: link(name), "data-view": name, title: `Key ${i + 1}` }, title)));
wireTheme($("theme"));
onTheme(() => app.tell("theme"));
app.on("overview", showOverview);
app.on("headline", showHeadline);
app.on("rank", showPicked);
app.on("revision", () => { if (!shown) show(); });
$("act").addEventListener("click", () => import("/page/act.js").then((act) => act.open($("dialog"), app)));
$("go").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("rank").value;
  app.select(text === "" ? null : Number(text));
  $("rank").setCustomValidity(text === "" || app.rank === Number(text) ? "" : `ranks go from 0 to ${(app.overview?.world_size ?? 1) - 1}`);
  $("rank").reportValidity();
  $("rank").value = "";
});
$("rank").addEventListener("input", () => $("rank").setCustomValidity(""));
addEventListener("hashchange", show);
addEventListener("keydown", keys);
readOverview().catch(lost).finally(() => {
  show().then(wantHeadline);
  listen();
});
