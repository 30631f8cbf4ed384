// The headline, standings and curves.

const HEADLINES = { own: "accuracy at home, %, mean over clients", average: "accuracy, %, mean over the domains" };

function plot(options, label) {
  // className is fixed: the policy of the page names the one style that Plot adds.
  const svg = Plot.plot({ className: "plot", marginTop: 20, style: { background: "transparent", fontSize: "12px", fontFamily: "inherit" }, ...options });
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  return el("div", { class: "chart" }, svg);
}

const widthOf = (id) => Math.max(280, body(id).clientWidth);

function leadText() {
  const [first] = ranked();
  const pair = standing(first);
  const where = task().headline === "own" ? "at home, mean over clients" : "mean over the domains";
  if (!pair.length) return [`No round was evaluated yet (${task().label}).`];
  const seeds = first.runs.filter((run) => run.series.at.length).length;
  const number = `${percent(pair[0])}${pair.length > 1 ? ` ± ${percent(pair[1])}` : ""} %`;
  const open = groups().some((group) => group.runs.some((run) => run.progress !== "done"));
  const words = [
    el("strong", { text: first.label }),
    groups().length > 1 ? `${open ? " is best so far on " : " is best on "}${task().label}: ` : ` on ${task().label}: `,
    el("strong", { text: number }), ` (accuracy ${where}; ${plural(seeds, "seed")}, last five evaluated rounds).`,
  ];
  const [middle, low, high] = first.standing.gain;
  if (middle !== undefined) {
    words.push(` ${signed(middle)} points against FedAvg`);
    if (low !== undefined) {
      words.push(`, 95 % interval ${signed(low)} to ${signed(high)}`);
      words.push(low <= 0 && high >= 0 ? ": the seeds do not tell them apart." : ".");
    } else words.push(", from one seed.");
  }
  return words;
}

function drawResults() {
  const head = task().headline, domains = task().domains;
  const ofDomains = (group) => head === "own" ? group.standing.own_domains : group.standing.domains;
  const metricColumn = (id) => ({
    name: page.metrics[id].label, number: true, best: id !== "majority_rate", note: page.metrics[id].note,
    value: (group) => group.standing.metrics[id]?.[0] ?? null, cell: (group) => spread(group.standing.metrics[id]),
  });
  const has = (id) => groups().some((group) => group.standing.metrics[id]?.length);
  const others = ["average", "own", "new", "balanced_accuracy", "auc", "majority_rate"].filter((id) => id !== head && has(id));
  const columns = [
    { name: "method", value: (group) => group.label, cell: (group) => methodCell(group) },
    { ...metricColumn(head), name: `${page.metrics[head].label}, %` },
    { name: "Δ FedAvg", number: true, note: "Points above FedAvg, mean of the seeds' differences [95 % confidence interval, Student's t]",
      value: (group) => group.standing.gain[0] ?? null, cell: (group) => gainCell(group.standing.gain) },
    ...(domains.length > 1 ? domains : []).map((domain) => ({
      name: domain, number: true, best: true, note: head === "own" ? "What clients of this domain see there" : "On the test set of this domain",
      value: (group) => ofDomains(group)[domain]?.[0] ?? null, cell: (group) => spread(ofDomains(group)[domain]),
    })),
    ...others.map(metricColumn),
    { name: "s per round", number: true, value: (group) => mean(known(group.runs.map((run) => run.seconds))),
      cell: (group) => document.createTextNode(mean(known(group.runs.map((run) => run.seconds)))?.toPrecision(3) ?? "–") },
    { name: "state", value: (group) => stateOf(group), cell: (group) => badge(stateOf(group), progressText(group)) },
  ];
  fill(body("results"), el("p", { class: "lead" }, ...leadText()),
    groups().length > 1 ? standings() : null,
    table("results", columns, groups(), { label: "results", by: 1, down: true }),
    el("p", { class: "small muted" }, `${page.metrics[head].label}: ${page.metrics[head].note}; mean ± standard deviation over seeds. Best in bold.`,
      groups().some((group) => group.own_models) ? " *: every client has a model of its own." : ""));
}

function methodCell(group) {
  return el("button", { type: "button", class: "plain", text: `${group.label}${group.own_models ? "*" : ""}`, onclick: () => openRun({ group, run: group.runs[0] }) });
}

function gainCell(gain) {
  if (!gain.length) return document.createTextNode("–");
  const cell = el("span", { text: signed(gain[0]) });
  if (gain.length > 1) cell.append(el("span", { class: "dev", text: ` [${signed(gain[1])}, ${signed(gain[2])}]` }));
  return cell;
}

const stateOf = (group) => ["running", "elsewhere", "stopped"].find((state) => group.runs.some((run) => run.progress === state)) || "done";

function progressText(group) {
  const done = group.runs.filter((run) => run.progress === "done").length;
  if (done === group.runs.length) return group.runs.length > 1 ? `${done} done` : "done";
  const open = group.runs.find((run) => run.progress !== "done");
  return `${stateOf(group)}, ${group.runs.length > 1 ? `${done} of ${group.runs.length} done` : `${open.done} of ${open.total}`}`;
}

