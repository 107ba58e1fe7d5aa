// A grid of cells in blocks, a block a host, fitted into its box, that can be zoomed and walked.
//
// Cells are filled by colour, so that the colour is set 64 times and not 12,288 times.

import { ramp, rampNumber } from "/page/colour.js";
import { colours } from "/page/theme.js";

const GAP = 0.7; // between blocks, in cells
const LABEL_PX = 15;
const MOST_PX = 104; // of a cell that is not zoomed
const NUMBER_PX = 34; // from this size on a cell says whose it is

export class Grid {
  constructor() {
    this.zoom = 1;
    this.x = 0;
    this.y = 0;
    this.cursor = null;
    this.cells = null;
  }

  set(cells, low, high) {
    const shape = `${cells.values.length}/${cells.blocks.length}`;
    if (this.shape !== shape) Object.assign(this, { zoom: 1, x: 0, y: 0, cursor: null, shape });
    Object.assign(this, { cells, low, high, fitted: "", version: (this.version ?? 0) + 1 });
  }

  // Columns of blocks, columns of cells in a block, and the size of a cell, so that all fit.
  fit(width, height) {
    const key = `${width}x${height}`;
    if (this.fitted === key) return;
    this.fitted = key;
    const { blocks } = this.cells;
    const most = Math.max(...blocks.map((block) => block.count));
    let best = { size: 0 };
    const shapes = blocks.length === 1 ? [Math.ceil(Math.sqrt((most * width) / height)) || 1] : [most, Math.ceil(most / 2)];
    for (const across of new Set(shapes)) {
      const down = Math.ceil(most / across);
      for (let columns = 1; columns <= blocks.length; columns += 1) {
        const rows = Math.ceil(blocks.length / columns);
        const size = Math.min(width / (columns * (across + GAP)), height / (rows * (down + GAP)), MOST_PX);
        if (size > best.size) best = { size, across, down, columns, rows };
      }
    }
    Object.assign(this, best);
    this.left = Math.max(0, (width - this.columns * (this.across + GAP) * this.size) / 2); // centred
  }

  // Left, top and side of cell `c` in pixels.
  box(c) {
    const { blocks } = this.cells;
    const b = this.blockOf(c);
    const inside = c - blocks[b].first;
    const side = this.size * this.zoom;
    const x = ((b % this.columns) * (this.across + GAP) + (inside % this.across) + GAP / 2) * side - this.x + this.left;
    const y = (Math.floor(b / this.columns) * (this.down + GAP) + Math.floor(inside / this.across) + GAP / 2) * side - this.y;
    return [x, y, side];
  }

  blockOf(c) {
    const { blocks } = this.cells;
    let low = 0;
    let high = blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (blocks[middle].first <= c) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The cell at a point; null: none.
  hit(px, py) {
    const side = this.size * this.zoom;
    const bx = (px + this.x - this.left) / side / (this.across + GAP);
    const by = (py + this.y) / side / (this.down + GAP);
    const column = Math.floor(bx);
    const b = Math.floor(by) * this.columns + column;
    const block = this.cells.blocks[b];
    if (!block || column < 0 || column >= this.columns || by < 0) return null;
    const i = Math.floor((bx - column) * (this.across + GAP) - GAP / 2);
    const j = Math.floor((by - Math.floor(by)) * (this.down + GAP) - GAP / 2);
    const inside = j * this.across + i;
    return i >= 0 && i < this.across && j >= 0 && inside < block.count ? block.first + inside : null;
  }

  // The cells are drawn when what they show or where they lie has changed; what is ringed and
  // selected lies over them.
  draw(context, width, height, { rings, waits, picked, kin }) {
    this.fit(width, height);
    const paint = colours();
    const { canvas } = context;
    const key = [canvas.width, canvas.height, this.zoom, this.x, this.y, this.version, paint.surface].join();
    if (this.drawnKey !== key) {
      this.drawnKey = key;
      this.below ??= document.createElement("canvas");
      Object.assign(this.below, { width: canvas.width, height: canvas.height });
      const under = this.below.getContext("2d");
      under.scale(canvas.width / width, canvas.height / height);
      this.#cells(under, width, height, paint);
    }
    context.drawImage(this.below, 0, 0, width, height);
    for (const [colour, members] of kin) this.#outline(context, members, colour, 1.5, 0);
    this.#outline(context, waits, paint["warn-fill"], 1.5, waits.length > 400 ? 0 : 7);
    this.#outline(context, rings, paint.bad, 2, rings.length > 400 ? 0 : 13);
    if (picked !== null) this.#outline(context, [picked], paint.accent, 3, 15, 8);
    if (this.cursor !== null) this.#outline(context, [this.cursor], paint.text, 1.5, 11);
  }

  #cells(context, width, height, paint) {
    const { values, blocks } = this.cells;
    const side = this.size * this.zoom;
    const range = this.high - this.low || 1;
    const gap = side > 6 ? 1 : side > 3 ? 0.5 : 0;
    const list = ramp();
    const paths = Array.from({ length: list.length + 1 }, () => []);
    blocks.forEach(({ first, count }, b) => {
      const left = ((b % this.columns) * (this.across + GAP) + GAP / 2) * side - this.x + this.left;
      const top = (Math.floor(b / this.columns) * (this.down + GAP) + GAP / 2) * side - this.y;
      if (left > width || top > height || left + this.across * side < 0 || top + this.down * side < 0) return;
      for (let i = 0; i < count; i += 1) {
        const value = values[first + i];
        const colour = Number.isNaN(value) ? list.length : rampNumber((value - this.low) / range);
        paths[colour].push(left + (i % this.across) * side, top + Math.floor(i / this.across) * side);
      }
    });
    paths.forEach((path, colour) => {
      context.fillStyle = list[colour] ?? paint.sunken;
      for (let i = 0; i < path.length; i += 2) context.fillRect(path[i], path[i + 1], side - gap, side - gap);
    });
    this.#labels(context, width, height, paint);
    this.#numbers(context, width, height, paint, list);
  }

