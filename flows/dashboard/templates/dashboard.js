"use strict";

// The server sends the parts of the page that changed, rendered and escaped, by the id of their element.
const address = document.body.dataset.events;
let source = null;
function listen() {
  source = new EventSource(address);
  source.onmessage = (event) => {
    for (const [id, html] of Object.entries(JSON.parse(event.data))) {
      const element = document.getElementById(id);
      // What is there already stays: an open frame keeps its place, and a selection its text.
      if (element && element.dataset.html !== html) {
        const marked = [...element.querySelectorAll("input:checked")].map((input) => input.value);
        element.dataset.html = html;
        element.innerHTML = html;
        for (const input of element.querySelectorAll("input")) input.checked = marked.includes(input.value);
      }
    }
  };
  source.addEventListener("message", () => redraw());
  source.addEventListener("ended", () => source.close());
}
// After the first paint, for which the server and this thread have work enough; a hidden page is never painted.
if (address && document.visibilityState === "hidden") listen();
else if (address) requestAnimationFrame(() => setTimeout(listen));

// Charts: the server draws the steps that were dragged over, from all points there.
const zoomed = new Map();

async function draw(figure) {
  const title = figure.dataset.title;
  const [from, to] = zoomed.get(title) || [-1e300, 1e300];
  const query = new URLSearchParams(location.search); // of a comparison: what is compared
  for (const [name, value] of Object.entries({ title, from, to })) query.set(name, value);
  const response = await fetch(`${location.pathname}/chart?${query}`);
  if (response.ok) figure.querySelector(".drawn").innerHTML = await response.text();
}

function redraw() {
  for (const figure of document.querySelectorAll("figure.zooms")) if (zoomed.has(figure.dataset.title)) draw(figure);
}

for (const svg of document.querySelectorAll("#curves figure svg[data-plot]")) {
  const figure = svg.closest("figure");
  const holder = document.createElement("div");
  const hint = document.createElement("p");
  figure.classList.add("zooms");
  figure.dataset.title = figure.querySelector("h3").textContent;
  holder.className = "drawn";
  hint.className = "legend soft";
  hint.textContent = "drag to zoom, double-click for all";
  svg.replaceWith(holder);
  holder.append(svg);
  holder.after(hint);
}

const stepAt = (svg, clientX) => {
  const [left, right, low, high] = svg.dataset.plot.split(",").map(Number);
  const box = svg.getBoundingClientRect();
  const x = ((clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  return low + (Math.min(Math.max(x, left), right) - left) / (right - left) * (high - low);
};

let drag = null;
document.addEventListener("pointerdown", (event) => {
  const svg = event.target.closest && event.target.closest("figure.zooms svg[data-plot]");
  if (!svg || event.button !== 0) return;
  const band = document.createElement("div");
  band.className = "band";
  svg.parentElement.append(band);
  drag = { svg, band, x: event.clientX };
});
document.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const box = drag.svg.parentElement.getBoundingClientRect();
  drag.band.style.left = `${Math.min(event.clientX, drag.x) - box.left}px`;
  drag.band.style.width = `${Math.abs(event.clientX - drag.x)}px`;
});
document.addEventListener("pointerup", (event) => {
  if (!drag) return;
  const { svg, band, x } = drag;
  drag = null;
  band.remove();
  const figure = svg.closest("figure.zooms");
  if (!figure || Math.abs(event.clientX - x) < 6) return;
  zoomed.set(figure.dataset.title, [stepAt(svg, x), stepAt(svg, event.clientX)].sort((a, b) => a - b));
  draw(figure);
});
document.addEventListener("dblclick", (event) => {
  const figure = event.target.closest && event.target.closest("figure.zooms");
  if (figure && zoomed.delete(figure.dataset.title)) draw(figure);
});

// Values below the pointer, read off the lines of a chart.
let shown = null;

function hide() {
  if (!shown) return;
  shown.box.remove();
  shown.line.remove();
  shown = null;
}

function valuesAt(svg, x) {
  const [top, bottom, high, low] = svg.dataset.scale.split(",").map(Number);
  const rows = [];
  for (const line of svg.querySelectorAll("polyline.line:not(.faint)")) {
    let nearest = null;
    for (const point of line.getAttribute("points").split(" ")) {
      const [px, py] = point.split(",").map(Number);
      if (!nearest || Math.abs(px - x) < Math.abs(nearest[0] - x)) nearest = [px, py];
    }
    if (!nearest) continue;
    const value = high - ((nearest[1] - top) / (bottom - top)) * (high - low);
    rows.push(`${line.querySelector("title").textContent}: ${Number(value.toPrecision(4))}`);
  }
  return rows;
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest && event.target.closest("svg[data-scale]");
  hide();
  if (!svg || drag) return;
  const frame = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / frame.width;
  const [left, right] = svg.dataset.plot.split(",").map(Number);
  const x = Math.min(Math.max((event.clientX - frame.left) * scale, left), right);
  const rows = valuesAt(svg, x);
  if (!rows.length) return;
  const [top, bottom] = svg.dataset.scale.split(",").map(Number);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ class: "pointer", x1: x, x2: x, y1: top, y2: bottom }))
    line.setAttribute(name, value);
  svg.append(line);
  const box = document.createElement("div");
  box.className = "hover";
  box.textContent = [`step ${Math.round(stepAt(svg, event.clientX)).toLocaleString("en")}`, ...rows].join("\n");
  const holder = svg.parentElement;
  if (getComputedStyle(holder).position === "static") holder.style.position = "relative";
  const place = holder.getBoundingClientRect();
  const at = event.clientX - place.left;
  if (at < place.width / 2) box.style.left = `${at + 12}px`;
  else box.style.right = `${place.width - at + 12}px`;
  holder.append(box);
  shown = { box, line };
});

