// Draws the boxes of the logical topology from the back to the front, the loud ones over the rest.

import { workColour } from "/page/colour.js";
import { SHORT } from "/page/mesh.js";
import { colours } from "/page/theme.js";

const FILL = 0.62; // of its place, a box
const SHADES = [0.04, 0.15, 0.23]; // how much darker the top, the front and the side of a box are

export function drawScene(context, { scene, camera, marks, links, labels }) {
  const paint = colours();
  const drawn = scene.boxes.map((box) => ({ box, at: camera.point(box.tp, box.dp, box.pp) }));
  drawn.sort((a, b) => a.at[2] - b.at[2]);
  const quiet = drawn.filter(({ box }) => !marks.has(box) && box.state === 0);
  const loud = drawn.filter(({ box }) => marks.has(box) || box.state > 0).sort((a, b) => a.box.state - b.box.state || a.at[2] - b.at[2]);
  context.globalAlpha = loud.length ? 0.5 : 1;
  for (const { box } of quiet) cube(context, camera, box, shadesOf(context, paint["line-strong"]), paint.surface);
  context.globalAlpha = 1;
  for (const { box } of loud) {
    const colour = [null, paint["warn-fill"], paint.bad, paint.bad][box.state] ?? marks.get(box);
    context.globalAlpha = box.state === 1 ? 0.55 : 1; // many wait, few are to blame
    cube(context, camera, box, shadesOf(context, colour), paint.surface);
    context.globalAlpha = 1;
    if (box.state && marks.has(box)) edges(context, camera, box, marks.get(box));
  }
  for (const one of links) link(context, camera, one, paint);
  for (const { box, at } of drawn) {
    if (box.state >= 2 || labels.has(box)) tag(context, at, labels.get(box) ?? `${box.rank}`, box.state >= 2 ? paint.bad : paint.accent, paint);
  }
  axes(context, camera, scene, paint);
}

// Corners of a box: 0-3 below, 4-7 above.
function corners(camera, { tp, dp, pp }) {
  const f = FILL / 2;
  const found = [];
  for (const y of [-f, f]) for (const [x, z] of [[-f, -f], [f, -f], [f, f], [-f, f]]) found.push(camera.point(tp + x, dp + z, pp + y));
  return found;
}

// The faces that look at the eye, as four corners, and which of SHADES each has.
function facesOf(c) {
  const faces = [[4, 5, 6, 7, 0], [0, 1, 5, 4, 1], [1, 2, 6, 5, 2], [2, 3, 7, 6, 1], [3, 0, 4, 7, 2]];
  return faces.filter(([a, b, d]) => (c[b][0] - c[a][0]) * (c[d][1] - c[a][1]) - (c[b][1] - c[a][1]) * (c[d][0] - c[a][0]) < 0);
}

function outlineFace(context, c, face) {
  context.beginPath();
  context.moveTo(c[face[0]][0], c[face[0]][1]);
  for (const i of face.slice(1, 4)) context.lineTo(c[i][0], c[i][1]);
  context.closePath();
}

function cube(context, camera, box, shades, ground) {
  const c = corners(camera, box);
  for (const face of facesOf(c)) {
    outlineFace(context, c, face);
    context.fillStyle = shades[face[4]];
    context.fill();
    if (camera.scale > 24) {
      context.strokeStyle = ground;
      context.lineWidth = 0.7;
      context.stroke();
    }
  }
}

// A colour of the style sheet on the three kinds of faces: top, front, side.
const known = new Map();

function shadesOf(context, colour) {
  if (!known.has(colour)) {
    context.fillStyle = colour; // which makes #rrggbb of it
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(context.fillStyle.slice(at, at + 2), 16));
    known.set(colour, SHADES.map((dark) => `rgb(${[r, g, b].map((one) => Math.round(one * (1 - dark))).join(" ")})`));
  }
  return known.get(colour);
}

function edges(context, camera, box, colour) {
  const c = corners(camera, box);
  context.strokeStyle = colour;
  context.lineWidth = camera.scale > 20 ? 3 : 2;
  context.lineJoin = "round";
  for (const face of facesOf(c)) {
    outlineFace(context, c, face);
    context.stroke();
  }
}

function tag(context, [x, y], text, colour, paint) {
  context.font = `650 11px ${paint.font}`;
  const wide = context.measureText(text).width + 10;
  context.fillStyle = paint.surface;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.roundRect(x - wide / 2, y - 30, wide, 17, 4);
  context.fill();
  context.stroke();
  context.beginPath();
  context.moveTo(x, y - 13);
  context.lineTo(x, y - 2);
  context.stroke();
  context.fillStyle = colour;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x, y - 21);
}

// {from, to, colour, both}: where data goes, from box to box.
function link(context, camera, { from, to, colour, dashed }, paint) {
  const [x0, y0] = camera.point(from.tp, from.dp, from.pp);
  const [x1, y1] = camera.point(to.tp, to.dp, to.pp);
  const length = Math.hypot(x1 - x0, y1 - y0);
  if (length < 2) return;
  context.strokeStyle = colour ?? paint.text;
  context.lineWidth = 2;
  context.setLineDash(dashed ? [3, 4] : []);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.setLineDash([]);
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  const [mx, my] = [x0 + ux * length * 0.6, y0 + uy * length * 0.6];
  context.beginPath();
  context.moveTo(mx + ux * 7, my + uy * 7);
  context.lineTo(mx - uy * 4.5, my + ux * 4.5);
  context.lineTo(mx + uy * 4.5, my - ux * 4.5);
  context.closePath();
  context.fillStyle = colour ?? paint.text;
  context.fill();
}

// Names and ends of the three axes, outside the boxes.
function axes(context, camera, scene, paint) {
  const { shape } = scene;
  const rows = [
    ["tensor", [0, -1.1, -0.8], [shape.tensor - 1, -1.1, -0.8], 0, shape.tensor - 1],
    ["data", [shape.tensor + 0.3, 0, -0.8], [shape.tensor + 0.3, shape.data - 1, -0.8], scene.begin, scene.begin + shape.data * scene.each - 1],
    ["pipeline", [-1.1, -0.6, 0], [-1.1, -0.6, shape.pipeline - 1], 0, shape.pipeline - 1],
  ];
  context.font = `600 11px ${paint.font}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [axis, first, last, low, high] of rows) {
    const [x0, y0] = camera.point(...first);
    const [x1, y1] = camera.point(...last);
    context.strokeStyle = workColour(axis);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.fillStyle = paint.muted;
    if (shape[axis] > 1) {
      context.fillText(`${low}`, x0 - (axis === "data" ? 8 : 0), y0 + 11);
      context.fillText(`${high}`, x1 + (axis === "data" ? 16 : 0), y1 + (axis === "pipeline" ? -10 : axis === "data" ? 4 : 11));
    }
    context.fillStyle = workColour(axis);
    context.fillText(SHORT[axis], (x0 + x1) / 2 - (axis === "pipeline" ? 18 : 0), (y0 + y1) / 2 + (axis === "pipeline" ? 0 : 14));
  }
}

// The box at a point, the nearest to the eye first.
export function boxAt(scene, camera, px, py) {
  const reach = Math.max(6, camera.scale * 0.42);
  let best = null;
  for (const box of scene.boxes) {
    const [x, y, near] = camera.point(box.tp, box.dp, box.pp);
    if (Math.hypot(x - px, y - py) < reach && (!best || box.state > best.box.state || (box.state === best.box.state && near > best.near))) best = { box, near };
  }
  return best?.box ?? null;
}
