// Clients, confusion matrices, features and data.

const matrixOf = (group, place) => {
  const found = group.models?.confusion;
  if (!found) return null;
  const [kind, name] = place;
  if (kind === "domain") return found.domains[name] || null;
  return found.clients[name] || found.domains[domainOf(name)] || null;
};

function domainOf(client) {
  const held = task().holdings;
  return held ? held.domains[held.clients.indexOf(client)] : undefined;
}

function classNames() {
  return task().holdings?.classes || [];
}

const className = (label) => classNames()[label] ?? String(label);

function triples(flat) {
  return d3.range(0, flat.length, 3).map((k) => ({ truth: flat[k], said: flat[k + 1], count: flat[k + 2] }));
}

function matrix(flat, width, label) {
  const cells = triples(flat), totals = d3.rollup(cells, (own) => d3.sum(own, (d) => d.count), (d) => d.truth);
  const names = d3.range(classNames().length || 1 + d3.max(cells, (d) => Math.max(d.truth, d.said)));
  const side = Math.min(width, 430), many = names.length > 14;
  const longest = d3.max(names, (k) => className(k).length);
  const left = Math.min(118, 30 + 6.6 * longest), short = (k) => (className(k).length > 14 ? `${className(k).slice(0, 13)}…` : className(k));
  const ticks = names.filter((k) => !many || k % Math.ceil(names.length / 14) === 0);
  return plot({
    width: side, height: side - left + 60, marginLeft: left, marginTop: 4, marginBottom: longest > 3 ? 68 : 42, marginRight: 4,
    x: { label: "taken for", domain: names, ticks, tickFormat: short, tickSize: 0, labelArrow: "none", tickRotate: longest > 3 ? -40 : 0, labelAnchor: "center" },
    y: { label: "class", domain: names, ticks, tickFormat: short, tickSize: 0, labelArrow: "none", labelAnchor: "center" },
    marks: [
      Plot.cell(cells, { x: "said", y: "truth", inset: .5, fill: (d) => d.truth === d.said ? "var(--right)" : "var(--wrong)", fillOpacity: (d) => .08 + .92 * d.count / totals.get(d.truth) }),
      many ? null : Plot.text(cells, { x: "said", y: "truth", text: (d) => String(d.count), fill: (d) => d.count / totals.get(d.truth) > .5 ? "var(--panel)" : "var(--ink)", fontVariant: "tabular-nums" }),
      Plot.tip(cells, Plot.pointer({ x: "said", y: "truth", title: (d) => `${className(d.truth)} taken for ${className(d.said)}\n${d.count} of ${totals.get(d.truth)} (${percent(100 * d.count / totals.get(d.truth))} %)` })),
    ],
    opacity: { type: "identity" },
  }, label);
}

function matrixText(flat) {
  const cells = triples(flat), total = d3.sum(cells, (d) => d.count), right = d3.sum(cells.filter((d) => d.truth === d.said), (d) => d.count);
  const wrong = cells.filter((d) => d.truth !== d.said).sort((a, b) => b.count - a.count).slice(0, 3);
  const often = wrong.map((d) => `${className(d.truth)} for ${className(d.said)} (${d.count})`).join(", ");
  return `${percent(100 * right / total)} % of ${plural(total, "test example")} right.${often ? ` Most often wrong: ${often}.` : ""}`;
}

function places() {
  const found = new Map();
  for (const group of shown()) {
    for (const name of Object.keys(group.models?.confusion?.domains || {})) found.set(`domain ${name}`, ["domain", name]);
    for (const name of Object.keys(group.models?.confusion?.clients || {})) found.set(`client ${name}`, ["client", name]);
  }
  return [...found].sort((a, b) => b[0].startsWith("domain") - a[0].startsWith("domain"));
}

