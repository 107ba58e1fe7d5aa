// Overview: how far, how fast, what happened, what there is.

import { add, fill, h, panel } from "/page/dom.js";
import { DASH, clock, count, lasting, number, percent, rankList, scaled, duration } from "/page/format.js";

const MOST_ROWS = 12;
const SILENT_S = 5; // of a node that should be heard every second
const FINE = new Set(["active", "spare", "joining", "checking"]); // states of nodes in the driver
const GONE = new Set(["lost", "evicted", "leaving"]);
const LEDGER = [
  ["useful", "useful", "var(--accent)"],
  ["checkpoint", "checkpoints", "#8b97a8"],
  ["replay", "steps done again", "#b98b3d"],
  ["detection", "detection", "#c98a12"],
  ["diagnosis", "diagnosis", "#a85a1f"],
  ["restart", "restart", "#7a5ea8"],
  ["idle", "no machines", "#5f6b7c"],
];

export function open(root, app) {
  const figures = h("dl", { class: "figures" });
  const curves = h("div", { class: "charts" });
  const left = h("div", { class: "column" });
  const right = h("div", { class: "column" });
  add(root, [h("section", { class: "panel", "aria-label": "Progress" }, figures), h("div", { class: "two" }, left, right)]);
  const show = () => {
    const seen = app.overview;
    if (!seen) return;
    fill(figures, figuresOf(seen));
    fill(left, seen.revision ? curves : null, incidents(seen, app), checkpoints(seen));
    fill(right, ledger(seen), nodes(seen, app), about(seen));
  };
  show();
  const stops = [app.on("overview", show)];
  let small = null;
  // the first paint is done; then what draws
  const begin = () => import("/page/curves.js").then((module) => { small = module.small(curves, app); });
  const timer = setTimeout(begin, 0);
  return {
    close() {
      clearTimeout(timer);
      stops.forEach((stop) => stop());
      small?.close();
    },
  };
}

function figuresOf(seen) {
  const newest = seen.newest ?? {};
  const [tokens, unit] = scaled(newest.tokens_per_s);
  const [step, stepUnit] = duration(newest.step_s);
  const ettr = seen.driver?.status?.ettr;
  const rows = [
    ["Step", count(seen.newest_step), seen.num_steps ? `of ${count(seen.num_steps)}` : ""],
    ["Loss", number(newest.loss, 4), ""],
    ["Step time", step, stepUnit],
    ["Throughput", tokens, tokens === DASH ? "" : `${unit} tokens/s`],
    ["MFU", newest.mfu === undefined ? DASH : (100 * newest.mfu).toFixed(1), newest.mfu === undefined ? "" : "%"],
    ["Useful time (ETTR)", ettr === null || ettr === undefined ? DASH : (100 * ettr).toFixed(1), ettr === null || ettr === undefined ? "" : "%"],
    ["Ranks", count(seen.num_ranks), seen.num_hosts ? `on ${count(seen.num_hosts)} host${seen.num_hosts > 1 ? "s" : ""}` : ""],
  ];
  return rows.map(([name, value, unitText]) => h("div", {}, h("dt", {}, name),
    h("dd", { class: value === DASH ? "muted" : "" }, value, unitText ? h("small", {}, unitText) : null)));
}

function ledger(seen) {
  const spent = seen.driver?.status?.ledger_s;
  const total = spent ? Object.values(spent).reduce((sum, one) => sum + one, 0) : 0;
  if (!total) return panel("Where the time went", null, h("p", { class: "empty" }, spent ? "Nothing is booked yet." : "Known where a driver runs the job."));
  const parts = LEDGER.filter(([key]) => spent[key] > 0);
  const told = parts.map(([key, name]) => `${name} ${percent(spent[key] / total)}`).join(", ");
  const bar = h("div", { class: "ledger", role: "img", "aria-label": told },
    parts.map(([key, , colour]) => h("i", { style: { flex: `${spent[key]} 0 0`, background: colour } })));
  const legend = h("div", { class: "legend" }, parts.map(([key, name, colour]) =>
    h("span", {}, h("i", { class: "swatch", style: { background: colour } }), `${name} ${percent(spent[key] / total)}`)));
  const restarts = Object.entries(seen.driver.status.restarts ?? {}).reduce((sum, [cause, n]) => sum + (cause === "start" ? 0 : n), 0);
  return panel("Where the time went", h("span", { class: "muted" }, `${lasting(total)}, ${count(restarts)} restart${restarts === 1 ? "" : "s"}`), bar, legend);
}

