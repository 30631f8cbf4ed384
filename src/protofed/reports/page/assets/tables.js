// Tables that can be sorted by every column and filtered by any word.

function compare(a, b) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: {name, value(row), cell?(row), number?, note?, text?, best?}
function table(id, columns, rows, options = {}) {
  const state = view.tables.get(id) || { by: options.by ?? 0, down: options.down ?? false, words: "" };
  view.tables.set(id, state);
  const box = el("div", { class: `scroll${rows.length > 14 ? " tall" : ""}`, tabindex: "0", role: "region", "aria-label": options.label });
  const count = el("span", { class: "muted small", role: "status" });
  const filter = el("input", {
    type: "search", placeholder: "Filter", "aria-label": `Filter ${options.label}`, value: state.words || undefined,
    oninput: (event) => { state.words = event.target.value; draw(); },
  });

  function best(column) {
    const numbers = known(rows.map(column.value)).filter((value) => typeof value === "number");
    return column.best && !options.bestInRow && rows.length > 1 && numbers.length ? Math.max(...numbers) : null;
  }

  function draw() {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => columns.map((column) => String(column.value(row) ?? "")).join(" ").toLowerCase();
    const kept = rows.filter((row) => words.every((word) => text(row).includes(word)));
    const column = columns[Math.min(state.by, columns.length - 1)];
    kept.sort((a, b) => {
      const [left, right] = [column.value(a), column.value(b)];
      const order = compare(left, right);
      const gap = left === null || left === undefined || right === null || right === undefined;
      return state.down && !gap ? -order : order;
    });
    const heads = columns.map((one, k) => {
      const sort = k === state.by ? (state.down ? "descending" : "ascending") : "none";
      const turn = () => {
        state.down = k === state.by ? !state.down : Boolean(one.number);
        state.by = k;
        draw();
        box.querySelectorAll("th button")[k].focus();
      };
      return el("th", { scope: "col", "aria-sort": sort, class: one.number ? "number" : undefined, title: one.note },
        el("button", { type: "button", text: one.name, onclick: turn }));
    });
    const tops = columns.map(best);
    const lines = kept.map((row) => el("tr", {}, ...columns.map((one, k) => {
      const value = one.value(row);
      if (options.bestInRow && one.best) tops[k] = d3.max(columns.filter((other) => other.best), (other) => other.value(row)) ?? null;
      const cell = one.cell ? one.cell(row) : document.createTextNode(value ?? "–");
      const kinds = [one.number && "number", one.text && "text", tops[k] !== null && value === tops[k] && "best", one.kind && one.kind(row)];
      return el(k ? "td" : "th", { class: kinds.filter(Boolean).join(" ") || undefined, scope: k ? undefined : "row", title: k ? undefined : String(value ?? "") }, cell);
    })));
    box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...lines)));
    count.textContent = kept.length === rows.length ? plural(rows.length, "row") : `${kept.length} of ${plural(rows.length, "row")}`;
  }

  draw();
  const tools = rows.length > 3 ? el("div", { class: "controls" }, filter, count) : null;
  return el("div", {}, ...(tools ? [tools] : []), box);
}

function badge(progress, text) {
  return el("span", { class: `badge ${progress}`, text: text || progress });
}

function runRows() {
  return groups().flatMap((group) => group.runs.map((run) => ({ group, run })));
}

function drawRuns() {
  const rows = runRows();
  const columns = [
    { name: "method", value: (row) => row.group.label, cell: (row) => el("button", { type: "button", class: "plain", text: row.group.label, onclick: () => openRun(row) }) },
    { name: "seed", number: true, value: (row) => row.run.seed },
    { name: "state", value: (row) => row.run.progress, cell: (row) => badge(row.run.progress) },
    { name: "rounds", number: true, value: (row) => row.run.done, cell: (row) => document.createTextNode(`${row.run.done} / ${row.run.total}`) },
    { name: `${task().headline}, %`, number: true, best: true, note: page.metrics[task().headline].note,
      value: (row) => hundredths(row.run.headline), cell: (row) => document.createTextNode(percent(hundredths(row.run.headline))) },
    { name: "s per round", number: true, value: (row) => row.run.seconds, cell: (row) => document.createTextNode(row.run.seconds === null ? "–" : row.run.seconds.toPrecision(3)) },
    { name: "kB per round", number: true, value: (row) => row.run.bytes, cell: (row) => document.createTextNode(row.run.bytes === null ? "–" : Math.round(row.run.bytes / 1000).toLocaleString("en")) },
    { name: "replies left out", number: true, value: (row) => row.run.num_failures },
    { name: "folder", value: (row) => row.run.folder, cell: (row) => el("code", { text: row.run.folder }) },
  ];
  const left = page.left_out.map(([folder, why]) => el("p", { class: "notice small", text: `Left out: ${folder}: ${why}` }));
  fill(body("runs"), ...left, table("runs", columns, rows, { label: "runs" }));
}

