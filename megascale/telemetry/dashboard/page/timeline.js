// Timeline: spans of some sampled steps, a row a rank, by the group of the selected rank.

import { get } from "/page/api.js";
import { WORK_NAMES, workColour } from "/page/colour.js";
import { add, choice, fill, h, segments, setOptions } from "/page/dom.js";
import { bytes, count, counted, lasting } from "/page/format.js";
import { AXES, SHORT } from "/page/mesh.js";
import { Surface, pointing } from "/page/surface.js";
import { meeting, rowsOf } from "/page/timeline-data.js";
import { Sheet } from "/page/timeline-draw.js";

const MOST_RANKS = 256;
const MOST_STEPS = 60; // in the list

export function open(root, app, query) {
  return new TimelineView(root, app, query).begin();
}

class TimelineView {
  constructor(root, app, query) {
    Object.assign(this, { root, app, sheet: new Sheet(), chosen: null, met: null, asked: 0 });
    this.step = query.get("step") ?? "";
    this.more = "1";
    const mesh = app.mesh;
    this.view = query.get("view") ?? (mesh ? AXES.toReversed().find((axis) => mesh[axis] > 1) : null) ?? "tensor";
  }

  begin() {
    const views = segments("Rows", [...AXES.map((axis) => [axis, `${SHORT[axis]} group`]), ["host", "Host"]], this.view, (value) => { this.view = value; this.read(); });
    const steps = choice("Step", [["", "newest"]], "", (value) => { this.step = value; this.read(); });
    const more = choice("Sampled steps", ["1", "2", "3", "5"].map((n) => [n, n]), "1", (value) => { this.more = value; this.read(); });
    this.steps = steps.select;
    this.legend = h("div", { class: "legend" });
    this.said = h("p", { class: "small muted", role: "status" }, "Reading …");
    this.stage = h("div", { class: "stage" });
    const reload = h("button", { type: "button", on: { click: () => { this.step = ""; this.steps.value = ""; this.read(); } } }, "Newest");
    add(this.root, [h("div", { class: "bar" }, views.element, steps.label, more.label, reload, h("span", { class: "grow" }), this.legend),
      h("section", { class: "panel fill", "aria-label": "Timeline" }, this.stage, this.said)]);
    this.surface = new Surface(this.stage, { draw: (...to) => this.#draw(...to), label: "Timeline", role: "application" });
    pointing(this.surface, {
      point: (x, y) => this.#point(x, y),
      pick: (x, y) => this.#pick(x, y),
      drag: (dx, dy) => this.#move(() => this.sheet.panBy(dx, dy, this.surface.width)),
      zoom: (factor, x, y, event) => this.#move(() => (event.shiftKey ? this.sheet.panBy(0, -event.deltaY, this.surface.width) : this.sheet.zoomBy(factor, x, this.surface.width))),
    });
    this.surface.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.read();
    const stops = [
      this.app.on("rank", () => this.#newRank()),
      this.app.on("theme", () => { this.#legend(); this.surface.redraw(); }),
    ];
    return { view: this, close: () => { this.asked += 1; stops.forEach((stop) => stop()); this.surface.close(); } };
  }

  // Ranks of the rows: the group of the selected rank, else of the first that stands out.
  async #ranks(places) {
    const mesh = places.meshed;
    if (this.app.rank === null && this.anchor === undefined) {
      const answer = mesh.size > 64 ? await get("/api/read/heat_map").catch(() => null) : null;
      const worst = (answer?.data?.outliers ?? []).filter((one) => one.dimension === "rank").sort((a, b) => b.share - a.share)[0];
      this.anchor = worst ? Number(worst.value) : places.rank[0] ?? 0;
    }
    const rank = this.app.rank ?? this.anchor;
    if (this.view !== "host") return [rank, mesh.group(rank, this.view)];
    const host = places.hostOf[rank];
    return [rank, places.rank.filter((one) => places.hostOf[one] === host)];
  }

  async read() {
    const ticket = ++this.asked;
    try {
      const places = await this.app.places();
      const [rank, ranks] = await this.#ranks(places);
      const shown = ranks.length > MOST_RANKS ? around(ranks, rank) : ranks;
      const [first, last] = this.#window();
      const columns = await get("/api/spans", { first, last, ranks: shown.join(",") });
      if (ticket !== this.asked) return;
      Object.assign(this, { places, shown, sampled: columns.sampled, chosen: null, met: null });
      const list = columns.sampled.toReversed().slice(0, MOST_STEPS).map((step) => [String(step), count(step)]);
      setOptions(this.steps, [["", "newest"], ...list], this.step);
      if (this.step && !columns.sampled.includes(Number(this.step))) this.steps.append(h("option", { value: this.step, selected: true }, this.step));
      this.data = rowsOf(columns, shown);
      this.sheet.set(this.data, false);
      this.#legend();
      this.#say();
    } catch (error) {
      if (ticket === this.asked) this.said.textContent = error.message;
    }
    this.surface.redraw();
  }

  #window() {
    if (!this.sampled?.length) return [this.step || null, this.step || null];
    const last = this.step ? Number(this.step) : this.sampled.at(-1);
    const at = this.sampled.indexOf(last);
    return [at < 0 ? last : this.sampled[Math.max(0, at + 1 - Number(this.more))], last];
  }

  #newRank() {
    const { rank } = this.app;
    if (rank === null || this.shown?.includes(rank)) {
      this.surface.redraw();
      return;
    }
    this.read();
  }

  #legend() {
    const kinds = new Set(this.data?.columns.work ?? []);
    fill(this.legend, Object.keys(WORK_NAMES).filter((kind) => kinds.has(kind)).map((kind) => h("span", {}, h("i", { class: "swatch", style: { background: workColour(kind) } }), WORK_NAMES[kind])));
  }

  #say() {
    const { columns } = this.data;
    const number = columns.rank.length;
    const steps = columns.first === columns.last ? `step ${count(columns.first)}` : `steps ${count(columns.first)} to ${count(columns.last)}`;
    const text = number ? `${steps}, ${counted(this.shown.length, "rank")}, ${counted(number, "span")}, ${lasting(this.data.end / 1e6)}` : columns.sampled.length ? `No spans of these ranks in ${steps}.` : "No step was sampled yet: spans come every telemetry.span_interval steps.";
    this.said.textContent = `${text}. Click a span for what it waited for; wheel zooms, drag moves, arrow keys too.`;
    this.surface.canvas.setAttribute("aria-label", `Timeline: ${text}`);
  }

