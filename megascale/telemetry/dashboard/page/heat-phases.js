// All phases at once: a row a phase, columns of ranks. Where there are more ranks than columns, a
// column is the slowest of its ranks. Colour: milliseconds beyond what is usual in its pipeline
// stage, on one scale, so that a phase that takes no time cannot be loud.

import { ramp, rampNumber } from "/page/colour.js";
import { beyond, usualMs } from "/page/heat-data.js";
import { clipped } from "/page/heat-grid.js";
import { colours } from "/page/theme.js";

const LEFT = 150;
const LEAST_PX = 4;
const SHARE = 0.15; // of what most time goes into: the end of the scale

export class PhaseRows {
  set(heat, mesh) {
    this.heat = heat;
    const order = heat.phases.map((_, p) => p).sort((a, b) => heat.totals[b] - heat.totals[a]);
    this.rows = order.map((p) => ({ phase: p, name: heat.phases[p], values: beyond(heat, p, mesh) }));
    this.high = SHARE * usualMs(heat) || 1;
  }

  columns(width) {
    const room = Math.max(10, width - LEFT);
    const each = Math.max(1, Math.ceil((this.heat.ranks.length * LEAST_PX) / room));
    return { each, number: Math.ceil(this.heat.ranks.length / each), side: room / Math.ceil(this.heat.ranks.length / each) };
  }

  rowHeight(height) {
    return Math.max(14, Math.min(44, (height - 20) / this.rows.length));
  }

  draw(context, width, height, { picked, marked, waiting }) {
    const paint = colours();
    const list = ramp();
    const { each, number, side } = this.columns(width);
    const high = this.rowHeight(height);
    context.font = `12px ${paint.font}`;
    context.textBaseline = "middle";
    this.rows.forEach((row, r) => {
      context.fillStyle = paint.muted;
      context.textAlign = "left";
      context.fillText(clipped(context, row.name, LEFT - 12), 0, r * high + high / 2);
      for (let c = 0; c < number; c += 1) {
        const worst = this.worst(row, c, each);
        context.fillStyle = Number.isNaN(worst) ? paint.sunken : list[rampNumber(worst / this.high)];
        context.fillRect(LEFT + c * side, r * high, side - (side > 6 ? 1 : 0), high - 2);
      }
    });
    if (picked !== null) {
      context.strokeStyle = paint.accent;
      context.strokeRect(LEFT + Math.floor(picked / each) * side - 1, 1, Math.max(side, 4) + 2, high * this.rows.length - 3);
    }
    context.lineWidth = 2;
    for (const [colour, least, found] of [[paint["warn-fill"], 4, waiting], [paint.bad, 10, marked]]) {
      context.strokeStyle = colour;
      for (const { row, phase } of found) {
        const r = this.rows.findIndex((one) => one.phase === phase);
        const wide = Math.max(side, least);
        context.strokeRect(LEFT + (Math.floor(row / each) + 0.5) * side - wide / 2, r * high, wide, high - 2);
      }
    }
    this.#numbers(context, width, height, paint);
  }

  // Numbers of ranks below the columns, as many as there is room for.
  #numbers(context, width, height, paint) {
    const { each, number, side } = this.columns(width);
    const every = Math.max(1, Math.ceil(46 / side));
    const y = this.rowHeight(height) * this.rows.length + 8;
    context.fillStyle = paint.muted;
    context.textAlign = "center";
    for (let c = 0; c < number; c += every) context.fillText(`${this.heat.ranks[c * each]}`, LEFT + (c + 0.5) * side, y);
    context.textAlign = "left";
    context.fillText("rank", 0, y);
  }

  worst(row, column, each) {
    let worst = NaN;
    const last = Math.min(row.values.length, (column + 1) * each);
    for (let i = column * each; i < last; i += 1) {
      if (Number.isNaN(worst) || row.values[i] > worst) worst = row.values[i];
    }
    return worst;
  }

  // {row of the heat map, phase} at a point: the slowest rank of the column.
  hit(x, y, width, height) {
    const { each, side } = this.columns(width);
    const found = this.rows[Math.floor(y / this.rowHeight(height))];
    const column = Math.floor((x - LEFT) / side);
    if (!found || x < LEFT || column * each >= this.heat.ranks.length) return null;
    let best = column * each;
    for (let i = best; i < Math.min(found.values.length, best + each + 0); i += 1) if (found.values[i] > found.values[best]) best = i;
    return { row: best, phase: found.phase, each };
  }
}