function openRun({ group, run }) {
  const settings = page.settings.map((key, k) => ({ key, value: run.settings[k] })).filter((row) => row.value !== null);
  const facts = Object.entries(run.environment).map(([key, value]) => ({ key, value }));
  const pair = [{ name: "name", value: (row) => row.key }, { name: "value", text: true, value: (row) => String(row.value) }];
  const failures = [
    { name: "round", number: true, value: (row) => row[0] }, { name: "client", value: (row) => row[1] },
    { name: "why it did not count", text: true, value: (row) => row[2] },
  ];
  openDetail(`${group.label}, seed ${run.seed}`,
    el("p", {}, badge(run.progress), ` ${run.done} of ${plural(run.total, "round")} · `, el("code", { text: run.folder })),
    run.num_failures ? el("h3", { text: `${plural(run.num_failures, "reply").replace("replys", "replies")} left out` }) : null,
    run.num_failures ? table("failures", failures, run.failures, { label: "replies left out" }) : null,
    el("h3", { text: "Settings" }), table("run-settings", pair, settings, { label: "settings" }),
    el("h3", { text: "Command and versions" }), table("run-facts", pair, facts, { label: "versions" }));
}

function drawSettings() {
  const chosen = shown();
  const value = (group, k) => group.runs[0].settings[k];
  const rows = page.settings
    .map((key, k) => ({ key, k, differs: new Set(chosen.map((group) => String(value(group, k)))).size > 1 }))
    .filter((row) => row.key !== "training.seed" && (view.all || row.differs) && chosen.some((group) => value(group, row.k) !== null));
  const usual = (row) => d3.mode(chosen.map((group) => String(value(group, row.k))));
  const columns = [
    { name: "setting", value: (row) => row.key },
    ...chosen.map((group) => ({
      name: group.label, value: (row) => value(group, row.k) === null ? null : String(value(group, row.k)),
      kind: (row) => row.differs && value(group, row.k) !== null && String(value(group, row.k)) !== usual(row) && "differs",
    })),
  ];
  const choice = toggles("Settings", [["some", "Differences"], ["all", "All settings"]], view.all ? "all" : "some",
    (key) => { view.all = key === "all"; drawSettings(); });
  const nothing = el("p", { class: "muted", text: chosen.length > 1 ? "The methods that are shown have the same settings." : "One method is shown: choose more to compare them, or all settings." });
  fill(body("settings"), el("div", { class: "controls" }, choice),
    rows.length ? table("settings", columns, rows, { label: "settings" }) : nothing);
}

const VERSIONS = ["command", "commit", "protofed", "python", "torch", "processor", "gpu", "cores"];

function drawOrigin() {
  const found = new Map();
  for (const { run } of runRows()) {
    const facts = VERSIONS.map((key) => run.environment[key] ?? "");
    const key = JSON.stringify(facts);
    found.set(key, { facts, count: (found.get(key)?.count || 0) + 1 });
  }
  const columns = [
    ...VERSIONS.map((name, k) => ({ name, text: name === "command", value: (row) => row.facts[k] || null, cell: k ? undefined : (row) => el("code", { text: row.facts[k] || "–" }) })),
    { name: "runs", number: true, value: (row) => row.count },
  ];
  fill(body("origin"),
    el("p", { class: "small muted", text: `This page: ${page.made.command} (protofed ${page.made.protofed})` }),
    table("origin", columns, [...found.values()], { label: "commands and versions" }));
}