  #draw(context, width, height) {
    if (!this.data) return;
    const mesh = this.places.meshed;
    this.sheet.draw(context, width, height, { rank: this.app.rank, chosen: this.chosen, met: this.met, label: (rank) => mesh.place(rank) });
  }

  #told(i) {
    const { columns, text } = this.data;
    const lines = [`${text("name", i)}, rank ${columns.rank[i]}`, lasting(columns.dur_us[i] / 1e6)];
    for (const [field, name] of [["step", "step"], ["chunk", "chunk"], ["micro_batch", "micro-batch"], ["peer", "peer rank"]]) {
      if (columns[field][i] !== null) lines.push(`${name} ${columns[field][i]}`);
    }
    const [op, group] = [text("op", i) ?? "", text("group", i)];
    if (group !== null) lines.push(`${group.includes(op) ? "" : op} ${group} ${columns.seq[i] ?? ""}`.trim());
    if (text("bucket", i) !== null) lines.push(text("bucket", i));
    const size = columns.num_bytes[i];
    if (size !== null) lines.push(`${bytes(size)}, ${bytes(size / (columns.dur_us[i] / 1e6))}/s`);
    return lines;
  }

  #point(x, y) {
    if (!this.data) return;
    const { span } = this.sheet.hit(x, y, this.surface.width);
    this.surface.showTip(span === null ? "" : this.#told(span).join("\n"), x, y);
  }

  #pick(x, y) {
    if (!this.data) return;
    const { row, span } = this.sheet.hit(x, y, this.surface.width);
    if (span === null) {
      this.chosen = this.met = null;
      if (row) this.app.select(row.rank);
    } else {
      this.choose(span);
    }
    this.surface.redraw();
  }

  choose(span) {
    const { columns } = this.data;
    this.chosen = span;
    this.met = meeting(this.data, span, this.places.meshed);
    const what = this.#told(span).join(" · ");
    if (!this.met) this.said.textContent = `${what}.`;
    else if (this.met.kind === "alone") this.said.textContent = `${what}. Its other ends are in no row here: choose another group.`;
    else if (this.met.kind === "transfer") this.said.textContent = `${what}. From rank ${columns.rank[this.met.members[0]]} to rank ${columns.rank[this.met.members.at(-1)]}.`;
    else this.said.textContent = `${what}. ${counted(this.met.members.length, "rank")} met; rank ${columns.rank[this.met.late]} came last, ${lasting(this.met.wait_us / 1e6)} after the first.`;
  }

  #move(change) {
    if (!this.data) return;
    change();
    this.surface.redraw();
  }

  #key(event) {
    if (!this.data) return;
    const { width } = this.surface;
    const keys = {
      ArrowLeft: () => this.sheet.panBy(width / 8, 0, width),
      ArrowRight: () => this.sheet.panBy(-width / 8, 0, width),
      ArrowUp: () => this.sheet.panBy(0, 40, width),
      ArrowDown: () => this.sheet.panBy(0, -40, width),
      "+": () => this.sheet.zoomBy(1.5, width / 2, width),
      "=": () => this.sheet.zoomBy(1.5, width / 2, width),
      "-": () => this.sheet.zoomBy(1 / 1.5, width / 2, width),
      "0": () => this.sheet.set(this.data, false),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
    this.surface.redraw();
  }
}

// The neighbours of `rank` in a group too large to draw.
function around(ranks, rank) {
  const at = Math.max(0, ranks.indexOf(rank));
  const first = Math.max(0, Math.min(ranks.length - MOST_RANKS, at - MOST_RANKS / 2));
  return ranks.slice(first, first + MOST_RANKS);
}