function incidents(seen, app) {
  const status = seen.driver?.status;
  const openOnes = (status?.incidents ?? []).map((one) => h("div", { class: "open-incident" },
    h("strong", {}, `${one.cause}`), one.ranks.length ? ` on rank${one.ranks.length > 1 ? "s" : ""} ${rankList(one.ranks)}` : "",
    one.nodes.length ? `, node ${one.nodes.slice(0, 4).join(", ")}` : "", one.step === null ? "" : `, step ${count(one.step)}`,
    h("div", { class: "small muted" }, one.text)));
  const rows = (seen.incidents ?? []).slice(-MOST_ROWS).reverse().map((one) => h("tr", {},
    h("td", { class: "time" }, clock(one.unix_s)),
    h("td", {}, one.name),
    h("td", {}, h("button", { type: "button", class: "link", on: { click: () => app.select(one.rank) } }, `rank ${one.rank}`)),
    h("td", { class: "number" }, count(one.step)),
    h("td", { class: "cut", title: one.detail }, one.detail)));
  const hidden = (seen.num_incidents ?? 0) - rows.length;
  const head = h("tr", {}, ["Time", "What", "Who"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "number" }, "Step"), h("th", { scope: "col" }, "Detail"));
  const body = rows.length ? h("table", {}, h("thead", {}, head), h("tbody", {}, rows)) : openOnes.length ? null : h("p", { class: "empty" }, "None so far.");
  return panel("Incidents", hidden > 0 ? h("span", { class: "muted" }, `and ${count(hidden)} earlier`) : null, openOnes, body);
}

function checkpoints(seen) {
  const list = (seen.checkpoints ?? []).slice(-5).reverse();
  if (!list.length) return panel("Checkpoints", null, h("p", { class: "empty" }, "None yet."));
  const head = h("tr", {}, h("th", { scope: "col", class: "number" }, "Step"), h("th", { scope: "col" }, "Written"), h("th", { scope: "col" }, "Where"));
  return panel("Checkpoints", null, h("table", {}, h("thead", {}, head), h("tbody", {}, list.map((one) =>
    h("tr", {}, h("td", { class: "number" }, count(one.step)), h("td", { class: "time" }, clock(one.unix_s)),
      h("td", { class: "cut mono", title: one.path }, one.path.split("/").slice(-1)[0]))))));
}

function nodes(seen, app) {
  const status = seen.driver?.status;
  if (!status) {
    const why = seen.driver?.why ?? "";
    return panel("Nodes", null, h("p", { class: "empty" }, why === "this run has no driver" ? `${count(seen.num_hosts ?? 0)} host${seen.num_hosts === 1 ? "" : "s"}; no driver watches them.` : why));
  }
  const states = new Map();
  for (const node of status.nodes) states.set(node.state, (states.get(node.state) ?? 0) + 1);
  const worth = status.nodes.filter((node) => !FINE.has(node.state) || (node.state === "active" && node.silence_s > SILENT_S));
  const list = (worth.length ? worth : status.nodes).slice(0, MOST_ROWS);
  const rows = list.map((node) => h("tr", {}, h("td", {}, node.node), h("td", { class: GONE.has(node.state) ? "muted" : FINE.has(node.state) ? "" : "warn" }, node.state),
    h("td", {}, node.ranks ? h("button", { type: "button", class: "link", on: { click: () => app.select(node.ranks[0]) } }, node.ranks[0] === node.ranks[1] ? `${node.ranks[0]}` : `${node.ranks[0]}–${node.ranks[1]}`) : DASH),
    h("td", { class: `number ${node.silence_s > SILENT_S && !GONE.has(node.state) ? "warn" : "muted"}` }, lasting(node.silence_s))));
  const head = h("tr", {}, ["Node", "State", "Ranks"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "number" }, "Silent for"));
  const rest = status.nodes.length - list.length;
  return panel("Nodes", h("span", { class: "muted" }, `driver: ${status.phase}`),
    seen.driver.why ? h("p", { class: "warn small" }, seen.driver.why) : null,
    h("div", { class: "node-states" }, [...states].map(([state, n]) => h("span", {}, h("b", {}, count(n)), ` ${state}`))),
    h("table", {}, h("thead", {}, head), h("tbody", {}, rows)),
    rest > 0 ? h("p", { class: "small muted" }, `${count(rest)} more${worth.length ? (rest === 1 ? " is well" : " are well") : ""}`) : null);
}

function about(seen) {
  const mesh = seen.mesh;
  const last = seen.starts?.at(-1);
  const rows = [
    ["Layout", mesh ? `TP ${mesh.tensor} × DP ${mesh.data} × PP ${mesh.pipeline}` : DASH],
    ["Started", last ? `${clock(seen.starts[0].unix_s)}${seen.starts.length > 1 ? `, ${seen.starts.length} starts, last ${clock(last.unix_s)}` : ""}` : DASH],
    ["Folder", h("span", { class: "mono" }, seen.run_dir)],
  ];
  if (seen.description) rows.unshift(["About", seen.description]);
  const notes = (seen.caveats ?? []).slice(0, 6).map((one) => h("p", { class: "small warn" }, one));
  return panel("Run", null, h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), notes);
}
