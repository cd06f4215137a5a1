"use strict";
// The page of a tilewise service. Everything it shows comes from /v1 and /metrics, and goes in as text.

const at = (id) => document.getElementById(id);
const state = { arch: null, digest: null, diff: null, log: null };

function node(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  return made;
}

function say(text, bad = false) {
  at("said").textContent = text;
  at("said").className = bad ? "bad" : "";
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("tilewise-token");
  const headers = { ...(options.headers || {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) at("token-form").hidden = false;
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({ detail: `${answer.status}` }));
    throw new Error(problem.detail);
  }
  return answer;
}

const read = async (path) => (await ask(path)).json();
const send = (path, body) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body || {}) });

function table(id, heads, rows, empty) {
  const found = at(id);
  const head = node("tr");
  for (const name of heads) head.append(node("th", name, { scope: "col" }));
  const body = node("tbody");
  for (const row of rows) {
    const line = node("tr");
    for (const cell of row) {
      const box = node("td");
      if (cell instanceof Node) box.append(cell);
      else if (cell && cell.long !== undefined) { box.textContent = cell.long; box.className = "long"; }
      else if (typeof cell === "number") { box.textContent = number(cell); box.className = "number"; }
      else box.textContent = cell ?? "";
      line.append(box);
    }
    body.append(line);
  }
  if (!rows.length) {
    const line = node("tr");
    line.append(node("td", empty, { colspan: heads.length }));
    body.append(line);
  }
  const top = node("thead");
  top.append(head);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  found.replaceChildren(top, body);
  if (focused) found.querySelector(`[data-key="${focused}"]`)?.focus();
}

function list(id, entries) {
  at(id).replaceChildren(...entries.flatMap(([name, value]) => [node("dt", name), node("dd", value)]));
}

const number = (value) => (Number.isInteger(value) ? String(value) : value.toPrecision(4));
const percent = (ratio) => (ratio === null ? "" : `${((ratio - 1) * 100).toFixed(2)} %`);
const moment = (text) => (text ? text.replace("T", " ").slice(0, 19) : "");
const short = (digest) => (digest || "").slice(0, 12);
const shapeText = (s) =>
  `batch ${s.batch_size}, next_n ${s.next_n}, heads ${s.heads}, context ${s.max_context_len}` +
  (s.mean_context_len === s.max_context_len ? "" : ` (mean ${s.mean_context_len})`);
function configText(c) {
  const usual = new Set(["", 0, "even", "natural"]);
  return Object.entries(c).filter(([k, v]) => k === "kernel" || !usual.has(v)).map(([k, v]) => (k === "kernel" ? v : `${k} ${v}`)).join(", ");
}

async function showNow() {
  const ready = await read("readyz");
  const select = at("arch");
  if (!select.options.length) {
    for (const name of Object.keys(ready.archs)) select.append(node("option", name, { value: name }));
    const wanted = new URLSearchParams(location.search).get("arch");
    select.value = wanted in ready.archs ? wanted : ready.default_arch;
    state.arch = select.value;
  }
  const one = ready.archs[state.arch];
  const entries = [["GPU", state.arch], ["model", one.model_id || "none: the default config answers"]];
  if (one.problem) entries.push(["note", one.problem]);
  if (ready.catalogue) entries.push(["catalogue", ready.catalogue]);
  const figures = [];
  if (one.model_id) {
    const manifest = await read(`v1/models/current?arch=${state.arch}`);
    state.digest = manifest.digest;
    entries.push(["trained on", `${manifest.data.rows} rows, ${manifest.data.shapes} shapes`]);
    entries.push(["noise margin", `${(100 * manifest.noise_margin).toFixed(2)} %`]);
    for (const [name, value] of Object.entries(manifest.metrics)) {
      if (typeof value === "number") figures.push([name, number(value)]);
      if (name === "none") figures.push(["none", value]);
    }
  } else state.digest = null;
  list("current", entries);
  list("figures", figures.length ? figures : [["none", "this model was not judged on held-out shapes"]]);
}

async function showPlots() {
  for (const box of document.querySelectorAll(".plot")) {
    if (!state.digest) { box.textContent = "There is no model to draw."; continue; }
    box.textContent = "Drawing ...";
    try {
      const answer = await ask(`v1/plots/${box.dataset.plot}?arch=${state.arch}`);
      const drawn = new DOMParser().parseFromString(await answer.text(), "image/svg+xml").documentElement;
      drawn.setAttribute("role", "img");
      drawn.setAttribute("aria-label", box.parentElement.querySelector("figcaption").textContent);
      box.replaceChildren(document.importNode(drawn, true));
    } catch (error) { box.textContent = error.message; }
  }
}

