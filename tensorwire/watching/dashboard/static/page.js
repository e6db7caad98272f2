"use strict";
// Shows a job: asks for its state once a second and fills the tables. All text that comes from
// workers is set as text, never as HTML.

const SECONDS_SHOWN = 180;
const MOST_LINES = 40; // of the chart; beyond them it has one a role
const MOST_CALLS = 300; // rows, those with the most calls
const COLOURS = ["#2f6db3", "#c2571a", "#2d7d46", "#8a3ffc", "#b3261e", "#008b8b", "#9a6700", "#d02670"];
const by = (id) => document.getElementById(id);
let before = null;
let knownWorkers = new Map(); // those of the answer before, by name
let chart = null;
let names = [];
const times = [];
const series = new Map();

function cell(row, text, kind) {
  const td = document.createElement("td");
  td.textContent = text;
  if (kind) td.className = kind;
  row.append(td);
  return td;
}

function number(value, digits = 3) {
  if (value === null || !Number.isFinite(value)) return "";
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(digits)));
}

function megabytes(bytes) { return bytes ? `${(bytes / 1e6).toFixed(0)} MB` : ""; }

function stepsOf(worker) { return worker.facts ? worker.facts.progress.steps : null; }

function known(name) { return knownWorkers.get(name); }

function rate(now, then, seconds) {
  return now === null || then === null || then === undefined || !(seconds > 0)
    ? null : (now - then) / seconds;
}

function quantile(buckets, fraction) {
  const total = buckets.reduce((a, b) => a + b, 0);
  if (!total) return null;
  let below = 0;
  for (let i = 0; i < buckets.length; i++) {
    if (buckets[i] && below + buckets[i] >= fraction * total) {
      const low = i ? 1e-5 * 2 ** (i - 1) : 0;
      const high = 1e-5 * 2 ** Math.min(i, buckets.length - 2);
      return low + (high - low) * (fraction * total - below) / buckets[i];
    }
    below += buckets[i];
  }
  return null;
}

function button(place, text, action) {
  const made = document.createElement("button");
  made.textContent = text;
  made.addEventListener("click", action);
  place.append(made);
}

function stateOf(worker) {
  if (worker.process && "Tt".includes(worker.process.state) && worker.process.state) return "stopped";
  return worker.state;
}

function whatOf(worker) {
  const facts = worker.facts;
  if (worker.state !== "runs") return worker.why;
  if (worker.silent_for > 2) return `no answer for ${worker.silent_for.toFixed(0)} s`;
  if (facts && facts.progress.phase) return facts.progress.phase;
  if (facts && facts.waiting.length && facts.waiting[0].age > 1) {
    return `waits ${facts.waiting[0].age.toFixed(0)} s for ${facts.waiting[0].to}`;
  }
  return worker.why ? `last life ${worker.why}` : "";
}

function showWorkers(job, seconds) {
  const rows = document.createDocumentFragment();
  for (const worker of job.workers) {
    const row = document.createElement("tr");
    row.dataset.worker = worker.name;
    const then = known(worker.name);
    const same = then && then.life === worker.life ? then : undefined;
    const process = worker.process;
    cell(row, worker.name);
    cell(row, stateOf(worker), stateOf(worker));
    cell(row, worker.life);
    cell(row, worker.node >= 0 ? `${worker.node} ${worker.host}` : "");
    cell(row, stepsOf(worker) ?? "");
    cell(row, number(rate(stepsOf(worker), same && stepsOf(same), seconds)));
    cell(row, process ? megabytes(process.resident_bytes) : "");
    const cpu = process && same && same.process
      ? rate(process.cpu_seconds, same.process.cpu_seconds, seconds) : null;
    cell(row, cpu === null ? "" : `${(100 * cpu).toFixed(0)} %`);
    cell(row, whatOf(worker), "left");
    const actions = cell(row, "");
    button(actions, "stacks", () => open(worker.name, "stacks"));
    button(actions, "log", () => open(worker.name, "log"));
    button(actions, "trace", () => open(worker.name, "trace"));
    rows.append(row);
  }
  document.querySelector("#workers tbody").replaceChildren(rows);
}

