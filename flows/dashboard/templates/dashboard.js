"use strict";

// The server sends the parts of the page that changed, rendered and escaped, by the id of their element.
const source = new EventSource(document.body.dataset.events);
source.onmessage = (event) => {
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    const element = document.getElementById(id);
    // What is there already stays: an open frame keeps its place, and a selection its text.
    if (element && element.dataset.html !== html) {
      element.dataset.html = html;
      element.innerHTML = html;
    }
  }
};
source.addEventListener("ended", () => source.close());

document.addEventListener("click", async (event) => {
  const action = event.target.dataset && event.target.dataset.action;
  if (!action) return;
  event.target.disabled = true;
  const response = await fetch(`${location.pathname}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: "{}",
  });
  const answer = document.getElementById("answer");
  if (answer) answer.textContent = (await response.json()).message;
  if (!response.ok) event.target.disabled = false;
  else if (source.readyState === EventSource.CLOSED) location.reload();
});
