// The logical topology as boxes: TP to the right, DP into the depth, PP upward. Pure: no canvas.
//
// A data-parallel axis of hundreds is collapsed: a box stands for some ranks in a row of it, and for
// the worst of them; zooming in opens the axis around where one looks.

export const AT_ONCE = 24; // places along an axis

// How loud a rank's state is: a box shows the loudest of its ranks.
export const STATES = ["idle", "waiting", "error", "silent"];

// {boxes, boxOf(rank), shape}: a box is {tp, dp, pp, first, each, rank, state}, `rank` the loudest of its ranks.
export function boxesOf(mesh, stateOf, { zoom, focus }) {
  const each = Math.max(1, Math.ceil(mesh.data / (AT_ONCE * zoom)));
  const number = Math.min(AT_ONCE, Math.ceil(mesh.data / each));
  const slot = Math.floor(focus / each);
  const begin = Math.max(0, Math.min(Math.ceil(mesh.data / each) - number, slot - (number >> 1)));
  const boxes = [];
  for (let pp = 0; pp < mesh.pipeline; pp += 1) {
    for (let at = 0; at < number; at += 1) {
      for (let tp = 0; tp < mesh.tensor; tp += 1) {
        const first = (begin + at) * each;
        let rank = mesh.rank(tp, first, pp);
        let state = 0;
        for (let dp = first; dp < Math.min(mesh.data, first + each); dp += 1) {
          const one = mesh.rank(tp, dp, pp);
          if (stateOf(one) > state) {
            rank = one;
            state = stateOf(one);
          }
        }
        boxes.push({ tp, dp: at, pp, first, each: Math.min(each, mesh.data - first), rank, state });
      }
    }
  }
  const boxOf = (rank) => {
    const at = Math.floor(mesh.at(rank, "data") / each) - begin;
    const place = (mesh.at(rank, "pipeline") * number + at) * mesh.tensor + mesh.at(rank, "tensor");
    return at >= 0 && at < number ? boxes[place] : null;
  };
  return { boxes, boxOf, shape: { tensor: mesh.tensor, data: number, pipeline: mesh.pipeline }, each, begin: begin * each };
}

export class Camera {
  constructor() {
    Object.assign(this, { yaw: -0.62, pitch: 0.52, zoom: 1 });
  }

  // Fits `shape` into the canvas; axes of many places are pressed together.
  fit(shape, width, height) {
    const stretch = { tensor: 1, data: Math.max(0.42, Math.min(1, 9 / shape.data)), pipeline: Math.min(1.5, Math.max(0.8, 6 / shape.pipeline)) };
    const half = { tensor: (shape.tensor * stretch.tensor) / 2, data: (shape.data * stretch.data) / 2, pipeline: (shape.pipeline * stretch.pipeline) / 2 };
    Object.assign(this, { shape, stretch, half, scale: 1, cx: 0, cy: 0 });
    let [left, right, top, bottom] = [Infinity, -Infinity, Infinity, -Infinity];
    // one place more to each side, and below: the axes and their names
    for (const a of [-1, 1]) for (const b of [-1, 1]) for (const c of [-1, 1]) {
      const [x, y] = this.turn(a * (half.tensor + 0.6), b * half.data, c * half.pipeline - (c < 0 ? 0.8 * stretch.pipeline : 0));
      left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
    }
    this.scale = Math.min((width - 110) / (right - left), (height - 64) / (bottom - top), 120);
    this.cx = width / 2 - ((left + right) / 2) * this.scale;
    this.cy = height / 2 - ((top + bottom) / 2) * this.scale;
  }

  // [x, y, nearness] of a point, without scale.
  turn(x, z, y) {
    const cos = Math.cos(this.yaw);
    const sin = Math.sin(this.yaw);
    const across = x * cos - z * sin;
    const into = x * sin + z * cos;
    return [across, -y * Math.cos(this.pitch) - into * Math.sin(this.pitch), -into * Math.cos(this.pitch) + y * Math.sin(this.pitch)];
  }

  point(tp, dp, pp) {
    const { stretch, half } = this;
    const [x, y, near] = this.turn((tp + 0.5) * stretch.tensor - half.tensor, (dp + 0.5) * stretch.data - half.data, (pp + 0.5) * stretch.pipeline - half.pipeline);
    return [this.cx + x * this.scale, this.cy + y * this.scale, near];
  }
}