function drawConfusion() {
  const choices = places();
  if (!choices.length) {
    fill(body("confusion"), reasons("why", modelsLater()));
    return;
  }
  if (!choices.some(([key]) => key === view.place)) view.place = choices[0][0];
  const place = choices.find(([key]) => key === view.place)[1];
  const names = choices.map(([key, [kind, name]]) => [key, kind === "client" ? `client ${name}` : name]);
  const width = widthOf("confusion"), drawn = shown().map((group) => [group, matrixOf(group, place)]).filter(([, flat]) => flat);
  const each = drawn.length === 1 ? width : Math.max(280, Math.floor((width - 20) / Math.min(drawn.length, Math.max(1, Math.floor(width / 340)))) - 10);
  const panels = drawn.map(([group, flat]) => el("div", { class: "panel" },
    el("h3", { text: group.label }),
    matrix(flat, each, `Confusion matrix of ${group.label}, ${view.place}: ${matrixText(flat)}`),
    el("p", { class: "small muted", text: `${matrixText(flat)} ${group.models.confusion.models === "own models" ? "Clients' own models" : "Public model"}, round ${group.models.confusion.round}, seed ${group.models.seed}.` })));
  fill(body("confusion"),
    el("div", { class: "controls" }, select("Where", names, view.place, (value) => { view.place = value; drawConfusion(); })),
    el("div", { class: "panels" }, ...panels), reasons("why"));
}

function modelsLater() {
  return page.live ? "These come when the runs have ended: they are made from the models' states." : "The page was made without the models (--no-models).";
}

// ---- features

function drawFeatures() {
  const having = shown().filter((group) => group.models?.tsne);
  if (!having.length) {
    fill(body("features"), reasons("why_no_tsne", modelsLater()));
    return;
  }
  const numbers = [...new Set(having.flatMap((group) => group.models.tsne.rounds.map((one) => one.round)))].sort((a, b) => a - b);
  if (view.round < 0 || view.round >= numbers.length) view.round = numbers.length - 1;
  const clouds = having.flatMap((group) => group.models.tsne.rounds.flatMap((one) => one.clouds));
  const domains = [...new Set(clouds.map((cloud) => cloud.domain))].filter(Boolean);
  const number = el("output", {}), panels = el("div", { class: "panels" });
  const slider = el("input", { type: "range", min: "0", max: String(numbers.length - 1), step: "1", value: String(view.round), "aria-label": "Round",
    oninput: (event) => { view.round = Number(event.target.value); draw(); } });
  function draw() {
    number.textContent = `round ${numbers[view.round]}`;
    slider.setAttribute("aria-valuetext", number.textContent);
    panels.replaceChildren(...having.map((group) => featurePanel(group, numbers[view.round], domains)));
  }
  draw();
  fill(body("features"),
    el("p", { class: "small muted", text: "Test features, and prototypes as large marks, scaled to length 1. All rounds of a method lie in one plane; planes of two methods have nothing in common. Shapes are domains." + (numbers.length === 1 ? " More rounds: keep their states with [saving] keep." : "") }),
    el("div", { class: "controls" },
      el("label", {}, "Round", slider, number),
      domains.length > 1 ? toggles("Colour", [["class", "By class"], ["domain", "By domain"]], view.colour, (value) => { view.colour = value; drawFeatures(); }) : null),
    key(clouds, domains), panels, reasons("why_no_tsne"));
}

function featurePanel(group, number, domains) {
  // A method that did not keep this round shows the last one before it, or its first.
  const { model, rounds } = group.models.tsne, at = rounds.findLast((one) => one.round <= number) || rounds[0];
  const score = at.silhouette[view.colour];
  return el("div", { class: "panel" }, el("h3", { text: group.label }), plane(at, domains, group),
    el("p", { class: "small muted", text: `Round ${at.round}, ${model}, seed ${group.models.seed}.${score === null ? "" : ` Mean silhouette by ${view.colour}: ${score.toFixed(2)}.`}` }));
}

const SHAPES = ["circle", "triangle", "square", "diamond2", "wye", "cross"];
const PROTOTYPES = { "cluster prototypes": "diamond", "unbiased prototypes": "star" };

function key(clouds, domains) {
  const labels = [...new Set(clouds.flatMap((cloud) => cloud.label))].sort((a, b) => a - b);
  return keyOf(view.colour === "class" ? labels.map((label) => [className(label), label]) : domains.map((name, k) => [name, k]));
}

function keyOf(items) {
  return el("div", { class: "key", "aria-hidden": "true" }, ...items.map(([name, k]) => {
    const mark = d3.create("svg").attr("viewBox", "0 0 10 10").attr("width", 10).attr("height", 10);
    mark.append("circle").attr("cx", 5).attr("cy", 5).attr("r", 5).attr("fill", classColour(k));
    return el("span", {}, mark.node(), ` ${name}`);
  }));
}

