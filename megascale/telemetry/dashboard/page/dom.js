// Elements without markup: what the run says is always text, never HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [kind, heard] of Object.entries(value)) element.addEventListener(kind, heard);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

// A panel with a heading; `aside` stands at the right of it.
export function panel(title, aside, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("header", {}, h("h2", {}, title), aside), children);
}

export function choice(label, options, value, changed) {
  const select = h("select", { on: { change: () => changed(select.value) } });
  setOptions(select, options, value);
  return { label: h("label", {}, label, select), select };
}

export function setOptions(select, options, value) {
  fill(select, options.map(([key, text]) => h("option", { value: key }, text)));
  if (value !== undefined) select.value = value;
}

// Buttons of which one is pressed.
export function segments(label, options, value, changed) {
  const group = h("div", { class: "segments", role: "group", "aria-label": label });
  const show = (key) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.key === key));
  };
  for (const [key, text] of options) {
    group.append(h("button", { type: "button", "data-key": key, on: { click: () => { show(key); changed(key); } } }, text));
  }
  show(value);
  return { element: group, show };
}
