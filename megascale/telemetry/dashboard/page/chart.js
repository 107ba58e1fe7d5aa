// A chart of lines over steps on a canvas of our own. A plotting library is 4.8 MB, a second of two
// cores before its first line, and writes styles into the page, which the page's policy forbids.
//
// What does not fit a column of pixels is drawn as the least and the most of it: 30,000 steps cost
// what fits the screen, and no spike is lost.

import { h } from "/page/dom.js";
import { number, tickTexts, ticks } from "/page/format.js";
import { Surface, pointing } from "/page/surface.js";
import { colours } from "/page/theme.js";

const MARGIN = { left: 56, right: 10, top: 8, bottom: 22 };

export class Chart {
  // series: [{x, y, colour, name, dots}], colour a function; format(value): text of the axis.
  constructor(box, { title, format = number, height = 200, window }) {
    this.format = format;
    this.series = [];
    this.window = window; // {first, last, changed()}: shared by the charts of a page
    this.value = h("span", { class: "value" });
    this.stage = h("div", { class: "stage" });
    box.append(h("section", { class: "panel chart", "aria-label": title }, h("header", {}, h("h2", {}, title), this.value), this.stage));
    this.title = title;
    this.surface = new Surface(this.stage, { draw: (...args) => this.draw(...args), height, label: title });
    pointing(this.surface, {
      point: (x, y) => this.point(x, y),
      zoom: (factor, x) => this.zoom(factor, x),
      drag: (dx) => this.pan(dx),
      leave: () => { this.at = null; this.surface.redraw(); },
    });
    this.surface.canvas.addEventListener("dblclick", () => this.window.reset());
  }

  set(series, bounds) {
    this.series = series;
    this.bounds = bounds;
    const known = series.flatMap((one) => (one.y.length ? [one.y[one.y.length - 1]] : []));
    this.value.textContent = known.length ? this.format(known[known.length - 1]) : "";
    const least = Math.min(...series.map((one) => one.low));
    const most = Math.max(...series.map((one) => one.high));
    const count = series.reduce((sum, one) => sum + one.y.length, 0);
    this.surface.canvas.setAttribute("aria-label", count
      ? `${this.title}: ${count} values in ${series.length} line${series.length > 1 ? "s" : ""}, from ${this.format(least)} to ${this.format(most)}, last ${this.value.textContent}`
      : `${this.title}: no values yet`);
    this.surface.redraw();
  }

  range() {
    const [low, high] = this.bounds ?? [0, 1];
    return [this.window.first ?? low, Math.max((this.window.last ?? high), (this.window.first ?? low) + 1)];
  }

  scales(width, height) {
    const [first, last] = this.range();
    let low = Infinity;
    let high = -Infinity;
    for (const { x, y } of this.series) {
      for (let i = lower(x, first); i < x.length && x[i] <= last; i += 1) {
        if (y[i] < low) low = y[i];
        if (y[i] > high) high = y[i];
      }
    }
    if (low > high) [low, high] = [0, 1];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    const floor = low >= 0 && low - pad < 0 ? 0 : low - pad;
    const inner = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
    return {
      first, last, low: floor, high: high + pad,
      x: (step) => MARGIN.left + ((step - first) / (last - first)) * inner[0],
      y: (value) => MARGIN.top + (1 - (value - floor) / (high + pad - floor)) * inner[1],
      step: (x) => first + ((x - MARGIN.left) / inner[0]) * (last - first),
    };
  }

