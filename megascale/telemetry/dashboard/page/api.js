// Asks this server; an answer that is refused is an error with the server's own sentence.

export class RefusedError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

let token = null;

export function setToken(value) {
  token = value;
}

export function hasToken() {
  return token !== null;
}

async function send(path, options) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RefusedError(0, "The dashboard's own process does not answer. Is it still running?");
  }
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new RefusedError(reply.status, body.detail ?? `HTTP ${reply.status}`);
  return body;
}

export function get(path, query = {}, signal) {
  const asked = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(asked).toString();
  return send(search ? `${path}?${search}` : path, { signal });
}

export function post(path, body) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token ?? ""}` };
  return send(path, { method: "POST", headers, body: JSON.stringify(body) });
}
