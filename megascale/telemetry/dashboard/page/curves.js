// Curves: loss with a colour per restart, validation, gradient norm, throughput, MFU, step time.

import { paced } from "/page/app.js";
import { get } from "/page/api.js";
import { Chart } from "/page/chart.js";
import { startColour } from "/page/colour.js";
import { add, fill, h, segments } from "/page/dom.js";
import { bytes, count, lasting, number, percent, scaled } from "/page/format.js";
import { colours } from "/page/theme.js";

const rate = (value, digits) => scaled(value, digits).join(" ").trim();
const CURVES = [
  ["Loss", "loss", (value, digits = 4) => number(value, digits)],
  ["Validation loss", "validation_loss", (value, digits = 4) => number(value, digits)],
  ["Gradient norm", "grad_norm", number],
  ["Throughput, tokens/s", "tokens_per_s", rate],
  ["MFU", "mfu", percent],
  ["Step time", "step_s", lasting],
  ["Learning rate", "lr", number],
  ["Memory, the most a device had", "memory_bytes", bytes],
];

// The lines of metrics.jsonl, grown by what is new.
class Metrics {
  constructor() {
    this.reset();
  }

  reset() {
    this.next = 0;
    this.starts = 0;
    this.columns = {};
  }

  async read() {
    let got = await get("/api/metrics", { after: this.next });
    if (this.next && got.starts !== this.starts) {
      this.reset(); // after a restart older lines are not the newest of their steps any more
      got = await get("/api/metrics", { after: 0 });
    }
    this.starts = got.starts;
    const have = this.columns.step?.length ?? 0;
    const more = got.columns.step.length;
    if (!more) return false;
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(got.columns)])) {
      const column = (this.columns[name] ??= new Array(have).fill(null));
      for (const value of got.columns[name] ?? new Array(more).fill(null)) column.push(value);
    }
    this.next = got.next;
    return true;
  }

  // A line a start: what a later start did again is drawn faintly.
  series(name) {
    const values = this.columns[name];
    if (!values) return [];
    const { step, start, current } = this.columns;
    const newest = Math.max(...start.slice(-1), 0);
    const lines = new Map();
    for (let i = 0; i < values.length; i += 1) {
      if (values[i] === null || step[i] === null) continue;
      const key = `${start[i]}:${current[i] ? 1 : 0}`;
      if (!lines.has(key)) {
        const number = start[i];
        lines.set(key, { x: [], y: [], low: Infinity, high: -Infinity, start: number, faint: !current[i], colour: () => startColour(number, newest), name: newest ? `start ${number + 1}${current[i] ? "" : ", done again later"}` : "" });
      }
      const line = lines.get(key);
      if (line.x.length && step[i] <= line.x[line.x.length - 1]) continue;
      line.x.push(step[i]);
      line.y.push(values[i]);
      line.low = Math.min(line.low, values[i]);
      line.high = Math.max(line.high, values[i]);
    }
    return [...lines.values()].sort((a, b) => Number(b.faint) - Number(a.faint) || a.start - b.start);
  }

  bounds() {
    const { step } = this.columns;
    if (!step?.length) return [0, 1];
    let low = Infinity;
    let high = -Infinity;
    for (const one of step) {
      if (one < low) low = one;
      if (one > high) high = one;
    }
    return [low, high];
  }
}

class SharedWindow {
  constructor(changed) {
    Object.assign(this, { first: null, last: null, changed });
  }

  set(first, last) {
    Object.assign(this, { first, last });
    this.changed();
  }

  reset() {
    this.set(null, null);
  }
}

function drawing(box, app, wanted, height, after = () => {}) {
  const metrics = new Metrics();
  const charts = new Map();
  const shared = new SharedWindow(() => charts.forEach((chart) => chart.surface.redraw()));
  const show = () => {
    const bounds = metrics.bounds();
    for (const [title, name, format] of wanted) {
      const series = metrics.series(name);
      if (!series.length) continue;
      for (const one of series) one.dots = name === "validation_loss";
      if (!charts.has(name)) charts.set(name, new Chart(box, { title, format, height, window: shared }));
      charts.get(name).set(series, bounds);
    }
    after(metrics, charts.size);
  };
  const read = paced(() => metrics.read().then((more) => { if (more || !charts.size) show(); }).catch((error) => after(metrics, charts.size, error)), 1000);
  read();
  const stops = [app.on("revision", read), app.on("theme", () => charts.forEach((chart) => chart.surface.redraw()))];
  return {
    shared, show, metrics,
    close() {
      read.stop();
      stops.forEach((stop) => stop());
      charts.forEach((chart) => chart.close());
    },
  };
}

export function small(box, app) {
  return drawing(box, app, CURVES.filter(([, name]) => name === "loss" || name === "step_s"), 130);
}

export function open(root, app) {
  const legend = h("div", { class: "legend", "aria-label": "Starts of the run" });
  const message = h("p", { class: "empty" }, "Reading …");
  const box = h("div", { class: "charts" });
  const drawn = drawing(box, app, CURVES, 220, (metrics, number_, error) => {
    message.hidden = number_ > 0 && !error;
    message.textContent = error ? error.message : "No metrics yet: the first line comes with the first logged step.";
    showLegend(legend, metrics);
  });
  const steps = segments("Steps", [["all", "All steps"], ["last", "Last 200"]], "all", (key) => {
    if (key === "all") return drawn.shared.reset();
    const [low, high] = drawn.metrics.bounds();
    return drawn.shared.set(Math.max(low, high - 200), high);
  });
  add(root, [h("div", { class: "bar" }, steps.element, h("span", { class: "muted small" }, "Wheel zooms, drag moves, double click shows all."), h("span", { class: "grow" }), legend), message, box]);
  const stop = app.on("theme", () => showLegend(legend, drawn.metrics));
  return { close() { stop(); drawn.close(); } };
}

function showLegend(box, metrics) {
  const { start } = metrics.columns;
  const newest = start?.length ? start[start.length - 1] : 0;
  if (!newest) return fill(box);
  const shown = Array.from({ length: Math.min(newest + 1, 7) }, (_, i) => newest - i).reverse();
  return fill(box, newest >= 7 ? h("span", {}, `${count(newest - 6)} earlier starts`) : null, shown.map((number_) =>
    h("span", {}, h("i", { class: "swatch", style: { background: startColour(number_, newest) } }), `start ${number_ + 1}`)),
    h("span", { style: { color: colours().muted } }, "faint: done again later"));
}