function showCalls(job, seconds) {
  const rows = document.createDocumentFragment();
  const all = job.workers.flatMap((worker) =>
    (worker.facts ? worker.facts.made : []).map((made) => [worker, made]));
  const isLong = all.length > MOST_CALLS;
  if (isLong) all.sort((a, b) => b[1].calls - a[1].calls);
  for (const [worker, made] of all.slice(0, MOST_CALLS)) {
    const then = known(worker.name);
    const last = then && then.life === worker.life && then.facts
      ? then.facts.made.find((each) => each.peer === made.peer) : undefined;
    const row = document.createElement("tr");
    const buckets = last ? made.buckets.map((n, i) => n - last.buckets[i]) : made.buckets;
    cell(row, worker.name);
    cell(row, made.peer);
    cell(row, number(rate(made.calls, last && last.calls, seconds)));
    cell(row, number(1e3 * (quantile(buckets, .5) ?? NaN)));
    cell(row, number(1e3 * (quantile(buckets, .99) ?? NaN)));
    cell(row, made.in_flight);
    cell(row, made.errors || "");
    cell(row, number(rate(made.bytes_out / 1e6, last && last.bytes_out / 1e6, seconds)));
    cell(row, number(rate(made.bytes_in / 1e6, last && last.bytes_in / 1e6, seconds)));
    rows.append(row);
  }
  document.querySelector("#calls tbody").replaceChildren(rows);
  by("more-calls").textContent = isLong
    ? `and ${all.length - MOST_CALLS} pairs of workers with fewer calls` : "";
}

function showSources(job) {
  const rows = document.createDocumentFragment();
  for (const worker of job.workers) {
    const sources = worker.facts ? worker.facts.sources : {};
    for (const [source, facts] of Object.entries(sources)) {
      for (const [fact, value] of Object.entries(facts)) {
        const row = document.createElement("tr");
        cell(row, worker.name);
        cell(row, `${source}: ${fact}`);
        cell(row, typeof value === "object" ? JSON.stringify(value) : value);
        rows.append(row);
      }
    }
  }
  by("servers").hidden = !rows.childNodes.length;
  document.querySelector("#servers tbody").replaceChildren(rows);
}

function stepRates(job, seconds) {
  // Steps a second by worker; of many workers the mean of each role.
  const found = new Map();
  const roles = new Map();
  for (const worker of job.workers) {
    const then = known(worker.name);
    const same = then && then.life === worker.life ? then : undefined;
    const now = rate(stepsOf(worker), same && stepsOf(same), seconds);
    found.set(worker.name, now);
    if (!roles.has(worker.role)) roles.set(worker.role, []);
    if (now !== null) roles.get(worker.role).push(now);
  }
  if (found.size <= MOST_LINES) return found;
  return new Map([...roles].map(([role, rates]) => [`${role} (mean)`,
    rates.length ? rates.reduce((a, b) => a + b, 0) / rates.length : null]));
}

