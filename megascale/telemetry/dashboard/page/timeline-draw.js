// Draws the rows of a timeline: names at the left, time at the top, spans that are in sight, arrows.

import { workColour } from "/page/colour.js";
import { lasting, ticks } from "/page/format.js";
import { clipped } from "/page/heat-grid.js";
import { colours } from "/page/theme.js";

export const LEFT = 156;
export const TOP = 24;
const LANE = 20; // a lane, at most
const LEAST_LANE = 5; // where they do not fit, a rank is one strip: its lanes lie over each other
const LEAST_STRIP = 3;
const GAP = 6; // between ranks
const LABEL = 13; // what a name needs

export class Sheet {
  constructor() {
    Object.assign(this, { data: null, from: 0, to: 1, y: 0, kinds: new Map() });
  }

  // `keep`: the window of time stays, because only what is in it is newer.
  set(data, keep) {
    this.data = data;
    if (!keep) Object.assign(this, { from: 0, to: data.end, y: 0 });
    this.height = 0;
  }

  layout(height) {
    if (this.height === height) return;
    this.height = height;
    const { rows } = this.data;
    const lanes = rows.reduce((sum, row) => sum + Math.max(1, row.lanes.length), 0);
    const room = height - TOP;
    this.dense = lanes * LEAST_LANE + rows.length * GAP > room && rows.length > 8;
    const strip = Math.max(LEAST_STRIP, Math.min(LANE, Math.floor(room / rows.length)));
    this.lane = this.dense ? strip - (strip > 5 ? 1 : 0) : Math.max(LEAST_LANE, Math.min(LANE, Math.floor((room - rows.length * GAP) / Math.max(1, lanes))));
    let y = 0;
    for (const row of rows) {
      row.y = y;
      row.height = this.dense ? this.lane : Math.max(14, Math.max(1, row.lanes.length) * this.lane);
      y += this.dense ? strip : row.height + GAP;
    }
    this.total = y;
    this.every = this.dense ? Math.ceil(LABEL / strip) : 1; // of these rows one has its name
    this.y = Math.max(0, Math.min(this.y, this.total - room));
  }

  // [top within its row, height] of lane `l`.
  strip(l) {
    if (!this.dense) return [l * this.lane, this.lane];
    return l ? [this.lane * 0.45, this.lane * 0.55] : [0, this.lane];
  }

  x(us, width) {
    return LEFT + ((us - this.from) / (this.to - this.from)) * (width - LEFT - 8);
  }

  us(x, width) {
    return this.from + ((x - LEFT) / (width - LEFT - 8)) * (this.to - this.from);
  }

  zoomBy(factor, x, width) {
    const middle = this.us(Math.max(LEFT, x), width);
    const span = Math.max(2, Math.min(this.data.end * 1.02, (this.to - this.from) / factor));
    const share = (middle - this.from) / (this.to - this.from);
    this.from = middle - share * span;
    this.to = this.from + span;
    this.#clamp();
  }

  panBy(dx, dy, width) {
    const by = (-dx / (width - LEFT)) * (this.to - this.from);
    this.from += by;
    this.to += by;
    this.y = Math.max(0, Math.min(this.y - dy, this.total - (this.height - TOP)));
    this.#clamp();
  }

