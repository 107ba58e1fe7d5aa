// What stands out, the worst first: a person clicks it and sees where it is.

import { h } from "/page/dom.js";
import { count, signed } from "/page/format.js";
import { SHORT } from "/page/mesh.js";

const MOST = 40;
const MOST_WAITING = 8;

export function outlierList(view) {
  const own = listed(view, view.heat.outliers, MOST);
  const waiting = listed(view, view.heat.waiting, MOST_WAITING);
  return [
    own ?? h("p", { class: "empty" }, "No rank, host or group is slow by itself."),
    waiting ? [h("h3", {}, "Waiting for others"), waiting] : null,
  ];
}

function listed(view, outliers, most) {
  if (!outliers.length) return null;
  const found = together(outliers);
  const rest = found.length - most;
  return [h("ol", { class: "outliers" }, found.slice(0, most).map((one) => h("li", {}, button(view, one)))), rest > 0 ? h("p", { class: "small muted" }, `and ${count(rest)} more`) : null];
}

// Who stands out in several phases is listed once, by the worst of them.
function together(outliers) {
  const byWho = new Map();
  for (const one of outliers.toSorted((a, b) => b.share - a.share)) {
    const who = `${one.dimension} ${one.value}`;
    if (byWho.has(who)) byWho.get(who).also += 1;
    else byWho.set(who, { ...one, also: 0 });
  }
  return [...byWho.values()];
}

function button(view, one) {
  const { title, where, rank } = told(view, one);
  const look = () => {
    if (view.phase !== one.phase && view.heat.phases.includes(one.phase)) {
      view.phase = one.phase;
      view.phases.value = one.phase;
      view.phases.dispatchEvent(new Event("change"));
    }
    if (rank !== null) {
      view.app.select(rank);
      view.reveal(rank);
      view.surface.redraw();
    }
  };
  const here = rank !== null && rank === view.app.rank && one.phase === view.phase;
  return h("button", { type: "button", class: one.waits ? "waits" : "", "aria-current": here ? "true" : null, on: { click: look } },
    h("i", { class: "ring", "aria-hidden": "true" }), h("strong", {}, title), h("span", { class: "by" }, signed(one.share)), h("span", { class: "where" }, where));
}

function told(view, one) {
  const mesh = view.places.meshed;
  const phase = one.also ? `${one.phase} and ${one.also} more` : one.phase;
  if (one.dimension === "rank") {
    const rank = Number(one.value);
    return { title: `Rank ${one.value}`, where: `${phase}, ${mesh.place(rank)}, ${view.app.hostName(view.places, rank) ?? "unknown host"}`, rank };
  }
  const ranks = `${count(one.num_ranks)} rank${one.num_ranks === 1 ? "" : "s"}`;
  if (one.dimension === "host") {
    const rows = view.groups.host.find((host) => host.name === one.value)?.rows ?? [];
    return { title: `Host ${one.value}`, where: `${phase}, ${ranks}`, rank: rows.length ? view.heat.ranks[rows[0]] : null };
  }
  const first = view.heat.ranks.find((rank) => mesh.at(rank, one.dimension) === Number(one.value));
  return { title: `${SHORT[one.dimension] ?? one.dimension} ${one.value}`, where: `${phase}, ${ranks}`, rank: first ?? null };
}
