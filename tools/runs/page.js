// SPDX-License-Identifier: Apache-2.0
// Draws the report out of the JSON in #data (report.py says what is in it). Text goes into the page as text only.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
// Text and lines have the colours of page.css.
const LIGHT = { text: "#1f2328", line: "#d1d9e0", sets: ["#0550ae", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#0a7c86", "#7d6608", "#57606a"] };
const DARK = { text: "#e6edf3", line: "#3d444d", sets: ["#58a6ff", "#f0883e", "#56d364", "#bc8cff", "#ff7bc0", "#4dd4d9", "#e3c341", "#a8b1bb"] };
const PHASES = ["forward", "backward", "exchange", "waiting", "update", "data", "checkpoint", "validation", "other"];
let printing = false;
const charts = [];

// ---- Words and numbers

const given = value => value != null;
const sum = values => values.reduce((a, b) => a + b, 0);
const mean = values => values.length ? sum(values) / values.length : null;
const last = values => values[values.length - 1];
const number = (value, digits = 4) => !given(value) ? "" : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(digits));
const percent = value => given(value) ? `${number(100 * value)} %` : "";
function bytes(value) {
  if (!given(value)) return "";
  let unit = 0;
  for (; Math.abs(value) >= 1000 && unit < 4; ++unit) value /= 1000;
  return `${number(value, 3)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
function duration(seconds) {
  if (!given(seconds)) return "";
  if (seconds !== 0 && seconds < 1) return `${number(seconds * 1e3, 3)} ms`;
  if (seconds < 120) return `${number(seconds, 3)} s`;
  return seconds < 7200 ? `${number(seconds / 60, 3)} min` : `${number(seconds / 3600, 3)} h`;
}

function element(parent, tag, text, classes) {
  const made = document.createElement(tag);
  if (given(text)) made.textContent = text;
  if (classes) made.className = classes;
  parent.append(made);
  return made;
}
function section(title, note) {
  const made = element(page, "section");
  element(made, "h2", title);
  if (note) element(made, "p", note, "quiet");
  return made;
}
const grid = parent => element(parent, "div", null, "charts");
// cells: rows of text, or of [text, the notes below it]. Returns the table.
function rows(parent, heads, cells, classes) {
  const table = element(element(parent, "div", null, "scroll"), "table", null, classes);
  const head = element(table, "tr");
  for (const title of heads) element(head, "th", title);
  for (const row of cells) {
    const made = element(table, "tr");
    for (const [text, ...notes] of row.map(cell => [cell].flat())) {
      const cell = element(made, "td", text);
      for (const note of notes) element(cell, "small", note);
    }
  }
  return table;
}

// ---- Charts

const palette = () => dark.matches && !printing ? DARK : LIGHT;

function paint(chart) {
  const { text, line, sets } = palette();
  for (const axis of Object.values(chart.options.scales)) {
    axis.ticks.color = axis.title.color = text;
    axis.grid.color = line;
  }
  chart.options.plugins.legend.labels.color = text;
  for (const set of chart.data.datasets) {
    set.borderColor = sets[set.hue % sets.length];
    set.backgroundColor = set.borderColor + (set.band ? "30" : "");
  }
}

function errorBar(context, x, low, high) {
  context.beginPath();
  context.moveTo(x, low);
  context.lineTo(x, high);
  for (const y of [low, high]) {
    context.moveTo(x - 4, y);
    context.lineTo(x + 4, y);
  }
  context.stroke();
}

// Draws what a set has for each of its points: `errors`, from low to high, which say what repeats of a run differ by; `texts`,
// behind the end of a bar.
Chart.register({
  id: "notes",
  afterDatasetsDraw(chart) {
    const context = chart.ctx;
    context.save();
    context.strokeStyle = context.fillStyle = palette().text;
    context.textBaseline = "middle";
    chart.data.datasets.forEach((set, i) => chart.getDatasetMeta(i).data.forEach((point, at) => {
      if (!chart.isDatasetVisible(i)) return;
      if (set.errors?.[at]) errorBar(context, point.x, ...set.errors[at].map(value => chart.scales.y.getPixelForValue(value)));
      if (set.texts?.[at]) context.fillText(set.texts[at], point.x + 4, point.y);
    }));
    context.restore();
  },
});

// Shows or hides all that have one name in the legend.
function toggle(event, item, legend) {
  const sets = legend.chart.data.datasets;
  const shown = legend.chart.isDatasetVisible(item.datasetIndex);
  sets.forEach((set, i) => { if (set.label === sets[item.datasetIndex].label) legend.chart.setDatasetVisibility(i, !shown); });
  legend.chart.update();
}
const firstOfName = (item, all) => all.datasets.findIndex(set => set.label === item.text) === item.datasetIndex;

function axis(title, format, more = {}) {
  return { title: { display: true, text: title }, ticks: { callback(value) { return format ? format(value) : this.getLabelForValue(value); }, maxRotation: 0, autoSkipPadding: 12 },
    grid: {}, ...more };
}

// sets: [{label, hue, data, …}]; x, y: from axis().
function chart(parent, title, type, sets, x, y, options = {}) {
  const box = element(parent, "div", null, "chart");
  element(box, "h3", title);
  const holder = element(box, "div", null, "canvas");
  if (options.height) holder.style.height = `${options.height}px`;
  const canvas = element(holder, "canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", title);
  const along = options.indexAxis || "x", value = along === "y" ? "x" : "y";
  const made = new Chart(canvas, {
    type, data: { labels: options.labels, datasets: sets },
    options: {
      animation: false, maintainAspectRatio: false, normalized: true, indexAxis: along,
      interaction: { mode: type === "line" && !options.labels ? "nearest" : "index", axis: along, intersect: false },
      scales: { x, y },
      plugins: {
        legend: { display: sets.length > 1 || options.legend, onClick: toggle, labels: { boxWidth: 12, filter: firstOfName } },
        tooltip: {
          filter: item => !item.dataset.band,
          callbacks: { label: item => `${item.dataset.full || item.dataset.label}: ${(options.format || number)(item.parsed[value])}` },
        },
      },
    },
  });
  paint(made);
  made.update();
  charts.push(made);
  return made;
}

function repaint() {
  for (const each of charts) {
    paint(each);
    each.update("none");
  }
}
dark.addEventListener("change", repaint);
for (const [event, prints] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => { printing = prints; repaint(); charts.forEach(each => each.resize()); });

// ---- What is known of a run

const settings = run => run.start?.settings || {};
const fact = (run, key) => run.run?.[key] ?? settings(run)[key] ?? run.case?.[key];
const stepping = run => (run.trace?.ranks || []).filter(rank => rank.steps > 0);
const finite = values => (values || []).filter(given);
const caseOf = run => run.case ? [run.case.contender, ...Object.entries(run.case.varied || {}).map(([key, value]) => `${key} ${value}`)].join(", ") : run.name;
const cases = [...new Set(data.runs.map(caseOf))];
const hueOf = run => cases.indexOf(caseOf(run));

// Name of a result, how it is written, whether runs are compared by their ratio.
const RESULTS = [
  ["training time", duration, true], ["time per epoch", duration, true], ["samples/s", number, true], ["step, median", duration, true],
  ["step, 95th percentile", duration, true], ["training loss", number], ["best val. accuracy", percent], ["bytes moved", bytes, true],
  ["bytes moved in a step", bytes, true], ["busiest link, per step", bytes, true], ["memory", bytes, true], ["waiting in a step", duration],
  ["mean delay", number], ["largest delay", number], ["bubble", percent], ["bubble by the formula", percent], ["speed-up over one device", number],
].map(([name, format, ratio]) => ({ name, format, ratio, of: run => run.results[name] }));

// ---- Sections

const plain = value => given(value) ? typeof value === "object" ? JSON.stringify(value) : String(value) : "";

// Options that are not the same in all runs; files that a run writes are always others.
function differingSettings() {
  const skipped = ["metrics", "on_event", "trace", "checkpoint_dir"];
  const known = data.runs.filter(run => run.start?.settings);
  const names = [...new Set(known.flatMap(run => Object.keys(settings(run))))];
  const differing = names.filter(name => !skipped.includes(name) && new Set(known.map(run => plain(settings(run)[name]))).size > 1);
  return ["model", "strategy", "ranks"].filter(name => !differing.includes(name)).concat(differing);
}

function header() {
  const many = data.runs.length;
  const title = data.comparison ? `Comparison: ${data.comparison.experiment}` : many === 1 ? data.runs[0].name : many ? `${many} runs` : "Benchmarks";
  document.title = `${title} – lockstep report`;
  element(page, "h1", title);
  const partial = data.runs.filter(run => run.partial.length).length;
  if (partial) element(page, "p", `${many === 1 ? "This run is" : `${partial} of ${many} runs are`} partial: the table says what is missing.`, "warning");
  for (const text of data.warnings) element(page, "p", text, "warning");
}

const firstLike = run => data.runs.find(other => fact(other, "model") === fact(run, "model"));

function resultCell(run, result) {
  const value = result.of(run), base = result.of(firstLike(run));
  const compared = result.ratio && run !== firstLike(run) && given(value) && base;
  return [result.format(value), ...(compared ? [`× ${number(value / base, 3)}`] : [])];
}

function table() {
  if (!data.runs.length) return;
  const made = section("Runs", data.runs.length > 1 ? `Settings that differ, and results; × compares with ${data.runs.every(run => firstLike(run) === data.runs[0]) ? data.runs[0].name : "the first run of the same model"}.` : null);
  const names = differingSettings().filter(name => data.runs.some(run => given(fact(run, name))));
  const results = RESULTS.filter(result => data.runs.some(run => given(result.of(run))));
  rows(made, ["run", ...names, ...results.map(result => result.name)],
    data.runs.map(run => [[run.name, ...run.partial.map(text => `partial: ${text}`)], ...names.map(name => plain(fact(run, name))), ...results.map(result => resultCell(run, result))]));
}

// ---- A comparison: repeats of a case become a mean with an error bar

// Gives each run its series and x. A series has what its runs have in common, but for what all runs have; x is what they are
// drawn against. A run without that, such as `single` beside numbers of stages, has its contender there. "devices" is told only
// of a contender with several.
function group(runs) {
  const { across } = data.comparison;
  const facts = runs.map(({ case: { contender, devices, varied } }) => ({ contender, devices, ...varied }));
  const values = (key, some = facts) => new Set(some.map(each => each[key]).filter(given));
  const several = contender => values("devices", facts.filter(each => each.contender === contender)).size > 1;
  const tells = (each, key) => key !== across && (key === "devices" ? several(each.contender) : values(key).size > 1);
  const words = (key, value) => key === "contender" ? value : key === "devices" ? `${value} devices` : `${key.replaceAll("_", " ")} ${value}`;
  runs.forEach((run, i) => {
    const each = facts[i];
    run.x = String(each[across] ?? each.contender);
    run.series = Object.keys(each).filter(key => tells(each, key)).map(key => words(key, each[key])).join(", ") || each.contender;
  });
}

const inLines = label => label.length > 8 ? label.split(/[-_]/) : label;

function comparison() {
  const runs = data.runs.filter(run => run.case?.state === "finished");
  if (!runs.length) return;
  group(runs);
  const { across } = data.comparison;
  const all = [...new Set(runs.map(run => run.x))];
  if (!all.some(isNaN)) all.sort((a, b) => a - b);
  const names = [...new Set(runs.map(run => run.series))];
  const made = grid(section("Comparison", "Means over the repeats that finished; error bars: from the smallest to the largest."));
  for (const result of RESULTS) {
    const shown = runs.filter(run => given(result.of(run)));
    if (!shown.length) continue;
    const labels = all.filter(label => shown.some(run => run.x === label));
    const sets = names.map((label, hue) => {
      const values = labels.map(x => finite(runs.filter(run => run.series === label && run.x === x).map(result.of)));
      const errors = values.map(list => list.length > 1 ? [Math.min(...list), Math.max(...list)] : null);
      return { label, hue, data: values.map(mean), skipNull: true, errors };
    }).filter(set => set.data.some(given));
    const x = axis(across === "contender" ? "strategy" : across.replaceAll("_", " "));
    x.ticks.autoSkip = labels.length > 20;
    chart(made, result.name, "bar", sets, x, axis("", result.format, { grace: "10%", beginAtZero: true }), { labels: labels.map(inLines), format: result.format, legend: true });
  }
}

// ---- Benchmarks

// PyTorch in one process, in its faster memory order.
function alone(model, keepsMemory) {
  const names = Object.keys(model.pytorch || {}).filter(name => name.startsWith("one_process") && name.endsWith("_kept") === keepsMemory);
  return names.length ? Math.min(...names.map(name => model.pytorch[name])) : null;
}
const PEERS = [["lockstep", model => model.lockstep.step], ["lockstep, one process", model => model.lockstep.one_process],
  ["DDP over Gloo", model => model.pytorch?.ddp],
  ["one process", model => alone(model, false)], ["one process, keeping memory", model => alone(model, true)]];

function benchmarks() {
  if (!data.benchmarks.length) return;
  const models = Object.assign({}, ...data.benchmarks.map(each => each.models)), values = Object.values(models);
  const machines = [...new Set(data.benchmarks.map(each => `${each.machine}, ${each.ranks} ranks`))];
  const base = model => model.pytorch?.ddp || model.lockstep.step;
  const sets = PEERS.map(([label, of], hue) => {
    const seconds = values.map(of);
    return { label, hue, data: values.map((model, i) => given(seconds[i]) ? seconds[i] / base(model) : null), texts: seconds.map(duration), skipNull: true };
  }).filter(set => set.data.some(given));
  chart(grid(section("Benchmark", `lockstep bench step, beside PyTorch. ${machines.join("; ")}.`)), "Time of a training step", "bar", sets,
    axis(`${sets.length > 1 ? "DDP over Gloo" : "lockstep"} = 1`, number, { beginAtZero: true, grace: "12%" }), axis(""), { labels: Object.keys(models), indexAxis: "y", height: 90 + 20 * sets.length * values.length });
}

// ---- Curves

const ACROSS = { time: ["seconds", "time of training steps", duration], samples: ["samples", "samples", number], steps: ["step", "step", number] };

const pointsOf = (xs, ys) => xs.map((x, i) => ({ x, y: ys[i] }));
const lineOf = (xs, ys) => ({ borderWidth: 1.5, pointHitRadius: 8, pointRadius: xs.length > 60 ? 0 : 2, data: pointsOf(xs, ys) });

function curveSets(table, key, across) {
  const runs = data.runs.filter(run => finite(run[table]?.[key]).length);
  const sets = [];
  for (const run of runs) {
    const xs = run[table][ACROSS[across][0]];
    const line = { hue: hueOf(run), label: caseOf(run), full: run.name, ...lineOf(xs, run[table][key]) };
    sets.push(line);
    if (table === "steps" && key === "loss" && runs.length <= 4 && run.steps.low.some((low, i) => low !== run.steps.high[i])) {
      const edge = ys => ({ ...line, band: true, borderWidth: 0, pointRadius: 0, pointHitRadius: 0, data: pointsOf(xs, ys) });
      sets.push(edge(run.steps.low), { ...edge(run.steps.high), fill: "-1" });
    }
  }
  return sets;
}

// The losses of a run that diverges would leave nothing to see of the others.
function lossLimit() {
  const losses = data.runs.map(run => finite(run.steps?.loss)).filter(all => all.length);
  const limit = 3 * Math.max(...losses.map(all => all[0]));
  return losses.some(all => Math.max(...all) > limit) ? { max: limit } : {};
}

function curves() {
  const kinds = [["Training loss", "steps", "loss", number], ["Validation accuracy", "epochs", "val_accuracy", percent], ["Validation loss", "epochs", "val_loss", number],
    ["Throughput, samples/s", "steps", "rate", number], ["Learning rate", "steps", "learning_rate", number]].filter(([, table, key]) => data.runs.some(run => finite(run[table]?.[key]).length));
  if (!kinds.length) return;
  const made = section("Curves", "A point of a curve over steps is the mean of several where there are more than 500; the band goes from their least to their greatest. A loss above three times the first is not drawn.");
  const choice = element(made, "div", null, "choice");
  choice.setAttribute("role", "group");
  choice.setAttribute("aria-label", "against");
  const place = grid(made);
  const drawn = kinds.map(([title, table, key, format]) => [table, key, chart(place, title, "line", curveSets(table, key, "time"), axis("", null, { type: "linear" }), axis("", format, key === "loss" ? lossLimit() : {}), { format, legend: data.runs.length > 1 })]);
  const show = across => {
    for (const button of choice.children) button.setAttribute("aria-pressed", String(button.textContent === across));
    for (const [table, key, each] of drawn) {
      each.data.datasets = curveSets(table, key, across);
      each.options.scales.x.title.text = ACROSS[across][1];
      each.options.scales.x.ticks.callback = value => ACROSS[across][2](value);
      paint(each);
      each.update();
    }
  };
  for (const across of Object.keys(ACROSS)) element(choice, "button", across).addEventListener("click", () => show(across));
  show("time");
}

// ---- What was taken for what

function confusion() {
  const runs = data.runs.filter(run => run.confusion);
  if (!runs.length) return;
  const made = section("Confusion matrix", "Of the last validation: a row is a class, a column what its samples were taken for. Darker is a larger share of the row.");
  for (const run of runs.slice(0, 4)) {
    const { counts, classes } = run.confusion;
    if (data.runs.length > 1) element(made, "h3", run.name);
    const cells = counts.map((row, i) => [classes[i], ...row.map(count => number(count)), sum(row) ? percent(row[i] / sum(row)) : ""]);
    const lines = rows(made, ["class", ...classes, "recall"], cells, "matrix").children;
    counts.forEach((row, i) => row.forEach((count, j) => lines[i + 1].children[j + 1].style.setProperty("--share", sum(row) ? count / sum(row) : 0)));
  }
}

// ---- Where the time goes

// [{rank, ms: {phase: milliseconds}}] of a run, by the best that there is.
function phasesOf(run) {
  if (stepping(run).length) return stepping(run);
  const steps = run.steps?.step.length ? last(run.steps.step) + 1 : 0;
  const ended = run.run?.each_rank || (given(run.run?.forward_seconds) ? [{ rank: 0, ...run.run }] : []);
  if (!steps || !ended.length) return [];
  const here = run.run.steps ? run.run.steps - (run.start?.step || 0) : steps;
  return ended.map(rank => ({ rank: rank.rank,
    ms: Object.fromEntries(["forward", "backward", "exchange", "update", "data"].map(phase => [phase, 1e3 * rank[`${phase}_seconds`] / here])) }));
}

// A section with charts for each of the first runs that has what they show.
function perRun(has, title, note, draw) {
  const runs = data.runs.filter(has);
  if (!runs.length) return;
  const place = grid(section(title, note));
  for (const run of runs.slice(0, 12)) draw(run, place);
}
const rankName = rank => `rank ${rank.rank}`;
function barsOfRanks(place, run, ranks, sets, title, format, height, stacked = true) {
  chart(place, run.name, "bar", sets.map((set, hue) => ({ hue, ...set })), axis(title, format, { stacked, beginAtZero: true }), axis("", null, { stacked }),
    { labels: ranks.map(rankName), indexAxis: "y", format, height: 110 + height * ranks.length, legend: true });
}

function whereTimeGoes() {
  perRun(run => phasesOf(run).length, "Where a step's time goes", data.runs.some(run => stepping(run).length) ? "Out of the trace, where a run has one: the mean of the traced steps, by the thread of the training loop. Waiting is for other ranks."
    : "Each rank's mean of all steps. With --trace FILE.json, waiting for other ranks is shown apart.", (run, place) => {
    const ranks = phasesOf(run);
    const phases = PHASES.filter(phase => ranks.some(rank => rank.ms[phase] > 0.002 * sum(Object.values(rank.ms))));  // the others would be too thin
    const sets = phases.map(phase => ({ label: phase, hue: PHASES.indexOf(phase), data: ranks.map(rank => rank.ms[phase] || 0) }));
    barsOfRanks(place, run, ranks, sets, "ms per step", value => number(value, 3), 28);
  });
}

function balance() {
  perRun(run => stepping(run).length > 1, "Balance between ranks", "A step's time without waiting for other ranks: the slowest sets the pace of all.", (run, place) => {
    const sets = stepping(run).map((rank, hue) => ({ ...lineOf(rank.busy.step, rank.busy.ms), label: rankName(rank), hue }));
    chart(place, run.name, "line", sets, axis("step", number, { type: "linear" }), axis("ms", number, { beginAtZero: true }));
  });
}

function delays() {
  const counts = run => Object.keys(run.run || {}).filter(key => /^delay_\d+$/.test(key));
  const runs = data.runs.filter(run => counts(run).length);
  if (!runs.length) return;
  const labels = [...new Set(runs.flatMap(counts).map(key => +key.slice(6)))].sort((a, b) => a - b);
  const place = grid(section("Delays of asynchronous gradients", "How many gradients were computed on weights that others had updated so often since."));
  chart(place, "Gradients by delay", "bar", runs.map(run => ({ label: run.name, hue: hueOf(run), data: labels.map(delay => run.run[`delay_${delay}`] || 0) })),
    axis("updates made elsewhere"), axis("gradients", number), { labels, legend: true });
}

function bytesMoved() {
  perRun(run => stepping(run).some(rank => Object.keys(rank.bytes).length), "Bytes by collective",
    "What each rank handed to collectives and messages in a step. Those that begin with “machines:” go over links; the others stay in the machine's memory.", (run, place) => {
    const ranks = stepping(run);
    const names = [...new Set(ranks.flatMap(rank => Object.keys(rank.bytes)))];
    barsOfRanks(place, run, ranks, names.map(name => ({ label: name, data: ranks.map(rank => rank.bytes[name] || 0), stack: name.startsWith("machines:") ? "links" : "memory" })), "per step", bytes, 28);
  });
}

function memoryOfRanks() {
  perRun(run => run.run?.each_rank?.some(rank => rank.pss_bytes > 0), "Memory",
    "Of each rank's process at the end of the run. Its share: memory that n processes share counts one n-th. The most it had: shared memory counts in full.", (run, place) => {
    const ranks = run.run.each_rank;
    barsOfRanks(place, run, ranks, [{ label: "its share", data: ranks.map(rank => rank.pss_bytes) }, { label: "the most it had", data: ranks.map(rank => rank.peak_rss_bytes) }], "", bytes, 40, false);
  });
}

function repeat() {
  if (!data.runs.length) return;
  const made = section("To repeat it");
  const machine = facts => facts.description || [facts.host, facts.cpu, facts.cores && `${facts.cores} cores`, facts.memory_bytes && bytes(facts.memory_bytes)].filter(Boolean).map(plain).join(", ");
  if (data.comparison?.machine) element(made, "p", machine(data.comparison.machine), "quiet");
  if (data.comparison?.command) element(made, "pre", data.comparison.command);
  for (const run of data.runs.filter(run => run.start?.command)) {
    const box = element(made, "details");
    box.open = !data.comparison && data.runs.length <= 4;
    element(box, "summary", run.name);
    element(box, "pre", run.start.command);
    if (run.start.machine) element(box, "p", machine(run.start.machine) + (run.start.launcher && run.start.launcher !== "none" ? `; this command on each rank, started by ${run.start.launcher}` : ""), "quiet");
    element(box, "p", `Settings: ${Object.entries(settings(run)).map(([key, value]) => `${key} = ${plain(value)}`).join("; ")}`, "quiet");
  }
}

page.textContent = "";
Chart.defaults.font.family = "system-ui, sans-serif";
for (const part of [header, benchmarks, table, comparison, curves, confusion, whereTimeGoes, balance, delays, bytesMoved, memoryOfRanks, repeat]) part();
