// Colours with a meaning. Amounts: one hue whose lightness alone tells more from less, so that it
// reads the same to the colour-blind and in grey; the most stands out most from the ground in both
// themes. Kinds of work: eight hues that stay apart for the colour-blind; none of them is red.

import { isDark } from "/page/theme.js";

const LIGHT = [[232, 239, 248], [178, 204, 233], [108, 158, 211], [48, 100, 172], [14, 44, 102]];
const DARK = [[27, 37, 50], [36, 66, 106], [58, 112, 178], [122, 174, 232], [226, 240, 255]];
const STEPS = 64;

function table(points) {
  return Array.from({ length: STEPS }, (_, i) => {
    const at = (i / (STEPS - 1)) * (points.length - 1);
    const low = Math.min(points.length - 2, Math.floor(at));
    return points[low].map((value, k) => Math.round(value + (points[low + 1][k] - value) * (at - low)));
  });
}

const tables = { light: table(LIGHT), dark: table(DARK) };
const css = Object.fromEntries(Object.entries(tables).map(([name, rows]) => [name, rows.map((row) => `rgb(${row.join(" ")})`)]));

// 64 colours from least to most.
export function ramp() {
  return css[isDark() ? "dark" : "light"];
}

export function rampNumber(share) {
  return Math.max(0, Math.min(STEPS - 1, Math.round(share * (STEPS - 1))));
}

const WORK = {
  forward: ["#3d7fd6", "#6ea6f0"],
  backward: ["#1d8a7a", "#43b8a5"],
  optimizer: ["#8a63c9", "#b193ea"],
  tensor: ["#86891a", "#bcc24a"],
  data: ["#7d4e24", "#c8a582"],
  pipeline: ["#b0569c", "#d98bc6"],
  wait: ["#b9c1cc", "#48535f"],
  other: ["#6d7889", "#8391a3"],
};

export const WORK_NAMES = {
  forward: "forward", backward: "backward", optimizer: "optimizer", tensor: "tensor parallel",
  data: "data parallel", pipeline: "pipeline", wait: "waiting", other: "other",
};

// The class of work of a span by its name, its operation and its group.
export function workOf(name, op, group) {
  if (name === "pp_wait" || name === "pp_finish" || op === "wait" || op === "finish" || name === "data_wait") return "wait";
  if (name === "send" || name === "recv" || name === "head_input" || name === "head_gradient") return "pipeline";
  if (name.startsWith("forward") || name === "head") return "forward";
  if (name.startsWith("backward")) return "backward";
  if (name.startsWith("tp_") || group === "tensor" || group === "vocabulary") return "tensor";
  if (name === "grad_sync" || name === "param_gather" || name.startsWith("dp_") || group === "data") return "data";
  if (name === "optimizer" || name === "grad_norm" || name === "world_sums") return "optimizer";
  return "other";
}

export function workColour(kind) {
  return WORK[kind][isDark() ? 1 : 0];
}

// Lines of several starts of a run, in order: the accent for the newest, then hues that stay apart.
const STARTS = {
  light: ["#2458b8", "#a85a1f", "#1d8a7a", "#8a63c9", "#6d7889", "#b0569c", "#8a6d00"],
  dark: ["#7fb0ff", "#e0a06a", "#52c4b2", "#bb9ff0", "#98a5b8", "#e39bd0", "#d6bd4a"],
};

export function startColour(number, newest) {
  const list = STARTS[isDark() ? "dark" : "light"];
  return list[(newest - number) % list.length];
}
