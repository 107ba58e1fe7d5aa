// Positions of ranks: tensor fastest, then data, then pipeline, as in megascale/topology.py.

export const AXES = ["tensor", "data", "pipeline"];
export const SHORT = { tensor: "TP", data: "DP", pipeline: "PP" };

export class Mesh {
  constructor({ tensor, data, pipeline }) {
    Object.assign(this, { tensor, data, pipeline, size: tensor * data * pipeline });
    this.stride = { tensor: 1, data: tensor, pipeline: tensor * data };
  }

  at(rank, axis) {
    return Math.floor(rank / this.stride[axis]) % this[axis];
  }

  // The ranks of the group of `rank` along `axis`, in order.
  group(rank, axis) {
    const first = rank - this.at(rank, axis) * this.stride[axis];
    return Array.from({ length: this[axis] }, (_, i) => first + i * this.stride[axis]);
  }

  rank(tp, dp, pp) {
    return tp + this.tensor * (dp + this.data * pp);
  }

  place(rank) {
    return AXES.map((axis) => `${SHORT[axis]} ${this.at(rank, axis)}`).join(" · ");
  }
}
