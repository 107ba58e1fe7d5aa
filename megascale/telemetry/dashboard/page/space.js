// 3D: the logical topology. Select a rank: its groups, where its data goes, what it is in, its error.
// In a hang the ranks that say nothing are red, those that wait are amber.

import { paced } from "/page/app.js";
import { get } from "/page/api.js";
import { workColour } from "/page/colour.js";
import { add, fill, h, panel } from "/page/dom.js";
import { count, counted, lasting, rankList, sentence } from "/page/format.js";
import { AXES, SHORT } from "/page/mesh.js";
import { boxAt, drawScene } from "/page/space-draw.js";
import { Camera, STATES, boxesOf } from "/page/space-scene.js";
import { Surface, pointing } from "/page/surface.js";

const MOST_BUTTONS = 12;

export function open(root, app) {
  return new SpaceView(root, app).begin();
}

class SpaceView {
  constructor(root, app) {
    Object.assign(this, { root, app, camera: new Camera(), places: null, hang: null, scene: null, focus: 0 });
  }

  begin() {
    this.stage = h("div", { class: "stage" });
    this.side = h("div", { class: "column" });
    this.said = h("p", { class: "small muted", role: "status" }, "Reading …");
    const turn = (by) => h("button", { type: "button", "aria-label": by < 0 ? "Turn left" : "Turn right", on: { click: () => this.#turn(by, 0) } }, by < 0 ? "⟲" : "⟳");
    const zoom = (by) => h("button", { type: "button", "aria-label": by > 1 ? "Zoom in" : "Zoom out", on: { click: () => this.#zoom(by) } }, by > 1 ? "+" : "−");
    const legend = h("div", { class: "legend" },
      h("span", {}, h("i", { class: "swatch", style: { background: "var(--bad)" } }), "silent, or at fault"),
      h("span", {}, h("i", { class: "swatch", style: { background: "var(--warn-fill)" } }), "waiting"),
      AXES.map((axis) => h("span", {}, h("i", { class: "swatch axis", "data-axis": axis }), `its ${SHORT[axis]} group`)));
    this.legend = legend;
    const reset = h("button", { type: "button", on: { click: () => { this.camera = new Camera(); this.#rebuild(); } } }, "Reset");
    add(this.root, [h("div", { class: "bar" }, turn(-0.26), turn(0.26), zoom(1.5), zoom(1 / 1.5), reset, h("span", { class: "grow" }), legend),
      h("div", { class: "beside" }, h("section", { class: "panel fill", "aria-label": "Logical topology" }, this.stage, this.said), this.side)]);
    this.surface = new Surface(this.stage, { draw: (...to) => this.#draw(...to), label: "Logical topology", role: "application" });
    pointing(this.surface, {
      point: (x, y) => this.#point(x, y),
      pick: (x, y) => this.#pick(x, y),
      drag: (dx, dy) => this.#turn(dx * 0.008, dy * 0.006),
      zoom: (factor) => this.#zoom(factor),
    });
    this.surface.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.#legendColours();
    const read = paced(() => this.#read(), 3000);
    read();
    const stops = [
      this.app.on("revision", read),
      this.app.on("rank", () => this.#newRank()),
      this.app.on("theme", () => { this.#legendColours(); this.surface.redraw(); }),
    ];
    return { view: this, close: () => { read.stop(); stops.forEach((stop) => stop()); this.surface.close(); } };
  }

  #legendColours() {
    for (const swatch of this.legend.querySelectorAll(".axis")) swatch.style.background = workColour(swatch.dataset.axis);
  }

  async #read() {
    try {
      this.places = await this.app.places();
    } catch (error) {
      this.said.textContent = error.message;
      return;
    }
    this.hang = await get("/api/read/hang").catch((error) => ({ level: "none", summary: error.message, data: {} }));
    this.#states();
    this.#rebuild();
    this.#side();
  }

  // Of each rank its place in STATES; nobody is marked unless the reader says that the job stands.
  #states() {
    const { places, hang } = this;
    this.state = new Uint8Array(places.meshed.size);
    for (const rank of Object.keys(places.errors)) this.state[rank] = STATES.indexOf("error");
    const { states = [], state = [], suspects = [] } = hang.data;
    state.forEach((one, rank) => { if (states[one] === "waiting") this.state[rank] = Math.max(this.state[rank], STATES.indexOf("waiting")); });
    this.guilty = suspects;
    for (const rank of suspects) this.state[rank] = STATES.indexOf("silent");
    if (suspects.length && !this.focused) {
      this.focus = places.meshed.at(suspects[0], "data");
      this.focused = true;
    }
  }

  #rebuild() {
    if (!this.places) return;
    this.scene = boxesOf(this.places.meshed, (rank) => this.state[rank], { zoom: this.camera.zoom, focus: this.focus });
    const { each } = this.scene;
    this.camera.fit(this.scene.shape, this.surface.width, this.surface.height);
    const text = each > 1 ? `A box is ${each} ranks along DP, and shows the worst of them; zoom in to open them. ` : "";
    this.said.textContent = `${text}Drag turns, wheel zooms; arrow keys turn too.`;
    const states = STATES.map((name, i) => [name, this.state.reduce((sum, one) => sum + (one === i), 0)]).filter(([name, n]) => n && name !== "idle");
    this.surface.canvas.setAttribute("aria-label", `Logical topology: ${AXES.map((axis) => `${SHORT[axis]} ${this.places.meshed[axis]}`).join(", ")}. ${states.map(([name, n]) => `${count(n)} ${name}`).join(", ") || "No rank is marked"}.`);
    this.surface.redraw();
  }

  #draw(context, width, height) {
    if (!this.scene) return;
    this.camera.fit(this.scene.shape, width, height);
    const marks = new Map();
    const labels = new Map();
    const links = [];
    const { rank } = this.app;
    if (rank !== null) this.#mark(rank, marks, labels, links);
    drawScene(context, { scene: this.scene, camera: this.camera, marks, links, labels });
  }

  // The groups of the selected rank, and where its data goes: activations up the pipeline, gradients
  // down; rings within its tensor and data groups.
  #mark(rank, marks, labels, links) {
    const mesh = this.places.meshed;
    for (const axis of ["data", "tensor", "pipeline"]) {
      if (mesh[axis] < 2) continue;
      const group = mesh.group(rank, axis).map((one) => this.scene.boxOf(one)).filter((box, i, all) => box && all.indexOf(box) === i);
      for (const box of group) marks.set(box, workColour(axis));
      for (let i = 0; i + 1 < group.length; i += 1) {
        links.push({ from: group[i], to: group[i + 1], colour: workColour(axis) });
        if (axis === "pipeline") links.push({ from: group[i + 1], to: group[i], colour: workColour(axis), dashed: true });
      }
    }
    const own = this.scene.boxOf(rank);
    if (own) {
      marks.set(own, workColour("forward"));
      labels.set(own, `${rank}`);
    }
  }

  #side() {
    const { hang } = this;
    const bad = hang.level === "alert";
    const buttons = this.guilty.slice(0, MOST_BUTTONS).map((rank) => h("button", { type: "button", on: { click: () => this.app.select(rank) } }, `Rank ${rank}`));
    const waiting = this.state.reduce((sum, one) => sum + (STATES[one] === "waiting"), 0);
    const standing = waiting ? `${counted(waiting, "rank")} ${waiting === 1 ? "waits" : "wait"}` : "";
    fill(this.side, panel("Hang", h("span", { class: "muted" }, standing), h("p", { class: bad ? "bad" : "" }, sentence(hang.summary)), buttons.length ? h("div", { class: "bar" }, buttons) : null), this.#facts());
  }

  #facts() {
    const { rank } = this.app;
    if (rank === null) return panel("Rank", null, h("p", { class: "empty" }, "Click a box."));
    const { places } = this;
    const mesh = places.meshed;
    const rows = [["Position", mesh.place(rank)], ["Host", this.app.hostName(places, rank) ?? "not known"]];
    const i = places.ongoingOf.get(rank);
    if (this.guilty.includes(rank)) rows.push(["Suspected", h("span", { class: "bad" }, this.hang.data.why?.[rank] ?? "it holds the others up")]);
    if (i !== undefined) rows.push(["Ongoing", this.#ongoing(i)]);
    else if (this.guilty.includes(rank)) rows.push(["Ongoing", "said nothing when the others reached their deadline"]);
    const error = places.errors[rank] ?? this.hang.data.errors?.[rank] ?? (i === undefined ? null : places.ongoing.error[i]);
    if (error) rows.push(["Error", h("span", { class: "bad" }, error)]);
    for (const axis of AXES) if (mesh[axis] > 1) rows.push([`${SHORT[axis]} group`, rankList(mesh.group(rank, axis), 3)]);
    return panel(`Rank ${rank}`, h("a", { href: `#/logs?rank=${rank}`, class: "small" }, "Its output"), h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  #ongoing(i) {
    const of = this.places.ongoing;
    const what = [of.name[i], of.op[i] && of.op[i] !== of.name[i] ? of.op[i] : null, of.group[i] ? `of group ${of.group[i]}` : null, of.seq[i] === null ? null : `number ${count(of.seq[i])}`].filter(Boolean).join(" ");
    const where = [of.phase[i] ? `in ${of.phase[i]}` : null, of.step[i] === null ? null : `step ${count(of.step[i])}`, of.peers[i]?.length ? `with rank ${of.peers[i].join(", ")}` : null].filter(Boolean).join(", ");
    return h("span", { class: "warn" }, `${what}${where ? `, ${where}` : ""}; waited ${lasting(of.waited_s[i])}`);
  }

  #told(box) {
    const mesh = this.places.meshed;
    const { rank, each } = box;
    const i = this.places.ongoingOf.get(rank);
    const lines = [each > 1 ? `DP ${box.first}–${box.first + each - 1}; the worst is rank ${rank}` : `rank ${rank}`, mesh.place(rank), STATES[box.state] === "idle" ? "" : STATES[box.state]];
    if (i !== undefined) lines.push(`${this.places.ongoing.name[i]} for ${lasting(this.places.ongoing.waited_s[i])}`);
    return lines.filter(Boolean).join("\n");
  }

  #point(x, y) {
    const box = this.scene ? boxAt(this.scene, this.camera, x, y) : null;
    this.surface.showTip(box ? this.#told(box) : "", x, y);
  }

  #pick(x, y) {
    const box = this.scene ? boxAt(this.scene, this.camera, x, y) : null;
    if (box) this.app.select(box.rank);
  }

  #newRank() {
    if (!this.places) return;
    if (this.app.rank !== null) this.focus = this.places.meshed.at(this.app.rank, "data");
    this.#rebuild();
    this.#side();
  }

  #turn(yaw, pitch) {
    this.camera.yaw += yaw;
    this.camera.pitch = Math.max(0.12, Math.min(1.35, this.camera.pitch + pitch));
    this.surface.redraw();
  }

  #zoom(factor) {
    if (!this.places) return;
    const most = Math.max(1, this.places.meshed.data / 24);
    this.camera.zoom = Math.max(1, Math.min(most, this.camera.zoom * factor));
    this.#rebuild();
  }

  #key(event) {
    const keys = {
      ArrowLeft: () => this.#turn(-0.13, 0), ArrowRight: () => this.#turn(0.13, 0),
      ArrowUp: () => this.#turn(0, -0.08), ArrowDown: () => this.#turn(0, 0.08),
      "+": () => this.#zoom(1.5), "=": () => this.#zoom(1.5), "-": () => this.#zoom(1 / 1.5),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  }
}