async function showJobs() {
  const found = (await read(`v1/jobs?arch=${state.arch}&limit=20`)).jobs;
  table("job-table", ["begun", "state", "stage", "progress", "why it ended", ""], found.map((job) => {
    const over = !["queued", "running"].includes(job.state);
    const share = node("progress", null, { max: Math.max(1, job.total), value: over ? Math.max(1, job.total) : job.done, "aria-label": `${job.stage} ${job.done} of ${job.total}` });
    const buttons = node("span");
    buttons.append(node("button", "Log", { type: "button", "data-key": `log-${job.id}`, onclick: () => showLog(job.id) }));
    if (!over) buttons.append(" ", node("button", "Cancel", { type: "button", "data-key": `cancel-${job.id}`, onclick: () => act(() => send(`v1/jobs/${job.id}/cancel`), "The job is to be cancelled.") }));
    if (job.result.digest) buttons.append(" ", node("button", "Compare", { type: "button", "data-key": `diff-${job.id}`, onclick: () => showDiff(job.result.digest) }));
    return [moment(job.started_at || job.created_at), job.state, job.stage, share, { long: job.reason }, buttons];
  }), "No job of this GPU yet.");
  if (state.log) await showLog(state.log);
}

async function showLog(id) {
  if (state.log !== id) at("log-box").open = true;
  state.log = id;
  const lines = (await read(`v1/jobs/${id}/log`)).lines;
  at("log-of").textContent = short(id);
  at("log").textContent = lines.map((line) => `${moment(line.at)}  ${line.text}`).join("\n");
  at("log-box").hidden = false;
}

async function showModels() {
  const found = await read(`v1/models?arch=${state.arch}`);
  table("model-table", ["stored", "model", "rows", "geomean regret", "worst", ""], found.models.map((model) => {
    const buttons = node("span");
    if (model.current) buttons.append("in force");
    else buttons.append(node("button", "Compare", { type: "button", "data-key": `model-${model.digest}`, onclick: () => showDiff(model.digest) }));
    return [moment(model.stored_at), model.model_id, model.data.rows, model.metrics.geomean_regret, model.metrics.worst_regret, buttons];
  }), "No model was stored for this GPU; the shipped one answers, if there is one.");
  at("rollback").disabled = !found.history.length;
}

async function showDiff(digest) {
  await act(async () => {
    const found = await read(`v1/models/${digest}/diff`);
    state.diff = digest;
    at("diff-of").textContent = found.new_model_id;
    at("diff-sum").textContent = `${found.changed_shapes} of ${found.shapes} shapes change, ${(100 * found.changed_launches).toFixed(1)} % of launches. ` +
      `Expected change of time: ${percent(found.expected_time_ratio) || "unknown"}; measured: ${percent(found.measured_time_ratio) || "unknown"}.`;
    table("diff-table", ["shape", "launches", "now", "then", "expected", "measured"], found.changes.map((one) =>
      [shapeText(one.shape), one.count, { long: configText(one.old) }, { long: configText(one.new) }, percent(one.expected_ratio), percent(one.measured_ratio)]), "No pick changes.");
    at("diff").hidden = false;
    at("diff").querySelector("h3").focus();
  }, "");
}

async function showProfiles() {
  const found = (await read(`v1/profiles?arch=${state.arch}`)).profiles;
  table("profile-table", ["added", "digest", "rows", "bytes", "by"], found.map((one) =>
    [moment(one.added_at), short(one.digest), one.rows, one.bytes, one.added_by]), "Nothing was uploaded for this GPU.");
  const seen = (await read(`v1/shapes?arch=${state.arch}&limit=20`)).shapes;
  table("shape-table", ["shape", "launches", "last seen"], seen.map((one) =>
    [shapeText(one.shape), one.count, moment(one.last_seen)]), "No engine has sent its shapes.");
}

