// Spans as rows of lanes, and which of them belong to one communication.

import { workOf } from "/page/colour.js";

const STREAMS = ["compute", "tensor", "pipeline", "data", "host"];

// Rows by rank in the order given; a lane is spans that do not overlap, ascending:
//   {ranks, rows: [{rank, lanes: [{stream, depth, spans}]}], begin, end, spans: columns}
export function rowsOf(columns, ranks) {
  const byRank = new Map(ranks.map((rank) => [rank, new Map()]));
  const text = (name, i) => (columns[name][i] === null ? null : columns.strings[columns[name][i]]);
  columns.work = columns.rank.map((_, i) => workOf(text("name", i), text("op", i), text("group", i)));
  columns.rank.forEach((rank, i) => {
    const streams = byRank.get(rank);
    if (!streams) return;
    const stream = text("stream", i) ?? "compute";
    if (!streams.has(stream)) streams.set(stream, []);
    streams.get(stream).push(i);
  });
  const rows = ranks.map((rank) => ({ rank, lanes: lanesOf(byRank.get(rank), columns) }));
  const at = new Map(); // of a span: its row and lane
  rows.forEach((row) => row.lanes.forEach((lane, l) => lane.spans.forEach((i) => at.set(i, [row, l]))));
  let end = 0;
  for (let i = 0; i < columns.rank.length; i += 1) end = Math.max(end, columns.t0_us[i] + columns.dur_us[i]);
  return { columns, rows, at, begin: 0, end: Math.max(end, 1), text };
}

function lanesOf(streams, { t0_us: begin, dur_us: length }) {
  const order = [...streams.keys()].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  return order.flatMap((stream) => {
    const spans = streams.get(stream).sort((a, b) => begin[a] - begin[b] || length[b] - length[a]);
    const lanes = [];
    const ends = []; // of the spans that are open, outermost first
    for (const i of spans) {
      while (ends.length && ends[ends.length - 1] <= begin[i] + 0.05) ends.pop();
      const depth = ends.length;
      ends.push(begin[i] + length[i]);
      (lanes[depth] ??= { stream, depth, spans: [] }).spans.push(i);
    }
    return lanes;
  });
}

function place(stream) {
  const at = STREAMS.indexOf(stream);
  return at < 0 ? STREAMS.length : at;
}

// Indices of the spans that meet span `i`: a collective's members, or a transfer's other end, and
// what is needed to tell: {kind, members, late, wait_us}. The recorder says "data", and every rank
// has its own: who is meant follows from the mesh. A channel is "0->1 activation", of stages.
export function meeting({ columns, text }, i, mesh) {
  const group = text("group", i);
  if (group === null || columns.seq[i] === null) return null;
  const rank = columns.rank[i];
  const channel = /^(\d+)->(\d+)/.exec(group);
  const isMember = membership(group, channel, rank, mesh);
  if (!isMember) return null;
  const members = [];
  for (let k = 0; k < columns.rank.length; k += 1) {
    if (columns.seq[k] === columns.seq[i] && columns.group[k] === columns.group[i] && isMember(columns.rank[k])) members.push(k);
  }
  if (members.length < 2) return { kind: "alone", members, late: null };
  if (channel) {
    const from = members.find((k) => text("name", k) === "send");
    return { kind: "transfer", members: from === undefined ? members : [from, ...members.filter((k) => k !== from)], late: null };
  }
  const came = (k) => columns.issued_us[k] ?? columns.t0_us[k];
  members.sort((a, b) => came(a) - came(b));
  const late = members[members.length - 1];
  return { kind: "collective", members, late, wait_us: came(late) - came(members[0]) };
}

function membership(group, channel, rank, mesh) {
  if (channel) {
    const ends = [Number(channel[1]), Number(channel[2])];
    return (other) => ends.includes(mesh.at(other, "pipeline")) && mesh.at(other, "tensor") === mesh.at(rank, "tensor") && mesh.at(other, "data") === mesh.at(rank, "data");
  }
  const axis = { tensor: "tensor", data: "data", pipeline: "pipeline", head: "pipeline", embedding: "pipeline" }[group];
  if (axis) {
    const members = new Set(mesh.group(rank, axis));
    return (other) => members.has(other);
  }
  if (group === "vocabulary") return (other) => mesh.at(other, "data") === mesh.at(rank, "data");
  return group === "world" ? () => true : null;
}
