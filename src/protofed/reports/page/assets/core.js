"use strict";
// What all parts of the page share. Every text of a run goes into the page as text, never as HTML.

let page = JSON.parse(document.getElementById("facts").textContent);
const view = {
  task: 0, hidden: new Map(), kind: "together", metric: "", seeds: "range", domains: new Set(), clients: null,
  place: "", colour: "class", round: -1, all: false, tables: new Map(),
};
const COLOURS = 8, CLASS_COLOURS = 10, FIRST = 8;
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2"];

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const task = () => page.tasks[view.task];
const groups = () => task().groups;
const shown = () => groups().filter((group) => !hiddenGroups().has(group.label));
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const hundredths = (value) => (value === null || value === undefined ? null : value / 100);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(1)}`;

function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

function spread(pair) {
  // Mean and deviation over seeds, as a cell.
  if (!pair || !pair.length) return document.createTextNode("–");
  const cell = el("span", { text: percent(pair[0]) });
  if (pair.length > 1) cell.append(el("span", { class: "dev", text: ` ± ${percent(pair[1])}` }));
  return cell;
}

const colourOf = (group) => `var(--s${groups().indexOf(group) % COLOURS})`;
const dashOf = (group) => DASHES[Math.floor(groups().indexOf(group) / COLOURS) % DASHES.length];
const classColour = (label) => `var(--k${label % CLASS_COLOURS})`;
const standing = (group) => group.standing.metrics[task().headline] || [];

function ranked() {
  return [...groups()].sort((a, b) => (standing(b)[0] ?? -1) - (standing(a)[0] ?? -1));
}

function hiddenGroups() {
  // With many methods the best ones are shown at first, and the one that others are measured by.
  if (!view.hidden.has(task().label)) {
    const first = new Set(ranked().slice(0, FIRST).map((group) => group.label));
    const many = groups().length > FIRST;
    const later = groups().filter((group) => many && !first.has(group.label) && group.method !== "fedavg");
    view.hidden.set(task().label, new Set(later.map((group) => group.label)));
  }
  return view.hidden.get(task().label);
}

function chip(text, pressed, toggle, colour, dash) {
  const button = el("button", { type: "button", class: "chip", "aria-pressed": String(pressed), title: text, onclick: toggle });
  if (colour) {
    const line = d3.create("svg").attr("viewBox", "0 0 24 10").attr("aria-hidden", "true");
    line.append("line").attr("x1", 0).attr("x2", 24).attr("y1", 5).attr("y2", 5)
      .attr("stroke", colour).attr("stroke-width", 4).attr("stroke-dasharray", dash || null);
    button.append(line.node());
  }
  button.append(text.length > 42 ? `${text.slice(0, 41)}…` : text);
  return button;
}

function select(label, options, value, change) {
  const field = el("select", { onchange: (event) => change(event.target.value) });
  for (const [key, text] of options) field.append(el("option", { value: key, text }));
  field.value = value;
  return el("label", {}, label, field);
}

function toggles(name, options, value, change) {
  const group = el("div", { class: "switch", role: "group", "aria-label": name });
  for (const [key, text] of options) {
    group.append(el("button", { type: "button", "aria-pressed": String(key === value), text, onclick: () => change(key) }));
  }
  return group;
}

function body(id) {
  return document.querySelector(`#${id} .body`);
}

function fill(target, ...children) {
  // Replaces what is there; the focus stays where it was, on the button or field of the same name.
  const active = target.contains(document.activeElement) ? document.activeElement : null;
  const places = active ? [...target.querySelectorAll("button, select, input")] : [];
  const at = active ? places.indexOf(active) : -1;
  target.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  if (at >= 0) target.querySelectorAll("button, select, input")[at]?.focus();
}

function reasons(key, nothing) {
  // Why something is missing, of all methods that are shown, each reason once.
  const found = new Map();
  for (const group of shown()) {
    const why = (group.models || {})[key] ?? (key === "why_no_tsne" ? (group.models || {}).why : undefined);
    if (why) found.set(why, [...(found.get(why) || []), group.label]);
  }
  if (!found.size) return nothing ? el("p", { class: "muted", text: nothing }) : null;
  const lines = [...found].map(([why, labels]) => el("p", { class: "notice small", text: `${labels.join(", ")}: ${why}` }));
  return el("div", {}, ...lines);
}