function showChart(job, seconds) {
  if (!(seconds > 0)) return;
  times.push(job.now);
  const rates = stepRates(job, seconds);
  for (const name of rates.keys()) {
    if (!series.has(name)) series.set(name, Array(times.length - 1).fill(null));
  }
  for (const [name, values] of series) {
    values.push(rates.get(name) ?? null);
    while (values.length > SECONDS_SHOWN) values.shift();
    if (values.every((value) => value === null)) series.delete(name);
  }
  while (times.length > SECONDS_SHOWN) times.shift();
  const present = [...series.keys()];
  if (!chart || present.join() !== names.join()) {
    names = present;
    if (chart) chart.destroy();
    const axis = { stroke: () => getComputedStyle(document.body).color, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
    chart = new uPlot({
      width: by("chart").clientWidth, height: 220, axes: [axis, axis],
      series: [{}, ...names.map((name, i) => ({ label: name, stroke: COLOURS[i % COLOURS.length] }))],
    }, [times, ...series.values()], by("chart"));
  } else {
    chart.setData([times, ...series.values()]);
  }
}

function showLists(job) {
  const alarms = job.alarms.map((text) => {
    const p = document.createElement("p");
    p.textContent = text;
    return p;
  });
  by("alarms").hidden = !alarms.length;
  by("alarms").replaceChildren(...alarms);
  by("news").replaceChildren(...job.news.slice().reverse().map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

function show(job) {
  const seconds = before ? job.now - before.now : 0;
  by("job").textContent = job.job;
  document.title = `${job.job}: ${job.phase}`;
  by("phase").textContent = job.phase;
  by("phase").className = `badge ${job.phase}`;
  by("machines").textContent = `${job.nodes.length} machine${job.nodes.length === 1 ? "" : "s"}, `
    + `${job.workers.filter((w) => w.state === "runs").length} of ${job.workers.length} workers run`;
  showWorkers(job, seconds);
  showCalls(job, seconds);
  showSources(job);
  showChart(job, seconds);
  showLists(job);
  before = job;
  knownWorkers = new Map(job.workers.map((worker) => [worker.name, worker]));
}

let text = "";

function filtered() {
  const wanted = by("filter").value;
  by("text").textContent = wanted
    ? text.split("\n").filter((line) => line.includes(wanted)).join("\n") : text;
}

async function open(worker, what) {
  by("details-title").textContent = `${what} of ${worker}`;
  text = what === "trace" ? "recording for five seconds…" : "asking…";
  by("filter").value = "";
  by("flame").hidden = by("download").hidden = true;
  filtered();
  if (!by("details").open) by("details").showModal();
  const query = new URLSearchParams({ worker });
  const method = what === "trace" ? "POST" : "GET";
  const answer = await fetch(`api/${what}?${query}`, { method });
  const body = await answer.text();
  if (what === "trace" && answer.ok) {
    text = "";
    flame(JSON.parse(body));
    const link = by("download");
    link.href = URL.createObjectURL(new Blob([body], { type: "application/json" }));
    link.download = `${worker.replace(":", "-")}.json`;
    link.hidden = false;
  } else {
    text = body;
  }
  filtered();
}

function flame(trace) {
  // Functions by thread: time goes right, callers are above those that they call.
  const threads = new Map();
  const labels = new Map();
  for (const event of trace.traceEvents) {
    if (event.ph === "M") labels.set(event.tid, event.args.name);
    else if (event.ph === "X") {
      if (!threads.has(event.tid)) threads.set(event.tid, []);
      threads.get(event.tid).push(event);
    }
  }
  const canvas = by("flame");
  const width = Math.min(1100, window.innerWidth * .9);
  const drawn = [];
  let y = 0;
  for (const [thread, events] of threads) {
    events.sort((a, b) => a.ts - b.ts || b.dur - a.dur);
    const open = [];
    let deepest = 0;
    drawn.push({ label: labels.get(thread) ?? String(thread), y });
    for (const event of events) {
      while (open.length && open[open.length - 1] <= event.ts + 1) open.pop();
      drawn.push({ event, y: y + 14 * (open.length + 1) });
      open.push(event.ts + event.dur);
      deepest = Math.max(deepest, open.length);
    }
    y += 14 * (deepest + 2);
  }
  const end = Math.max(1, ...drawn.filter((d) => d.event).map((d) => d.event.ts + d.event.dur));
  canvas.width = width;
  canvas.height = Math.min(y, 8000);
  canvas.hidden = false;
  const pen = canvas.getContext("2d");
  pen.font = "11px system-ui, sans-serif";
  const ink = getComputedStyle(document.body).color;
  for (const each of drawn) {
    if (each.label) {
      pen.fillStyle = ink;
      pen.fillText(each.label, 2, each.y + 11);
      continue;
    }
    const x = width * each.event.ts / end;
    const w = Math.max(1, width * each.event.dur / end);
    let hash = 0;
    for (const letter of each.event.name) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
    pen.fillStyle = `hsl(${hash} 60% 75%)`;
    pen.fillRect(x, each.y, w - .5, 13);
    if (w > 30) {
      pen.fillStyle = "#111";
      pen.save();
      pen.beginPath();
      pen.rect(x, each.y, w, 13);
      pen.clip();
      pen.fillText(each.event.name, x + 2, each.y + 10);
      pen.restore();
    }
  }
}

async function refresh() {
  try {
    const answer = await fetch("api/job");
    if (!answer.ok) throw new Error(await answer.text());
    show(await answer.json());
    by("age").textContent = "";
  } catch (error) {
    by("age").textContent = `not reached: ${error.message}`;
  }
  setTimeout(refresh, 1000);
}

by("filter").addEventListener("input", filtered);
window.addEventListener("resize", () => chart && chart.setSize({ width: by("chart").clientWidth, height: 220 }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart && chart.redraw());
refresh();