const say = (text) => {
  const answer = document.getElementById("answer");
  if (answer) answer.textContent = text;
};

async function send(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const text = await response.text();
  try {
    return [response.ok, JSON.parse(text)];
  } catch {
    return [response.ok, { message: text }];
  }
}

document.addEventListener("click", async (event) => {
  const action = event.target.dataset && event.target.dataset.action;
  if (!action) return;
  event.target.disabled = true;
  if (action === "retry") say("waiting for the attempt before to end");
  const [ok, answer] = await send(`${location.pathname}/${action}`, {});
  say(answer.message);
  if (!ok) event.target.disabled = false;
  else if (source && source.readyState === EventSource.CLOSED) location.reload();
});

// Actions on a model: the server runs each as a command, and reports here what became of it.
const use = document.getElementById("use");

async function follow(name) {
  const button = use.querySelector(`[data-model="${name}"]`);
  const outcome = use.querySelector(`#about-${name} .outcome`);
  for (button.disabled = true; ; await new Promise((resolve) => setTimeout(resolve, 700))) {
    const response = await fetch(`${use.dataset.address}/actions`);
    const job = response.ok ? (await response.json())[name] : { state: "failed", message: "the page does not answer" };
    if (!job) break;
    outcome.textContent = job.message;
    outcome.classList.toggle("failed", job.state === "failed");
    if (job.state === "running") continue;
    if (job.state === "done" && job.page) location.assign(job.page);
    else if (job.state === "done") location.reload();
    break;
  }
  button.disabled = false;
}

if (use) {
  use.addEventListener("click", async (event) => {
    const name = event.target.dataset.model;
    if (!name) return;
    const outcome = use.querySelector(`#about-${name} .outcome`);
    event.target.disabled = true;
    outcome.textContent = "";
    outcome.classList.remove("failed");
    const [ok, answer] = await send(`${use.dataset.address}/${name}`, {});
    if (ok) return follow(name);
    outcome.textContent = answer.message;
    outcome.classList.add("failed");
    event.target.disabled = false;
  });
  for (const outcome of use.querySelectorAll('.outcome[data-state="running"]'))
    follow(outcome.closest(".use").querySelector("button").dataset.model);
}

const form = document.getElementById("change");
if (form) {
  const inputs = [...form.elements].filter((input) => input.name);
  const value = (input) => (input.type === "checkbox" ? String(input.checked) : input.value);
  const before = new Map(inputs.map((input) => [input.name, value(input)]));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    const settings = {};
    for (const input of inputs) {
      document.getElementById(`error-${input.name}`).textContent = "";
      input.removeAttribute("aria-invalid");
      if (value(input) !== before.get(input.name) || input.validity.badInput) settings[input.name] = value(input);
    }
    button.disabled = true;
    const [ok, answer] = await send(location.pathname, { settings });
    say(answer.message);
    for (const [key, message] of Object.entries(answer.fields || {})) {
      const input = inputs.find((other) => other.name === key);
      document.getElementById(`error-${key}`).textContent = message;
      input.setAttribute("aria-invalid", "true");
      for (let group = input.closest("details"); group; group = group.parentElement.closest("details")) group.open = true;
    }
    const first = form.querySelector("[aria-invalid]");
    if (first) first.focus();
    if (!ok) {
      button.disabled = false;
      return;
    }
    // The run has a page once the worker has begun it.
    while (!(await fetch(`/run/${answer.run_id}`)).ok) {
      const state = await fetch(`${location.pathname}/${answer.flow_run}`);
      const ended = state.ok ? (await state.json()).message : "";
      if (ended) {
        say(`it has not begun: ${ended}`);
        button.disabled = false;
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
    location.assign(`/run/${answer.run_id}`);
  });
}

// On a phone the drawing of a run is wider than the page: the step that runs, or that failed, comes first.
const drawing = document.getElementById("picture");
const current = drawing && drawing.querySelector(".step.running, .step.failed");
if (current) drawing.scrollLeft += current.getBoundingClientRect().left - drawing.getBoundingClientRect().left - 40;

// A family may be wider than the page: the model that the page is about comes first.
for (const box of document.querySelectorAll("#family .scroll")) {
  const self = box.querySelector(".shown");
  if (self) box.scrollLeft += self.getBoundingClientRect().left - box.getBoundingClientRect().left - box.clientWidth / 2;
}
