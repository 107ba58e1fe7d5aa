// What all views share: the newest overview, the headline, the selected rank, and who wants to know.

import { get } from "/page/api.js";
import { Mesh } from "/page/mesh.js";

// Calls `work` when asked, never twice at once, and rests between calls: `leastMs`, or four times
// what the last one took. So a slow answer slows the asking, not the page.
export function paced(work, leastMs) {
  let running = false;
  let wanted = false;
  let timer = 0;
  let dueMs = 0;
  async function go() {
    timer = 0;
    running = true;
    wanted = false;
    const began = performance.now();
    try {
      await work();
    } finally {
      running = false;
      dueMs = performance.now() + Math.max(leastMs, 4 * (performance.now() - began));
      if (wanted) plan();
    }
  }
  function plan() {
    if (!timer) timer = setTimeout(go, Math.max(0, dueMs - performance.now()));
  }
  const ask = () => {
    wanted = true;
    if (!running) plan();
  };
  ask.now = () => {
    clearTimeout(timer);
    timer = 0;
    dueMs = 0;
    ask();
  };
  ask.stop = () => {
    clearTimeout(timer);
    wanted = false;
  };
  return ask;
}

export class App {
  constructor() {
    this.overview = null;
    this.headline = null;
    this.rank = null;
    this.listeners = new Map();
    this.placesAt = null;
    this.placesAsked = null;
  }

  // Kinds: overview, headline, rank, revision, incident, driver, theme. Returns how to stop.
  on(kind, heard) {
    if (!this.listeners.has(kind)) this.listeners.set(kind, new Set());
    this.listeners.get(kind).add(heard);
    return () => this.listeners.get(kind).delete(heard);
  }

  tell(kind, value) {
    for (const heard of this.listeners.get(kind) ?? []) heard(value);
  }

  select(rank) {
    const legal = rank !== null && Number.isInteger(rank) && rank >= 0 && rank < (this.overview?.world_size ?? 0);
    const chosen = legal ? rank : null;
    if (chosen === this.rank) return;
    this.rank = chosen;
    this.tell("rank", chosen);
  }

  get mesh() {
    return this.overview?.mesh ? new Mesh(this.overview.mesh) : null;
  }

  // Hosts, ongoing records and errors of the newest revision: asked once for all views.
  places() {
    const revision = this.overview?.revision ?? 0;
    if (this.placesAsked && this.placesAt === revision) return this.placesAsked;
    this.placesAt = revision;
    this.placesAsked = get("/api/places").then((found) => this.#indexed(found));
    this.placesAsked.catch(() => { this.placesAt = null; });
    return this.placesAsked;
  }

  #indexed(found) {
    const hostOf = new Int32Array(found.world_size).fill(-1);
    found.rank.forEach((rank, i) => { hostOf[rank] = found.host[i]; });
    const ongoingOf = new Map(found.ongoing.rank.map((rank, i) => [rank, i]));
    return { ...found, hostOf, ongoingOf, meshed: new Mesh(found.mesh) };
  }

  hostName(places, rank) {
    const number = places?.hostOf[rank] ?? -1;
    return number < 0 ? null : places.hosts[number];
  }
}
