// Text from the workspace reaches the page as text only: nothing here builds HTML from strings.
const token = document.querySelector('meta[name="flashrt-token"]').content;
const state = document.getElementById("state");

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return made;
}

const tag = (name, words) => node("span", { class: `tag ${name}` }, words ?? name);
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : "–");

function table(caption, heads, rows) {
  const head = node("thead", {}, node("tr", {}, ...heads.map((one) =>
    node("th", { scope: "col", class: one.startsWith("#") ? "number" : "" }, one.replace("#", "")))));
  const body = node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((cell, column) =>
    column === 0 ? node("th", { scope: "row", class: "id tight" }, cell)
      : node("td", { class: heads[column].startsWith("#") ? "number" : "" }, cell ?? "")))));
  return node("div", { class: "scroll" }, node("table", {}, node("caption", {}, caption), head, body));
}

function cancelButton(job) {
  const button = node("button", { class: "cancel", type: "button", "data-job": job, "aria-label": `Cancel ${job}` }, "Cancel");
  button.addEventListener("click", async () => {
    button.disabled = true;
    const answer = await fetch(`/jobs/${encodeURIComponent(job)}/cancel`, { method: "POST", headers: { "X-FlashRT-Token": token } });
    const said = await answer.json();
    state.textContent = said.error ?? `${said.job} is ${said.state}`;
  });
  return button;
}

function jobs(found) {
  if (!found.length) return [node("p", { class: "soft" }, "No job has run in this workspace yet.")];
  return [table("Newest first", ["job", "tool", "state", "progress", "says", ""], found.map((job) => [
    job.job, job.tool, tag(job.state),
    job.live ? node("span", {}, node("progress", { max: 1, value: job.progress, "aria-label": `Progress of ${job.job}` }), ` ${Math.round(100 * job.progress)} %`) : "",
    node("span", {}, job.error ?? job.message ?? "", job.log
      ? node("details", { "data-key": `log ${job.job}` }, node("summary", {}, "end of its log"), node("pre", { class: "log", tabindex: 0 }, job.log)) : null),
    job.live ? cancelButton(job.job) : "",
  ]))];
}

function devices(found) {
  const leases = new Map(found.leases.map((lease) => [lease.lease, lease]));
  const parts = [table("Who holds which device", ["device", "state", "holder", "name"], found.devices.map((device) => {
    const lease = leases.get(device.lease);
    const says = lease ? `${lease.holder}${lease.purpose ? ` for ${lease.purpose}` : ""}, ${Math.round(lease.remaining_s)} s left` : "";
    return [device.run_name, tag(device.state), says, device.name];
  }))];
  found.waiting.forEach((one, place) => parts.push(node("p", {}, `${place + 1}. in the queue: ${one.holder}, for ${one.request.count} ${one.request.kind}`)));
  for (const one of found.quarantined) parts.push(node("div", { class: "note bad" }, `${one.device} is quarantined since ${one.since}: ${one.reason}; ${one.restore}`));
  return parts;
}

function queue(found) {
  const stop = document.getElementById("stop");
  stop.hidden = !found.variants.length;
  stop.className = `note ${found.may_stop ? "good" : "wait"}`;
  stop.textContent = found.may_stop ? "The search may stop: every variant is decided." : `The search may not stop yet: ${found.in_the_way.join("; ")}`;
  if (!found.variants.length) return [node("p", { class: "soft" }, "The queue is empty: analyze with seed_queue fills it.")];
  return [table("The queue, with lineage", ["variant", "state", "transformation", "why"], found.variants.map((one) => [
    "\u00a0\u00a0".repeat(one.depth) + one.variant, tag(one.state), one.transformation,
    one.run ? node("a", { href: `/report/${encodeURIComponent(one.run)}` }, one.run) : one.reason ?? one.hypothesis,
  ]))];
}

function runs(found) {
  if (!found.length) return [node("p", { class: "soft" }, "Nothing was measured yet: bench_run does.")];
  return [table("Newest first", ["run", "system", "scenario", "validity", "#rate", "#period, ms", "#latency, ms", "#first output, ms"], found.map((run) => [
    node("a", { href: `/report/${encodeURIComponent(run.run)}` }, run.run), run.system, run.scenario,
    node("span", {}, tag(run.valid ? "good" : "bad", run.valid ? "valid" : "not valid"), run.emulated ? " " : null, run.emulated ? tag("emulated") : null),
    number(run.fps), number(run.period_ms), number(run.latency_ms), number(run.first_output_ms),
  ]))];
}

const shown = {};
function show(look) {
  for (const [name, draw] of Object.entries({ jobs, devices, queue, runs })) {
    const text = JSON.stringify(look[name]);
    if (text === shown[name]) continue;
    shown[name] = text;
    const place = document.getElementById(name);
    const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.job : null;
    const part = look[name];
    place.replaceChildren(...(part && part.error ? [node("div", { class: "note bad" }, part.error)] : draw(part)));
    for (const one of place.querySelectorAll("details")) one.open = open.has(one.dataset.key);
    if (focused) place.querySelector(`[data-job="${CSS.escape(focused)}"]`)?.focus();
  }
}

async function poll() {
  try {
    show(await (await fetch("/look")).json());
    state.textContent = "live, by asking every two seconds";
  } catch {
    state.textContent = "the dashboard has ended";
  }
  setTimeout(poll, 2000);
}

show(JSON.parse(document.getElementById("first").textContent));
if ("EventSource" in window) {
  const events = new EventSource("/events");
  events.onopen = () => { state.textContent = "live"; };
  events.onmessage = (message) => show(JSON.parse(message.data));
  events.onerror = () => {
    state.textContent = "the dashboard has ended, or is not reached; trying again";
    if (events.readyState === EventSource.CLOSED) poll();
  };
} else {
  poll();
}