  #labels(context, width, height, paint) {
    const side = this.size * this.zoom;
    const room = side * this.across;
    if (this.cells.blocks.length < 2 || side * GAP < LABEL_PX || room < 44) return;
    context.font = `11px ${paint.font}`;
    context.fillStyle = paint.muted;
    context.textAlign = "left";
    context.textBaseline = "bottom";
    this.cells.blocks.forEach((block) => {
      const [x, y] = this.box(block.first);
      if (x < width && y < height + 12 && x + room > 0 && y > 0) context.fillText(clipped(context, block.name, room + side * GAP - 6), x, y - 2);
    });
  }

  // Which rank a large cell is, in whatever reads best on its colour.
  #numbers(context, width, height, paint, list) {
    const side = this.size * this.zoom;
    if (side < NUMBER_PX) return;
    context.font = `11px ${paint.font}`;
    context.textAlign = "left";
    context.textBaseline = "top";
    const { values } = this.cells;
    for (let c = 0; c < values.length; c += 1) {
      const [x, y] = this.box(c);
      if (x > width || y > height || x + side < 0 || y + side < 0) continue;
      const share = (values[c] - this.low) / (this.high - this.low || 1);
      context.fillStyle = share > 0.5 ? list[0] : paint.text;
      context.fillText(clipped(context, this.cells.name(c).replace(/^rank /, ""), side - 8), x + 5, y + 5);
    }
  }

  // Rings around cells; on small cells at least `least` pixels wide, so that one in 12,288 is seen.
  #outline(context, members, colour, line, least, around = 0) {
    if (!members.length) return;
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.beginPath();
    for (const c of members) {
      const [x, y, side] = this.box(c);
      const width = Math.max(side + line + around, least);
      context.rect(x + (side - width) / 2 - 0.5, y + (side - width) / 2 - 0.5, width, width);
    }
    context.stroke();
  }

  zoomBy(factor, px, py, width, height) {
    const zoom = Math.max(1, Math.min(60, this.zoom * factor));
    this.x = ((this.x + px - this.left) * zoom) / this.zoom - px + this.left;
    this.y = ((this.y + py) * zoom) / this.zoom - py;
    this.zoom = zoom;
    this.#clamp(width, height);
  }

  panBy(dx, dy, width, height) {
    this.x -= dx;
    this.y -= dy;
    this.#clamp(width, height);
  }

  // Move the cursor in a direction, across blocks as on the screen, and into sight.
  walk(dx, dy, width, height) {
    if (this.cursor === null) {
      this.cursor = this.hit(width / 2, height / 2) ?? 0;
      return;
    }
    const [x, y, side] = this.box(this.cursor);
    for (const far of [1, 1 + GAP, 1 + 2 * GAP]) {
      const next = this.hit(x + side / 2 + dx * side * far, y + side / 2 + dy * side * far);
      if (next !== null && next !== this.cursor) {
        this.cursor = next;
        this.reveal(next, width, height);
        return;
      }
    }
  }

  reveal(c, width, height) {
    const [x, y, side] = this.box(c);
    if (x < 0 || x + side > width) this.x += x + side / 2 - width / 2;
    if (y < 0 || y + side > height) this.y += y + side / 2 - height / 2;
    this.#clamp(width, height);
  }

  #clamp(width, height) {
    const side = this.size * this.zoom;
    this.x = Math.max(0, Math.min(this.x, this.columns * (this.across + GAP) * side + 2 * this.left - width));
    this.y = Math.max(0, Math.min(this.y, this.rows * (this.down + GAP) * side - height));
    if (this.zoom === 1) Object.assign(this, { x: 0, y: 0 });
  }
}

export function clipped(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}