function standings() {
  const rows = ranked().filter((group) => shown().includes(group) && standing(group).length);
  const seeds = rows.flatMap((group) => group.runs.map((run) => ({ group, value: hundredths(run.headline), seed: run.seed })).filter((one) => one.value !== null));
  const text = (group) => `${group.label}: ${percent(standing(group)[0])} %${standing(group).length > 1 ? ` ± ${percent(standing(group)[1])}` : ""}`;
  const width = widthOf("results"), short = (label) => (label.length > 24 ? `${label.slice(0, 23)}…` : label);
  return plot({
    width, height: 26 * rows.length + 52, marginTop: 6, marginLeft: Math.min(190, Math.max(70, 8 * d3.max(rows, (group) => short(group.label).length))), marginRight: 24, marginBottom: 44,
    x: { label: width < 500 ? "accuracy, %" : HEADLINES[task().headline], nice: true, grid: true, labelAnchor: "center", labelArrow: "none", ticks: width < 500 ? 4 : 8 },
    y: { label: null, domain: rows.map((group) => group.label), tickFormat: short, tickSize: 0 },
    marks: [
      Plot.ruleY(rows.filter((group) => standing(group).length > 1), { y: "label", x1: (g) => standing(g)[0] - standing(g)[1], x2: (g) => standing(g)[0] + standing(g)[1], stroke: colourOf, strokeWidth: 5, strokeOpacity: .28 }),
      Plot.dot(seeds, { y: (one) => one.group.label, x: "value", r: 2.5, fill: (one) => colourOf(one.group), fillOpacity: .6 }),
      Plot.tickX(rows, { y: "label", x: (g) => standing(g)[0], stroke: colourOf, strokeWidth: 2.5, inset: 4 }),
      Plot.tip(rows, Plot.pointerY({ y: "label", x: (g) => standing(g)[0], title: text })),
    ],
  }, `Standings: ${rows.map(text).join("; ")}`);
}

// ---- curves

function metricChoices() {
  const ids = new Set(groups().flatMap((group) => group.runs.flatMap((run) => Object.keys(run.series.metrics))));
  const named = Object.keys(page.metrics).filter((id) => ids.has(id)).map((id) => [id, `${page.metrics[id].label}: ${page.metrics[id].note}`]);
  named.sort((a, b) => (b[0] === task().headline) - (a[0] === task().headline));
  const has = (key) => groups().some((group) => group.runs.some((run) => known(run.series[key]).length));
  const costs = [["loss", "training loss"], ["seconds", "seconds per round"], ["kilobytes", "kB moved per round"]];
  return [...named, ...costs.filter(([key]) => has(key))];
}

function points(group, read) {
  // One line for each seed, or mean and range over the seeds for each round.
  const lines = group.runs.map((run) => ({ run, xy: read(run).filter(([, value]) => value !== null && value !== undefined) }));
  if (view.seeds === "each") {
    return lines.flatMap(({ run, xy }) => xy.map(([x, y]) => ({ group, x, y, z: `${group.label} ${run.seed} ${run.folder}`, seed: run.seed })));
  }
  const rounds = new Map();
  for (const { xy } of lines) for (const [x, y] of xy) rounds.set(x, [...(rounds.get(x) || []), y]);
  return [...rounds].sort((a, b) => a[0] - b[0]).map(([x, all]) => ({ group, x, y: mean(all), low: Math.min(...all), high: Math.max(...all), count: all.length, z: group.label }));
}

function curve(read, options) {
  const data = shown().flatMap((group) => points(group, read));
  if (!data.length) return el("p", { class: "muted", text: "Nothing was measured here." });
  const decimals = options.unit === "%" ? 1 : 3;
  const said = (d) => `${d.group.label}${d.seed === undefined ? "" : `, seed ${d.seed}`}\nround ${d.x}: ${options.unit === "%" ? percent(d.y, decimals) : d.y.toPrecision(4)}${options.unit === "%" ? " %" : ""}` +
    (d.count > 1 ? `\n${plural(d.count, "seed")}: ${options.unit === "%" ? percent(d.low) : d.low.toPrecision(4)} to ${options.unit === "%" ? percent(d.high) : d.high.toPrecision(4)}` : "");
  const alone = new Set(d3.groups(data, (d) => d.z).filter(([, own]) => own.length === 1).map(([z]) => z));
  return plot({
    width: options.width, height: options.height, marginLeft: 46, marginBottom: 40, marginRight: 16,
    x: { label: "round", tickFormat: "d", labelArrow: "none", ticks: Math.min(10, Math.max(2, d3.max(data, (d) => d.x) - d3.min(data, (d) => d.x))) },
    y: { label: options.label, grid: true, nice: true, labelArrow: "none", ticks: options.height < 240 ? 4 : 6 },
    marks: [
      ...shown().flatMap((group) => {
        const own = data.filter((d) => d.group === group), stroke = colourOf(group);
        return [
          Plot.areaY(own.filter((d) => d.count > 1), { x: "x", y1: "low", y2: "high", fill: stroke, fillOpacity: .13 }),
          Plot.line(own, { x: "x", y: "y", z: "z", stroke, strokeWidth: 1.9, strokeDasharray: dashOf(group) || undefined, strokeOpacity: view.seeds === "each" ? .75 : 1 }),
          Plot.dot(own.filter((d) => alone.has(d.z)), { x: "x", y: "y", fill: stroke, r: 3.5 }),
        ];
      }),
      Plot.crosshairX(data, { x: "x", y: "y", opacity: .35, textStrokeOpacity: 0, textFill: "transparent" }),
      Plot.dot(data, Plot.pointer({ x: "x", y: "y", fill: (d) => colourOf(d.group), r: 4.5, stroke: "var(--panel)" })),
      Plot.tip(data, Plot.pointer({ x: "x", y: "y", title: said })),
    ],
  }, `${options.label} over rounds of ${shown().map((group) => group.label).join(", ")}`);
}

