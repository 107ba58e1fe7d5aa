// Heat map: hosts and their ranks for one phase, or all phases; what stands out is ringed and listed.

import { paced } from "/page/app.js";
import { get } from "/page/api.js";
import { ramp, workColour } from "/page/colour.js";
import { add, choice, fill, h, panel, segments, setOptions } from "/page/dom.js";
import { count, counted, number, signed, sentence } from "/page/format.js";
import { cells, firstPhase, fromAnswers, gather, relative, span } from "/page/heat-data.js";
import { Grid } from "/page/heat-grid.js";
import { PhaseRows } from "/page/heat-phases.js";
import { outlierList } from "/page/heat-list.js";
import { AXES, SHORT } from "/page/mesh.js";
import { Surface, pointing } from "/page/surface.js";

const NEAR_SCALE = 100;

export function open(root, app, query) {
  return new HeatView(root, app, query).begin();
}

class HeatView {
  constructor(root, app, query) {
    Object.assign(this, { root, app, heat: null, places: null, grid: new Grid(), rows: new PhaseRows() });
    this.phase = query.get("phase");
    this.unit = "rank";
    this.slow = { level: "none" };
    this.by = "ms";
    this.shape = "hosts";
    this.steps = 100;
  }

  begin() {
    this.#build();
    this.read = paced(() => this.#read(), 4000);
    this.read();
    const stops = [
      this.app.on("revision", this.read),
      this.app.on("rank", () => this.#picked()),
      this.app.on("theme", () => { this.#scale(); this.surface.redraw(); }),
    ];
    return {
      view: this,
      close: () => {
        this.read.stop();
        stops.forEach((stop) => stop());
        this.surface.close();
      },
    };
  }

  #build() {
    const phases = choice("Phase", [], undefined, (value) => { this.phase = value; this.#show(); });
    this.phases = phases.select;
    const units = choice("Cells", [["rank", "ranks"], ["host", "hosts (slowest rank)"]], "rank", (value) => { this.unit = value; this.#show(); });
    this.units = units.select;
    const steps = choice("Steps", [["100", "newest 100"], ["20", "newest 20"], ["1000", "newest 1,000"]], "100", (value) => { this.steps = Number(value); this.read.now(); });
    const shape = segments("Shape", [["hosts", "Hosts"], ["phases", "All phases"]], "hosts", (value) => { this.shape = value; this.#show(); });
    const by = segments("Colour", [["ms", "ms"], ["relative", "against its stage"]], "ms", (value) => { this.by = value; this.#show(); });
    this.single = [phases.label, units.label, by.element];
    this.ramp = h("canvas", { width: NEAR_SCALE, height: 1, "aria-hidden": "true" });
    this.low = h("span");
    this.high = h("span");
    const scale = h("div", { class: "scale", "aria-label": "Colour scale" }, this.low, this.ramp, this.high);
    this.said = h("p", { class: "small muted", role: "status" }, "Reading …");
    this.stage = h("div", { class: "stage" });
    this.side = h("div", { class: "column" });
    const main = h("section", { class: "panel fill", "aria-label": "Heat map" }, this.stage, this.said);
    add(this.root, [h("div", { class: "bar" }, shape.element, this.single, steps.label, h("span", { class: "grow" }), scale), h("div", { class: "beside" }, main, this.side)]);
    this.surface = new Surface(this.stage, { draw: (...to) => this.#draw(...to), label: "Heat map", role: "application" });
    const { canvas } = this.surface;
    pointing(this.surface, {
      point: (x, y) => this.#point(x, y),
      pick: (x, y) => this.#pick(x, y),
      drag: (dx, dy) => this.#move(() => this.grid.panBy(dx, dy, this.surface.width, this.surface.height)),
      zoom: (factor, x, y) => this.#move(() => this.grid.zoomBy(factor, x, y, this.surface.width, this.surface.height)),
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  // Stragglers take a large run's server seconds: what is drawn does not wait for them.
  async #read() {
    try {
      const first = this.steps === 100 ? null : Math.max(1, (this.app.overview?.newest_step ?? 0) - this.steps + 1);
      const [answer, places] = await Promise.all([get("/api/read/heat_map", { first }), this.app.places()]);
      if (answer.level === "none") {
        this.said.textContent = answer.summary;
        return;
      }
      this.answer = answer;
      this.places = places;
      this.#have();
      this.slow = await get("/api/read/stragglers");
      this.#have();
    } catch (error) {
      this.said.textContent = error.message;
    }
  }

  #have() {
    this.heat = fromAnswers(this.answer, this.slow);
    const { heat } = this;
    if (!heat.phases.includes(this.phase)) this.phase = firstPhase(heat);
    const busiest = heat.phases.map((name, p) => [name, heat.totals[p]]).sort((a, b) => b[1] - a[1]);
    setOptions(this.phases, busiest.map(([name]) => [name, name]), this.phase);
    this.#groups();
    this.#show();
  }

  #groups() {
    const host = (rank) => this.app.hostName(this.places, rank) ?? "unknown host";
    const switches = new Map((this.app.overview?.driver?.status?.nodes ?? []).filter((node) => node.switch).map((node) => [node.host, node.switch]));
    this.groups = { host: gather(this.heat, host) };
    if (switches.size) {
      this.groups.switch = gather(this.heat, (rank) => switches.get(host(rank)) ?? "unknown switch");
      if (this.units.options.length < 3) this.units.append(h("option", { value: "switch" }, "switches (slowest rank)"));
    }
    this.rowOf = new Map(this.heat.ranks.map((rank, i) => [rank, i]));
  }

  // Everything that follows from phase, unit and colour.
  #show() {
    if (!this.heat) return;
    this.surface.showTip("");
    const { heat } = this;
    const mesh = this.places.meshed;
    for (const element of this.single) element.hidden = this.shape === "phases";
    if (this.shape === "phases") {
      this.rows.set(heat, mesh);
    } else {
      const p = heat.phases.indexOf(this.phase);
      this.values = this.by === "ms" ? heat.ms[p] : relative(heat, p, mesh);
      this.cells = cells(heat, this.values, this.unit, this.groups);
      this.grid.set(this.cells, ...span(this.cells.values));
    }
    this.marked = this.#marked(this.heat.outliers);
    this.waiting = this.#marked(this.heat.waiting);
    this.#scale();
    this.#picked();
    this.#label();
  }

  // Rows of the heat map that an outlier of this phase names, but for whole stages and the like.
  #marked(outliers) {
    const found = [];
    for (const one of outliers) {
      if (this.shape === "hosts" && one.phase !== this.phase) continue;
      const phase = this.heat.phases.indexOf(one.phase);
      if (one.dimension === "rank" && this.rowOf.has(Number(one.value))) found.push({ row: this.rowOf.get(Number(one.value)), phase });
      if (one.dimension === "host") for (const row of this.groups.host.find((host) => host.name === one.value)?.rows ?? []) found.push({ row, phase });
    }
    return found;
  }

  #scale() {
    if (!this.heat) return;
    const context = this.ramp.getContext("2d");
    ramp().forEach((colour, i, all) => {
      context.fillStyle = colour;
      context.fillRect((i * NEAR_SCALE) / all.length, 0, NEAR_SCALE / all.length + 1, 1);
    });
    const text = (value) => (this.by === "ms" && this.shape === "hosts" ? `${number(value, 4)} ms` : signed(value));
    this.low.textContent = this.shape === "hosts" ? text(this.grid.low) : "usual of its stage";
    this.high.textContent = this.shape === "hosts" ? text(this.grid.high) : `+${number(this.rows.high)} ms`;
  }

  #label() {
    const worst = this.heat.outliers.length;
    const what = this.shape === "hosts" ? `${this.phase}, ${this.unit === "switch" ? `${count(this.cells.values.length)} switches` : counted(this.cells.values.length, this.unit)} on ${counted(this.groups.host.length, "host")}` : `${counted(this.heat.phases.length, "phase")} of ${counted(this.heat.ranks.length, "rank")}`;
    this.surface.canvas.setAttribute("aria-label", `Heat map: ${what}. ${worst ? `${worst} stand out, listed beside.` : "Nothing stands out."} Arrow keys walk, Enter selects, plus and minus zoom.`);
    this.said.textContent = `${what}. ${sentence(this.answer.summary)}`;
  }

  #picked() {
    if (!this.heat) return;
    fill(this.side, panel("Stands out", h("span", { class: "muted" }, this.heat.outliers.length ? count(this.heat.outliers.length) : ""), outlierList(this)), this.#facts());
    this.surface.redraw();
  }

  #facts() {
    const { rank } = this.app;
    if (rank === null) return panel("Rank", null, h("p", { class: "empty" }, "Click a cell, or walk to it with the arrow keys."));
    const mesh = this.places.meshed;
    const i = this.rowOf.get(rank);
    const rows = [["Position", mesh.place(rank)], ["Host", this.app.hostName(this.places, rank) ?? "not known"]];
    if (i !== undefined) {
      const p = this.heat.phases.indexOf(this.phase);
      const off = relative(this.heat, p, mesh)[i];
      rows.push([this.phase, `${number(this.heat.ms[p][i], 4)} ms a step, ${signed(off)} of its stage`]);
    }
    const legend = h("div", { class: "legend" }, AXES.filter((axis) => mesh[axis] > 1).map((axis) => h("span", {}, h("i", { class: "swatch", style: { background: workColour(axis) } }), `its ${SHORT[axis]} group`)));
    return panel(`Rank ${rank}`, h("a", { href: `#/timeline?rank=${rank}`, class: "small" }, "Timeline"), h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), legend);
  }

  #draw(context, width, height) {
    if (!this.heat) return;
    const picked = this.app.rank === null ? null : this.rowOf.get(this.app.rank) ?? null;
    if (this.shape === "phases") {
      this.rows.draw(context, width, height, { picked, marked: this.marked, waiting: this.waiting });
      return;
    }
    const { cellOf } = this.cells;
    const mesh = this.places.meshed;
    const kin = picked === null ? [] : AXES.filter((axis) => mesh[axis] > 1).map((axis) => [workColour(axis), mesh.group(this.app.rank, axis).flatMap((rank) => (this.rowOf.has(rank) ? [cellOf[this.rowOf.get(rank)]] : []))]);
    const cellsOf = (marked) => [...new Set(marked.map(({ row }) => cellOf[row]))];
    this.grid.draw(context, width, height, { rings: cellsOf(this.marked), waits: cellsOf(this.waiting), picked: picked === null ? null : cellOf[picked], kin: this.unit === "rank" ? kin : [] });
  }

  #hit(x, y) {
    if (!this.heat) return null;
    if (this.shape === "phases") return this.rows.hit(x, y, this.surface.width, this.surface.height);
    const c = this.grid.hit(x, y);
    return c === null ? null : { row: this.cells.row[c], phase: this.heat.phases.indexOf(this.phase), cell: c };
  }

  #told({ row, phase, each }) {
    const rank = this.heat.ranks[row];
    const off = relative(this.heat, phase, this.places.meshed)[row];
    const most = each > 1 || (this.unit !== "rank" && this.shape === "hosts") ? "slowest: " : "";
    return `${most}rank ${rank} on ${this.app.hostName(this.places, rank) ?? "unknown host"}\n${this.places.meshed.place(rank)}\n${this.heat.phases[phase]} ${number(this.heat.ms[phase][row], 4)} ms (${signed(off)} of its stage)`;
  }

  #point(x, y) {
    const found = this.#hit(x, y);
    this.surface.showTip(found ? this.#told(found) : "", x, y);
  }

  #pick(x, y) {
    const found = this.#hit(x, y);
    if (!found) return;
    if (found.cell !== undefined) this.grid.cursor = null;
    this.app.select(this.heat.ranks[found.row]);
  }

  #move(change) {
    if (!this.heat || this.shape === "phases") return;
    change();
    this.surface.redraw();
  }

  reveal(rank) {
    const row = this.rowOf.get(rank);
    if (row !== undefined && this.shape === "hosts") this.grid.reveal(this.cells.cellOf[row], this.surface.width, this.surface.height);
  }

  #key(event) {
    if (!this.heat || this.shape === "phases") return;
    const { width, height } = this.surface;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (ways[event.key]) {
      this.grid.walk(...ways[event.key], width, height);
      const c = this.grid.cursor;
      this.said.textContent = this.#told({ row: this.cells.row[c], phase: this.heat.phases.indexOf(this.phase) }).replaceAll("\n", ", ");
    } else if (event.key === "Enter" && this.grid.cursor !== null) {
      this.app.select(this.heat.ranks[this.cells.row[this.grid.cursor]]);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const [x, y] = this.grid.cursor === null ? [width / 2, height / 2] : this.grid.box(this.grid.cursor);
      this.grid.zoomBy(event.key === "-" ? 1 / 1.6 : 1.6, x, y, width, height);
    } else if (event.key === "0") {
      Object.assign(this.grid, { zoom: 1, x: 0, y: 0 });
    } else {
      return;
    }
    event.preventDefault();
    this.surface.redraw();
  }
}

