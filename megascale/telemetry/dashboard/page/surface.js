// A canvas that fits its box on any screen, is drawn at most once a frame, and can be pointed at.

import { h } from "/page/dom.js";

export class Surface {
  // draw(context, width, height) in CSS pixels. `height` fixed, or null: as high as the box.
  constructor(box, { draw, height = null, label, role = "img" }) {
    this.box = box;
    this.draw = draw;
    this.fixed = height;
    this.canvas = h("canvas", { role, "aria-label": label, tabindex: role === "img" ? undefined : "0" });
    this.context = this.canvas.getContext("2d");
    this.tip = h("div", { class: "tip", role: "status" });
    box.append(this.canvas, this.tip);
    this.width = 0;
    this.height = 0;
    this.waiting = 0;
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(box);
    this.fit();
  }

  fit() {
    const width = Math.max(60, Math.floor(this.box.clientWidth));
    const height = this.fixed ?? Math.max(60, Math.floor(this.box.clientHeight));
    const ratio = Math.min(3, devicePixelRatio || 1);
    if (width === this.width && height === this.height && ratio === this.ratio) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.render();
  }

  setHeight(height) {
    this.fixed = height;
    this.fit();
  }

  // Soon; `render` is at once.
  redraw() {
    if (!this.waiting) this.waiting = requestAnimationFrame(() => this.render());
  }

  render() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.draw(this.context, this.width, this.height);
    this.drawn = (this.drawn ?? 0) + 1;
    this.canvas.dataset.drawn = String(this.drawn);
  }

  showTip(text, x, y) {
    this.tip.classList.toggle("shown", Boolean(text));
    if (!text) return;
    if (this.tip.textContent !== text) this.tip.textContent = text;
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const left = x + 14 + wide > this.width ? x - wide - 10 : x + 14;
    const top = Math.min(this.height - high, Math.max(0, y + 12));
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
  }

  close() {
    cancelAnimationFrame(this.waiting);
    this.watcher.disconnect();
  }
}

// Pointing, dragging, wheel: heard.point(x, y), heard.pick(x, y), heard.drag(dx, dy, x, y),
// heard.zoom(factor, x, y), heard.leave(). A click that moved is a drag.
export function pointing(surface, heard) {
  const { canvas } = surface;
  let down = null;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x, y] = at(event);
    down = { x, y, far: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (!down) {
      heard.point?.(x, y);
      return;
    }
    const dx = x - down.x;
    const dy = y - down.y;
    if (!down.far && Math.hypot(dx, dy) < 4) return;
    Object.assign(down, { x, y, far: true });
    surface.showTip("");
    heard.drag?.(dx, dy, x, y);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (down && !down.far) heard.pick?.(...at(event), event);
    down = null;
  });
  canvas.addEventListener("keydown", () => surface.showTip(""));
  canvas.addEventListener("pointercancel", () => { down = null; });
  canvas.addEventListener("pointerleave", () => {
    surface.showTip("");
    heard.leave?.();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    surface.showTip("");
    heard.zoom?.(Math.exp(-event.deltaY * 0.0016), ...at(event), event);
  }, { passive: false });
}
