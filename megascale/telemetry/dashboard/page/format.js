// Numbers and times for people: few digits, a unit, and a dash for what is not known.

export const DASH = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? DASH : whole.format(value);
}

// `1 rank`, `1,024 ranks`.
export function counted(value, what) {
  return `${count(value)} ${value === 1 ? what : `${what}s`}`;
}

// `digits` significant ones, thousands in groups.
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))));
  if (size >= digits - 1) return whole.format(value);
  if (size < -3) return value.toExponential(digits - 1);
  return value.toFixed(digits - 1 - size);
}

export function percent(share, digits = 1) {
  return share === null || share === undefined || !Number.isFinite(share) ? DASH : `${(100 * share).toFixed(digits)} %`;
}

export function signed(share, digits = 1) {
  return `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(digits)} %`;
}

// Of a tick on an axis: without zeros that say nothing.
export function trimmed(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

// Ticks with as many digits as it takes to tell them apart.
export function tickTexts(values, format) {
  let texts = [];
  for (let digits = 3; digits <= 8; digits += 1) {
    texts = values.map((value) => trimmed(format(value, digits)));
    if (new Set(texts).size === texts.length) break;
  }
  return texts;
}

// [figure, unit] of a rate or a size.
export function scaled(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return [DASH, ""];
  for (const [factor, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= factor) return [number(value / factor, digits), unit];
  }
  return [number(value, digits), ""];
}

export function bytes(value, digits = 3) {
  const [figure, unit] = scaled(value, digits);
  return figure === DASH ? DASH : `${figure} ${unit}B`;
}

// [figure, unit] of a duration.
export function duration(seconds, digits = 3) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return [DASH, ""];
  if (seconds < 1e-3) return [number(seconds * 1e6, digits), "µs"];
  if (seconds < 1) return [number(seconds * 1e3, digits), "ms"];
  if (seconds < 120) return [number(seconds, digits), "s"];
  if (seconds < 7200) return [number(seconds / 60, digits), "min"];
  if (seconds < 172800) return [number(seconds / 3600, digits), "h"];
  return [number(seconds / 86400, digits), "d"];
}

export function lasting(seconds, digits = 3) {
  return duration(seconds, digits).join(" ").trim();
}

export function clock(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return day === new Date().toISOString().slice(0, 10) ? time : `${day} ${time}`;
}

// With a capital, and an end.
export function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}

// 0, 1, 2, 5 -> "0–2, 5"
export function rankList(ranks, most = 8) {
  const parts = [];
  for (let i = 0; i < ranks.length && parts.length < most; ) {
    let j = i;
    while (j + 1 < ranks.length && ranks[j + 1] === ranks[j] + 1) j += 1;
    parts.push(i === j ? `${ranks[i]}` : `${ranks[i]}–${ranks[j]}`);
    i = j + 1;
    if (parts.length === most && i < ranks.length) parts.push(`${ranks.length - i} more`);
  }
  return parts.join(", ");
}

// Round values of an axis between `low` and `high`, about `most` of them.
export function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough) ?? 10);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step + 0);
  return found;
}
