// Keeps a page up to date: asks for it again and replaces the parts marked data-live that differ. Pages work without.
"use strict";

const sent = new Map();  // what the server last sent of each part, by id
let wait, quiet;  // seconds between two looks: at least, and while a stream tells of changes
let timer = 0, last = performance.now(), stream = null;

function pace(body) {
  wait = Number(body.dataset.refresh || 0);
  quiet = Number(body.dataset.quiet || 0);
}
pace(document.body);

for (const part of document.querySelectorAll("[data-live]")) sent.set(part.id, part.innerHTML);

function replace(part, fresh) {
  const open = new Map([...part.querySelectorAll("details[id]")].map((d) => [d.id, d.open]));
  const focused = part.contains(document.activeElement) ? where(document.activeElement, part) : null;
  part.replaceChildren(...fresh.childNodes);
  for (const [id, is] of open) {
    const found = document.getElementById(id);
    if (found) found.open = is;
  }
  if (focused) [...part.querySelectorAll(focused.tag)][focused.at]?.focus({ preventScroll: true });
}

function where(element, part) {
  return { tag: element.tagName, at: [...part.querySelectorAll(element.tagName)].indexOf(element) };
}

async function update() {
  last = performance.now();
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.redirected || answer.status === 404) return location.reload();  // logged out, or gone
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const old = document.getElementById(part.id), text = part.innerHTML;
      if (old && sent.get(part.id) !== text) replace(old, part);
      sent.set(part.id, text);
    }
    pace(fresh.body);
    document.getElementById("stale").hidden = true;
  } catch {
    document.getElementById("stale").hidden = false;
  }
  schedule();
}

function schedule(news = false) {
  clearTimeout(timer);
  if (!wait || document.hidden) return;
  const due = stream?.readyState === EventSource.OPEN && !news ? Math.max(wait, quiet) : wait;
  timer = setTimeout(update, Math.max(last + 1000 * due - performance.now(), 100));
}

function listen() {
  stream?.close();
  stream = null;
  if (document.hidden || !document.body.dataset.events) return;
  stream = new EventSource(document.body.dataset.events);
  for (const kind of document.body.dataset.kinds.split(" ")) stream.addEventListener(kind, () => schedule(true));
}

document.addEventListener("visibilitychange", () => {
  listen();
  schedule(true);
});
listen();
schedule();

for (const button of document.querySelectorAll("[data-copy]")) {
  const text = document.getElementById(button.dataset.copy), label = button.textContent;
  button.hidden = false;
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(text);
    try {
      await navigator.clipboard.writeText(text.textContent);  // over TLS and on this machine alone
    } catch {
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 2000);
  });
}

// A link to a call or message of the reference opens it.
function unfold() {
  const found = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found && found.tagName === "DETAILS") found.open = true;
}
addEventListener("hashchange", unfold);
unfold();