const scores = (run, column) => (column ? run.series.at.map((x, k) => [x, hundredths(column[k])]) : []);

function drawCurves() {
  const choices = metricChoices();
  if (!choices.some(([key]) => key === view.metric)) view.metric = choices[0]?.[0] || "";
  const kinds = [["together", "Together"]];
  if (task().domains.length > 1) kinds.push(["domain", "By domain"]);
  if (task().clients.length) kinds.push(["client", "By client"]);
  if (!kinds.some(([key]) => key === view.kind)) view.kind = "together";
  const redraw = (change) => (value) => { change(value); drawCurves(); };
  const controls = el("div", { class: "controls" },
    toggles("What is drawn", kinds, view.kind, redraw((value) => { view.kind = value; })),
    view.kind === "together" ? select("Metric", choices, view.metric, redraw((value) => { view.metric = value; })) : null,
    groups().some((group) => group.runs.length > 1) ? toggles("Seeds", [["range", "Mean and range"], ["each", "Each seed"]], view.seeds, redraw((value) => { view.seeds = value; })) : null);
  const drawn = { together: curvesTogether, domain: curvesByDomain, client: curvesByClient }[view.kind]();
  const thinned = page.thinned ? el("p", { class: "small muted", text: "Some rounds are left out, evenly, to keep the page small." }) : null;
  fill(body("curves"), controls, ...drawn, thinned);
}

function curvesTogether() {
  const plain = ["loss", "seconds", "kilobytes"].includes(view.metric);
  const label = plain ? { loss: "training loss", seconds: "seconds", kilobytes: "kB" }[view.metric] : `${page.metrics[view.metric]?.label}, %`;
  const read = (run) => plain ? run.series.round.map((x, k) => [x, run.series[view.metric][k]]) : scores(run, run.series.metrics[view.metric]);
  const width = widthOf("curves");
  return [curve(read, { width, height: Math.min(400, Math.max(260, width * .42)), label, unit: plain ? "" : "%" })];
}

function chips(names, isOn, toggle, label) {
  return el("div", { class: "legend", role: "group", "aria-label": label }, ...names.map((name) => chip(name, isOn(name), () => toggle(name))));
}

function panelled(names, read) {
  const width = widthOf("curves"), columns = Math.max(1, Math.floor((width + 19) / (320 + 19)));
  const each = names.length === 1 ? width : Math.floor((width - 19 * (columns - 1)) / columns);
  return el("div", { class: `panels${names.length === 1 ? " one" : ""}` }, ...names.map((name) => el("div", { class: "panel" },
    el("h3", {}, view.kind === "client" ? el("button", { type: "button", class: "plain", text: name, onclick: () => openClient(name) }) : name),
    curve((run) => read(run, name), { width: each, height: 210, label: "accuracy, %", unit: "%" }))));
}

function curvesByDomain() {
  const toggle = (name) => { view.domains.has(name) ? view.domains.delete(name) : view.domains.add(name); drawCurves(); };
  const names = task().domains.filter((name) => !view.domains.has(name));
  const which = task().headline === "own" ? "own_domains" : "domains";
  return [chips(task().domains, (name) => !view.domains.has(name), toggle, "Domains that are shown"),
    panelled(names, (run, name) => scores(run, run.series[which][name]))];
}

function curvesByClient() {
  if (view.clients === null) view.clients = new Set(task().clients.slice(0, 12));
  const toggle = (name) => { view.clients.has(name) ? view.clients.delete(name) : view.clients.add(name); drawCurves(); };
  return [chips(task().clients, (name) => view.clients.has(name), toggle, "Clients that are shown"),
    panelled(task().clients.filter((name) => view.clients.has(name)), (run, name) => scores(run, run.series.clients[name]))];
}