  draw(context, width, height) {
    const paint = colours();
    const to = this.scales(width, height);
    this.axes(context, width, height, to, paint);
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, 0, width - MARGIN.left - MARGIN.right, height - MARGIN.bottom + 1);
    context.clip();
    for (const one of this.series) drawLine(context, one, to);
    context.restore();
    if (this.at) this.cross(context, height, to, paint);
  }

  axes(context, width, height, to, paint) {
    context.font = `11px ${paint.font}`;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    const values = ticks(to.low, to.high, 4);
    const texts = tickTexts(values, this.format);
    values.forEach((value, i) => {
      const y = Math.round(to.y(value)) + 0.5;
      context.strokeStyle = paint.line;
      context.beginPath();
      context.moveTo(MARGIN.left, y);
      context.lineTo(width - MARGIN.right, y);
      context.stroke();
      context.fillStyle = paint.muted;
      context.textAlign = "right";
      context.fillText(texts[i], MARGIN.left - 8, y);
    });
    context.textAlign = "center";
    for (const step of ticks(to.first, to.last, Math.max(2, width / 110))) {
      if (Math.round(step) === step) context.fillText(step.toLocaleString("en"), Math.min(width - 20, to.x(step)), height - 8);
    }
  }

  cross(context, height, to, paint) {
    const { step, hits } = this.at;
    const x = Math.round(to.x(step)) + 0.5;
    context.strokeStyle = paint["line-strong"];
    context.beginPath();
    context.moveTo(x, MARGIN.top);
    context.lineTo(x, height - MARGIN.bottom);
    context.stroke();
    for (const { one, i } of hits) {
      context.fillStyle = one.colour();
      context.beginPath();
      context.arc(to.x(one.x[i]), to.y(one.y[i]), 3, 0, 7);
      context.fill();
    }
  }

  point(x, y) {
    const to = this.scales(this.surface.width, this.surface.height);
    const wanted = to.step(x);
    const hits = this.series.map((one) => ({ one, i: nearest(one.x, wanted) })).filter(({ one, i }) => i >= 0 && Math.abs(to.x(one.x[i]) - x) < 12);
    this.at = hits.length ? { step: hits[0].one.x[hits[0].i], hits } : null;
    const lines = hits.map(({ one, i }) => `${one.name ? `${one.name}: ` : ""}${this.format(one.y[i])}`);
    this.surface.showTip(this.at ? [`step ${this.at.step.toLocaleString("en")}`, ...lines].join("\n") : "", x, y);
    this.surface.redraw();
  }

  zoom(factor, x) {
    const to = this.scales(this.surface.width, this.surface.height);
    const middle = to.step(x);
    const [low, high] = this.bounds;
    const first = Math.max(low, middle - (middle - to.first) / factor);
    const last = Math.min(high, middle + (to.last - middle) / factor);
    if (last - first < 4) return;
    this.window.set(first <= low && last >= high ? null : Math.floor(first), first <= low && last >= high ? null : Math.ceil(last));
  }

  pan(dx) {
    if (this.window.first === null) return;
    const { first, last } = this.window;
    const by = Math.round((-dx / (this.surface.width - MARGIN.left)) * (last - first));
    const moved = Math.max(this.bounds[0] - first, Math.min(this.bounds[1] - last, by));
    if (moved) this.window.set(first + moved, last + moved);
  }

  close() {
    this.surface.close();
  }
}

function drawLine(context, one, to) {
  const begin = Math.max(0, lower(one.x, to.first) - 1);
  const end = Math.min(one.x.length, lower(one.x, to.last) + 2);
  context.strokeStyle = one.colour();
  context.fillStyle = one.colour();
  context.globalAlpha = one.faint ? 0.45 : 1;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let column = NaN;
  let low = 0;
  let high = 0;
  for (let i = begin; i < end; i += 1) {
    const x = to.x(one.x[i]);
    const y = to.y(one.y[i]);
    if (Math.round(x) === column) {
      if (y < low) { context.lineTo(x, y); low = y; }
      else if (y > high) { context.lineTo(x, y); high = y; }
    } else {
      if (i === begin) context.moveTo(x, y);
      else context.lineTo(x, y);
      column = Math.round(x);
      low = y;
      high = y;
    }
  }
  context.stroke();
  if (one.dots || end - begin < 3) {
    for (let i = begin; i < end; i += 1) {
      context.beginPath();
      context.arc(to.x(one.x[i]), to.y(one.y[i]), 2.5, 0, 7);
      context.fill();
    }
  }
  context.globalAlpha = 1;
}

export function lower(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(sorted, value) {
  if (!sorted.length) return -1;
  const at = lower(sorted, value);
  if (at === sorted.length) return at - 1;
  return at > 0 && value - sorted[at - 1] < sorted[at] - value ? at - 1 : at;
}