async function showFallbacks() {
  const text = await (await ask("metrics")).text();
  const rows = [];
  for (const [, arch, reason, count] of text.matchAll(/^tilewise_fallbacks_total\{arch="([^"]*)",reason="([^"]*)"\} (\S+)$/gm)) {
    if (arch === state.arch && Number(count)) rows.push([reason, Number(count)]);
  }
  const most = Math.max(1, ...rows.map((row) => row[1]));
  table("fallback-table", ["reason", "shapes", ""], rows.sort((a, b) => b[1] - a[1]).map(([reason, count]) =>
    [reason, count, node("meter", null, { min: 0, max: most, value: count, "aria-label": `${reason}: ${count}` })]), "None.");
}

async function act(work, done) {
  try {
    await work();
    if (done) say(done);
    await refresh();
  } catch (error) { say(error.message, true); }
}

async function refresh() {
  const before = state.digest;
  await showNow();
  for (const show of [showJobs, showModels, showProfiles, showFallbacks]) {
    try { await show(); } catch (error) { say(error.message, true); }
  }
  if (state.digest !== before) await showPlots();
}

function fields(form) {
  const found = {};
  for (const input of form.querySelectorAll("input[name]")) {
    if (input.type === "number") found[input.name] = Number(input.value);
    if (input.type === "checkbox") found[input.name] = input.checked;
  }
  return found;
}

function onSubmit(id, work) {
  at(id).addEventListener("submit", (event) => { event.preventDefault(); work(event.target); });
}

onSubmit("ask-form", (form) => act(async () => {
  const found = await (await send("v1/explain", { arch: state.arch, ...fields(form) })).json();
  const entries = node("dl", null, { id: "decision" });
  const d = found.decision;
  for (const [name, value] of [["config", configText(d.config)], ["predicted", d.predicted_us === null ? "not predicted" : `${number(d.predicted_us)} us`],
    ["margin to the runner-up", d.margin === null ? "none" : `${(100 * d.margin).toFixed(2)} %`], ["source", `${d.source}, ${d.regime}`], ["reason", d.reason],
    ["rejected", `${found.rejected.length} configs; first: ${found.rejected.length ? `${configText(found.rejected[0].config)} (${found.rejected[0].reason})` : "none"}`]]) {
    entries.append(node("dt", name), node("dd", value));
  }
  at("answer").replaceChildren(entries);
}, ""));

onSubmit("job-form", (form) => act(() => send("v1/jobs", { arch: state.arch, ...fields(form) }), "A retraining is queued."));
onSubmit("token-form", () => {
  sessionStorage.setItem("tilewise-token", at("token").value);
  at("token").value = "";
  at("token-form").hidden = true;
  say("");
  start();
});

onSubmit("upload-form", (form) => {
  const file = form.elements.file.files[0];
  const bar = at("upload-progress");
  const request = new XMLHttpRequest(); // fetch tells nothing about what was sent
  request.open("POST", "v1/profiles");
  request.setRequestHeader("Content-Type", "application/octet-stream");
  const token = sessionStorage.getItem("tilewise-token");
  if (token) request.setRequestHeader("Authorization", `Bearer ${token}`);
  request.upload.onprogress = (event) => { bar.value = event.total ? event.loaded / event.total : 0; };
  request.onloadend = () => {
    bar.hidden = true;
    let answer = {};
    try { answer = JSON.parse(request.responseText); } catch { answer = { detail: "The service did not answer." }; }
    const box = at("uploaded");
    if (request.status >= 300 || request.status === 0) { box.replaceChildren(node("p", answer.detail, { class: "bad" })); return; }
    box.replaceChildren(node("p", `${answer.accepted} rows accepted, ${answer.duplicates} repeated, ${answer.rejected} rejected.`));
    if (answer.reasons.length) {
      const reasons = node("ul");
      for (const one of answer.reasons.slice(0, 20)) reasons.append(node("li", `row ${one.row}: ${one.reason}`));
      box.append(reasons);
    }
    form.reset();
    refresh();
  };
  bar.hidden = false;
  say("");
  request.send(file);
});

at("arch").addEventListener("change", (event) => { state.arch = event.target.value; state.digest = null; at("diff").hidden = true; start(); });
at("rollback").addEventListener("click", () => act(() => send(`v1/models/rollback?arch=${state.arch}`), "Rolled back."));
at("promote").addEventListener("click", () => act(async () => {
  await send(`v1/models/${state.diff}/promote`);
  at("diff").hidden = true;
}, "Promoted: all workers answer from it within a second."));

async function start() {
  try { await refresh(); await showPlots(); } catch (error) { say(error.message, true); }
}

setInterval(() => { if (!document.hidden && state.arch) refresh().catch((error) => say(error.message, true)); }, 3000);
start();