function plane(at, domains, group) {
  const dots = at.clouds.flatMap((cloud) => cloud.x.map((x, k) => ({ x, y: cloud.y[k], label: cloud.label[k], domain: cloud.domain, kind: cloud.kind })));
  const colour = (d) => view.colour === "class" ? classColour(d.label) : d.domain ? classColour(domains.indexOf(d.domain)) : "var(--panel)";
  const columns = Math.max(1, Math.floor((widthOf("features") + 19) / 339)), side = Math.floor((widthOf("features") - 19 * (columns - 1)) / columns);
  const examples = dots.filter((d) => d.domain), means = dots.filter((d) => !d.domain);
  return plot({
    width: side, height: Math.round(side * .92), margin: 1,
    x: { axis: null, domain: [-20, 1020] }, y: { axis: null, domain: [-20, 1020] }, symbol: { type: "identity" },
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.dot(examples, { x: "x", y: "y", r: 2.8, fill: colour, fillOpacity: .85, symbol: (d) => SHAPES[domains.indexOf(d.domain) % SHAPES.length] }),
      Plot.dot(means, { x: "x", y: "y", r: 6, fill: colour, stroke: "var(--ink)", strokeWidth: 1.3, symbol: (d) => PROTOTYPES[d.kind] || "star" }),
      Plot.tip(dots, Plot.pointer({ x: "x", y: "y", title: (d) => `${d.domain ? `test example of ${d.domain}` : d.kind}\nclass ${className(d.label)}` })),
    ],
  }, `t-SNE of test features of ${group.label}, round ${at.round}, by ${view.colour}`);
}

// ---- clients and data

function clientMean(group, client, name = "accuracy") {
  return known(group.runs.map((run) => run.clients[client]?.[name])).map(hundredths);
}

function held(client) {
  const facts = task().holdings, at = facts ? facts.clients.indexOf(client) : -1;
  return at < 0 ? null : facts.counts[at];
}

function drawClients() {
  const names = [...new Set([...task().clients, ...(task().holdings?.clients || [])])];
  if (!names.length) {
    fill(body("clients"), el("p", { class: "muted", text: "No client was tested at home yet." }));
    return;
  }
  const columns = [
    { name: "client", value: (name) => name, cell: (name) => el("button", { type: "button", class: "plain", text: name, onclick: () => openClient(name) }) },
    ...(task().holdings ? [
      { name: "domain", value: (name) => domainOf(name) ?? null },
      { name: "examples", number: true, value: (name) => (held(name) ? d3.sum(held(name)) : null) }] : []),
    ...shown().map((group) => ({
      name: group.label, number: true, best: true, note: "Accuracy at home, %, mean over seeds",
      value: (name) => mean(clientMean(group, name)), cell: (name) => { const all = clientMean(group, name); return spread(all.length ? known([mean(all), deviation(all)]) : []); },
    })),
  ];
  fill(body("clients"), el("p", { class: "small muted", text: "Accuracy at home, %, with the model that the client uses: mean of the last five evaluated rounds ± standard deviation over seeds. The best method of each client is bold. A name opens the client." }),
    table("clients", columns, names, { label: "clients", bestInRow: shown().length > 1 }));
}

function openClient(name) {
  const counts = held(name), width = Math.min(860, window.innerWidth - 64);
  const rows = groups().filter((group) => clientMean(group, name).length);
  const measures = [...new Set(rows.flatMap((group) => group.runs.flatMap((run) => Object.keys(run.clients[name] || {}))))];
  const columns = [
    { name: "method", value: (group) => group.label },
    ...measures.map((measure) => ({ name: measure.replaceAll("_", " "), number: true, best: measure !== "majority_rate", value: (group) => mean(clientMean(group, name, measure)),
      cell: (group) => { const all = clientMean(group, name, measure); return spread(all.length ? known([mean(all), deviation(all)]) : []); } })),
  ];
  const matrices = shown().map((group) => [group, matrixOf(group, ["client", name])]).filter(([, flat]) => flat);
  const failures = groups().flatMap((group) => group.runs.flatMap((run) => run.failures.filter((one) => one[1] === name).map((one) => `${group.label}, seed ${run.seed}, round ${one[0]}: ${one[2]}`)));
  openDetail(name,
    el("p", { class: "muted", text: [domainOf(name) && `domain ${domainOf(name)}`, counts && plural(d3.sum(counts), "training example")].filter(Boolean).join(" · ") }),
    el("h3", { text: "At home, %" }), rows.length ? table("client", columns, rows, { label: "methods at this client", by: 1, down: true }) : el("p", { class: "muted", text: "This client was not tested." }),
    el("h3", { text: "Accuracy over rounds" }), curve((run) => scores(run, run.series.clients[name]), { width, height: 240, label: "accuracy, %", unit: "%" }),
    counts ? el("h3", { text: "Training examples by class" }) : null, counts ? bars(counts, width) : null,
    matrices.length ? el("h3", { text: "Confusion at home" }) : null,
    el("div", { class: "panels" }, ...matrices.map(([group, flat]) => el("div", { class: "panel" }, el("h3", { text: group.label }),
      matrix(flat, Math.min(320, width), `Confusion matrix of ${group.label} at ${name}`), el("p", { class: "small muted", text: matrixText(flat) })))),
    failures.length ? el("h3", { text: "Replies that did not count" }) : null, ...failures.map((text) => el("p", { class: "notice small", text })));
}