  #clamp() {
    const span = this.to - this.from;
    const low = -0.01 * this.data.end;
    const high = 1.01 * this.data.end;
    if (this.from < low) Object.assign(this, { from: low, to: low + span });
    if (this.to > high) Object.assign(this, { from: Math.max(low, high - span), to: high });
  }

  draw(context, width, height, { rank, chosen, met, label }) {
    this.layout(height);
    const paint = colours();
    context.font = `11px ${paint.font}`;
    context.save();
    context.beginPath();
    context.rect(0, TOP, width, height - TOP);
    context.clip();
    const picked = this.data.rows.find((row) => row.rank === rank);
    this.data.rows.forEach((row, r) => {
      const y = TOP + row.y - this.y;
      if (y > height || y + row.height < TOP) return;
      const isHidden = this.dense && picked && picked !== row && Math.abs(picked.y - row.y) < LABEL;
      const isNamed = row === picked || (r % this.every === 0 && !isHidden);
      this.#row(context, row, y, width, paint, { isPicked: row === picked, label: isNamed ? label(row.rank) : null });
    });
    context.beginPath();
    context.rect(LEFT, TOP, width - LEFT, height - TOP);
    context.clip();
    if (chosen !== null) this.#chosen(context, width, chosen, met, paint);
    context.restore();
    this.#axis(context, width, height, paint);
  }

  #row(context, row, y, width, paint, { isPicked, label }) {
    context.fillStyle = isPicked ? paint["accent-soft"] : paint.sunken;
    context.fillRect(LEFT, y, width - LEFT, row.height);
    if (isPicked) context.fillRect(0, y, LEFT, row.height);
    if (label !== null) this.#name(context, row, y, paint, isPicked, label);
    context.font = `10px ${paint.font}`;
    row.lanes.forEach((lane, l) => {
      if (this.dense && l && lane.stream !== "data") return;
      const [top, high] = this.strip(l);
      this.#lane(context, lane, y + top, high, width, paint);
    });
  }

  #name(context, row, y, paint, isPicked, label) {
    const middle = Math.max(y + Math.min(row.height / 2, 10), y === TOP ? y + LABEL / 2 : 0);
    const name = `${row.rank}`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = `600 ${this.dense ? 11 : 12}px ${paint.font}`;
    const used = 10 + context.measureText(name).width;
    if (isPicked && this.dense) {
      context.fillStyle = paint["accent-soft"];
      context.fillRect(0, middle - LABEL / 2, LEFT - 2, LABEL);
    }
    context.fillStyle = isPicked ? paint.accent : paint.text;
    context.fillText(name, 4, middle);
    context.font = `11px ${paint.font}`;
    context.fillStyle = paint.muted;
    context.fillText(clipped(context, label, LEFT - used - 6), used, middle);
  }

  // Spans of a lane do not overlap, so those in sight are one run; what is thinner than a pixel is
  // drawn with the next that begins in it.
  #lane(context, lane, y, high, width, paint) {
    const { t0_us: begin, dur_us: length } = this.data.columns;
    const { work } = this.data.columns;
    let i = firstAfter(lane.spans, (k) => begin[k] + length[k], this.from);
    let drawn = -1;
    for (; i < lane.spans.length && begin[lane.spans[i]] < this.to; i += 1) {
      const k = lane.spans[i];
      const right = this.x(begin[k] + length[k], width);
      if (right < drawn + 0.5) continue;
      const left = Math.max(LEFT, this.x(begin[k], width));
      const wide = Math.max(0.8, right - left - (right - left > 4 ? 0.6 : 0));
      context.fillStyle = workColour(work[k]);
      context.fillRect(left, y, wide, high - (high > 5 ? 1 : 0));
      drawn = left + wide;
      if (wide > 34 && high > 11) {
        context.fillStyle = work[k] === "wait" ? paint.muted : paint.surface;
        context.textAlign = "left";
        context.fillText(clipped(context, this.data.text("name", k), wide - 6), left + 3, y + high / 2);
      }
    }
  }

  // Left, top, width of span `i`; null where its row is not there.
  box(i, width) {
    const { columns } = this.data;
    const [row, l] = this.data.at.get(i) ?? [];
    if (!row) return null;
    const left = this.x(columns.t0_us[i], width);
    const [top, high] = this.strip(l);
    return { left, top: TOP + row.y - this.y + top, high, wide: Math.max(1, this.x(columns.t0_us[i] + columns.dur_us[i], width) - left) };
  }

  #chosen(context, width, chosen, met, paint) {
    const own = this.box(chosen, width);
    const members = (met?.members ?? []).map((i) => ({ i, at: this.box(i, width) })).filter(({ at }) => at);
    context.lineWidth = 1.5;
    context.strokeStyle = paint.text;
    for (const { at } of members) context.strokeRect(at.left, at.top, at.wide, at.high);
    for (let n = 0; n + 1 < members.length; n += 1) {
      if (met.kind === "transfer") arrow(context, end(members[n].at), end(members[n + 1].at)); // when it has come
      else arrow(context, start(members[n].at), start(members[n + 1].at));
    }
    if (met?.kind === "collective" && met.late !== null && met.wait_us > 1) {
      const at = this.box(met.late, width);
      if (at) {
        context.strokeStyle = paint.bad;
        context.lineWidth = 2;
        context.strokeRect(at.left - 1, at.top - 1, at.wide + 2, at.high + 2);
      }
    }
    if (own) {
      context.strokeStyle = paint.accent;
      context.lineWidth = 2.5;
      context.strokeRect(own.left, own.top, own.wide, own.high);
    }
  }

  #axis(context, width, height, paint) {
    context.fillStyle = paint.surface;
    context.fillRect(0, 0, width, TOP);
    context.font = `11px ${paint.font}`;
    context.fillStyle = paint.muted;
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const us of ticks(this.from, this.to, (width - LEFT) / 110)) {
      const x = this.x(us, width);
      if (x < LEFT || x > width - 24) continue;
      context.fillText(us === 0 ? "0" : lasting(us / 1e6), x, TOP / 2);
      context.fillStyle = paint.line;
      context.globalAlpha = 0.6;
      context.fillRect(Math.round(x), TOP - 4, 1, height - TOP + 4);
      context.globalAlpha = 1;
      context.fillStyle = paint.muted;
    }
    context.textAlign = "left";
    context.fillText("rank", 4, TOP / 2);
  }

  // The span at a point, else the row.
  hit(px, py, width) {
    const y = py - TOP + this.y;
    const row = this.data.rows.findLast((one) => y >= one.y && y < one.y + one.height + (this.dense ? 1 : 0));
    if (!row || py < TOP) return { row: null, span: null };
    if (px < LEFT) return { row, span: null };
    const lanes = this.dense ? row.lanes.toReversed() : row.lanes.slice(Math.floor((y - row.y) / this.lane)).slice(0, 1);
    return { row, span: lanes.map((lane) => this.#spanAt(lane, px, width)).find((span) => span !== null) ?? null };
  }

  #spanAt(lane, px, width) {
    const { t0_us: begin, dur_us: length } = this.data.columns;
    const slack = (1.5 * (this.to - this.from)) / (width - LEFT);
    const at = this.us(px, width);
    const k = lane.spans[firstAfter(lane.spans, (i) => begin[i] + length[i], at - slack)];
    return k !== undefined && begin[k] <= at + slack ? k : null;
  }
}

function firstAfter(spans, endOf, value) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(spans[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

const start = ({ left, top, high }) => [left, top + high / 2];
const end = ({ left, top, wide, high }) => [left + wide, top + high / 2];

function arrow(context, [x0, y0], [x1, y1]) {
  const bend = Math.max(12, Math.min(60, Math.abs(x1 - x0) / 2));
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 6, y1 - 3.5);
  context.lineTo(x1 - 6, y1 + 3.5);
  context.closePath();
  context.fillStyle = context.strokeStyle;
  context.fill();
}
