// Puts the parts together, and follows a run that goes on.

const SECTIONS = {
  results: drawResults, curves: drawCurves, clients: drawClients, confusion: drawConfusion, features: drawFeatures,
  data: drawData, runs: drawRuns, settings: drawSettings, origin: drawOrigin,
};

function drawMethods() {
  const hidden = hiddenGroups(), bar = document.getElementById("methods");
  bar.hidden = groups().length < 2;
  const toggle = (label) => { hidden.has(label) ? hidden.delete(label) : hidden.add(label); draw(); };
  const all = hidden.size ? ["all", () => hidden.clear()] : ["none", () => groups().forEach((group) => hidden.add(group.label))];
  fill(bar,
    ...groups().map((group) => chip(group.label, !hidden.has(group.label), () => toggle(group.label), colourOf(group), dashOf(group))),
    el("button", { type: "button", class: "plain small", text: all[0], onclick: () => { all[1](); draw(); } }));
}

function drawHead() {
  document.getElementById("title").textContent = page.title;
  const runs = page.tasks.flatMap((one) => one.groups.flatMap((group) => group.runs));
  const done = runs.filter((run) => run.progress === "done").length;
  document.getElementById("made").textContent = `${plural(runs.length, "run")}, ${done === runs.length ? "all done" : `${done} done`} · made ${page.made.time} by protofed ${page.made.protofed}`;
  const field = document.getElementById("task-field"), choice = document.getElementById("task");
  field.hidden = page.tasks.length < 2;
  choice.replaceChildren(...page.tasks.map((one, k) => el("option", { value: String(k), text: one.label })));
  choice.value = String(view.task);
  document.getElementById("foot").textContent = "One file, made by protofed. It loads nothing from a network.";
  document.getElementById("foot").hidden = page.live;
}

function draw() {
  const x = window.scrollX, y = window.scrollY;
  view.task = Math.min(view.task, page.tasks.length - 1);
  drawHead();
  if (page.tasks.length) {
    drawMethods();
    for (const one of Object.values(SECTIONS)) one();
  } else {
    body("results").replaceChildren(el("p", { class: "muted", text: "There is no run yet." }));
  }
  window.scrollTo(x, y);
}

function openDetail(title, ...children) {
  const dialog = document.getElementById("detail");
  document.getElementById("detail-title").textContent = title;
  document.getElementById("detail-body").replaceChildren(...children.filter(Boolean));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

// ---- light and dark

const system = window.matchMedia("(prefers-color-scheme: dark)");

function remembered(value) {
  // A file may have no storage.
  try {
    if (value === undefined) return localStorage.getItem("protofed-theme");
    localStorage.setItem("protofed-theme", value);
  } catch { /* then it follows the system each time */ }
  return value ?? null;
}

function setTheme(theme) {
  const dark = theme ? theme === "dark" : system.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}

// ---- live

let tag = "";

async function follow() {
  const sign = document.getElementById("live");
  sign.hidden = false;
  try {
    const answer = await fetch("facts.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      page = await answer.json();
      if (!document.getElementById("detail").open) draw();
    } else if (answer.status !== 304) throw new Error(String(answer.status));
    const runs = page.tasks.flatMap((one) => one.groups.flatMap((group) => group.runs));
    const going = runs.filter((run) => run.progress === "running").length;
    sign.textContent = going ? `live: ${plural(going, "run")} going on` : "live: no run goes on";
  } catch {
    sign.textContent = "protofed watch has ended";
  }
  window.setTimeout(follow, 2000);
}

// ---- start

setTheme(remembered());
system.addEventListener("change", () => setTheme(remembered()));
document.getElementById("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remembered(next);
  setTheme(next);
});
document.getElementById("task").addEventListener("change", (event) => {
  view.task = Number(event.target.value);
  view.clients = null;
  view.domains.clear();
  view.round = -1;
  draw();
});
document.getElementById("close").addEventListener("click", () => document.getElementById("detail").close());
document.getElementById("detail").addEventListener("click", (event) => { if (event.target.id === "detail") event.target.close(); });
document.getElementById("links").append(...Object.keys(SECTIONS).map((id) =>
  el("li", {}, el("a", { href: `#${id}`, text: document.querySelector(`#${id} h2`).textContent }))));
let width = window.innerWidth, later = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  window.clearTimeout(later);
  later = window.setTimeout(draw, 150);
});
draw();
if (page.live) follow();
