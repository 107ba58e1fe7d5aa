// Light, dark, or what the system says; and the colours of the style sheet for what is drawn.

const KEY = "megascale-colours";
const ORDER = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
let chosen = "auto";
let cached = null;
let isNowDark = false;

try {
  chosen = ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
} catch {
  // a browser that keeps nothing: automatic
}

function apply() {
  isNowDark = chosen === "dark" || (chosen === "auto" && system.matches);
  document.documentElement.dataset.theme = isNowDark ? "dark" : "light";
  cached = null;
  for (const heard of listeners) heard();
}

export function onTheme(heard) {
  listeners.add(heard);
  return () => listeners.delete(heard);
}

export function isDark() {
  return isNowDark;
}

// The custom properties of the style sheet by name without dashes: colours().accent
export function colours() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "surface", "sunken", "line", "line-strong", "text", "muted", "accent", "accent-soft", "bad", "bad-soft", "warn", "warn-fill", "warn-soft"];
  cached = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  cached.font = style.getPropertyValue("--font").trim();
  return cached;
}

export function wireTheme(button) {
  const show = () => {
    const text = { auto: "Auto", light: "Light", dark: "Dark" }[chosen];
    button.textContent = text;
    button.setAttribute("aria-label", `Colours: ${text === "Auto" ? "automatic" : text.toLowerCase()}`);
  };
  button.addEventListener("click", () => {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // it holds for this visit
    }
    apply();
    show();
  });
  show();
}

system.addEventListener("change", apply);
apply();