function bars(counts, width) {
  const data = counts.map((count, label) => ({ label, count }));
  return plot({ width, height: 150, marginBottom: 34, x: { label: "class", domain: data.map((d) => d.label), tickFormat: className, tickSize: 0, labelArrow: "none", ticks: data.length > 20 ? data.filter((d) => d.label % 10 === 0).map((d) => d.label) : undefined },
    y: { label: "examples", grid: true, ticks: 3, labelArrow: "none" },
    marks: [Plot.barY(data, { x: "label", y: "count", fill: "var(--s0)" }), Plot.tip(data, Plot.pointerX({ x: "label", y: "count", title: (d) => `class ${className(d.label)}: ${d.count}` }))],
  }, `Training examples by class: ${data.map((d) => `${className(d.label)} ${d.count}`).join(", ")}`);
}

function drawData() {
  const facts = task().holdings;
  if (!facts) {
    fill(body("data"), reasons("why", modelsLater()));
    return;
  }
  const cells = facts.clients.flatMap((client, i) => facts.counts[i].map((count, label) => ({ client, label, count, domain: facts.domains[i] || "" }))).filter((d) => d.count);
  const domains = [...new Set(facts.domains.map((name) => name || ""))], width = widthOf("data"), rows = facts.clients.length;
  const step = Math.max(15, Math.min(30, 640 / rows)), longest = d3.max(facts.clients, (name) => name.length);
  const short = (name) => (name.length > 20 ? `${name.slice(0, 19)}…` : name), column = (width - 40) / facts.classes.length;
  const chart = plot({
    width, height: step * rows + 60, marginLeft: Math.min(160, 24 + 7.4 * longest), marginBottom: 42, marginTop: 8,
    x: { label: "class", type: "point", domain: d3.range(facts.classes.length), tickFormat: (k) => (className(k).length > 10 ? `${className(k).slice(0, 9)}…` : className(k)), tickSize: 0, labelArrow: "none", ticks: facts.classes.length > 25 ? d3.range(0, facts.classes.length, 10) : undefined },
    y: { label: null, type: "point", domain: facts.clients, tickFormat: short, tickSize: 0 },
    r: { range: [0, Math.max(2, Math.min(step / 2, column / 2) * .95)] },
    marks: [
      Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1 }),
      Plot.dot(cells, { x: "label", y: "client", r: "count", fill: (d) => classColour(domains.indexOf(d.domain)), fillOpacity: .85 }),
      Plot.tip(cells, Plot.pointer({ x: "label", y: "client", title: (d) => `${d.client}${d.domain ? `, ${d.domain}` : ""}\nclass ${className(d.label)}: ${plural(d.count, "example")}` })),
    ],
  }, "Training examples of each client by class");
  chart.addEventListener("click", (event) => { const found = event.currentTarget.querySelector("svg").value; if (found) openClient(found.client); });
  fill(body("data"), el("p", { class: "small muted", text: `${plural(rows, "client")}, ${facts.classes.length} classes, ${plural(d3.sum(cells, (d) => d.count), "training example")}. Areas are numbers of examples${domains.length > 1 ? ", colours are domains" : ""}. A click opens the client.` }),
    domains.length > 1 ? keyOf(domains.map((name, k) => [name || "no domain", k])) : null, chart);
}
