// The heat map as columns of numbers, what is usual, and cells over ranks, hosts or switches.

const COMPUTE = "compute";

// {ranks, phases, ms: Float64Array a phase, outliers, waiting} of the readers' answers: `outliers`
// are slow by themselves, `waiting` stand out because they wait for others. A straggler of a few
// per cent is found over many steps, and stands out in no mean: it is one of the outliers too.
export function fromAnswers({ data }, stragglers) {
  const { ranks, phases } = data;
  const ms = phases.map((_, p) => Float64Array.from(data.mean_ms, (row) => row[p] ?? NaN));
  const totals = ms.map((column) => column.reduce((sum, one) => sum + (Number.isNaN(one) ? 0 : one), 0));
  const outliers = data.outliers.filter((one) => !one.waits);
  const known = new Set(outliers.filter((one) => one.dimension === "rank" && one.phase === COMPUTE).map((one) => Number(one.value)));
  const slow = stragglers.level === "none" ? { ranks: [], share: [] } : stragglers.data; // of few steps
  slow.ranks.forEach((rank, i) => {
    if (!known.has(rank)) outliers.push({ dimension: "rank", value: String(rank), phase: COMPUTE, share: slow.share[i], num_ranks: 1, waits: false });
  });
  return { ranks, phases, ms, totals, relative: [], outliers, waiting: data.outliers.filter((one) => one.waits) };
}

// The phase to look at first: what ranks do themselves.
export function firstPhase(heat) {
  const worst = heat.outliers.toSorted((a, b) => b.share - a.share)[0];
  return worst?.phase ?? [COMPUTE, "forward"].find((name) => heat.phases.includes(name)) ?? heat.phases[0];
}

function median(values) {
  const known = values.filter((one) => !Number.isNaN(one)).sort(); // typed: by value
  return known.length ? known[known.length >> 1] : NaN;
}

// Each rank's time through the median of its pipeline stage: stages do different work.
export function relative(heat, phase, mesh) {
  heat.relative[phase] ??= throughUsual(heat, phase, mesh);
  return heat.relative[phase];
}

// Each rank's milliseconds beyond those of the median of its pipeline stage.
export function beyond(heat, phase, mesh) {
  const through = relative(heat, phase, mesh);
  return heat.ms[phase].map((ms, i) => (Number.isNaN(through[i]) ? NaN : ms - ms / (1 + through[i])));
}

// What most time goes into, as a measure for all phases: its median.
export function usualMs(heat) {
  return median(heat.ms[heat.totals.indexOf(Math.max(...heat.totals))]);
}

function throughUsual(heat, phase, mesh) {
  const column = heat.ms[phase];
  const stages = new Map();
  heat.ranks.forEach((rank, i) => {
    const stage = mesh.at(rank, "pipeline");
    if (!stages.has(stage)) stages.set(stage, []);
    stages.get(stage).push(i);
  });
  const out = new Float64Array(column.length).fill(NaN);
  for (const rows of stages.values()) {
    const usual = median(Float64Array.from(rows, (i) => column[i]));
    if (usual > 0) for (const i of rows) out[i] = column[i] / usual - 1;
  }
  return out;
}

// Rows of the heat map that belong together, in order of their ranks: [{name, rows}].
export function gather(heat, nameOf) {
  const found = new Map();
  heat.ranks.forEach((rank, i) => {
    const name = nameOf(rank);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(i);
  });
  return [...found].map(([name, rows]) => ({ name, rows }));
}

// Cells of ranks within their hosts, or of whole hosts or switches by their slowest rank.
//   values   one a cell          row     the row of the heat map that a cell stands for
//   blocks   [{name, first, count}]: cells that lie together
export function cells(heat, values, unit, groups) {
  if (unit === "rank") {
    const blocks = [];
    const row = [];
    for (const { name, rows } of groups.host) {
      blocks.push({ name, first: row.length, count: rows.length });
      row.push(...rows);
    }
    return { values: Float64Array.from(row, (i) => values[i]), row, blocks, cellOf: inverse(row), name: (c) => `rank ${heat.ranks[row[c]]}` };
  }
  const row = [];
  const cellOf = new Int32Array(values.length);
  const parts = groups[unit];
  parts.forEach(({ rows }, c) => {
    let worst = rows[0];
    for (const i of rows) {
      cellOf[i] = c;
      if (values[i] > values[worst] || Number.isNaN(values[worst])) worst = i;
    }
    row.push(worst);
  });
  return { values: Float64Array.from(row, (i) => values[i]), row, blocks: [{ name: "", first: 0, count: parts.length }], cellOf, name: (c) => parts[c].name };
}

function inverse(row) {
  const out = new Int32Array(row.length);
  row.forEach((i, c) => { out[i] = c; });
  return out;
}

// From what to what the colours go: all but the odd ones, which are at the end of the scale.
export function span(values) {
  const known = values.filter((one) => !Number.isNaN(one)).sort();
  if (!known.length) return [0, 1];
  const at = (share) => known[Math.min(known.length - 1, Math.floor(share * known.length))];
  const low = at(0.01);
  const high = known.length > 200 ? at(0.998) : known[known.length - 1];
  return high > low ? [low, high] : [low - Math.abs(low) * 0.01 - 1e-9, low + Math.abs(low) * 0.01 + 1e-9];
}
